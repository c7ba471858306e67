"""The terms of one sample's loss, the weights of its tokens, and how far they are off.

Every term takes the tokens' contexts as given: their own dependence on the parameters
is not differentiated. What stands at positions of weight 0, NaN and infinities
included, reaches neither value nor gradient.
"""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

# |log-ratio| whose tokens are counted: four to a decade, so that a percentile read off
# them is within a factor of 1.8, and nearer where they are dense.
EDGES = tuple(float(edge) for edge in 10.0 ** np.arange(-8, 1.01, 0.25))
USUAL_CAP = 2.0  # of truncated importance weights, where a loss has none of its own


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
    """Scalar, to be multiplied by the advantage, with the score gradient of a sample.

        weighted = - sum_t w_t log pi(a_t | h_t)

    Args:
      logprob_t: float[T], log-probabilities of the tokens under the parameters.
      weight_t: float[T], 0 at positions that are not trained. Constants: a factor such
        as an advantage or an importance weight is detached before it comes here.
    """
    return -weighted_sum(logprob_t, weight_t)


def turn_credit(
    logprob_t: jax.Array, weight_t: jax.Array, u_t: jax.Array, v_t: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Both parts, two scalars, of a surrogate whose tokens carry credit A * u_t + v_t.

        weighted = - sum_t w_t u_t log pi(a_t | h_t)
        additive = - sum_t w_t v_t log pi(a_t | h_t)

    The advantage A comes from a group and stays one number per trajectory; u and v are
    the trajectory's own, such as one pair for each turn: nothing waits for them.

    Args:
      logprob_t: float[T], log-probabilities of the tokens under the parameters.
      weight_t: float[T], 0 at positions that are not trained.
      u_t: float[T], what a token's share of the advantage is multiplied by; detached.
      v_t: float[T], credit in units of the advantage; detached.

    Source: TRACE (arXiv 2607.13988) has credit of this form. How u and v are found is
      not the business of this function.
    """
    shares = (_credited(weight_t, u_t), _credited(weight_t, v_t))
    return tuple(policy_gradient(logprob_t, share_t) for share_t in shares)


def kl_penalty(
    logprob_t: jax.Array,
    reference_t: jax.Array,
    weight_t: jax.Array,
    estimator: Literal["k1", "k2", "k3"],
) -> jax.Array:
    """Reverse KL, a scalar, from policy to reference, on tokens that were sampled.

        sum_t w_t k(log pi(a_t | h_t) - log q(a_t | h_t))
        k1(d) = d,  k2(d) = d^2 / 2,  k3(d) = exp(-d) - 1 + d

    The value is that of the estimator. The gradient is, whichever it is,

        sum_t w_t (log pi - log q) grad log pi(a_t | h_t)

    and in expectation over the tokens that of the exact KL(pi(. | h_t) || q(. | h_t)),
    contexts held fixed.

    Args:
      logprob_t: float[T], log pi.
      reference_t: float[T], log q, at the same temperature; detached.
      weight_t: float[T], 0 at positions that are not trained.
      estimator: Of the value. k1 and k3 have the KL as their expectation; k3 is never
        negative, and unbounded where q is far above pi.

    Raises:
      ValueError: Unknown estimator.

    Source: Schulman 2020, "Approximating KL divergence", for the values.
    Differs: the values are not differentiated. The gradient of k1 has expectation 0,
      that of k3 is of the forward KL(q || pi); k2's own is the one used here.
    """
    reference_t = jax.lax.stop_gradient(reference_t).astype(logprob_t.dtype)
    d_t = select(weight_t != 0, logprob_t - reference_t)
    half_square_t = 0.5 * d_t**2
    values = {
        "k1": lambda: d_t,
        "k2": lambda: half_square_t,
        "k3": lambda: jnp.expm1(-d_t) + d_t,
    }
    if estimator not in values:
        raise ValueError(
            f"estimator={estimator!r} is unknown; choose {', '.join(values)}"
        )
    value_t = jax.lax.stop_gradient(values[estimator]())
    # Zero in value, the wanted gradient in derivative.
    slope_t = half_square_t - jax.lax.stop_gradient(half_square_t)
    return weighted_sum(value_t + slope_t, weight_t)


def entropy_bonus(entropy_t: jax.Array, weight_t: jax.Array) -> jax.Array:
    """Minus the entropy, a scalar, so that minimising raises it.

        - sum_t w_t H(pi(. | h_t))

    Args:
      entropy_t: float[T], of the distribution that each token was drawn from.
      weight_t: float[T], 0 at positions that are not trained.

    Source: Williams and Peng 1991, "Function optimization using connectionist
      reinforcement learning algorithms".
    """
    return -weighted_sum(entropy_t, weight_t)


def importance_weights(
    logprob_t: jax.Array, sampler_logprob_t: jax.Array, trained_t: jax.Array, cap: float
) -> jax.Array:
    """Truncated importance weights for a sampler that is not quite the trained policy.

        rho_t = min(pi_learner(a_t | h_t) / pi_sampler(a_t | h_t), cap),  detached

    Args:
      logprob_t: float[T], of the learner.
      sampler_logprob_t: float[T], as recorded when the tokens were drawn.
      trained_t: bool[T], True on sampled tokens.
      cap: Largest weight, > 0.

    Returns:
      float[T], the dtype of `logprob_t`, to multiply the tokens' weights; 0 at
      positions that are not trained.

    Source: Ionides 2008, "Truncated importance sampling", token by token.
    Differs: a product over the tokens of a trajectory would be unbiased without a cap;
      one weight per token leaves the contexts' mismatch as it is.
    """
    d_t = log_ratio(logprob_t, sampler_logprob_t, trained_t)
    return select(trained_t, jnp.minimum(jnp.exp(d_t), cap))


def log_ratio(
    logprob_t: jax.Array, sampler_logprob_t: jax.Array, trained_t: jax.Array
) -> jax.Array:
    """Learner over sampler, float[T], detached; 0 at positions that are not trained.

        d_t = log pi_learner(a_t | h_t) - log pi_sampler(a_t | h_t)

    The arguments are those of `importance_weights`.
    """
    d_t = logprob_t - sampler_logprob_t.astype(logprob_t.dtype)
    return select(trained_t, jax.lax.stop_gradient(d_t))


def select(counts_t: jax.Array, x_t: jax.Array) -> jax.Array:
    """`x_t`, float[T, ...], where `counts_t`, bool[T], is True, and 0 elsewhere.

    It comes before any product or divergence: selected behind it, whatever stands there
    would still reach the gradient, as a cotangent of 0 times NaN.
    """
    counts_t = counts_t.reshape(counts_t.shape + (1,) * (x_t.ndim - counts_t.ndim))
    return jnp.where(counts_t, x_t, jnp.zeros_like(x_t))


def weighted_sum(x_t: jax.Array, weight_t: jax.Array) -> jax.Array:
    """Sum over a sample's tokens, sum_t w_t x_t, in the dtype of x_t, float[T]."""
    return jnp.sum(select(weight_t != 0, x_t) * weight_t.astype(x_t.dtype))


def mismatch(
    logprob_t: jax.Array,
    sampler_logprob_t: jax.Array,
    trained_t: jax.Array,
    cap: float = USUAL_CAP,
) -> dict[str, jax.Array]:
    """How far a sampler is off the learner, in sums over the tokens of a sample.

    The arguments are those of `importance_weights`.

    Returns:
      Scalars in the dtype of `logprob_t`, without gradient: `abs_log_ratio`, the sum
      of |d_t|; `max_abs_log_ratio`; `kl`, the sum of exp(d_t) - 1 - d_t, whose mean
      over tokens estimates KL(sampler || learner); `truncated`, how many tokens have
      exp(d_t) > cap; `above_00` and on, how many have |d_t| > `EDGES[0]` and on; and
      `tokens`, to divide by.
    """
    d_t = log_ratio(logprob_t, sampler_logprob_t, trained_t)
    size_t = jnp.abs(d_t)
    above = jnp.sum(size_t[:, None] > jnp.asarray(EDGES, d_t.dtype)[None], axis=0)
    counts = {_above(i): count for i, count in enumerate(above.astype(d_t.dtype))}
    return counts | {
        "abs_log_ratio": jnp.sum(size_t),
        "max_abs_log_ratio": jnp.max(size_t, initial=0.0),
        "kl": jnp.sum(jnp.expm1(d_t) - d_t),
        "truncated": jnp.sum(d_t > np.log(cap), dtype=d_t.dtype),
        "tokens": jnp.sum(trained_t, dtype=d_t.dtype),
    }


def percentile(sums: Mapping[str, float], percent: float) -> float:
    """The |log-ratio| in nats below which `percent` of the tokens lie.

    `sums` are the scalars of `mismatch`, summed over samples. It is interpolated on a
    logarithmic scale between two `EDGES`, never above the largest |log-ratio|; 0 where
    that many lie below the first edge; NaN without tokens.
    """
    if not sums["tokens"]:
        return float("nan")
    left = (1 - percent / 100) * sums["tokens"]
    counts = np.array([sums[_above(i)] for i in range(len(EDGES))])
    largest = sums["max_abs_log_ratio"]
    last = int(np.sum(counts > left)) - 1  # the last edge with more tokens above it
    if last < 0:
        return 0.0
    low, above = EDGES[last], counts[last]
    if last + 1 == len(EDGES):
        return float(largest)
    high, beyond = EDGES[last + 1], counts[last + 1]
    share = (above - left) / (above - beyond)
    return float(min(low * (high / low) ** share, largest))


def _credited(weight_t, credit_t):
    credit_t = select(weight_t != 0, jax.lax.stop_gradient(credit_t))
    return weight_t * credit_t.astype(weight_t.dtype)


def _above(edge: int) -> str:
    return f"above_{edge:02d}"
