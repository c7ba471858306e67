"""Log-probabilities of given tokens, in chunks, so that no T x V array exists."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def tempered(logits: jax.Array, temperature: jax.Array | float) -> jax.Array:
    """Logits of the distribution that is sampled from.

        logits / temperature, and logits themselves at temperature 0 (greedy decoding)

    Trainer and sampler both scale here, so that they speak of the same distribution.

    Args:
      logits: float[..., V].
      temperature: Scalar, or an array of shape [..., 1].

    Returns:
      float[..., V], the dtype of `logits`.
    """
    temperature = jnp.asarray(temperature, logits.dtype)
    return logits / jnp.where(temperature > 0, temperature, jnp.ones_like(temperature))


def target_logprobs(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Log-probabilities of `targets`.

        logits[target] - logsumexp(logits)

    Args:
      logits: float[..., V], float32 or better.
      targets: int32[...].

    Returns:
      float[...], the dtype of `logits`.
    """
    # A comparison instead of a gather: it shards over V and its gradient is no scatter.
    index = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    chosen = index == jnp.expand_dims(targets, -1)
    target_logits = jnp.sum(jnp.where(chosen, logits, jnp.zeros_like(logits)), axis=-1)
    return target_logits - jax.nn.logsumexp(logits, axis=-1)


def chunked_target_logprobs(
    hidden_t: jax.Array,
    target_t: jax.Array,
    project: Callable[[jax.Array], jax.Array],
    temperature: jax.Array | float,
    chunk_tokens: int,
) -> jax.Array:
    """`target_logprobs(tempered(project(hidden)))` with one chunk of logits alive.

    Logits are recomputed chunk by chunk in the backward pass.

    Args:
      hidden_t: float[T, D].
      target_t: int32[T].
      project: float[C, D] -> float[C, V], float32 or better; differentiated through
        what it closes over.
      temperature: Scalar.
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
        return target_logprobs(tempered(project(hidden_c), temperature), target_c)

    # Chunk j holds tokens j, j + chunks, ...: a token axis that is sharded in
    # contiguous pieces stays where it is.
    hidden_cj = jnp.pad(hidden_t, ((0, pad), (0, 0))).reshape(length, chunks, width)
    target_cj = jnp.pad(target_t, (0, pad)).reshape(length, chunks)
    logprob_jc = jax.lax.map(one_chunk, (jnp.moveaxis(hidden_cj, 1, 0), target_cj.T))
    return logprob_jc.T.reshape(chunks * length)[:tokens]
