"""A sequence in pieces: what a piece leaves for the next, and numbers of its tokens.

A piece sees the keys and values of all pieces before it, so pieces one after another
compute what the whole sequence would. Numbers come from logits, a chunk at a time.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from thundersync_jax.config import ModelConfig
from thundersync_jax.models import layers, transformer
from thundersync_jax.models.transformer import KeyValues
from thundersync_jax.ops import logprobs

Tree = Any
# (logits float32[C, V], what belongs to these C tokens) -> numbers float[C], any tree
Function = Callable[[jax.Array, Tree], Tree]
TOKEN_AXIS = 1  # of the kept arrays [L, T, KV, H]


def empty(config: ModelConfig, slots: int) -> tuple[KeyValues, jax.Array]:
    """What is there before the first token, with room for so many.

    Returns:
      Keys and values [L, slots, KV, H] and the last hidden vector [D], which predicts
      nothing yet: zeros in the compute dtype.
    """
    dtype = transformer.compute_dtype(config)
    shape = config.layers, slots, config.kv_heads, config.head_dim
    kept = KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
    return kept, jnp.zeros(config.width, dtype)


def whole(
    config: ModelConfig,
    params: transformer.Params,
    tokens: jax.Array,
    operands: Tree,
    function: Function,
) -> Tree:
    """Numbers of every token of a whole sequence.

        entry t = function(logits that predict tokens[t], operands[t]),  entry 0 = 0

    Args:
      config: The model.
      params: As `transformer.init` returns them.
      tokens: int32[T]. What follows a position cannot change its entry, so padding
        belongs at the end.
      operands: Arrays [T, ...] that `function` sees beside the logits.
      function: Row by row.

    Returns:
      What `function` returns, [T].
    """
    hidden, _ = transformer.segment(config, params, tokens)
    # The last row runs for nothing: T may be sharded, and T - 1 would not divide.
    following = jax.tree.map(lambda x: jnp.roll(x, -1, axis=0), operands)
    found = _evaluated(config, params, hidden, following, function)
    return jax.tree.map(transformer.shifted, found)


def piece(
    config: ModelConfig,
    params: transformer.Params,
    kept: KeyValues,
    last: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    length: jax.Array,
    operands: Tree,
    function: Function,
) -> tuple[Tree, KeyValues, jax.Array]:
    """Numbers of every token of a piece, and what it leaves.

    Args:
      config: The model.
      params: As `transformer.init` returns them.
      kept: Keys and values of the pieces before; those from `start` on are not seen.
      last: float[D], the hidden vector behind the last token before.
      tokens: int32[T], at positions start .. start + T - 1; padding at the end.
      start: int32[], tokens before the piece.
      length: int32[], how many of its tokens are real.
      operands: Arrays [T, ...] that `function` sees beside the logits.
      function: Row by row.

    Returns:
      What `function` returns, [T]; where `start` is 0, entry 0 means nothing.
      The piece's own keys and values [L, T, KV, H], and the hidden vector [D] behind
      its last real token.
    """
    hidden, own = transformer.segment(config, params, tokens, kept, start)
    hidden = layers.constrain(hidden, "tokens", None)
    predicting = jnp.concatenate([last[None].astype(hidden.dtype), hidden[:-1]])
    found = _evaluated(config, params, predicting, operands, function)
    last = jax.lax.dynamic_index_in_dim(hidden, length - 1, keepdims=False)
    return found, own, last


def _evaluated(config, params, hidden, operands, function):
    project = transformer.projection(config, params)
    chunk = config.logprob_chunk_tokens
    return logprobs.chunked(function, hidden, operands, project, chunk)
