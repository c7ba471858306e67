"""Three tools, and turns that call several of them: add, double and negate.

    python -m thundersync_jax.train --config=configs/three_tools.py --workdir=runs/tools

With `--config.model.path=FOLDER`, a model whose chat template knows tools: one call
after the other of a turn reaches `step`, and each is answered by itself. Without one,
tools have no names and a call is as `add 2 3`.
"""

import dataclasses
from typing import Any

from thundersync_jax import config as settings
from thundersync_jax.envs.base import Action, Observation, TaskSet

TOOLS = {"add": ["a", "b"], "double": ["a"], "negate": ["a"]}
FUNCTIONS = {
    "add": lambda a, b: a + b,
    "double": lambda a: 2 * a,
    "negate": lambda a: -a,
}


def schema(name: str) -> dict[str, Any]:
    properties = {argument: {"type": "integer"} for argument in TOOLS[name]}
    parameters = {"type": "object", "properties": properties, "required": TOOLS[name]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


class Desk:
    """Rewards the right answer, and a little for every tool that was used."""

    async def start(self, task: tuple[int, int]) -> str:
        self.numbers, self.used, self.answer = task, set(), ""
        return prompt(task)

    async def step(self, action: Action) -> Observation:
        if action.kind != "call":
            self.answer = action.text
            return Observation(done=True)
        name, arguments = action.name, dict(action.arguments)
        if not name:  # byte-level text has one tool without a name
            name, *numbers = action.text.split() or [""]
            arguments = dict(zip(TOOLS.get(name, ()), numbers, strict=False))
        try:
            numbers = [int(arguments[argument]) for argument in TOOLS[name]]
        except (KeyError, ValueError, TypeError):
            return Observation("error: no such call")
        self.used.add(name)
        return Observation(str(FUNCTIONS[name](*numbers)))

    async def verify(self) -> float:
        a, b = self.numbers
        return 0.7 * (self.answer == str(-(a + b) * 2)) + 0.1 * len(self.used)


def prompt(task: tuple[int, int]) -> str:
    return f"-2({task[0]}+{task[1]})"


def make(env: settings.EnvConfig, seed: int) -> TaskSet:
    pairs = [(a, b) for a in range(10) for b in range(10)]
    tools = [schema(name) for name in TOOLS]
    return TaskSet(pairs[20:], pairs[:20], Desk, prompt, tools=tools)


def get_config(variant: str | None = None) -> settings.Config:
    lengths = {"context_tokens": 96, "turn_tokens": 16, "turns": 3}
    config = settings.Config(
        steps=30,
        env=settings.EnvConfig(factory=f"{__name__}:make"),
        rollout=settings.RolloutConfig(**lengths, groups_per_step=4, group_size=8),
        warm_start=settings.WarmStartConfig(steps=0),
        evaluation=settings.EvaluationConfig(questions=20),
    )
    return dataclasses.replace(config, steps=2) if variant else config
