"""Agents in terminals: commands in a sandbox of their own, a verdict in another one.

A task brings files and an instruction. The agent works on the files by `bash` in its
sandbox; whatever it has started is dead before grading begins. Then its work directory,
and nothing else, goes to a fresh sandbox, where the tests run. Neither they nor their
verdict are ever where the agent is.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import re
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thundersync_jax.config.checks import positive
from thundersync_jax.config.settings import check_types
from thundersync_jax.envs.base import Action, Context, Observation, Verdict
from thundersync_jax.sandbox.base import (
    FileError,
    Limits,
    Provider,
    Result,
    Sandbox,
    Spec,
)
from thundersync_jax.sandbox.bubblewrap import Bubblewrap
from thundersync_jax.types import LARGEST_REWARD

TESTS, LOGS = "/tests", "/logs/verifier"  # of a verifier alone
_REWARD = f"{LOGS}/reward.txt"
# Directory and exported variables are those that the last command left behind.
_STATE = "/home/agent/.state"
_BASH = f"""\
[ -f {_STATE} ] && . {_STATE}
trap '{{ export -p; printf "cd -- %q\\n" "$PWD"; }} >{_STATE} 2>/dev/null' EXIT
eval "$1"
"""
# Sequences that begin with escape, those with a text of their own, and what is left.
_CONTROLS = re.compile(
    "\x1b(?:\\[[0-?]*[ -/]*[@-~]|[\\]PX^_].*?(?:\x1b\\\\|\x07)|[ -/]*[0-~])"
    "|[\x00-\x08\x0b-\x1f\x7f-\x9f]",
    re.DOTALL,
)
_NUMBERS = itertools.count()

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command. Directory and exported variables persist.",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string", "description": "A line for bash"},
                    "timeout": {
                        "type": "number",
                        "description": "Seconds after which it is killed",
                    },
                },
                "required": ["command"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "submit",
            "description": "Hands the work in: it is graded as it is now.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
)


@dataclasses.dataclass(frozen=True)
class SandboxOptions:
    """Where commands run, and what of them the policy sees."""

    starting: int = 4  # sandboxes that start at the same time
    command_secs: float = 30.0  # most seconds of a command, which is killed then
    output_tokens: int = 1000  # of a command that are shown; its middle is cut
    memory_mb: int = 2048  # most of a sandbox
    processes: int = 256  # most of a sandbox
    disk_mb: int = 1024  # most of a sandbox
    cpus: float = 1.0  # most of a sandbox
    artefact_mb: int = 256  # most of a work directory that is graded
    bash: bool = True  # whether commands are run; otherwise they are refused

    def __post_init__(self):
        prefix = "env.options.sandbox."
        check_types(self, prefix)
        positive(self, prefix, ["starting", "command_secs", "output_tokens", "cpus"])
        positive(self, prefix, ["memory_mb", "processes", "disk_mb", "artefact_mb"])

    def limits(self) -> Limits:
        return Limits(
            memory_mb=self.memory_mb,
            processes=self.processes,
            disk_mb=self.disk_mb,
            file_mb=self.disk_mb,
            cpus=self.cpus,
        )


@dataclasses.dataclass(frozen=True)
class TerminalTask:
    """One task.

    Attributes:
      name: Unique among the tasks.
      instruction: What the policy reads.
      files: In the work directory at first: their content by path.
      tests: In `/tests`, and only where the work is graded. Of them `test.sh` is run,
        which leaves a number in `/logs/verifier/reward.txt`.
      solution: Commands that solve it, with what is observed after each.
      workdir: Where commands start.
    """

    name: str
    instruction: str
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    tests: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    solution: tuple[tuple[str, str], ...] = ()
    workdir: str = "/workspace"


class Sandboxes:
    """The sandboxes of one run; of those that start at the same time there are few."""

    def __init__(self, options: SandboxOptions):
        self.options = options
        self.provider: Provider = Bubblewrap(f"u{os.getuid()}")
        # A training and an evaluation have an event loop each.
        self._gates: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def started(self, task: TerminalTask, name: str, **spec: Any) -> Sandbox:
        """A sandbox with an empty work directory. Raises SandboxError."""
        spec = Spec(workdir=task.workdir, limits=self.options.limits(), **spec)
        sandbox = self.provider.create(spec, f"{name}-{next(_NUMBERS)}")
        loop = asyncio.get_running_loop()
        gate = self._gates.setdefault(loop, asyncio.Semaphore(self.options.starting))
        async with gate:
            await sandbox.start()
        return sandbox


class Terminal:
    """One attempt at one task."""

    def __init__(self, sandboxes: Sandboxes, context: Context):
        self._sandboxes, self._options = sandboxes, sandboxes.options
        self._context = context
        self._sandbox: Sandbox | None = None
        self._work: tempfile.TemporaryDirectory | None = None  # what was handed in
        self._secs = {"start_secs": 0.0, "command_secs": 0.0, "grade_secs": 0.0}

    async def start(self, task: TerminalTask) -> str:
        self._task = task
        with self._timed("start_secs"):
            self._sandbox = await self._sandboxes.started(task, self._name("agent"))
            await _put(self._sandbox, task.files, task.workdir)
        return task.instruction

    async def step(self, action: Action) -> Observation:
        if action.kind == "answer" or action.name == "submit":
            return Observation(done=True)
        command, secs = action.text, self._options.command_secs
        if action.name:
            command = action.arguments.get("command")
            asked = action.arguments.get("timeout", secs)
            if action.name != "bash" or not isinstance(command, str):
                return Observation("error: call bash with a command, or submit")
            if isinstance(asked, int | float) and asked > 0:
                secs = min(float(asked), secs)
        if not self._options.bash:
            return Observation("error: no bash")
        if "\0" in command:
            return Observation("error: the command has a zero byte")
        # Before the deadline, which would end more than the command.
        secs = min(secs, 0.9 * self._context.deadlines.command)
        most_bytes = 16 * self._options.output_tokens
        with self._timed("command_secs"):
            result = await self._sandbox.run(
                ["/bin/bash", "-c", _BASH, "bash", command],
                timeout_secs=secs,
                most_bytes=most_bytes,
            )
        cut = f", {result.cut_bytes:,} bytes cut" if result.cut_bytes else ""
        line = command if len(command) <= 200 else f"{command[:200]}..."
        self._context.log(f"$ {line}\n[{_ending(result)}, {result.secs:.2f} s{cut}]")
        return Observation(self._shown(result))

    async def verify(self) -> Verdict:
        with self._timed("grade_secs"):
            reward, log = await self._graded()
        missing = float(reward is None)
        return Verdict(reward or 0.0, {**self._secs, "reward_missing": missing}, log)

    async def close(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            await asyncio.to_thread(work.cleanup)
        if self._sandbox is not None:
            await self._sandbox.stop()

    async def _graded(self) -> tuple[float | None, str]:
        """The reward of what is there, None where the tests give none; and their log.

        What the agent has done to its sandbox is never the infrastructure's fault.
        """
        if self._work is None:
            try:
                await self._handed_in()
            except FileError as error:
                return None, f"the work directory cannot be graded: {error}"
        task, secs = self._task, self._context.deadlines.verify
        await self._sandbox.stop()  # the agent's, or that of an earlier try
        self._sandbox = await self._sandboxes.started(
            task, self._name("grade"), folders=(TESTS, LOGS)
        )
        await self._sandbox.copy_in(self._work.name, task.workdir)
        await _put(self._sandbox, task.tests, TESTS)
        result = await self._sandbox.run(
            ["/bin/bash", f"{TESTS}/test.sh"], timeout_secs=0.6 * secs
        )
        log = f"{text(result)}[{_ending(result)}]"
        try:
            return _reward(await self._sandbox.read(_REWARD, most_bytes=100)), log
        except (FileError, ValueError) as error:
            return None, f"{log}\nno reward: {error}"

    async def _handed_in(self) -> None:
        """Takes the work directory, once everything of the agent is dead."""
        await self._sandbox.kill_all()
        work = tempfile.TemporaryDirectory(prefix="work.")
        try:
            copied = await self._sandbox.copy_out(
                self._task.workdir,
                work.name,
                most_bytes=self._options.artefact_mb << 20,
            )
        except BaseException:
            await asyncio.to_thread(work.cleanup)
            raise
        self._work = work
        if copied.left_out:
            self._context.log(f"not graded: {', '.join(copied.left_out)}")

    def _shown(self, result: Result) -> str:
        """Output and exit status, as many tokens as are shown."""
        return self._context.cut(
            f"{text(result)}[{_ending(result)}]", self._options.output_tokens
        )

    def _name(self, what: str) -> str:
        key = self._context.key
        return f"{key.phase}{key.step}g{key.group}m{key.member}a{key.attempt}{what}"

    @contextlib.contextmanager
    def _timed(self, name: str):
        start = time.monotonic()
        try:
            yield
        finally:
            self._secs[name] += time.monotonic() - start


def text(result: Result) -> str:
    """A command's output for policies and people, ended by a line end if there is any.

    Nothing in it moves a cursor, and what is no UTF-8 is replaced.
    """
    output, head = result.output, result.head_bytes
    if result.cut_bytes:
        gone = f"\n[{result.cut_bytes:,} bytes cut]\n".encode()
        output = output[:head] + gone + output[head:]
    shown = _CONTROLS.sub("", output.decode(errors="replace").replace("\r\n", "\n"))
    return shown if not shown or shown.endswith("\n") else shown + "\n"


def _ending(result: Result) -> str:
    return "timed out" if result.timed_out else f"exit {result.status}"


def _reward(content: bytes) -> float:
    reward = float(content.decode())
    if not abs(reward) <= LARGEST_REWARD:
        raise ValueError(f"{reward} is no reward")
    return reward


async def _put(sandbox: Sandbox, files: Mapping[str, bytes], path: str) -> None:
    """Writes all files below a folder of the sandbox at once."""

    def written(folder: str) -> None:
        for name, content in files.items():
            file = Path(folder, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    if files:
        with tempfile.TemporaryDirectory(prefix="files.") as folder:
            await asyncio.to_thread(written, folder)
            await sandbox.copy_in(folder, path)
