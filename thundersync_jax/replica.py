"""One replica of the learner: its parameters, its sums, its running calls.

A replica starts gradient calls and folds their results into sums without ever waiting
for the device. It decides nothing: the schedule says what runs, the stream says with
which numbers.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax import accumulator, surrogate

Tree = Any
IN_FLIGHT = 2  # the running call and one behind it: later news still changes the next


class Replica:
    """Sums of one step on one sub-mesh.

    Args:
      function: The surrogate function.
      params: Parameters on this replica's devices.
      frozen: The surrogate's further argument on the same devices, or None.
      channels: S, how many sums an open group holds.
    """

    def __init__(self, function: Callable, params: Tree, frozen: Tree, channels: int):
        self._function = function
        self._params = params
        self._frozen = frozen
        self._channels = channels
        self._sharding = _sample_sharding(params)
        self._batch = accumulator.init(params)
        self._places: dict[int, Tree] = {}
        self._holding: set[int] = set()
        self._running: collections.deque[jax.Array] = collections.deque()

    @property
    def load(self) -> int:
        """How many of this replica's calls have not ended yet."""
        while self._running and self._running[0].is_ready():
            self._running.popleft()
        return len(self._running)

    @property
    def batch(self) -> Tree:
        """The batch sum, [1, *param]."""
        return self._batch

    def wait(self) -> None:
        """Blocks until the oldest running call has ended."""
        if self._running:
            self._running[0].block_until_ready()

    def direct(
        self, samples: Sequence[Tree], weights: np.ndarray
    ) -> surrogate.Evaluated:
        """Adds sum_i a_i * weighted_i + b_i * additive_i to the batch sum.

        Args:
          samples: `rows` samples of one shape signature.
          weights: float32[rows, 2], the numbers (a_i, b_i).
        """
        gradient, evaluated = self._gradient(samples, weights)
        self._batch = accumulator.add_direct(self._batch, gradient)
        return self._started(evaluated)

    def hold(
        self, sample: Tree, place: int, weights: np.ndarray, add_now: bool
    ) -> surrogate.Evaluated:
        """Adds one sample to the sums of an open group.

        Args:
          sample: The sample.
          place: Which open group.
          weights: float32[S, N], what sum s receives of the n-th gradient. With N = 1
            the gradient of `weighted` or, where there is no such part, of `additive`;
            with N = 2 both.
          add_now: Whether `additive`, apart from the sums, joins the batch sum at once.
        """
        if add_now or weights.shape[1] == 2:
            weighted, additive, evaluated = surrogate.split_gradient(
                self._function, self._params, self._frozen, self._put(sample)
            )
            gradients = (weighted,) if add_now else (weighted, additive)
            if add_now:
                self._batch = accumulator.add_direct(self._batch, additive)
        else:
            # A single part: one of the two coefficients meets nothing.
            ones = np.ones((1, 2), np.float32)
            gradient, evaluated = self._gradient([sample], ones)
            gradients = (gradient,)
        if place not in self._places:
            self._places[place] = accumulator.init(self._params, self._channels)
        fresh = np.bool_(place not in self._holding)
        self._holding.add(place)
        self._places[place] = accumulator.add_group(
            self._places[place], fresh, gradients, weights
        )
        return self._started(evaluated)

    def close(self, place: int, coefficients: np.ndarray | None) -> None:
        """Ends an open group: its sums times float32[S], or None to forget them."""
        self._holding.discard(place)
        if coefficients is not None and np.any(coefficients):
            self._batch = accumulator.close_group(
                self._batch, self._places[place], coefficients
            )

    def _gradient(self, samples, weights):
        return surrogate.gradient(
            self._function,
            self._params,
            self._frozen,
            tuple(self._put(sample) for sample in samples),
            weights,
        )

    def _put(self, sample):
        """Moves device arrays here; numpy arrays travel with the call itself."""

        def move(x):
            if not isinstance(x, jax.Array) or x.sharding == self._sharding:
                return x
            return jax.device_put(x, self._sharding)

        return jax.tree.map(move, sample)

    def _started(self, evaluated):
        self._running.append(evaluated.finite)
        return evaluated


def _sample_sharding(params):
    """Where a whole sample lies: copied over the replica's devices."""
    sharding = jax.tree.leaves(params)[0].sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    return sharding
