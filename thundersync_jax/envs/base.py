"""What an environment is: three awaitables, and a set of tasks to run them on.

Also waits that are drawn, not real, around any environment: a laptop with the timing of
agents that wait. A wait depends on the seed and the number of the call alone, so every
release rule and every order of arrival meets the same ones.
"""

import asyncio
import dataclasses
import functools
import inspect
import math
import numbers
import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from thundersync_jax.config import LatencyConfig, dotted
from thundersync_jax.envs import fingerprint
from thundersync_jax.errors import ConfigError
from thundersync_jax.errors import InfrastructureFault as InfrastructureFault
from thundersync_jax.errors import PolicyFault as PolicyFault
from thundersync_jax.types import (
    LARGEST_REWARD,
    Action,
    Message,
    Observation,
    TrajectoryKey,
    Verdict,
)

# Last seed word: a tool call and the verification of one attempt draw apart.
_TOOL, _VERIFY = 0, 1
_LOG_CHARACTERS = 100_000  # of a verdict; what is longer loses its middle


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Seconds that a task allows, None for those of the config, which bound them."""

    start: float | None = None
    command: float | None = None  # one step
    agent: float | None = None  # the whole trajectory, verification left out
    verify: float | None = None

    def __post_init__(self):
        for name, secs in vars(self).items():
            number = isinstance(secs, numbers.Real) and not isinstance(secs, bool)
            if secs is not None and not (number and secs > 0):
                raise ValueError(
                    f"the deadline {name} of a task is {short(secs)}, expected seconds "
                    "above 0, or None for that of the config"
                )


@dataclasses.dataclass(eq=False)
class Context:
    """What an environment may know of its attempt, where it asks for a `context`."""

    key: TrajectoryKey  # phase, step, group, member, attempt
    task: Any
    seed: tuple[int, ...]  # the same for every attempt of a member
    deadlines: Deadlines  # all four, within those of the config
    root: Path | None
    remaining_secs: Callable[[], float]  # until the agent's deadline
    remaining_tokens: Callable[[], int]  # of the context
    # (text, tokens) -> the text, or its head and tail where it takes more than so many
    # as an observation; empty where not even a line fits.
    cut: Callable[[str, int], str]

    def __post_init__(self):
        self._lines: list[str] = []

    @functools.cached_property
    def folder(self) -> Path:
        """A folder of its own, made where it is asked for; it stays."""
        key = self.key
        if self.root is None:
            return Path(tempfile.mkdtemp(prefix="attempt_"))
        step = f"{key.phase}_step_{key.step:06d}"
        folder = self.root / step / f"g{key.group}m{key.member}a{key.attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def log(self, line: str) -> None:
        """A line for people, kept with the trajectory before the verdict's own log."""
        self._lines.append(str(line))

    def text(self, more: str = "") -> str:
        """All lines, and what follows them."""
        return "\n".join([*self._lines, *filter(None, [more])])


def make(environment: Callable[..., "Environment"], context: Context) -> "Environment":
    """A fresh environment, which gets the context if it has a parameter of that name.

    TypeError where it takes other arguments.
    """
    try:
        asks = "context" in inspect.signature(environment).parameters
    except ValueError:  # of a builtin
        asks = False
    return environment(context=context) if asks else environment()


# What the user says, or a conversation; its messages may be mappings.
Prompt = str | Sequence[Message | Mapping[str, str]]


class Environment(Protocol):
    """One attempt at one task. A fresh instance serves every attempt.

    It may also have `async def close(self) -> None`, which is awaited once, whatever
    became of the attempt: after its verdict, its failure or its cancellation. And
    `sees_malformed = True`, where it answers malformed calls itself.
    """

    async def start(self, task: Any) -> Prompt:
        """Sets the task up and returns the prompt."""

    async def step(self, action: Action) -> Observation:
        """Runs one action (a tool call, an answer)."""

    async def verify(self) -> float | Verdict:
        """Scores the attempt once it has ended; its own phase and deadline."""


