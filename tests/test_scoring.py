"""The teacher's engine: whose scores they are, what they depend on, what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from thundersync_jax.config import ModelConfig
from thundersync_jax.engines import scoring
from thundersync_jax.engines.base import ScoreRequest
from thundersync_jax.errors import ConfigError
from thundersync_jax.models import transformer
from thundersync_jax.models.transformer import Transformer

# Two float32 programs of one function.
FLOAT32 = 1e-5
CONFIG = ModelConfig(
    vocab_size=50,
    layers=2,
    width=32,
    mlp_width=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    rope_theta=500.0,
    qk_norm=True,
    tied_embeddings=False,
)
PARAMS = transformer.init(CONFIG, jax.random.key(0))
CONTEXT, BUCKETS = 64, (4, 8)
surrogate_logprobs = jax.jit(tiny_models.logprobs, static_argnums=0)
segment = jax.jit(transformer.segment, static_argnums=0)


def make_engine(config=CONFIG, params=PARAMS, **changes):
    settings = {
        "kind": "sampled",
        "top_k": 5,
        "width": config.vocab_size,
        "temperature": 0.7,
        "sessions": 3,
        "context_tokens": CONTEXT,
        "buckets": BUCKETS,
    }
    return scoring.ScoringEngine(Transformer(config), params, **(settings | changes))


def tokens_of(name, length=40, vocab_size=50):
    return np.random.default_rng(name).integers(0, vocab_size, length, np.int32)


def turns_of(name):
    """(first, end) of every action: behind a prompt, and then behind observations.

    Some are longer than the largest bucket, some follow the last one at once.
    """
    rng = np.random.default_rng(1000 + name)
    end, turns = 0, []
    for gap, length in zip(rng.integers(0, 14, 4), rng.integers(1, 12, 4), strict=True):
        first = end + max(int(gap), 1 - end)
        end = first + int(length)
        turns.append((first, end))
    return [(first, end) for first, end in turns if end <= 40]


def scored(engine, names, ask=tokens_of):
    """Scores all turns of some sessions, each asked for when the last one is in.

    Returns (logprobs, ids, positions) by name; every session is released.
    """
    found = {name: [] for name in names}
    left = {name: turns_of(name) for name in names}

    def submit(name):
        first, end = left[name].pop(0)
        positions = np.arange(first, end, dtype=np.int32)
        engine.submit(ScoreRequest(name, ask(name)[:end], positions))
        found[name].append([None, None, positions])

    for name in names:
        submit(name)
    while engine.busy:
        for answer in engine.step():
            name = answer.session
            found[name][-1][:2] = answer.logprobs, answer.ids
            assert len(answer.logprobs) == len(found[name][-1][2])
            if left[name]:
                submit(name)
            else:
                engine.release(name)
    return {name: joined(turns) for name, turns in found.items()}


def joined(turns):
    logprobs, ids, positions = zip(*turns, strict=True)
    ids = None if ids[0] is None else np.concatenate(ids)
    return np.concatenate(logprobs), ids, np.concatenate(positions)


def full_logprobs(tokens, width, temperature):
    """float64[T, width], entry t of log q(. | tokens[:t]), by another way."""
    hidden, _ = segment(CONFIG, PARAMS, tokens)
    logits = (
        np.asarray(hidden, np.float64)
        @ np.asarray(transformer.head_weights(PARAMS), np.float64).T
    )
    logits = logits[:, :width] / temperature
    logits -= np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    return np.concatenate([np.full((1, width), np.nan), logits[:-1]])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_turn_by_turn_equals_the_whole_trajectory_run_once(temperature):
    """Each token through the model at most once, whatever turns it came in."""
    engine = make_engine(temperature=temperature)
    names = list(range(12))
    found = scored(engine, names)
    for name, (logprobs, ids, positions) in found.items():
        tokens = tokens_of(name)
        expected = surrogate_logprobs(CONFIG, PARAMS, tokens, temperature)
        expected = np.asarray(expected)[positions, None]
        assert ids is None and logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=FLOAT32)
    ends = sum(turns_of(name)[-1][1] for name in names)
    assert engine.tokens_run == ends - len(names)  # the last token predicts nothing
    assert max(turns_of(name)[0][0] for name in names) > BUCKETS[-1]


@pytest.mark.parametrize("width", [50, 41])
def test_full_and_top_k_are_those_of_the_renormalised_distribution(width):
    """huggingface/trl#2215: rows that only one side has count for nothing."""

    def ask(name):
        return tokens_of(name) % width

    names = list(range(5))
    full = scored(make_engine(kind="full", width=width), names, ask)
    best = scored(make_engine(kind="top_k", width=width), names, ask)
    drawn = scored(make_engine(kind="sampled", width=width), names, ask)
    for name in names:
        logprobs, ids, positions = full[name]
        expected = full_logprobs(ask(name), width, 0.7)[positions]
        assert ids is None
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=FLOAT32)
        np.testing.assert_allclose(np.sum(np.exp(logprobs), axis=1), 1, atol=FLOAT32)
        own = expected[np.arange(len(positions)), ask(name)[positions]]
        np.testing.assert_allclose(drawn[name][0][:, 0], own, rtol=0, atol=FLOAT32)
        logprobs, ids, _ = best[name]
        order = np.argsort(-expected, axis=1)[:, :5]
        np.testing.assert_array_equal(ids, order)
        expected = np.take_along_axis(expected, order, axis=1)
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("kind", ["sampled", "top_k", "full"])
def test_bits_of_a_session_depend_on_nothing_else(kind):
    """Neither on what is scored beside it, nor on order, slot or who was there."""
    names = list(range(12))
    alone = {name: scored(make_engine(kind=kind), [name])[name] for name in names}
    assert len({logprobs.tobytes() for logprobs, _, _ in alone.values()}) == 12
    for sessions in (3, 12):
        crowded = make_engine(kind=kind, sessions=sessions)
        for order in (names, names[::-1], [4, 0, 8, 11, 2, 6, 10, 1, 7, 3, 9, 5]):
            for name, (logprobs, ids, _) in scored(crowded, order).items():
                np.testing.assert_array_equal(logprobs, alone[name][0])
                if kind == "top_k":
                    np.testing.assert_array_equal(ids, alone[name][1])


