"""Environment commands under a deadline, each a task that can be left behind.

An environment is somebody else's code: it may raise, never return, or swallow its
cancellation. None of that may stop the trajectory that waits for it, or the pool.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from thundersync_jax.errors import one_line
from thundersync_jax.types import StopReason

GRACE_SECS = 0.5  # how long a cancelled command may clean up before it is left behind


class Stopped(Exception):
    """A trajectory failed: why, as a value that never reaches the trainer."""

    def __init__(self, stop_reason: StopReason, reason: str):
        super().__init__(reason)
        self.stop_reason = stop_reason
        self.reason = reason


class Commands:
    """Runs commands and keeps count of those that ignore their cancellation.

    Attributes:
      stopping: Cancelled commands that have not ended.
      abandoned: Number of commands that outlived the grace period.
    """

    def __init__(self):
        self.stopping: set[asyncio.Task] = set()
        self.abandoned = 0

    async def run(
        self,
        function: Callable[[], Awaitable[Any]],
        limit_secs: float,
        name: str,
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
            raise Stopped(
                StopReason.TIMEOUT,
                f"{name} was stopped at its deadline of {limit_secs:g} s{left}",
            )
        if task.cancelled():
            raise Stopped(StopReason.ENVIRONMENT_ERROR, f"{name} cancelled itself")
        error = task.exception()
        if isinstance(error, Exception):
            reason = f"{name} raised {one_line(error)}"
            raise Stopped(StopReason.ENVIRONMENT_ERROR, reason) from error
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


async def _awaited(function: Callable[[], Awaitable[Any]]) -> Any:
    return await function()
