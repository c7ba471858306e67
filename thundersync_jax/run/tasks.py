"""The tasks of a run: those that fit it, and the rollouts they are part of."""

import dataclasses
import datetime
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from thundersync_jax.chat import templates, tool_calls
from thundersync_jax.chat.base import Chat
from thundersync_jax.config import MOST_STOP_IDS, Config
from thundersync_jax.config import workdir as workdirs
from thundersync_jax.config.model import ModelConfig
from thundersync_jax.envs.base import TaskSet, check_split
from thundersync_jax.envs.fingerprint import Fingerprint
from thundersync_jax.errors import ConfigError
from thundersync_jax.hf import files
from thundersync_jax.rollout.events import Job
from thundersync_jax.run.task_tokens import SPLITS, Chosen, Counts
from thundersync_jax.types import Action, Message, TrajectoryKey


def make_jobs(phase: str, step: int, tasks: Sequence[Any], members: int) -> list[Job]:
    """Every task as a group of so many members."""
    return [
        Job(TrajectoryKey(step, group, member, phase=phase), task)
        for group, task in enumerate(tasks)
        for member in range(members)
    ]


class Prepared(NamedTuple):
    """What `prepared` found."""

    tasks: TaskSet  # those that fit the context, in their order
    chat: Chat  # puts them into ids
    fingerprint: Fingerprint  # of all tasks
    # Of the longest that fits, prompt included; 0 where no warm start needs one.
    demonstration_tokens: int
    counts: "Counts | None"  # that took long, for the next start; None: none did

    def check(self, workdir: str | os.PathLike, accepted: str | None) -> list[str]:
        """Lines on tasks that are others than before; ConfigError unless `accepted`."""
        return workdirs.check_tasks(workdir, self.fingerprint._asdict(), accepted)

    def claim(self, workdir: str | os.PathLike) -> None:
        """Makes them the work directory's tasks, and keeps counts that took long."""
        workdirs.claim_tasks(workdir, self.fingerprint._asdict())
        if self.counts is not None:
            self.counts.keep(workdir)


def prepared(
    factory: Callable[..., TaskSet],
    config: Config,
    workdir: str | os.PathLike | None = None,
    on_line: Callable[[str], None] = lambda line: None,
    day: datetime.datetime | None = None,
) -> Prepared:
    """The tasks that fit the context, and the chat that puts them into ids.

    The prompts are read, and rendered only where their size alone does not show that
    they fit. `on_line` is told how far it is, if it takes long; `workdir` may hold
    counts of an earlier start. Prompts that show a date show `day`, None for today.
    ConfigError where the config needs other tasks, or the model has no words for them.
    """
    tasks = factory(config.env, config.seed)
    if not isinstance(tasks, TaskSet):
        raise ConfigError(
            f"env.factory {config.env.factory!r} returned {type(tasks).__name__}; "
            "expected an envs.base.TaskSet"
        )
    splits = {name: _sequence(name, getattr(tasks, name)) for name in SPLITS}
    tasks = dataclasses.replace(tasks, **splits)
    settings, path = config.chat, config.model.path
    system = tasks.system if settings.system is None else settings.system
    folder = None if path is None else os.path.expanduser(path)
    chat = templates.open_chat(
        folder,
        settings.format,
        () if callable(tasks.tools) else tasks.tools,
        system or None,
        settings.thinking,
        settings.arguments,
        day,
        settings.drop_thoughts,
    )
    _check_ids(chat, config)
    _check_prompt(chat, config)
    if folder is not None:
        _check_context(config.model, config.rollout.context_tokens)
    if config.warm_start.steps and tasks.demonstrate is None:
        raise ConfigError(
            f"warm_start.steps is {config.warm_start.steps} and the task set has no "
            "`demonstrate`; give it one or set warm_start.steps=0"
        )
    counts = Counts(tasks, chat, on_line)
    if config.warm_start.steps and counts.without_action:
        raise ConfigError(
            f"the demonstrations of {counts.without_action} training tasks have no "
            "action, expected at least one (action, observation) pair each. Let "
            "`demonstrate` return one, or set warm_start.steps=0"
        )
    fitting, longest = _fitting(tasks, config, counts, workdir)
    check_split(fitting, on_line)
    _check_questions(fitting, config)
    kept = counts if counts.took_long else None
    return Prepared(fitting, chat, counts.fingerprint, longest, kept)


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