Schemas = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class TaskSet:
    """Tasks, and how to act on them.

    Attributes:
      train: Training tasks; step s takes the next ones in a seeded shuffle per epoch.
      heldout: Tasks for evaluation only.
      environment: Makes a fresh environment for one attempt, without arguments or with
        its `Context` as `context`.
      prompt: The prompt of a task, as `start` returns it; used to check by content
        that no held-out task occurs in training, and that a resume has the same tasks.
      demonstrate: The turns of one good attempt, `(action, observation)` pairs with an
        empty last observation; None where no warm start is possible.
      tools: JSON schemas of the tools, as chat templates take them, or a function of
        the task that returns them; formats without named tools ignore them.
      system: The first message of every conversation, where the format has one.
      deadlines: Those of a task, where it has its own.
      reap: Called, and awaited where it is to be, before anything else at the start of
        a run, to end what a crash of an earlier one has left.
    """

    train: Sequence[Any]
    heldout: Sequence[Any]
    environment: Callable[..., Environment]
    prompt: Callable[[Any], Prompt]
    demonstrate: Callable[[Any], Sequence[tuple[Action, str]]] | None = None
    tools: Schemas | Callable[[Any], Schemas] = ()
    system: str = ""
    deadlines: Callable[[Any], Deadlines] | None = None
    reap: Callable[[], Awaitable[None] | None] | None = None


def load_factory(name: str) -> Callable[..., TaskSet]:
    """Imports the factory of a task set; `name` is the setting `env.factory`."""
    return dotted.load("env.factory", name, ("config.env", "seed"))


def check_split(
    tasks: TaskSet, on_line: Callable[[str], None] = lambda line: None
) -> None:
    """Raises ConfigError where a split is empty or a held-out task is trained on.

    Tasks are one where their prompts and whatever else they hold are the same. Those
    that share no more than a prompt, as games do, are said to `on_line`.
    """
    for split in ("train", "heldout"):
        if not len(getattr(tasks, split)):
            raise ConfigError(
                f"the task set has no {split} tasks; its factory must give some."
            )
    heldout: dict[str, set[str]] = {}
    for task in tasks.heldout:
        prompt = fingerprint.text(tasks.prompt(task))
        heldout.setdefault(prompt, set()).add(fingerprint.text(task))
    shared, leaked = 0, []
    for task in tasks.train:
        others = heldout.get(fingerprint.text(tasks.prompt(task)))
        if others is not None:
            shared += 1
            if fingerprint.text(task) in others:
                leaked.append(tasks.prompt(task))
    if shared and not leaked:
        on_line(
            f"{shared} training tasks have the prompt of a held-out task and are other "
            "tasks: that the split is clean, prompts do not show"
        )
    if leaked:
        raise ConfigError(
            f"{len(leaked)} training tasks are held-out tasks, the prompt of the first "
            f"is {leaked[0]!r}; choose the held-out tasks first and drop "
            "them from training."
        )


def finite(verdict: Any) -> float | None:
    """A number that a reward may be, or None where it is none (bool of numpy is)."""
    if not isinstance(verdict, numbers.Real | np.bool_):
        return None
    try:
        reward = float(verdict)
    except OverflowError:
        return None
    return reward if abs(reward) < LARGEST_REWARD else None


def judged(given: Any) -> Verdict | str:
    """What `verify` returned as a verdict, or what is wrong with it."""
    verdict = given if isinstance(given, Verdict) else Verdict(given)
    reward, parts, names = finite(verdict.reward), verdict.parts, verdict.artefacts
    if reward is None:
        return f"verify() returned {short(given)}, expected a finite number"
    if not isinstance(parts, Mapping) or not isinstance(names, Mapping):
        return f"verify() returned {short(given)}, expected parts and artefacts by name"
    for name, value in parts.items():
        if finite(value) is None or not _is_part(name):
            return (
                f"verify() gave the part {short(name)} as {short(value)}, expected a "
                "finite number under a name of letters, digits, '_', '-', '.' and '/' "
                "other than 'mean'"
            )
    for name, value in names.items():
        if not _is_place(name) or not isinstance(value, bytes | os.PathLike):
            return (
                f"verify() gave the artefact {short(name)} as {short(value)}, "
                "expected bytes or a path under a name inside its folder"
            )
    if not isinstance(verdict.log, str):
        return f"verify() gave the log {short(verdict.log)}, expected text"
    log = verdict.log
    if (left_out := len(log) - _LOG_CHARACTERS) > 0:
        half = _LOG_CHARACTERS // 2
        log = f"{log[:half]}\n... {left_out} characters are left out ...\n{log[-half:]}"
    parts = {name: finite(value) for name, value in parts.items()}
    return Verdict(reward, parts, log, dict(names))