def test_what_a_session_left_behind_reaches_no_other():
    """Not even a NaN, which a weight of 0 would pass on."""
    engine = make_engine()
    expected = scored(engine, [3])[3][0]
    engine._cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), engine._cache)
    np.testing.assert_array_equal(scored(engine, [3])[3][0], expected)


def test_only_positions_that_were_asked_for_meet_the_vocabulary():
    """A chunk at a time: as many as hold them, and not the prompt's."""
    config = dataclasses.replace(CONFIG, logprob_chunk_tokens=3)
    engine = make_engine(config, buckets=(8, 32))
    tokens = tokens_of(0)
    expected = np.asarray(surrogate_logprobs(CONFIG, PARAMS, tokens, 0.7))
    for start, positions in [(0, [20, 23, 24, 28]), (29, [33]), (34, range(34, 40))]:
        positions = np.asarray(positions, np.int32)
        end = max(start, positions[-1]) + 1
        engine.submit(ScoreRequest(0, tokens[:end], positions))
        (answer,) = engine.step()
        np.testing.assert_allclose(
            answer.logprobs[:, 0], expected[positions], rtol=0, atol=FLOAT32
        )
        assert not engine.busy


def test_a_context_full_to_the_last_token_is_scored():
    tokens = tokens_of(0, CONTEXT)
    engine = make_engine(buckets=(48,))
    expected = np.asarray(surrogate_logprobs(CONFIG, PARAMS, tokens, 0.7))
    for first, end in [(30, 40), (40, 60), (62, 64)]:
        positions = np.arange(first, end, dtype=np.int32)
        engine.submit(ScoreRequest(0, tokens[:end], positions))
        (answer,) = engine.step()
        np.testing.assert_allclose(
            answer.logprobs[:, 0], expected[positions], rtol=0, atol=FLOAT32
        )


