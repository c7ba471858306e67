"""Made-up work for benchmarks: tool calls and lengths as asked for, by any policy.

Any action is a tool call until a trajectory has made its number of them; the next one
ends it. The reward looks for lower-case letters, which random weights sample in unequal
amounts: few groups are uniform. The number of calls and the lengths of answers follow
from the sampled ids, so every release rule meets the same work.
"""

import dataclasses
import random
import string
import zlib
from collections.abc import Set
from typing import Literal

import numpy as np

from thundersync_jax.chat.byte_level import BYTES
from thundersync_jax.config import EnvConfig
from thundersync_jax.config.checks import bounds, positive, require
from thundersync_jax.config.settings import check_types
from thundersync_jax.envs.base import Action, Observation, TaskSet

_ALPHABET = string.ascii_lowercase
_MARKS = 2  # special tokens around the text of a prompt or an observation
_SHORTEST_PROMPT = 8  # tokens; its six letters give 3e8 different prompts


@dataclasses.dataclass(frozen=True)
class LettersOptions:
    """How much there is to read and how often to act; lengths with special tokens."""

    prompt_tokens: int = 32  # every prompt
    calls: tuple[int, ...] = (0, 0)  # fewest and most tool calls of a trajectory
    observation_tokens: tuple[int, ...] = (16, 16)  # shortest and longest tool answer
    verdict: Literal["share", "any"] = "share"  # of letters, or 1 if there is any
    train_tasks: int = 512  # different training prompts
    heldout_tasks: int = 16  # different held-out prompts, the same for every seed

    def __post_init__(self):
        check_types(self, "env.options.")
        bounds(self, "env.options.", {"calls": 0, "observation_tokens": _MARKS})
        positive(self, "env.options.", ["train_tasks", "heldout_tasks"])
        require(
            self.prompt_tokens >= _SHORTEST_PROMPT,
            f"env.options.prompt_tokens is {self.prompt_tokens}",
            f"at least {_SHORTEST_PROMPT}",
            "Raise it.",
        )


class LettersEnvironment:
    """One attempt at one prompt."""

    def __init__(self, options: LettersOptions):
        self._options = options
        self._ids: list[int] = []
        self._turn = 0
        self._calls = 0

    async def start(self, task: str) -> str:
        return task

    async def step(self, action: Action) -> Observation:
        self._ids += action.ids
        rng = random.Random(zlib.crc32(np.array(self._ids, "<i4").tobytes()))
        length = rng.randint(*self._options.observation_tokens)
        if self._turn == 0:
            self._calls = rng.randint(*self._options.calls)
        if self._turn == self._calls:
            return Observation(done=True)
        self._turn += 1
        return Observation(_text(rng, length))

    async def verify(self) -> float:
        """The share of a to z among sampled bytes (0 of none), or if there is any."""
        read = [i for i in self._ids if i < BYTES]
        letters = sum(ord("a") <= i <= ord("z") for i in read)
        if self._options.verdict == "any":
            return float(letters > 0)
        return letters / len(read) if read else 0.0


def make(env: EnvConfig, seed: int) -> TaskSet:
    """Returns the tasks of `env.options` (LettersOptions, None for its defaults)."""
    options = LettersOptions() if env.options is None else env.options
    length = options.prompt_tokens
    heldout = _prompts("heldout", options.heldout_tasks, length, set())
    return TaskSet(
        train=_prompts(f"train {seed}", options.train_tasks, length, set(heldout)),
        heldout=heldout,
        environment=lambda: LettersEnvironment(options),
        prompt=lambda task: task,
    )


def _prompts(stream: str, count: int, length: int, taken: Set[str]) -> list[str]:
    """Returns different texts, none of them taken."""
    rng = random.Random(stream)
    texts: dict[str, None] = {}
    while len(texts) < count:
        text = _text(rng, length)
        if text not in taken:
            texts[text] = None
    return list(texts)


def _text(rng: random.Random, tokens: int) -> str:
    """Random text of so many tokens once it is rendered."""
    return "".join(rng.choices(_ALPHABET, k=tokens - _MARKS))
