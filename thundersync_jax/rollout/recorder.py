"""Token recording: what one attempt was shown and what it sampled, as ids.

Ids are kept as they went to and came from the engine, never rendered or tokenised
again, so a trained token is exactly a sampled one. A sample is only appended to; where
the history is rewritten another one begins. A teacher's scores stand beside the tokens.
Nothing here drives a conversation; whoever does reports to a recorder.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from thundersync_jax.engines.base import Scored
from thundersync_jax.types import StopReason, TeacherScores, Trajectory, TrajectoryKey

Ids = Sequence[int] | np.ndarray
_NO_CREDIT = (1.0, 0.0)
_ROUNDING = 1e-4  # nats by which an engine's log-probability may exceed 0


class Recorder:
    """The samples of one attempt, while they grow.

    Attributes:
      turns: Actions so far, of all samples.
      sample: Index of the sample that grows.
    """

    def __init__(
        self,
        key: TrajectoryKey,
        prompt_ids: Ids,
        policy_version: int,
        samples: int | None = 1,
    ):
        """Starts with the prompt; every action must come from `policy_version`.

        There may be at most so many samples, None for any number.
        """
        self.key = key
        self.policy_version = policy_version
        self.turns = 0
        self.sample = 0
        self._most = samples
        self._samples = [_Sample()]
        self._action = self._samples[0], 0  # the latest, and index of its first piece
        self._append(self._checked("prompt", prompt_ids))

    @property
    def length(self) -> int:
        """Tokens of the sample that grows."""
        return self._samples[self.sample].length

    def action(
        self,
        ids: Ids,
        logprobs: Sequence[float] | np.ndarray,
        policy_version: int,
        goes_on: bool = False,
    ) -> None:
        """Appends sampled tokens, a stop token included: the trained ones.

        One that `goes_on` is the rest of the latest action, behind what was put into
        it.

        Raises:
          ValueError: Another policy version, no tokens, or log-probabilities that are
            not one finite number per token, or above 0.
        """
        if policy_version != self.policy_version:
            raise ValueError(
                f"trajectory {self.key}: an action was sampled by policy version "
                f"{policy_version}, the trajectory belongs to version "
                f"{self.policy_version}; update the engine between steps only."
            )
        ids = self._checked("action", ids)
        logprobs = np.asarray(logprobs, np.float32)
        if logprobs.shape != ids.shape:
            raise ValueError(
                f"trajectory {self.key}: an action has {len(ids)} ids and "
                f"log-probabilities of shape {logprobs.shape}; expected one per id."
            )
        if not np.all(np.isfinite(logprobs) & (logprobs <= _ROUNDING)):
            raise ValueError(
                f"trajectory {self.key}: an action has the log-probabilities "
                f"{logprobs.tolist()}; expected finite numbers of at most 0, every id "
                "was sampled."
            )
        if not goes_on:
            self.turns += 1
            now = self._samples[self.sample]
            self._action = now, len(now.ids)
        self._append(ids, logprobs)

    def observation(self, ids: Ids) -> None:
        """Appends tokens that came from the environment; they are never trained."""
        self._append(self._checked("observation", ids))

    def context(self, ids: Ids) -> int:
        """Takes the whole next context of somebody who keeps the history.

        It goes on with the sample that it continues, the longest of those, and else
        begins another. Returns how many of its ids were recorded there.

        Raises:
          ValueError: It continues none and no further sample is allowed. What was
            sampled is trained in the context that it was sampled in: a history that was
            rewritten (thinking removed, text tokenised again) is another sample.
        """
        context = self._checked("context", ids)
        records = [np.concatenate(sample.ids) for sample in self._samples]
        common = [_common(context, record) for record in records]
        continued = [i for i, record in enumerate(records) if common[i] == len(record)]
        if continued:
            self.sample = max(continued, key=lambda i: (common[i], i == self.sample, i))
            known = common[self.sample]
            if len(context) > known:
                self._append(context[known:])
            return known
        if self._most is not None and len(records) >= self._most:
            raise ValueError(self._rewritten(context, records, common))
        self._samples.append(_Sample())
        self.sample = len(records)
        self._append(context)
        return 0

    def _rewritten(self, context, records, common) -> str:
        best = int(np.argmax(common))
        record, place = records[best], common[best]
        there = f"id {context[place]}" if place < len(context) else "nothing"
        return (
            f"trajectory {self.key}: a context of {len(context)} ids has the first "
            f"{place} of the {len(record)} recorded ones; at position {place} it has "
            f"{there}, the record id {record[place]}. Hand the history on as it was "
            f"sampled, or allow more samples than rollout.samples {self._most}."
        )

    def credit(self, weight: float, credit: float) -> None:
        """Gives the latest action the advantage A * weight + credit."""
        sample, first = self._action
        for piece in range(first, len(sample.trained)):
            if sample.trained[piece]:
                sample.credits[piece] = weight, credit

    def score(self, positions: np.ndarray, scored: Scored, sample: int = 0) -> None:
        """Keeps what a teacher says of positions of a sample, of each of them once.

        Raises:
          ValueError: Scores that are not one row of numbers per position, or of another
            kind than those before. -inf is a number where it is one of many entries, an
            id that the teacher excludes; the token that was sampled is none of those.
        """
        logprobs = np.asarray(scored.logprobs, np.float32)
        ids = None if scored.ids is None else np.asarray(scored.ids, np.int32)
        if logprobs.ndim != 2 or len(logprobs) != len(positions):
            raise ValueError(
                f"trajectory {self.key}: the teacher scored {len(positions)} positions "
                f"with shape {logprobs.shape}; expected a row for each."
            )
        lowest = np.min(logprobs, initial=np.inf)
        excluded = lowest == -np.inf and logprobs.shape[1] == 1
        if excluded or not np.all(logprobs < np.inf):
            raise ValueError(
                f"trajectory {self.key}: the teacher's log-probabilities are not "
                "finite; check its parameters and its dtype."
            )
        said = TeacherScores(logprobs, ids, np.ones(len(positions), bool))
        before = self._said
        if before is not None and _kind(before) != _kind(said):
            raise ValueError(
                f"trajectory {self.key}: the teacher gave {_kind(said)[0]} entries a "
                f"position after {_kind(before)[0]}; expected one kind of scores."
            )
        kept = self._samples[sample].room(said)
        kept.logprobs[positions] = logprobs
        if ids is not None:
            kept.ids[positions] = ids
        kept.known[positions] = True

    def teacher_scores(self, trajectory: Trajectory) -> TeacherScores | None:
        """What a teacher has said of the tokens of a `trajectory` of this record.

        None before it said anything.
        """
        said = self._said
        if said is None:
            return None
        samples = zip(self._samples, trajectory.samples, strict=False)
        parts = [
            _each(partial(_first, end - start), sample.room(said))
            for sample, (start, end) in samples
        ]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def trajectory(
        self,
        stop_reason: StopReason | None,
        reason: str = "",
        times: dict[str, float] | None = None,
    ) -> Trajectory:
        """Returns what was recorded so far."""
        samples = self._samples
        lengths = [len(ids) for sample in samples for ids in sample.ids]
        pairs = [pair for sample in samples for pair in sample.credits]
        credited = any(pair != _NO_CREDIT for pair in pairs)
        weights, credits = np.repeat(np.asarray(pairs, np.float32), lengths, axis=0).T
        trained = [trained for sample in samples for trained in sample.trained]
        ends = np.cumsum([sample.length for sample in samples])
        trajectory = Trajectory(
            key=self.key,
            ids=_flat(sample.ids for sample in samples),
            loss_mask=np.repeat(trained, lengths),
            logprobs=_flat(sample.logprobs for sample in samples),
            turns=self.turns,
            stop_reason=stop_reason,
            policy_version=self.policy_version,
            reason=reason,
            turn_weights=weights if credited else None,
            turn_credits=credits if credited else None,
            times=dict(times or {}),
            starts=(0, *ends[:-1].tolist()),
        )
        scores = self.teacher_scores(trajectory)
        return dataclasses.replace(trajectory, teacher=scores)

    @property
    def _said(self) -> TeacherScores | None:
        """Scores of any sample; None before a teacher said anything."""
        return next((x.teacher for x in self._samples if x.teacher is not None), None)

    def _append(self, ids: np.ndarray, logprobs: np.ndarray | None = None) -> None:
        self._samples[self.sample].append(ids, logprobs)

    def _checked(self, what: str, ids: Ids) -> np.ndarray:
        array = np.asarray(ids)
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
            raise ValueError(
                f"trajectory {self.key}: {what} ids have shape {array.shape} and type "
                f"{array.dtype}; expected at least one integer in one dimension."
            )
        # A copy: the caller may reuse its buffer, the record may not change.
        return array.astype(np.int32, copy=True)


@dataclasses.dataclass
class _Sample:
    """One sequence in pieces."""

    length: int = 0
    ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    trained: list[bool] = dataclasses.field(default_factory=list)
    credits: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # u, v
    teacher: TeacherScores | None = None  # with room for what comes

    def append(self, ids: np.ndarray, logprobs: np.ndarray | None) -> None:
        self.ids.append(ids)
        self.trained.append(logprobs is not None)
        self.credits.append(_NO_CREDIT)
        untrained = np.zeros(len(ids), np.float32)
        self.logprobs.append(untrained if logprobs is None else logprobs)
        self.length += len(ids)

    def room(self, like: TeacherScores) -> TeacherScores:
        """Scores of all tokens, with room for more: snapshots of them are views."""
        if self.teacher is None:
            self.teacher = _each(lambda x: x[:0], like)
        if len(self.teacher.known) < self.length:
            self.teacher = _each(partial(_longer, 2 * self.length), self.teacher)
        return self.teacher


def _common(context: np.ndarray, record: np.ndarray) -> int:
    """How many ids both begin with."""
    overlap = min(len(context), len(record))
    differ = np.flatnonzero(context[:overlap] != record[:overlap])
    return int(differ[0]) if len(differ) else overlap


def _flat(pieces: Iterable[list[np.ndarray]]) -> np.ndarray:
    return np.concatenate([piece for sample in pieces for piece in sample])


def _kind(scores: TeacherScores) -> tuple[int, bool]:
    """Entries per position, and whether they have ids."""
    return scores.logprobs.shape[1], scores.ids is not None


def _joined(parts: Sequence[TeacherScores]) -> TeacherScores:
    ids = None if parts[0].ids is None else np.concatenate([p.ids for p in parts])
    logprobs, known = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("logprobs", "known")
    )
    return TeacherScores(logprobs, ids, known)


def _each(
    function: Callable[[np.ndarray], np.ndarray], scores: TeacherScores
) -> TeacherScores:
    ids = None if scores.ids is None else function(scores.ids)
    return TeacherScores(function(scores.logprobs), ids, function(scores.known))


def _first(length: int, array: np.ndarray) -> np.ndarray:
    return array[:length]


def _longer(length: int, array: np.ndarray) -> np.ndarray:
    longer = np.zeros((length, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
