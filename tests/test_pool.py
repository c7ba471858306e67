"""Many attempts at once: outcomes, order, deadlines, retries, and how things die."""

import asyncio
import contextlib
import itertools
import signal
import threading
import time
import traceback

import numpy as np
import pytest
from rollout_fakes import (
    ANSWER,
    CALL,
    FakeEngine,
    FakeEnvironment,
    key,
    limits,
    never,
    refuse,
)

from thundersync_jax.rollout.pool import Completed, Failed, Job, Rewarded, RolloutPool
from thundersync_jax.rollout.tokenizer import END
from thundersync_jax.types import StopReason

PATIENCE_SECS = 20.0  # for an event that must come; never waited for in full


def jobs(count, step=0):
    return [Job(key(member, step=step), member) for member in range(count)]


@contextlib.contextmanager
def open_pool(
    environment=None, engine=None, on_span=None, blocked_secs=10.0, **changes
):
    """A pool whose member m of group 0 gets `environment(m)`."""
    environment = environment or (lambda member: FakeEnvironment())
    with RolloutPool(
        engine or FakeEngine(),
        lambda trajectory_key: environment(trajectory_key.member),
        limits(**changes),
        seed=3,
        on_span=on_span,
        blocked_secs=blocked_secs,
    ) as pool:
        yield pool
    assert not pool._driver._thread.is_alive()


def drain(pool):
    """Returns all events up to the last outcome."""
    events = []
    while pool.outstanding:
        event = pool.next_event(PATIENCE_SECS)
        assert event is not None, f"{pool.outstanding} members say nothing"
        events.append(event)
    return events


def roll(pool, count, step=0, policy_version=0):
    pool.start(jobs(count, step), policy_version)
    return drain(pool)


def outcomes(events):
    """Returns the outcome of every member; there may be only one."""
    found = {}
    for event in events:
        if not isinstance(event, Completed):
            assert event.key.member not in found
            found[event.key.member] = event
    return found


def of_kind(events, kind):
    return [event for event in events if isinstance(event, kind)]


def after(secs, value):
    async def wait():
        await asyncio.sleep(secs)
        return value

    return wait


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


def test_straggler_ends_with_the_step_deadline_and_is_named():
    """7 take .1 s, one never ends, deadline 2 s (NVIDIA-NeMo/RL#3238)."""
    start = time.monotonic()
    with open_pool(
        lambda m: FakeEnvironment(step=never if m == 5 else after(0.1, None)),
        step_timeout_secs=2.0,
    ) as pool:
        found = outcomes(roll(pool, 8))
        assert time.monotonic() - start < 3.0
        failed = found.pop(5)
        assert pool.abandoned == 0
    assert all(isinstance(outcome, Rewarded) for outcome in found.values())
    assert failed.stop_reason is StopReason.TIMEOUT
    assert failed.reason == "step deadline of 2 s passed during step() of turn 0"
    assert str(failed.key) == "train step 0 group 0 member 5"
    assert failed.trajectory.action_tokens == len(ANSWER)


def test_step_deadline_reaches_members_that_wait():
    with open_pool(
        lambda m: FakeEnvironment(step=never), slots=4, step_timeout_secs=0.1
    ) as pool:
        found = outcomes(roll(pool, 6))
    assert {e.stop_reason for e in found.values()} == {StopReason.TIMEOUT}
    assert "during the wait for a slot" in found[5].reason


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


class DyingEngine(FakeEngine):
    def step(self):
        responses = super().step()
        if any(request.seed[4] == 5 for request in self.requests):
            raise MemoryError("the sampler died")
        return responses


def interrupt():
    async def start():
        raise KeyboardInterrupt("by an environment")

    return start


def broken_logbook(span):
    raise OSError("disk full")


@pytest.mark.parametrize(
    "setup, error, frame",
    [
        ({"engine": DyingEngine}, MemoryError, "step"),
        ({"on_span": lambda: broken_logbook}, OSError, "broken_logbook"),
        (
            {"environment": lambda: lambda m: FakeEnvironment(start=interrupt())},
            KeyboardInterrupt,
            "start",
        ),
    ],
)
def test_death_of_a_thread_is_raised_with_its_traceback(setup, error, frame):
    """Producer raises at item 5 of 8, trainer waited for ever (NVIDIA-NeMo/RL#3488)."""
    start = time.monotonic()
    with (
        pytest.raises(error) as raised,
        open_pool(**{name: make() for name, make in setup.items()}) as pool,
    ):
        roll(pool, 8)
    assert time.monotonic() - start < 5.0
    assert frame in [f.name for f in traceback.extract_tb(raised.value.__traceback__)]
    # And from then on every entry says so.
    with pytest.raises(error):
        pool.start(jobs(1), 0)


