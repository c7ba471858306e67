"""The sampler: what its ids depend on, and that the trainer agrees with it."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from thundersync_jax.chat.base import StopTexts
from thundersync_jax.config import ModelConfig
from thundersync_jax.engines import generation, in_process
from thundersync_jax.engines.base import Request
from thundersync_jax.models import transformer
from thundersync_jax.models.transformer import Transformer
from thundersync_jax.ops.logprobs import draw

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
    qk_norm=True,
)
MODEL = Transformer(CONFIG)
PARAMS = transformer.init(CONFIG, jax.random.key(0))
CONTEXT, BUCKETS = 48, (4, 8)
surrogate_logprobs = jax.jit(tiny_models.logprobs, static_argnums=0)


def make_engine(params=PARAMS, slots=5, **changes):
    settings = {
        "context_tokens": CONTEXT,
        "steps_per_call": 4,
        "prefill_buckets": BUCKETS,
    }
    return in_process.InProcessEngine(MODEL, params, slots, **(settings | changes))


def make_group(slots):
    settings = {
        "context_tokens": CONTEXT,
        "steps_per_call": 4,
        "prefill_buckets": BUCKETS,
    }
    return in_process.make(jax.devices()[2:4], MODEL, PARAMS, slots, **settings)


def prompt(name, tokens=6):
    return np.random.default_rng(name).integers(1, 50, tokens, np.int32)


def turn(session, new_ids, seed=None, limit=7, temperature=1.0, stop_ids=()):
    seed = (7, 0) if seed is None else seed
    return Request(session, new_ids, limit, stop_ids, temperature, seed)


def finish(engine):
    """Steps until nothing is left; returns responses by session."""
    responses = {}
    while engine.busy:
        responses |= {response.session: response for response in engine.step()}
    return responses


def converse(engine, names, turns=3):
    """Conversations of different lengths; a session submits again when it is answered.

    Returns (ids, logprobs, full sequence) by name, and releases every session.
    """
    record = {name: ([], [], []) for name in names}

    def submit(name, i, new_ids):
        record[name][2].append(new_ids)
        engine.submit(
            turn(name, new_ids, (name, i), limit=3 + name % 6, temperature=0.8)
        )

    left = dict.fromkeys(names, turns)
    for name in names:
        submit(name, 0, prompt(name, 2 + name % 11))
    while engine.busy:
        for response in engine.step():
            name = response.session
            record[name][0].append(response.ids)
            record[name][1].append(response.logprobs)
            record[name][2].append(response.ids)
            left[name] -= 1
            if left[name]:
                submit(name, turns - left[name], prompt(100 + name, 1 + name % 4))
            else:
                engine.release(name)
    return {name: [np.concatenate(x) for x in parts] for name, parts in record.items()}


@pytest.mark.parametrize("slots", [5, 19])
def test_ids_do_not_depend_on_batch_slot_or_order(slots):
    """verl-project/verl#6280: results moved with what else was in the batch."""
    names = list(range(12))
    reference = {name: converse(make_engine(), [name])[name] for name in names}
    assert len({tuple(ids) for ids, _, _ in reference.values()}) == len(names)
    # One block of decoded rows with room to spare, then two, the second not full.
    crowded = make_engine(slots=slots)
    for order in (names, names[::-1], [4, 0, 8, 11, 2, 6, 10, 1, 7, 3, 9, 5]):
        # The second round meets a cache full of other sessions' leftovers.
        for ids_and_more in (converse(crowded, order), converse(crowded, order[:3])):
            for name, (ids, logprobs, _) in ids_and_more.items():
                np.testing.assert_array_equal(ids, reference[name][0])
                np.testing.assert_array_equal(logprobs, reference[name][1])


def test_several_devices_sample_what_one_does():
    names = list(range(12))
    reference = {name: converse(make_engine(), [name])[name] for name in names}
    group = make_group(slots=10)
    for order in (names, names[::-1]):
        for name, (ids, logprobs, _) in converse(group, order).items():
            np.testing.assert_array_equal(ids, reference[name][0])
            np.testing.assert_array_equal(logprobs, reference[name][1])


