"""A frozen model that scores tokens, with the keys and values of every session.

Every token of a session is run once. A score depends on its session's tokens, how they
came in turns, and the parameters, bit for bit: turns of one call are computed one after
the other, in pieces that their own length chooses, each behind its session's own keys.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.engines.base import Scored, ScoreRequest
from thundersync_jax.engines.sessions import Session, SlotEngine
from thundersync_jax.errors import ConfigError
from thundersync_jax.models.base import Model, Params
from thundersync_jax.ops import distill

Kind = Literal["sampled", "top_k", "full"]


class Readout(NamedTuple):
    """Which numbers of a distribution are the score; static."""

    kind: Kind
    top_k: int
    width: int  # ids that count, from the first

    def of(self, logprobs: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities [C, width] to the score's [C, K], and likeliest ids."""
        if self.kind == "top_k":
            return jax.lax.top_k(logprobs, self.top_k)
        ids = target[:, None]
        if self.kind == "sampled":
            logprobs = jnp.take_along_axis(logprobs, ids, axis=1)
        return logprobs, ids[:, :0]

    def empty(self, *shape: int) -> tuple[jax.Array, jax.Array]:
        """Zeros for positions of this shape: log-probabilities and ids."""
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
    entries: np.ndarray  # int32[R], successors to be scored
    count: np.ndarray  # int32[]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def score(model, readout, params, cache, rows, temperature):
    """Runs pieces, one after the other; keeps their keys and values, and reads scores.

    `params` are as `Model.cast` returns them. `cache`, donated, is `Kept` of every
    session, which lie before the axis of the tokens. Logits are divided by
    `temperature`, float32[]. Returns the cache, log-probabilities float32[R, bucket, K]
    and ids int32[R, bucket, K] of kind "top_k"; entries that no row asks for are noise.
    """
    index = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)
    axis = model.token_axis
    every = (slice(None),) * axis  # index of what lies before

    def run(i, carry):
        cache, *scores = carry
        row = Rows(*(x[i] for x in rows[:-1]), rows.count)

        def own(x):
            # What another session left is masked where it is read; a NaN would pass.
            x = jax.lax.dynamic_index_in_dim(x, row.slot, axis, keepdims=False)
            place = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
            return jnp.where(place < row.start, x, jnp.zeros_like(x))

        past = jax.tree.map(own, cache)
        hidden, new = model.segment(params, row.tokens, past, row.start)
        # Padding lands where the next piece will, or behind the context and nowhere.
        positions = row.start + index
        cache = jax.tree.map(
            lambda x, y: x.at[*every, row.slot, positions].set(
                y, mode="drop", unique_indices=True
            ),
            cache,
            new,
        )
        read = _read(model, readout, params, hidden, row, temperature)
        return cache, *(x.at[i].set(y) for x, y in zip(scores, read, strict=True))

    scores = readout.empty(*rows.tokens.shape)
    return jax.lax.fori_loop(0, rows.count, run, (cache, *scores))


def _read(model, readout, params, hidden, row, temperature):
    """Scores [bucket, K] of the successors that a row asks for, a chunk at a time."""
    bucket = row.source.shape[0]
    chunk = min(model.chunk_tokens, bucket)
    project = model.projection(params)
    normalise = functools.partial(
        distill.logprobs, width=readout.width, temperature=temperature
    )

    def run(i, scores):
        # The last chunk reaches back where it would reach out: twice the same numbers.
        start = jnp.minimum(i * chunk, bucket - chunk)
        source, target = (
            jax.lax.dynamic_slice_in_dim(x, start, chunk)
            for x in (row.source, row.target)
        )
        logprobs = jax.vmap(normalise)(project(hidden[source]))
        read = readout.of(logprobs, target)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(x, y.astype(x.dtype), start, 0)
            for x, y in zip(scores, read, strict=True)
        )

    chunks = (row.entries + chunk - 1) // chunk
    return jax.lax.fori_loop(0, chunks, run, readout.empty(bucket))


# Turns of one call. More save little, for they are computed one by one, and the first
# answer of a call waits for its last turn.
ROWS_PER_CALL = 8


