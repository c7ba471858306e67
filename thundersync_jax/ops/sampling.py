"""Drawing one token, from one uniform number."""

import jax
import jax.numpy as jnp

from . import logprobs

# Entries whose running sum is taken at a time: one pass over all V costs more than the
# rest of the draw, two short ones do not.
_BLOCK = 32


def draw(
    logits: jax.Array, uniform: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws from softmax(logits / temperature) by inverting its distribution function.

        token = min { v : sum_{w <= v} p_w > uniform }

    Args:
      logits: float[V], float32 or better.
      uniform: float[] in [0, 1).
      temperature: float[]; 0 takes the largest logit.

    Returns:
      token: int32[]; never one whose probability underflows to 0.
      logprob: float[], at `temperature`, or at 1 where that is 0.
    """
    scaled = logits * logprobs.inverse_temperature(temperature, logits.dtype)
    highest = jnp.max(scaled)
    # The first of the largest. XLA's argmax is not vectorised on CPU.
    index = jnp.arange(logits.shape[0], dtype=jnp.int32)
    greedy = jnp.min(jnp.where(scaled == highest, index, logits.shape[0] - 1))
    mass = jnp.exp(scaled - highest)
    total, drawn = _invert(mass, uniform.astype(mass.dtype))
    # Running sums round, so that an inversion may step one entry aside.
    usable = (temperature > 0) & (mass[drawn] > 0)
    token = jnp.where(usable, drawn, greedy)
    return token, scaled[token] - highest - jnp.log(total)


def _invert(mass, uniform):
    """Sum of `mass` [V], and the first index whose running sum exceeds its share."""
    vocab = mass.shape[0]
    blocks = -(-vocab // _BLOCK)
    mass = jnp.pad(mass, (0, blocks * _BLOCK - vocab)).reshape(blocks, _BLOCK)
    before = jnp.cumsum(jnp.sum(mass, axis=1))
    rest = uniform * before[-1]
    block = jnp.minimum(jnp.sum(before <= rest, dtype=jnp.int32), blocks - 1)
    rest = rest - jnp.where(block > 0, before[jnp.maximum(block - 1, 0)], 0)
    within = jnp.sum(jnp.cumsum(mass[block]) <= rest, dtype=jnp.int32)
    return before[-1], jnp.minimum(block * _BLOCK + within, vocab - 1)
