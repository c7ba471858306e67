"""What a step optimises: the surrogate, its weights, the baseline and the divisor.

The settings of a config turned into the arguments of a `GradientStream`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from thundersync_jax import buckets
from thundersync_jax.config import LossConfig, ModelConfig
from thundersync_jax.models import transformer
from thundersync_jax.ops import advantages, losses
from thundersync_jax.surrogate import Surrogate
from thundersync_jax.types import Trajectory

Tree = Any


def policy_surrogate(
    model: ModelConfig, temperature: float
) -> Callable[[Tree, Tree], Surrogate]:
    """The policy-gradient surrogate of a model, at the sampling temperature.

    Its samples are {"tokens": int32[T], "weights": float32[T]}; a weight is 0 wherever
    nothing was sampled.
    """

    def surrogate(params, sample):
        logprobs = transformer.surrogate_logprobs(
            model, params, sample["tokens"], temperature
        )
        return Surrogate(weighted=losses.policy_gradient(logprobs, sample["weights"]))

    return surrogate


def estimator(loss: LossConfig) -> advantages.Estimator:
    """The group advantage that a config names."""
    if loss.advantage == "mean_std":
        return advantages.mean_std(loss.std_ddof, loss.std_eps)
    return {
        "mean_only": advantages.mean_only,
        "leave_one_out": advantages.leave_one_out,
    }[loss.advantage]()


def denominator(loss: LossConfig) -> str:
    """Z of an aggregation; README has the table."""
    return "tokens" if loss.aggregation == "token_mean" else "trajectories"


def sample(
    trajectory: Trajectory, loss: LossConfig, lengths: Sequence[int]
) -> buckets.Padded:
    """What the surrogate sees of a trajectory, padded to one of `lengths`."""
    weights = losses.token_weights(
        trajectory.loss_mask, loss.aggregation, loss.constant
    )
    return buckets.pad({"tokens": trajectory.ids, "weights": weights}, lengths)
