"""How far sampler and learner are from each other, in sums and percentiles."""

import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.ops import losses
from thundersync_jax.ops.losses import EDGES, percentile

WITHIN = 1.8  # of a percentile: the distance of two edges


def measured(ratios, cap=2.0):
    """Sums of tokens with these log-ratios, one sample for each half of them."""
    halves = np.array_split(np.asarray(ratios, np.float32), 2)
    parts = [
        losses.mismatch(h, np.zeros_like(h), np.ones(len(h), bool), cap) for h in halves
    ]
    sums = {name: float(sum(part[name] for part in parts)) for name in parts[0]}
    largest = max(float(part["max_abs_log_ratio"]) for part in parts)
    return sums | {"max_abs_log_ratio": largest}


def test_mismatch_measures_both_sides():
    learner = np.array([-1.0, -2.0, -0.5, -9.0], np.float32)
    sampler = np.array([-1.5, -1.0, -0.5, -1.0], np.float32)
    trained = np.array([True, True, True, False])
    got = losses.mismatch(learner, sampler, trained)
    d = np.array([0.5, -1.0, 0.0])
    expected = {
        "abs_log_ratio": 1.5,
        "max_abs_log_ratio": 1.0,
        "kl": np.sum(np.exp(d) - 1 - d),
        "truncated": 0.0,
        "tokens": 3.0,
    }
    counts = {name for name in got if name.startswith("above_")}
    assert got.keys() == expected.keys() | counts and len(counts) == len(EDGES)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6)


def test_mismatch_of_nothing_trained_is_zero():
    got = losses.mismatch(jnp.full(2, jnp.nan), jnp.zeros(2), jnp.zeros(2, bool))
    assert all(value == 0 for value in got.values())


def test_the_measured_kl_is_of_the_sampler_against_the_learner():
    """Outcomes weighed by the sampler's shares; the other way around it is .082283."""
    learner, sampler = jnp.log(jnp.array([0.7, 0.3])), jnp.log(jnp.array([0.5, 0.5]))
    got = [
        losses.mismatch(learner[a : a + 1], sampler[a : a + 1], jnp.ones(1, bool))["kl"]
        for a in (0, 1)
    ]
    expected = 0.5 * np.log(0.5 / 0.7) + 0.5 * np.log(0.5 / 0.3)
    np.testing.assert_allclose(0.5 * got[0] + 0.5 * got[1], expected, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 0.3])
def test_percentiles_are_those_of_the_tokens(scale):
    ratios = scale * np.random.default_rng(0).standard_normal(4000)
    for percent in (50, 90, 99, 99.9):
        expected = np.percentile(np.abs(ratios), percent)
        got = percentile(measured(ratios), percent)
        assert expected / WITHIN < got < expected * WITHIN
    assert percentile(measured(ratios), 99.9) <= np.abs(ratios).max()


def test_percentiles_at_the_ends():
    assert percentile(measured([0.0] * 100), 99) == 0
    assert np.isnan(percentile(measured([]), 99))
    assert percentile(measured([100.0] * 10), 99) == 100
    # One token in 200 says nothing about the 99th percentile, two in 100 do.
    assert percentile(measured([0.0] * 199 + [1.0]), 99) == 0
    assert percentile(measured([0.0] * 98 + [1.0] * 2), 99) > 0.5


def test_what_a_truncation_would_touch_is_above_the_cap_on_one_side():
    ratios = np.log([1.9, 2.1, 3.0, 0.1, 1.0])
    assert measured(ratios)["truncated"] == 2
    assert measured(ratios, cap=2.5)["truncated"] == 1
