"""Token recording: what one session was shown and what it sampled, as ids.

Append-only: ids are kept as they went to and came from the engine, never rendered or
tokenised again, so a trained token is exactly a sampled one. Nothing here drives a
conversation; whoever does reports to a recorder.
"""

from collections.abc import Sequence

import numpy as np

from thundersync_jax.types import StopReason, Trajectory, TrajectoryKey

_NO_CREDIT = (1.0, 0.0)


class Recorder:
    """The token sequence of one attempt, while it grows."""

    def __init__(
        self,
        key: TrajectoryKey,
        prompt_ids: Sequence[int] | np.ndarray,
        policy_version: int,
    ):
        """Starts with the prompt; every action must come from `policy_version`."""
        self.key = key
        self.policy_version = policy_version
        self.turns = 0
        self.length = 0
        self._ids: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []
        self._trained: list[bool] = []
        self._credits: list[tuple[float, float]] = []  # (u, v) of each piece
        self._append(self._checked("prompt", prompt_ids))

    def action(
        self,
        ids: Sequence[int] | np.ndarray,
        logprobs: Sequence[float] | np.ndarray,
        policy_version: int,
    ) -> None:
        """Appends sampled tokens, a stop token included: the trained ones.

        Raises:
          ValueError: Another policy version, no tokens, or log-probabilities that are
            not one finite number per token.
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
        if not np.all(np.isfinite(logprobs)):
            raise ValueError(
                f"trajectory {self.key}: an action has the log-probabilities "
                f"{logprobs.tolist()}; expected finite numbers, every id was sampled."
            )
        self.turns += 1
        self._append(ids, logprobs)

    def observation(self, ids: Sequence[int] | np.ndarray) -> None:
        """Appends tokens that came from the environment; they are never trained."""
        self._append(self._checked("observation", ids))

    def credit(self, weight: float, credit: float) -> None:
        """Gives the latest action the advantage A * weight + credit."""
        last = len(self._trained) - 1 - self._trained[::-1].index(True)
        self._credits[last] = weight, credit

    def trajectory(
        self,
        stop_reason: StopReason,
        reason: str = "",
        times: dict[str, float] | None = None,
    ) -> Trajectory:
        """Returns what was recorded so far."""
        lengths = [len(ids) for ids in self._ids]
        given = any(pair != _NO_CREDIT for pair in self._credits)
        weights, credits = np.repeat(
            np.asarray(self._credits, np.float32), lengths, axis=0
        ).T
        return Trajectory(
            key=self.key,
            ids=np.concatenate(self._ids),
            loss_mask=np.repeat(self._trained, lengths),
            logprobs=np.concatenate(self._logprobs),
            turns=self.turns,
            stop_reason=stop_reason,
            policy_version=self.policy_version,
            reason=reason,
            turn_weights=weights if given else None,
            turn_credits=credits if given else None,
            times=dict(times or {}),
        )

    def _append(self, ids: np.ndarray, logprobs: np.ndarray | None = None) -> None:
        self._ids.append(ids)
        self._trained.append(logprobs is not None)
        self._credits.append(_NO_CREDIT)
        if logprobs is None:
            logprobs = np.zeros(len(ids), np.float32)
        self._logprobs.append(logprobs)
        self.length += len(ids)

    def _checked(self, what: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        array = np.asarray(ids)
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
            raise ValueError(
                f"trajectory {self.key}: {what} ids have shape {array.shape} and type "
                f"{array.dtype}; expected at least one integer in one dimension."
            )
        # A copy: the caller may reuse its buffer, the record may not change.
        return array.astype(np.int32, copy=True)
