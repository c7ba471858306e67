"""Groups in place of lost ones, while rollouts take their time."""

import asyncio
import random

import echo_task
import jax
import numpy as np
import pytest
from fake_run import SIZE, FakeRun, rolled
from rollout_fakes import FakeEngine, FakeEnvironment, after, key, limits, never
from toy_stream import EXACT

from thundersync_jax.rollout.pool import RolloutPool
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import run_step
from thundersync_jax.stream.schedule import RELEASES

pytestmark = pytest.mark.usefixtures("quick_programs")


def test_threads_decide_nothing_either():
    """Rollouts in their own threads, whose verdicts take random times."""
    rewards = [[1, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 0], [None] * 4, [1, 0, 0, 0]]
    rng = np.random.default_rng(0)

    def environment(context):
        reward = rewards[context.key.group][context.key.member]
        return FakeEnvironment(reward=after(0.03 * rng.random(), reward))

    for release in RELEASES * 2:
        with RolloutPool(FakeEngine(), environment, limits(slots=4), seed=0) as pool:
            gradient, done = rolled(
                FakeRun(pool, first=2, bound=4), release=release, denominator="groups"
            )
        assert {group for group, _ in done.advantages} == {1, 4}
        mean = np.array([[0.5, -0.5, -0.5, 0.5], [0.75, -0.25, -0.25, -0.25]])
        np.testing.assert_allclose(gradient[[1, 4]], mean / 2, rtol=0, atol=EXACT)
        assert not np.any(gradient[[0, 2, 3, 5]])
        assert (done.report.filtered_groups, done.report.dropped_groups) == (2, 1)
        assert len(done.trajectories) == 20 and len(done.failures) == 4


def test_a_lost_group_is_replaced_while_others_still_run():
    """Group 1 cannot end before group 2, which replaces group 0, has begun."""
    begun = asyncio.Event()

    def environment(context):
        async def step():
            if context.key.group == 2:
                begun.set()
            elif context.key.group == 1:
                await begun.wait()

        right = context.key.group == 0 or context.key.member == 0
        return FakeEnvironment(step=step, reward=float(right))

    with RolloutPool(FakeEngine(), environment, limits(), seed=0) as pool:
        _, done = rolled(FakeRun(pool, first=2))
    assert {group for group, _ in done.advantages} == {1, 2}


def test_what_the_deadline_costs_is_not_replaced():
    made = []

    def environment(context):
        made.append(context.key.group)
        late = context.key.group == 2 and context.key.member == 3
        reward = float(context.key.group > 0 and context.key.member == 0)
        return FakeEnvironment(step=never if late else None, reward=reward)

    with RolloutPool(
        FakeEngine(), environment, limits(step_timeout_secs=1.0), seed=0
    ) as pool:
        _, done = rolled(FakeRun(pool, first=2, bound=4))
    assert sorted(made) == [0] * 4 + [1] * 4 + [2] * 4  # 2 in place of 0, none of 2
    assert {group for group, _ in done.advantages} == {1}
    assert [failed.reason for failed in done.failures] == [
        "step deadline of 1 s passed during step() of turn 0"
    ]


def test_a_step_records_its_own_members_alone():
    """The first rollout of the next group was counted in this step
    (PrimeIntellect-ai/prime-rl#3013): every arrival is in the step that began it."""
    rewards = {1: [[1, 1, 1, 1], [1, 0, 0, 0], [0, 1, 1, 0]], 2: [[1, 0, 0, 0]] * 2}
    rng = np.random.default_rng(0)
    arrived = []

    def environment(context):
        async def verify():
            await after(0.02 * rng.random(), None)()
            arrived.append(context.key)
            return rewards[context.key.step][context.key.group][context.key.member]

        return FakeEnvironment(reward=verify)

    with RolloutPool(FakeEngine(), environment, limits(), seed=0) as pool:
        run = FakeRun(pool, first=2, bound=1)
        recorded = [rolled(run, step)[1] for step in (1, 2)]
        with pytest.raises(ValueError, match="step 3 come with jobs of step 4"):
            mixed = run.train_jobs(3) + run.train_jobs(4)
            run_step(run, run.new_stream(), mixed, 0)
    for step, groups in ((1, 3), (2, 2)):
        keys = [trajectory.key for trajectory in recorded[step - 1].trajectories]
        assert keys == [key(m, g, step) for g in range(groups) for m in range(SIZE)]
        assert set(recorded[step - 1].rewarded_secs) == {k[1:3] for k in keys}
    assert len(arrived) == 20


class Judged(echo_task.Echo):
    """Its verdict follows from what was sampled, for some words not even from that."""

    async def start(self, task):
        self.said = ""
        return await super().start(task)

    async def step(self, action):
        self.said += action.kind + action.text
        return await super().step(action)

    async def verify(self):
        await asyncio.sleep(0.02 * random.random())
        hopeless = self.word < "d"
        return 0.0 if hopeless else float(sum(map(ord, self.said)) % 2)


def test_release_rules_choose_the_same_groups_of_a_run(tmp_path):
    """And the same bits with exact sums, though verdicts take random times."""
    config = echo_task.small(
        warm_start_steps=0,
        **{
            "accumulator": "exact",
            "uniform_groups": "replace",
            "rollout.cut_actions": "run",  # nobody taught it to end an action
        },
    )
    found = []
    with Run(config, tmp_path, lambda env, seed: echo_task.tasks(Judged)) as run:
        params = run.initial_params()
        for release in RELEASES:
            stream = run.new_stream(params, 0, release)
            done = run_step(run, stream, run.train_jobs(1), 0)
            ids = {t.key: t.ids.tolist() for t in done.trajectories}
            bits = [leaf.tobytes() for leaf in jax.tree.leaves(done.gradient)]
            found.append((ids, done.advantages, bits))
        words = [run.task(1, group) for group in range(8)]
    assert found[0] == found[1] == found[2]
    ids, advantages_found, bits = found[0]
    assert {key.group for key in ids} > {0, 1, 2, 3}
    assert all(words[group] >= "d" for group, _ in advantages_found)
    assert len({group for group, _ in advantages_found}) == 4
    assert len(set(words)) == 8
