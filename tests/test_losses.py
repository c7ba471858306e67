"""Token weights and the policy-gradient surrogate, on numbers worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.ops import losses


@pytest.mark.parametrize(
    "aggregation, constant, expected",
    [
        ("sequence_mean", None, [0, 0.5, 0, 0.5]),
        ("token_mean", None, [0, 1, 0, 1]),
        ("constant", 8, [0, 0.125, 0, 0.125]),
    ],
)
def test_weights_follow_the_aggregation(aggregation, constant, expected):
    mask = np.array([False, True, False, True])
    got = losses.token_weights(mask, aggregation, constant)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.float32(expected))


def test_no_trained_token_has_no_weight():
    got = losses.token_weights(np.zeros(3, bool), "sequence_mean")
    np.testing.assert_array_equal(got, np.zeros(3))


@pytest.mark.parametrize(
    "aggregation, constant, match",
    [
        ("mean", None, "unknown"),
        ("constant", None, "positive"),
        ("constant", 0, "positive"),
    ],
)
def test_impossible_aggregations_are_refused(aggregation, constant, match):
    with pytest.raises(ValueError, match=match):
        losses.token_weights(np.ones(3, bool), aggregation, constant)


def test_tool_output_is_never_trained():
    """huggingface/trl#4975: 4 model tokens of loss 1, 6 tool tokens of loss 5: 1.0."""
    mask = np.array([True, True] + [False] * 6 + [True, True])
    logprob = jnp.where(mask, -1.0, -5.0)
    weights = losses.token_weights(mask, "sequence_mean")
    value, gradient = jax.value_and_grad(losses.policy_gradient)(logprob, weights)
    np.testing.assert_allclose(value, 1.0, rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(gradient) != 0, mask)


@pytest.mark.parametrize(
    "ids, length",
    [
        ([5, 6, 7, 0, 0, 0], 3),  # no end token; padding follows
        ([5, 6, 2, 2, 2], 3),  # the end token is the padding's id
    ],
)
def test_trained_tokens_follow_position_not_value(ids, length):
    """verl-project/verl#3805 and huggingface/trl#6357: masks guessed from token ids."""
    mask = np.arange(len(ids)) < length
    assert np.count_nonzero(losses.token_weights(mask, "token_mean")) == length


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_masked_positions_reach_neither_value_nor_gradient(bad):
    """NovaSky-AI/SkyRL#1633: 0 x NaN at a masked position reached the total."""
    logprob, weights = jnp.array([-1.0, bad]), jnp.array([1.0, 0.0])
    value, gradient = jax.value_and_grad(losses.policy_gradient)(logprob, weights)
    assert value == 1.0
    np.testing.assert_array_equal(gradient, [-1.0, 0.0])


def test_strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        got = losses.policy_gradient(jnp.ones(2), jnp.ones(2, jnp.bfloat16))
    assert got.dtype == jnp.float32


def expected_gradient(logits, loss):
    """Gradient of E[loss(log p_a, a)] with the outcomes' probabilities held fixed.

    Every outcome is enumerated and weighed by its probability, as sampling would.
    """
    logits = jnp.asarray(logits)

    def total(x):
        logprobs = jax.nn.log_softmax(x)
        shares = jax.nn.softmax(logits)
        return sum(shares[a] * loss(logprobs[a], a) for a in range(len(logits)))

    return jax.grad(total)(logits)


def kl(logits, reference):
    logprobs = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(logprobs) * (logprobs - reference))


