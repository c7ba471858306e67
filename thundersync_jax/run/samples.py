"""What the loss of a run sees of its trajectories: whole, in turns, behind a prompt."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from thundersync_jax.config import Config, LossConfig
from thundersync_jax.errors import ConfigError, StreamError
from thundersync_jax.ops import advantages, losses
from thundersync_jax.stream import padding
from thundersync_jax.stream.padding import Padded
from thundersync_jax.types import StopReason, TeacherScores, Trajectory, TrajectoryKey


class Samples:
    """Makes samples, padded to the lengths of a config.

    `width` ids are those of the policy and its teacher; `prompt_ids` maps (step, group)
    to the prompt int32[N].
    """

    def __init__(
        self, config: Config, width: int, prompt_ids: Callable[[int, int], np.ndarray]
    ):
        self._loss, self._rollout = config.loss, config.rollout
        self._shared = config.share_prompt == "group"
        self.width = width
        self._prompt_ids = prompt_ids

    def whole(
        self, trajectory: Trajectory, start: int = 0, end: int | None = None
    ) -> Padded:
        """A trajectory's sample, or what follows the prompt that its group shares.

        It is the one from `start` to `end`, for many trajectories the only one.
        """
        lengths = self._rollout.gradient_buckets
        if not self._shared:
            return sample(trajectory, self._loss, lengths, start, end)
        after = self._after_prompt(trajectory, start, end)
        lengths = self._rollout.segment_lengths
        return segment_sample(trajectory, self._loss, lengths, after, end, origin=start)

    def turn(
        self, trajectory: Trajectory, start: int, end: int | None = None
    ) -> Padded:
        """A turn of a trajectory that may go on, new from `start` to `end`."""
        if start == 0 and self._shared:
            start = self._after_prompt(trajectory)
        lengths = self._rollout.segment_lengths
        return segment_sample(
            trajectory, self._loss, lengths, start, end, whole_weight=False
        )

    def prompt(self, step: int, group: int) -> Padded | None:
        """The prompt that a group shares; None where every sample holds its own."""
        if not self._shared:
            return None
        ids = self._prompt_ids(step, group)
        lengths = self._rollout.segment_lengths
        return segment_sample(self.untrained(len(ids), ids), self._loss, lengths, 0)

    def untrained(self, tokens: int, ids: np.ndarray | None = None) -> Trajectory:
        """A trajectory that trains nothing: of these ids, or without meaning."""
        return untrained(tokens, ids, self._loss, self.width)

    def made_up(self, length: int, start: int) -> Padded:
        """An untrained token behind `start` others, padded to a length of segments."""
        trajectory = self.untrained(start + 1)
        return segment_sample(trajectory, self._loss, (length,), start)

    def shaped_reward(self, trajectory: Trajectory) -> float:
        """The reward that advantages follow from; filters look at the raw one."""
        return shaped_reward(trajectory, self._loss, self._rollout.most_action_tokens)

    def _after_prompt(
        self, trajectory: Trajectory, start: int = 0, end: int | None = None
    ) -> int:
        ids = self._prompt_ids(trajectory.key.step, trajectory.key.group)
        if not np.array_equal(trajectory.ids[start:end][: len(ids)], ids):
            what = "a rewritten history" if start else "`start`"
            raise ConfigError(
                f"share_prompt is 'group' and trajectory {trajectory.key} has a sample "
                "that begins with another prompt than the task set's `prompt` says; "
                f"let {what} begin with that text, or set share_prompt=no"
            )
        return start + len(ids)


def spans(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Begin and end of the samples that train anything, but of one in any case."""
    trained = [
        (start, end)
        for start, end in trajectory.samples
        if np.any(trajectory.loss_mask[start:end])
    ]
    return trained or trajectory.samples[:1]


def sample(
    trajectory: Trajectory,
    loss: LossConfig,
    lengths: Sequence[int],
    start: int = 0,
    end: int | None = None,
) -> Padded:
    """What the surrogate sees of a sample, padded to one of `lengths`.

    It is the one from `start` to `end`. The weights of its tokens follow from those of
    the whole trajectory, of which it may be one of several.

    "tokens" int32[T], "weights" float32[T], "mask" bool[T], "logprobs" float32[T] of
    the sampler; under turn credit "turn_weights" and "turn_credits" float32[T], and
    with a teacher "teacher_logprobs" float32[T, K] and, of its likeliest ids alone,
    "teacher_ids" int32[T, K].

    ConfigError where the environment gave turn credit and the loss does not use it;
    StreamError where the teacher's scores of a trained token are missing.
    """
    return padding.pad(_arrays(trajectory, loss, start, end), lengths)


