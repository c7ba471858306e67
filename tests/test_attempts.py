"""The life of an attempt: what an environment may raise, and how it is closed."""

import asyncio
import contextlib
import functools
import itertools
import random
import time
from typing import ClassVar

import pytest
import rollout_fakes
from attempt_stress import Counted, stress
from rollout_fakes import (
    FakeEngine,
    FakeEnvironment,
    after,
    drain,
    jobs,
    never,
    of_kind,
    open_pool,
    outcomes,
    refuse,
    roll,
)

from thundersync_jax.config import LatencyConfig
from thundersync_jax.envs import base as envs
from thundersync_jax.envs.base import WithLatency
from thundersync_jax.errors import InfrastructureFault, PolicyFault, StreamError
from thundersync_jax.rollout.attempts import Member, StartGate
from thundersync_jax.rollout.events import Failed, Job, Rewarded
from thundersync_jax.rollout.pool import RolloutPool
from thundersync_jax.types import StopReason


class Ended(BaseException):
    pass


ERRORS = {
    "SystemExit: None": SystemExit(None),
    "SystemExit: 3": SystemExit(3),
    "KeyboardInterrupt: typed": KeyboardInterrupt("typed"),
    "GeneratorExit": GeneratorExit(),
    "Ended: by itself": Ended("by itself"),
    "ExceptionGroup: two (1 sub-exception)": ExceptionGroup("two", [ValueError()]),
    "RuntimeError: ordinary": RuntimeError("ordinary"),
}


def raising(error, place):
    """An environment that raises in one of its moves."""

    async def raise_():
        raise error

    class Environment(FakeEnvironment):
        def __init__(self):
            if place == "making the environment":
                raise error
            moves = {
                "start()": "start",
                "step() of turn 0": "step",
                "verify()": "reward",
            }
            move = moves.get(place)
            super().__init__(**({move: raise_} if move else {}))

    return Environment()


@pytest.mark.parametrize(
    "place", ["making the environment", "start()", "step() of turn 0", "verify()"]
)
@pytest.mark.parametrize("text", ERRORS)
def test_whatever_an_environment_raises_fails_its_attempt_alone(text, place):
    with open_pool(
        lambda m: raising(ERRORS[text], place) if m == 3 else FakeEnvironment()
    ) as pool:
        for step in range(2):  # and the pool lives on
            found = outcomes(roll(pool, 8, step=step))
            failed = found.pop(3)
            assert all(isinstance(event, Rewarded) for event in found.values())
            assert failed.stop_reason is StopReason.ENVIRONMENT_ERROR
            assert failed.reason.startswith(f"{place} raised ")
            assert text.partition(":")[0] in failed.reason


@pytest.mark.parametrize("text", ERRORS)
def test_whatever_a_close_raises_is_said_and_leaves_all_alone(text, caplog):
    async def raise_():
        raise ERRORS[text]

    class Environment(Counted):
        pass

    with open_pool(lambda m: Environment(close=raise_ if m == 1 else None)) as pool:
        for step in range(2):
            assert len(of_kind(roll(pool, 3, step=step), Rewarded)) == 3
    assert "member 1: close() raised " in caplog.text
    assert text.partition(":")[0] in caplog.text
    assert Environment.closing == 6


class Hiding(FakeEnvironment):
    @property
    def sees_malformed(self):
        raise SystemExit("not for you")


class Unfinished(PolicyFault):
    def __init__(self, text):
        self.text = text


def test_odd_classes_of_environments_fail_their_attempts_alone():
    async def blame():
        raise Unfinished("gave up")

    moves = {0: Hiding(), 1: FakeEnvironment(step=blame)}
    with open_pool(lambda m: moves.get(m) or FakeEnvironment()) as pool:
        found = outcomes(roll(pool, 3))
    assert found[0].reason == "sees_malformed raised SystemExit: not for you"
    assert found[1].trajectory.stop_reason is StopReason.POLICY_FAULT
    assert isinstance(found[2], Rewarded)


def of_task(task):
    if task == 1:
        raise SystemExit("no deadline")
    return {2: "soon", 3: envs.Deadlines(agent=5)}.get(task)


def test_what_a_task_says_wrongly_fails_its_attempts_alone():
    with RolloutPool(
        FakeEngine(),
        lambda context: FakeEnvironment(),
        rollout_fakes.limits(environments=1),
        seed=3,
        deadlines_of=of_task,
    ) as pool:
        found = outcomes(roll(pool, 5))
    assert found[1].reason == "deadlines of the task raised SystemExit: no deadline"
    expected = "deadlines of the task are 'soon', expected Deadlines or None"
    assert found[2].reason == expected
    assert len(of_kind(found.values(), Rewarded)) == 3


