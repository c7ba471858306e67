"""Many attempts at once: outcomes, order, retries, and what a batch takes."""

import asyncio
import itertools
import time

import numpy as np
import pytest
from rollout_fakes import (
    ANSWER,
    CALL,
    PATIENCE_SECS,
    FakeEngine,
    FakeEnvironment,
    after,
    drain,
    jobs,
    key,
    limits,
    never,
    of_kind,
    open_pool,
    outcomes,
    refuse,
    roll,
)

from thundersync_jax.chat.byte_level import END
from thundersync_jax.rollout.events import Completed, Failed, Job, Rewarded
from thundersync_jax.rollout.pool import RolloutPool
from thundersync_jax.types import StopReason


def test_every_member_completes_then_has_one_outcome():
    with open_pool(lambda m: FakeEnvironment(reward=after(0.01 * (m % 3), m))) as pool:
        events = roll(pool, 12)
        assert pool.next_event(0.0) is None
    kinds = {}
    for event in events:
        kinds.setdefault(event.key.member, []).append(type(event))
    assert kinds == {member: [Completed, Rewarded] for member in range(12)}
    for member, outcome in outcomes(events).items():
        assert outcome.reward == outcome.trajectory.reward == member
        times = outcome.trajectory.times
        order = ["queued", "started", "completed", "verified"]
        assert sorted(times, key=times.get) == sorted(order, key=order.index)


def sample_from_seed(request, turn):
    words = np.random.default_rng(request.seed).integers(65, 91, 4)
    return [CALL[0], *words, END] if turn < 2 else [*words, END]


def test_sampled_ids_depend_on_neither_order_nor_slots_nor_attempt():
    def rolled(slots, delay, fail_first=()):
        tried = set()

        def environment(member):
            broken = member in fail_first and member not in tried
            tried.add(member)
            step = refuse if broken else after(delay(member), None)
            return FakeEnvironment(step=step)

        engine = FakeEngine(sample_from_seed)
        with open_pool(environment, engine, slots=slots, attempts=2) as pool:
            found = outcomes(roll(pool, 12))
        return {member: e.trajectory.ids.tolist() for member, e in found.items()}

    expected = rolled(8, lambda member: 0.0)
    assert len({tuple(ids) for ids in expected.values()}) == 12
    assert rolled(4, lambda member: 0.01 * (7 * member % 5)) == expected
    assert rolled(12, lambda member: 0.0, fail_first=(2, 5)) == expected


def test_no_more_members_than_slots_have_an_environment_or_a_session():
    """32 at once overloaded the host (NovaSky-AI/SkyRL#9)."""
    alive, peak = set(), []

    class Counted(FakeEnvironment):
        async def start(self, task):
            alive.add(task)
            peak.append(len(alive))
            await asyncio.sleep(0.002)
            self._member = task
            return "2+5"

        async def step(self, action):
            await asyncio.sleep(0.002)
            alive.discard(self._member)
            return await super().step(action)

    engine = FakeEngine()
    with open_pool(lambda m: Counted(), engine, slots=8) as pool:
        assert len(of_kind(roll(pool, 32), Rewarded)) == 32
    assert max(peak) == 8
    assert engine.peak_sessions <= 8
    assert len(engine.threads) == 1


def test_verification_holds_no_slot_and_has_its_own_limit():
    released = asyncio.Event()
    running, peak = [], []

    async def verify():
        running.append(1)
        peak.append(len(running))
        await released.wait()
        running.pop()
        return 1.0

    with open_pool(
        lambda m: FakeEnvironment(reward=verify), slots=4, verify_concurrency=3
    ) as pool:
        pool.start(jobs(9), 0)
        # All tokens are final while not a single verdict is in.
        for _ in range(9):
            assert isinstance(pool.next_event(PATIENCE_SECS), Completed)
        pool._loop.call_soon_threadsafe(released.set)
        assert len(of_kind(drain(pool), Rewarded)) == 9
    assert max(peak) == 3


def test_one_failing_environment_costs_one_member():
    """8 rollouts, number 3 raises ConnectionError (NovaSky-AI/SkyRL#1613)."""
    with open_pool(lambda m: FakeEnvironment(step=refuse if m == 3 else None)) as pool:
        events = roll(pool, 8)
    assert len(of_kind(events, Rewarded)) == 7
    (failed,) = of_kind(events, Failed)
    assert failed.key.member == 3
    assert failed.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert failed.reason == "step() of turn 0 raised ConnectionError: refused"


