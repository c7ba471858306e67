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
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

from thundersync_jax.chat.base import Chat
from thundersync_jax.chat.byte_level import ByteLevel
from thundersync_jax.config import RolloutConfig
from thundersync_jax.engines.base import Engine, RemoteEngine, connect
from thundersync_jax.envs.base import Context, Deadlines, Environment, short
from thundersync_jax.errors import one_line
from thundersync_jax.rollout import commands, interrupts
from thundersync_jax.rollout.agent import PHASES, WAITING, Agent
from thundersync_jax.rollout.attempts import Attempts, Member, StartGate
from thundersync_jax.rollout.commands import Stopped
from thundersync_jax.rollout.events import Event, Failed, Job, Rewarded
from thundersync_jax.rollout.moves import Keep
from thundersync_jax.rollout.teacher import MakeTeacher
from thundersync_jax.types import Span, StopReason, TrajectoryKey

_BYTE_LEVEL = ByteLevel()
_CLOSE_SECS = 2.0  # for each thread to end; they are daemons beyond it


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
        make_environment: Callable[[Context], Environment],
        limits: RolloutConfig,
        seed: int,
        on_span: Callable[[Span], None] | None = None,
        *,
        blocked_secs: float | None = None,
        make_teacher: MakeTeacher | None = None,
        chat: Chat = _BYTE_LEVEL,
        chat_of: Callable[[Any], Chat] | None = None,
        deadlines_of: Callable[[Any], Deadlines] | None = None,
        folder: Path | None = None,
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
          deadlines_of: Deadlines of a task, within `limits`.
          folder: Where attempts have folders; None for temporary ones.
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
        self._deadlines_of, self._folder = deadlines_of, folder
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
        self._left_secs = 0.0  # until that deadline, while starts pause
        self._gate = StartGate(limits, self._pause, self._die)
        self._attempts = Attempts(limits, self._agent, self._tell, self._gate)
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
    def paused(self) -> bool:
        """Whether environments cannot be started, and everybody waits."""
        return self._gate.paused_secs is not None

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
            with interrupts.patience(self._limits.close_timeout_secs + _CLOSE_SECS):
                self._attempts.end(self._loop)
            commands.end_tasks(self._loop, commands.GRACE_SECS)
            self._loop.close()

    def _begin(self, members: dict[TrajectoryKey, Member]) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._ended = None
        self._set_deadline(self._limits.step_timeout_secs)
        self._join(members)

    def _set_deadline(self, secs: float) -> None:
        limit_secs = self._limits.step_timeout_secs
        reason = f"step deadline of {limit_secs:g} s passed"
        self._deadline = self._loop.call_later(
            secs, self._end, StopReason.TIMEOUT, reason
        )

    def _pause(self, begins: bool) -> None:
        """Stops the step's deadline while no environment can be started."""
        if begins and self._deadline is not None:
            self._left_secs = self._deadline.when() - self._loop.time()
            self._deadline.cancel()
        elif not begins and self._ended is None:
            self._set_deadline(self._left_secs)

    def _join(self, members: dict[TrajectoryKey, Member]) -> None:
        self._open.update(members)
        for member in members.values():
            if self._ended is not None:
                stop_reason, reason = self._ended
                reason = f"{reason} before it was added"
                self._attempts.fail(member, stop_reason, reason)
                continue
            self._attempts.begin(member, self._loop).add_done_callback(self._look)

    def _agent(self, member: Member, attempt: int) -> Agent:
        key, task = member.job.key._replace(attempt=attempt), member.job.task
        chat = _of_task(self._chat_of, task, "tools") or self._chat
        deadlines = _of_task(self._deadlines_of, task, "deadlines", Deadlines)
        agent = Agent(
            key=key,
            task=task,
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
            chat=chat,
            keep=self._keep,
            deadlines=deadlines,
            folder=self._folder,
        )
        agent.times["queued"] = member.queued_secs
        return agent

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
            doing = member.agent.moves.doing if member.agent else WAITING
            member.task.cancel()
            if member.agent is not None:
                # Before the event: the reader may update the engine right after it.
                member.agent.release()
            self._attempts.fail(member, stop_reason, f"{reason} during {doing}")

    def _look(self, task: asyncio.Task) -> None:
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


def _of_task(
    function: Callable[[Any], Any] | None, task: Any, what: str, kind: type = object
) -> Any:
    """What a task has of its own; None where nobody asks it. A fault is its alone."""
    if function is None:
        return None
    try:
        found = function(task)
    except BaseException as error:
        reason = f"{what} of the task raised {one_line(error)}"
        raise Stopped(StopReason.ENVIRONMENT_ERROR, reason) from error
    if not isinstance(found, kind | None):
        expected = f"expected {kind.__name__} or None"
        reason = f"{what} of the task are {short(found)}, {expected}"
        raise Stopped(StopReason.ENVIRONMENT_ERROR, reason)
    return found


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
