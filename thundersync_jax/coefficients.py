"""What gradients and group sums are multiplied by, while rewards still come in.

A group advantage is A_i = scale * (r_i - centre) + offset, so over streamed members

    sum A_i s_i = offset * F0 + scale * F1
    F0 = sum s_i    F1 = sum (r_i - centre) * s_i

with the group's first streamed reward as centre, so that rewards 1000 and 1001 lose no
digits. Plain float64 numbers of any size, one object per step; what of them fits the
sums' float32 is the replica's business.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from thundersync_jax.ops.advantages import Estimator


class Coefficients:
    """Centres of the groups that hold sums.

    Args:
      estimator: The group advantage, or None where nothing is weighted.
    """

    def __init__(self, estimator: Estimator | None):
        self._estimator = estimator
        self._centres: dict[Hashable, float] = {}

    def hold(self, group: Hashable, reward: float | None, additive: bool) -> np.ndarray:
        """What each sum of an open group takes of each gradient of a call.

        Args:
          group: The group.
          reward: The member's, or None where nothing is weighted.
          additive: Whether additive gradients are held back too.

        Returns:
          float64[S, N] with a column for each part that is held.
        """
        rows = []
        if reward is not None:
            centre = self._centres.setdefault(group, reward)
            rows += [[1.0, 0.0], [reward - centre, 0.0]]
        if additive:
            rows.append([0.0, 1.0])
        weights = np.array(rows)
        return weights[:, weights.any(axis=0)]

    def close(
        self, group: Hashable, rewards: Sequence[float], additive: bool
    ) -> np.ndarray:
        """What the sums of a group are multiplied by, float64[S], now that it is whole.

        Args:
          group: The group, one that `hold` was called for.
          rewards: Of its surviving members.
          additive: As in `hold`.
        """
        numbers = []
        if group in self._centres:
            centre = self._centres.pop(group)
            scale, offset = self._estimator.coefficients(rewards, centre)
            numbers += [offset, scale]
        if additive:
            numbers.append(1.0)
        return np.array(numbers)