def segment_sample(
    trajectory: Trajectory,
    loss: LossConfig,
    lengths: Sequence[int],
    start: int,
    end: int | None = None,
    whole_weight: bool = True,
    origin: int = 0,
) -> Padded:
    """What the surrogate in pieces sees of the tokens from `start` to `end`.

    The arrays of `sample`, and "start" and "length" int32[]. Weights are those of the
    whole trajectory, or without `whole_weight` 1, for a trajectory that still goes on.
    The sample that the tokens belong to begins at `origin`.
    """
    arrays = _arrays(trajectory, loss, start, end)
    if not whole_weight:
        arrays["weights"] = arrays["mask"].astype(np.float32)
    padded = padding.pad(arrays, lengths)
    place = {"start": np.int32(start - origin), "length": np.int32(padded.real_tokens)}
    return dataclasses.replace(padded, tree=padded.tree | place)


def trained_tokens(
    trajectory: Trajectory, loss: LossConfig, start: int, end: int
) -> int:
    """Tokens that are in the loss, from `start` to `end`, for the denominator."""
    trained = int(np.sum(trajectory.loss_mask[start:end]))
    return 0 if _masked(trajectory, loss) else trained


def _masked(trajectory: Trajectory, loss: LossConfig) -> bool:
    stop_reason = trajectory.stop_reason  # None of one that goes on
    cut = stop_reason is not None and stop_reason.truncated
    return cut and loss.truncated == "mask"


def trajectory_weight(trajectory: Trajectory, loss: LossConfig) -> float:
    """What the turns of a complete trajectory, of tokens that weigh 1, count with."""
    mask = trajectory.loss_mask
    return float(losses.token_weights(mask, loss.aggregation, loss.constant).max())


def _arrays(
    trajectory: Trajectory, loss: LossConfig, start: int, end: int | None
) -> dict[str, np.ndarray]:
    weights = losses.token_weights(
        trajectory.loss_mask, loss.aggregation, loss.constant
    )
    arrays = {
        "tokens": trajectory.ids,
        "weights": np.zeros_like(weights) if _masked(trajectory, loss) else weights,
        "mask": trajectory.loss_mask,
        "logprobs": trajectory.logprobs,
    }
    credited = trajectory.turn_credits is not None
    if loss.turn_credit == "environment":
        ones = np.ones(len(trajectory.ids), np.float32)
        arrays["turn_weights"] = trajectory.turn_weights if credited else ones
        arrays["turn_credits"] = trajectory.turn_credits if credited else 0 * ones
    elif credited:
        raise ConfigError(
            f"trajectory {trajectory.key} has turn credit and loss.turn_credit is "
            f"{loss.turn_credit!r}, expected 'environment': nothing that an "
            "environment gives is left out silently. Set it, or give no credit."
        )
    if loss.distill != "none":
        arrays |= _teacher_arrays(trajectory)
    return {name: array[start:end] for name, array in arrays.items()}


def _teacher_arrays(trajectory: Trajectory) -> dict[str, np.ndarray]:
    mask, scores = trajectory.loss_mask, trajectory.teacher
    known = np.zeros_like(mask) if scores is None else scores.known
    if missing := int(np.sum(mask & ~known)):
        raise StreamError(
            f"trajectory {trajectory.key}: the teacher's scores of {missing} of "
            f"{int(mask.sum())} trained tokens are missing; without them distillation "
            "would be off silently. Fail the trajectory, or score it."
        )
    scored = (mask & known)[:, None]
    arrays = {"teacher_logprobs": np.where(scored, scores.logprobs, np.float32(0))}
    if scores.ids is not None:
        arrays["teacher_ids"] = np.where(scored, scores.ids, np.int32(0))
    return arrays


def untrained(
    tokens: int, ids: np.ndarray | None, loss: LossConfig, width: int
) -> Trajectory:
    """A trajectory that trains nothing: of `ids`, or of as many zeros as `tokens`."""
    mask, zeros = np.zeros(tokens, bool), np.zeros(tokens, np.float32)
    scores = None
    if loss.distill != "none":
        kind = loss.teacher_kind
        columns = {"sampled": 1, "top_k": loss.distill_top_k, "full": width}[kind]
        likeliest = np.zeros((tokens, columns), np.int32)
        logprobs = np.zeros((tokens, columns), np.float32)
        scores = TeacherScores(logprobs, likeliest if kind == "top_k" else None, mask)
    return Trajectory(
        key=TrajectoryKey(0, 0, 0),
        ids=np.zeros(tokens, np.int32) if ids is None else ids,
        loss_mask=mask,
        logprobs=zeros,
        turns=0,
        stop_reason=StopReason.FINISHED,
        policy_version=0,
        teacher=scores,
    )


def shaped_reward(trajectory: Trajectory, loss: LossConfig, limit_tokens: int) -> float:
    """A trajectory's reward less its length penalty (`advantages.length_penalty`).

    All of the penalty is taken off at `limit_tokens` sampled tokens. Of one that was
    cut off it is 0, if the loss says so.
    """
    if loss.truncated == "zero_reward" and trajectory.stop_reason.truncated:
        return 0.0
    if not loss.length_penalty:
        return trajectory.reward
    return trajectory.reward - advantages.length_penalty(
        trajectory.action_tokens,
        loss.length_free_tokens,
        limit_tokens,
        loss.length_penalty,
    )