def test_cpu_devices_share_a_copy_of_the_parameters():
    def leaves(engine):
        return jax.tree.leaves(engine._params)

    group = make_group(slots=6)
    given = jax.tree.map(lambda x: x + 0.1, PARAMS)
    reference = converse(make_engine(given), [0, 1])
    for _ in range(2):
        for place, engine in zip(jax.devices()[2:4], group._engines, strict=True):
            assert {x.device for x in leaves(engine)} == {place}
        first, second = (
            [x.unsafe_buffer_pointer() for x in leaves(engine)]
            for engine in group._engines
        )
        assert first == second
        group.update(given, 1)
    for x in jax.tree.leaves(given):
        x.delete()
    for name, (ids, logprobs, _) in converse(group, [0, 1]).items():
        np.testing.assert_array_equal(ids, reference[name][0])
        np.testing.assert_array_equal(logprobs, reference[name][1])


def test_new_sessions_go_to_the_device_with_the_fewest():
    group = make_group(slots=8)
    for session in range(4):
        group.submit(turn(session, prompt(session)))
    for session in (0, 2, "unknown"):
        group.release(session)
    for session in (4, 5, 6):
        group.submit(turn(session, prompt(session)))
    held = [sorted(engine._sessions) for engine in group._engines]
    assert held == [[4, 5], [1, 3, 6]] or held == [[4, 5, 6], [1, 3]]
    with pytest.raises(ValueError, match="release every session first"):
        group.update(PARAMS, 1)
    assert len(finish(group)) == 5
    for session in (1, 3, 4, 5, 6):
        group.release(session)
    group.update(PARAMS, 1)
    assert group.policy_version == 1 and not group.busy


@pytest.mark.parametrize("slots", [2, 7, 16])
def test_every_slot_computes_the_same_bits(slots):
    engine = make_engine(slots=slots)
    for session in range(slots):
        engine.submit(turn(session, prompt(3), seed=(7,)))
    first, *others = finish(engine).values()
    for other in others:
        np.testing.assert_array_equal(other.ids, first.ids)
        np.testing.assert_array_equal(other.logprobs, first.logprobs)


