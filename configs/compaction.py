"""A history that is rewritten: running totals in a context too short for all of them.

    python -m thundersync_jax.train --config=configs/compaction.py --workdir=/tmp/totals

After every second total the environment puts the last one in place of the conversation,
which begins another sample of the same trajectory. Each total is trained once, in the
context that it was said in. About a minute on two CPU cores, `smoke` two steps.
"""

import dataclasses
import itertools
import random

from thundersync_jax import config as settings
from thundersync_jax.envs.base import Action, Observation, TaskSet

DIGITS, EVERY = 6, 2  # numbers to add, totals between two rewritten histories


class Totals:
    """One attempt: the last digit of the sum, after every number."""

    async def start(self, task: str) -> str:
        self.task, self.said = task, []
        return prompt(task)

    async def step(self, action: Action) -> Observation:
        self.said.append(action.text if action.kind == "answer" else "?")
        turn = len(self.said)
        if turn + 1 == len(self.task):
            return Observation(done=True)
        following = f"+{self.task[turn + 1]}="
        if turn % EVERY:
            return Observation(following)
        return Observation(self.said[-1] + following, rewrite=True)

    async def verify(self) -> float:
        """The share of right totals."""
        right = [x == y for x, y in itertools.zip_longest(self.said, totals(self.task))]
        return sum(right) / len(right)


def prompt(task: str) -> str:
    return f"{task[0]}+{task[1]}="


def totals(task: str) -> list[str]:
    sums = list(itertools.accumulate(map(int, task)))
    return [str(total % 10) for total in sums[1:]]


def demonstrate(task: str) -> list[tuple[Action, str]]:
    """The turns before the history is rewritten."""
    answers = [Action("answer", total) for total in totals(task)[:EVERY]]
    following = [f"+{digit}=" for digit in task[2 : EVERY + 1]]
    return list(zip(answers, [*following, ""], strict=True))


def make(env: settings.EnvConfig, seed: int) -> TaskSet:
    numbers = random.Random(0).sample(range(10**DIGITS), 4096)
    tasks = [f"{number:0{DIGITS}}" for number in numbers]
    return TaskSet(tasks[256:], tasks[:256], Totals, prompt, demonstrate)


def get_config(variant: str | None = None) -> settings.Config:
    lengths = {"context_tokens": 24, "turn_tokens": 4, "turns": DIGITS - 1}
    buckets = {"prefill_buckets": (24,), "gradient_buckets": (24,)}
    config = settings.Config(
        steps=30,
        env=settings.EnvConfig(factory=f"{__name__}:make"),
        rollout=settings.RolloutConfig(samples=3, **lengths, **buckets),
        warm_start=settings.WarmStartConfig(steps=600),
    )
    if variant not in (None, "smoke"):
        raise ValueError(f"variant is {variant!r}, expected 'smoke' or none.")
    few = settings.WarmStartConfig(steps=60)
    return dataclasses.replace(config, steps=2, warm_start=few) if variant else config
