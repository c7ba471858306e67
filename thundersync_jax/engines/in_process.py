"""The in-process sampler: a cache, decode slots, and three compiled programs.

A turn's ids depend on its session's ids, the request and the parameters alone, bit for
bit on CPU: turns are decoded in blocks of one size, over one cache length; a prompt or
observation is prefilled alone, in pieces that its own length chooses, or copied from a
slot that began with the same prompt; random numbers come from seed and position.
"""

import collections
import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.engines import generation
from thundersync_jax.engines.base import Request, Response
from thundersync_jax.engines.sessions import Session, SlotEngine
from thundersync_jax.errors import ConfigError
from thundersync_jax.models.base import Model, Params

# Rows that a CPU decodes together. Fewer treat rows differently (below 4) or read the
# weights for too little work; more compute slots without a turn.
CPU_BLOCK_ROWS = 8


@dataclasses.dataclass(eq=False)
class _Session(Session):
    """A trajectory that is being sampled."""

    tokens: int = 0  # known ids, sampled ones included
    pending: tuple[int, ...] = ()  # the last sampled id, which the cache lacks
    ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)


class InProcessEngine(SlotEngine):
    """Continuous batching over decode slots, behind the engine interface."""

    def __init__(
        self,
        model: Model,
        params: Params,
        slots: int,
        context_tokens: int,
        steps_per_call: int,
        prefill_buckets: Sequence[int],
        device_or_sharding: Any = None,
        policy_version: int = 0,
        twin: "InProcessEngine | None" = None,
    ):
        """Places a copy of the parameters and an empty cache.

        Args:
          slots: Sessions that are held at a time.
          steps_per_call: Tokens per slot and `step`.
          prefill_buckets: Ascending lengths to which pieces are padded; what is longer
            than the last goes in pieces of it.
          device_or_sharding: Where the sampler lives; None is jax's default device.
          policy_version: Optimizer updates behind `params`.
          twin: An engine of the same model and parameters, whose copy is used.
        """
        super().__init__(
            _Session, slots, context_tokens, prefill_buckets, device_or_sharding
        )
        if steps_per_call < 1:
            raise ConfigError(
                f"steps_per_call={steps_per_call}; expected at least 1 token per call. "
                "Raise rollout.decode_steps_per_call."
            )
        self._model = model
        self._steps = steps_per_call
        self._cache = self._copied(model.decode_cache(slots, context_tokens))
        (device, *_) = jax.tree.leaves(self._cache)[0].devices()
        self._block_rows = CPU_BLOCK_ROWS if device.platform == "cpu" else slots
        self._rows = generation.Rows(
            token=np.zeros(slots, np.int32),
            length=np.zeros(slots, np.int32),
            remaining=np.zeros(slots, np.int32),
            temperature=np.zeros(slots, np.float32),
            stop_ids=np.full((slots, generation.STOP_IDS), -1, np.int32),
            seed=np.zeros((slots, 1 + 2 * generation.SEED_INTEGERS), np.uint32),
        )
        self._decoding: dict[int, _Session] = {}  # by slot
        self._sampled: list[jax.Array] = []  # ids and log-probabilities, dispatched
        self._prompts: dict[bytes, int] = {}  # which slot's cache begins with these ids
        self._prompt_of: dict[int, bytes] = {}  # the same by slot
        self.update(params, policy_version, twin)

    @property
    def busy(self) -> bool:
        return bool(self._decoding) or super().busy

    def update(
        self, params: Params, policy_version: int, twin: "InProcessEngine | None" = None
    ) -> None:
        """Takes a copy of new parameters; ValueError while a session is held.

        `twin` is an engine of the same model that has taken them: its copy is used, and
        shared where both engines are on CPU devices.
        """
        if self._sessions:
            raise ValueError(
                f"update to policy version {policy_version} with {len(self._sessions)} "
                "sessions held; release every session first"
            )
        if twin is None:
            params = self._copied(params)
            self._params = generation.decode_params(self._model, params)
        else:
            self._params = jax.tree.map(self._shared, twin._params)
        self._prompts, self._prompt_of = {}, {}
        self.policy_version = policy_version

    def _shared(self, x: jax.Array) -> jax.Array:
        """`x` at this place. Between CPU devices jax would copy it, but not a view."""
        on_cpu = all(device.platform == "cpu" for device in x.devices())
        return jax.device_put(np.asarray(x) if on_cpu else x, self._place)

    def compile(self) -> None:
        """Compiles every program that a turn may need, and computes nothing."""
        slots, none = len(self._rows.token), np.int32(0)
        place = np.zeros((slots, 2), np.int32)
        for bucket in self._buckets:
            ids = np.zeros((slots, bucket), np.int32)
            self._cache = generation.prefill(
                self._model, self._params, self._cache, ids, place, none
            )
        self._cache = generation.copy(self._cache, place, none)
        self._decode()
        self.collect()

    def release(self, session: Hashable) -> None:
        held = self._sessions.get(session)
        if held is not None and held.slot is not None:
            self._decoding.pop(held.slot, None)
            # The length stays: idle rows are computed too, and must not write into a
            # prompt.
            self._rows.remaining[held.slot] = 0
        super().release(session)

    def step(self) -> list[Response]:
        """Fills free slots, begins turns, decodes at most `steps_per_call` tokens."""
        self.dispatch()
        return self.collect()

    def dispatch(self) -> None:
        """The first half of `step`, which does not wait for the device.

        Nothing may be submitted or released before `collect`.
        """
        self._fill_slots()
        # At most a block of turns begins at a time, later turns of a session before
        # first ones: the first trajectories end early instead of all of them late.
        self._ready.sort(key=lambda session: session.tokens == 0)
        turns = self._ready[: self._block_rows]
        del self._ready[: self._block_rows]
        self._fill([self._begin(session) for session in turns])
        if self._decoding:
            self._decode()

    def _decode(self) -> None:
        self._cache, *self._sampled = generation.decode(
            self._model,
            self._steps,
            self._block_rows,
            self._params,
            self._cache,
            self._rows,
        )

    def collect(self) -> list[Response]:
        """The second half of `step`: waits for what was dispatched."""
        sampled, self._sampled = self._sampled, []
        return self._collect(*jax.device_get(sampled)) if sampled else []

    def _check_request(self, session: _Session, request: Request) -> None:
        name, new, limit = request.session, len(request.new_ids), request.max_new_tokens
        vocab = self._model.vocab_size
        if session.tokens + new == 0 or limit < 1:
            raise ValueError(
                f"session {name!r} has {session.tokens + new} tokens and asks for "
                f"{limit}; a turn needs at least one of each"
            )
        if session.tokens + new + limit > self.context_tokens:
            raise ValueError(
                f"session {name!r} holds {session.tokens} tokens, brings {new} and "
                f"asks for {limit} more; the context is {self.context_tokens}: shorten "
                "the turn or raise rollout.context_tokens"
            )
        if new and not 0 <= np.min(request.new_ids) <= np.max(request.new_ids) < vocab:
            raise ValueError(
                f"session {name!r} brings ids from {np.min(request.new_ids)} to "
                f"{np.max(request.new_ids)}; the vocabulary is 0 to {vocab - 1}"
            )
        if (
            len(request.stop_ids) > generation.STOP_IDS
            or len(request.seed) > generation.SEED_INTEGERS
        ):
            raise ValueError(
                f"session {name!r} has {len(request.stop_ids)} stop ids and "
                f"{len(request.seed)} seed integers; at most {generation.STOP_IDS} and "
                f"{generation.SEED_INTEGERS} fit"
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

    def _fill(self, segments: list[tuple[int, int, np.ndarray]]) -> None:
        """Brings segments into the cache; the prompt of a group is computed once."""
        before, after, computed = [], [], []
        for slot, start, ids in segments:
            prompt = ids.tobytes()
            # A free slot keeps its prompt: the session that brought it may be gone.
            source = None if start else self._prompts.get(prompt)
            if source == slot:
                continue
            if source is None:
                computed.append((slot, start, ids))
            else:
                fresh = any(source == other for other, *_ in computed)
                (after if fresh else before).append((source, slot))
            if not start:
                self._prompts.pop(self._prompt_of.pop(slot, None), None)
                if source is None:
                    self._prompts[prompt], self._prompt_of[slot] = slot, prompt
        self._copy(before)
        self._prefill(computed)
        self._copy(after)

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        if pairs:
            padded = np.zeros((len(self._rows.token), 2), np.int32)
            padded[: len(pairs)] = pairs
            self._cache = generation.copy(self._cache, padded, np.int32(len(pairs)))

    def _prefill(self, segments: list[tuple[int, int, np.ndarray]]) -> None:
        """Writes segments to the cache in pieces, one call per bucket and round."""
        largest = self._buckets[-1]
        slots = len(self._rows.token)
        while segments := [segment for segment in segments if len(segment[2])]:
            by_bucket = collections.defaultdict(list)
            for slot, start, ids in segments:
                piece = ids[:largest]
                by_bucket[self._bucket(len(piece))].append((slot, start, piece))
            for bucket, pieces in sorted(by_bucket.items()):
                ids = np.zeros((slots, bucket), np.int32)
                place = np.zeros((slots, 2), np.int32)
                for i, (slot, start, piece) in enumerate(pieces):
                    ids[i, : len(piece)] = piece
                    place[i] = slot, start
                count = np.int32(len(pieces))
                self._cache = generation.prefill(
                    self._model, self._params, self._cache, ids, place, count
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
            count, texts = counts[slot], session.request.stop_texts
            stopped = bool(stops[slot, count - 1])
            if texts is not None:
                seen = sum(map(len, session.ids))
                end = texts.end(np.concatenate([*session.ids, ids[slot, :count]]), seen)
                if end is not None:
                    count, stopped = end - seen, True
            session.ids.append(ids[slot, :count])
            session.logprobs.append(logprobs[slot, :count])
            rows.token[slot] = ids[slot, count - 1]
            rows.length[slot] += count
            rows.remaining[slot] -= count
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


class EngineGroup:
    """Samplers on several devices as one: a new session goes where the fewest are."""

    def __init__(self, engines: Sequence[InProcessEngine]):
        """Takes engines of one model, with as many slots each."""
        self.context_tokens = engines[0].context_tokens
        self._engines = list(engines)
        self._places: dict[Hashable, int] = {}
        self._sessions = [0] * len(self._engines)

    @property
    def policy_version(self) -> int:
        """Optimizer updates behind the parameters."""
        return self._engines[0].policy_version

    @property
    def busy(self) -> bool:
        return any(engine.busy for engine in self._engines)

    def update(self, params: Params, policy_version: int) -> None:
        """Gives every device new parameters. Raises as each engine does."""
        first, *others = self._engines
        first.update(params, policy_version)
        for engine in others:
            engine.update(params, policy_version, twin=first)

    def compile(self) -> None:
        """As of one engine, for every device."""
        for engine in self._engines:
            engine.compile()

    def submit(self, request: Request) -> None:
        """Queues a turn where its session is. Raises as each engine does."""
        place = self._places.get(request.session)
        if place is None:
            place = self._sessions.index(min(self._sessions))
        self._engines[place].submit(request)
        if request.session not in self._places:
            self._places[request.session] = place
            self._sessions[place] += 1

    def release(self, session: Hashable) -> None:
        place = self._places.pop(session, None)
        if place is not None:
            self._sessions[place] -= 1
            self._engines[place].release(session)

    def step(self) -> list[Response]:
        """A step of every engine: all are dispatched before one is waited for."""
        for engine in self._engines:
            engine.dispatch()
        return [answer for engine in self._engines for answer in engine.collect()]


def make(
    places: Sequence[Any], model: Model, params: Params, slots: int, **settings: Any
) -> InProcessEngine | EngineGroup:
    """One sampler over some devices or shardings: an engine, or a group of them.

    `slots` are sessions in all, a multiple of the number of places.
    """
    engine = functools.partial(
        InProcessEngine, model, params, slots // len(places), **settings
    )
    first = engine(device_or_sharding=places[0])
    others = [engine(device_or_sharding=place, twin=first) for place in places[1:]]
    return EngineGroup([first, *others]) if others else first


def _seed_words(seed: tuple[int, ...]) -> np.ndarray:
    """A seed as `generation.Rows.seed` wants it."""
    words = np.zeros(1 + 2 * generation.SEED_INTEGERS, np.uint32)
    words[0] = len(seed)
    for i, value in enumerate(seed):
        words[1 + 2 * i : 3 + 2 * i] = value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF
    return words