def _is_part(name: Any) -> bool:
    """Whether `reward_NAME` can be the name of a metric, and of no other."""
    return (
        isinstance(name, str)
        and re.fullmatch(r"[\w./-]+", name) is not None
        and name != "mean"
    )


def _is_place(name: Any) -> bool:
    """Whether a name is one of a file inside a folder."""
    if not isinstance(name, str) or "\0" in name:
        return False
    parts = PurePosixPath(name).parts
    return bool(parts) and not name.startswith("/") and ".." not in parts


def short(value: Any) -> str:
    """A value as a message shows it."""
    return " ".join(repr(value).split())[:80]


def draw(latency: LatencyConfig, attempt: Sequence[int], *call: int) -> float:
    """Returns seconds: 0, the median, or median · exp(sigma · z) with z ~ N(0, 1).

    Args:
      latency: Distribution of the wait.
      attempt: Non-negative integers that name the attempt, its member last; a
        straggler is member 0.
      call: Non-negative integers that name the call; equal names give equal waits.
    """
    if latency.kind == "none":
        return 0.0
    if latency.kind == "straggler":
        return 0.0 if attempt[-1] else latency.median_secs
    if latency.kind == "constant":
        return latency.median_secs
    normal = np.random.default_rng([*attempt, *call]).standard_normal()
    return float(latency.median_secs * math.exp(latency.sigma * normal))


def scaled(latency: LatencyConfig, factor: float) -> LatencyConfig:
    """The latency with its median times a factor, where it is lognormal."""
    if latency.kind != "lognormal":
        return latency
    return dataclasses.replace(latency, median_secs=factor * latency.median_secs)


@dataclasses.dataclass
class WithLatency:
    """An environment that waits before it answers a tool call or gives its verdict.

    A tool call is an action that does not end the attempt, whatever its kind.
    """

    environment: Environment
    tool: LatencyConfig
    latency: LatencyConfig  # of the verdict
    seed: tuple[int, ...]  # names the attempt: run, step, group, member
    calls: int = 0

    @property
    def sees_malformed(self) -> bool:
        return bool(getattr(self.environment, "sees_malformed", False))

    async def start(self, task: Any) -> str:
        return await self.environment.start(task)

    async def step(self, action: Action) -> Observation:
        observation = await self.environment.step(action)
        # What is no observation is refused by whoever asked for one.
        if not getattr(observation, "done", True):
            wait_secs = draw(self.tool, self.seed, self.calls, _TOOL)
            self.calls += 1
            await asyncio.sleep(wait_secs)
        return observation

    async def verify(self) -> float | Verdict:
        await asyncio.sleep(draw(self.latency, self.seed, 0, _VERIFY))
        return await self.environment.verify()

    async def close(self) -> None:
        await close(self.environment)


def reap(tasks: TaskSet) -> None:
    """Lets a task set end what a crash has left, if it can."""

    async def awaited(reaping: Awaitable[None]) -> None:
        await reaping

    if tasks.reap is not None and inspect.isawaitable(reaping := tasks.reap()):
        asyncio.run(awaited(reaping))


async def close(environment: Environment) -> None:
    """Lets an environment free what it holds, if it has a `close`."""
    function = getattr(environment, "close", None)
    if function is not None and inspect.isawaitable(ended := function()):
        await ended
