"""Members in place of failed ones: which they are, and that no order decides it."""

import dataclasses
import random

import numpy as np
import pytest
from fake_run import SIZE, FakeRun, pool_of, rolled
from rollout_fakes import (
    FakeEngine,
    FakeEnvironment,
    ScriptedPool,
    limits,
    never,
    trajectory_of,
)
from toy_stream import EXACT, MEAN
from toy_stream import weighted as toy

from thundersync_jax import GradientStream, advantages
from thundersync_jax.errors import InfrastructureFault, StreamError
from thundersync_jax.measure.replay import interleaved, replay
from thundersync_jax.metrics.timing import RunProgress
from thundersync_jax.rollout.pool import RolloutPool
from thundersync_jax.run.step import roll_out, run_step
from thundersync_jax.stream.schedule import RELEASES
from thundersync_jax.stream.schedule.turns import Turns

BATCH = advantages.batch_mean_std()
COUNTS = (
    *("kept_groups", "dropped_groups", "filtered_groups", "short_groups"),
    *("kept_members", "failed_members", "replaced_members", "rewards", "reward_mean"),
    *("tokens", "denominator"),
)


def drawn(rng, groups, members):
    """Rewards of so many groups; about every fourth member fails."""
    rewards = rng.integers(0, 2, (groups, members)).astype(object)
    rewards[rng.random((groups, members)) < rng.choice([0.1, 0.3, 0.6])] = None
    return rewards.tolist()


def opened(rewards, spares):
    """How many members a group opens: the least n that its failures do not raise."""
    size = SIZE
    while (failed := rewards[:size].count(None)) and size < SIZE + min(spares, failed):
        size = SIZE + min(spares, failed)
    return size


def expected(rewards, spares, partial_groups, whole_batch):
    """The members of all groups that count, with their advantages."""
    counted = {}
    for group, row in enumerate(rewards):
        there = row[: opened(row, spares)]
        failed = there.count(None)
        whole = failed <= spares or partial_groups == "keep"
        if whole and failed < len(there):
            counted |= {(group, i): r for i, r in enumerate(there) if r is not None}
    found = {}
    for (group, member), reward in counted.items():
        peers = [r for (g, _), r in counted.items() if whole_batch or g == group]
        scale = np.std(peers) + 1e-6 if whole_batch else 1.0
        found[group, member] = (reward - np.mean(peers)) / scale
    return found


@pytest.mark.parametrize("accumulator", ["plain", "exact"])
@pytest.mark.parametrize("partial_groups", ["drop", "keep"])
@pytest.mark.parametrize("estimator", [MEAN, BATCH], ids=["group", "batch"])
def test_finishing_order_decides_nothing(estimator, partial_groups, accumulator):
    """Which members are rolled out and count follows from outcomes alone."""
    full = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        groups, spares = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        rewards = drawn(rng, groups, SIZE + spares)
        whole_batch = estimator.scope == "batch"
        advantages_due = expected(rewards, spares, partial_groups, whole_batch)
        begun = [opened(row, spares) for row in rewards]
        full += sum(n > SIZE for n in begun)
        seen = set()
        for release in RELEASES * 2:
            pool = ScriptedPool(rewards, rng)
            run = FakeRun(pool, groups, uniform_groups="keep", spares=spares)
            found, done = rolled(
                run,
                estimator=estimator,
                release=release,
                partial_groups=partial_groups,
                accumulator=accumulator,
                denominator="tokens",
                open_groups=int(rng.integers(1, 4)),
            )
            assert sorted(k[1:3] for k in pool.arrivals) == [
                (group, member)
                for group in range(groups)
                for member in range(begun[group])
            ]
            assert done.advantages.keys() == advantages_due.keys()
            for place, advantage in advantages_due.items():
                found_there = found[place] * done.report.denominator
                np.testing.assert_allclose(found_there, advantage, rtol=0, atol=EXACT)
            assert np.count_nonzero(found) <= len(advantages_due)
            replaced = sum(n - SIZE for n in begun)
            assert done.report.replaced_members == replaced
            bits = found.tobytes() if accumulator == "exact" else b""
            seen.add((*(getattr(done.report, name) for name in COUNTS), bits))
        assert len(seen) == 1
    assert full > 10


def test_a_group_whose_failures_were_replaced_is_whole():
    rewards = [[1, None, 0, None, 1, 0], [1, None, None, None, 0, 1]]
    for partial_groups, kept in (("drop", {0}), ("keep", {0, 1})):
        run = FakeRun(pool_of(rewards), 2, uniform_groups="keep", spares=2)
        _, done = rolled(run, partial_groups=partial_groups)
        assert {group for group, _ in done.advantages} == kept
        assert len([place for place in done.advantages if place[0] == 0]) == SIZE
        report = done.report
        assert (report.failed_members, report.replaced_members) == (5, 4)
        assert report.short_groups == (1 in kept)
    run = FakeRun(pool_of(rewards[:1]), 1, uniform_groups="keep", spares=2)
    rolled(run, partial_groups="fail")
    run = FakeRun(pool_of(rewards[1:]), 1, uniform_groups="keep", spares=2)
    with pytest.raises(StreamError, match=r"partial_groups is 'fail'.*too slow"):
        rolled(run, partial_groups="fail")


