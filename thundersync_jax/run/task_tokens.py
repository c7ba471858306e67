"""How many tokens tasks take: rendered only if their mere size leaves it open."""

import hashlib
import json
import os
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thundersync_jax.chat.base import Chat, conversation, reply
from thundersync_jax.config.workdir import replacing
from thundersync_jax.envs import fingerprint
from thundersync_jax.envs.base import TaskSet
from thundersync_jax.types import Action

SPLITS = ("train", "heldout")
_COUNTS_FILE = "task_tokens.npz"  # in the work directory, where counting took long
_PATIENCE_SECS, _SAID_SECS = 2.0, 10.0  # until a line says how far it is, and the next
_PROBE = "Aa é\n\t\"'\\<&>{[1, 2]} Zz"  # escaped or trimmed it would not be found
_SEAM_TOKENS = 64  # more than words at the seams of a text can change
_MOST_BYTES = 11  # of UTF-8 that a byte may become by Unicode's normal forms
_UNKNOWN_TOKENS = 2**40


class Chosen(Sequence):
    """Some tasks of others, each made when it is asked for."""

    def __init__(self, tasks: Sequence[Any], places: Sequence[int]):
        self._tasks, self._places = tasks, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        return self._tasks[int(self._places[place])]


def of_task(chat: Chat, tasks: TaskSet, task: Any) -> Chat:
    """The chat of one task, which may have tools of its own."""
    return chat.with_tools(tasks.tools(task)) if callable(tasks.tools) else chat


class Counts:
    """Tokens of tasks: at most, from their text alone, and exactly, where asked for.

    Attributes:
      fingerprint: Of all tasks.
      without_action: Number of training tasks whose demonstration is empty.
      took_long: Whether counting took so long that it is worth keeping.
    """

    def __init__(
        self,
        tasks: TaskSet,
        chat: Chat,
        on_line: Callable[[str], None] = lambda line: None,
    ):
        """Reads every task once."""
        self._tasks, self._chat, self._on_line = tasks, chat, on_line
        self.took_long, self.without_action = False, 0
        bounds, hashing = _Bounds(chat), fingerprint.Hashing()
        texts = hashlib.sha256(bounds.probes)
        self._most: dict[str, np.ndarray] = {}
        self._exact: dict[str, np.ndarray] = {}
        for split in SPLITS:
            most = []
            for task in self._said(split, "read", getattr(tasks, split)):
                prompt = tasks.prompt(task)
                hashing.add(split, task, prompt)
                turns = list(tasks.demonstrate(task)) if tasks.demonstrate else []
                self.without_action += split == "train" and not turns
                texts.update(fingerprint.text([prompt, turns]).encode())
                # Tools of its own stand around a task that nobody has looked at.
                known = not callable(tasks.tools)
                bound = bounds.most_tokens(prompt, turns) if known else _UNKNOWN_TOKENS
                most.append(bound)
            self._most[split] = np.array(most, np.int64)
            self._exact[split] = np.full(len(most), -1, np.int64)
        self.fingerprint = hashing.fingerprint()
        self._texts = texts

    def lengths(self, split: str, limit: int) -> np.ndarray:
        """int64[N]: exact where a text may become `limit` or more, else at most."""
        most, exact = self._most[split], self._exact[split]
        missing = np.flatnonzero((most >= limit) & (exact < 0))
        tasks = getattr(self._tasks, split)
        start = time.monotonic()
        said = self._said(split, "counted", Chosen(tasks, missing))
        for place, task in zip(missing, said, strict=True):
            exact[place] = tokens_of(self._tasks, self._chat, task)
        self.took_long |= time.monotonic() - start > _PATIENCE_SECS
        return np.where(exact < 0, most, exact)

    def keep(self, workdir: str | os.PathLike) -> None:
        """Writes the exact lengths for `load`."""
        with replacing(Path(workdir) / _COUNTS_FILE) as file:
            np.savez_compressed(file, name=np.array(self._name()), **self._exact)

    def load(self, workdir: str | os.PathLike | None) -> None:
        """Takes over what `keep` wrote of the same texts, tokenizer and template."""
        path = Path(workdir or "") / _COUNTS_FILE
        if workdir is None or not path.exists():
            return
        try:
            with open(path, "rb") as file, np.load(file) as kept:
                if str(kept["name"]) == self._name():
                    self._exact = {split: kept[split] for split in SPLITS}
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
            return  # torn: counted again

    def _name(self) -> str:
        """Differs where a text, the template or the vocabulary does."""
        name, vocabulary = self._texts.copy(), self._chat.vocabulary()
        name.update(json.dumps(vocabulary, sort_keys=True).encode())
        return name.hexdigest()

    def _said(self, split: str, what: str, tasks: Sequence[Any]) -> Iterator[Any]:
        """The tasks, one after the other; a line every few seconds says how far."""
        said_secs = time.monotonic() + _PATIENCE_SECS - _SAID_SECS
        for done, task in enumerate(tasks):
            if time.monotonic() - said_secs >= _SAID_SECS:
                said_secs = time.monotonic()
                self._on_line(f"{done:,} of {len(tasks):,} {split} tasks {what}")
            yield task


class _Bounds:
    """How many tokens texts become at most.

    A tokenizer makes no more of ASCII text than it has characters, and what a template
    puts around a text does not depend on it where the text is found there unchanged.
    """

    def __init__(self, chat: Chat):
        word = "probe"  # of a call, in which a text is JSON and so not as it was
        self._around: dict[str, int | None] = {}
        self.probes = b""  # ids of a text in every place: others of another template
        for name, text, render in (
            ("prompt", _PROBE, chat.prompt),
            ("observation", _PROBE, chat.observation),
            ("answer", _PROBE, lambda text: chat.action(Action("answer", text))),
            ("call", word, lambda text: chat.action(Action("call", text))),
        ):
            try:
                ids = np.asarray(render(text))
                found = chat.decode(ids).count(text) == 1
            except ValueError:  # refused
                ids, found = np.zeros(0, np.int32), False
            self._around[name] = len(ids) + _SEAM_TOKENS if found else None
            self.probes += ids.tobytes()

    def most_tokens(self, prompt: Any, turns: Sequence[tuple[Action, str]]) -> int:
        """Of a prompt and a demonstration; very many where nothing is known."""
        total = self._most("prompt", prompt)
        for action, observation in turns:
            text = action.text
            if action.kind == "call":
                text = None if action.arguments or action.name else json.dumps(text)
            total += self._most(action.kind, text)
            if observation:
                total += self._most("observation", observation)
        return min(total, _UNKNOWN_TOKENS)

    def _most(self, name: str, text: Any) -> int:
        around = self._around.get(name)
        if around is None or type(text) is not str:
            return _UNKNOWN_TOKENS
        if text.isascii():
            return around + len(text)
        return around + _MOST_BYTES * len(text.encode(errors="replace"))


def tokens_of(tasks: TaskSet, chat: Chat, task: Any) -> int:
    """Of the prompt, and of the demonstration where there is one."""
    chat = of_task(chat, tasks, task)
    length = len(chat.prompt(conversation(tasks.prompt(task))))
    if tasks.demonstrate is not None:
        for action, observation in tasks.demonstrate(task):
            length += len(chat.action(action))
            if observation:
                length += len(chat.observation(reply(action, observation)))
    return length
