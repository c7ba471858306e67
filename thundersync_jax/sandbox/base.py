"""What a sandbox is: commands and files apart from the host, and who makes them.

What an agent's command did (its status, its time, its flood of output) is a value. What
the sandbox's files do not allow is a `FileError`. `SandboxError` is only for the
sandbox itself, which is away and may be back: the attempt can be tried again.
"""

import dataclasses
import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from thundersync_jax.errors import ConfigError, InfrastructureFault

MEBIBYTE = 1 << 20
MOST_BYTES = 100_000  # of a command's output, or of a file that is read
MOST_COPIED_BYTES = 256 * MEBIBYTE
MOST_COPIED_FILES = 20_000


class SandboxError(InfrastructureFault):
    """The sandbox could not be made, or is gone; nothing the agent may do ends it."""


class FileError(Exception):
    """A path in the sandbox that is missing, too large, no file, or has no room."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one sandbox may use."""

    memory_mb: int = 2048  # MiB of its processes; of each, where there are no cgroups
    processes: int = 256  # threads count
    disk_mb: int = 1024  # MiB of all files it writes
    file_mb: int = 512  # MiB of one file
    cpus: float = 1.0  # at a time; only where there are cgroups
    cpu_secs: int = 3600  # of one process

    def __post_init__(self):
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"the sandbox limit {name} is {value}, expected > 0.")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A sandbox to make.

    Attributes:
      root: A folder that holds a root file system, None for the host's own /usr. It is
        never written to. What it has at `workdir` is not seen: copy it in.
      image: For containers: the name of an image.
      environment: For containers: a folder with a Dockerfile, from which the image is
        built once.
      workdir: Where commands start: an absolute path, empty at first, the agent's.
      folders: Other absolute paths like it.
      env: Variables of every command, beside PATH, HOME, USER and LANG.
      limits: What it may use.
      network: Whether it has the network of the host, with all that listens there.
      user: For containers: who runs commands, None for the image's own user.
    """

    root: Path | None = None
    image: str | None = None
    environment: Path | None = None
    workdir: str = "/workspace"
    folders: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    limits: Limits = Limits()
    network: bool = False
    user: str | None = None

    def __post_init__(self):
        for path in (self.workdir, *self.folders):
            if posixpath.normpath(path) != path or not re.match("/[^/]", path):
                raise ConfigError(
                    f"a folder of a sandbox is {path!r}, expected an absolute path "
                    "without '..' below '/'."
                )


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command did.

    Attributes:
      status: Its exit status; 128 + n where signal n ended it; 126 where it or its
        folder cannot be entered, 127 where there is no such program.
      output: Its stdout and stderr in the order they were written. Where it is longer
        than was asked for, its middle is missing after the first `head_bytes`.
      secs: How long it ran.
      cut_bytes: How many bytes of its output are missing.
      timed_out: Whether it was killed, with all it had started, for its time.
    """

    status: int
    output: bytes
    secs: float
    head_bytes: int = 0
    cut_bytes: int = 0
    timed_out: bool = False


@dataclasses.dataclass(frozen=True)
class Copied:
    """What became of a copy: names left out are links out of the folder, or devices."""

    files: int
    left_out: tuple[str, ...] = ()


User = Literal["root"] | None  # None is the agent
Command = str | Sequence[str]  # a line for bash, or a program and its arguments


class Sandbox(Protocol):
    """One sandbox. All may be cancelled at any moment; `stop` leaves nothing of it.

    Attributes:
      has_root: Whether there is a root apart from the agent, as whom commands run and
        whose files the agent cannot change.
    """

    has_root: bool

    async def start(self) -> None:
        """Makes it. Raises SandboxError."""

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
        """Runs a command and returns when it has ended, one command at a time.

        What it left in the background lives on until `kill_all` or `stop`, unless the
        command took more than its seconds.

        Args:
          command: A line for bash, or a program and its arguments.
          stdin: All of its input.
          timeout_secs: After which it is killed with everything it started.
          cwd: Where it starts, relative to the work directory.
          env: Variables beside those of the sandbox.
          user: The agent, or "root".
          most_bytes: Of output that are kept, half of them from its end.

        Raises:
          SandboxError: The sandbox is gone.
          ValueError: "root" where the sandbox has none.
        """

    async def read(self, path: str, *, most_bytes: int = MOST_BYTES) -> bytes:
        """Reads a regular file. Raises FileError, SandboxError."""

    async def write(
        self, path: str, data: bytes, *, user: User = None, mode: int = 0o644
    ) -> None:
        """Writes a file, and the folders it needs. Raises FileError, SandboxError."""

    async def copy_in(
        self, folder: str | os.PathLike, path: str, *, user: User = None
    ) -> None:
        """Copies what a host folder holds into one of the sandbox.

        Raises FileError, SandboxError; OSError where the host's cannot be read.
        """

    async def copy_out(
        self,
        path: str,
        folder: str | os.PathLike,
        *,
        most_bytes: int = MOST_COPIED_BYTES,
        most_files: int = MOST_COPIED_FILES,
    ) -> Copied:
        """Copies what a folder (or one file) holds into a host folder.

        Raises FileError beyond the limits too, SandboxError; OSError of the host's.
        """

    async def kill_all(self) -> None:
        """Kills every process of the agent and waits; the files stay."""

    async def stop(self) -> None:
        """Ends it with all that is in it; may be called at any moment, and again."""


class Provider(Protocol):
    """Makes sandboxes of one kind, for one run."""

    async def check(self) -> str:
        """Makes one sandbox, and returns in a line how its limits are kept.

        Raises ConfigError that names what is missing on this machine.
        """

    def create(self, spec: Spec, name: str) -> Sandbox:
        """A sandbox that has not started. ConfigError where the spec cannot be met."""

    async def reap(self) -> None:
        """Ends what a crash left of this run; what lives of other processes stays."""


class Output:
    """The head and the tail of a stream, in bounded memory."""

    def __init__(self, most_bytes: int):
        self._half = max(most_bytes // 2, 1)
        self._head, self._tail, self._bytes = bytearray(), bytearray(), 0

    @property
    def full(self) -> bool:
        """Whether more would only be counted."""
        return self._bytes > 2 * self._half

    def add(self, data: bytes) -> None:
        self._bytes += len(data)
        more = self._half - len(self._head)
        self._head += data[:more]
        self._tail += data[more:]
        del self._tail[: -self._half]

    def result(self, status: int, secs: float, timed_out: bool) -> Result:
        output = bytes(self._head + self._tail)
        cut = self._bytes - len(output)
        return Result(status, output, secs, len(self._head), cut, timed_out)


def arguments(command: Command) -> list[str]:
    """The program that runs a command, and its arguments.

    Raises ValueError where there is none.
    """
    if isinstance(command, str):
        return ["/bin/bash", "-c", command]
    if not command or not command[0]:
        raise ValueError(f"the command is {command!r}, expected a program's name")
    return list(command)
