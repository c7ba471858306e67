"""The process that keeps a sandbox's namespaces, and everything that joins them.

It is process 1 in them and only waits for the end of a pipe whose other end this
process has. So whatever becomes of this process, the kernel ends the sandbox with all
that runs in it; bubblewrap's --die-with-parent would leave a sandbox behind whose
parent is killed while it is being made.
"""

import asyncio
import contextlib
import os
import select
import signal
import time
from pathlib import Path
from typing import Any

from thundersync_jax.sandbox import cgroups
from thundersync_jax.sandbox.base import Limits, SandboxError
from thundersync_jax.sandbox.child import Child, join, readable, said, surely

START_SECS = 60.0  # under load; a fiftieth of it is much
END_SECS = 20.0  # for killed processes to be gone


class Holder:
    """A sandbox's namespaces and control groups.

    Attributes:
      groups: Folders of its control groups, once it has started.
    """

    def __init__(self, name: str, limits: Limits):
        self.groups: list[Path] = []
        self._name, self._limits = name, limits
        self._monitor: Child | None = None
        self._lifeline: int | None = None
        self._init: int | None = None
        self._children: set[Child] = set()
        self._stopping: asyncio.Future[None] | None = None

    async def start(self, request: dict[str, Any]) -> None:
        """Makes it as `join.start` is told. Raises SandboxError."""
        if self._monitor is not None or self._stopping is not None:
            raise SandboxError("a sandbox starts once")
        try:
            async with asyncio.timeout(START_SECS):
                await self._start(request)
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError | OSError):
                raise SandboxError(f"the sandbox did not start: {error!r}") from error
            raise

    def check(self) -> None:
        """Raises SandboxError where it is not running."""
        if self._init is None or self._stopping is not None:
            raise SandboxError("the sandbox is not running")
        poll = select.poll()
        poll.register(self._init, select.POLLIN)
        if poll.poll(0):
            raise SandboxError("the sandbox has ended")

    def join(self, request: dict[str, Any], *fds: int, **files: int) -> Child:
        """Starts a process that joins it to do what is requested."""
        self.check()
        request |= {"sandbox": self._init}
        child = join(self._name, request, (self._init, *fds), **files)
        self._children.add(child)
        child.exited.add_done_callback(lambda _: self._children.discard(child))
        return child

    async def kill(self, mark: int | None, uid: int | None) -> None:
        """Kills what the command of a mark has started, or everything.

        Raises SandboxError where it does not die.
        """
        request = {"do": "kill", "mark": mark, "uid": uid, "secs": END_SECS / 2}
        said(await self.join(request).line())

    async def stop(self) -> None:
        """Ends it with all that has joined it; may be called at any moment, and again.

        Raises SandboxError where something does not end.
        """
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await surely(self._stopping)

    async def _start(self, request: dict[str, Any]) -> None:
        self.groups = cgroups.create(self._name, self._limits)
        lifeline, self._lifeline = os.pipe()
        errors = os.memfd_create("errors")
        try:
            os.write(self._lifeline, b"\n")  # which it repeats once it is there
            self._monitor = join(self._name, request, stdin=lifeline, stderr=errors)
            pid = int(said(await self._monitor.line()))
        except SandboxError as error:
            words = os.pread(errors, 1000, 0).decode(errors="replace").split()
            raise SandboxError(" ".join([*words, f"({error})"])) from error
        finally:
            os.close(lifeline)
            os.close(errors)
        self._monitor.close()
        self._init = os.pidfd_open(pid)
        # Its parent has not seen it end, so the number is its own and no other's.
        if f"\nPPid:\t{self._monitor.pid}\n" not in _status(pid):
            os.close(self._init)
            self._init = None
            raise SandboxError("the sandbox ended as it began")

    async def _stop(self) -> None:
        left = []
        if self._lifeline is not None:
            os.close(self._lifeline)
        if self._init is not None:
            init, self._init = self._init, None
            try:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(init, signal.SIGKILL)
                async with asyncio.timeout(END_SECS):
                    await readable(init)  # the last in its namespace
            except TimeoutError:
                left.append("its processes")
            finally:
                os.close(init)
        children = [*self._children, *([self._monitor] if self._monitor else [])]
        if exits := {child.exited for child in children}:
            _, running = await asyncio.wait(exits, timeout=END_SECS)
            left += ["its helpers"] if running else []
        deadline = time.monotonic() + END_SECS
        while cgroups.remove(self.groups) and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        left += map(str, cgroups.remove(self.groups))
        if left:
            raise SandboxError(f"of a sandbox {' and '.join(left)} do not end")


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""