@dataclasses.dataclass(eq=False)
class _Session(Session):
    """A trajectory that is being scored."""

    tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))
    run: int = 0  # tokens whose keys and values are kept
    scores: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens to run: the last one waits, for it predicts what is not known yet."""
        return len(self.tokens) - 1 - self.run


class ScoringEngine(SlotEngine):
    """Scores turns of many sessions, behind `engines.base.PassiveEngine`."""

    def __init__(
        self,
        model: Model,
        params: Params,
        *,
        kind: Kind,
        top_k: int,
        width: int,
        temperature: float,
        sessions: int,
        context_tokens: int,
        buckets: Sequence[int],
        device_or_sharding: Any = None,
    ):
        """Places a copy, and room for sessions; ConfigError: sizes that cannot be.

        Args:
          kind: The score of a position: the log-probability of the token itself, the
            `top_k` likeliest ids with theirs, or the full distribution.
          top_k: K of kind "top_k", below `width`.
          width: The first ids, over which distributions are renormalised: the smaller
            of the student's and the teacher's vocabulary. Rows behind it are padding.
          temperature: Logits are divided by it; that of the rollout.
          sessions: Sessions that are held at a time.
          buckets: Ascending lengths to which pieces are padded; what is longer than the
            last goes in pieces of it.
          device_or_sharding: Where the teacher lives; None is jax's default device.
        """
        super().__init__(
            _Session, sessions, context_tokens, buckets, device_or_sharding
        )
        if not 1 <= width <= model.vocab_size:
            raise ConfigError(
                f"width={width} ids to score with a teacher of {model.vocab_size}; "
                "give the smaller of the student's and the teacher's vocabulary"
            )
        if kind == "top_k" and not 1 <= top_k < width:
            raise ConfigError(
                f"top_k={top_k} of {width} ids; give at least 1 and fewer than all, or "
                "score kind 'full'"
            )
        self.width = width
        self.tokens_run = 0  # real ones that went through the model so far
        self._model = model
        self._readout = Readout(kind, top_k, width)
        self._temperature = np.float32(temperature)
        self._params = _cast(model, self._copied(params))
        kept, _ = jax.eval_shape(lambda: model.empty(context_tokens))

        def room(x):
            shape = np.insert(x.shape, model.token_axis, sessions)
            return np.zeros(shape, x.dtype)

        self._cache = self._copied(jax.tree.map(room, kept))

    def step(self) -> list[Scored]:
        """Runs a piece of the turns that wait longest; returns the turns that ended."""
        self._fill_slots()
        if not self._ready:
            return []
        bucket = self._bucket(self._ready[0].left)
        alike = (s for s in self._ready if self._bucket(s.left) == bucket)
        # A row of a full distribution is as wide as the vocabulary, asked for or not.
        most = 1 if self._readout.kind == "full" else ROWS_PER_CALL
        sessions = [session for session, _ in zip(alike, range(most), strict=False)]
        rows = _rows(sessions, bucket, most)
        self._cache, *scores = score(
            self._model,
            self._readout,
            self._params,
            self._cache,
            rows,
            self._temperature,
        )
        logprobs, ids = jax.device_get(scores)
        ended = []
        for i, session in enumerate(sessions):
            entries, length = rows.entries[i], min(session.left, rows.tokens.shape[1])
            session.scores.append((logprobs[i, :entries], ids[i, :entries]))
            session.run += length
            self.tokens_run += length
            self._ready.remove(session)
            if session.left:
                # Behind the others: a long prompt holds up no short turn.
                self._ready.append(session)
            else:
                ended.append(self._end(session))
        return ended

    def _end(self, session: _Session) -> Scored:
        logprobs, ids = map(np.concatenate, zip(*session.scores, strict=True))
        top_k = self._readout.kind == "top_k"
        scored = Scored(logprobs, ids if top_k else None, session.request.session)
        session.request, session.scores = None, []
        return scored

    def _accept(self, session: _Session, request: ScoreRequest) -> None:
        session.tokens = np.array(request.tokens, np.int32)  # buffers may be reused

    def _check_request(self, session: _Session, request: ScoreRequest) -> None:
        name, tokens = request.session, np.asarray(request.tokens)
        positions, known = np.asarray(request.positions), len(session.tokens)
        if tokens.ndim != 1 or len(tokens) > self.context_tokens:
            raise ValueError(
                f"session {name!r} has tokens of shape {tokens.shape}; expected one "
                f"dimension of at most {self.context_tokens}, the teacher's context"
            )
        outside = tokens[(tokens < 0) | (tokens >= self.width)]
        if len(outside):
            raise ValueError(
                f"session {name!r} has token {outside[0]}; student and teacher share "
                f"ids 0 .. {self.width - 1}"
            )
        if not np.array_equal(tokens[:known], session.tokens):
            raise ValueError(
                f"session {name!r} does not continue the {known} tokens that were "
                "scored; give a rewritten history a session of its own"
            )
        # The number that predicts a position is gone with the turn that it began in.
        first = max(known, 1)
        inside = np.all((positions >= first) & (positions < len(tokens)))
        if not len(positions) or not inside or np.any(np.diff(positions) < 1):
            raise ValueError(
                f"session {name!r} asks for positions {positions.tolist()}; expected "
                f"ascending ones from {first} to {len(tokens) - 1}, at least one"
            )


@functools.partial(jax.jit, static_argnums=0)
def _cast(model, params):
    return model.cast(params)


def _rows(sessions: list[_Session], bucket: int, most: int) -> Rows:
    """The next piece of every session."""
    rows = Rows(
        *(np.zeros((most, bucket), np.int32) for _ in range(3)),
        *(np.zeros(most, np.int32) for _ in range(3)),
        count=np.int32(len(sessions)),
    )
    for i, session in enumerate(sessions):
        start, length = session.run, min(session.left, bucket)
        rows.tokens[i, :length] = session.tokens[start : start + length]
        rows.slot[i], rows.start[i] = session.slot, start
        positions = np.asarray(session.request.positions)
        # Token t predicts position t + 1.
        inside = positions[(positions > start) & (positions <= start + length)]
        rows.source[i, : len(inside)] = inside - 1 - start
        rows.target[i, : len(inside)] = session.tokens[inside]
        rows.entries[i] = len(inside)
    return rows