@pytest.mark.parametrize("where", ["make", "start", "step"])
def test_environment_that_always_raises_is_tried_exactly_as_often_as_allowed(where):
    """Ten thousand retries (invergent-ai/surogate#177)."""
    made = []

    def environment(member):
        made.append(member)
        if where == "make":
            raise ConnectionError("refused")
        return FakeEnvironment(**{where: refuse})

    with open_pool(environment, attempts=3) as pool:
        (event,) = roll(pool, 1)
    assert len(made) == 3
    assert event.key.attempt == 2
    assert event.reason.endswith("ConnectionError: refused (attempt 3 of 3)")


def test_retry_has_a_fresh_environment_and_none_of_the_first_tokens():
    environments = []

    def environment(member):
        broken = not environments
        environments.append(FakeEnvironment(step=refuse if broken else None))
        return environments[-1]

    engine = FakeEngine(lambda request, turn: [65 + len(environments), END])
    with open_pool(environment, engine, attempts=2) as pool:
        completed, rewarded = roll(pool, 1)
    assert len(environments) == 2
    assert rewarded.key.attempt == 1
    trajectory = completed.trajectory
    assert trajectory.ids[trajectory.loss_mask].tolist() == [67, END]
    first, second = engine.requests
    assert first.seed == second.seed
    assert first.session != second.session


@pytest.mark.parametrize(
    "reward, stop_reason",
    [
        (None, StopReason.INVALID_REWARD),
        (refuse, StopReason.ENVIRONMENT_ERROR),
        (never, StopReason.TIMEOUT),
    ],
)
def test_failed_verdict_is_final_since_its_tokens_are_out(reward, stop_reason):
    with open_pool(
        lambda m: FakeEnvironment(reward=reward), attempts=3, verify_timeout_secs=0.3
    ) as pool:
        events = roll(pool, 1)
    assert [type(event) for event in events] == [Completed, Failed]
    assert events[1].stop_reason is stop_reason
    assert "verify()" in events[1].reason
    assert events[1].trajectory.reward is None


@pytest.mark.parametrize(
    "rewards, invalid",
    [
        ([None, -1, -1, None], [0, 3]),  # huggingface/trl#6427
        ([float("inf"), 0, 0, 0], [0]),  # modelscope/ms-swift#8123
        ([1, None, 0, 1], [1]),
    ],
)
def test_missing_reward_is_a_failed_member_and_never_zero(rewards, invalid):
    """A default fill turns a missing verdict into a good score."""
    with open_pool(lambda m: FakeEnvironment(reward=rewards[m])) as pool:
        found = outcomes(roll(pool, 4))
    failed = [m for m, event in found.items() if isinstance(event, Failed)]
    assert sorted(failed) == invalid
    assert all(found[m].stop_reason is StopReason.INVALID_REWARD for m in invalid)
    for member in set(found) - set(invalid):
        assert found[member].reward == rewards[member]


def test_refused_request_fails_one_member_without_a_retry():
    class Strict(FakeEngine):
        def submit(self, request):
            if request.seed[4] == 2:
                raise ValueError("too long for a bucket")
            super().submit(request)

    engine = Strict()
    with open_pool(engine=engine, attempts=3) as pool:
        found = outcomes(roll(pool, 4))
    assert found.pop(2).reason == (
        "decoding of turn 0: ValueError: too long for a bucket (attempt 1 of 3)"
    )
    assert all(isinstance(event, Rewarded) for event in found.values())


def test_one_batch_at_a_time_of_distinct_known_members():
    with open_pool(lambda m: FakeEnvironment(step=never)) as pool:
        pool.start([], 0)
        assert pool.outstanding == 0
        with pytest.raises(ValueError, match="member 1.*every member once"):
            pool.start(jobs(2) + jobs(2)[1:], 0)
        with pytest.raises(ValueError, match="evaluate"):
            pool.start([Job(key()._replace(phase="exam"), None)], 0)
        pool.start(jobs(2), 0)
        with pytest.raises(ValueError, match="2 members"):
            pool.start(jobs(2, step=1), 0)
        with pytest.raises(ValueError, match="2 members"):
            pool.update(None, 1)
    with pytest.raises(RuntimeError, match="closed"):
        pool.next_event(0.0)
    with pytest.raises(ValueError, match="128.*64"):
        RolloutPool(
            FakeEngine(),
            None,
            limits(context_tokens=128, prefill_buckets=(128,), gradient_buckets=(128,)),
            0,
        )


