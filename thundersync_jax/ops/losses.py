"""Per-token weights and the policy-gradient surrogate of one sample.

How tokens are weighed against each other is decided here, on the host; what the sum is
divided by at the end of a step (trajectories, tokens) belongs to whoever sums.
"""

import jax
import jax.numpy as jnp
import numpy as np


def token_weights(
    loss_mask: np.ndarray, aggregation: str, constant: float | None = None
) -> np.ndarray:
    """Weights w_t of one trajectory's tokens.

        sequence_mean: w_t = mask_t / sum(mask)     (divide by trajectories)
        token_mean:    w_t = mask_t                 (divide by kept tokens)
        constant:      w_t = mask_t / constant      (divide by trajectories)

    Args:
      loss_mask: bool[T], True exactly on sampled tokens.
      aggregation: One of the three names above.
      constant: Tokens; only for "constant".

    Returns:
      float32[T], exactly 0 outside the mask; all 0 where the mask is empty.

    Raises:
      ValueError: Unknown aggregation, or a constant that is missing or not positive.

    Source: GRPO (arXiv 2402.03300), DAPO (arXiv 2503.14476), Dr. GRPO (arXiv
      2503.20783), in this order.
    """
    mask_t = np.asarray(loss_mask, bool)
    if aggregation == "sequence_mean":
        scale = 1.0 / max(int(mask_t.sum()), 1)
    elif aggregation == "token_mean":
        scale = 1.0
    elif aggregation == "constant":
        if constant is None or not constant > 0:
            raise ValueError(
                f'aggregation "constant" got constant={constant}; it divides by a '
                "positive number of tokens, set loss.constant"
            )
        scale = 1.0 / constant
    else:
        raise ValueError(
            f"aggregation={aggregation!r} is unknown; choose sequence_mean, "
            "token_mean or constant"
        )
    return np.where(mask_t, np.float32(scale), np.float32(0.0))


def policy_gradient(logprob_t: jax.Array, weight_t: jax.Array) -> jax.Array:
    """Surrogate whose gradient is one sample's score gradient.

        weighted = - sum_t w_t log pi(a_t | h_t)

    Args:
      logprob_t: float[T], log-probabilities of the tokens under the parameters.
      weight_t: float[T], 0 at positions that are not trained; what stands there in
        `logprob_t`, NaN and infinities included, reaches neither value nor gradient.

    Returns:
      Scalar, to be multiplied by the advantage.
    """
    trained_t = weight_t != 0
    # Selected before the product: 0 * NaN is NaN, in the gradient too.
    safe_t = jnp.where(trained_t, logprob_t, jnp.zeros_like(logprob_t))
    return -jnp.sum(safe_t * weight_t.astype(logprob_t.dtype))
