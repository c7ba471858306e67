"""Log-probabilities of given tokens, in chunks, so that no T x V array exists.

Entropies come from the same logits: the projection to the vocabulary is most of the
work. A sampler draws from the same distribution with `draw`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Entries whose running sum is taken at a time: one pass over all V costs more than the
# rest of the draw, two short ones do not.
_BLOCK = 32


def inverse_temperature(temperature: jax.Array | float, dtype: jnp.dtype) -> jax.Array:
    """What trainer and sampler multiply logits by: 1 / temperature, and 1 at 0."""
    temperature = jnp.asarray(temperature, dtype)
    return 1 / jnp.where(temperature > 0, temperature, jnp.ones_like(temperature))


@jax.custom_vjp
def target_logprobs(
    logits: jax.Array, targets: jax.Array, temperature: jax.Array | float
) -> jax.Array:
    """Log-probabilities of `targets` at a temperature.

        x[target] - logsumexp(x),  x = logits / temperature

    The gradient, (onehot(target) - softmax(x)) / temperature, is written out: derived,
    it would hold two more arrays of the logits' size.

    Args:
      logits: float[..., V], float32 or better; the result, float[...], has its dtype.
      targets: int32[...].
      temperature: Scalar; not differentiated.
    """
    return _forward(logits, targets, temperature)[0]


@jax.custom_vjp
def logprobs_and_entropies(
    logits: jax.Array, targets: jax.Array, temperature: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of `targets`, and entropies over the whole vocabulary.

        log p[target],  H = - sum_v p[v] log p[v],  p = softmax(logits / temperature)

    The gradient is written out, as for `target_logprobs`; that of the entropy is
    -p (log p + H) / temperature.

    Args:
      logits: float[..., V], float32 or better. An entry of -inf has probability 0 and
        adds nothing to an entropy.
      targets: int32[...].
      temperature: Scalar; not differentiated.

    Returns:
      Two float[...], the dtype of `logits`; entropies in nats.
    """
    return _forward_both(logits, targets, temperature)[0]


def chunked(
    function: Callable[[jax.Array, Any], Any],
    hidden_t: jax.Array,
    operands_t: Any,
    project: Callable[[jax.Array], jax.Array],
    chunk_tokens: int,
) -> Any:
    """`function(project(hidden), operands)` with one chunk of logits alive.

    Logits are recomputed chunk by chunk in the backward pass.

    Args:
      function: (float[C, V], pytree of [C, ...]) -> pytree of float[C], position by
        position. It also sees rows of zeros, which fill the last chunk: it must be
        differentiable there, and what it makes of them is dropped.
      hidden_t: float[T, D].
      operands_t: Pytree of [T, ...], such as targets or a teacher's log-probabilities;
        not differentiated.
      project: float[C, D] -> float[C, V], float32 or better; differentiated through
        what it closes over.
      chunk_tokens: Largest number of tokens whose logits exist at a time.
    """
    tokens = len(hidden_t)
    chunks = -(-tokens // chunk_tokens)
    length = -(-tokens // chunks)
    pad = chunks * length - tokens

    def cut(x_t):
        padded_t = jnp.pad(x_t, ((0, pad), *[(0, 0)] * (x_t.ndim - 1)))
        # Chunk j holds tokens j, j + chunks, ...: a token axis that is sharded in
        # contiguous pieces stays where it is.
        return padded_t.reshape(length, chunks, *x_t.shape[1:])

    # Indexed where they are: an operand may be as large as all logits.
    operands_cj = jax.lax.stop_gradient(jax.tree.map(cut, operands_t))

    @jax.checkpoint
    def one_chunk(arguments):
        hidden_c, j = arguments
        operands_c = jax.tree.map(
            lambda x_cj: jax.lax.dynamic_index_in_dim(x_cj, j, 1, keepdims=False),
            operands_cj,
        )
        return function(project(hidden_c), operands_c)

    hidden_jc = jnp.moveaxis(cut(hidden_t), 1, 0)
    found_jc = jax.lax.map(one_chunk, (hidden_jc, jnp.arange(chunks)))
    return jax.tree.map(lambda x: x.T.reshape(chunks * length)[:tokens], found_jc)


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
    scaled = logits * inverse_temperature(temperature, logits.dtype)
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


def _forward(logits, targets, temperature):
    scale = inverse_temperature(temperature, logits.dtype)
    # Scaled inside each reduction: on its own, the product would be stored.
    highest = jnp.max(logits, axis=-1, keepdims=True) * scale
    mass = jnp.sum(jnp.exp(logits * scale - highest), axis=-1, keepdims=True)
    normalizer = highest + jnp.log(mass)
    chosen = jnp.take_along_axis(logits, jnp.expand_dims(targets, -1), axis=-1)
    logprobs = (chosen * scale - normalizer)[..., 0]
    return logprobs, (logits, targets, scale, normalizer)


def _backward(residuals, cotangent):
    logits, targets, scale, normalizer = residuals
    index = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    chosen = (index == jnp.expand_dims(targets, -1)).astype(logits.dtype)
    gradient = chosen - jnp.exp(logits * scale - normalizer)
    return jnp.expand_dims(cotangent * scale, -1) * gradient, None, None


target_logprobs.defvjp(_forward, _backward)


def _forward_both(logits, targets, temperature):
    logprobs, residuals = _forward(logits, targets, temperature)
    _, _, scale, normalizer = residuals
    surprise = _surprise(logits, scale, normalizer)
    # Every term of the sum is >= 0: nothing cancels.
    entropies = jnp.sum(jnp.exp(-surprise) * surprise, axis=-1)
    return (logprobs, entropies), (*residuals, entropies)


def _backward_both(residuals, cotangents):
    logits, targets, scale, normalizer, entropies = residuals
    of_logprob, of_entropy = (jnp.expand_dims(c * scale, -1) for c in cotangents)
    surprise = _surprise(logits, scale, normalizer)
    excess = surprise - jnp.expand_dims(entropies, -1)
    # The exponential is used once: used twice, it would be stored.
    gradient = jnp.exp(-surprise) * (of_entropy * excess - of_logprob)
    index = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    chosen = index == jnp.expand_dims(targets, -1)
    return jnp.where(chosen, gradient + of_logprob, gradient), None, None


def _surprise(logits, scale, normalizer):
    """-log p, cut where p is 0 in float64 too, as 0 times an infinity is NaN."""
    return jnp.minimum(normalizer - logits * scale, jnp.asarray(1000, logits.dtype))


logprobs_and_entropies.defvjp(_forward_both, _backward_both)


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
