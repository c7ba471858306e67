"""What gradients are multiplied by, as the rewards of a step come in.

An advantage follows from the member's own reward and from the rewards of its *unit*:
its group, all groups that count, or nobody else's (scope). Plain float64 numbers, one
object per step.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from thundersync_jax.ops.advantages import Estimator
from thundersync_jax.stream.schedule import BATCH, Call


class Coefficients:
    """Tables of advantages by reward, of the units whose rewards are in.

    Args:
      estimator: Makes them, or None where there are no rewards.
    """

    def __init__(self, estimator: Estimator | None):
        self._estimator = estimator
        self.scope = "member" if estimator is None else estimator.scope
        self._tables: dict[Hashable, dict[float, float]] = {}

    def unit(self, group: Hashable) -> Hashable:
        """The name of a group's unit, as in module `schedule`."""
        return BATCH if self.scope == "batch" else group

    def close(self, unit: Hashable, rewards: Sequence[float]) -> None:
        """All rewards of a unit are in.

        Raises:
          ValueError: The estimator does not do what it declares.
        """
        if self.scope != "member":
            self._tables[unit] = self._estimator.table(rewards)

    def advantage(self, group: Hashable, reward: float | None) -> float:
        """Of a member with this reward; 0 where there are no rewards."""
        if reward is None:
            return 0.0
        if self.scope == "member":
            return self._estimator.table([reward])[reward]
        return self._tables[self.unit(group)][reward]

    def weights(
        self,
        call: Call,
        rewards: Sequence[float | None],
        weighted: bool,
        additive: bool,
    ) -> np.ndarray:
        """What the parts of a call's samples are multiplied by.

        Args:
          call: Of samples of complete units.
          rewards: Theirs.
          weighted: Whether the surrogate has a part for advantages.
          additive: Whether it has one that none multiplies.

        Returns:
          float64[rows, 2]: advantage, and 1 where there is something additive.
        """
        weights = np.zeros((call.rows, 2))
        weights[: len(call.items), 1] = additive
        if weighted:
            both = zip(call.items, rewards, strict=True)
            advantages = [self.advantage(item.group, reward) for item, reward in both]
            weights[: len(call.items), 0] = advantages
        return weights

    def table(self, unit: Hashable) -> dict[float, float] | None:
        """Advantages by reward, None where the unit does not count."""
        return self._tables.get(unit)