@pytest.mark.parametrize("secs", [0, -1, True, "soon", float("nan")])
def test_deadlines_are_seconds_above_0(secs):
    with pytest.raises(ValueError, match=r"deadline verify of a task is .*above 0"):
        envs.Deadlines(verify=secs)


def test_exit_in_a_thread_of_an_environment_fails_its_attempt_alone():
    async def verify():
        await asyncio.to_thread(exec, "raise SystemExit")

    with open_pool(lambda m: FakeEnvironment(reward=verify if m else 1.0)) as pool:
        found = outcomes(roll(pool, 2))
    assert isinstance(found[0], Rewarded)
    assert found[1].reason == "verify() raised SystemExit"


def test_exit_in_a_task_that_nobody_awaits_leaves_the_others_alone(caplog):
    async def leave():
        raise SystemExit(4)

    async def step():
        asyncio.get_running_loop().orphan = asyncio.ensure_future(leave())
        await asyncio.sleep(0.05)

    with open_pool(lambda m: FakeEnvironment(step=step)) as pool:
        assert len(of_kind(roll(pool, 4), Rewarded)) == 4
    assert "an environment raised SystemExit: 4" in caplog.text


def test_an_environment_that_stops_the_event_loop_fails_alone():
    async def stop():
        asyncio.get_running_loop().stop()

    async def stop_soon():
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
        await asyncio.sleep(0.01)

    with open_pool(
        lambda m: FakeEnvironment(step={0: stop, 1: stop_soon}.get(m))
    ) as pool:
        found = outcomes(roll(pool, 4))
        failed = found.pop(0)
        assert failed.reason.startswith("step() of turn 0 raised RuntimeError")
        assert len(of_kind(found.values(), Rewarded)) == 3


class Unencodable(str):
    def encode(self, *arguments, **named):
        raise SystemError("no bytes of it")


def test_a_text_with_methods_of_its_own_is_the_text():
    with open_pool(
        lambda m: FakeEnvironment(prompt=Unencodable("1+1"), reply=Unencodable("2"))
    ) as pool:
        (rewarded,) = of_kind(roll(pool, 1), Rewarded)
    assert rewarded.reward == 1.0


def test_text_that_the_chat_refuses_fails_that_attempt(monkeypatch):
    with open_pool(lambda m: FakeEnvironment(prompt=f"prompt {m}")) as pool:
        byte_level = pool._chat

        class Refusing:
            def prompt(self, text):
                assert text != "prompt 1", "unspeakable"
                return byte_level.prompt(text)

            def __getattr__(self, name):
                return getattr(byte_level, name)

        pool._chat = Refusing()
        found = outcomes(roll(pool, 3))
    assert found[1].stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "the text of start() cannot be rendered: AssertionError" in found[1].reason
    assert isinstance(found[0], Rewarded) and isinstance(found[2], Rewarded)


def test_what_is_no_observation_is_said_behind_drawn_latencies():
    class Silent(FakeEnvironment):
        async def step(self, action):
            return None

    none = LatencyConfig()
    with open_pool(lambda m: WithLatency(Silent(), none, none, (0, m))) as pool:
        (failed,) = of_kind(roll(pool, 1), Failed)
    assert failed.reason == "step() of turn 0 returned None, expected an Observation"


@pytest.fixture
def counted():
    class Environment(Counted):
        pass

    return Environment


@pytest.mark.parametrize(
    ("moves", "limits"),
    [
        ({}, {}),
        ({"start": refuse}, {}),
        ({"step": refuse}, {"attempts": 3}),
        ({"reward": refuse}, {}),
        ({"reward": float("nan")}, {}),
        ({"step": never}, {"command_timeout_secs": 0.05}),
        ({"step": never}, {"trajectory_timeout_secs": 0.05}),
        ({"step": never}, {"step_timeout_secs": 0.2}),
        ({"start": never}, {"step_timeout_secs": 0.2}),
        ({"reward": never}, {"step_timeout_secs": 0.2}),
        ({"prompt": "x" * 100}, {}),
        ({"close": after(0.1, None)}, {}),
    ],
)
def test_every_environment_is_closed_once_however_it_ends(counted, moves, limits):
    none = LatencyConfig()
    with open_pool(
        lambda m: WithLatency(counted(**moves), none, none, (0, m)), **limits
    ) as pool:
        assert len(outcomes(roll(pool, 4))) == 4
    expected = 4 * limits.get("attempts", 1)
    assert (counted.made, counted.closed, counted.alive) == (expected, expected, 0)


