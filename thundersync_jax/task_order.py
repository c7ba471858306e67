"""Which task comes when: a function of (seed, position), so a resume needs no state."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

_REPLACEMENTS = 1  # a further word of the seed: apart from the epochs' orders


def take(tasks: Sequence[Any], seed: int, start: int, count: int) -> list[Any]:
    """Returns `count` tasks from position `start` of an endless shuffled sequence.

    Epoch e is a permutation drawn from (seed, e); positions run through the epochs, so
    a step may begin in one epoch and end in the next.

    Args:
      tasks: At least one.
      seed: Of the run.
      start: Position of the first, usually (step - 1) * groups_per_step.
      count: How many.
    """
    chosen, orders = [], {}
    for position in range(start, start + count):
        epoch, index = divmod(position, len(tasks))
        if epoch not in orders:
            rng = np.random.default_rng((seed, epoch))
            orders[epoch] = rng.permutation(len(tasks))
        chosen.append(tasks[int(orders[epoch][index])])
    return chosen


def replacements(tasks: int, seed: int, step: int, own: Collection[int]) -> list[int]:
    """Returns the tasks that a step's replacement groups take, in turn.

    They are in an order of the step's own, apart from that of `take`: how many groups
    are replaced moves no task of a later step.

    Args:
      tasks: How many there are; they are named by their indices.
      seed: Of the run.
      step: From 1.
      own: What the step has already. It is left out, unless it is everything.
    """
    rng = np.random.default_rng((seed, step, _REPLACEMENTS))
    order = rng.permutation(tasks).tolist()
    own = set(own)
    return [index for index in order if index not in own] or order
