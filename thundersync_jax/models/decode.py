"""The in-process sampler: a KV cache, decode slots, and two compiled programs.

What a turn's ids depend on is its session's ids, the request and the parameters, bit
for bit on CPU. Three rules make it so: decoding always computes all slots (at least
four), for a fixed number of steps, over one cache length; a prompt or observation is
prefilled alone, in pieces that its own length chooses; random numbers come from the
request's seed and the position. No thread, no tokenizer, no environment.
"""

import bisect
import collections
import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.config import ModelConfig
from thundersync_jax.errors import ConfigError
from thundersync_jax.models import layers, transformer
from thundersync_jax.ops import sampling
from thundersync_jax.rollout.engine import Request, Response

LEAST_SLOTS = 4  # below it the CPU's matrix products treat rows differently
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


@dataclasses.dataclass
class _Session:
    """One trajectory: its place, and its turn while one is being sampled."""

    slot: int | None = None
    tokens: int = 0  # known ids, sampled ones included
    pending: tuple[int, ...] = ()  # the last sampled id, which the cache lacks
    request: Request | None = None
    ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)


class InProcessEngine:
    """Continuous batching over decode slots, behind the engine interface.

    A session takes a slot when one is free, first come, first served, and keeps it
    until it is released.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        slots: int,
        context_tokens: int,
        steps_per_call: int,
        prefill_buckets: Sequence[int],
        device_or_sharding: Any = None,
        policy_version: int = 0,
    ):
        """Places a copy of the parameters and an empty cache.

        Args:
          config: The model.
          params: As `transformer.init` returns them; copied.
          slots: Sessions that are held at a time, at least 4.
          context_tokens: Longest sequence of a session.
          steps_per_call: Tokens per slot and `step`.
          prefill_buckets: Ascending lengths to which pieces are padded; what is longer
            than the last goes in pieces of it.
          device_or_sharding: Where the sampler lives; None is jax's default device.
          policy_version: Of `params`.
        """
        _check(slots, context_tokens, steps_per_call, prefill_buckets)
        self.context_tokens = context_tokens
        self._config = config
        self._steps = steps_per_call
        self._buckets = tuple(prefill_buckets)
        self._place = device_or_sharding or jax.devices()[0]
        shape = (slots, config.kv_heads, context_tokens, config.head_dim)
        empty = np.zeros(shape, transformer.compute_dtype(config))
        # No aliases: the cache is donated, and donation must reach each array once.
        self._cache = tuple(
            LayerCache(
                jax.device_put(empty, self._place, may_alias=False),
                jax.device_put(empty, self._place, may_alias=False),
            )
            for _ in range(config.layers)
        )
        self._rows = Rows(
            token=np.zeros(slots, np.int32),
            length=np.zeros(slots, np.int32),
            remaining=np.zeros(slots, np.int32),
            temperature=np.zeros(slots, np.float32),
            stop_ids=np.full((slots, STOP_IDS), -1, np.int32),
            seed=np.zeros((slots, 1 + 2 * SEED_INTEGERS), np.uint32),
        )
        self._sessions: dict[Hashable, _Session] = {}
        self._free = list(range(slots))[::-1]
        self._queue: collections.deque[_Session] = collections.deque()  # no slot yet
        self._ready: list[_Session] = []  # slot held, turn not begun
        self._decoding: dict[int, _Session] = {}  # by slot
        self.update(params, policy_version)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._ready or self._decoding or (self._queue and self._free))

    def update(self, params: Any, policy_version: int) -> None:
        """Takes a copy of new parameters.

        Raises:
          ValueError: A session is held; its cache belongs to the old parameters.
        """
        if self._sessions:
            raise ValueError(
                f"update to policy version {policy_version} with {len(self._sessions)} "
                "sessions held; release every session first"
            )
        # A copy in every case: the learner donates its arrays at the step boundary.
        params = jax.device_put(params, self._place, may_alias=False)
        self._params = _unstack(self._config, params)
        self.policy_version = policy_version

    def submit(self, request: Request) -> None:
        """Queues a turn.

        Raises:
          ValueError: It cannot fit the context, or is no turn of this engine.
        """
        session = self._sessions.get(request.session) or _Session()
        self._check_request(session, request)
        self._sessions[request.session] = session
        session.request = request
        (self._queue if session.slot is None else self._ready).append(session)

    def release(self, session: Hashable) -> None:
        """Ends a session, wherever it stands; unknown sessions are ignored."""
        held = self._sessions.pop(session, None)
        if held is None:
            return
        if held.slot is None:
            self._queue.remove(held)
            return
        if held in self._ready:
            self._ready.remove(held)
        self._decoding.pop(held.slot, None)
        for rows in self._rows:
            rows[held.slot] = 0
        self._free.append(held.slot)

    def step(self) -> list[Response]:
        """Fills free slots, prefills what is new and decodes `steps_per_call` tokens."""
        while self._queue and self._free:
            session = self._queue.popleft()
            session.slot = self._free.pop()
            self._ready.append(session)
        if self._ready:
            self._prefill([self._begin(session) for session in self._ready])
            self._ready = []
        if not self._decoding:
            return []
        self._cache, ids, logprobs = _decode(
            self._config, self._steps, self._params, self._cache, self._rows
        )
        return self._collect(*jax.device_get((ids, logprobs)))

    def _check_request(self, session: _Session, request: Request) -> None:
        name, new, limit = request.session, len(request.new_ids), request.max_new_tokens
        vocab = self._config.vocab_size
        if session.request is not None:
            raise ValueError(
                f"session {name!r} was given a turn while one is being sampled; wait "
                "for its response or release it"
            )
        if session.tokens + new == 0 or limit < 1:
            raise ValueError(
                f"session {name!r} has {session.tokens + new} tokens and asks for "
                f"{limit}; a turn needs at least one of each"
            )
        if session.tokens + new + limit > self.context_tokens:
            raise ValueError(
                f"session {name!r} holds {session.tokens} tokens, brings {new} and asks "
                f"for {limit} more; the context is {self.context_tokens}: shorten the "
                "turn or raise rollout.context_tokens"
            )
        if new and not 0 <= np.min(request.new_ids) <= np.max(request.new_ids) < vocab:
            raise ValueError(
                f"session {name!r} brings ids from {np.min(request.new_ids)} to "
                f"{np.max(request.new_ids)}; the vocabulary is 0 to {vocab - 1}"
            )
        if len(request.stop_ids) > STOP_IDS or len(request.seed) > SEED_INTEGERS:
            raise ValueError(
                f"session {name!r} has {len(request.stop_ids)} stop ids and "
                f"{len(request.seed)} seed integers; at most {STOP_IDS} and "
                f"{SEED_INTEGERS} fit"
            )
        if not 0 <= request.temperature < np.inf:
            raise ValueError(
                f"session {name!r} has temperature {request.temperature}; give 0 for "
                "the largest logit, or a finite number above it"
            )

    def _begin(self, session: _Session) -> tuple[int, int, np.ndarray]:
        """Fills the slot's row; returns slot, first position and ids to prefill."""
        request, slot, rows = session.request, session.slot, self._rows
        fresh = np.concatenate([session.pending, request.new_ids]).astype(np.int32)
        start = session.tokens - len(session.pending)
        session.tokens += len(request.new_ids)
        rows.token[slot] = fresh[-1]
        rows.length[slot] = session.tokens - 1
        rows.remaining[slot] = request.max_new_tokens
        rows.temperature[slot] = request.temperature
        rows.stop_ids[slot] = -1
        rows.stop_ids[slot, : len(request.stop_ids)] = request.stop_ids
        rows.seed[slot] = _seed_words(request.seed)
        self._decoding[slot] = session
        return slot, start, fresh[:-1]

    def _prefill(self, segments: list[tuple[int, int, np.ndarray]]) -> None:
        """Writes segments to the cache, piece by piece, one call per bucket and round."""
        largest = self._buckets[-1]
        slots = len(self._rows.token)
        while segments := [segment for segment in segments if len(segment[2])]:
            by_bucket = collections.defaultdict(list)
            for slot, start, ids in segments:
                piece = ids[:largest]
                bucket = self._buckets[bisect.bisect_left(self._buckets, len(piece))]
                by_bucket[bucket].append((slot, start, piece))
            for bucket, pieces in sorted(by_bucket.items()):
                ids = np.zeros((slots, bucket), np.int32)
                place = np.zeros((slots, 2), np.int32)
                for i, (slot, start, piece) in enumerate(pieces):
                    ids[i, : len(piece)] = piece
                    place[i] = slot, start
                count = np.int32(len(pieces))
                self._cache = _prefill(
                    self._config, self._params, self._cache, ids, place, count
                )
            segments = [
                (s, start + largest, ids[largest:]) for s, start, ids in segments
            ]

    def _collect(self, ids: np.ndarray, logprobs: np.ndarray) -> list[Response]:
        """Advances the rows by what was sampled; returns the turns that ended."""
        rows = self._rows
        stops = np.any(ids[:, :, None] == rows.stop_ids[:, None, :], axis=-1)
        first = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, self._steps)
        counts = np.minimum(first, rows.remaining)
        responses = []
        for slot, session in list(self._decoding.items()):
            count = counts[slot]
            session.ids.append(ids[slot, :count])
            session.logprobs.append(logprobs[slot, :count])
            rows.token[slot] = ids[slot, count - 1]
            rows.length[slot] += count
            rows.remaining[slot] -= count
            stopped = bool(stops[slot, count - 1])
            if stopped or rows.remaining[slot] == 0:
                responses.append(self._end(session, stopped))
        return responses

    def _end(self, session: _Session, stopped: bool) -> Response:
        self._rows.remaining[session.slot] = 0
        del self._decoding[session.slot]
        ids, logprobs = np.concatenate(session.ids), np.concatenate(session.logprobs)
        response = Response(
            session.request.session, ids, logprobs, stopped, self.policy_version
        )
        session.tokens += len(ids)
        session.pending = (int(ids[-1]),)
        session.request, session.ids, session.logprobs = None, [], []
        return response


