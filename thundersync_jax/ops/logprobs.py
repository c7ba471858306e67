"""Log-probabilities of given tokens, in chunks, so that no T x V array exists."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def inverse_temperature(temperature: jax.Array | float, dtype: jnp.dtype) -> jax.Array:
    """What logits are multiplied by: 1 / temperature, and 1 at 0 (greedy decoding).

    Trainer and sampler both scale by it, so that they speak of one distribution.
    """
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
      logits: float[..., V], float32 or better.
      targets: int32[...].
      temperature: Scalar; not differentiated.

    Returns:
      float[...], the dtype of `logits`.
    """
    return _forward(logits, targets, temperature)[0]


def chunked_target_logprobs(
    hidden_t: jax.Array,
    target_t: jax.Array,
    project: Callable[[jax.Array], jax.Array],
    temperature: jax.Array | float,
    chunk_tokens: int,
) -> jax.Array:
    """`target_logprobs(project(hidden), ...)` with one chunk of logits alive.

    Logits are recomputed chunk by chunk in the backward pass.

    Args:
      hidden_t: float[T, D].
      target_t: int32[T].
      project: float[C, D] -> float[C, V], float32 or better; differentiated through
        what it closes over.
      temperature: Scalar; not differentiated.
      chunk_tokens: Largest number of tokens whose logits exist at a time.

    Returns:
      float[T], the dtype that `project` returns.
    """
    tokens, width = hidden_t.shape
    chunks = -(-tokens // chunk_tokens)
    length = -(-tokens // chunks)
    pad = chunks * length - tokens

    @jax.checkpoint
    def one_chunk(operands):
        hidden_c, target_c = operands
        return target_logprobs(project(hidden_c), target_c, temperature)

    # Chunk j holds tokens j, j + chunks, ...: a token axis that is sharded in
    # contiguous pieces stays where it is.
    hidden_cj = jnp.pad(hidden_t, ((0, pad), (0, 0))).reshape(length, chunks, width)
    target_cj = jnp.pad(target_t, (0, pad)).reshape(length, chunks)
    logprob_jc = jax.lax.map(one_chunk, (jnp.moveaxis(hidden_cj, 1, 0), target_cj.T))
    return logprob_jc.T.reshape(chunks * length)[:tokens]


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
