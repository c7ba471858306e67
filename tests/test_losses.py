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