def _check_prompt(chat: Chat, config: Config) -> None:
    """A prompt that a group shares begins the histories without thoughts, too."""
    if config.share_prompt != "group":
        return
    prompt = chat.prompt("?")
    turn = prompt, chat.action(Action("answer", tool_calls.THOUGHT))
    history = chat.history([Message("user", "?")], [turn])
    if history is not None and history[: len(prompt)].tolist() != prompt.tolist():
        raise ConfigError(
            "share_prompt is 'group' with chat.drop_thoughts True and a chat template "
            "that begins a thought in the prompt, where no later history has it; "
            "expected one prompt of all samples. Set share_prompt to 'no'."
        )


def _check_context(model: ModelConfig, tokens: int) -> None:
    longest = files.longest_context(model)
    if tokens > longest:
        raise ConfigError(
            f"rollout.context_tokens is {tokens} and {model.path} is made for at most "
            f"{longest:.0f} (max_position_embeddings and rotary scaling in its "
            "config.json), expected no more. Lower it, or state a scaling there."
        )


def _check_questions(tasks: TaskSet, config: Config) -> None:
    wanted = {"evaluation.questions": config.evaluation.questions}
    if config.warm_start.steps:
        wanted["warm_start.check_questions"] = config.warm_start.check_questions
    for name, questions in wanted.items():
        if len(tasks.heldout) < questions:
            raise ConfigError(
                f"{name} is {questions} and {len(tasks.heldout)} held-out tasks fit "
                f"rollout.context_tokens {config.rollout.context_tokens}; ask for "
                "fewer or raise the limit"
            )


def _sequence(split: str, tasks: Any) -> Sequence[Any]:
    """The tasks of a split, with a length and places."""
    if isinstance(tasks, set | frozenset):
        raise ConfigError(
            f"the task set's {split} is a {type(tasks).__name__}, expected a sequence: "
            "a set has another order in every process, and a resumed run other tasks. "
            "Write sorted(...) around it."
        )
    placed = hasattr(tasks, "__getitem__") and hasattr(tasks, "__len__")
    if placed and not isinstance(tasks, Mapping | tuple):
        return tasks
    try:
        return list(tasks)
    except TypeError as error:
        raise ConfigError(
            f"the task set's {split} is {tasks!r:.80}, expected a sequence of tasks. "
            "Give it a list."
        ) from error


def _fitting(
    tasks: TaskSet,
    config: Config,
    counts: "Counts",
    workdir: str | os.PathLike | None = None,
) -> tuple[TaskSet, int]:
    """The tasks that fit, and the length of the longest demonstration, or 0."""
    limit, places = config.rollout.context_tokens, {}
    demonstrated = bool(config.warm_start.steps)
    counts.load(workdir)
    for split in SPLITS:
        # Padded to the longest, a demonstration's length decides about its bits.
        exact = demonstrated and split == "train"
        lengths = counts.lengths(split, 0 if exact else limit)
        places[split] = np.flatnonzero(lengths < limit)
        if len(lengths) and not len(places[split]):
            raise ConfigError(
                f"rollout.context_tokens is {limit} and no {split} task fits: the "
                f"shortest of them takes {lengths.min()} tokens (prompt, and "
                "demonstration where there is one), expected room for an action too. "
                "Raise rollout.context_tokens and the buckets."
            )
        if exact:
            longest = lengths[places[split]].max(initial=0)
    fitting = {
        split: _those(getattr(tasks, split), chosen) for split, chosen in places.items()
    }
    replaced = dataclasses.replace(tasks, **fitting)
    return replaced, int(longest) if demonstrated else 0


def _those(tasks: Sequence[Any], places: np.ndarray) -> Sequence[Any]:
    if isinstance(tasks, list):
        return [tasks[i] for i in places.tolist()]
    return Chosen(tasks, places)


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


def order(tasks: int, config: Config, step: int) -> list[int]:
    """Indices, of so many tasks, that the groups of a step have, replacements last."""
    groups, most = config.rollout.groups_per_step, config.most_replacements
    chosen = take(range(tasks), config.seed, (step - 1) * groups, groups)
    further = replacements(tasks, config.seed, step, chosen)
    return chosen + list(itertools.islice(itertools.cycle(further), most))