@pytest.mark.parametrize("how", ["cancel", "close", "error"])
def test_environments_are_closed_where_the_batch_or_the_pool_ends(counted, how):
    """Also in the middle of closing, which takes its time."""
    moves = {"step": never, "close": after(0.1, None)}
    ended = contextlib.suppress(ZeroDivisionError)
    with ended, open_pool(lambda m: counted(**(moves if m % 2 else {}))) as pool:
        pool.start(jobs(8), 0)
        while counted.made < 8:
            time.sleep(0.001)
        if how == "cancel":
            pool.cancel()
            drain(pool)
        if how == "error":
            raise ZeroDivisionError
    assert (counted.made, counted.closed, counted.alive) == (8, 8, 0)


def test_a_close_that_fails_or_hangs_is_said_and_left_behind(counted, caplog):
    with open_pool(
        lambda m: counted(close={0: refuse, 1: never}.get(m)), close_timeout_secs=0.1
    ) as pool:
        assert len(of_kind(roll(pool, 3), Rewarded)) == 3
        assert len(of_kind(roll(pool, 1, step=1), Rewarded)) == 1
    assert "member 0: close() raised ConnectionError: refused" in caplog.text
    assert "member 1: close() was stopped at its deadline of 0.1 s" in caplog.text


def test_no_more_environments_are_alive_than_allowed(counted):
    """Held until `close` returns, apart from slots; attempts are new environments."""
    held = after(0.01, None)
    with open_pool(
        lambda m: counted(step=refuse if m % 3 == 0 else held, close=held),
        slots=8,
        environments=3,
        attempts=2,
    ) as pool:
        assert len(outcomes(roll(pool, 20))) == 20
    assert counted.most == 3 and counted.alive == 0
    assert counted.made == counted.closed == 20 + 7


def test_random_ends(counted):
    """Faults, deadlines and cancellations at random moments; a bound on those alive."""
    stress(counted, random.Random(0), batches=6, members=24)


def test_a_place_is_kept_until_close_returns_whatever_is_cancelled(counted):
    """A failed attempt is closing, and another would follow, at the cancellation."""
    moves = {"step": refuse, "close": after(0.1, None)}
    with open_pool(lambda m: counted(**moves), environments=2, attempts=2) as pool:
        pool.start(jobs(6), 0)
        while not counted.closing:
            time.sleep(0.001)
        pool.cancel()
        drain(pool)
        roll(pool, 4, step=1)
    assert counted.most == 2 and counted.made == counted.closed


def faulting(times, place="step"):
    """Raises so often that the machinery is at fault, over all environments."""
    left = [times]

    async def move():
        if left[0] > 0:
            left[0] -= 1
            raise InfrastructureFault("the sandbox is away")
        return 1.0

    return lambda m: FakeEnvironment(**{place: move})


@pytest.mark.parametrize("place", ["start", "step", "reward"])
def test_a_fault_of_the_machinery_is_tried_again_at_most_so_often(place):
    """Also a verdict, of the environment that holds the work."""
    for times, attempts in ((2, 3), (3, 3), (1, 1)):
        with open_pool(
            faulting(times, place),
            attempts=attempts,
            retry_secs=0.01,
            start_fault_share=1.0,
        ) as pool:
            (outcome,) = outcomes(roll(pool, 1)).values()
        if times < attempts:
            assert isinstance(outcome, Rewarded)
        else:
            assert outcome.stop_reason is StopReason.ENVIRONMENT_ERROR
            assert "InfrastructureFault: the sandbox is away" in outcome.reason


def test_waits_between_tries_grow_and_differ():
    limits = rollout_fakes.limits(retry_secs=0.1)
    gate = StartGate(limits, lambda begins: None, lambda error: None)
    members = [Member(job, 0, 0.0) for job in jobs(50)]
    for number in range(4):
        waits = [gate.wait_secs(member, number) for member in members]
        low, high = 0.05 * 2**number, 0.15 * 2**number
        assert all(low <= wait <= high for wait in waits) and len(set(waits)) == 50
        assert waits == [gate.wait_secs(member, number) for member in members]
    assert gate.wait_secs(members[0], 1000) <= 1.5 * 60


