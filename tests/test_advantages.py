"""Advantages are what their equations say, and nothing but functions of rewards."""

import fractions
import itertools
import math
import random

import numpy as np
import pytest

from thundersync_jax import advantages

EPS = 1e-6
ESTIMATORS = {
    "mean_std_0": advantages.mean_std(ddof=0, eps=EPS),
    "mean_std_1": advantages.mean_std(ddof=1, eps=EPS),
    "mean_only": advantages.mean_only(),
    "leave_one_out": advantages.leave_one_out(),
    "leave_one_out_std_0": advantages.leave_one_out_std(ddof=0, eps=EPS),
    "leave_one_out_std_1": advantages.leave_one_out_std(ddof=1, eps=EPS),
    "batch_mean_std_0": advantages.batch_mean_std(ddof=0, eps=EPS),
    "batch_mean_std_1": advantages.batch_mean_std(ddof=1, eps=EPS),
    "pass_at_k_2": advantages.pass_at_k(2),
    "pass_at_k_4": advantages.pass_at_k(4),
    "fixed_baseline": advantages.fixed_baseline(0.25),
}
RELATIVE = [name for name in ESTIMATORS if name != "fixed_baseline"]
AFFINE = [name for name, estimator in ESTIMATORS.items() if estimator.affine]
SEEDS = range(20)


def draw(seed):
    """A generator and 1 to 9 rewards, ties among them, multiples of 2^-10."""
    rng = random.Random(seed)
    choices = [rng.randrange(-2048, 2048) / 1024, 0.0, 1.0]
    drawn = [
        rng.choice([*choices, rng.randrange(-2048, 2048) / 1024])
        for _ in range(rng.randint(1, 9))
    ]
    return rng, drawn


def reference(name, rewards):
    """Every equation once more: whole fractions, one square root in extended digits."""
    kind, _, number = name.rpartition("_")
    exact = [fractions.Fraction(r) for r in rewards]

    def mean(values):
        return sum(values) / len(values)

    def standardised(r, values, ddof):
        left = len(values) - ddof
        squares = sum((v - mean(values)) ** 2 for v in values)
        if left < 1 or squares == 0:
            return 0
        variance = squares / left
        root = np.sqrt(
            np.longdouble(variance.numerator) / np.longdouble(variance.denominator)
        )
        top = r - mean(values)
        return float(
            np.longdouble(top.numerator)
            / np.longdouble(top.denominator)
            / (root + np.longdouble(EPS))
        )

    def one(i, r):
        others = exact[:i] + exact[i + 1 :]
        if name == "fixed_baseline":
            return r - fractions.Fraction(0.25)
        if name == "mean_only":
            return r - mean(exact)
        if kind in ("mean_std", "batch_mean_std"):
            return standardised(r, exact, int(number))
        if not others:
            return 0
        if name == "leave_one_out":
            return r - mean(others)
        if kind == "leave_one_out_std":
            return standardised(r, others, int(number))
        k = min(int(number), len(exact))
        gains = [max(r, *js) - max(js) for js in itertools.combinations(others, k - 1)]
        return k * mean(gains)

    return [float(one(i, r)) for i, r in enumerate(exact)]


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("mean_only", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("mean_only", [1, 1, 0, 0, 0, 0, 0, 1], [0.625] * 2 + [-0.375] * 5 + [0.625]),
        ("leave_one_out", [2, 1, 0, 0], [5 / 3, 1 / 3, -1, -1]),
        ("mean_std_0", [1, 0], [1 / (1 + 2e-6), -1 / (1 + 2e-6)]),
        ("mean_std_1", [3, 1], [1 / (2**0.5 + 1e-6), -1 / (2**0.5 + 1e-6)]),
        ("mean_std_1", [0] + [0.95] * 7, [-2.474866] + [0.353552] * 7),
        ("mean_std_1", [1000.0] + [1000.95] * 7, [-2.474866] + [0.353552] * 7),
        ("leave_one_out_std_1", [2, 1, 0, 0], [2.886751, 0.288675, -1, -1]),
        ("pass_at_k_2", [2, 1, 0, 0], [10 / 3, 4 / 3, 0, 0]),
        ("pass_at_k_4", [1, 0, 0, 0], [4, 0, 0, 0]),
        ("fixed_baseline", [1, 0], [0.75, -0.25]),
    ],
)
def test_worked_numbers(name, rewards, expected):
    """ServiceNow/PipelineRL#54; google/tunix#816 (the halves cut apart give .5)."""
    found = ESTIMATORS[name].advantages(rewards)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equals_the_equation_in_exact_arithmetic(name):
    for seed in SEEDS:
        _, rewards = draw(seed)
        found = ESTIMATORS[name].advantages(rewards)
        assert found.dtype == np.float64
        expected = reference(name, rewards)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_order_changes_no_bit(name):
    for seed in SEEDS:
        rng, _ = draw(seed)
        rewards = [rng.choice([rng.gauss(0, 1), 0.1, 0.7]) for _ in range(9)]
        expected = ESTIMATORS[name].advantages(rewards)
        order = rng.sample(range(9), 9)
        permuted = ESTIMATORS[name].advantages([rewards[i] for i in order])
        np.testing.assert_array_equal(permuted, expected[order])


