"""Groups in place of lost ones: which they are, and what is left of those."""

import numpy as np
import pytest
from fake_run import SIZE, FakeRun, pool_of, rolled
from rollout_fakes import ScriptedPool, key, trajectory_of
from toy_stream import EXACT, MEAN

from thundersync_jax import advantages
from thundersync_jax.errors import StreamError
from thundersync_jax.metrics.timing import RunProgress
from thundersync_jax.run.step import replacements, roll_out, run_step
from thundersync_jax.stream.schedule import RELEASES

BATCH = advantages.batch_mean_std()
# What the order of events must not change. How many gradients were streamed it may.
COUNTS = (
    *("kept_groups", "dropped_groups", "filtered_groups", "short_groups"),
    *("uniform_groups", "kept_members", "failed_members", "rewards", "reward_mean"),
    *("tokens", "denominator"),
)


def drawn(rng, groups):
    """Rewards of so many groups: mixed, all equal, with failures, or all failed."""
    rewards = rng.integers(0, 2, (groups, SIZE)).astype(object)
    for row in rewards:
        kind = rng.choice(["any", "uniform", "short", "failed"], p=[0.4, 0.3, 0.2, 0.1])
        if kind == "uniform":
            row[:] = int(rng.integers(0, 2))
        elif kind == "short":
            row[rng.permutation(SIZE)[: rng.integers(1, 3)]] = None
        elif kind == "failed":
            row[:] = None
    return rewards.tolist()


def survives(rewards, partial_groups):
    found = {reward for reward in rewards if reward is not None}
    return len(found) > 1 and (partial_groups == "keep" or None not in rewards)


def expected(rewards, first, bound, partial_groups, whole_batch):
    """Returns the groups that are opened, those that count, and advantages."""
    there = range(first + bound)
    alive = [g for g in there if survives(rewards[g], partial_groups)]
    batch = alive[:first]
    opened = batch[-1] + 1 if len(batch) == first else len(there)
    counted = {
        (group, member): rewards[group][member]
        for group in batch
        for member in range(SIZE)
        if rewards[group][member] is not None
    }
    gradient = np.zeros((len(there), SIZE))
    for (group, member), reward in counted.items():
        peers = [r for (g, _), r in counted.items() if whole_batch or g == group]
        scale = np.std(peers) + 1e-6 if whole_batch else 1.0
        gradient[group, member] = (reward - np.mean(peers)) / scale
    return opened, batch, gradient


def test_every_lost_group_is_replaced_once_up_to_the_bound():
    assert list(replacements(4, 3, lost=0, replaced=0)) == []
    assert list(replacements(4, 3, lost=2, replaced=0)) == [4, 5]
    assert list(replacements(4, 3, lost=2, replaced=1)) == [5]
    assert list(replacements(4, 3, lost=2, replaced=2)) == []
    assert list(replacements(4, 3, lost=7, replaced=2)) == [6]
    assert list(replacements(4, 3, lost=7, replaced=3)) == []
    assert list(replacements(4, 0, lost=4, replaced=0)) == []


@pytest.mark.parametrize("accumulator", ["plain", "exact"])
@pytest.mark.parametrize("partial_groups", ["drop", "keep"])
@pytest.mark.parametrize("estimator", [MEAN, BATCH], ids=["group", "batch"])
def test_finishing_order_decides_nothing(estimator, partial_groups, accumulator):
    """The batch is the lowest-numbered survivors, whoever finishes first."""
    reached = set()
    for seed in range(10):
        rng = np.random.default_rng(seed)
        first, bound = int(rng.integers(1, 4)), int(rng.integers(0, 5))
        rewards = drawn(rng, first + bound)
        opened, batch, gradient = expected(
            rewards, first, bound, partial_groups, estimator.scope == "batch"
        )
        reached.add((len(batch) == first, opened > first))
        seen = set()
        for release in RELEASES * 2:
            pool = ScriptedPool(rewards, rng)
            found, done = rolled(
                FakeRun(pool, first, bound),
                estimator=estimator,
                release=release,
                partial_groups=partial_groups,
                accumulator=accumulator,
                denominator="tokens",
                open_groups=int(rng.integers(1, 4)),
            )
            assert len(pool.arrivals) == opened * SIZE
            assert {arrival.group for arrival in pool.arrivals} == set(range(opened))
            assert sorted({group for group, _ in done.advantages}) == batch
            report = done.report
            lost = report.dropped_groups + report.filtered_groups
            assert report.kept_groups + lost == opened
            np.testing.assert_allclose(
                found * report.denominator, gradient, rtol=0, atol=EXACT
            )
            bits = found.tobytes() if accumulator == "exact" else b""
            seen.add((*(getattr(report, name) for name in COUNTS), bits))
        assert len(seen) == 1
    assert len(reached) == 4  # full or not, with replacements or without


@pytest.mark.parametrize("estimator", [MEAN, BATCH], ids=["group", "batch"])
@pytest.mark.parametrize("release", RELEASES)
def test_a_step_of_which_nothing_survives_has_no_gradient(release, estimator):
    """Empty micro-batch, empty step (THUDM/slime#1860)."""
    pool = pool_of([[1.0] * SIZE] * 4)
    gradient, done = rolled(
        FakeRun(pool, first=2), release=release, estimator=estimator
    )
    assert not np.any(gradient)
    assert done.report.gradient_norm == 0 and done.report.denominator == 1
    assert done.report.filtered_groups == 4  # as many again as the step began with
    assert done.report.kept_groups == done.report.tokens == 0
    assert done.advantages == {}


