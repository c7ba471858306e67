"""What a step optimises: the surrogate, its weights, the baseline and the divisor.

The settings of a config turned into the arguments of a `GradientStream`.

    loss = (1 / Z) sum_i [ A_i weighted_i + additive_i ]

    weighted = - sum_t w_t rho_t u_t log pi(a_t | h_t)
    additive = - sum_t w_t rho_t v_t log pi(a_t | h_t)
               + distill_coef * sum_t w_t D_t(student, teacher)
               + kl_coef * sum_t w_t KL_t - entropy_coef * sum_t w_t H_t

w_t and Z come from the aggregation, rho_t from `loss.importance_cap` (else 1), u_t and
v_t from `loss.turn_credit` (else 1 and 0). A term that is not configured is not there.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.config import LossConfig, ModelConfig
from thundersync_jax.errors import ConfigError, StreamError
from thundersync_jax.models import continuation, transformer
from thundersync_jax.ops import advantages, losses
from thundersync_jax.ops.advantages import PromptBaseline
from thundersync_jax.ops.logprobs import target_logprobs
from thundersync_jax.run import token_numbers
from thundersync_jax.stream import padding
from thundersync_jax.stream.segments import Segments, State
from thundersync_jax.stream.surrogate import Max, Surrogate
from thundersync_jax.types import StopReason, TeacherScores, Trajectory, TrajectoryKey

Tree = Any


def policy_surrogate(
    model: ModelConfig, temperature: float, loss: LossConfig, width: int | None = None
) -> Callable[..., Surrogate]:
    """The surrogate of a model's whole trajectories, at the sampling temperature.

    It is a function of (params, sample), or with a KL penalty of (params, reference,
    sample) where the reference is another policy's parameters. Samples are what
    `sample` makes of trajectories.

    Metrics are "kl", "entropy" and "teacher_kl" where their terms are, sums over
    trained tokens (not weighted: divide by their number). Diagnostics are those of
    `losses.mismatch`, under names that begin with "mismatch_".

    Args:
      model: Of the policy.
      temperature: Of sampling.
      loss: Its terms.
      width: Ids that student and teacher have; None for the model's.
    """
    numbers = token_numbers.of(model, temperature, loss, width)

    def surrogate(params, sample, reference=None):
        given = sample["tokens"], token_numbers.operands(sample)
        found = continuation.whole(model, params, *given, numbers)
        others = None
        if loss.kl_coef:
            policy = model, reference, sample["tokens"], temperature
            others = transformer.surrogate_logprobs(*policy)
        return _terms(loss, sample, found, others)

    if loss.kl_coef:
        return lambda params, reference, sample: surrogate(params, sample, reference)
    return surrogate


def policy_segments(
    model: ModelConfig,
    temperature: float,
    loss: LossConfig,
    slots: int,
    width: int | None = None,
) -> Segments:
    """The same in pieces, of which `segment_sample` makes the samples.

    Args:
      model, temperature, loss, width: As for `policy_surrogate`.
      slots: Tokens of the longest trajectory.
    """
    numbers = token_numbers.of(model, temperature, loss, width)

    def logprobs(logits, operands):
        return target_logprobs(logits, operands["tokens"], temperature)

    def empty(slots):
        kept, last = continuation.empty(model, slots)
        both = [kept] * 2 if loss.kl_coef else [kept]
        return State(both, [last] * len(both))

    def segment(params, state, sample, reference=None):
        piece = sample["tokens"], sample["start"], sample["length"]
        operands = token_numbers.operands(sample)
        before = state.kept[0], state.last[0]
        found, *left = continuation.piece(
            model, params, *before, *piece, operands, numbers
        )
        kept, last, others = [left[0]], [left[1]], None
        if loss.kl_coef:
            before = jax.lax.stop_gradient((state.kept[1], state.last[1]))
            others, *left = continuation.piece(
                model, reference, *before, *piece, operands, logprobs
            )
            kept, last = [*kept, left[0]], [*last, left[1]]
        return _terms(loss, sample, found, others), State(kept, last)

    axis = continuation.TOKEN_AXIS
    if loss.kl_coef:
        return Segments(
            lambda params, reference, *rest: segment(params, *rest, reference),
            empty,
            slots,
            axis,
        )
    return Segments(segment, empty, slots, axis)


def estimator(loss: LossConfig) -> advantages.Estimator | None:
    """The advantage that a config names; None where no reward is in the loss.

    A tracked baseline is subtracted where groups are opened; what is left is the
    reward itself.
    """
    moments = loss.std_ddof, loss.std_eps
    made = {
        "mean_std": lambda: advantages.mean_std(*moments),
        "mean_only": advantages.mean_only,
        "leave_one_out": advantages.leave_one_out,
        "leave_one_out_std": lambda: advantages.leave_one_out_std(*moments),
        "batch_mean_std": lambda: advantages.batch_mean_std(*moments),
        "pass_at_k": lambda: advantages.pass_at_k(loss.pass_k),
        "fixed_baseline": lambda: advantages.fixed_baseline(loss.baseline),
        "tracked_baseline": lambda: advantages.fixed_baseline(0.0),
        "none": lambda: None,
    }
    return made[loss.advantage]()


def baselines(loss: LossConfig, state: dict[str, Any] | None = None) -> PromptBaseline:
    """The baselines of "tracked_baseline", new or from where `state` was taken."""
    if state is None:
        return PromptBaseline(loss.baseline_decay, loss.baseline)
    return PromptBaseline.restored(loss.baseline_decay, loss.baseline, state)


def denominator(loss: LossConfig) -> str:
    """Z of an aggregation; README has the table."""
    return "tokens" if loss.aggregation == "token_mean" else "trajectories"


def sample(
    trajectory: Trajectory, loss: LossConfig, lengths: Sequence[int]
) -> padding.Padded:
    """What the surrogate sees of a trajectory, padded to one of `lengths`.

    Returns:
      "tokens" int32[T], "weights" float32[T], "mask" bool[T], "logprobs" float32[T] of
      the sampler; under turn credit "turn_weights" and "turn_credits" float32[T], and
      with a teacher "teacher_logprobs" float32[T, K] and, of its likeliest ids alone,
      "teacher_ids" int32[T, K].

    Raises:
      ConfigError: The environment gave turn credit and the loss does not use it.
      StreamError: The teacher's scores of a trained token are missing.
    """
    return padding.pad(_arrays(trajectory, loss), lengths)


def segment_sample(
    trajectory: Trajectory,
    loss: LossConfig,
    lengths: Sequence[int],
    start: int,
    end: int | None = None,
    whole_weight: bool = True,
) -> padding.Padded:
    """What `policy_segments` sees of the tokens from `start` to `end`.

    Args:
      trajectory: Whole, or as far as it is known.
      loss: As for `sample`, as `lengths`.
      lengths: Of segments.
      start: Index of its first token.
      end: Behind its last one; None for the trajectory's.
      whole_weight: Whether weights are those of the whole trajectory. Otherwise they
        are 1, for one that still goes on.

    Returns:
      The arrays of `sample`, and "start" and "length" int32[].
    """
    arrays = {name: x[start:end] for name, x in _arrays(trajectory, loss).items()}
    if not whole_weight:
        arrays["weights"] = arrays["mask"].astype(np.float32)
    padded = padding.pad(arrays, lengths)
    place = {"start": np.int32(start), "length": np.int32(padded.real_tokens)}
    return dataclasses.replace(padded, tree=padded.tree | place)


def trajectory_weight(trajectory: Trajectory, loss: LossConfig) -> float:
    """What the aggregation makes of a trajectory whose tokens weigh 1 each."""
    mask = trajectory.loss_mask
    return float(losses.token_weights(mask, loss.aggregation, loss.constant).max())


def _arrays(trajectory: Trajectory, loss: LossConfig) -> dict[str, np.ndarray]:
    arrays = {
        "tokens": trajectory.ids,
        "weights": losses.token_weights(
            trajectory.loss_mask, loss.aggregation, loss.constant
        ),
        "mask": trajectory.loss_mask,
        "logprobs": trajectory.logprobs,
    }
    given = trajectory.turn_credits is not None
    if loss.turn_credit == "environment":
        ones = np.ones(len(trajectory.ids), np.float32)
        arrays["turn_weights"] = trajectory.turn_weights if given else ones
        arrays["turn_credits"] = trajectory.turn_credits if given else 0 * ones
    elif given:
        raise ConfigError(
            f"trajectory {trajectory.key} has turn credit and loss.turn_credit is "
            f"{loss.turn_credit!r}, expected 'environment': nothing that an "
            "environment gives is left out silently. Set it, or give no credit."
        )
    if loss.distill != "none":
        arrays |= _teacher_arrays(trajectory)
    return arrays


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
    """A trajectory of which no token is trained.

    Args:
      tokens: How many.
      ids: int32[T], None for zeros.
      loss: Which arrays samples of it need.
      width: Ids of a teacher.
    """
    mask, zeros = np.zeros(tokens, bool), np.zeros(tokens, np.float32)
    scores = None
    if loss.distill != "none":
        columns = token_numbers.teacher_columns(loss, width)
        likeliest = np.zeros((tokens, columns), np.int32)
        named = token_numbers.teacher_kind(loss) == "top_k"
        rows = np.zeros((tokens, columns), np.float32)
        scores = TeacherScores(rows, likeliest if named else None, mask)
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

    Args:
      trajectory: With a reward.
      loss: Says what length costs.
      limit_tokens: Sampled tokens at which all of the penalty is taken off.
    """
    if not loss.length_penalty:
        return trajectory.reward
    return trajectory.reward - advantages.length_penalty(
        trajectory.action_tokens,
        loss.length_free_tokens,
        limit_tokens,
        loss.length_penalty,
    )


