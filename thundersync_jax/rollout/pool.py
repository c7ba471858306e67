"""Many attempts at once, and one stream of what became of them.

Every member is a coroutine on an event loop in a thread of its own; at most
`limits.slots` of them hold an engine session, and a member makes its environment only
when it is admitted. Engines of this process have threads of their own. The caller's
thread reads events, and gets the original exception where a thread died.

Exactly one of `Rewarded` and `Failed` comes per member, after its `Completed`, and that
after the turns that a teacher scored. What a stopped attempt still does is ignored.
"""

import asyncio
import contextlib
import dataclasses
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any

from thundersync_jax.chat.base import Chat
from thundersync_jax.chat.byte_level import ByteLevel
from thundersync_jax.config import RolloutConfig
from thundersync_jax.engines.base import Engine, RemoteEngine, connect
from thundersync_jax.envs.base import Environment
from thundersync_jax.errors import one_line
from thundersync_jax.rollout import commands
from thundersync_jax.rollout.agent import PHASES, WAITING, Agent, Keep
from thundersync_jax.rollout.events import Completed, Event, Failed, Job, Rewarded
from thundersync_jax.rollout.teacher import MakeTeacher
from thundersync_jax.types import Span, StopReason, TrajectoryKey

# Tried again with a fresh environment. A verdict is not: its tokens are out already,
# and neither is what would happen again (a refused request, a prompt too long).
RETRIED = frozenset({StopReason.ENVIRONMENT_ERROR, StopReason.TIMEOUT})
_BYTE_LEVEL = ByteLevel()
_CLOSE_SECS = 2.0  # for each thread to end; they are daemons beyond it


@dataclasses.dataclass(eq=False)
class Member:
    """One member from its start to its outcome, on the event loop."""

    job: Job
    policy_version: int
    queued_secs: float
    agent: Agent | None = None
    task: asyncio.Task | None = None


