"""Entropies come with the log-probabilities, from one projection, in chunks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from thundersync_jax.config import ModelConfig
from thundersync_jax.models import base, transformer
from thundersync_jax.ops import logprobs

pytestmark = pytest.mark.usefixtures("quick_programs")

# A few roundings of float32 at magnitude 1; of float64, after a difference quotient.
FLOAT32 = 1e-5
DIFFERENCES = 1e-7

SMALL = ModelConfig(vocab_size=37, width=16, layers=2, heads=2, kv_heads=1, head_dim=8)


def both_in_float64(logits, targets, temperature):
    """The definitions, in numpy."""
    x = np.asarray(logits, np.float64) / temperature
    table = x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))
    entropies = -np.sum(np.exp(table) * table, axis=-1)
    return np.take_along_axis(table, targets[:, None], axis=-1)[:, 0], entropies


def draw(tokens=7, vocab=11, scale=3.0):
    rng = np.random.default_rng(4)
    logits = scale * rng.normal(size=(tokens, vocab))
    return logits, rng.integers(vocab, size=tokens, dtype=np.int32), rng


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_both_equal_their_definitions(temperature):
    logits, targets, _ = draw()
    expected = both_in_float64(logits, targets, temperature)
    found = logprobs.logprobs_and_entropies(
        logits.astype(np.float32), targets, temperature
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=FLOAT32, atol=FLOAT32)


def test_limits_of_the_entropy():
    """Uniform: log V. One certain token: 0. A token of probability 0 adds nothing."""

    def entropy(logits):
        _, found = logprobs.logprobs_and_entropies(jnp.array(logits), jnp.int32(0), 1.0)
        return float(found)

    np.testing.assert_allclose(entropy([5.0] * 8), np.log(8), rtol=1e-6)
    assert entropy([100.0, 0.0, 0.0]) == 0.0
    np.testing.assert_allclose(entropy([0.0, 0.0, -np.inf]), np.log(2), rtol=1e-6)

    def total(logits):
        return sum(logprobs.logprobs_and_entropies(logits, jnp.int32(0), 1.0))

    gradient = jax.grad(total)(jnp.array([0.0, 0.0, -np.inf]))
    np.testing.assert_allclose(gradient, [0.5, -0.5, 0.0], atol=1e-6)


def test_the_log_probabilities_are_those_of_the_function_without_entropies():
    logits, targets, _ = draw()
    logits = jnp.float32(logits)
    alone = logprobs.target_logprobs(logits, targets, 0.7)
    found, _ = logprobs.logprobs_and_entropies(logits, targets, 0.7)
    np.testing.assert_array_equal(found, alone)

    def first(logits):
        return jnp.sum(logprobs.logprobs_and_entropies(logits, targets, 0.7)[0] ** 2)

    def only(logits):
        return jnp.sum(logprobs.target_logprobs(logits, targets, 0.7) ** 2)

    np.testing.assert_allclose(
        jax.grad(first)(logits), jax.grad(only)(logits), rtol=FLOAT32, atol=1e-7
    )


def test_gradients_equal_finite_differences():
    """Of an arbitrary function of both outputs, at a temperature, in float64."""
    logits, targets, rng = draw()
    mixed = rng.normal(size=(2, len(targets)))

    def loss(pair):
        return np.sum(mixed[0] * np.sin(pair[0])) + np.sum(mixed[1] * pair[1] ** 2)

    with jax.enable_x64(True):

        def traced(logits):
            found = logprobs.logprobs_and_entropies(logits, targets, 0.7)
            return jnp.sum(mixed[0] * jnp.sin(found[0])) + jnp.sum(
                mixed[1] * found[1] ** 2
            )

        gradient = np.asarray(jax.grad(traced)(jnp.asarray(logits)))
    step = 1e-6
    for index in np.ndindex(logits.shape):
        moved = np.zeros_like(logits)
        moved[index] = step
        above = loss(both_in_float64(logits + moved, targets, 0.7))
        below = loss(both_in_float64(logits - moved, targets, 0.7))
        slope = (above - below) / (2 * step)
        np.testing.assert_allclose(gradient[index], slope, rtol=1e-6, atol=DIFFERENCES)


def logprobs_and_entropies(config, params, tokens, temperature):
    def function(logits, targets):
        return logprobs.logprobs_and_entropies(logits, targets, temperature)

    model = transformer.Transformer(config)
    return base.whole(model, params, tokens, tokens, function)


def random_params(seed=0):
    return transformer.init(SMALL, jax.random.key(seed))


def test_the_model_speaks_of_the_distribution_each_token_was_drawn_from():
    """Against the whole table of logits; entry 0, which nothing predicts, is 0."""
    params = random_params()
    tokens = np.random.default_rng(1).integers(37, size=12, dtype=np.int32)
    function = jax.jit(logprobs_and_entropies, static_argnums=0)
    found, entropies = function(SMALL, params, tokens, 0.7)
    hidden, _ = transformer.segment(SMALL, params, tokens)
    logits = transformer.logits(SMALL, transformer.head_weights(params), hidden)
    expected = both_in_float64(logits[:-1], tokens[1:], 0.7)
    np.testing.assert_allclose(found[1:], expected[0], rtol=FLOAT32, atol=FLOAT32)
    np.testing.assert_allclose(entropies[1:], expected[1], rtol=FLOAT32, atol=FLOAT32)
    assert found[0] == entropies[0] == 0
    alone = tiny_models.logprobs(SMALL, params, tokens, 0.7)
    np.testing.assert_allclose(found, alone, rtol=FLOAT32, atol=FLOAT32)


def test_chunks_do_not_change_entropies_or_their_gradients():
    params = random_params()
    tokens = np.random.default_rng(1).integers(37, size=13, dtype=np.int32)

    def value_and_gradient(chunk):
        config = dataclasses.replace(SMALL, logprob_chunk_tokens=chunk)

        def loss(params):
            pair = logprobs_and_entropies(config, params, tokens, 0.7)
            return jnp.sum(pair[0] * jnp.arange(13)) + jnp.sum(pair[1] ** 2)

        return jax.jit(jax.value_and_grad(loss))(params)

    value, gradient = value_and_gradient(64)
    for chunk in (1, 4):
        got, chunk_gradient = value_and_gradient(chunk)
        np.testing.assert_allclose(got, value, rtol=FLOAT32)
        for one, other in zip(
            jax.tree.leaves(chunk_gradient), jax.tree.leaves(gradient), strict=True
        ):
            atol = FLOAT32 * np.max(np.abs(other))
            np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def compiled(function, tokens, vocab=32_000):
    """A head of width 8 and its compiled loss, log-probabilities or both."""

    def loss(params, hidden, targets):
        head = params["embed"]
        found = logprobs.chunked(
            lambda logits, targets: function(logits, targets, 1.0),
            hidden,
            targets,
            lambda hidden: hidden @ head.T,
            512,
        )
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(found))

    shapes = (
        {"embed": jax.ShapeDtypeStruct((vocab, 8), jnp.float32)},
        jax.ShapeDtypeStruct((tokens, 8), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()


def test_logits_never_exist_for_all_tokens_with_entropies_too():
    """NVIDIA-NeMo/RL#2882: the head held T x V floats."""
    function = logprobs.logprobs_and_entropies
    chunk_bytes = 512 * 32_000 * 4
    short, long = (
        compiled(function, tokens).memory_analysis().temp_size_in_bytes
        for tokens in (4096, 8192)
    )
    assert short < 3 * chunk_bytes
    assert long - short < 10e6  # all logits of the added tokens would be 524 MB


def test_entropies_project_to_the_vocabulary_no_more_often():
    """One product forward, one recomputed, two backward, with entropies or without."""

    def products(function):
        return compiled(function, 1024).as_text().count(" dot(")

    both = products(logprobs.logprobs_and_entropies)
    assert both == products(logprobs.target_logprobs) > 0