POLICY = np.log([0.7, 0.3])
REFERENCE = np.log([0.5, 0.5])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_a_kl_is_that_of_the_kl(estimator):
    """huggingface/trl#4967, #6503, NVIDIA-NeMo/RL#2506, NovaSky-AI/SkyRL#1353.

    Differentiated as it is, k1 gives 0 and k3 .2; computed without gradient, 0.
    """

    def loss(logprob, token):
        reference = jnp.float32(REFERENCE[token])
        return losses.kl_penalty(logprob[None], reference[None], jnp.ones(1), estimator)

    gradient = expected_gradient(POLICY, loss)
    np.testing.assert_allclose(gradient, [0.177933, -0.177933], atol=1e-6)
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        logits, reference = rng.normal(size=(2, 7))
        reference = np.asarray(jax.nn.log_softmax(reference))

        def loss(logprob, token):
            at = reference[token : token + 1]
            return losses.kl_penalty(logprob[None], at, jnp.ones(1), estimator)

        exact = jax.grad(kl)(jnp.asarray(logits), reference)
        np.testing.assert_allclose(expected_gradient(logits, loss), exact, rtol=1e-12)


def test_the_value_of_a_kl_is_its_estimators():
    d = np.array([0.3, -1.2, 0.0])
    values = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}
    weights = np.array([0.5, 0.25, 0.25])
    for estimator, value in values.items():
        got = losses.kl_penalty(d - 2.0, np.full(3, -2.0), weights, estimator)
        np.testing.assert_allclose(got, np.sum(weights * value), rtol=1e-6)
    share, d = np.exp(POLICY), POLICY - REFERENCE
    for estimator in ("k1", "k3"):  # these two have the KL itself as their expectation
        got = losses.kl_penalty(POLICY, REFERENCE, share, estimator)
        np.testing.assert_allclose(got, np.sum(share * d), rtol=1e-6)


def test_k3_of_small_differences_keeps_its_digits():
    """exp(-d) - 1 + d cancels in float32: d = 1e-4 would give 0 or 1e-7."""
    d = jnp.float32(1e-3)
    got = losses.kl_penalty(d[None], jnp.zeros(1), jnp.ones(1), "k3")
    np.testing.assert_allclose(got, 1e-6 / 2, rtol=1e-3)


def test_an_unknown_kl_is_refused():
    with pytest.raises(ValueError, match="choose k1, k2, k3"):
        losses.kl_penalty(jnp.ones(1), jnp.ones(1), jnp.ones(1), "k4")


def test_the_advantage_is_detached():
    """THUDM/slime#1449 and meta-pytorch/torchforge#527: .134362 instead of .050113."""
    teacher = jax.nn.log_softmax(jnp.array([2.0, 0.0]))

    def objective(logits):
        logprob_t = jax.nn.log_softmax(logits)[:1]
        v_t = teacher[:1] - logprob_t
        _, additive = losses.turn_credit(logprob_t, jnp.ones(1), jnp.zeros(1), v_t)
        return -additive, v_t

    gradient, v_t = jax.grad(objective, has_aux=True)(jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(v_t, [0.186334], atol=1e-6)
    np.testing.assert_allclose(gradient[0], 0.050113, atol=1e-6)


def test_turn_credit_is_affine_in_the_advantage():
    """Both parts together are the loss with credit A u + v written out."""
    rng = np.random.default_rng(2)
    logprob, u, v = rng.normal(size=(3, 6)).astype(np.float32)
    weights = np.float32([0, 0.5, 0.5, 0, 0.5, 0.5])
    for advantage in (-1.5, 0.0, 2.0):

        def loss(logprob, advantage=advantage):
            weighted, additive = losses.turn_credit(logprob, weights, u, v)
            return advantage * weighted + additive

        def written_out(logprob, advantage=advantage):
            return -jnp.sum(weights * (advantage * u + v) * logprob)

        value, gradient = jax.value_and_grad(loss)(logprob)
        expected, expected_gradient = jax.value_and_grad(written_out)(logprob)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5)


def test_credit_of_one_and_zero_is_the_plain_surrogate():
    logprob, weights = jnp.array([-1.0, -2.0]), jnp.array([0.5, 0.25])
    parts = losses.turn_credit(logprob, weights, jnp.ones(2), jnp.zeros(2))
    assert parts == (losses.policy_gradient(logprob, weights), 0.0)


