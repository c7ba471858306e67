"""A game without tools: guess a letter, told "later" or "earlier" until it is right.

    python -m thundersync_jax.train --config=configs/guess.py --workdir=/tmp/guess

All tasks have one prompt; the letter is hidden. What the game says is the user's turn
where a chat template has roles (`--config.model.path=FOLDER`).
"""

import dataclasses

from thundersync_jax import config as settings
from thundersync_jax.envs.base import Action, Observation, TaskSet

LETTERS = "abcdefgh"


class Guess:
    """One game; sooner is better."""

    async def start(self, task: str) -> str:
        self.letter, self.guesses, self.right = task, 0, False
        return "guess"

    async def step(self, action: Action) -> Observation:
        self.guesses += 1
        self.right = action.text == self.letter
        if self.right or action.text not in LETTERS or len(action.text) != 1:
            return Observation(done=True)
        return Observation("later" if action.text < self.letter else "earlier")

    async def verify(self) -> float:
        return 1.0 / self.guesses if self.right else 0.0


def demonstrate(letter: str) -> list[tuple[Action, str]]:
    """Halves the letters that are left."""
    low, high, turns = 0, len(LETTERS), []
    while (guess := LETTERS[(low + high) // 2]) != letter:
        later = guess < letter
        turns.append((Action("answer", guess), "later" if later else "earlier"))
        low, high = ((low + high) // 2 + 1, high) if later else (low, (low + high) // 2)
    return [*turns, (Action("answer", guess), "")]


def make(env: settings.EnvConfig, seed: int) -> TaskSet:
    """Held-out letters are letters as well: the prompt cannot tell them apart."""
    return TaskSet(LETTERS[:-1], LETTERS[-1:], Guess, lambda _: "guess", demonstrate)


def get_config(variant: str | None = None) -> settings.Config:
    lengths = {"context_tokens": 64, "turn_tokens": 4, "turns": 4}
    config = settings.Config(
        steps=30,
        env=settings.EnvConfig(factory=f"{__name__}:make"),
        rollout=settings.RolloutConfig(**lengths, groups_per_step=8, group_size=8),
        warm_start=settings.WarmStartConfig(
            steps=300, target_success=0.2, check_questions=1
        ),
        evaluation=settings.EvaluationConfig(questions=1, samples=16),
    )
    few = settings.WarmStartConfig(steps=2, check_questions=1)
    return dataclasses.replace(config, steps=2, warm_start=few) if variant else config