@pytest.mark.parametrize("name", RELATIVE)
def test_a_common_offset_changes_no_bit(name):
    """Offsets are subtracted first; these rewards hold them without rounding."""
    for seed in SEEDS:
        _, rewards = draw(seed)
        expected = ESTIMATORS[name].advantages(rewards)
        for offset in (2.0**20, -(2.0**40)):
            shifted = ESTIMATORS[name].advantages([r + offset for r in rewards])
            np.testing.assert_array_equal(shifted, expected)


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("offset", [0.0, 1000.0, 1e6])
def test_equal_peers_raise_no_spike(name, offset):
    """NVIDIA-NeMo/RL#4158: a variance as a difference of squares gave -2,075."""
    estimator = ESTIMATORS[name]
    found = estimator.advantages([offset] + [offset + 0.95] * 7)
    assert np.max(np.abs(found)) < 10
    np.testing.assert_allclose(
        found, estimator.advantages([0] + [0.95] * 7), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("name", RELATIVE)
def test_one_survivor_has_advantage_zero(name):
    """huggingface/trl#5773: the sample deviation of one number was NaN."""
    assert ESTIMATORS[name].advantages([1.0]).tolist() == [0.0]


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("reward", [0.7, 0.1 + 0.2, -1e6 - 0.1, 1e-300, 0.0])
def test_equal_rewards_have_advantage_exactly_zero(name, reward):
    """Also with eps = 0, and at every size (three times .7 has an inexact mean)."""
    estimators = [ESTIMATORS[name]]
    kind, _, ddof = name.rpartition("_")
    if "std" in kind:
        estimators.append(getattr(advantages, kind)(ddof=int(ddof), eps=0.0))
    for estimator in estimators:
        for size in range(1, 12):
            assert not estimator.advantages([reward] * size).any()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_moments_neither_overflow_nor_vanish(name, scale):
    found = ESTIMATORS[name].advantages([scale, 0.0, 0.0, 3 * scale])
    if name.startswith(("mean_std", "leave_one_out_std", "batch")) and scale < 1:
        assert np.all(np.abs(found) < EPS)
    else:
        assert found.any()


def test_scaling_rewards_scales_what_is_not_normalised():
    """No second whitening hides (axon-rl/gem#113, amazon-science/reskill#12)."""
    for name in ("mean_only", "leave_one_out", "pass_at_k_2"):
        once = ESTIMATORS[name].advantages([1, 0, 0.5])
        np.testing.assert_allclose(ESTIMATORS[name].advantages([10, 0, 5]), 10 * once)
    for normalised in (advantages.mean_std, advantages.leave_one_out_std):
        once = normalised(eps=0.0).advantages([1, 0, 0.5])
        twice = normalised(eps=0.0).advantages([10, 0, 5])
        np.testing.assert_allclose(twice, once)


@pytest.mark.parametrize("members", [2, 4, 5])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_pass_at_k_estimates_the_gradient_of_pass_at_k(members, k):
    """Its expectation over all outcomes of a coin of probability p, in closed form.

    d/dp of 1 - (1 - p)^k, the probability that one of k tosses succeeds; the score of a
    success is 1 / p, that of a failure -1 / (1 - p). Fewer members than k: the best of
    those there are.
    """
    p, best_of = 0.3, min(k, members)
    expectation = 0.0
    for outcome in itertools.product((0.0, 1.0), repeat=members):
        probability = math.prod(p if r else 1 - p for r in outcome)
        score = np.array([1 / p if r else -1 / (1 - p) for r in outcome])
        advantage = advantages.pass_at_k(k).advantages(outcome)
        expectation += probability * np.mean(advantage * score)
    assert abs(expectation - best_of * (1 - p) ** (best_of - 1)) < 1e-12


def test_pass_at_k_of_many_members_is_finite():
    """C(2047, 1023) has 615 digits."""
    rewards = np.linspace(0, 1, 2048)
    found = advantages.pass_at_k(1024).advantages(rewards)
    assert np.all(found >= 0)
    assert found[-1] == np.max(found) > 0


@pytest.mark.parametrize("name", AFFINE)
def test_a_line_through_two_rewards_serves_all_of_an_affine_estimator(name):
    for seed in SEEDS:
        rng, rewards = draw(seed)
        table = ESTIMATORS[name].table(rewards)
        centre = rng.choice(rewards)
        other = max(rewards, key=lambda r: abs(r - centre))
        scale, offset = advantages.line(table, centre, other)
        found = scale * (np.array(rewards) - centre) + offset
        expected = ESTIMATORS[name].advantages(rewards)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_line_serves_two_distinct_rewards_of_any_estimator(name):
    rewards = [0.7, 1e6, 0.7, 1e6, 0.7]
    table = ESTIMATORS[name].table(rewards)
    assert table.keys() == {0.7, 1e6}
    scale, offset = advantages.line(table, 1e6, 0.7)
    found = scale * (np.array(rewards) - 1e6) + offset
    expected = ESTIMATORS[name].advantages(rewards)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-9)
    assert advantages.line(table, 0.7, 0.7) == (0.0, table[0.7])


