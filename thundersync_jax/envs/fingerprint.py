"""What a list of tasks is by content: the same in every process that makes it."""

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import numpy as np

_PRINTED = ("datetime", "decimal", "fractions", "uuid", "ipaddress")  # repr says it all


class Fingerprint(NamedTuple):
    """A task list in its order.

    Attributes:
      sha256: Of the prompts and whatever else the tasks hold.
      prompts_sha256: Of the prompts alone.
      train: Number of training tasks.
      heldout: Number of held-out tasks.
    """

    sha256: str
    prompts_sha256: str
    train: int
    heldout: int


class Hashing:
    """Makes the `Fingerprint` of tasks that come one after the other."""

    def __init__(self):
        self._whole, self._prompts = hashlib.sha256(), hashlib.sha256()
        self._counts = {"train": 0, "heldout": 0}

    def add(self, split: str, task: Any, prompt: Any) -> None:
        """The next task of a split, "train" or "heldout"."""
        self._counts[split] += 1
        line = f"{split} {text(prompt)}\n".encode()
        self._prompts.update(line)
        self._whole.update(line)
        self._whole.update(text(task).encode())

    def fingerprint(self) -> Fingerprint:
        """Of all tasks so far."""
        whole, prompts = self._whole.hexdigest(), self._prompts.hexdigest()
        return Fingerprint(whole, prompts, **self._counts)


def text(value: Any) -> str:
    """A value's content as JSON; of what has none that can be told, its type's name."""
    try:
        return json.dumps(value, default=_plain, sort_keys=True)
    except (TypeError, ValueError, RecursionError):  # other keys, or it holds itself
        return json.dumps(type(value).__qualname__)


def _plain(value: Any) -> Any:
    """What of a value JSON can express; addresses and orders of a set it never is."""
    kind = type(value).__qualname__
    if isinstance(value, enum.Enum):
        return [kind, value.name]
    if isinstance(value, np.ndarray | np.generic):
        numbers = np.asarray(value)
        if numbers.dtype.hasobject:
            return [kind, numbers.tolist()]
        return [kind, numbers.dtype.str, numbers.shape, numbers.tobytes().hex()]
    if isinstance(value, bytes | bytearray):
        return [kind, value.hex()]
    if isinstance(value, Mapping):
        return [kind, sorted([text(key), text(inner)] for key, inner in value.items())]
    if isinstance(value, Set):
        return [kind, sorted(map(text, value))]
    if isinstance(value, os.PathLike):
        return [kind, os.fspath(value)]
    if type(value).__module__.partition(".")[0] in _PRINTED:
        return [kind, repr(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return [kind, {name: getattr(value, name) for name in fields}]
    if callable(value) or not hasattr(value, "__dict__"):
        return [kind, getattr(value, "__qualname__", "")]
    return [kind, vars(value)]
