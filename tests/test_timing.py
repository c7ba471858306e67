"""How alike finish times are within a group."""

import math

import numpy as np
import pytest

from thundersync_jax.metrics import timing

# Six targets by four judges: Shrout and Fleiss 1979, table 2; ICC(1,1) = .17 there.
RATINGS = [
    [9, 2, 5, 8],
    [6, 1, 3, 2],
    [8, 4, 6, 8],
    [7, 1, 2, 6],
    [10, 5, 6, 9],
    [6, 2, 4, 7],
]


def test_group_correlation_agrees_with_the_published_example():
    assert timing.group_correlation(RATINGS) == pytest.approx(0.166, abs=5e-4)


def test_group_correlation_knows_its_limits():
    assert timing.group_correlation([[1, 1], [2, 2, 2], [5, 5]]) == pytest.approx(1.0)
    rng = np.random.default_rng(3)
    unrelated = rng.normal(size=(2000, 4))
    assert abs(timing.group_correlation(unrelated)) < 0.04  # four standard errors
    alike = unrelated + rng.normal(size=(2000, 1))
    assert timing.group_correlation(alike) == pytest.approx(0.5, abs=0.05)
    scaled = [[1000 + 3 * value for value in row] for row in RATINGS]
    expected = timing.group_correlation(RATINGS)
    assert timing.group_correlation(scaled) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("groups", [[], [[1, 2, 3]], [[1], [2]], [[1, 1], [1, 1], []]])
def test_group_correlation_of_too_little_is_unknown(groups):
    assert math.isnan(timing.group_correlation(groups))
