"""What is kept of a step: its trajectories as a file, and artefacts of their verdicts.

`rollouts/step_000012.jsonl`, or the same compressed as `.jsonl.gz`, has one JSON object
per line, in (group, member) order:

    step, group, member, attempt, phase   its key
    policy_version                        optimizer updates behind its sampler
    stop_reason, reason                   why it ended; a line of text where it failed
    reward, advantage                     numbers, or null where there is none
    parts, log                            of the verdict: numbers by name, and text
    turns                                 number of actions
    times                                 seconds on the run's monotonic clock, by name
    text                                  the ids as text, to look at only
    pieces                                tokens, characters, special or not, of each
    starts                                where samples begin: [0], or further places
                                          where the history was rewritten
    ids, loss_mask, logprobs              per token; the mask is 1 on sampled tokens,
                                          log-probabilities restore as float32 exactly
    turn_weights, turn_credits            per token, or null where none was given
"""

import contextlib
import dataclasses
import gzip
import io
import itertools
import json
import math
import operator
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from thundersync_jax.chat.base import Chat, Piece, pieces
from thundersync_jax.chat.byte_level import ByteLevel
from thundersync_jax.config.workdir import replacing
from thundersync_jax.errors import ConfigError
from thundersync_jax.types import StopReason, Trajectory, TrajectoryKey

FOLDER = "rollouts"
_BYTE_LEVEL = ByteLevel()
_FILE = re.compile(r"step_(\d+)\.jsonl(\.gz)?")
_GZIP = ".gz"  # ending of what is compressed
_LEVEL = 6  # of compression
ARTEFACTS_FOLDER = "artefacts"
_BLOCK_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Record:
    """One line of the file."""

    trajectory: Trajectory
    advantage: float | None  # None: the member does not count, or its group was dropped
    pieces: tuple[Piece, ...]  # the text, as `chat.pieces` cuts it

    @property
    def text(self) -> str:
        """The ids as text."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def prompt_ids(self) -> np.ndarray:
        """int32[N], everything before the first sampled token."""
        return self.trajectory.ids[: self._prompt_tokens]

    @property
    def prompt_text(self) -> str:
        """The text of `prompt_ids`, without the special tokens that frame it."""
        ends = itertools.accumulate(piece.tokens for piece in self.pieces)
        return "".join(
            piece.text
            for piece, end in zip(self.pieces, ends, strict=True)
            if end <= self._prompt_tokens and not piece.special
        )

    @property
    def _prompt_tokens(self) -> int:
        mask = self.trajectory.loss_mask
        return int(np.argmax(mask)) if np.any(mask) else len(mask)


class KnownMean(NamedTuple):
    """A mean over the values that exist, and how many of them there were."""

    mean: float  # NaN where none is known
    known: int
    total: int


def known_mean(values: Iterable[float | None]) -> KnownMean:
    """Returns the mean over values that are neither None nor NaN."""
    values = [math.nan if value is None else float(value) for value in values]
    known = [value for value in values if not math.isnan(value)]
    mean = math.fsum(known) / len(known) if known else math.nan
    return KnownMean(mean, len(known), len(values))


def part_means(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """The mean of every part of verdicts, over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.parts.items():
            values.setdefault(name, []).append(value)
    return {name: known_mean(values[name]).mean for name in sorted(values)}


def stop_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Counts by `StopReason` value as `stop_<reason>`, and the `truncated_share`."""
    metrics = {f"stop_{r.value}": counts.get(r.value, 0) for r in StopReason}
    truncated = sum(metrics[f"stop_{r.value}"] for r in StopReason if r.truncated)
    total = sum(metrics.values())
    return metrics | {"truncated_share": truncated / total if total else math.nan}


def rollouts_path(workdir: str | os.PathLike[str], step: int) -> Path:
    """Where a step's trajectories are; where there are none yet, uncompressed."""
    path = Path(workdir) / FOLDER / f"step_{step:06d}.jsonl"
    compressed = path.with_name(path.name + _GZIP)
    return compressed if compressed.exists() else path


def write_rollouts(
    workdir: str | os.PathLike[str],
    step: int,
    trajectories: Iterable[Trajectory],
    advantages: Mapping[tuple[int, int], float],
    chat: Chat = _BYTE_LEVEL,
    compressed: bool = False,
    most_bytes: int | None = None,
) -> Path:
    """Writes all trajectories of one step into a file that is whole or not there.

    Advantages, by (group, member), are of the members that count. Where all files take
    more than `most_bytes`, the oldest are deleted, this one never.
    """
    trajectories = sorted(trajectories, key=lambda trajectory: trajectory.key)
    strays = [str(t.key) for t in trajectories if t.key.step != step]
    if strays:
        raise ValueError(
            f"trajectory {strays[0]} was given for the records of step {step}; write "
            "each step's trajectories to its own file."
        )
    plain = Path(workdir) / FOLDER / f"step_{step:06d}.jsonl"
    other = plain.with_name(plain.name + _GZIP)
    path, other = (other, plain) if compressed else (plain, other)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(replacing(path))
        if compressed:  # the same bytes for the same trajectories: no name, no time
            whole = gzip.GzipFile("", "wb", _LEVEL, file, mtime=0)
            file = stack.enter_context(whole)
        for trajectory in trajectories:
            place = trajectory.key.group, trajectory.key.member
            line = _to_line(trajectory, advantages.get(place), chat)
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
    other.unlink(missing_ok=True)
    if most_bytes is not None:
        _delete_oldest(workdir, step, most_bytes)
    return path


