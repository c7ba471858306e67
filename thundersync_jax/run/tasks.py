"""The tasks of a run: those that fit it, and the rollouts they are part of."""

import dataclasses
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from thundersync_jax.chat import templates
from thundersync_jax.chat.base import Chat
from thundersync_jax.config import MOST_STOP_IDS, Config
from thundersync_jax.config.model import ModelConfig
from thundersync_jax.envs.base import TaskSet, check_split
from thundersync_jax.errors import ConfigError
from thundersync_jax.hf import files
from thundersync_jax.rollout.events import Job
from thundersync_jax.types import TrajectoryKey


def make_jobs(phase: str, step: int, tasks: Sequence[Any], members: int) -> list[Job]:
    """Every task as a group of so many members."""
    return [
        Job(TrajectoryKey(step, group, member, phase=phase), task)
        for group, task in enumerate(tasks)
        for member in range(members)
    ]


def prepared(factory: Callable[..., TaskSet], config: Config) -> tuple[TaskSet, Chat]:
    """The tasks that fit the context, and the chat that puts them into ids.

    Raises:
      ConfigError: They are not what the config needs, or the model has no words for
        them.
    """
    tasks = factory(config.env, config.seed)
    if not isinstance(tasks, TaskSet):
        raise ConfigError(
            f"env.factory {config.env.factory!r} returned {type(tasks).__name__}; "
            "expected an envs.base.TaskSet"
        )
    settings, path = config.chat, config.model.path
    system = tasks.system if settings.system is None else settings.system
    folder = None if path is None else os.path.expanduser(path)
    chat = templates.open_chat(
        folder, settings.format, tasks.tools, system or None, settings.thinking
    )
    _check_ids(chat, config)
    if folder is not None:
        _check_context(config.model, config.rollout.context_tokens)
    return _checked(tasks, config, chat), chat


def _check_ids(chat: Chat, config: Config) -> None:
    """Every id has a row of the embedding, and end tokens fit a request."""
    rows = config.model.vocab_size
    largest = max(chat.vocabulary().values())
    if largest >= rows:
        raise ConfigError(
            f"the tokenizer of {config.model.path} has id {largest} and "
            f"model.vocab_size is {rows}; expected a row for every id. Take the "
            "tokenizer that belongs to the weights."
        )
    if config.rollout.stop_ids is None and len(chat.stop_ids) > MOST_STOP_IDS:
        raise ConfigError(
            f"{config.model.path} has the end tokens {chat.stop_ids}, expected at most "
            f"{MOST_STOP_IDS}. Name those that count in rollout.stop_ids."
        )


def _check_context(model: ModelConfig, tokens: int) -> None:
    longest = files.longest_context(model)
    if tokens > longest:
        raise ConfigError(
            f"rollout.context_tokens is {tokens} and {model.path} is made for at most "
            f"{longest:.0f} (max_position_embeddings and rotary scaling in its "
            "config.json), expected no more. Lower it, or state a scaling there."
        )


def _checked(tasks: TaskSet, config: Config, chat: Chat) -> TaskSet:
    if config.warm_start.steps and tasks.demonstrate is None:
        raise ConfigError(
            f"warm_start.steps is {config.warm_start.steps} and the task set has no "
            "`demonstrate`; give it one or set warm_start.steps=0"
        )
    fitting = _fitting(tasks, config, chat)
    wanted = {"evaluation.questions": config.evaluation.questions}
    if config.warm_start.steps:
        wanted["warm_start.check_questions"] = config.warm_start.check_questions
    for name, questions in wanted.items():
        if len(fitting.heldout) < questions:
            raise ConfigError(
                f"{name} is {questions} and {len(fitting.heldout)} held-out tasks fit "
                f"rollout.context_tokens {config.rollout.context_tokens}; ask for "
                "fewer or raise the limit"
            )
    return fitting


def _fitting(tasks: TaskSet, config: Config, chat: Chat) -> TaskSet:
    """Leaves out the tasks whose prompt or demonstration exceeds the context."""
    limit = config.rollout.context_tokens
    lengths = []

    def fits(task):
        length = len(chat.prompt(tasks.prompt(task)))
        if tasks.demonstrate is not None:
            for action, observation in tasks.demonstrate(task):
                length += len(chat.action(action))
                if observation:
                    length += len(chat.observation(observation))
        lengths.append(length)
        return length < limit

    fitting = dataclasses.replace(
        tasks,
        train=[task for task in tasks.train if fits(task)],
        heldout=[task for task in tasks.heldout if fits(task)],
    )
    for split in ("train", "heldout"):
        if len(getattr(tasks, split)) and not len(getattr(fitting, split)):
            raise ConfigError(
                f"rollout.context_tokens is {limit} and no {split} task fits: the "
                f"shortest of all takes {min(lengths)} tokens (prompt, and "
                "demonstration where there is one), expected room for an action too. "
                "Raise rollout.context_tokens and the buckets."
            )
    check_split(fitting)
    return fitting


_REPLACEMENTS = 1  # a further word of the seed: apart from the epochs' orders


def take(tasks: Sequence[Any], seed: int, start: int, count: int) -> list[Any]:
    """`count` tasks from position `start` of an endless shuffled sequence.

    Epoch e is a permutation drawn from (seed, e); positions run through the epochs, so
    a step may begin in one epoch and end in the next.
    """
    chosen, orders = [], {}
    for position in range(start, start + count):
        epoch, index = divmod(position, len(tasks))
        if epoch not in orders:
            rng = np.random.default_rng((seed, epoch))
            orders[epoch] = rng.permutation(len(tasks))
        chosen.append(tasks[int(orders[epoch][index])])
    return chosen


def replacements(tasks: int, seed: int, step: int, own: Collection[int]) -> list[int]:
    """Indices, of so many tasks, that a step's replacement groups take in turn.

    They are in an order of the step's own, apart from that of `take`: how many groups
    are replaced moves no task of a later step. Those that the step has already (`own`)
    are left out, unless they are all.
    """
    rng = np.random.default_rng((seed, step, _REPLACEMENTS))
    order = rng.permutation(tasks).tolist()
    own = set(own)
    return [index for index in order if index not in own] or order
