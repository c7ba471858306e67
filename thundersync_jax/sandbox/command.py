"""One command in a sandbox: what goes in, what comes out, and its end in time."""

import asyncio
import contextlib
import os
import signal
import time
from typing import Any

from thundersync_jax.sandbox.base import Output, Result, SandboxError
from thundersync_jax.sandbox.child import Child, readable, said, sealed, surely
from thundersync_jax.sandbox.holder import END_SECS, START_SECS, Holder

_PIECE_BYTES = 1 << 16
_MOST_PIECES = 16  # of output after a command's end
_PAUSE_SECS = 0.001  # between two pieces of output that are only counted


async def run(
    holder: Holder,
    request: dict[str, Any],
    stdin: bytes,
    timeout_secs: float,
    most_bytes: int,
) -> Result:
    """Runs a command as `join.run` is told, and returns when it has ended.

    Cancelled, it kills what the command has started first. Raises SandboxError.
    """
    output = Output(most_bytes)
    with _Pipes(stdin) as pipes:
        request |= {"done": pipes.done, "unread": pipes.unread}
        files = {"stdin": pipes.stdin, "stdout": pipes.output, "stderr": pipes.output}
        child = holder.join(request, pipes.done, pipes.unread, **files)
        pipes.begun()
        pump = asyncio.ensure_future(_pump(pipes.unread, output))
        timed_out = False
        try:
            async with asyncio.timeout(START_SECS):
                said(await child.line())
            began = time.monotonic()
            try:
                async with asyncio.timeout(timeout_secs):
                    status = said(await child.line())
            except TimeoutError:
                timed_out = True
                async with asyncio.timeout(END_SECS):
                    await holder.kill(request["mark"], request["uid"])
                    status = said(await child.line())
            secs = time.monotonic() - began
        except BaseException as error:
            await surely(_abandon(holder, child, request))
            if isinstance(error, TimeoutError):
                raise SandboxError("a command neither starts nor ends") from error
            raise
        finally:
            child.close()
            pump.cancel()
            await surely(asyncio.wait({pump}))  # its descriptor is closed next
        holder.check()
        _drain(pipes.unread, output)
    return output.result(int(status), secs, timed_out)


class _Pipes:
    """What one command is connected to, closed at its end."""

    def __init__(self, stdin: bytes):
        self._stdin = stdin
        self._open: set[int] = set()

    def __enter__(self) -> "_Pipes":
        self.stdin = sealed(self._stdin)
        self.unread, self.output = os.pipe()
        self.done, self.finish = os.pipe()
        os.set_blocking(self.unread, False)
        ends = {self.stdin, self.unread, self.output, self.done, self.finish}
        self._open = ends
        return self

    def begun(self) -> None:
        """Closes the command's ends, which it has now."""
        for descriptor in (self.stdin, self.output, self.done):
            self._open.remove(descriptor)
            os.close(descriptor)

    def __exit__(self, *_) -> None:
        for descriptor in self._open:
            os.close(descriptor)


async def _abandon(holder: Holder, child: Child, request: dict[str, Any]) -> None:
    child.signal(signal.SIGTERM)  # heard until it has forked
    with contextlib.suppress(SandboxError, OSError):
        await holder.kill(request["mark"], request["uid"])


async def _pump(unread: int, output: Output) -> None:
    while True:
        await readable(unread)
        if not (data := os.read(unread, _PIECE_BYTES)):
            return
        output.add(data)
        if output.full:  # a flood takes its own time, not the event loop's
            await asyncio.sleep(_PAUSE_SECS)


def _drain(unread: int, output: Output) -> None:
    """What a command has left in its pipe; what is left running may go on writing."""
    for _ in range(_MOST_PIECES):
        try:
            if not (data := os.read(unread, _PIECE_BYTES)):
                return
        except BlockingIOError:
            return
        output.add(data)
