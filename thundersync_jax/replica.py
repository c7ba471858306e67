"""One replica of the learner: its parameters, its sums, its running calls.

A replica starts gradient calls and folds their results into sums without ever waiting
for the device. It decides nothing: the schedule says what runs, the stream says with
which numbers.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax import accumulator, mesh, surrogate

Tree = Any
IN_FLIGHT = 2  # the running call and one behind it: later news still changes the next
_LOOK_SECS = 1e-4
_UNIT_RANGE = 2.0**20  # weights stay below it, far from both ends of float32


class Replica:
    """Sums of one step on one sub-mesh.

    Args:
      function: The surrogate function.
      params: Parameters on this replica's devices.
      frozen: The surrogate's further argument on the same devices, or None.
    """

    def __init__(self, function: Callable, params: Tree, frozen: Tree = None):
        self._function = function
        self._params = params
        self._frozen = frozen
        self._sharding = mesh.whole_sharding(jax.tree.leaves(params)[0])
        self._batch = accumulator.init(params)
        self._places: dict[int, Tree] = {}
        self._units: dict[int, np.ndarray] = {}  # float64[S] of places that hold sums
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

    def put(self, sample: Tree) -> Tree:
        """Brings a sample to this replica's devices; again it costs nothing.

        All arrays get one kind of placement: committed or not makes another program.
        """
        return jax.device_put(sample, self._sharding)

    def direct(
        self, samples: Sequence[Tree], weights: np.ndarray
    ) -> surrogate.Evaluated:
        """Adds sum_i a_i * weighted_i + b_i * additive_i to the batch sum.

        Args:
          samples: `rows` samples of one shape signature.
          weights: float[rows, 2], the numbers (a_i, b_i). Where all are 0 nothing is
            added, whatever the gradient: 0 * NaN is no 0.
        """
        gradient, evaluated = self._gradient(samples, weights)
        if np.any(weights):
            self._batch = accumulator.add_direct(self._batch, gradient)
        return self._started(evaluated)

    def hold(
        self, samples: Sequence[Tree], place: int, weights: np.ndarray, add_now: bool
    ) -> surrogate.Evaluated:
        """Adds samples that the sums weigh alike to the sums of an open group.

        Args:
          samples: `rows` samples of one shape signature.
          place: Which open group.
          weights: float64[S, N], what sum s receives of the n-th gradient, of any
            size. With N = 1 the gradient of the samples' `weighted` or, where there is
            no such part, of their `additive`; with N = 2 both.
          add_now: Whether `additive`, apart from the sums, joins the batch sum at once.
        """
        if add_now or weights.shape[1] == 2:
            with self._mesh():
                weighted, additive, evaluated = surrogate.split_gradient(
                    self._function, self._params, self._frozen, self.put(tuple(samples))
                )
            gradients = (weighted,) if add_now else (weighted, additive)
            if add_now:
                self._batch = accumulator.add_direct(self._batch, additive)
        else:
            # A single part: one of the two coefficients meets nothing.
            ones = np.ones((len(samples), 2))
            gradient, evaluated = self._gradient(samples, ones)
            gradients = (gradient,)
        if place not in self._places:
            self._places[place] = accumulator.init(self._params, len(weights))
        fresh = np.bool_(place not in self._units)
        weights, factors = self._in_units(place, weights)
        self._places[place] = accumulator.add_group(
            self._places[place], fresh, gradients, weights, factors
        )
        return self._started(evaluated)

    def close(self, place: int, coefficients: np.ndarray | None) -> None:
        """Ends an open group: its sums times float[S], or None to forget them."""
        units = self._units.pop(place)
        if coefficients is not None and np.any(coefficients * units):
            self._batch = accumulator.close_group(
                self._batch, self._places[place], coefficients * units
            )

    def _in_units(self, place, weights):
        """Weights over the units of their sums, and what changed units do to the sums.

        Float32 sums then hold weights of any size: a unit is the first weight other
        than 0, and another one once a weight is out of all proportion to it.
        """
        sizes = np.max(np.abs(weights), axis=1)
        before = self._units.get(place, np.zeros_like(sizes))
        units = np.where(sizes > _UNIT_RANGE * before, sizes, before)
        self._units[place] = units
        ones = np.where(units == 0, 1.0, units)
        factors = np.where(before == 0, 1.0, before / ones)
        return weights / ones[:, None], factors

    def _gradient(self, samples, weights):
        with self._mesh():
            return surrogate.gradient(
                self._function,
                self._params,
                self._frozen,
                self.put(tuple(samples)),
                weights,
            )

    def _mesh(self):
        """The replica's mesh in context, for sharding constraints inside surrogates."""
        if isinstance(self._sharding, jax.sharding.NamedSharding):
            return jax.set_mesh(self._sharding.mesh)
        return contextlib.nullcontext()

    def _started(self, evaluated):
        self._running.append(evaluated.finite)
        return evaluated


def wait_for_any(replicas: Sequence[Replica]) -> None:
    """Blocks until one of the replicas, all of them full, can take a call."""
    if len(replicas) == 1:
        replicas[0].wait()
    while min(replica.load for replica in replicas) >= IN_FLIGHT:
        time.sleep(_LOOK_SECS)  # no way to wait for the first of several devices
