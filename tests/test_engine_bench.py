"""Speeds of engines: the same tokens for everyone, and nobody waits for the dead."""

import time

import numpy as np
import pytest

from thundersync_jax.engines.base import Response
from thundersync_jax.measure import engine_bench
from thundersync_jax.measure.engine_bench import Load, Speed

LOAD = Load(requests=3, prompt_tokens=4, tokens=5, vocab_size=50)
FIRST_SECS = 1.0  # a first round, which compiles


class CountingEngine:
    """Answers a round in one step of `secs`, the first in one of FIRST_SECS."""

    context_tokens = 64

    def __init__(self, secs=0.0, tokens=None, error=None):
        self.rounds, self._waiting = [], []
        self.held = set()
        self._secs, self._tokens, self._error = secs, tokens, error

    @property
    def busy(self):
        return len(self._waiting) == LOAD.requests

    def submit(self, request):
        self._waiting.append(request)
        self.held.add(request.session)

    def release(self, session):
        self.held.discard(session)

    def step(self):
        if self._error:
            raise self._error
        time.sleep(self._secs if self.rounds else FIRST_SECS)
        asked, self._waiting = self._waiting, []
        self.rounds.append(asked)
        return [self._answer(request) for request in asked]

    def _answer(self, request):
        count = self._tokens or request.max_new_tokens
        ids, logprobs = np.zeros(count, np.int32), np.zeros(count, np.float32)
        return Response(request.session, ids, logprobs, False, 0)


def test_engines_take_turns_and_are_asked_alike():
    fast, slow = CountingEngine(secs=0.01), CountingEngine(secs=0.1)
    speeds = engine_bench.measure({"fast": fast, "slow": slow}, [LOAD], repeats=3)
    assert [(s.engine, s.requests, s.tokens) for s in speeds] == [
        ("fast", 3, 5),
        ("slow", 3, 5),
    ]
    for speed, secs in zip(speeds, (0.01, 0.1), strict=True):
        assert speed.slowest <= speed.tokens_per_sec <= speed.fastest <= 15 / secs
        assert speed.slowest > 15 / FIRST_SECS
    assert speeds[0].tokens_per_sec > speeds[1].tokens_per_sec
    assert not fast.held and not slow.held
    for engine in (fast, slow):
        assert len(engine.rounds) == 4  # one of them is not timed
        requests = [request for asked in engine.rounds for request in asked]
        assert {(len(r.new_ids), r.max_new_tokens, r.stop_ids) for r in requests} == {
            (4, 5, ())
        }
        # Nothing may be remembered from one request to another.
        assert len({r.new_ids.tobytes() for r in requests}) == len(requests)


def test_another_number_of_tokens_is_refused():
    engines = {"short": CountingEngine(tokens=4)}
    with pytest.raises(ValueError, match="4 tokens .* expected 5"):
        engine_bench.measure(engines, [LOAD], repeats=1)


def test_a_dead_engine_ends_the_measurement():
    engines = {"dead": CountingEngine(error=RuntimeError("out of memory"))}
    with pytest.raises(RuntimeError, match="out of memory"):
        engine_bench.measure(engines, [LOAD], repeats=1)


def test_speeds_as_a_table_and_as_a_record():
    speeds = [
        Speed("in process", 16, 128, 9000.0, 8000.0, 9100.0),
        Speed("vllm", 16, 128, 4500.0, 4400.0, 4600.0),
    ]
    *_, first, second = engine_bench.table(speeds, "vllm")
    assert first.split()[-4:] == ["9,000", "8,000", "9,100", "2.00"]
    assert second.split()[-1] == "1.00"
    assert engine_bench.record(speeds)[1]["tokens_per_sec"] == 4500.0


class RemoteEngine:
    """A connection to itself, which answers once it was given parameters."""

    context_tokens = 64

    def __init__(self):
        self.given, self.closed = [], False

    def connect(self, loop, on_error):
        return self

    async def sample(self, request):
        assert self.given == [("weights", 3)]
        count = request.max_new_tokens
        ids, logprobs = np.zeros(count, np.int32), np.zeros(count, np.float32)
        return Response(request.session, ids, logprobs, False, 3)

    def release(self, session):
        pass

    def update(self, params, policy_version, limit_secs):
        self.given.append((params, policy_version))

    def close(self, timeout_secs):
        self.closed = True
        return True


def test_an_engine_elsewhere_is_given_the_parameters_and_closed():
    engine = RemoteEngine()
    engine_bench.measure({"there": engine}, [LOAD], 1, "weights", 3)
    assert engine.closed