@pytest.mark.parametrize("slots", [5, 19])
def test_prompt_of_a_group_is_computed_once_and_bits_do_not_tell(slots, monkeypatch):
    """Slots are used again and again while others copy from them."""
    computed, prefill = [], generation.prefill

    def counted(*args):
        starts = args[4][: args[5], 1]
        computed.append(int(np.sum(starts == 0)))
        return prefill(*args)

    monkeypatch.setattr(generation, "prefill", counted)
    prompts = [prompt(10), prompt(11), prompt(12, 14)]
    groups = {name: prompts[name % 3] for name in range(24)}
    reference = {}
    for name, ids in groups.items():
        reference[name] = group_turns(make_engine(), {name: ids})[name]
    assert len({tuple(ids) for ids, _ in reference.values()}) == len(groups)
    rng = np.random.default_rng(slots)
    crowded = make_engine(slots=slots)
    for size in (24, 24, 7):
        computed.clear()
        chosen = rng.permutation(24)[:size]
        found = group_turns(crowded, {name: groups[name] for name in chosen.tolist()})
        assert sum(computed) <= (3 if slots > 7 else size // 2)
        for name, (ids, logprobs) in found.items():
            np.testing.assert_array_equal(ids, reference[name][0])
            np.testing.assert_array_equal(logprobs, reference[name][1])
    crowded.update(transformer.init(CONFIG, jax.random.key(9)), 1)
    computed.clear()
    ids, _ = group_turns(crowded, {0: groups[0]})[0]
    assert sum(computed) == 1 and not np.array_equal(ids, reference[0][0])


def group_turns(engine, prompts):
    """Two turns each; ids and log-probabilities by name, every session released."""
    found, ended = {name: ([], []) for name in prompts}, set()
    for name, ids in prompts.items():
        engine.submit(turn(name, ids, seed=(name,), limit=2 + name % 4))
    while engine.busy:
        for response in engine.step():
            name = response.session
            found[name][0].append(response.ids)
            found[name][1].append(response.logprobs)
            if name in ended:
                engine.release(name)
            else:
                ended.add(name)
                engine.submit(turn(name, prompt(name, 3), seed=(name, 1), limit=3))
    return {name: tuple(map(np.concatenate, both)) for name, both in found.items()}


def test_turns_begin_a_block_at_a_time_and_later_turns_first():
    """So the first trajectory ends while the last one has not begun."""
    engine = make_engine(slots=3 * in_process.CPU_BLOCK_ROWS)
    for session in range(3 * in_process.CPU_BLOCK_ROWS):
        engine.submit(turn(session, prompt(session), limit=1))
    first = [response.session for response in engine.step()]
    assert first == list(range(in_process.CPU_BLOCK_ROWS))
    engine.submit(turn(0, prompt(0), limit=1))
    second = {response.session for response in engine.step()}
    assert 0 in second and len(second) == in_process.CPU_BLOCK_ROWS
    rest = [response.session for response in engine.step()]
    rest += [response.session for response in engine.step()]
    assert sorted([*first[1:], *second, *rest]) == list(
        range(3 * in_process.CPU_BLOCK_ROWS)
    )
    assert not engine.busy


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampler_and_trainer_agree_on_logprobs(temperature):
    """huggingface/trl#4159: one side ignored the temperature."""
    engine = make_engine()
    for session in range(3):
        ids = prompt(session, 5 + session)
        engine.submit(turn(session, ids, temperature=temperature, limit=12))
    for session, response in finish(engine).items():
        start = 5 + session
        tokens = np.concatenate([prompt(session, start), response.ids])
        trained = surrogate_logprobs(CONFIG, PARAMS, tokens, temperature)[start:]
        np.testing.assert_allclose(response.logprobs, trained, rtol=0, atol=FLOAT32)


def test_turns_continue_the_cache_like_the_whole_sequence():
    # Observations of one token, of a bucket, and longer than the largest bucket.
    engine, known, masks = make_engine(), [], []
    for i, new in enumerate([prompt(0, 19), prompt(1, 1), prompt(2, 8), prompt(3, 0)]):
        engine.submit(turn("a", new, seed=(i,), limit=3))
        (response,) = finish(engine).values()
        known += [new, response.ids]
        masks += [np.full(len(new), np.nan), response.logprobs]
    sampled = np.concatenate(masks)
    trained = surrogate_logprobs(CONFIG, PARAMS, np.concatenate(known), 1.0)
    where = ~np.isnan(sampled)
    assert where.sum() == 12
    np.testing.assert_allclose(sampled[where], trained[where], rtol=0, atol=FLOAT32)


def test_new_parameters_leave_nothing_of_the_old():
    """NovaSky-AI/SkyRL#2246: a cache outlived the parameters that had filled it."""
    engine = make_engine()
    engine.submit(turn("a", prompt(0)))
    (before,) = finish(engine).values()
    with pytest.raises(ValueError, match="release"):
        engine.update(PARAMS, 1)
    engine.release("a")
    changed = transformer.init(CONFIG, jax.random.key(9))
    engine.update(changed, 1)
    # The learner donates its arrays; the sampler must have copied them.
    jax.tree.map(lambda x: x.delete(), changed)
    engine.submit(turn("a", prompt(0)))
    (after,) = finish(engine).values()
    assert (before.policy_version, after.policy_version) == (0, 1)
    fresh = make_engine(transformer.init(CONFIG, jax.random.key(9)))
    fresh.submit(turn("a", prompt(0)))
    (expected,) = finish(fresh).values()
    np.testing.assert_array_equal(after.logprobs, expected.logprobs)
    assert not np.array_equal(after.logprobs, before.logprobs)


def test_seeds_of_different_members_give_different_ids():
    engine = make_engine(slots=8)
    seeds = [(1,), (2,), (1, 0), (0, 1), (1, 2**32), (2**33, 1), (-1, 1), ()]
    for session, seed in enumerate(seeds):
        engine.submit(turn(session, prompt(0), seed, limit=20))
    ids = {tuple(response.ids) for response in finish(engine).values()}
    assert len(ids) == len(seeds)


def test_temperature_zero_takes_the_largest_logit():
    engine = make_engine()
    for session in range(2):
        engine.submit(turn(session, prompt(0), temperature=0.0))
    one, other = finish(engine).values()
    np.testing.assert_array_equal(one.ids, other.ids)
    tokens = np.concatenate([prompt(0), one.ids])
    hidden, _ = transformer.segment(CONFIG, PARAMS, tokens)
    head = transformer.head_weights(PARAMS)
    largest = jnp.argmax(transformer.logits(CONFIG, head, hidden), axis=-1)
    np.testing.assert_array_equal(one.ids, largest[5:-1])
    trained = surrogate_logprobs(CONFIG, PARAMS, tokens, 1.0)[6:]
    np.testing.assert_allclose(one.logprobs, trained, rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize("vocab", [7, 70])
def test_frequencies_follow_the_softmax(temperature, vocab):
    draws = 200_000
    logits = jax.random.normal(jax.random.key(1), (vocab,)) * 2
    uniform = (jnp.arange(draws) + 0.5) / draws  # no sampling noise: a grid
    draw_all = jax.jit(jax.vmap(draw, in_axes=(None, 0, None)))
    token, logprob = draw_all(logits, uniform, jnp.float32(temperature))
    share = np.bincount(token, minlength=vocab) / draws
    expected = jax.nn.softmax(logits / temperature)
    np.testing.assert_allclose(share, expected, rtol=0, atol=1.5 / draws + 1e-6)
    np.testing.assert_allclose(logprob, jnp.log(expected)[token], rtol=0, atol=FLOAT32)


def test_impossible_tokens_are_never_drawn():
    # Uniforms beside every edge of the distribution function, where running sums that
    # round land on the neighbour.
    rng = np.random.default_rng(0)
    draw_all = jax.jit(jax.vmap(draw, in_axes=(None, 0, None)))
    for _ in range(20):
        impossible = rng.random(70) < 0.7
        logits = np.where(impossible, -1e9, 2 * rng.normal(size=70)).astype(np.float32)
        share = np.exp(logits - logits.max(), dtype=float)
        edges = np.float32(np.cumsum(share) / np.sum(share))
        uniform = np.concatenate(
            [edges, np.nextafter(edges, 0), np.nextafter(edges, 1)]
        )
        token, logprob = draw_all(logits, np.minimum(uniform, 1 - 2.0**-23), 1.0)
        assert not np.any(impossible[token])
        assert np.all(np.isfinite(logprob))


def test_sampled_frequencies_follow_the_softmax():
    """The engine's own uniforms, one per seed and position."""
    seed = np.zeros((2000, 1 + 2 * generation.SEED_INTEGERS), np.uint32)
    seed[:, 0], seed[:, 1] = 1, np.arange(2000)
    uniform = np.asarray(generation.uniforms(seed, np.zeros(2000, np.int32), 5))
    assert uniform.shape == (5, 2000)
    assert len(np.unique(uniform)) > 9900
    counts, _ = np.histogram(uniform, bins=10, range=(0, 1))
    # Ten cells of 1000 expected; four standard deviations of a cell.
    assert np.max(np.abs(counts - 1000)) < 4 * np.sqrt(1000 * 0.9)
    correlation = np.corrcoef(uniform)
    assert np.max(np.abs(correlation - np.eye(5))) < 4 / np.sqrt(2000)


def test_a_stop_token_ends_the_turn_and_is_part_of_it():
    engine = make_engine()
    engine.submit(turn("a", prompt(0), limit=12))
    (free,) = finish(engine).values()
    assert not free.stopped and len(free.ids) == 12
    engine.release("a")
    for wanted in (free.ids[0], free.ids[5]):
        first = int(np.argmax(free.ids == wanted))
        engine.submit(turn("a", prompt(0), limit=12, stop_ids=(int(wanted),)))
        (stopped,) = finish(engine).values()
        assert stopped.stopped
        np.testing.assert_array_equal(stopped.ids, free.ids[: first + 1])
        engine.release("a")


def decode_once(turns, slots=20, steps=6):
    """Cache before and after one call from random contents; `turns` as slot: tokens."""
    rng = np.random.default_rng(0)
    shape = slots, CONFIG.kv_heads, CONTEXT, CONFIG.head_dim
    before = tuple(
        transformer.LayerCache(*rng.normal(size=(2, *shape)).astype(np.float32))
        for _ in range(CONFIG.layers)
    )
    rows = generation.Rows(
        token=np.ones(slots, np.int32),
        length=np.arange(slots, dtype=np.int32) + 3,
        remaining=np.array([turns.get(i, 0) for i in range(slots)], np.int32),
        temperature=np.ones(slots, np.float32),
        stop_ids=np.full((slots, generation.STOP_IDS), -1, np.int32),
        seed=np.zeros((slots, 1 + 2 * generation.SEED_INTEGERS), np.uint32),
    )
    params = generation.decode_params(MODEL, PARAMS)
    cache = jax.tree.map(lambda x: jnp.array(x, copy=True), before)
    call = generation.decode(MODEL, steps, 8, params, cache, rows)
    return before, rows.length, *call


@pytest.mark.parametrize("turns", [{}, {19: 2}, dict.fromkeys(range(2, 20, 2), 3)])
def test_a_call_touches_only_positions_from_a_turns_length_on(turns):
    before, lengths, after, _, logprobs = decode_once(turns)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        for slot, length in enumerate(lengths):
            kept, written = np.split(np.any(old != new, axis=(1, 3))[slot], [length])
            assert not np.any(kept)
            assert np.all(written[: turns.get(slot, 0)])
    for slot, tokens in turns.items():
        assert np.all(np.asarray(logprobs)[slot, :tokens] < 0)


def test_a_call_ends_with_its_last_turn():
    *_, logprobs = decode_once({3: 2, 17: 4})
    sampled = np.any(np.asarray(logprobs) != 0, axis=0)
    np.testing.assert_array_equal(sampled, [True] * 4 + [False] * 2)


def test_a_free_slot_is_refilled_in_the_next_step():
    engine = make_engine(slots=4)
    for session in range(6):
        engine.submit(turn(session, prompt(session), limit=4 if session == 2 else 8))
    (response,) = engine.step()
    assert response.session == 2
    # Its tool runs: the slot stays its own, and the fifth session waits.
    engine.step()
    engine.release(2)
    assert {r.session for r in engine.step()} == set()
    assert {r.session for r in engine.step()} == {4}
    engine.release(0)
    engine.release("unknown")
    assert set(finish(engine)) == {5}


def test_a_session_may_be_released_wherever_it_stands():
    engine = make_engine(slots=4)
    for session in range(6):
        engine.submit(turn(session, prompt(session), limit=8))
    engine.release(5)  # waiting
    engine.step()
    engine.release(1)  # half sampled
    assert set(finish(engine)) == {0, 2, 3, 4}
    for session in range(6):
        engine.release(session)
    assert not engine.busy
    engine.update(PARAMS, 1)


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"max_new_tokens": CONTEXT}, "context"),
        ({"max_new_tokens": 0}, "at least one"),
        ({"new_ids": np.zeros(0, np.int32)}, "at least one"),
        ({"new_ids": np.array([1, 50])}, "vocabulary"),
        ({"new_ids": np.array([-1, 5])}, "vocabulary"),
        ({"stop_ids": tuple(range(9))}, "stop ids"),
        ({"seed": tuple(range(9))}, "seed integers"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
    ],
)
def test_impossible_requests_are_refused(changes, match):
    engine = make_engine()
    request = turn("a", prompt(0))
    with pytest.raises(ValueError, match=match):
        engine.submit(dataclasses.replace(request, **changes))
    assert not engine.busy
    engine.update(PARAMS, 1)  # nothing was held


