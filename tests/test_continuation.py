"""A sequence in pieces: the numbers and gradients of the whole, and no look ahead."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from turns_of_models import MODEL, VOCAB, difference, init

from thundersync_jax.models import base
from thundersync_jax.models.transformer import Transformer
from thundersync_jax.ops.logprobs import target_logprobs
from thundersync_jax.stream import segments
from thundersync_jax.stream.segments import Segments, State
from thundersync_jax.stream.surrogate import Surrogate

pytestmark = pytest.mark.usefixtures("quick_programs")
EXACT = 1e-12  # rounding of float64 sums of some hundred terms
# The head is no transposed embedding: what a token's own row gets, it gets as input.
UNTIED = dataclasses.replace(MODEL, tied_embeddings=False)
POLICY = Transformer(UNTIED)
SLOTS, PIECE = 14, 6


@pytest.fixture(scope="module", autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def params(wide):
    return init(UNTIED)


def function(logits, operands):
    return target_logprobs(logits, operands["tokens"], 0.7)


def empty(slots=SLOTS):
    return State(*POLICY.empty(slots))


@jax.jit
def piece(params, state, sample):
    given = sample["tokens"], sample["start"], sample["length"]
    operands = {"tokens": sample["tokens"]}
    found, *left = base.piece(POLICY, params, state, *given, operands, function)
    return found, State(*left)


def additive(params, state, sample):
    found, own = piece(params, state, sample)
    return Surrogate(None, jnp.sum(sample["weights"] * found)), own


PIECES = Segments(additive, empty, SLOTS, POLICY.token_axis)


def sample(tokens, start, filler=0, length=None):
    """Tokens as a piece, padded with a token."""
    real = len(tokens)
    padded = np.full(PIECE, filler, np.int32)
    padded[:real] = tokens
    weights = np.zeros(PIECE)
    weights[:real] = 1.0 + np.arange(real)
    places = {"start": np.int32(start), "length": np.int32(length or real)}
    return {"tokens": padded, "weights": weights} | places


def filled(state, start, seed):
    """The state with something else in the slots from `start` on."""
    rng = np.random.default_rng(seed)

    def fill(x):
        other = rng.normal(size=x.shape).astype(x.dtype)
        return jnp.where(jnp.arange(SLOTS)[None, :, None, None] < start, x, other)

    return state._replace(kept=jax.tree.map(fill, state.kept))


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


TOKENS = np.random.default_rng(0).permutation(np.arange(11) % VOCAB).astype(np.int32)


@pytest.fixture(scope="module")
def first(params):
    """The state behind the first five tokens."""
    state, pulled = segments.opened(PIECES, None)
    found = segments.turn(PIECES, params, None, state, pulled, sample(TOKENS[:5], 0))
    return found.state


@functools.cache
def whole_gradient():
    def loss(params, tokens, weights):
        found = base.whole(POLICY, params, tokens, {"tokens": tokens}, function)
        return jnp.sum(weights * found), found

    return jax.jit(jax.grad(loss, has_aux=True))


def test_pieces_give_the_numbers_of_the_whole(params):
    _, expected = whole_gradient()(params, TOKENS, np.ones(11))
    state, found = empty(), []
    kept, _ = segments.opened(PIECES, None)
    for start, end in ((0, 3), (3, 9), (9, 10), (10, 11)):
        numbers, own = piece(params, kept, sample(TOKENS[start:end], start))
        found += list(numbers[: end - start])
        where = start + np.arange(end - start)
        rows = jax.tree.map(lambda x, n=end - start: x[:, :n], own.kept)
        state = jax.tree.map(lambda x, y, i=where: x.at[:, i].set(y), kept.kept, rows)
        kept = State(state, own.last)
    np.testing.assert_allclose(found[1:], expected[1:], rtol=EXACT)


def test_padding_and_leftovers_change_no_bit(params, first):
    """Of a piece's numbers, gradient and state, and of the cotangents it passes on."""
    pulled = segments.opened(PIECES, None)[1]
    some = jax.tree.map(lambda x: x.at[:, :9].set(0.5), pulled)
    of_last = jnp.ones_like(first.last)
    seen = []
    for seed, filler in enumerate((0, 3, VOCAB - 1)):
        state, given = filled(first, 5, seed), sample(TOKENS[5:9], 5, filler)
        found = segments.turn(PIECES, params, None, state, pulled, given)
        known = jax.tree.map(lambda x: x[:, :9], found.state.kept)
        again = segments.replay(
            PIECES, params, None, state, some, of_last, of_last, given
        )
        seen.append(bits([found._replace(state=None), known, found.state.last, again]))
    assert seen[0] == seen[1] == seen[2]


