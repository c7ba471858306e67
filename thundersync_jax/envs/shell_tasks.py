"""Small terminal tasks that a tiny model learns: files to read, write, copy and fix.

All are made up from a number, so that there are thousands and none needs a download.
"""

import asyncio
import dataclasses
import functools
import random
import string
from collections.abc import Callable

from thundersync_jax.config import EnvConfig
from thundersync_jax.config.settings import check_types
from thundersync_jax.envs import terminal
from thundersync_jax.envs.base import Action, TaskSet
from thundersync_jax.envs.terminal import (
    Sandboxes,
    SandboxOptions,
    Terminal,
    TerminalTask,
)
from thundersync_jax.errors import ConfigError

_OPERATORS = "+-*"
# A test that holds, or not, decides the reward.
_TEST = """\
cd /workspace && {condition}
[ $? -eq 0 ] && reward=1 || reward=0
echo $reward >/logs/verifier/reward.txt
"""
_HELDOUT_ONE_IN = 8


@dataclasses.dataclass(frozen=True)
class ShellOptions:
    """Which tasks there are, and where they run."""

    kinds: tuple[str, ...] = ("write", "copy", "read", "fix")  # in equal shares
    train_tasks: int = 4096
    heldout_tasks: int = 256
    sandbox: SandboxOptions = dataclasses.field(default_factory=SandboxOptions)

    def __post_init__(self):
        check_types(self, "env.options.")
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise ConfigError(
                f"env.options.kinds is {self.kinds}; expected names among "
                f"{', '.join(KINDS)}."
            )


def make(env: EnvConfig, seed: int) -> TaskSet:
    """Returns the tasks of `env.options` (ShellOptions, None for its defaults).

    Raises:
      ConfigError: There can be no sandboxes here.
    """
    options = env.options or ShellOptions()
    sandboxes = Sandboxes(options.sandbox)
    asyncio.run(sandboxes.provider.check())
    train, heldout, number = [], [], 0
    while len(train) < options.train_tasks or len(heldout) < options.heldout_tasks:
        task = made(options.kinds[number % len(options.kinds)], number)
        into, most = train, options.train_tasks
        if random.Random(task.instruction).random() < 1 / _HELDOUT_ONE_IN:
            into, most = heldout, options.heldout_tasks
        if len(into) < most:
            into.append(task)
        number += 1
    return TaskSet(
        train=train,
        heldout=heldout,
        environment=functools.partial(Terminal, sandboxes),
        prompt=lambda task: task.instruction,
        demonstrate=demonstrate,
        tools=terminal.TOOLS,
        reap=sandboxes.provider.reap,
    )


def demonstrate(task: TerminalTask) -> list[tuple[Action, str]]:
    turns = [(Action("call", command), seen) for command, seen in task.solution]
    return [*turns, (Action("answer", "done"), "")]


def made(kind: str, number: int) -> TerminalTask:
    """One task; the same for the same number."""
    rng = random.Random(f"{kind} {number}")
    instruction, files, condition, solution = KINDS[kind](rng)
    return TerminalTask(
        name=f"{kind}-{number}",
        instruction=instruction,
        files={name: content.encode() for name, content in files.items()},
        tests={"test.sh": _TEST.format(condition=condition).encode()},
        solution=solution,
    )


def _word(rng: random.Random) -> str:
    return "".join(rng.sample(string.ascii_lowercase, 2))


def _write(rng):
    name, number = _word(rng), rng.randrange(10, 100)
    said = f"write {number} to {name}"
    right = f'[ "$(cat {name})" = {number} ]'
    return said, {}, right, ((f"echo {number} >{name}", "[exit 0]"),)


def _copy(rng):
    (one, other), text = _two_words(rng), _word(rng)
    said = f"copy {one} to {other}"
    right = f'[ "$(cat {other})" = {text} ]'
    return said, {one: f"{text}\n"}, right, ((f"cp {one} {other}", "[exit 0]"),)


def _read(rng):
    """The file says what to make."""
    one, other = _two_words(rng)
    said = f"make what {one} says"
    seen = ((f"cat {one}", f"{other}\n[exit 0]"), (f"touch {other}", "[exit 0]"))
    return said, {one: f"{other}\n"}, f"[ -f {other} ]", seen


def _fix(rng):
    """A function of Python with a wrong operator."""
    name, (bad, good) = rng.choice(string.ascii_lowercase), rng.sample(_OPERATORS, 2)
    body = f"f=lambda a,b:a{bad}b\n"
    said = f"fix {name}.py: f is a{good}b"
    condition = (
        f"python3 -c \"from runpy import run_path; f = run_path('{name}.py')['f']; "
        f'assert all(f(a, b) == a {good} b for a, b in [(2, 3), (5, 7)])"'
    )
    seen = (
        (f"cat {name}.py", f"{body}[exit 0]"),
        (f"sed -i s/[{bad}]/{good}/ {name}.py", "[exit 0]"),
    )
    return said, {f"{name}.py": body}, condition, seen


def _two_words(rng: random.Random) -> tuple[str, str]:
    one = other = _word(rng)
    while other == one:
        other = _word(rng)
    return one, other


# A kind of task: (instruction, files, what the test asks, solution) from a generator.
KINDS: dict[str, Callable] = {
    "write": _write,
    "copy": _copy,
    "read": _read,
    "fix": _fix,
}
