"""Sandboxes by bubblewrap: namespaces of the kernel, without an engine or an image.

Every command and every file operation joins the namespaces of a sandbox's holder by
the program `join`. Made by root, each sandbox has users of its own, and a root apart
from the agent. Made by anybody else, its one user is the caller's: the agent can do no
more, but on kernels before 5.14 its processes count among the caller's.
"""

import asyncio
import contextlib
import os
import platform
import posixpath
import re
import secrets
import signal
import subprocess
from collections.abc import Mapping

from thundersync_jax.errors import ConfigError
from thundersync_jax.sandbox import archive, cgroups, layout
from thundersync_jax.sandbox.base import (
    MEBIBYTE,
    MOST_BYTES,
    MOST_COPIED_BYTES,
    MOST_COPIED_FILES,
    Command,
    Copied,
    FileError,
    Result,
    SandboxError,
    Spec,
    User,
    arguments,
)
from thundersync_jax.sandbox.child import Child, said, sealed, surely
from thundersync_jax.sandbox.command import run
from thundersync_jax.sandbox.holder import END_SECS, Holder
from thundersync_jax.sandbox.join import MACHINES

_FILE_SECS = 300.0


class Bubblewrap:
    """Makes sandboxes for one run.

    Attributes:
      run_id: Names what a crash may leave; letters, digits, `_` and `-`.
    """

    def __init__(self, run_id: str):
        if not re.fullmatch(r"[\w-]+", run_id):
            raise ConfigError(f"the run id is {run_id!r}, expected letters and digits.")
        self._prefix = f"thundersync.{run_id}."
        self._owner = f"{os.getpid()}.{layout.start_time(os.getpid())}"

    async def check(self) -> str:
        """As `Provider.check`."""
        machine, release = platform.machine(), platform.release()
        numbers = [int(n) for n in re.findall(r"\d+", release)[:2]]
        if platform.system() != "Linux" or numbers < layout.OLDEST_LINUX:
            raise ConfigError(
                "sandboxes by bubblewrap need Linux 5.9 or newer, this is "
                f"{platform.system()} {release}."
            )
        if machine not in MACHINES:
            raise ConfigError(
                f"sandboxes by bubblewrap know the system calls of {list(MACHINES)}, "
                f"this machine is {machine!r}."
            )
        bwrap = layout.program()
        version = subprocess.run([bwrap, "--version"], capture_output=True, text=True)
        sandbox = self.create(Spec(), f"check{secrets.token_hex(4)}")
        try:
            await sandbox.start()
            await sandbox.run(["true"])
            limited = sandbox.limited()
        except SandboxError as error:
            raise ConfigError(
                f"bubblewrap cannot make a sandbox here: {error}. {layout.forbidden()} "
                "Commands never run without a sandbox."
            ) from error
        finally:
            await sandbox.stop()
        return f"{version.stdout.strip()}: {limited}"

    def create(self, spec: Spec, name: str) -> "BubblewrapSandbox":
        """As `Provider.create`; `name` is of letters, digits, `_` and `-`."""
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"the sandbox is {name!r}, expected letters and digits.")
        if spec.image or spec.environment or spec.user:
            raise ConfigError(
                "bubblewrap has no images: a sandbox's root is the host's /usr, or a "
                "folder with a root file system; use a container engine for images."
            )
        return BubblewrapSandbox(spec, f"{self._prefix}{self._owner}.{name}")

    async def reap(self) -> None:
        """As `Provider.reap`. Sandboxes end by themselves, their groups are left."""
        groups = []
        for folder in cgroups.left(self._prefix):
            pid, start = folder.name.removeprefix(self._prefix).split(".")[:2]
            if layout.start_time(int(pid)) != start:
                groups.append(folder)
        for _ in range(int(END_SECS / 0.02)):
            for folder in groups:
                for member in layout.text_of(folder / "cgroup.procs").split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(member), signal.SIGKILL)
            if not (groups := cgroups.remove(groups)):
                return
            await asyncio.sleep(0.02)
        raise SandboxError(f"groups of an earlier run do not end: {groups[0]}")


