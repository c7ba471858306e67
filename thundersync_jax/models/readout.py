"""The teacher's compiled program: run pieces of sessions, read scores off them.

Pure functions of parameters, cache and small host arrays. Which session sits in which
slot, and what a turn is, `scoring` knows.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.models import transformer
from thundersync_jax.ops import distill

Kind = Literal["sampled", "top_k", "full"]


class Readout(NamedTuple):
    """What is told of a distribution; static."""

    kind: Kind
    top_k: int
    width: int  # ids that count, from the first

    def of(self, logprobs: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        """From log-probabilities [C, width] what is told: those [C, K], and ids."""
        if self.kind == "top_k":
            return jax.lax.top_k(logprobs, self.top_k)
        ids = target[:, None]
        if self.kind == "sampled":
            logprobs = jnp.take_along_axis(logprobs, ids, axis=1)
        return logprobs, ids[:, :0]

    def empty(self, *shape: int) -> tuple[jax.Array, jax.Array]:
        """Zeros for so many positions of it."""
        entries = {"sampled": 1, "top_k": self.top_k, "full": self.width}[self.kind]
        ids = self.top_k if self.kind == "top_k" else 0
        return (
            jnp.zeros((*shape, entries), jnp.float32),
            jnp.zeros((*shape, ids), jnp.int32),
        )


class Rows(NamedTuple):
    """The turns of one call, or a piece of each; `count` rows are in use."""

    tokens: np.ndarray  # int32[R, bucket], padded
    source: np.ndarray  # int32[R, bucket], tokens whose successor is to be scored
    target: np.ndarray  # int32[R, bucket], these successors
    slot: np.ndarray  # int32[R]
    start: np.ndarray  # int32[R], position of the first token
    asked: np.ndarray  # int32[R], successors to be scored
    count: np.ndarray  # int32[]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def score(config, readout, params, cache, rows, temperature):
    """Runs pieces, one after the other; keeps their keys and values, and reads scores.

    Args:
      config: The model; static.
      readout: Static.
      params: In the compute dtype.
      cache: `transformer.KeyValues` [L, sessions, S, KV, H]; donated.
      rows: `Rows`.
      temperature: float32[].

    Returns:
      The cache, log-probabilities float32[R, bucket, K], and the ids of kind "top_k",
      int32[R, bucket, K]. Entries behind those that a row asks for are noise.
    """
    index = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)
    place = jnp.arange(cache.keys.shape[2])[:, None, None]

    def run(i, carry):
        cache, *scores = carry
        row = Rows(*(x[i] for x in rows[:-1]), rows.count)

        def own(x):
            # What another session left is masked where it is read; a NaN would pass.
            x = jax.lax.dynamic_index_in_dim(x, row.slot, 1, keepdims=False)
            return jnp.where((place < row.start)[None], x, jnp.zeros_like(x))

        past = jax.tree.map(own, cache)
        hidden, new = transformer.segment(config, params, row.tokens, past, row.start)
        # Padding lands where the next piece will, or behind the context and nowhere.
        positions = row.start + index
        cache = jax.tree.map(
            lambda x, y: x.at[:, row.slot, positions].set(
                y, mode="drop", unique_indices=True
            ),
            cache,
            new,
        )
        found = _read(config, readout, params, hidden, row, temperature)
        return cache, *(x.at[i].set(y) for x, y in zip(scores, found, strict=True))

    scores = readout.empty(*rows.tokens.shape)
    return jax.lax.fori_loop(0, rows.count, run, (cache, *scores))


def _read(config, readout, params, hidden, row, temperature):
    """Scores [bucket, K] of the successors that a row asks for, a chunk at a time.

    Most of a prompt is not asked for, and the vocabulary is most of the work.
    """
    bucket = row.source.shape[0]
    chunk = min(config.logprob_chunk_tokens, bucket)
    head = transformer.head_weights(params)
    normalise = functools.partial(
        distill.logprobs, width=readout.width, temperature=temperature
    )

    def run(i, found):
        # The last chunk reaches back where it would reach out: twice the same numbers.
        start = jnp.minimum(i * chunk, bucket - chunk)
        source, target = (
            jax.lax.dynamic_slice_in_dim(x, start, chunk)
            for x in (row.source, row.target)
        )
        logits = transformer.logits(config, head, hidden[source])
        told = readout.of(jax.vmap(normalise)(logits), target)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), start, 0)
            for x, y in zip(found, told, strict=True)
        )

    chunks = (row.asked + chunk - 1) // chunk
    return jax.lax.fori_loop(0, chunks, run, readout.empty(bucket))