def test_entropy_is_raised_where_it_is_weighed():
    entropy, weights = jnp.array([0.5, 2.0, jnp.nan]), jnp.array([1.0, 0.5, 0.0])
    value, gradient = jax.value_and_grad(losses.entropy_bonus)(entropy, weights)
    assert value == -1.5
    np.testing.assert_array_equal(gradient, [-1.0, -0.5, 0.0])


def test_importance_weights_are_capped_ratios():
    learner = jnp.log(jnp.array([0.5, 0.5, 0.1, 0.9]))
    sampler = jnp.log(jnp.array([0.25, 0.05, 0.2, 0.9]))
    trained = np.array([True, True, True, False])
    got = losses.importance_weights(learner, sampler, trained, 3.0)
    np.testing.assert_allclose(got, [2.0, 3.0, 0.5, 0.0], rtol=1e-6)
    far = losses.importance_weights(
        jnp.zeros(1), jnp.full(1, -200.0), jnp.ones(1, bool), 2.0
    )
    assert far == 2.0  # exp(200) is beyond float32


def test_importance_weights_are_detached():
    """Their own gradient would double that of the policy at ratio 1."""
    sampler = jnp.array([-1.0, -2.0])

    def loss(logprob):
        trained = jnp.ones(2, bool)
        ratio = losses.importance_weights(logprob, sampler, trained, 2.0)
        return losses.policy_gradient(logprob, ratio)

    np.testing.assert_allclose(jax.grad(loss)(sampler), [-1.0, -1.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nothing_at_a_masked_position_reaches_any_term(bad):
    """NovaSky-AI/SkyRL#1633 and jax-ml/jax#17070, in every argument per token."""
    weights, trained = jnp.array([1.0, 0.0]), jnp.array([True, False])
    good, hurt = jnp.array([-1.0, -0.5]), jnp.array([-1.0, bad])

    def terms(logprob, other, extra):
        ratio = losses.importance_weights(logprob, other, trained, 2.0)
        weighted, additive = losses.turn_credit(logprob, weights * ratio, extra, extra)
        kls = [
            losses.kl_penalty(logprob, other, weights, k) for k in ("k1", "k2", "k3")
        ]
        measured = losses.mismatch(logprob, other, trained)
        bonus = losses.entropy_bonus(extra, weights)
        return weighted + additive + sum(kls) + bonus + sum(measured.values())

    value_and_grad = jax.jit(jax.value_and_grad(terms, argnums=(0, 1, 2)))
    expected = value_and_grad(good, good, good)
    found = value_and_grad(hurt, hurt, hurt)
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_bad_number_at_a_trained_position_is_not_hidden():
    """It must end the step with the trajectory's name, not count as 0."""
    bad, weights = jnp.array([jnp.nan]), jnp.ones(1)
    assert np.isnan(losses.policy_gradient(bad, weights))
    assert np.isnan(losses.kl_penalty(jnp.zeros(1), bad, weights, "k3"))
    assert np.isnan(losses.importance_weights(bad, weights, jnp.ones(1, bool), 2.0))


def test_strict_dtypes_of_every_term():
    half = jnp.ones(2, jnp.bfloat16)
    trained = jnp.ones(2, bool)
    with jax.numpy_dtype_promotion("strict"):
        one = jnp.ones(2)
        got = [
            *losses.turn_credit(one, half, one, one),
            losses.kl_penalty(one, one, half, "k3"),
            losses.entropy_bonus(one, half),
            losses.kl_penalty(one, half, one, "k2"),
            losses.importance_weights(one, half, trained, 2.0),
            *losses.mismatch(one, half, trained).values(),
        ]
    assert {x.dtype for x in got} == {jnp.dtype("float32")}


def test_a_reference_that_shares_parameters_receives_no_gradient():
    def loss(x):
        return losses.kl_penalty(x, 2 * x, jnp.ones(1), "k3")

    np.testing.assert_allclose(jax.grad(loss)(jnp.array([-1.0])), [1.0])