def test_a_turn_may_fill_the_context_and_no_more():
    engine = make_engine()
    engine.submit(turn("a", prompt(0), limit=CONTEXT - 6))
    (response,) = finish(engine).values()
    tokens = np.concatenate([prompt(0), response.ids])
    assert len(tokens) == CONTEXT
    trained = surrogate_logprobs(CONFIG, PARAMS, tokens, 1.0)[6:]
    np.testing.assert_allclose(response.logprobs, trained, rtol=0, atol=FLOAT32)
    with pytest.raises(ValueError, match="context"):
        engine.submit(turn("a", prompt(1, 0), limit=1))


def test_a_turn_may_not_overtake_another_of_its_session():
    engine = make_engine()
    engine.submit(turn("a", prompt(0)))
    with pytest.raises(ValueError, match="being answered"):
        engine.submit(turn("a", prompt(0)))


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"slots": 0}, "slots"),
        ({"prefill_buckets": (8, 4)}, "ascending"),
        ({"prefill_buckets": ()}, "ascending"),
        ({"steps_per_call": 0}, "steps_per_call"),
    ],
)
def test_impossible_engines_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        make_engine(**changes)


@pytest.mark.parametrize("make", [make_engine, make_group])
def test_nothing_is_left_to_compile_and_bits_do_not_tell(make):
    """Compiled later it would be on the deadline of a trajectory."""
    programs = generation.prefill, generation.copy, generation.decode
    plain, prepared = make(slots=6), make(slots=6)
    prepared.compile()
    compiled = [program._cache_size() for program in programs]
    first, second = (converse(engine, list(range(6))) for engine in (prepared, plain))
    assert [program._cache_size() for program in programs] == compiled
    for name in first:
        for mine, other in zip(first[name], second[name], strict=True):
            np.testing.assert_array_equal(mine, other)


