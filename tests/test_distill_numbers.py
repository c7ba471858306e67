"""Distillation on tokens that the student sampled: reported numbers, expectations."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_stream import EXACT, every_way

from thundersync_jax import Surrogate
from thundersync_jax.ops import distill, logprobs, losses

pytestmark = pytest.mark.usefixtures("quick_programs")

FLOAT32 = 2e-6  # a few roundings at magnitude 1
POLICY, TEACHER = np.log(np.float32([0.7, 0.3])), np.log(np.float32([0.5, 0.5]))
STUDENT_LOGITS, TEACHER_LOGITS = np.float32([1.0, 0.0]), np.float32([2.0, 0.0])
ONE, FIRST = np.ones(1, np.float32), np.zeros(1, np.int32)


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.mark.parametrize("temperature, expected", [(1.0, 0.186334), (0.7, 0.158986)])
def test_both_sides_are_at_one_temperature(temperature, expected):
    """A teacher at 1 beside a student at .7 gives .087902 (THUDM/slime#2085,
    radixark/miles#1345, verl-project/verl#7769)."""
    token = [
        logprobs.target_logprobs(jnp.asarray(x)[None], FIRST, temperature)
        for x in (STUDENT_LOGITS, TEACHER_LOGITS)
    ]
    found = distill.sampled_reverse_kl(*token, ONE)
    np.testing.assert_allclose(-found, expected, atol=EXACT)
    tables = [
        distill.logprobs(x, 2, temperature) for x in (STUDENT_LOGITS, TEACHER_LOGITS)
    ]
    np.testing.assert_allclose(tables[1][0] - tables[0][0], expected, atol=EXACT)
    one_id = [
        distill.top_k_logprobs(x, FIRST, 2, temperature)
        for x in (STUDENT_LOGITS, TEACHER_LOGITS)
    ]
    np.testing.assert_allclose(one_id, tables, atol=EXACT)
    known = distill.with_tail(one_id[1][:-1])
    np.testing.assert_allclose(known, tables[1], atol=EXACT)


def test_greedy_decoding_counts_as_temperature_one():
    found = distill.logprobs(STUDENT_LOGITS, 2, 0.0)
    np.testing.assert_array_equal(found, distill.logprobs(STUDENT_LOGITS, 2, 1.0))


def test_the_expected_gradient_on_sampled_tokens_is_that_of_the_whole_kl():
    """Two tokens drawn one after the other, all sequences with their probabilities."""
    student, teacher = 2 * jax.random.normal(jax.random.key(3), (2, 2, 4))
    weights = np.float32([0.5, 2.0])

    def sampled(logits, tokens):
        pair = [logprobs.target_logprobs(x, tokens, 1.0) for x in (logits, teacher)]
        return distill.sampled_reverse_kl(*pair, weights)

    p = np.asarray(jax.nn.softmax(student))
    value, gradient = 0.0, np.zeros_like(p)
    for tokens in itertools.product(range(4), repeat=2):
        drawn = p[0, tokens[0]] * p[1, tokens[1]]
        one = jax.value_and_grad(sampled)(student, np.array(tokens, np.int32))
        value, gradient = value + drawn * one[0], gradient + drawn * one[1]

    def whole(logits):
        pair = (jax.nn.log_softmax(x) for x in (logits, teacher))
        return losses.weighted_sum(jax.vmap(distill.reverse_kl)(*pair), weights)

    expected = jax.value_and_grad(whole)(student)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], atol=FLOAT32)


def test_sampled_value_and_gradient_are_those_of_the_equation():
    logprob_t, teacher_t = -jax.random.exponential(jax.random.key(4), (2, 6))
    weight_t = np.float32([0.5, 0.0, 1.0, 2.0, 0.0, 1.0])
    found = jax.value_and_grad(distill.sampled_reverse_kl)(
        logprob_t, teacher_t, weight_t
    )

    def equation(logprob_t):
        held_t = jax.lax.stop_gradient(logprob_t)
        ratio_t = jnp.exp(logprob_t - held_t)
        return jnp.sum(weight_t * ratio_t * (held_t - teacher_t))

    expected = jax.value_and_grad(equation)(logprob_t)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=FLOAT32), found, expected
    )


@functools.cache  # a program belongs to its function
def distilled(kind, weight):
    """A surrogate of one position: of all ids, of the drawn one, or as an advantage."""

    def surrogate(params, sample):
        logprob_v = jax.nn.log_softmax(params["x"] + POLICY)
        # One-hot times the probability that the token is drawn with.
        drawn_v = weight * sample["s"]
        if kind == "sampled":
            found = distill.sampled_reverse_kl(logprob_v, TEACHER, drawn_v)
        else:
            kl = distill.reverse_kl(logprob_v, TEACHER)
            found = losses.weighted_sum(kl[None], jnp.sum(drawn_v)[None])
        scores = losses.policy_gradient(logprob_v, sample["s"])
        return Surrogate(scores, additive=found)

    return surrogate


@pytest.mark.parametrize("kind", ["sampled", "whole"])
def test_distillation_adds_its_weight_times_the_gradient_of_the_kl(kind):
    """0 where a KL of the whole distribution was every token's advantage
    (radixark/miles#2362, #2352) or had no gradient (NovaSky-AI/SkyRL#1353), 0 or .2
    where an estimator was derived as it is (huggingface/trl#4967, #6503,
    NVIDIA-NeMo/RL#2506). Both tokens are told, each with its probability."""
    tokens = {"a": [[0.7, 0.0], [0.0, 0.3]]}
    slopes = np.eye(2) - [0.7, 0.3]
    without = -0.5 * 0.7 * slopes[0] + 0.5 * 0.3 * slopes[1]
    for weight in (0.0, 1.0):
        expected = without + weight * np.array([0.177933, -0.177933])
        for gradient, _ in every_way(
            {"a": [1, 0]}, tokens, params=2, surrogate=distilled(kind, weight)
        ):
            np.testing.assert_allclose(gradient, expected, atol=EXACT)


def test_a_token_s_credit_from_the_teacher_is_detached():
    """.134362 where the gradient also ran through the credit (THUDM/slime#1449,
    meta-pytorch/torchforge#527)."""

    def loss(logits):
        pair = (
            logprobs.target_logprobs(jnp.asarray(x)[None], FIRST, 1.0)
            for x in (logits, TEACHER_LOGITS)
        )
        return distill.sampled_reverse_kl(*pair, ONE)

    gradient = jax.grad(loss)(jnp.asarray(STUDENT_LOGITS))
    np.testing.assert_allclose(-gradient, [0.050113, -0.050113], atol=EXACT)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_sampled_tokens_without_weight_reach_neither_value_nor_gradient(bad):
    weight_t = jnp.float32([0.5, 0.0, 0.0])
    logprob_t = jnp.float32([-1.0, bad, -1.0])
    teacher_t = jnp.float32([-2.0, -1.0, bad])
    value, gradient = jax.value_and_grad(distill.sampled_reverse_kl)(
        logprob_t, teacher_t, weight_t
    )
    assert value == 0.5
    np.testing.assert_array_equal(gradient, [0.5, 0.0, 0.0])