def test_lost_groups_are_replaced_where_spare_members_do_not_suffice():
    rewards = [[None, None, 1, 0, 1], [1, None, 0, 0, 1], [1, 0, 0, 0, None]]
    for seed in range(6):
        pool = ScriptedPool(rewards, np.random.default_rng(seed))
        _, done = rolled(FakeRun(pool, 2, bound=1, spares=1))
        assert {group for group, _ in done.advantages} == {1, 2}
        assert done.report.replaced_members == 2


@pytest.mark.parametrize("seed", range(4))
def test_rollouts_alone_are_those_of_a_step(seed):
    rng = np.random.default_rng(seed)
    pool = ScriptedPool(drawn(rng, 5, SIZE + 2), rng)
    run = FakeRun(pool, first=2, bound=3, spares=2)
    _, done = rolled(run)
    arrived = {*pool.arrivals}
    pool.arrivals.clear()
    found, _ = roll_out(run, 1, 0)
    assert {*pool.arrivals} == arrived
    assert [t.key for t in found] == [t.key for t in done.trajectories]


def test_progress_counts_spare_members():
    whole = RunProgress(steps=1)
    counts = whole.begin(SIZE)
    rewards = [[1, None, 0, 1, None, 1]]
    run = FakeRun(pool_of(rewards), 1, uniform_groups="keep", spares=2)
    run_step(run, run.new_stream(), run.train_jobs(1), 0, counts)
    whole.end(counts)
    assert str(whole) == "1/1 steps, 6/6 trajectories"


def test_faults_leave_nearly_all_groups_whole():
    """5 % of all moves fail, and nothing is tried again: 2 spare members of 8."""
    rng = random.Random(0)

    async def now_and_then():
        if rng.random() < 0.05:
            raise InfrastructureFault("now and then")

    groups = 60
    for spares, least in ((0, 0), (2, 0.9)):
        with RolloutPool(
            FakeEngine(),
            lambda context: FakeEnvironment(
                step=now_and_then, reward=context.key.member % 2
            ),
            limits(slots=64),
            seed=0,
        ) as pool:
            run = FakeRun(pool, groups, uniform_groups="keep", spares=spares)
            _, done = rolled(run)
        assert done.report.kept_groups >= least * groups
        if not spares:
            assert done.report.kept_groups < 0.93 * groups
        else:
            assert done.report.kept_members == done.report.kept_groups * SIZE


def test_what_the_deadline_costs_is_not_replaced():
    made = []

    def environment(context):
        made.append(context.key.member)
        return FakeEnvironment(step=never if context.key.member == 2 else None)

    with RolloutPool(
        FakeEngine(), environment, limits(step_timeout_secs=0.5), seed=0
    ) as pool:
        run = FakeRun(pool, 1, uniform_groups="keep", spares=2)
        _, done = rolled(run, partial_groups="keep")
    assert sorted(made) == [0, 1, 2, 3] and done.report.short_groups == 1


@pytest.mark.parametrize("seed", range(4))
def test_replayed_trajectories_give_the_same_gradient(seed):
    """In any order, those with a failed member's tokens and those without."""
    rng = np.random.default_rng(seed)
    run = FakeRun(
        ScriptedPool(drawn(rng, 4, SIZE + 2), rng), 4, uniform_groups="keep", spares=2
    )
    run.config.rollout.group_size = SIZE
    found, done = rolled(run, partial_groups="keep")
    own = run.new_stream
    trajectories = [t for t in done.trajectories if t.reward is not None]
    for failed in done.failures[::2]:
        trajectory = trajectory_of(failed.key, None)
        reason = {"stop_reason": failed.stop_reason}
        trajectories.append(dataclasses.replace(trajectory, **reason))
    run.new_stream = lambda params, version, release, rows, accumulator: own(
        release=release, partial_groups="keep"
    )
    for release in RELEASES * 2:
        events = interleaved(trajectories, rng)
        again = replay(run, None, events, release)
        assert again.advantages == done.advantages
        np.testing.assert_allclose(again.gradient["x"], found, rtol=0, atol=EXACT)


def test_a_spare_member_has_what_turns_need():
    """Its sum is a new one, and the failed one's sums join nothing."""
    turns = Turns(places=2, drop_partial=True)
    turns.roster.open_group("a", 1, spares=1)
    turns.turn("a", 0, bucket=8)
    assert turns.next_call({0}).item.member == 0
    assert turns.fail("a", 0) is None
    (fold,) = turns.folds()
    assert (fold.member, fold.kept) == (0, False)
    assert turns.roster.replaced_by("a", 0) == 1
    turns.turn("a", 1, bucket=8)
    assert turns.next_call({0}).item.member == 1
    assert turns.complete("a", 1).verdict == "kept"
    while (call := turns.next_call({0})) is not None:
        assert call.item.member == 1
    (fold,) = turns.folds()
    assert (fold.member, fold.kept) == (1, True)


def test_a_stream_says_who_comes_in_place_of_whom():
    params = {"x": np.zeros((1, 3), np.float32)}
    stream = GradientStream(toy, params, estimator=MEAN)
    stream.open_group("a", 2, spares=1)
    assert stream.fail("a", 1, "first") == 2
    assert stream.fail("a", 2, "second") is None
    assert stream.lost_groups == ["a"]
    stream.open_group("b", 2, spares=1)
    assert stream.fail("b", 0, "late", replace=False) is None
    assert stream.fail("b", 1, "late") is None  # dropped already
    with pytest.raises(ValueError, match=r"spares=-1; expected a whole number >= 0"):
        stream.open_group("c", 2, spares=-1)
