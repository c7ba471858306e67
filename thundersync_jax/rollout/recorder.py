"""Token recording: what one session was shown and what it sampled, as ids.

Append-only: ids are kept as they went to and came from the engine, never rendered or
tokenised again, so a trained token is exactly a sampled one. A teacher's scores stand
beside them. Nothing here drives a conversation; whoever does reports to a recorder.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from thundersync_jax.engines.base import Scored
from thundersync_jax.types import StopReason, TeacherScores, Trajectory, TrajectoryKey

Ids = Sequence[int] | np.ndarray
_NO_CREDIT = (1.0, 0.0)
_ROUNDING = 1e-4  # nats by which an engine's log-probability may exceed 0


class Recorder:
    """The token sequence of one attempt, while it grows."""

    def __init__(self, key: TrajectoryKey, prompt_ids: Ids, policy_version: int):
        """Starts with the prompt; every action must come from `policy_version`."""
        self.key = key
        self.policy_version = policy_version
        self.turns = 0
        self.length = 0
        self._turn = 0  # index of the first piece of the latest action
        self._ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._trained: list[bool] = []
        self._credits: list[tuple[float, float]] = []  # (u, v) of each piece
        self._teacher: TeacherScores | None = None  # with room for what comes
        self._append(self._checked("prompt", prompt_ids))

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
            self._turn = len(self._ids)
        self._append(ids, logprobs)

    def observation(self, ids: Ids) -> None:
        """Appends tokens that came from the environment; they are never trained."""
        self._append(self._checked("observation", ids))

    def context(self, ids: Ids) -> None:
        """Takes the whole next context of a harness that keeps the history itself.

        What continues the record is appended as an observation.

        Raises:
          ValueError: It does not begin with the recorded ids. What was sampled is
            trained in the context that it was sampled in, so a history that was
            rewritten (thinking removed, text tokenised again) is another sample.
        """
        context, record = self._checked("context", ids), np.concatenate(self._ids)
        overlap = min(len(context), len(record))
        differ = np.flatnonzero(context[:overlap] != record[:overlap])
        common = int(differ[0]) if len(differ) else overlap
        if common < len(record):
            there = f"id {context[common]}" if common < len(context) else "nothing"
            raise ValueError(
                f"trajectory {self.key}: a context of {len(context)} ids has the first "
                f"{common} of the {len(record)} recorded ones; at position {common} "
                f"it has {there}, the record id {record[common]}. Hand the history on "
                "as it was sampled, or begin a new sample."
            )
        if len(context) > len(record):
            self.observation(context[len(record) :])

    def credit(self, weight: float, credit: float) -> None:
        """Gives the latest action the advantage A * weight + credit."""
        for piece in range(self._turn, len(self._trained)):
            if self._trained[piece]:
                self._credits[piece] = weight, credit

    def score(self, positions: np.ndarray, scored: Scored) -> None:
        """Keeps what a teacher says of recorded positions, of each of them once.

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
        entries = logprobs.shape[1]
        if self._teacher is None:
            no_ids = None if ids is None else ids[:0]
            self._teacher = TeacherScores(logprobs[:0], no_ids, np.zeros(0, bool))
        kept = self._room()
        if kept.logprobs.shape[1] != entries or (kept.ids is None) != (ids is None):
            raise ValueError(
                f"trajectory {self.key}: the teacher gave {entries} entries a position "
                f"after {kept.logprobs.shape[1]}; expected one kind of scores."
            )
        kept.logprobs[positions] = logprobs
        if ids is not None:
            kept.ids[positions] = ids
        kept.known[positions] = True

    def teacher_scores(self, length: int) -> TeacherScores | None:
        """What a teacher said of the first tokens so far; None before it did."""
        if self._teacher is None:
            return None
        return _each(lambda x: x[:length], self._room())

    def trajectory(
        self,
        stop_reason: StopReason | None,
        reason: str = "",
        times: dict[str, float] | None = None,
    ) -> Trajectory:
        """Returns what was recorded so far."""
        lengths = [len(ids) for ids in self._ids]
        credited = any(pair != _NO_CREDIT for pair in self._credits)
        pairs = np.asarray(self._credits, np.float32)
        weights, credits = np.repeat(pairs, lengths, axis=0).T
        return Trajectory(
            key=self.key,
            ids=np.concatenate(self._ids),
            loss_mask=np.repeat(self._trained, lengths),
            logprobs=np.concatenate(self._logprobs),
            turns=self.turns,
            stop_reason=stop_reason,
            policy_version=self.policy_version,
            reason=reason,
            turn_weights=weights if credited else None,
            turn_credits=credits if credited else None,
            teacher=self.teacher_scores(self.length),
            times=dict(times or {}),
        )

    def _room(self) -> TeacherScores:
        """Scores of all tokens, with room for more: snapshots of them are views."""
        if len(self._teacher.known) < self.length:
            self._teacher = _each(partial(_longer, 2 * self.length), self._teacher)
        return self._teacher

    def _append(self, ids: np.ndarray, logprobs: np.ndarray | None = None) -> None:
        self._ids.append(ids)
        self._trained.append(logprobs is not None)
        self._credits.append(_NO_CREDIT)
        untrained = np.zeros(len(ids), np.float32)
        self._logprobs.append(untrained if logprobs is None else logprobs)
        self.length += len(ids)

    def _checked(self, what: str, ids: Ids) -> np.ndarray:
        array = np.asarray(ids)
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
            raise ValueError(
                f"trajectory {self.key}: {what} ids have shape {array.shape} and type "
                f"{array.dtype}; expected at least one integer in one dimension."
            )
        # A copy: the caller may reuse its buffer, the record may not change.
        return array.astype(np.int32, copy=True)


def _each(
    function: Callable[[np.ndarray], np.ndarray], scores: TeacherScores
) -> TeacherScores:
    ids = None if scores.ids is None else function(scores.ids)
    return TeacherScores(function(scores.logprobs), ids, function(scores.known))


def _longer(length: int, array: np.ndarray) -> np.ndarray:
    longer = np.zeros((length, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
