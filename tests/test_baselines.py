"""A tracked baseline: known beforehand, of earlier steps, the same in any order."""

import json
import math
import random

import numpy as np
import pytest

from thundersync_jax.ops.advantages import PromptBaseline


def test_a_visit_weighs_less_with_every_later_one():
    """The weighted mean written out, and by hand: (.25 * 1 + .5 * 0 + 2) / 1.75."""
    baseline = PromptBaseline(decay=0.5)
    for mean in (1.0, 0.0, 2.0):
        baseline.update({"p": [mean]})
    assert math.isclose(baseline.value("p"), 2.25 / 1.75)
    rng = random.Random(0)
    baseline, means = PromptBaseline(decay=0.9), []
    for _ in range(50):
        rewards = [rng.gauss(0, 1) for _ in range(rng.randint(1, 8))]
        baseline.update({"p": rewards})
        means.append(np.mean(rewards))
        shares = 0.9 ** np.arange(len(means))[::-1]
        expected = np.sum(shares * means) / np.sum(shares)
        assert math.isclose(baseline.value("p"), expected, rel_tol=1e-9, abs_tol=1e-12)


def test_decay_at_its_ends():
    last, all_alike = PromptBaseline(0.0), PromptBaseline(1.0)
    for reward in (1.0, 4.0, 1.0):
        for baseline in (last, all_alike):
            baseline.update({"p": [reward]})
    assert last.value("p") == 1.0
    assert all_alike.value("p") == 2.0


def test_the_first_visit_counts_in_full():
    """The prior is forgotten, not averaged in."""
    baseline = PromptBaseline(decay=0.9, prior=100.0)
    assert baseline.value("p") == 100.0
    baseline.update({"p": [1.0, 0.0]})
    assert baseline.value("p") == 0.5


def test_a_new_prompt_takes_the_mean_of_all():
    baseline = PromptBaseline(decay=0.5, prior=7.0)
    assert baseline.value("new") == 7.0
    baseline.update({"a": [1.0, 1.0, 1.0], "b": [0.0]})
    assert (baseline.value("a"), baseline.value("b")) == (1.0, 0.0)
    assert baseline.value("new") == 0.75
    baseline.update({"a": [0.0]})
    assert math.isclose(baseline.value("new"), 0.75 / 3)
    assert baseline.value("b") == 0.0


def test_a_prompt_that_is_not_visited_stays():
    baseline = PromptBaseline(decay=0.5)
    baseline.update({"a": [0.3, 0.9], "b": []})
    before = baseline.state()
    baseline.update({})
    baseline.update({"a": [], "b": []})
    assert baseline.state() == before
    assert set(before["prompts"]) == {"a"}


@pytest.mark.parametrize("reward", [0.7, 0.1 + 0.2, -1e6 - 0.1])
def test_equal_rewards_are_their_own_baseline(reward):
    """So that a member that did as always has advantage exactly 0."""
    baseline = PromptBaseline(decay=0.9)
    for members in (3, 7, 5):
        baseline.update({"p": [reward] * members})
        assert baseline.value("p") == baseline.value("new") == reward


def test_arrival_order_changes_no_bit():
    rng = random.Random(3)
    steps = [
        {f"p{i}": [rng.gauss(0, 1) * 10**i for _ in range(8)] for i in range(6)}
        for _ in range(4)
    ]
    states = set()
    for _ in range(20):
        baseline = PromptBaseline(decay=0.9)
        for step in steps:
            items = rng.sample(list(step.items()), len(step))
            baseline.update({k: rng.sample(rs, len(rs)) for k, rs in items})
        states.add(json.dumps(baseline.state()))
    assert len(states) == 1


def test_a_restored_baseline_goes_on_to_the_bit():
    rng = random.Random(5)

    def step():
        return {f"p{rng.randrange(4)}": [rng.gauss(0, 1) for _ in range(3)]}

    one = PromptBaseline(decay=0.9, prior=0.25)
    fresh = PromptBaseline.restored(0.9, 0.25, json.loads(json.dumps(one.state())))
    assert fresh.value("p0") == 0.25
    for _ in range(10):
        one.update(step())
    state = json.loads(json.dumps(one.state()))
    other = PromptBaseline.restored(0.9, 0.25, state)
    for _ in range(10):
        rewards = step()
        one.update(rewards)
        other.update(rewards)
        assert other.state() == one.state()
        assert [other.value(f"p{i}") for i in range(5)] == [
            one.value(f"p{i}") for i in range(5)
        ]


def test_a_state_is_a_copy():
    baseline = PromptBaseline(decay=0.9)
    baseline.update({"p": [1.0]})
    state = baseline.state()
    baseline.update({"p": [0.0]})
    assert PromptBaseline.restored(0.9, 0.0, state).value("p") == 1.0


def test_a_reward_that_is_not_finite_changes_nothing():
    baseline = PromptBaseline(decay=0.9)
    baseline.update({"p": [1.0]})
    before = baseline.state()
    with pytest.raises(ValueError, match="prompt 'q'"):
        baseline.update({"p": [0.0], "q": [1.0, math.nan]})
    assert baseline.state() == before


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ((1.5, 0.0), "decay is 1.5"),
        ((math.nan, 0.0), "decay"),
        ((0.9, math.inf), "prior"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        PromptBaseline(*settings)