class Outage:
    """Environments that cannot be started for a while, and then all can."""

    def __init__(self, secs, share=0.7, later=0.0):
        self.rng = random.Random(0)
        self.share, self.later = share, later
        self.over_secs = time.monotonic() + secs
        self.starts = []

    def __call__(self, member):
        return FakeEnvironment(start=self.start)

    async def start(self):
        await asyncio.sleep(0.002)
        over = time.monotonic() > self.over_secs
        failed = self.rng.random() < (self.later if over else self.share)
        self.starts.append((time.monotonic(), failed))
        if failed:
            raise InfrastructureFault("no room in the cluster")


def test_an_outage_of_starts_costs_patience_and_no_member(caplog):
    """70 % of starts fail for a while, and attempts=1: nobody fails (time scaled)."""
    outage = Outage(secs=1.0)
    settings = {"retry_secs": 0.02, "step_timeout_secs": 0.9, "slots": 8}
    with open_pool(outage, **settings) as pool:
        pool.start(jobs(64), 0)
        events, paused = [], False
        while pool.outstanding:
            paused |= pool.paused
            events.append(pool.next_event(0.01))
        assert paused and not pool.paused
    found = outcomes(event for event in events if event is not None)
    assert len(of_kind(found.values(), Rewarded)) == 64
    assert "starts of environments failed; paused" in caplog.text
    assert "environments start again" in caplog.text


def test_an_outage_that_does_not_end_ends_the_run_with_its_cause():
    outage = Outage(secs=1e9, share=1.0)
    settings = {"retry_secs": 0.01, "outage_secs": 0.3, "step_timeout_secs": 0.2}
    with (
        pytest.raises(StreamError, match=r"outage_secs 0.3 .* no room in the cluster"),
        open_pool(outage, **settings) as pool,
    ):
        roll(pool, 16)
    assert len(outage.starts) < 60  # one at a time, with growing waits


def test_starts_that_began_in_an_outage_use_up_no_attempt():
    """They end after it, by their deadline."""
    over = []

    async def start():
        if len(over) < 20:
            over.append(await asyncio.sleep(0.01))
            raise InfrastructureFault("no room")

    async def late():
        if not over:
            await asyncio.sleep(60)

    settings = {"retry_secs": 0.01, "start_timeout_secs": 1.0, "slots": 16}
    with open_pool(
        lambda m: FakeEnvironment(start=start if m else late), **settings
    ) as pool:
        assert len(of_kind(roll(pool, 16), Rewarded)) == 16


def test_a_group_that_never_starts_costs_no_other(caplog):
    """Its own faults are no outage: it is waited for, given up, and fails alone."""
    starts = []

    def environment(context):
        async def start():
            await asyncio.sleep(0.001)
            starts.append(context.key)
            if context.key.group == 1:
                raise InfrastructureFault("no such image")

        return FakeEnvironment(start=start)

    settings = {"retry_secs": 0.01, "outage_secs": 0.2, "attempts": 4, "slots": 32}
    limits = rollout_fakes.limits(**settings)
    with RolloutPool(FakeEngine(), environment, limits, seed=0) as pool:
        for step in (1, 2):
            places = itertools.product(range(3), range(8))
            members = [Job(rollout_fakes.key(m, g, step), m) for g, m in places]
            pool.start(members, 0)
            events = [e for e in drain(pool) if isinstance(e, Rewarded | Failed)]
            assert len(events) == 24
            failed = {e.key.group for e in events if isinstance(e, Failed)}
            assert failed == {1} and len(of_kind(events, Failed)) == 8
    assert len(starts) < 200
    assert "one group alone could not be started" in caplog.text