def test_scopes_and_what_is_affine():
    scopes = {name: estimator.scope for name, estimator in ESTIMATORS.items()}
    assert {name for name in scopes if scopes[name] == "batch"} == {
        "batch_mean_std_0",
        "batch_mean_std_1",
    }
    assert scopes["fixed_baseline"] == "member"
    waits = {"leave_one_out_std_0", "leave_one_out_std_1", "pass_at_k_2", "pass_at_k_4"}
    assert set(ESTIMATORS) - set(AFFINE) == waits


def test_tables_hold_numbers_by_value():
    estimator = advantages.mean_only()
    assert estimator.table([]) == {}
    assert estimator.table([-0.0, 0, 1, 1]) == {0.0: -0.5, 1.0: 0.5}
    seen = []
    spy = advantages.Estimator("spy", lambda r: seen.append(r.copy()) or 0 * r)
    spy.table([-0.0, -1.0])
    assert not np.signbit(seen[-1][1])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"ddof": 2}, "ddof is 2"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"eps": np.nan}, "eps is nan"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, name):
    for estimator in ("mean_std", "leave_one_out_std", "batch_mean_std"):
        with pytest.raises(ValueError, match=name):
            getattr(advantages, estimator)(**settings)
    for k in (1, 0, 2.5):
        with pytest.raises(ValueError, match="k is"):
            advantages.pass_at_k(k)
    with pytest.raises(ValueError, match="baseline is inf"):
        advantages.fixed_baseline(np.inf)
