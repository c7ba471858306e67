"""Your own task in one file: reverse a word of four letters.

    python -m thundersync_jax.train --config=configs/own_task.py --workdir=/tmp/own_task

Needs no extra; about a minute on two CPU cores, the variant `smoke` two steps. Copy it
anywhere and change the words, the verdict and the lengths.
"""

import dataclasses
import itertools
import random

from thundersync_jax import config as settings
from thundersync_jax.envs.base import Action, Observation, TaskSet


class Reverse:
    """One attempt at one word."""

    async def start(self, task: str) -> str:
        self.word, self.answer = task, ""
        return task

    async def step(self, action: Action) -> Observation:
        self.answer = action.text if action.kind == "answer" else ""
        return Observation(done=True)

    async def verify(self) -> float:
        """The share of letters in place; 1.0 is a success."""
        pairs = itertools.zip_longest(self.answer, reversed(self.word))
        right = [got == wanted for got, wanted in pairs]
        return sum(right) / len(right)


def make(env: settings.EnvConfig, seed: int) -> TaskSet:
    """All words, the same 256 held out in every run."""
    words = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=4)]
    random.Random(0).shuffle(words)
    return TaskSet(
        train=words[256:],
        heldout=words[:256],
        environment=Reverse,
        prompt=lambda word: word,
        demonstrate=lambda word: [(Action("answer", word[::-1]), "")],
    )


def get_config(variant: str | None = None) -> settings.Config:
    lengths = {"context_tokens": 16, "turn_tokens": 8, "turns": 1}
    buckets = {"prefill_buckets": (16,), "gradient_buckets": (16,)}
    config = settings.Config(
        steps=30,
        env=settings.EnvConfig(factory=f"{__name__}:make"),
        rollout=settings.RolloutConfig(**lengths, **buckets),
        warm_start=settings.WarmStartConfig(steps=600),
    )
    if variant not in (None, "smoke"):
        raise ValueError(f"variant is {variant!r}, expected 'smoke' or none.")
    few = settings.WarmStartConfig(steps=2)
    return dataclasses.replace(config, steps=2, warm_start=few) if variant else config
