"""How far a sampler's probabilities are from the learner's, on the sampled tokens.

Sums over tokens, which add up over trajectories; means and percentiles are taken from
the sums, on the host.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

# |log-ratio| whose tokens are counted: four to a decade, so that a percentile read off
# them is within a factor of 1.8, and nearer where they are dense.
EDGES = tuple(float(edge) for edge in 10.0 ** np.arange(-8, 1.01, 0.25))
USUAL_CAP = 2.0  # of truncated importance weights, where a loss has none of its own


def log_ratio(
    logprob_t: jax.Array, sampler_logprob_t: jax.Array, trained_t: jax.Array
) -> jax.Array:
    """Learner over sampler, detached; 0 at positions that are not trained.

        d_t = log pi_learner(a_t | h_t) - log pi_sampler(a_t | h_t)

    Args:
      logprob_t: float[T], of the learner.
      sampler_logprob_t: float[T], as recorded when the tokens were drawn.
      trained_t: bool[T], True on sampled tokens.
    """
    d_t = logprob_t - sampler_logprob_t.astype(logprob_t.dtype)
    return select(trained_t, jax.lax.stop_gradient(d_t))


def select(trained_t: jax.Array, x_t: jax.Array) -> jax.Array:
    """`x_t` at trained positions, 0 elsewhere, before any product: 0 * NaN is NaN."""
    return jnp.where(trained_t, x_t, jnp.zeros_like(x_t))


def mismatch(
    logprob_t: jax.Array,
    sampler_logprob_t: jax.Array,
    trained_t: jax.Array,
    cap: float = USUAL_CAP,
) -> dict[str, jax.Array]:
    """Sums over the tokens of a sample.

    Args:
      logprob_t, sampler_logprob_t, trained_t: As for `log_ratio`.
      cap: Of truncated importance weights, > 0.

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
    """The |log-ratio| below which so many percent of the tokens lie.

    Args:
      sums: As `mismatch` returns them, summed over samples.
      percent: Between 0 and 100.

    Returns:
      Nats: interpolated on a logarithmic scale between two `EDGES`, never above the
      largest |log-ratio|; 0 where that many lie below the first edge; NaN without
      tokens.
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


def _above(edge: int) -> str:
    return f"above_{edge:02d}"