def read_rollouts(path: str | os.PathLike[str]) -> list[Record]:
    """Reads a file of `write_rollouts`.

    Raises:
      ConfigError: It does not exist, or a line is no record; the line is named.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}. Name a step's .jsonl file.")
    records = []
    opener = gzip.open if path.name.endswith(_GZIP) else open
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(_lines(file, path), start=1):
            try:
                records.append(_from_line(json.loads(line)))
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise ConfigError(
                    f"{path}:{number} is no trajectory ({type(error).__name__}: "
                    f"{error}); expected one JSON object as write_rollouts writes it. "
                    "Restore the file or leave this step out."
                ) from error
    return records


def read_step(
    workdir: str | os.PathLike[str], step: int | None = None
) -> tuple[int, list[Record]]:
    """The number of one step of a run, by default the latest, and its records.

    Raises:
      ConfigError: The run has no such step; the nearest ones are named.
    """
    steps = recorded_steps(workdir)
    if not steps:
        raise ConfigError(
            f"there are no trajectories in {Path(workdir) / FOLDER}. Name the work "
            "directory of a run that has trained at least one step."
        )
    if step is None:
        step = steps[-1]
    if step not in steps:
        below = [str(other) for other in steps if other < step][-1:]
        above = [str(other) for other in steps if other > step][:1]
        raise ConfigError(
            f"step {step} has no trajectories in {Path(workdir) / FOLDER}, expected a "
            f"step from {steps[0]} to {steps[-1]}. The nearest there: "
            f"{' and '.join(below + above)}."
        )
    return step, read_rollouts(rollouts_path(workdir, step))


def recorded_steps(workdir: str | os.PathLike[str]) -> list[int]:
    """Returns the steps that have a file, in order."""
    folder = Path(workdir) / FOLDER
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    matches = [_FILE.fullmatch(name) for name in names]
    return sorted({int(match.group(1)) for match in matches if match})


class Artefacts:
    """Keeps files that verdicts bring along, compressed, within a budget per step.

    `artefacts/step_000012/g3m1/NAME.gz` is of member 1 of group 3. What is beyond the
    budget, or cannot be written, is left out; `on_line` is told once of each.
    """

    def __init__(
        self, workdir: str | os.PathLike, most_bytes: int, on_line: Callable[[str], Any]
    ):
        self._folder = Path(workdir) / ARTEFACTS_FOLDER
        self._most_bytes, self._on_line = most_bytes, on_line
        self._name = "before_step_000001"
        self._bytes = 0  # so far
        self._lock = threading.Lock()  # verdicts come from several threads

    def begin(self, name: str) -> None:
        """Begins a step, as `step_000012`; what a killed process kept is deleted."""
        with self._lock:
            self._name, self._bytes = name, 0
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def keep(self, key: TrajectoryKey, artefacts: Mapping[str, bytes | Path]) -> None:
        """Takes the artefacts of one verdict; an OSError where a path has no file."""
        with self._lock:
            folder = self._folder / self._name / f"g{key.group}m{key.member}"
            for name, content in artefacts.items():
                with contextlib.ExitStack() as stack:
                    source = io.BytesIO(content) if isinstance(content, bytes) else None
                    source = source or stack.enter_context(open(content, "rb"))
                    self._write(folder / f"{name}{_GZIP}", source, f"{name} of {key}")

    def _write(self, path: Path, source: IO[bytes], what: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=_LEVEL) as to:
                    while block := source.read(_BLOCK_BYTES):
                        to.write(block)
                        self._check(file)
                self._check(file)
                size = file.tell()
            self._bytes += size
        except _BeyondBudget:
            self._on_line(
                f"artefacts of a step are beyond metrics.artefact_bytes "
                f"{self._most_bytes} and left out, the first is {what}; this is "
                "printed once"
            )
        except OSError as error:
            self._on_line(
                f"artefacts cannot be written and are left out, the first is {what}: "
                f"{error.strerror or error}; this is printed once"
            )

    def _check(self, file: IO[bytes]) -> None:
        if self._bytes + file.tell() > self._most_bytes:
            raise _BeyondBudget


class _BeyondBudget(Exception):
    """No room for an artefact."""


def _delete_oldest(workdir: str | os.PathLike, step: int, most_bytes: int) -> None:
    paths = [rollouts_path(workdir, other) for other in recorded_steps(workdir)]
    sizes = [path.stat().st_size for path in paths]
    newest, total = rollouts_path(workdir, step), sum(sizes)
    for path, size in zip(paths, sizes, strict=True):
        if total > most_bytes and path != newest:
            path.unlink()
            total -= size


def _lines(file: Iterable[str], path: Path) -> Iterator[str]:
    """The lines of a file; ConfigError where its compression is torn."""
    try:
        yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(
            f"{path} cannot be read to its end ({error}), expected a file of "
            "write_rollouts. Restore it or leave this step out."
        ) from error


def _to_line(
    trajectory: Trajectory, advantage: float | None, chat: Chat
) -> dict[str, Any]:
    cut = pieces(chat, trajectory)
    return {
        **trajectory.key._asdict(),
        "policy_version": trajectory.policy_version,
        "stop_reason": trajectory.stop_reason.value,
        "reason": trajectory.reason,
        "reward": _plain(trajectory.reward),
        "advantage": _plain(advantage),
        "parts": trajectory.parts,
        "log": trajectory.log,
        "turns": trajectory.turns,
        "times": {name: _plain(secs) for name, secs in trajectory.times.items()},
        "text": "".join(piece.text for piece in cut),
        "pieces": [[p.tokens, len(p.text), int(p.special)] for p in cut],
        "starts": list(trajectory.starts),
        "ids": np.asarray(trajectory.ids).tolist(),
        "loss_mask": np.asarray(trajectory.loss_mask).astype(int).tolist(),
        "logprobs": _float32_digits(trajectory.logprobs),
        "turn_weights": _float32_digits(trajectory.turn_weights),
        "turn_credits": _float32_digits(trajectory.turn_credits),
    }


def _from_line(line: dict[str, Any]) -> Record:
    trajectory = Trajectory(
        key=_key(line),
        ids=np.asarray(line["ids"], np.int32),
        loss_mask=np.asarray(line["loss_mask"], bool),
        logprobs=_floats(line["logprobs"]),
        turns=_typed("turns", line, int),
        stop_reason=StopReason(line["stop_reason"]),
        policy_version=_typed("policy_version", line, int),
        reward=_typed("reward", line, int | float | None),
        reason=_typed("reason", line, str),
        turn_weights=_floats(line.get("turn_weights")),
        turn_credits=_floats(line.get("turn_credits")),
        times=_typed("times", line, dict),
        # Records from before there were parts have none.
        parts=_typed("parts", {"parts": {}} | line, dict),
        log=_typed("log", {"log": ""} | line, str),
        starts=tuple(map(operator.index, line.get("starts", [0]))),
    )
    for name in trajectory.parts:
        _typed(name, trajectory.parts, int | float)
    for name in trajectory.times:
        _typed(name, trajectory.times, int | float | None)
    arrays = (trajectory.ids, trajectory.loss_mask, trajectory.logprobs)
    if len({array.shape for array in arrays}) > 1:
        raise ValueError("ids, loss_mask and logprobs differ in length")
    advantage = _typed("advantage", line, int | float | None)
    return Record(trajectory, advantage, _pieces(line, len(trajectory.ids)))


def _pieces(line: dict[str, Any], tokens: int) -> tuple[Piece, ...]:
    text, pieces, start = _typed("text", line, str), [], 0
    for count, characters, special in _typed("pieces", line, list):
        pieces.append(Piece(count, bool(special), text[start : start + characters]))
        start += characters
    if start != len(text) or sum(piece.tokens for piece in pieces) != tokens:
        raise ValueError("pieces do not cover text and ids")
    return tuple(pieces)


def _key(line: dict[str, Any]) -> TrajectoryKey:
    for name in ("step", "group", "member", "attempt"):
        _typed(name, line, int)
    return TrajectoryKey(*(line[name] for name in TrajectoryKey._fields))


def _typed(name: str, line: Mapping[str, Any], kind: Any) -> Any:
    value = line[name]
    if isinstance(value, bool) or not isinstance(value, kind):
        expected = getattr(kind, "__name__", str(kind))
        raise TypeError(f"{name} is {value!r}, expected {expected}")
    return value


def _plain(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _floats(values: list[float | str] | None) -> np.ndarray | None:
    return None if values is None else np.asarray(values, np.float32)


def _float32_digits(
    values: Sequence[float] | np.ndarray | None,
) -> list[float | str] | None:
    """Shortest digits that restore each float32; JSON has no infinity but as text."""
    if values is None:
        return None
    texts = [str(value) for value in np.asarray(values, np.float32)]
    return [float(text) if math.isfinite(float(text)) else text for text in texts]
