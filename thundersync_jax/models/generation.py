"""The sampler's compiled programs: prefill segments, decode all slots.

Pure functions of parameters, cache and small host arrays. Which session sits in which
slot, and what a turn is, `decode` knows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.models import layers, transformer
from thundersync_jax.ops import sampling

STOP_IDS = 8  # per request
SEED_INTEGERS = 8  # per request


class LayerCache(NamedTuple):
    """Keys and values of one layer. A head's positions lie together, for its dots.

    One array per layer: taking a layer out of a stacked cache would copy it.
    """

    keys: jax.Array  # [slots, KV, S, H], compute dtype
    values: jax.Array  # [slots, KV, S, H], compute dtype


class Rows(NamedTuple):
    """What a decode call needs to know of every slot; rows without a turn are 0."""

    token: np.ndarray  # int32[slots], known but not yet in the cache
    length: np.ndarray  # int32[slots], tokens in the cache
    remaining: np.ndarray  # int32[slots], tokens that may still be sampled
    temperature: np.ndarray  # float32[slots]
    stop_ids: np.ndarray  # int32[slots, STOP_IDS], padded with -1
    seed: np.ndarray  # uint32[slots, 1 + 2 * SEED_INTEGERS], count, then two words each


@functools.partial(jax.jit, static_argnums=0)
def unstack(config, params):
    """Parameters in the compute dtype, the layers' as a list: no slices in the loop."""
    params = transformer.cast(config, params)
    each = [{} for _ in range(config.layers)]
    for name, stacked in params["layers"].items():
        for weights, x in zip(each, stacked, strict=True):
            weights[name] = x
    return params | {"layers": each}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(config, params, cache, ids, place, count):
    """Runs `count` segments, one after the other, and keeps their keys and values.

    Args:
      config: The model; static.
      params: In the compute dtype.
      cache: Donated.
      ids: int32[slots, bucket]; what follows a segment's end is never attended to.
      place: int32[slots, 2], slot and first position of each segment.
      count: int32[], segments in use.
    """
    pieces, tokens = ids.shape
    _, kv_heads, context, head_dim = cache[0].keys.shape
    zeros = jnp.zeros((pieces, tokens, kv_heads, head_dim), cache[0].keys.dtype)

    def compute(i, own):
        positions, visible = transformer.visibility(tokens, context, place[i, 1])
        x = jnp.take(params["embed"], ids[i], axis=0)
        kept = []
        for weights, old, out in zip(params["layers"], cache, own, strict=True):
            slot = (jnp.swapaxes(y[place[i, 0]], 0, 1) for y in old)
            past = transformer.KeyValues(*slot)
            x, new = transformer.layer(config, weights, x, past, positions, visible)
            kept.append(jax.tree.map(lambda y, z: y.at[i].set(z), out, new))
        return kept

    def write(i, cache):
        positions = place[i, 1] + jnp.arange(tokens, dtype=jnp.int32)
        return tuple(
            _write(old, place[i, 0], positions, [y[i] for y in new])
            for old, new in zip(cache, own, strict=True)
        )

    # Two loops: one that read and wrote the cache would copy it in every round.
    own = [transformer.KeyValues(zeros, zeros) for _ in cache]
    own = jax.lax.fori_loop(0, count, compute, own)
    return jax.lax.fori_loop(0, count, write, cache)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def decode(config, steps, params, cache, rows):
    """Samples `steps` tokens in every slot.

    Args:
      config: The model; static.
      steps: Static.
      params: In the compute dtype.
      cache: Donated.
      rows: One row per slot.

    Returns:
      The cache, ids int32[slots, steps] and log-probabilities float32[slots, steps].
      Entries after a turn's end are noise.
    """
    uniform_s = uniforms(rows.seed, rows.length + 1, steps)

    def step(carry, uniform):
        cache, token, length, remaining = carry
        cache, logits = _next_logits(config, params, cache, token, length)
        drawn, logprob = jax.vmap(sampling.draw)(logits, uniform, rows.temperature)
        stopped = jnp.any(drawn[:, None] == rows.stop_ids, axis=1)
        # A row whose turn has ended repeats itself at the position that comes next,
        # which the next segment overwrites.
        active = remaining > 0
        token = jnp.where(active, drawn, token)
        length = length + active.astype(jnp.int32)
        remaining = jnp.where(active & ~stopped, remaining - 1, 0)
        return (cache, token, length, remaining), (drawn, logprob)

    carry = cache, rows.token, rows.length, rows.remaining
    (cache, *_), (ids, logprobs) = jax.lax.scan(step, carry, uniform_s)
    return cache, ids.T, logprobs.T.astype(jnp.float32)


def _next_logits(config, params, cache, token, length):
    """One token of every slot through the decoder: cache and logits [slots, V]."""
    slots = jnp.arange(token.shape[0])
    visible = jnp.arange(cache[0].keys.shape[2])[None] <= length[:, None]
    attend = jax.vmap(layers.attention, in_axes=(0, 0, 0, 0, None))
    x = jnp.take(params["embed"], token, axis=0)
    kept = []
    for weights, old in zip(params["layers"], cache, strict=True):
        query, *new = transformer.attention_inputs(config, weights, x, length)
        keys, values = written = _write(old, slots, length, new)
        mixed = attend(
            query[:, None], keys, values, visible[:, None], config.matmul_precision
        )
        x = transformer.add_layer_outputs(config, weights, x, mixed[:, 0])
        kept.append(written)
    hidden = layers.rms_norm(x, params["final_norm"], config.norm_eps)
    head = transformer.head_weights(params)
    return tuple(kept), transformer.logits(config, head, hidden)


def _write(cache, slot, position, new):
    """Puts keys and values [N, KV, H] at (slot, position); none beyond the context."""
    return LayerCache(
        *(
            old.at[slot, :, position].set(part, mode="drop", unique_indices=True)
            for old, part in zip(cache, new, strict=True)
        )
    )


def _fold(key, word):
    return jax.random.fold_in(key, word), None


def uniforms(seed, position, steps):
    """float32[steps, slots] in [0, 1), from each row's seed and positions alone."""

    def base_key(words):
        # Named, because other generators' bits depend on the rows beside them.
        start = jax.random.key(0, impl="threefry2x32")
        return jax.lax.scan(_fold, start, words)[0]

    def one(key, position):
        return jax.random.uniform(jax.random.fold_in(key, position))

    positions = position[None] + jnp.arange(steps, dtype=jnp.int32)[:, None]
    keys = jax.vmap(base_key)(seed)
    return jax.vmap(jax.vmap(one), in_axes=(None, 0))(keys, positions)