def test_members_sum_up_to_those_rolled_out():
    """Stream mode lost a group (thinking-machines-lab/tinker-cookbook#163)."""
    rewards = [[1, 0, 0, 0]] * 4 + [[1, 1, 1, 1], [1, 0, 1, 0]]
    pool = pool_of(rewards)
    _, done = rolled(FakeRun(pool, first=5, uniform_groups="drop"))
    assert (done.report.kept_members, done.report.filtered_groups) == (16, 1)
    assert len(done.trajectories) == 20
    _, done = rolled(FakeRun(pool, first=5))
    assert (done.report.kept_members, done.report.filtered_groups) == (20, 1)
    assert len(done.trajectories) == 24


@pytest.mark.parametrize("accumulator", ["plain", "exact"])
@pytest.mark.parametrize("release", RELEASES)
def test_a_lost_group_leaves_no_share_of_the_divisor(release, accumulator):
    """Group 0 all 1, 20 tokens; group 1 in its place, 4 tokens: .125, not .5/24."""
    run = FakeRun(pool_of([[1, 1, 1, 1], [1, 0, 0, 0]]), first=1, bound=1)
    scores = {0: [0.1, 0.2, 0.3, 0.4], 1: [2.0, 1.0, 1.0, 1.0]}

    def sample(trajectory, start, end):
        group, member = trajectory.key.group, trajectory.key.member
        score = np.zeros((run.groups, SIZE), np.float32)
        score[0, 0] = scores[group][member]
        return {"s": score}

    run.samples.whole = sample
    gradient, done = rolled(
        run, release=release, accumulator=accumulator, denominator="tokens"
    )
    tokens = sum(trajectory_of(key(m, 1), 1.0).action_tokens for m in range(SIZE))
    assert done.report.denominator == done.report.tokens == tokens
    np.testing.assert_allclose(gradient[0, 0], 0.75 / tokens, rtol=0, atol=EXACT)


def test_the_filter_looks_at_raw_rewards():
    """A length penalty made all-wrong groups survive (NVIDIA-NeMo/RL#2431): raw 0, 0,
    0, 0 is lost though shaped 0, 0, -.5, -.5; other raw rewards may shape alike."""
    rewards = [[0, 0, 0, 0], [1, 0.5, 1, 1]]
    pool = pool_of(rewards)
    run = FakeRun(pool, first=1)
    penalty = {0: [0, 0, 0.5, 0.5], 1: [0.5, 0, 0.5, 0.5]}
    run.samples.shaped_reward = lambda t: t.reward - penalty[t.key.group][t.key.member]
    gradient, done = rolled(run)
    assert done.advantages == {(1, member): 0.0 for member in range(SIZE)}
    assert not np.any(gradient)
    assert done.report.filtered_groups == 1
    assert done.report.reward_mean == 0.125  # of the shaped ones: 4 of .5, 2 of -.5


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("partial_groups", ["drop", "keep"])
def test_rollouts_alone_are_those_of_a_step(partial_groups, seed):
    rng = np.random.default_rng(seed)
    pool = ScriptedPool(drawn(rng, 5), rng)
    run = FakeRun(pool, first=2, bound=3)
    run.config.partial_groups = partial_groups
    _, done = rolled(run, partial_groups=partial_groups)
    arrived = {*pool.arrivals}
    pool.arrivals.clear()
    found, _ = roll_out(run, 1, 0)
    assert {*pool.arrivals} == arrived
    assert [t.key for t in found] == [t.key for t in done.trajectories]


@pytest.mark.parametrize("uniform_groups", ["keep", "drop"])
def test_nothing_is_replaced_unless_it_is_asked_for(uniform_groups):
    pool = pool_of([[1, 1, 1, 1], [1, 0, None, 0]])
    run = FakeRun(pool, first=2, uniform_groups=uniform_groups)
    _, done = rolled(run, partial_groups="drop")
    assert len(pool.arrivals) == 8
    assert done.report.filtered_groups == (uniform_groups == "drop")
    assert done.report.uniform_groups == (uniform_groups == "keep")


def test_every_group_has_the_baseline_of_its_prompt():
    run = FakeRun(pool_of([[1, 1, 1, 1], [1, 0, 0, 1], [1, 0, 1, 1]]), first=2)
    run.group_baseline = lambda step, group: (step + group) / 8
    _, done = rolled(run, step=3, estimator=advantages.fixed_baseline())
    assert set(done.advantages) == {(g, m) for g in (1, 2) for m in range(SIZE)}
    for (group, member), advantage in done.advantages.items():
        reward = 0 if (group, member) in ((1, 1), (1, 2), (2, 1)) else 1
        assert advantage == reward - (3 + group) / 8


FAILING = [[None, None, 1, None], [1, 0, 1, 0]]  # 3 of 4, then 3 of 8 members


def test_progress_counts_what_was_added():
    whole = RunProgress(steps=1)
    counts = whole.begin(SIZE)
    run = FakeRun(pool_of(FAILING), first=1, bound=1)
    stream, totals = run.new_stream(), []
    run_step(
        run, stream, run.train_jobs(1), 0, counts, lambda now: totals.append(now.total)
    )
    whole.end(counts)
    assert totals[0] == 4 and totals[-1] == 8
    assert (counts.verified, counts.failed) == (5, 3)
    assert str(whole) == "1/1 steps, 8/8 trajectories"


def test_the_limit_of_failures_is_of_all_members():
    rolled(FakeRun(pool_of(FAILING), first=1, bound=1, share=3 / 8))
    with pytest.raises(StreamError, match="3 of 8 trajectories failed.*0.37 allows"):
        rolled(FakeRun(pool_of(FAILING), first=1, bound=1, share=0.37))
