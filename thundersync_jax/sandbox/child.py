"""A child process watched by the event loop: no thread waits for it.

asyncio's own starts one thread for each child before Python 3.12, and keeps in memory
whatever a pipe brings.
"""

import asyncio
import contextlib
import fcntl
import functools
import marshal
import os
import signal
import subprocess
import sys
import types
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from thundersync_jax.sandbox.base import FileError, SandboxError

_FOLDER = Path(__file__).parent
# A script is compiled each time it runs, which takes longer than all else it does.
_ENTRY = """
import marshal, sys
with open(int(sys.argv[1]), "rb") as file:
    code, request = marshal.load(file)
names = {"__name__": "join"}
exec(code, names)
names["answer"](request)
"""


class Child:
    """One process, and the first line that it reports on a pipe of its own.

    It inherits no environment and no descriptor that is not named, and has a session
    of its own, so that a terminal's Ctrl-C does not reach it.
    """

    def __init__(self, argv: Sequence[str], fds: Sequence[int] = (), **files: int):
        """Starts it; needs a running event loop.

        Args:
          argv: Its program and arguments, without the last: the report's descriptor.
          fds: Descriptors that it inherits under their own numbers.
          **files: `stdin`, `stdout`, `stderr`; /dev/null where none is given.
        """
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        self._report, report = os.pipe()
        self._unread, self._closed = b"", False
        try:
            self._process = subprocess.Popen(
                [*argv, str(report)],
                pass_fds=(*fds, report),
                env=_library_path(),
                start_new_session=True,
                **{
                    name: files.get(name, subprocess.DEVNULL)
                    for name in ("stdin", "stdout", "stderr")
                },
            )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(report)
        self.pid = self._process.pid
        self._pidfd: int | None = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    async def line(self) -> str:
        """The next line that it reports, empty where it has ended without one."""
        while b"\n" not in self._unread:
            await readable(self._report)
            if not (more := os.read(self._report, 4096)):
                break
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    def close(self) -> None:
        """Listens no more."""
        if not self._closed:
            self._closed = True
            os.close(self._report)

    def signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self._pidfd is not None:
            signal.pidfd_send_signal(self._pidfd, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
        self.exited.set_result(self._process.wait())

    def __del__(self):
        if not getattr(self, "_closed", True):
            self.close()


def join(
    name: str, request: dict[str, Any], fds: Sequence[int] = (), **files: int
) -> Child:
    """Starts the program `join` with a request; `fds` are those it names.

    The sandbox's name is there for people who list processes.
    """
    request |= {"modules": str(_FOLDER)}
    asked = sealed(marshal.dumps((_code(), request)))
    try:
        argv = [sys.executable, "-I", "-S", "-c", f"# {name}{_ENTRY}", str(asked)]
        return Child(argv, (*fds, asked), **files)
    finally:
        os.close(asked)


def said(report: str) -> str:
    """What follows an `ok`; the failure otherwise.

    Raises:
      FileError: What the sandbox's files do not allow.
      SandboxError: Everything else.
    """
    kind, _, text = report.partition(" ")
    if kind == "no":
        raise FileError(text)
    if kind != "ok":
        raise SandboxError(text or "the sandbox's helper ended without a word")
    return text


def sealed(data: bytes) -> int:
    """A descriptor of bytes in memory that nobody can change."""
    file = os.memfd_create("data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(file, "wb", closefd=False) as stream:
            stream.write(data)
        os.lseek(file, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(file)
        raise
    return file


async def readable(descriptor: int) -> None:
    """Waits until a descriptor can be read, or has ended."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(descriptor, lambda: ready.done() or ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


async def surely(work: Awaitable[Any]) -> Any:
    """Runs bounded clean-up to its end, and is cancelled only then."""
    task = asyncio.ensure_future(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break
    if cancelled is not None and not task.cancelled():
        with contextlib.suppress(Exception):
            task.result()
        raise cancelled
    return task.result()


@functools.cache
def _code() -> types.CodeType:
    return compile((_FOLDER / "join.py").read_bytes(), "join.py", "exec")


def _library_path() -> dict[str, str]:
    """All of the environment that a Python built on shared libraries may need."""
    return {k: v for k, v in os.environ.items() if k == "LD_LIBRARY_PATH"}