def test_environment_that_swallows_its_cancellation_is_left_behind():
    async def stubborn():
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    with open_pool(
        lambda m: FakeEnvironment(step=stubborn if m == 1 else None),
        command_timeout_secs=0.5,
    ) as pool:
        found = outcomes(roll(pool, 4))
        assert found[1].stop_reason is StopReason.TIMEOUT
        assert "left behind" in found[1].reason
        assert pool.abandoned == 1
        assert len(of_kind(roll(pool, 1, step=1), Rewarded)) == 1
    assert not pool._thread.is_alive()


def test_environment_that_blocks_the_event_loop_is_named():
    unblock = threading.Event()

    async def blocking():
        unblock.wait(PATIENCE_SECS)

    with open_pool(
        lambda m: FakeEnvironment(step=blocking if m == 2 else None), blocked_secs=0.2
    ) as pool:
        pool.start(jobs(4), 0)
        with pytest.raises(RuntimeError, match=r"member 2, step\(\).*blocking"):
            drain(pool)
        unblock.set()


def test_cancel_ends_the_batch_and_late_results_are_ignored():
    """Answers of stopped attempts reach nobody, the next batch is clean."""
    held = threading.Event()

    class Slow(FakeEngine):
        """Answers everything twice, and late."""

        def step(self):
            if self.requests[-1].seed[2] == 0:
                held.wait(PATIENCE_SECS)
            return [response for response in super().step() for _ in range(2)]

        def release(self, session):
            self.released.append(session)

    async def late():
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
        return 1.0

    engine = Slow()
    with open_pool(
        lambda m: FakeEnvironment(start=late if m == 0 else None), engine
    ) as pool:
        pool.start(jobs(4), 0)
        pool.cancel()
        found = outcomes(drain(pool))
        assert {e.stop_reason for e in found.values()} == {StopReason.CANCELLED}
        assert len(found) == 4
        held.set()
        pool.start([Job(key(m, step=1), m) for m in range(1, 5)], 0)
        events = drain(pool)
        assert [e.key.step for e in events] == [1] * 8
        assert len(of_kind(events, Rewarded)) == 4


def test_same_keys_again_are_sessions_of_their_own():
    """What a stopped attempt still releases is not the session of its successor."""
    engine = FakeEngine()
    with open_pool(lambda m: FakeEnvironment(step=after(0.02, None)), engine) as pool:
        for _ in range(3):
            pool.start(jobs(4), 0)
            pool.cancel()
            drain(pool)
        for _ in range(2):
            assert len(of_kind(roll(pool, 4), Rewarded)) == 4
    assert len({request.session for request in engine.requests}) >= 8
    assert len({request.session for request in engine.requests}) == len(engine.requests)


@pytest.mark.parametrize(
    "deadline", ["command_timeout_secs", "trajectory_timeout_secs", "step_timeout_secs"]
)
def test_stopped_command_does_not_run_on(deadline):
    """Only the waiting client was stopped (verl-project/uni-agent#199)."""
    ended = threading.Event()

    async def command():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with open_pool(lambda m: FakeEnvironment(step=command), **{deadline: 0.3}) as pool:
        (event,) = roll(pool, 1)
        assert event.stop_reason is StopReason.TIMEOUT
        assert ended.wait(PATIENCE_SECS / 4)


def test_deadline_of_a_batch_is_not_that_of_the_next():
    delays = [0.0, 0.5]
    with open_pool(
        lambda m: FakeEnvironment(step=after(delays.pop(0), None)),
        step_timeout_secs=0.8,
    ) as pool:
        pool.start([], 0)
        assert len(of_kind(roll(pool, 1), Rewarded)) == 1
        time.sleep(0.5)
        assert len(of_kind(roll(pool, 1, step=1), Rewarded)) == 1


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


def test_interrupt_leaves_nothing_running():
    before = set(threading.enumerate())
    main = threading.main_thread().ident
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    ended = []

    async def command():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(1)

    with (
        pytest.raises(KeyboardInterrupt),
        open_pool(lambda m: FakeEnvironment(step=command), slots=4) as pool,
    ):
        timer.start()
        roll(pool, 8)
    timer.join()
    assert len(ended) == 4
    assert set(threading.enumerate()) <= before


def test_engine_that_hangs_holds_neither_the_step_nor_the_end():
    unblock = threading.Event()

    class Hanging(FakeEngine):
        def step(self):
            unblock.wait(PATIENCE_SECS)
            return []

    pool = RolloutPool(
        Hanging(), lambda _: FakeEnvironment(), limits(step_timeout_secs=0.2), seed=0
    )
    start = time.monotonic()
    (failed,) = roll(pool, 1)
    assert failed.reason == "step deadline of 0.2 s passed during decoding of turn 0"
    with pytest.raises(RuntimeError, match="did not return"):
        pool.update(None, 1)
    pool.close()
    assert time.monotonic() - start < 8.0
    unblock.set()


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