class RolloutPool:
    """Rolls out one batch of jobs at a time; a running batch may grow.

    `on_span` is called in the event loop's thread. `close`, or leaving the context,
    ends all threads; everything else belongs to the thread that made the pool.

    Attributes:
      outstanding: Members of the batch whose outcome `next_event` has not given yet.
    """

    def __init__(
        self,
        engine: Engine | RemoteEngine,
        make_environment: Callable[[TrajectoryKey], Environment],
        limits: RolloutConfig,
        seed: int,
        on_span: Callable[[Span], None] | None = None,
        *,
        blocked_secs: float | None = None,
        make_teacher: MakeTeacher | None = None,
        chat: Chat = _BYTE_LEVEL,
        chat_of: Callable[[Any], Chat] | None = None,
        keep: Keep | None = None,
    ):
        """Starts the threads.

        Args:
          engine: The sampler, which only the pool calls from here on.
          make_environment: Makes the environment of an attempt, in the event loop.
          limits: Slots, turns, deadlines and attempts.
          seed: Seed of the run, the first word of every sampling seed.
          on_span: Called with every decode, tool and verify bar.
          blocked_secs: Seconds without a turn of the event loop after which it is said
            which environment blocks it; None for `limits.blocked_secs`.
          make_teacher: Makes the teacher of training members from the event loop and a
            function to call with what it died of; the pool closes it.
          chat: Turns text into ids and back.
          chat_of: The chat of a task; None where all have `chat`.
          keep: Called in further threads with the artefacts of a verdict.

        Raises:
          ValueError: The engine's sessions are shorter than the limits say.
        """
        if limits.context_tokens > engine.context_tokens:
            raise ValueError(
                f"rollout.context_tokens is {limits.context_tokens}, the engine holds "
                f"{engine.context_tokens} tokens a session; build it for as many."
            )
        self._make_environment = make_environment
        self._limits = limits
        self._seed = seed
        self._on_span = on_span
        self._chat, self._chat_of, self._keep = chat, chat_of, keep
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        # The running batch; no version: none runs.
        self.outstanding = 0
        self._policy_version: int | None = None
        self._keys: set[TrajectoryKey] = set()
        self._error: BaseException | None = None
        self._closed = False
        # The rest belongs to the event loop.
        self._open: dict[TrajectoryKey, Member] = {}
        self._deadline: asyncio.TimerHandle | None = None
        self._ended: tuple[StopReason, str] | None = None  # the batch, and by what
        self._tasks: set[asyncio.Task] = set()  # of members
        self._closing: set[asyncio.Task] = set()  # of environments
        self._slots = asyncio.Semaphore(limits.slots)
        self._environments = asyncio.Semaphore(limits.environments or sys.maxsize)
        self._verifiers = asyncio.Semaphore(limits.verify_concurrency)
        self._commands = commands.Commands()
        self._loop = commands.new_loop()
        self._loop.set_exception_handler(self._report)
        self._teacher = make_teacher(self._loop, self._die) if make_teacher else None
        self._driver = connect(engine, self._loop, self._die)
        run = self._run_loop
        self._thread = threading.Thread(target=run, daemon=True, name="rollouts")
        blocked_secs = limits.blocked_secs if blocked_secs is None else blocked_secs
        self._watch = commands.LoopWatch(
            self._loop, self._thread, blocked_secs, limits.step_timeout_secs
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the last event's batch is past its step deadline, or cancelled."""
        return self._ended is not None

    @property
    def abandoned(self) -> int:
        """Environment commands so far that ignored their cancellation."""
        return self._commands.abandoned

    def compile(self) -> None:
        """Compiles what an engine of this process needs, before a deadline runs."""
        self._raise_if_dead()
        if compiles := getattr(self._driver, "compile", None):
            with self._original_error():
                compiles()

    def start(self, jobs: Sequence[Job], policy_version: int) -> None:
        """Begins a batch; its step deadline runs from here.

        Raises:
          ValueError: A batch is outstanding, or keys repeat or name no known phase.
        """
        self._raise_if_dead()
        if self.outstanding:
            raise ValueError(
                f"{self.outstanding} members of the last batch are outstanding; "
                "read their events, or cancel() and read, before the next start()."
            )
        members = _members(jobs, policy_version, set())
        self._policy_version, self._keys = policy_version, set(members)
        self.outstanding = len(members)
        self._in_loop(self._begin, members)

    def add(self, jobs: Sequence[Job], policy_version: int) -> None:
        """Further members of the running batch, under its step deadline.

        A batch runs on after its last outcome was read, until `start` or `update`.
        Where it has `ended`, new members fail at once, as those open then did.

        Raises:
          ValueError: No batch runs, it is of another policy version, or a key is not
            new in it or names no known phase.
        """
        self._raise_if_dead()
        version = self._policy_version
        if version is None or version != policy_version:
            none = version is None
            running = "none runs" if none else f"the running one has {version}"
            raise ValueError(
                f"members of policy version {policy_version} find no batch to join: "
                f"{running}. start() begins one."
            )
        members = _members(jobs, policy_version, self._keys)
        self._keys.update(members)
        self.outstanding += len(members)
        self._in_loop(self._join, members)

    def next_event(self, timeout_secs: float) -> Event | None:
        """Returns the next event; None after the timeout, or on `wake`.

        Nothing is waited for where nothing is outstanding.

        Raises:
          BaseException: What a thread of the pool died of, with its own traceback.
          RuntimeError: An environment blocks the event loop beyond the step deadline.
        """
        self._raise_if_dead()
        end = time.monotonic() + timeout_secs
        while self.outstanding:
            left = max(0.0, end - time.monotonic())
            try:
                event = self._events.get(timeout=min(left, commands.PING_SECS))
            except queue.Empty:
                with self._original_error():
                    self._watch.look()
            else:
                self._raise_if_dead()
                if event is not None:
                    self.outstanding -= isinstance(event, Rewarded | Failed)
                return event
            if time.monotonic() >= end:
                return None
        return None

    def wake(self) -> None:
        """Lets a waiting `next_event` return None; from any thread."""
        self._events.put(None)

    def cancel(self) -> None:
        """Fails what is outstanding as CANCELLED; the events still have to be read."""
        self._raise_if_dead()
        self._in_loop(self._end, StopReason.CANCELLED, "the batch was cancelled")

    def update(self, params: object, policy_version: int) -> None:
        """Gives the engine new parameters, between two batches.

        Raises:
          ValueError: Members are outstanding.
        """
        self._raise_if_dead()
        if self.outstanding:
            raise ValueError(
                f"{self.outstanding} members are outstanding; parameters change "
                "between batches only. Read their events first."
            )
        self._policy_version = None
        with self._original_error():
            self._driver.update(params, policy_version, self._limits.step_timeout_secs)

    def close(self) -> None:
        """Cancels everything and ends all threads; within seconds, whatever hangs."""
        if self._closed:
            return
        self._closed = True
        # A loop that died has closed already.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        ended = {"engine": self._driver.close(_CLOSE_SECS)}
        if self._teacher is not None:
            ended["teacher"] = self._teacher.close(_CLOSE_SECS)
        self._thread.join(_CLOSE_SECS + self._limits.close_timeout_secs)
        ended["rollouts"] = not self._thread.is_alive()
        for name, gone in ended.items():
            if not gone:
                logging.warning("thread %r did not end in %g s", name, _CLOSE_SECS)

    def __enter__(self) -> "RolloutPool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # In the event loop's thread.

    def _run_loop(self) -> None:
        try:
            while not self._closed:
                try:
                    self._loop.run_forever()
                except (SystemExit, KeyboardInterrupt) as error:
                    # Of a task that an environment began and did not wait for.
                    logging.warning("an environment raised %s", one_line(error))
        except BaseException as error:
            self._die(error)
        finally:
            self._end_attempts()
            commands.end_tasks(self._loop, commands.GRACE_SECS)
            self._loop.close()

    def _end_attempts(self) -> None:
        """Cancels all members, and waits until their environments are closed."""
        for task in self._tasks:
            task.cancel()
        limit_secs = self._limits.close_timeout_secs + commands.GRACE_SECS
        end = time.monotonic() + limit_secs
        while (left := self._tasks | self._closing) and time.monotonic() < end:
            with contextlib.suppress(BaseException):
                first = asyncio.FIRST_COMPLETED
                some = asyncio.wait(left, timeout=limit_secs, return_when=first)
                self._loop.run_until_complete(some)

    def _begin(self, members: dict[TrajectoryKey, Member]) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._ended = None
        limit_secs = self._limits.step_timeout_secs
        reason = f"step deadline of {limit_secs:g} s passed"
        self._deadline = self._loop.call_later(
            limit_secs, self._end, StopReason.TIMEOUT, reason
        )
        self._join(members)

    def _join(self, members: dict[TrajectoryKey, Member]) -> None:
        self._open.update(members)
        for key, member in members.items():
            if self._ended is not None:
                stop_reason, reason = self._ended
                self._fail(member, stop_reason, f"{reason} before it was added")
                continue
            member.task = self._loop.create_task(self._run(member), name=str(key))
            self._tasks.add(member.task)
            member.task.add_done_callback(self._look)

    async def _run(self, member: Member) -> None:
        """Takes one member from its first attempt to its outcome."""
        attempts, ended = self._limits.attempts, False
        for attempt in range(attempts):
            await self._environments.acquire()  # until this one is closed
            member.agent = agent = self._agent(member, attempt)
            try:
                ended = await self._attempt(member, agent, attempt + 1 == attempts)
            finally:
                await asyncio.shield(self._close(agent))
            if ended:
                return

    async def _attempt(self, member: Member, agent: Agent, last: bool) -> bool:
        """Takes one attempt to its outcome; False where another one is to follow."""
        try:
            async with self._slots:
                trajectory = await agent.act()
            # Outside the slots, as the verdict: a teacher holds up no decoding.
            trajectory = await agent.scored(trajectory)
        except commands.Stopped as stopped:
            if not last and stopped.stop_reason in RETRIED:
                return False
            self._fail(member, stopped.stop_reason, stopped.reason)
            return True
        self._tell(member, Completed(agent.key, trajectory))
        try:
            async with self._verifiers:
                verdict = await agent.verify()
        except commands.Stopped as stopped:
            self._fail(member, stopped.stop_reason, stopped.reason)
            return True
        trajectory = dataclasses.replace(
            trajectory,
            reward=verdict.reward,
            parts=dict(verdict.parts),
            log=verdict.log,
            times=dict(agent.times),
        )
        self._tell(member, Rewarded(agent.key, verdict.reward, trajectory))
        return True

    def _close(self, agent: Agent) -> asyncio.Task:
        """Closes an attempt's environment, whoever waits for it."""

        def closed(closing: asyncio.Task) -> None:
            self._closing.discard(closing)
            self._environments.release()

        closing = self._loop.create_task(agent.close(), name=str(agent.key))
        self._closing.add(closing)
        closing.add_done_callback(closed)
        return closing

    def _agent(self, member: Member, attempt: int) -> Agent:
        key = member.job.key._replace(attempt=attempt)
        agent = Agent(
            key=key,
            task=member.job.task,
            temperature=member.job.temperature,
            make_environment=self._make_environment,
            sampler=self._driver,
            commands=self._commands,
            limits=self._limits,
            seed=self._seed,
            policy_version=member.policy_version,
            on_span=self._on_span,
            teacher=self._teacher if key.phase == "train" else None,
            on_turn=partial(self._tell, member),
            chat=self._chat_of(member.job.task) if self._chat_of else self._chat,
            keep=self._keep,
        )
        agent.times["queued"] = member.queued_secs
        return agent

    def _fail(self, member: Member, stop_reason: StopReason, reason: str) -> None:
        agent = member.agent
        failed = agent.failed if agent else partial(Failed, member.job.key)
        self._tell(member, failed(stop_reason, reason))

    def _tell(self, member: Member, event: Event) -> None:
        """Passes on what an open member says; a stopped one is not heard."""
        key = member.job.key._replace(attempt=0)
        if self._open.get(key) is not member:
            return
        self._events.put(event)
        if isinstance(event, Rewarded | Failed):
            del self._open[key]

    def _end(self, stop_reason: StopReason, reason: str) -> None:
        """Fails every open member now, without waiting for what it is busy with."""
        self._ended = self._ended or (stop_reason, reason)
        for member in list(self._open.values()):
            doing = member.agent.doing if member.agent else WAITING
            member.task.cancel()
            if member.agent is not None:
                # Before the event: the reader may update the engine right after it.
                member.agent.release()
            self._fail(member, stop_reason, f"{reason} during {doing}")

    def _look(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        # Failures are values; whatever else ends a member is a fault of the run.
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(error)

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # At the end only abandoned commands complain, of being abandoned.
        if not self._closed and self._error is None:
            loop.default_exception_handler(context)

    # In any thread.

    def _die(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._events.put(None)

    # In the caller's thread.

    def _raise_if_dead(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise RuntimeError("the rollout pool is closed; make a new one.")

    def _in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        with self._original_error():
            self._loop.call_soon_threadsafe(function, *arguments)

    @contextlib.contextmanager
    def _original_error(self) -> Iterator[None]:
        """Turns what a dead thread leads to into what it died of."""
        try:
            yield
        except RuntimeError:
            self._raise_if_dead()
            raise


def _members(
    jobs: Sequence[Job], policy_version: int, known: Set[TrajectoryKey]
) -> dict[TrajectoryKey, Member]:
    """New members by key; ValueError where a key is known or names no known phase."""
    now = time.monotonic()
    members: dict[TrajectoryKey, Member] = {}
    for job in jobs:
        key = job.key._replace(attempt=0)
        if key in members or key in known or key.phase not in PHASES:
            expected = f"every member once, phases {', '.join(PHASES)}"
            raise ValueError(f"job {key} cannot start; expected {expected}.")
        members[key] = Member(job, policy_version, now)
    return members
