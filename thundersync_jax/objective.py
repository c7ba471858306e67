"""What a step optimises: the surrogate, its weights, the baseline and the divisor.

The settings of a config turned into the arguments of a `GradientStream`.

    loss = (1 / Z) sum_i [ A_i weighted_i + additive_i ]

    weighted = - sum_t w_t rho_t u_t log pi(a_t | h_t)
    additive = - sum_t w_t rho_t v_t log pi(a_t | h_t)
               + kl_coef * sum_t w_t KL_t - entropy_coef * sum_t w_t H_t

w_t and Z come from the aggregation, rho_t from `loss.importance_cap` (else 1), u_t and
v_t from `loss.turn_credit` (else 1 and 0). A term that is not configured is not there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thundersync_jax import buckets
from thundersync_jax.config import LossConfig, ModelConfig
from thundersync_jax.errors import ConfigError
from thundersync_jax.models import transformer
from thundersync_jax.ops import advantages, losses, rewards
from thundersync_jax.ops.baselines import PromptBaseline
from thundersync_jax.surrogate import Max, Surrogate
from thundersync_jax.types import Trajectory

Tree = Any


def policy_surrogate(
    model: ModelConfig, temperature: float, loss: LossConfig
) -> Callable[..., Surrogate]:
    """The policy-gradient surrogate of a model, at the sampling temperature.

    It is a function of (params, sample), or with a KL penalty of (params, reference,
    sample) where the reference is another policy's parameters. Samples are what
    `sample` makes of trajectories.

    Metrics are "kl" and "entropy" where their terms are, sums over trained tokens (not
    weighted: divide by their number). Diagnostics are those of `losses.mismatch`, under
    names that begin with "mismatch_".
    """

    def surrogate(params, sample, reference=None):
        policy = model, params, sample["tokens"], temperature
        if loss.entropy_coef:
            logprobs, entropies = transformer.surrogate_logprobs_and_entropies(*policy)
        else:
            logprobs = transformer.surrogate_logprobs(*policy)
        weights = share = sample["weights"]
        mask = sample["mask"]
        if loss.importance_cap is not None:
            share = weights * losses.importance_weights(
                logprobs, sample["logprobs"], mask, loss.importance_cap
            )
        additive, metrics = [], {}
        if loss.turn_credit == "environment":
            u, v = sample["turn_weights"], sample["turn_credits"]
            weighted, credit = losses.turn_credit(logprobs, share, u, v)
            additive.append(credit)
        else:
            weighted = losses.policy_gradient(logprobs, share)
        if loss.kl_coef:
            other = model, reference, sample["tokens"], temperature
            both = logprobs, transformer.surrogate_logprobs(*other)
            kl = losses.kl_penalty(*both, weights, loss.kl_estimator)
            additive.append(loss.kl_coef * kl)
            metrics["kl"] = losses.kl_penalty(*both, mask, loss.kl_estimator)
        if loss.entropy_coef:
            bonus = losses.entropy_bonus(entropies, weights)
            additive.append(loss.entropy_coef * bonus)
            metrics["entropy"] = -losses.entropy_bonus(entropies, mask)
        return Surrogate(
            weighted,
            sum(additive) if additive else None,
            metrics,
            _mismatch(logprobs, sample["logprobs"], mask),
        )

    if loss.kl_coef:
        return lambda params, reference, sample: surrogate(params, sample, reference)
    return surrogate


def estimator(loss: LossConfig) -> advantages.Estimator:
    """The advantage that a config names.

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
) -> buckets.Padded:
    """What the surrogate sees of a trajectory, padded to one of `lengths`.

    Returns:
      "tokens" int32[T], "weights" float32[T], "mask" bool[T], "logprobs" float32[T] of
      the sampler and, under turn credit, "turn_weights" and "turn_credits" float32[T].

    Raises:
      ConfigError: The environment gave turn credit and the loss does not use it.
    """
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
    return buckets.pad(arrays, lengths)


def empty_sample(length: int, loss: LossConfig) -> buckets.Padded:
    """A sample of `length` tokens of which none is trained."""
    dtypes = {"tokens": np.int32, "mask": bool}
    names = ["tokens", "weights", "mask", "logprobs"]
    if loss.turn_credit == "environment":
        names += ["turn_weights", "turn_credits"]
    arrays = {name: np.zeros(1, dtypes.get(name, np.float32)) for name in names}
    return buckets.pad(arrays, (length,))


def shaped_reward(trajectory: Trajectory, loss: LossConfig, limit_tokens: int) -> float:
    """A trajectory's reward less its length penalty (`rewards.length_penalty`).

    Args:
      trajectory: With a reward.
      loss: Says what length costs.
      limit_tokens: Sampled tokens at which all of the penalty is taken off.
    """
    if not loss.length_penalty:
        return trajectory.reward
    return trajectory.reward - rewards.length_penalty(
        trajectory.action_tokens,
        loss.length_free_tokens,
        limit_tokens,
        loss.length_penalty,
    )


def _mismatch(logprobs, sampler_logprobs, mask):
    found = losses.mismatch(logprobs, sampler_logprobs, mask)
    found["max_abs_log_ratio"] = Max(found["max_abs_log_ratio"])
    return {f"mismatch_{name}": x for name, x in found.items()}
