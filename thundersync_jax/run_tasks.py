"""The tasks of a run: those that fit it, and the rollouts they are asked in."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from thundersync_jax.config import Config
from thundersync_jax.envs.base import TaskSet, check_split
from thundersync_jax.errors import ConfigError
from thundersync_jax.rollout import render
from thundersync_jax.rollout.events import Job
from thundersync_jax.types import TrajectoryKey


def make_jobs(phase: str, step: int, tasks: Sequence[Any], members: int) -> list[Job]:
    """Every task as a group of so many members."""
    return [
        Job(TrajectoryKey(step, group, member, phase=phase), task)
        for group, task in enumerate(tasks)
        for member in range(members)
    ]


def checked(tasks: TaskSet, config: Config) -> TaskSet:
    """The tasks that fit the context, if they are what the config needs."""
    if not isinstance(tasks, TaskSet):
        raise ConfigError(
            f"env.factory {config.env.factory!r} returned {type(tasks).__name__}; "
            "expected an envs.base.TaskSet"
        )
    if config.warm_start.steps and tasks.demonstrate is None:
        raise ConfigError(
            f"warm_start.steps is {config.warm_start.steps} and the task set has no "
            "`demonstrate`; give it one or set warm_start.steps=0"
        )
    fitting = _fitting(tasks, config)
    asked = {"evaluation.questions": config.evaluation.questions}
    if config.warm_start.steps:
        asked["warm_start.check_questions"] = config.warm_start.check_questions
    for name, questions in asked.items():
        if len(fitting.heldout) < questions:
            raise ConfigError(
                f"{name} is {questions} and {len(fitting.heldout)} held-out tasks fit "
                f"rollout.context_tokens {config.rollout.context_tokens}; ask for "
                "fewer or raise the limit"
            )
    return fitting


def _fitting(tasks: TaskSet, config: Config) -> TaskSet:
    """Leaves out the tasks whose prompt or demonstration exceeds the context."""
    limit = config.rollout.context_tokens

    def fits(task):
        length = len(render.render_prompt(tasks.prompt(task)))
        if tasks.demonstrate is not None:
            for action, observation in tasks.demonstrate(task):
                length += len(render.render_action(action))
                if observation:
                    length += len(render.render_observation(observation))
        return length < limit

    fitting = dataclasses.replace(
        tasks,
        train=[task for task in tasks.train if fits(task)],
        heldout=[task for task in tasks.heldout if fits(task)],
    )
    check_split(fitting)
    return fitting