def test_a_call_takes_turns_of_one_bucket_and_long_ones_wait_their_turn():
    engine = make_engine(sessions=12)
    engine.submit(ScoreRequest("long", tokens_of(0, 33), np.array([32])))
    for name in range(scoring.ROWS_PER_CALL + 1):
        engine.submit(ScoreRequest(name, tokens_of(name, 4), np.array([3])))
    assert engine.step() == []
    first = [answer.session for answer in engine.step()]
    assert first == list(range(scoring.ROWS_PER_CALL))
    rest = [[answer.session for answer in engine.step()] for _ in range(4)]
    assert rest[-1] == ["long"] and [scoring.ROWS_PER_CALL] in rest
    assert not engine.busy


def test_sessions_wait_for_a_slot_and_may_be_released_anywhere():
    engine = make_engine(sessions=3)
    for name in range(5):
        engine.submit(ScoreRequest(name, tokens_of(name, 20), np.array([19])))
    assert engine.step() == []
    engine.release(4)  # waits for a slot
    engine.release(0)  # has run a piece
    engine.release("unknown")
    answers = {}
    while engine.busy:
        for answer in engine.step():
            answers[answer.session] = answer.logprobs
            engine.release(answer.session)
    assert sorted(answers) == [1, 2, 3]
    expected = surrogate_logprobs(CONFIG, PARAMS, tokens_of(3, 20), 0.7)[19]
    np.testing.assert_allclose(answers[3][0, 0], expected, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize(
    "tokens, positions, message",
    [
        (tokens_of(0, CONTEXT + 1), [CONTEXT], "65.*at most 64"),
        ([1, 2, 50], [2], "token 50; student and teacher share ids 0 .. 49"),
        ([1, 2, -1], [2], "token -1"),
        ([1, 2, 3], [0], r"positions \[0\]; expected ascending ones from 1 to 2"),
        ([1, 2, 3], [3], "from 1 to 2"),
        ([1, 2, 3], [2, 1], "ascending"),
        ([1, 2, 3], [], "at least one"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_costs_nobody_else(
    tokens, positions, message
):
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        request = ScoreRequest(0, np.asarray(tokens), np.asarray(positions, int))
        engine.submit(request)
    assert not engine.busy
    np.testing.assert_array_equal(
        scored(engine, [1])[1][0], scored(make_engine(), [1])[1][0]
    )


def test_a_session_continues_its_own_tokens_and_one_turn_at_a_time():
    engine = make_engine()
    tokens = tokens_of(0)
    engine.submit(ScoreRequest(0, tokens[:10], np.array([8, 9])))
    with pytest.raises(ValueError, match="while one is being answered"):
        engine.submit(ScoreRequest(0, tokens[:12], np.array([11])))
    while engine.busy:
        engine.step()
    rewritten = tokens.copy()
    rewritten[4] ^= 1
    for wrong in (rewritten, tokens[:9]):
        with pytest.raises(ValueError, match="does not continue the 10 tokens"):
            engine.submit(ScoreRequest(0, wrong, np.array([8])))
    with pytest.raises(ValueError, match="from 10 to 39"):
        engine.submit(ScoreRequest(0, tokens, np.array([9])))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"width": 51}, "width=51.*50"),
        ({"kind": "top_k", "top_k": 50}, "top_k=50 of 50"),
        ({"sessions": 0}, "slots=0"),
        ({"buckets": (8, 4)}, "ascending"),
    ],
)
def test_sizes_that_cannot_be_are_refused_at_start(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(**changes)


def test_parameters_are_a_copy_since_the_student_donates_its_own():
    params = jax.tree.map(jnp.copy, PARAMS)
    engine = make_engine(params=params)
    jax.tree.map(lambda x: x.delete(), params)
    np.testing.assert_array_equal(
        scored(engine, [2])[2][0], scored(make_engine(), [2])[2][0]
    )
