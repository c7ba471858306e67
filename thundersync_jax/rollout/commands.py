"""What environments, somebody else's code, must not do to the loop that runs them.

An environment may raise, never return, swallow its cancellation or block its thread.
None of that may stop the trajectory that waits for it, or the pool: commands run under
a deadline, each a task that can be left behind, and a waiting thread asks now and then
whether the loop still turns. That costs nothing while events come.
"""

import asyncio
import contextlib
import dataclasses
import inspect
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from thundersync_jax.errors import InfrastructureFault, PolicyFault, one_line
from thundersync_jax.types import StopReason

GRACE_SECS = 0.5  # how long a cancelled command may clean up before it is left behind
PING_SECS = 1.0  # between two questions to the loop
_LAST_CHANCE_SECS = 1.0  # for the loop's answer, once it is late
_FRAMES = 3  # of the stack that blocks, in messages


class Stopped(Exception):
    """A trajectory failed: why, as a value that never reaches the trainer."""

    def __init__(self, stop_reason: StopReason, reason: str, fault: bool = False):
        """`fault` says that it was the machinery's fault, which may be over soon."""
        super().__init__(reason)
        self.stop_reason = stop_reason
        self.reason = reason
        self.fault = fault
        self.at_start = False  # whether the environment could not be started
        self.left_behind = False  # whether what was stopped goes on nevertheless


class Commands:
    """Runs commands and keeps count of those that ignore their cancellation."""

    def __init__(self):
        self.stopping: set[asyncio.Task] = set()  # cancelled, and not ended yet
        self.abandoned = 0  # commands so far that outlived the grace period

    async def run(
        self, function: Callable[[], Awaitable[Any]], limit_secs: float, name: str
    ) -> Any:
        """Returns what `await function()` returns.

        Raises:
          Stopped: TIMEOUT past the limit, ENVIRONMENT_ERROR where it raised.
        """
        # Named after the trajectory that waits, for whoever finds it running.
        label = f"{asyncio.current_task().get_name()}, {name},"
        task = asyncio.create_task(_awaited(function), name=label)
        try:
            await asyncio.wait((task,), timeout=limit_secs)
        except asyncio.CancelledError:
            await self._stop(task)
            raise
        if not task.done():
            ended = await self._stop(task)
            left = "" if ended else "; it ignores its cancellation and was left behind"
            stopped = Stopped(
                StopReason.TIMEOUT,
                f"{name} was stopped at its deadline of {limit_secs:g} s{left}",
            )
            stopped.left_behind = not ended
            raise stopped
        if task.cancelled():
            raise Stopped(StopReason.ENVIRONMENT_ERROR, f"{name} cancelled itself")
        if (error := task.exception()) is not None:
            if isinstance(error, PolicyFault):
                raise error
            error = error.__cause__ if isinstance(error, _Exit) else error
            fault = isinstance(error, InfrastructureFault)
            reason = f"{name} raised {one_line(error)}"
            raise Stopped(StopReason.ENVIRONMENT_ERROR, reason, fault) from error
        return task.result()

    async def _stop(self, task: asyncio.Task) -> bool:
        """Cancels a command and waits for its end, but not for ever."""
        self.stopping.add(task)
        task.add_done_callback(self._ended)
        task.cancel()
        await asyncio.wait((task,), timeout=GRACE_SECS)
        self.abandoned += not task.done()
        return task.done()

    def _ended(self, task: asyncio.Task) -> None:
        self.stopping.discard(task)
        if not task.cancelled():
            # Looked at, or asyncio reports an exception that nobody retrieved.
            task.exception()


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop that no task of its own can stop."""
    loop = asyncio.new_event_loop()
    stop = loop.stop

    def stop_from_outside() -> None:
        if asyncio.current_task(loop) is not None:
            raise RuntimeError("the event loop is not this attempt's alone to stop")
        stop()

    loop.stop = stop_from_outside
    return loop


@dataclasses.dataclass(eq=False)
class LoopWatch:
    """Looks after one loop, which runs in `thread`; `look` belongs to one thread."""

    loop: asyncio.AbstractEventLoop
    thread: threading.Thread
    blocked_secs: float  # silence of the loop after which it is said who blocks it
    limit_secs: float  # silence of the loop after which nothing more is expected of it

    def __post_init__(self):
        self._said: set[str] = set()
        self._pinged_secs = 0.0
        self._answered = threading.Event()
        self._answered.set()

    def look(self) -> None:
        """Asks, or checks for the answer; every culprit is named once.

        Raises:
          RuntimeError: The loop has been silent for `limit_secs`.
        """
        now = time.monotonic()
        if self._answered.is_set():
            if now - self._pinged_secs >= PING_SECS:
                self._pinged_secs = now
                self._answered.clear()
                self.loop.call_soon_threadsafe(self._answered.set)
            return
        if now - self._pinged_secs <= self.blocked_secs:
            return
        # Not at once: this whole process may have been suspended.
        if not self._answered.wait(_LAST_CHANCE_SECS):
            silent_secs = time.monotonic() - self._pinged_secs
            culprit = self._culprit()
            message = (
                f"the event loop has not turned for {silent_secs:.1f} s: {culprit}. "
                "Environments must await; move blocking calls into asyncio.to_thread."
            )
            if silent_secs > self.limit_secs:
                raise RuntimeError(message)
            if culprit not in self._said:
                self._said.add(culprit)
                logging.warning("%s", message)

    def _culprit(self) -> str:
        frame = sys._current_frames().get(self.thread.ident)
        if frame is None:
            return "its thread is gone"
        # Innermost last: the environment's own line and what it called.
        calls = traceback.extract_stack(frame)[-_FRAMES:]
        where = " > ".join(f"{c.name} ({c.filename}:{c.lineno})" for c in calls)
        task = asyncio.current_task(self.loop)
        return f"{task.get_name() if task else 'no task'} is in {where}"


def end_tasks(loop: asyncio.AbstractEventLoop, grace_secs: float) -> None:
    """Cancels what a stopped loop still has to do, from its thread, and waits a little.

    What takes more than twice `grace_secs` to clean up is left behind.
    """
    for is_due in (_begun, lambda task: True):
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            if is_due(task) and not task.cancelling():
                task.cancel()
        end = time.monotonic() + grace_secs
        while tasks and (left_secs := end - time.monotonic()) > 0:
            # Whatever the end brings up: what died first is what is reported.
            with contextlib.suppress(BaseException):
                wait = asyncio.wait(tasks, timeout=left_secs)
                loop.run_until_complete(wait)
            tasks = {task for task in tasks if not task.done()}


class _Exit(Exception):
    """What an environment raised and asyncio would raise out of its loop."""


async def _awaited(function: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await function()
    except (SystemExit, KeyboardInterrupt) as error:
        raise _Exit from error


def _begun(task: asyncio.Task) -> bool:
    """False of a task whose coroutine may hold another, of a parent that is cancelled.

    That is for the parent to cancel: cut here it would never be awaited, of which
    asyncio complains.
    """
    coroutine = task.get_coro()
    if not inspect.iscoroutine(coroutine):
        return True
    return inspect.getcoroutinestate(coroutine) != inspect.CORO_CREATED
