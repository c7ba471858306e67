"""The sampler's compiled programs: prefill segments, copy slots, decode turns.

Pure functions of parameters, cache and small host arrays. Which session sits in which
slot, and what a turn is, `in_process` knows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.ops.logprobs import draw

STOP_IDS = 8  # per request
SEED_INTEGERS = 8  # per request


class Rows(NamedTuple):
    """What a decode call needs to know of every slot, idle ones included."""

    token: np.ndarray  # int32[slots], known but not yet in the cache
    length: np.ndarray  # int32[slots], tokens in the cache
    remaining: np.ndarray  # int32[slots], tokens that may still be sampled; idle: 0
    temperature: np.ndarray  # float32[slots]
    stop_ids: np.ndarray  # int32[slots, STOP_IDS], padded with -1
    seed: np.ndarray  # uint32[slots, 1 + 2 * SEED_INTEGERS], count, then two words each


@functools.partial(jax.jit, static_argnums=0)
def decode_params(model, params):
    """`Model.decode_params`, compiled."""
    return model.decode_params(params)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(model, params, cache, ids, place, count):
    """Runs `count` segments, one after the other, and keeps their keys and values.

    `params` are as `decode_params` returns them, `cache` is donated. `place`
    int32[slots, 2] are slot and first position of each; what follows a segment's end in
    `ids` int32[slots, bucket] is never attended to.
    """
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)

    def run(i, cache):
        slot, positions = place[i, :1], place[i, 1:, None] + index[None]
        own, _ = model.decode(params, _take(cache, slot), ids[i, None], positions)
        return _put(cache, slot, positions, own)

    return jax.lax.fori_loop(0, count, run, cache)


@functools.partial(jax.jit, donate_argnums=0)
def copy(cache, pairs, count):
    """Copies `count` slots by `pairs` int32[slots, 2], source and target, in order."""

    def run(i, cache):
        source, target = pairs[i]
        return jax.tree.map(lambda x: x.at[target].set(x[source]), cache)

    return jax.lax.fori_loop(0, count, run, cache)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def decode(model, steps, block_rows, params, cache, rows):
    """Samples up to `steps` tokens in every slot with a turn, a block at a time.

    `block_rows` are computed together: a row's bits depend on this number, and on no
    other row. `params` are as `decode_params` returns them, `cache` is donated. Returns
    the cache, ids int32[slots, steps] and log-probabilities float32[slots, steps];
    entries after a turn's end are noise.
    """
    slots = rows.token.shape[0]
    if block_rows == slots:
        return _sample(model, steps, params, cache, rows)
    active = rows.remaining > 0
    # Turns first. Slots that do not exist fill the last block: read as the last one,
    # written nowhere.
    order = jnp.argsort(~active).astype(jnp.int32)
    order = jnp.append(order, slots + jnp.arange(-slots % block_rows, dtype=jnp.int32))
    blocks = (jnp.sum(active, dtype=jnp.int32) + block_rows - 1) // block_rows

    def run(i, carry):
        cache, *sampled = carry
        slot = jax.lax.dynamic_slice_in_dim(order, i * block_rows, block_rows)
        row = Rows(*(jnp.take(x, slot, axis=0, mode="clip") for x in rows))
        row = row._replace(remaining=jnp.where(slot < slots, row.remaining, 0))
        own, *new = _sample(model, steps, params, _take(cache, slot), row)
        positions = row.length[:, None] + jnp.arange(steps, dtype=jnp.int32)[None]
        sampled = [
            x.at[slot].set(y, mode="drop", unique_indices=True)
            for x, y in zip(sampled, new, strict=True)
        ]
        return _put(cache, slot, positions, own), *sampled

    sampled = (jnp.zeros((slots, steps), dtype) for dtype in (jnp.int32, jnp.float32))
    return jax.lax.fori_loop(0, blocks, run, (cache, *sampled))


def _sample(model, steps, params, cache, rows):
    """`decode` of rows that lie together; ends when no turn is left."""
    uniform_s = uniforms(rows.seed, rows.length + 1, steps)

    def step(carry):
        i, cache, token, length, remaining, ids, logprobs = carry
        cache, hidden = model.decode(params, cache, token[:, None], length[:, None])
        logits = model.decode_logits(params, hidden)
        drawn, logprob = jax.vmap(draw)(logits, uniform_s[i], rows.temperature)
        stopped = jnp.any(drawn[:, None] == rows.stop_ids, axis=1)
        # A row whose turn has ended repeats itself at the position that comes next,
        # which the next segment overwrites.
        active = remaining > 0
        token = jnp.where(active, drawn, token)
        length = length + active.astype(jnp.int32)
        remaining = jnp.where(active & ~stopped, remaining - 1, 0)
        ids = ids.at[:, i].set(drawn)
        logprobs = logprobs.at[:, i].set(logprob.astype(jnp.float32))
        return i + 1, cache, token, length, remaining, ids, logprobs

    def unfinished(carry):
        i, _, _, _, remaining, _, _ = carry
        return (i < steps) & jnp.any(remaining > 0)

    shape = rows.token.shape[0], steps
    sampled = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    carry = jnp.int32(0), cache, rows.token, rows.length, rows.remaining, *sampled
    _, cache, _, _, _, *sampled = jax.lax.while_loop(unfinished, step, carry)
    return cache, *sampled


def _take(cache, slot):
    """Copies what slots [R] hold side by side, once per call and not in every step."""

    def rows(x):
        return jnp.concatenate([jax.lax.dynamic_slice_in_dim(x, i, 1) for i in slot])

    return jax.tree.map(rows, cache)


def _put(cache, slot, positions, own):
    """Writes back what slots [R], side by side in `own`, have at positions [R, T]."""
    rows = jnp.arange(slot.shape[0])[:, None]

    def write(x, y):
        new = y.at[rows, :, positions].get(mode="clip")
        at = x.at[slot[:, None], :, positions]
        return at.set(new, mode="drop", unique_indices=True)

    return jax.tree.map(write, cache, own)


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
