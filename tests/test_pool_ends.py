"""How batches and pools end: deadlines, cancellation, and whatever dies or hangs."""

import asyncio
import contextlib
import re
import signal
import threading
import time
import traceback

import pytest
from rollout_fakes import (
    ANSWER,
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
    roll,
)

from thundersync_jax.rollout.events import Job, Rewarded
from thundersync_jax.rollout.pool import RolloutPool
from thundersync_jax.types import StopReason


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


class DyingEngine(FakeEngine):
    def step(self):
        responses = super().step()
        if any(request.seed[4] == 5 for request in self.requests):
            raise MemoryError("the sampler died")
        return responses


def broken_logbook(span):
    raise OSError("disk full")


@pytest.mark.parametrize(
    "setup, error, frame",
    [
        ({"engine": DyingEngine}, MemoryError, "step"),
        ({"on_span": lambda: broken_logbook}, OSError, "broken_logbook"),
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


def test_environment_that_blocks_the_event_loop_is_named_once(caplog):
    unblock = threading.Event()

    async def blocking():
        unblock.wait(PATIENCE_SECS)

    with open_pool(
        lambda m: FakeEnvironment(step=blocking if m == 2 else None), blocked_secs=0.2
    ) as pool:
        pool.start(jobs(4), 0)
        events = []
        while not caplog.records:
            events.append(pool.next_event(0.1))
        events += [pool.next_event(1.5)]  # looked at again, and not said again
        unblock.set()
        events += drain(pool)
    assert len(outcomes(events)) == 4 == len(of_kind(events, Rewarded))
    (record,) = caplog.records
    assert re.search(r"member 2, step\(\).*blocking", record.getMessage())


def test_an_event_loop_that_is_blocked_beyond_the_step_deadline_ends_the_run():
    unblock = threading.Event()

    async def blocking():
        unblock.wait(PATIENCE_SECS)

    with open_pool(
        lambda m: FakeEnvironment(step=blocking),
        blocked_secs=0.1,
        step_timeout_secs=0.3,
    ) as pool:
        pool.start(jobs(1), 0)
        with pytest.raises(RuntimeError, match=r"member 0, step\(\).*blocking"):
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

    settings = {deadline: 0.3, "command_deadline": "fail", "agent_deadline": "fail"}
    with open_pool(lambda m: FakeEnvironment(step=command), **settings) as pool:
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


def test_added_members_have_the_deadline_of_their_batch():
    limit_secs = 1.0
    with open_pool(
        lambda m: FakeEnvironment(step=never if m else None),
        step_timeout_secs=limit_secs,
    ) as pool:
        roll(pool, 1)
        start = time.monotonic()
        time.sleep(0.6 * limit_secs)
        assert not pool.ended
        pool.add(jobs(1, first=1), 0)
        (failed,) = drain(pool)
        assert time.monotonic() - start < 1.4 * limit_secs
        assert pool.ended
    assert failed.reason == "step deadline of 1 s passed during step() of turn 0"


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_what_is_added_to_an_ended_batch_fails_at_once(how):
    """As members that were open at its end did, and without an environment."""
    made = []

    def environment(member):
        made.append(member)
        return FakeEnvironment(step=never if member == 1 else None)

    with open_pool(
        environment, step_timeout_secs=0.2 if how == "deadline" else 20.0
    ) as pool:
        pool.start(jobs(2), 0)
        if how == "cancel":
            pool.cancel()
        drain(pool)
        assert pool.ended
        made.clear()
        pool.add(jobs(3, first=2), 0)
        found = outcomes(drain(pool))
        assert sorted(found) == [2, 3, 4] and not made
        reason = {
            "deadline": (StopReason.TIMEOUT, "step deadline of 0.2 s passed"),
            "cancel": (StopReason.CANCELLED, "the batch was cancelled"),
        }[how]
        for failed in found.values():
            assert failed.stop_reason is reason[0] and failed.trajectory is None
            assert failed.reason == f"{reason[1]} before it was added"
        # The next batch knows nothing of it.
        (rewarded,) = of_kind(roll(pool, 1, step=1), Rewarded)
        assert rewarded.key.step == 1 and not pool.ended


def test_an_idle_pool_may_sit_past_the_deadline():
    with open_pool(step_timeout_secs=0.1) as pool:
        for step in range(2):
            assert len(of_kind(roll(pool, 1, step=step), Rewarded)) == 1
            time.sleep(0.2)
            pool.update(None, 0)