def test_rare_faults_leave_nearly_all_groups_whole():
    """5 % of all moves fail throughout, three attempts: 99 % of groups of 8."""
    rng = random.Random(1)

    async def now_and_then():
        await asyncio.sleep(0)
        if rng.random() < 0.05:
            raise InfrastructureFault("now and then")

    groups = 120
    settings = {"attempts": 3, "retry_secs": 0.001, "slots": 64}
    with open_pool(
        lambda m: FakeEnvironment(start=now_and_then, step=now_and_then), **settings
    ) as pool:
        found = outcomes(roll(pool, 8 * groups))
    lost = {member // 8 for member, event in found.items() if isinstance(event, Failed)}
    assert len(lost) <= 0.01 * groups


def test_a_cancelled_batch_leaves_the_gate_open():
    """A probe that is cancelled lets the next one try."""
    outage = Outage(secs=0.6, share=1.0)
    with open_pool(outage, retry_secs=0.05, slots=4) as pool:
        pool.start(jobs(12), 0)
        while len(outage.starts) < 10:
            time.sleep(0.001)
        pool.cancel()
        drain(pool)
        assert len(of_kind(roll(pool, 12, step=1), Rewarded)) == 12


class Told(FakeEnvironment):
    """Keeps what it is told of its attempt."""

    contexts: ClassVar[list] = []

    def __init__(self, context):
        super().__init__()
        self.context = context
        self.contexts.append(context)

    async def start(self, task):
        self.context.log(f"started {task}")
        self.left = [self.context.remaining_tokens()]
        return await super().start(task)

    async def step(self, action):
        self.left.append(self.context.remaining_tokens())
        self.secs = self.context.remaining_secs()
        (self.context.folder / "notes.txt").write_text("seen")
        if self.context.key.member == 1:
            raise InfrastructureFault("away")
        return await super().step(action)


def told_pool(folder, **settings):
    return RolloutPool(
        FakeEngine(),
        lambda context: envs.make(Told, context),
        rollout_fakes.limits(**settings),
        seed=3,
        folder=folder,
    )


def test_an_environment_that_asks_is_told_of_its_attempt(tmp_path):
    Told.contexts.clear()
    with told_pool(tmp_path, attempts=2, retry_secs=0.01) as pool:
        found = outcomes(roll(pool, 2, step=4))
    by_key = {str(context.key): context for context in Told.contexts}
    first = by_key["train step 4 group 0 member 0"]
    again = by_key["train step 4 group 0 member 1 attempt 1"]
    assert (first.task, again.task) == (0, 1)
    assert again.seed == by_key["train step 4 group 0 member 1"].seed != first.seed
    notes = sorted(tmp_path.rglob("notes.txt"))
    assert [str(p.parent.relative_to(tmp_path)) for p in notes] == [
        "train_step_000004/g0m0a0",
        "train_step_000004/g0m1a0",
        "train_step_000004/g0m1a1",
    ]
    assert found[0].trajectory.log == "started 0"
    assert found[1].trajectory.log == "started 1"


def test_what_is_left_of_tokens_and_seconds_is_told():
    made = []

    def make(context):
        made.append(envs.make(Told, context))
        return made[-1]

    limits = rollout_fakes.limits(trajectory_timeout_secs=5.0)
    with RolloutPool(FakeEngine(), make, limits, seed=3) as pool:
        (rewarded,) = of_kind(roll(pool, 1), Rewarded)
    (environment,) = made
    used = len(rewarded.trajectory.ids)
    assert environment.left == [64, 64 - used]
    assert 0 < environment.secs <= 5.0
    assert environment.context.folder.is_dir()  # a temporary one, without a run


def test_environments_without_a_context_are_made_as_before():
    class Plain(FakeEnvironment):
        pass

    def function(limit=3):
        return FakeEnvironment()

    assert type(envs.make(Plain, None)) is Plain
    assert type(envs.make(function, None)) is FakeEnvironment
    assert type(envs.make(functools.partial(Told, context=7), 8)) is Told


def test_deadlines_of_a_task_are_bounded_by_the_settings():
    own = {0: envs.Deadlines(start=0.1), 1: envs.Deadlines(agent=0.1)}
    own |= {2: envs.Deadlines(verify=0.1), 3: envs.Deadlines(command=1e9)}
    moves = [{"start": never}, {"step": never}, {"reward": never}, {"step": never}]
    told = {}

    def environment(context):
        told[context.task] = context.deadlines
        return FakeEnvironment(**moves[context.task])

    with RolloutPool(
        FakeEngine(),
        environment,
        rollout_fakes.limits(command_timeout_secs=0.3, command_deadline="fail"),
        seed=3,
        deadlines_of=own.get,
    ) as pool:
        found = outcomes(roll(pool, 4))
    assert found[0].reason == "start() was stopped at its deadline of 0.1 s"
    assert found[1].trajectory.stop_reason is StopReason.DEADLINE
    assert found[2].reason == "verify() was stopped at its deadline of 0.1 s"
    assert found[3].reason == "step() of turn 0 was stopped at its deadline of 0.3 s"
    assert told[0].start == 0.1 and told[2].verify == 0.1
    assert told[3].command == told[0].command == 0.3 and told[3].agent > 1