@functools.partial(jax.jit, static_argnums=0)
def _unstack(config, params):
    """Parameters in the compute dtype, the layers' as a list: no slices in the loop."""
    params = transformer.cast(config, params)
    stacked = params["layers"]
    each = [jax.tree.map(lambda x: x[i], stacked) for i in range(config.layers)]  # noqa: B023
    return params | {"layers": each}


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill(config, params, cache, ids, place, count):
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
def _decode(config, steps, params, cache, rows):
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
    rows = Rows(*(jnp.asarray(x) for x in rows))
    uniforms = _uniforms(rows.seed, rows.length + 1, steps)

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
    (cache, *_), (ids, logprobs) = jax.lax.scan(step, carry, uniforms)
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


def _uniforms(seed, position, steps):
    """float32[steps, slots] in [0, 1), from each row's seed and positions alone."""

    def base_key(words):
        fold = lambda i, key: jax.random.fold_in(key, words[i])  # noqa: E731
        return jax.lax.fori_loop(0, words.shape[0], fold, jax.random.key(0))

    def one(key, position):
        return jax.random.uniform(jax.random.fold_in(key, position))

    positions = position[None] + jnp.arange(steps, dtype=jnp.int32)[:, None]
    keys = jax.vmap(base_key)(seed)
    return jax.vmap(jax.vmap(one), in_axes=(None, 0))(keys, positions)


def _seed_words(seed: tuple[int, ...]) -> np.ndarray:
    """uint32[1 + 2 * SEED_INTEGERS]: their count, then low and high half of each."""
    words = np.zeros(1 + 2 * SEED_INTEGERS, np.uint32)
    words[0] = len(seed)
    for i, value in enumerate(seed):
        words[1 + 2 * i : 3 + 2 * i] = value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF
    return words


def _check(slots, context_tokens, steps_per_call, prefill_buckets):
    if slots < LEAST_SLOTS:
        raise ConfigError(
            f"slots={slots}; at least {LEAST_SLOTS} make sampled ids independent of "
            "the other rows, raise rollout.slots"
        )
    if context_tokens < 2 or steps_per_call < 1:
        raise ConfigError(
            f"context_tokens={context_tokens} and steps_per_call={steps_per_call}; "
            "the context holds at least 2 tokens and a call samples at least 1"
        )
    buckets = tuple(prefill_buckets)
    if not buckets or buckets[0] < 1 or sorted(set(buckets)) != list(buckets):
        raise ConfigError(f"prefill_buckets={buckets}; give ascending positive lengths")
