"""Whether an event loop in another thread still turns, and how one ends.

Costs nothing while events come; a waiting thread asks now and then and is told who
blocks the loop where no answer comes.
"""

import asyncio
import contextlib
import inspect
import sys
import threading
import time
import traceback

PING_SECS = 1.0  # between two questions
_LAST_CHANCE_SECS = 1.0
_FRAMES = 3  # of the stack that blocks


class LoopWatch:
    """Looks after one loop; `look` belongs to one thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: threading.Thread,
        blocked_secs: float,
    ):
        """Watches `loop`, which runs in `thread`."""
        self._loop = loop
        self._thread = thread
        self._blocked_secs = blocked_secs
        self._asked_secs = 0.0
        self._answered = threading.Event()
        self._answered.set()

    def look(self) -> None:
        """Asks, or checks for the answer.

        Raises:
          RuntimeError: The loop has been silent for too long.
        """
        now = time.monotonic()
        if self._answered.is_set():
            if now - self._asked_secs >= PING_SECS:
                self._asked_secs = now
                self._answered.clear()
                self._loop.call_soon_threadsafe(self._answered.set)
            return
        if now - self._asked_secs <= self._blocked_secs:
            return
        # Not at once: this whole process may have been suspended.
        if not self._answered.wait(_LAST_CHANCE_SECS):
            raise RuntimeError(
                f"the event loop has not turned for {self._blocked_secs:g} s: "
                f"{self._culprit()}. Environments must await; move blocking calls into "
                "asyncio.to_thread."
            )

    def _culprit(self) -> str:
        frame = sys._current_frames().get(self._thread.ident)
        if frame is None:
            return "its thread is gone"
        # Innermost last: the environment's own line and what it called.
        calls = traceback.extract_stack(frame)[-_FRAMES:]
        where = " > ".join(f"{c.name} ({c.filename}:{c.lineno})" for c in calls)
        task = asyncio.current_task(self._loop)
        return f"{task.get_name() if task else 'no task'} is in {where}"


def end_tasks(loop: asyncio.AbstractEventLoop, grace_secs: float) -> None:
    """Cancels whatever a stopped loop still has to do and waits a little for its end.

    Args:
      loop: It was stopped, and this is its thread.
      grace_secs: For cleaning up; what takes twice as long is left behind.
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


def _begun(task: asyncio.Task) -> bool:
    """False of a task whose coroutine may hold another, of a parent that is cancelled.

    That is for the parent to cancel: cut here it would never be awaited, of which
    asyncio complains.
    """
    coroutine = task.get_coro()
    if not inspect.iscoroutine(coroutine):
        return True
    return inspect.getcoroutinestate(coroutine) != inspect.CORO_CREATED