def test_a_stop_text_ends_the_turn_with_the_token_that_completes_it():
    """As "</search>" is (PeterGriffinJin/Search-R1#26); ids are texts of their own."""

    def decode(ids):
        return "".join(f"<{token}>" for token in ids)

    def limited(texts, **settings):
        request = turn("a", prompt(0), limit=12)
        stops = StopTexts(texts, decode)
        return dataclasses.replace(request, stop_texts=stops, **settings)

    engine = make_engine()
    engine.submit(turn("a", prompt(0), limit=12))
    (free,) = finish(engine).values()
    engine.release("a")
    for start in (0, 2, 5, 9):
        engine.submit(limited((f"{free.ids[start]}><{free.ids[start + 1]}>", "none")))
        (stopped,) = finish(engine).values()
        pairs = list(itertools.pairwise(free.ids.tolist()))
        end = pairs.index((free.ids[start], free.ids[start + 1])) + 2
        assert stopped.stopped
        np.testing.assert_array_equal(stopped.ids, free.ids[:end])
        np.testing.assert_array_equal(stopped.logprobs, free.logprobs[:end])
        # What follows is as if nobody had sampled beyond it.
        engine.submit(turn("a", prompt(50), (7, 1)))
        (then,) = finish(engine).values()
        engine.release("a")
        engine.submit(turn("b", prompt(0), limit=end))
        finish(engine)
        engine.submit(turn("b", prompt(50), (7, 1)))
        (expected,) = finish(engine).values()
        engine.release("b")
        np.testing.assert_array_equal(then.ids, expected.ids)
        np.testing.assert_array_equal(then.logprobs, expected.logprobs)
    # A stop id before it comes first.
    first = int(free.ids[1])
    text = f"<{free.ids[6]}><{free.ids[7]}>"
    engine.submit(limited((text,), stop_ids=(first,)))
    (stopped,) = finish(engine).values()
    end = free.ids.tolist().index(first) + 1
    assert stopped.stopped and len(stopped.ids) == end


def test_a_turn_that_pauses_samples_what_it_would_have():
    """Nothing new stands between its parts, as behind a thought that ended in time."""
    engine = make_engine()
    engine.submit(turn("a", prompt(0), limit=12))
    (free,) = finish(engine).values()
    engine.submit(turn("b", prompt(0), limit=5))
    (first,) = finish(engine).values()
    engine.submit(turn("b", prompt(0)[:0], limit=7))
    (second,) = finish(engine).values()
    found = np.concatenate([first.ids, second.ids])
    np.testing.assert_array_equal(found, free.ids)