def _terms(loss: LossConfig, sample: Tree, found: Tree, others: Any) -> Surrogate:
    """The loss of a sample from numbers of its tokens.

    Args:
      loss: Which terms.
      sample: The sample.
      found: What `token_numbers.of` says of its tokens.
      others: float[T], log-probabilities of the reference, None without one.
    """
    logprobs, weights, mask = found["logprobs"], sample["weights"], sample["mask"]
    weighted, additive, metrics = None, [], {}
    share = weights
    if loss.importance_cap is not None:
        share = weights * losses.importance_weights(
            logprobs, sample["logprobs"], mask, loss.importance_cap
        )
    if loss.turn_credit == "environment":
        u, v = sample["turn_weights"], sample["turn_credits"]
        weighted, credit = losses.turn_credit(logprobs, share, u, v)
        additive.append(credit)
    elif loss.advantage != "none":
        weighted = losses.policy_gradient(logprobs, share)
    if loss.distill != "none":
        term = functools.partial(token_numbers.distilled, loss, sample, found)
        additive.append(loss.distill_coef * term(weights))
        metrics["teacher_kl"] = term(mask)
    if loss.kl_coef:
        kl = losses.kl_penalty(logprobs, others, weights, loss.kl_estimator)
        additive.append(loss.kl_coef * kl)
        metrics["kl"] = losses.kl_penalty(logprobs, others, mask, loss.kl_estimator)
    if loss.entropy_coef:
        bonus = losses.entropy_bonus(found["entropies"], weights)
        additive.append(loss.entropy_coef * bonus)
        metrics["entropy"] = -losses.entropy_bonus(found["entropies"], mask)
    return Surrogate(
        weighted,
        sum(additive) if additive else None,
        metrics,
        _mismatch(loss, logprobs, sample["logprobs"], mask),
    )


def _mismatch(loss, *given):
    found = losses.mismatch(*given, loss.importance_cap or losses.USUAL_CAP)
    found["max_abs_log_ratio"] = Max(found["max_abs_log_ratio"])
    return {f"mismatch_{name}": x for name, x in found.items()}
