"""Which task comes when: a function of (seed, position), so a resume needs no state."""

from collections.abc import Sequence
from typing import Any

import numpy as np


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