class BubblewrapSandbox:
    """As `base.Sandbox`."""

    def __init__(self, spec: Spec, name: str):
        self._spec, self._name = spec, name
        self._holder = Holder(name, spec.limits)
        self._users = layout.users()
        self.has_root = self._users is not None
        self._turn = asyncio.Lock()  # of commands
        self._commands = 0

    async def start(self) -> None:
        outer, maps = self._users or (None, None)
        agent = layout.AGENT if maps else 0  # where its folders are made
        scratch = [
            *((folder, agent, 0o1777) for folder in ("/tmp", "/var/tmp", "/dev/shm")),
            *((folder, agent, 0o755) for folder in (layout.HOME, self._spec.workdir)),
            *((folder, agent, 0o755) for folder in self._spec.folders),
            *([("/root", 0, 0o700)] if maps else []),
        ]
        files = (
            {} if self._spec.root else {k: v.encode() for k, v in layout.FILES.items()}
        )
        words = layout.words_of(self._spec, [at for at, *_ in scratch], self.has_root)
        words.append(self._name)  # for people who list processes
        request = {
            "do": "start",
            "bwrap": layout.program(),
            "outer": outer,
            "maps": maps,
            "files": files,
            "arguments": words,
            "scratch": scratch,
            "disk_bytes": self._spec.limits.disk_mb * MEBIBYTE,
        }
        await self._holder.start(request)

    async def run(
        self,
        command: Command,
        *,
        stdin: bytes = b"",
        timeout_secs: float = 60.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: User = None,
        most_bytes: int = MOST_BYTES,
    ) -> Result:
        name, home = ("root", "/root") if user else ("agent", layout.HOME)
        own = {"PATH": layout.PATH, "LANG": "C.UTF-8", "USER": name, "LOGNAME": name}
        request = {
            "do": "run",
            "argv": arguments(command),
            "cwd": posixpath.join(self._spec.workdir, cwd or ""),
            "env": {**own, "HOME": home, **self._spec.env, **(env or {})},
            "uid": self._uid(user),
        }
        async with self._turn:
            self._holder.check()
            self._commands += 1
            groups = self._holder.groups
            request |= {
                "mark": self._commands,
                "rlimits": layout.rlimits(self._spec.limits, groups),
                "cgroups": cgroups.members(groups),
            }
            return await run(self._holder, request, stdin, timeout_secs, most_bytes)

    async def read(self, path: str, *, most_bytes: int = MOST_BYTES) -> bytes:
        file = os.memfd_create("read")
        try:
            request = {"do": "read", "path": self._path(path), "most_bytes": most_bytes}
            await self._finish(self._begin(request, stdout=os.dup(file)), path)
            return os.pread(file, most_bytes, 0)
        finally:
            os.close(file)

    async def write(
        self, path: str, data: bytes, *, user: User = None, mode: int = 0o644
    ) -> None:
        request = {"do": "write", "path": self._path(path), "mode": mode}
        await self._finish(self._begin(request, user, stdin=sealed(data)), path)

    async def copy_in(
        self, folder: str | os.PathLike, path: str, *, user: User = None
    ) -> None:
        limits = self._spec.limits.disk_mb * MEBIBYTE, MOST_COPIED_FILES
        request = {"do": "unpack", "path": self._path(path)}
        source, stream = os.pipe()

        def pack():
            # Where the other side ends early, it says why.
            with contextlib.suppress(BrokenPipeError), open(stream, "wb") as file:
                try:
                    archive.pack(folder, file, *limits)
                except archive.Refused as error:
                    raise FileError(f"{folder}: {error}") from error

        await self._stream(request, pack, stream, user, stdin=source)

    async def copy_out(
        self,
        path: str,
        folder: str | os.PathLike,
        *,
        most_bytes: int = MOST_COPIED_BYTES,
        most_files: int = MOST_COPIED_FILES,
    ) -> Copied:
        limits = {"most_bytes": most_bytes, "most_files": most_files}
        request = {"do": "pack", "path": self._path(path), **limits}
        stream, target = os.pipe()

        def unpack():
            with open(stream, "rb") as file:
                return archive.unpack(file, folder, most_bytes, most_files)

        files, names = await self._stream(request, unpack, stream, stdout=target)
        return Copied(files, tuple(names))

    async def kill_all(self) -> None:
        await self._holder.kill(None, self._uid(None))

    async def stop(self) -> None:
        await self._holder.stop()

    def limited(self) -> str:
        """How the limits of this sandbox, which runs, are kept."""
        groups = self._holder.groups
        by = {
            "memory": ("memory", "memory of each process"),
            "pids": ("processes", "processes"),
            "cpu": ("processors", None),
        }
        kept = [
            f"{a} by cgroups" for k, (a, _) in by.items() if cgroups.covers(groups, k)
        ]
        kept += [
            f"{b} by rlimits"
            for k, (_, b) in by.items()
            if b and not cgroups.covers(groups, k)
        ]
        return ", ".join(kept)

    def _begin(self, request: dict, user: User = None, **files: int) -> Child:
        """Starts one operation on files, which takes the descriptors."""
        try:
            return self._holder.join(request | {"uid": self._uid(user)}, **files)
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    async def _finish(self, child: Child, path: str) -> None:
        try:
            async with asyncio.timeout(_FILE_SECS):
                said(await child.line())
        except TimeoutError as error:
            raise FileError(f"{path}: no end in {_FILE_SECS} s") from error
        finally:
            child.signal(signal.SIGKILL)
            await surely(asyncio.wait({child.exited}, timeout=END_SECS))

    async def _stream(
        self, request: dict, work, other: int, user: User = None, **files: int
    ):
        """One operation, and in a thread the work at the other end of its stream."""
        try:
            child = self._begin(request, user, **files)
        except BaseException:
            os.close(other)
            raise
        thread = asyncio.get_running_loop().run_in_executor(None, work)
        refused = None
        try:
            await self._finish(child, request["path"])
        except FileError as error:
            refused = error
        finally:  # the child is gone, so the thread ends
            await surely(asyncio.wait({thread}))
        try:
            result = thread.result()
        except archive.Refused as error:
            raise refused or FileError(f"{request['path']}: {error}") from error
        if refused is not None:
            raise refused
        return result

    def _uid(self, user: User) -> int | None:
        if user not in (None, "root"):
            raise ValueError(f"the user is {user!r}, expected None or 'root'")
        if user == "root" and not self.has_root:
            raise ValueError("this sandbox has no root: ask its has_root first")
        return (0 if user else layout.AGENT) if self.has_root else None

    def _path(self, path: str) -> str:
        if "\0" in path:
            raise FileError(f"{path!r} is no path")
        return posixpath.join(self._spec.workdir, path)
