"""One function makes an estimator, and what it wrongly declares is refused at once."""

import numpy as np
import pytest

from thundersync_jax.ops.advantages import Estimator, line


def above_median(rewards):
    return np.sign(rewards - np.median(rewards))


def by_rank(rewards):
    """Ties broken by index."""
    return np.argsort(np.argsort(rewards, kind="stable")).astype(float)


def test_a_user_writes_one_function():
    estimator = Estimator("above_median", above_median)
    found = estimator.advantages([3.0, 1.0, 2.0, 1.0, 9.0])
    np.testing.assert_array_equal(found, [1, -1, 0, -1, 1])
    assert (estimator.scope, estimator.affine) == ("group", False)
    table = estimator.table([0.0, 1.0, 0.0])
    assert line(table, 0.0, 1.0) == (1.0, 0.0)


def test_a_function_may_work_in_place_and_see_an_array_it_owns():
    def in_place(rewards):
        rewards -= rewards.mean()
        return rewards

    estimator = Estimator("in_place", in_place, affine=True)
    rewards = np.array([1.0, 0.0])
    np.testing.assert_array_equal(estimator.advantages(rewards), [0.5, -0.5])
    np.testing.assert_array_equal(rewards, [1.0, 0.0])


def test_a_function_may_refuse_small_groups():
    def from_three(rewards):
        if len(rewards) < 3:
            raise ValueError("three at least")
        return rewards - np.median(rewards)

    estimator = Estimator("from_three", from_three)
    assert estimator.table([1.0, 1.0, 4.0]) == {1.0: 0.0, 4.0: 3.0}
    with pytest.raises(ValueError, match="three at least"):
        estimator.table([1.0, 4.0])


def test_rounding_is_no_broken_tie():
    """A product of matrices may round equal rows differently."""

    def noisy(rewards):
        return (rewards - rewards.mean()) * (1 + 1e-15 * np.arange(len(rewards)))

    estimator = Estimator("noisy", noisy, affine=True)
    found = estimator.advantages([1.0, 0.0, 1.0])
    assert found[0] == found[2]


@pytest.mark.parametrize(
    ("function", "declared", "match"),
    [
        (by_rank, {}, "ties may not be broken by position"),
        (lambda r: r - r[0], {}, "in another order"),
        (lambda r: r + 0.1 * (np.arange(len(r)) % 2), {}, "unequal|another order"),
        (lambda r: (r - r.mean()) ** 2, {"affine": True}, "lie on no line"),
        (above_median, {"affine": True}, "lie on no line"),
        (lambda r: r - r.mean(), {"scope": "member"}, 'declare scope="group"'),
        (lambda r: np.clip(r, 0, 1), {"scope": "member", "affine": True}, "on no line"),
        (lambda r: r.mean(), {}, "one number for each reward"),
        (lambda r: (r - r.mean()) / r.std(), {}, "nothing to divide by"),
        (lambda r: r, {"scope": "step"}, "choose member, group, batch"),
    ],
)
def test_a_wrong_declaration_is_refused(function, declared, match):
    with pytest.raises(ValueError, match=match) as refusal:
        Estimator("mine", function, **declared)
    assert "estimator mine" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_function_that_refuses_everything_is_refused():
    def never(rewards):
        raise ValueError("not today")

    with pytest.raises(ValueError, match=r"estimator mine.*not today"):
        Estimator("mine", never)


@pytest.mark.parametrize("reward", [np.nan, np.inf])
def test_rewards_that_are_not_finite_are_refused(reward):
    estimator = Estimator("above_median", above_median)
    with pytest.raises(ValueError, match="not all finite"):
        estimator.table([0.0, reward])


def test_what_only_shows_later_is_refused_then():
    """Probes are few: a table checks every scope again."""

    def late(rewards):
        if len(rewards) == 8:
            return by_rank(rewards)
        return rewards - rewards.mean()

    estimator = Estimator("late", late)
    with pytest.raises(ValueError, match="estimator late: equal rewards"):
        estimator.table([0.0] * 7 + [1.0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda r: {}[7], "estimator odd: .*KeyError: 7"),
        (lambda r: (r - r.mean()) * 1j, "estimator odd: .*complex"),
        (None, "estimator odd: .*NoneType"),
    ],
)
def test_whatever_a_function_does_is_one_line_with_its_name(function, message):
    with pytest.raises(ValueError, match=message):
        Estimator("odd", function)


def test_an_error_in_the_middle_of_a_step_names_estimator_and_rewards():
    late = Estimator("late", lambda r: r * (1 / 0) if 7.0 in r else r - r.mean())
    with pytest.raises(ValueError, match=r"late: .*ZeroDivisionError.*\[1, 7\]"):
        late.table([7.0, 1.0])