def test_nothing_is_pulled_of_slots_from_its_own_start_on(params, first):
    """Exactly nothing, whatever they hold; and something of every one before it."""
    state, zeros = filled(first, 5, 1), segments.opened(PIECES, None)[1]
    given = sample(TOKENS[5:9], 5)
    found = segments.turn(PIECES, params, None, state, zeros, given)
    of_last = jnp.ones_like(first.last)
    some = jax.tree.map(lambda x: x.at[:, 5:].set(0.5), zeros)
    again = segments.replay(PIECES, params, None, state, some, of_last, of_last, given)
    for pulled in (found.pulled, again.pulled):
        for x in pulled:
            assert not np.any(x[:, 5:])
            assert np.all(np.any(np.asarray(x[:, :5]) != 0, axis=(0, 2, 3)))
    assert np.all(np.asarray(found.of_last) != 0)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_loss_has_no_gradient_to_tokens_behind_it(params, first, count):
    """Each token has a row of the embedding; those of later ones get exactly nothing.

    Nor does the last token that is predicted: it is seen by those behind it alone.
    """
    given = sample(np.arange(PIECE, dtype=np.int32), 5)
    given["weights"] = np.where(np.arange(PIECE) < count, 1.0, 0.0)
    found = segments.turn(
        PIECES, params, None, first, segments.opened(PIECES, None)[1], given
    )
    rows = np.any(np.asarray(found.gradient["embed"]) != 0, axis=1)
    assert list(np.flatnonzero(rows)) == list(range(count - 1))


def test_replay_pushes_no_more_than_its_own_part_through(params, first):
    """Cotangents of tokens behind a piece are not of its doing."""
    zeros = segments.opened(PIECES, None)[1]
    given, last = sample(TOKENS[5:9], 5), jnp.zeros_like(first.last)
    behind = jax.tree.map(lambda x: x.at[:, 9:].set(1.0), zeros)
    # Padding lies over the first slots behind it, until the next piece is written.
    exact = given | {"tokens": given["tokens"][:4], "weights": given["weights"][:4]}
    found = segments.replay(PIECES, params, None, first, behind, last, last, exact)
    assert not any(np.any(x) for x in jax.tree.leaves((found.gradient, found.pulled)))


def test_padding_that_finds_no_room_is_dropped(params):
    """A piece whose padding ends beyond the last slot."""
    state, pulled = segments.opened(PIECES, None)
    gradients, turns, weights = [], [], np.zeros(14)
    tokens = np.arange(14, dtype=np.int32) % VOCAB
    for start, end in ((0, 6), (6, 10), (10, 13), (13, 14)):
        given = sample(tokens[start:end], start)
        weights[start:end] = given["weights"][: end - start]
        before = state.last
        found = segments.turn(PIECES, params, None, state, pulled, given)
        turns.append((given, before, found.of_last))
        state, pulled = found.state, found.pulled
        gradients.append(found.gradient)
    of_last = turns[-1][2]
    for given, before, own in turns[-2::-1]:
        at = State(state.kept, before)
        found = segments.replay(PIECES, params, None, at, pulled, of_last, own, given)
        pulled, of_last = found.pulled, found.of_last
        gradients.append(found.gradient)
    weights[0] = 0.0
    expected, _ = whole_gradient()(params, tokens, weights)
    # Token 0 is predicted by nothing; what a piece makes of it is taken off.
    given = sample(tokens[:6], 0)
    given["weights"] = np.where(np.arange(PIECE) == 0, 1.0, 0.0)
    first = segments.turn(PIECES, params, None, *segments.opened(PIECES, None), given)
    total = jax.tree.map(lambda *xs: sum(xs[1:], -xs[0]), first.gradient, *gradients)
    assert difference(total, expected) < EXACT