def test_update_follows_the_release_of_every_session():
    engine = FakeEngine()
    with open_pool(
        lambda m: FakeEnvironment(step=never if m == 3 else None),
        engine,
        step_timeout_secs=0.5,
    ) as pool:
        for version in range(2):
            found = outcomes(roll(pool, 4, step=version, policy_version=version))
            assert found[0].trajectory.policy_version == version
            assert found[3].stop_reason is StopReason.TIMEOUT
            pool.update(None, version + 1)
        # A batch that names another version than the engine's trains nothing.
        found = outcomes(roll(pool, 1, step=2, policy_version=1))
        assert "version 2" in found[0].reason and "version 1" in found[0].reason
    assert len(engine.threads) == 1


def test_spans_cover_decoding_tools_and_verification():
    spans = []
    engine = FakeEngine(lambda request, turn: CALL if turn == 0 else ANSWER)
    with open_pool(
        lambda m: FakeEnvironment(reward=after(0.02, 1.0)), engine, spans.append
    ) as pool:
        roll(pool, 2)
    for member in range(2):
        mine = [span for span in spans if span.lane == f"g0m{member}"]
        assert [(span.track, span.name) for span in mine] == [
            ("rollout", "start"),
            ("rollout", "decode"),
            ("rollout", "tool"),
            ("rollout", "decode"),
            ("rollout", "tool"),
            ("verify", "verify"),
        ]
        for span, following in itertools.pairwise(mine):
            assert span.start_secs <= span.end_secs <= following.start_secs
        assert mine[-1].end_secs - mine[-1].start_secs >= 0.015


def test_added_members_are_as_good_as_started_ones():
    def rolled(started, added):
        engine = FakeEngine(sample_from_seed)
        with open_pool(engine=engine, slots=4) as pool:
            pool.start(jobs(started), 0)
            events = [pool.next_event(PATIENCE_SECS) for _ in range(2 * started)]
            assert pool.outstanding == 0 and pool.next_event(0.0) is None
            pool.add(jobs(added, first=started), 0)
            assert pool.outstanding == added
            pool.add([], 0)
            found = outcomes(events + drain(pool))
        return {member: e.trajectory.ids.tolist() for member, e in found.items()}

    expected = rolled(12, 0)
    assert len(expected) == 12
    assert rolled(1, 11) == rolled(7, 5) == expected


def test_a_batch_grows_while_it_runs():
    asked = []
    with open_pool(lambda m: asked.append(m) or FakeEnvironment(), slots=4) as pool:
        pool.start(jobs(5), 0)
        events, grown = [], 5
        while pool.outstanding:
            events.append(pool.next_event(PATIENCE_SECS))
            if isinstance(events[-1], Rewarded) and grown < 11:
                pool.add(jobs(2, first=grown), 0)
                grown += 2
        assert len(of_kind(events, Rewarded)) == len(outcomes(events)) == 11
    assert asked == list(range(11))  # in turn, behind those that wait already


def test_only_new_members_of_its_own_policy_version_join_a_batch():
    with open_pool(lambda m: FakeEnvironment(step=never if m == 1 else None)) as pool:
        with pytest.raises(ValueError, match="none runs"):
            pool.add(jobs(1), 0)
        pool.start(jobs(2), 0)
        for _ in range(2):
            pool.next_event(PATIENCE_SECS)  # member 0 is done, and known still
        for again in (jobs(1), jobs(1, first=1), jobs(1, first=2) * 2):
            with pytest.raises(ValueError, match="every member once"):
                pool.add(again, 0)
        with pytest.raises(ValueError, match="exam.*evaluate"):
            pool.add([Job(key(7)._replace(phase="exam"), None)], 0)
        with pytest.raises(ValueError, match="version 1 .*the running one has 0"):
            pool.add(jobs(1, first=2), 1)
        assert pool.outstanding == 1
        pool.add(jobs(1, first=2), 0)
        assert pool.outstanding == 2
        with pytest.raises(ValueError, match="member 0.*every member once"):
            pool.add(jobs(1), 0)
        pool.cancel()
        drain(pool)
        pool.update(None, 0)
        with pytest.raises(ValueError, match="none runs"):
            pool.add(jobs(1, first=3), 0)
        # What an earlier batch had is new in the next.
        assert len(of_kind(roll(pool, 1), Rewarded)) == 1


def test_the_engine_compiles_before_a_deadline_runs():
    told = []

    class Compiling(FakeEngine):
        def compile(self):
            time.sleep(0.5)  # longer than any deadline of the step
            told.append("compiled")

        def submit(self, request):
            told.append("asked")
            super().submit(request)

    deadlines = {"trajectory_timeout_secs": 0.4, "step_timeout_secs": 0.4}
    with open_pool(engine=Compiling(), **deadlines) as pool:
        pool.compile()
        assert len(of_kind(roll(pool, 2), Rewarded)) == 2
    assert told[0] == "compiled" and told.count("compiled") == 1
