"""A simulated user: two questions in one conversation, the second about the first.

    python -m thundersync_jax.train --config=configs/simulated_user.py --workdir=runs/u

The prompt is a conversation with a system's message; the user asks for a word, then for
it backwards. Turns have credit of their own.
"""

import dataclasses
import itertools

from thundersync_jax import config as settings
from thundersync_jax.envs.base import Action, Observation, TaskSet
from thundersync_jax.types import Message


class User:
    """Asks twice; each right answer is half of the reward."""

    async def start(self, task: str) -> list[Message]:
        self.word, self.right = task, []
        return prompt(task)

    async def step(self, action: Action) -> Observation:
        wanted = self.word[::-1] if self.right else self.word
        self.right.append(action.text == wanted)
        credit = 0.5 if self.right[-1] else -0.5
        if len(self.right) == 2:
            return Observation(done=True, credit=credit)
        return Observation("and backwards?", credit=credit)

    async def verify(self) -> float:
        return sum(self.right) / 2


def prompt(word: str) -> list[Message]:
    return [Message("system", "copy"), Message("user", word)]


def demonstrate(word: str) -> list[tuple[Action, str]]:
    backwards = Action("answer", word[::-1])
    return [(Action("answer", word), "and backwards?"), (backwards, "")]


def make(env: settings.EnvConfig, seed: int) -> TaskSet:
    words = ["".join(letters) for letters in itertools.permutations("abcdef", 3)]
    return TaskSet(words[20:], words[:20], User, prompt, demonstrate)


def get_config(variant: str | None = None) -> settings.Config:
    lengths = {"context_tokens": 64, "turn_tokens": 6, "turns": 2}
    config = settings.Config(
        steps=30,
        env=settings.EnvConfig(factory=f"{__name__}:make"),
        loss=settings.LossConfig(turn_credit="environment"),
        rollout=settings.RolloutConfig(**lengths, groups_per_step=8, group_size=8),
        warm_start=settings.WarmStartConfig(
            steps=300, target_success=0.2, check_questions=20
        ),
        evaluation=settings.EvaluationConfig(questions=20),
    )
    few = settings.WarmStartConfig(steps=2, check_questions=20)
    return dataclasses.replace(config, steps=2, warm_start=few) if variant else config
