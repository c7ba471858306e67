"""Which task comes when."""

import collections

import pytest

from thundersync_jax.run.tasks import replacements, take


@pytest.mark.parametrize(("tasks", "per_step"), [(10, 2), (8, 3), (3, 8), (1, 1)])
def test_position_follows_from_the_step_alone(tasks, per_step):
    """Data began again after a resume (PrimeIntellect-ai/prime-rl#3164), or in another
    order, across an epoch's end too (google/tunix#2288)."""
    names = list(range(tasks))
    whole = take(names, 0, 0, 12 * per_step)
    for step in range(12):
        there = whole[step * per_step :][:per_step]
        assert take(names, 0, step * per_step, per_step) == there


@pytest.mark.parametrize("tasks", [1, 7, 10])
def test_every_epoch_has_every_task_once(tasks):
    names = [f"task {i}" for i in range(tasks)]
    chosen = take(names, 3, 0, 3 * tasks)
    for epoch in range(3):
        assert sorted(chosen[epoch * tasks :][:tasks]) == sorted(names)
    assert set(collections.Counter(chosen).values()) == {3}


def test_epochs_and_seeds_are_shuffled_apart():
    orders = [
        tuple(take(range(50), seed, epoch * 50, 50))
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len({*orders, tuple(range(50))}) == 10


def test_replacements_are_what_the_step_does_not_have_in_an_order_of_its_own():
    own = take(range(10), 0, 12, 4)
    found = replacements(10, 0, 4, own)
    assert sorted(found + own) == list(range(10))
    orders = {
        tuple(replacements(50, seed, step, ())) for seed in range(3) for step in (1, 2)
    } | {tuple(take(range(50), 0, 50 * epoch, 50)) for epoch in (1, 2)}
    assert len(orders) == 8
    assert replacements(10, 0, 4, own) == found  # a function of these alone


def test_a_step_that_has_every_task_takes_them_again():
    assert sorted(replacements(3, 0, 1, [2, 0, 1, 2])) == [0, 1, 2]
