"""Group advantages are what their equations say, and affine in the member's reward."""

import random

import numpy as np
import oracle
import pytest

from thundersync_jax import advantages

ESTIMATORS = {
    "mean_std_0": advantages.mean_std(ddof=0, eps=1e-6),
    "mean_std_1": advantages.mean_std(ddof=1, eps=1e-6),
    "mean_only": advantages.mean_only(),
    "leave_one_out": advantages.leave_one_out(),
}
CASES = [(name, seed) for name in ESTIMATORS for seed in range(20)]


def draw(seed):
    rng = random.Random(seed)
    rewards = [
        rng.choice([rng.gauss(0, 1), 0.0, 1.0]) for _ in range(rng.randint(1, 9))
    ]
    return rng, rewards


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("mean_only", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("leave_one_out", [2, 1, 0, 0], [5 / 3, 1 / 3, -1, -1]),
        ("mean_std_0", [1, 0], [1 / (1 + 2e-6), -1 / (1 + 2e-6)]),
        ("mean_std_1", [3, 1], [1 / (2**0.5 + 1e-6), -1 / (2**0.5 + 1e-6)]),
        ("mean_std_1", [0] + [0.95] * 7, [-2.474866] + [0.353552] * 7),
        ("mean_std_1", [1000.0] + [1000.95] * 7, [-2.474866] + [0.353552] * 7),
    ],
)
def test_worked_numbers(name, rewards, expected):
    """The last two: NVIDIA-NeMo/RL#4158."""
    found = ESTIMATORS[name].advantages(rewards)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_equals_the_equation_in_extended_precision(name, seed):
    _, rewards = draw(seed)
    expected = oracle.advantages(rewards, name)
    found = ESTIMATORS[name].advantages(rewards)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_coefficients_give_the_advantages_whatever_the_centre(name, seed):
    rng, rewards = draw(seed)
    expected = ESTIMATORS[name].advantages(rewards)
    for centre in (rng.choice(rewards), 0.0):
        scale, offset = ESTIMATORS[name].coefficients(rewards, centre)
        found = scale * (np.array(rewards) - centre) + offset
        np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_order_and_a_common_shift_do_not_matter(name, seed):
    rng, rewards = draw(seed)
    estimator = ESTIMATORS[name]
    expected = estimator.advantages(rewards)
    order = rng.sample(range(len(rewards)), len(rewards))
    permuted = estimator.advantages([rewards[i] for i in order])
    np.testing.assert_allclose(permuted, expected[order], atol=1e-12)
    shifted = estimator.advantages([r + 1e6 for r in rewards])
    np.testing.assert_allclose(shifted, expected, atol=1e-3)
    assert abs(expected.sum()) < 1e-9


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.7, 0.1 + 0.2, -1e6 - 0.1, 1e-300, 0.0])
def test_equal_rewards_have_advantage_exactly_zero(name, reward):
    """Also with eps = 0, and at every size (three times .7 has an inexact mean)."""
    strict = {"mean_std_0": 0, "mean_std_1": 1}
    estimators = [ESTIMATORS[name]]
    if name in strict:
        estimators.append(advantages.mean_std(ddof=strict[name], eps=0.0))
    for estimator in estimators:
        for size in range(1, 12):
            assert not estimator.advantages([reward] * size).any()
            assert estimator.coefficients([reward] * size, reward)[1] == 0.0


def test_scaling_rewards_scales_what_is_not_normalised():
    """No second whitening hides (axon-rl/gem#113, amazon-science/reskill#12)."""
    for name in ("mean_only", "leave_one_out"):
        once = ESTIMATORS[name].advantages([1, 0, 0.5])
        np.testing.assert_allclose(ESTIMATORS[name].advantages([10, 0, 5]), 10 * once)
    normalised = advantages.mean_std(eps=0.0)
    once = normalised.advantages([1, 0, 0.5])
    np.testing.assert_allclose(normalised.advantages([10, 0, 5]), once)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"ddof": 2}, "ddof is 2"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"eps": np.nan}, "eps is nan"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, name):
    with pytest.raises(ValueError, match=name):
        advantages.mean_std(**settings)
