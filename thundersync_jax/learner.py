"""All replicas of the learner and what they add up: executes what a schedule decides.

It decides nothing itself. The stream says which numbers a call's gradients are
multiplied by, or that they are not known yet. No method but `wait` and `finish` waits
for a device.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax import mesh, refusals, signature, sums
from thundersync_jax.replica import IN_FLIGHT, Replica, wait_for_any
from thundersync_jax.schedule import Call, Fold
from thundersync_jax.surrogate import Evaluated, Structure, structure, traced

Tree = Any
_SUMS = {"plain": sums.PlainSums, "exact": sums.ExactSums}


class Learner:
    """The device side of one step.

    Args:
      surrogate: The surrogate function.
      params: Parameters to differentiate; replicas follow from where they lie.
      frozen: The surrogate's further argument, or None.
      accumulator: "plain" or "exact".
      on_compile: Called with one line before a gradient program compiles.

    Attributes:
      structure: The parts of the surrogate, once a sample was examined.
      compiles: Gradient programs compiled so far.
    """

    def __init__(
        self,
        surrogate: Callable,
        params: Tree,
        frozen: Tree,
        accumulator: str,
        on_compile: Callable[[str], None] | None = None,
    ):
        self.structure: Structure | None = None
        self.compiles = 0
        self._surrogate = surrogate
        self._params = jax.tree.map(signature.parameter, params)
        self._frozen = jax.tree.map(signature.device_leaf, frozen)
        if accumulator == "exact":
            _check_exact(self._params)
        self._on_compile = on_compile
        views, frozen_views = mesh.split(self._params, self._frozen)
        self._replicas = [
            Replica(surrogate, *both) for both in zip(views, frozen_views, strict=True)
        ]
        self._sums = _SUMS[accumulator](views, self._params)
        self._sum_bytes = sums.bytes_per_device(self._params, accumulator)
        arguments = signature.placed((self._params, self._frozen))
        self._arguments = signature.number(arguments)
        self._traced = traced(surrogate)

    @property
    def free(self) -> int | None:
        """The replica that takes the next call, None while all are busy enough."""
        load, index = min((r.load, i) for i, r in enumerate(self._replicas))
        return index if load < IN_FLIGHT else None

    def unit_bytes(self, scope: str, lossy: bool) -> int:
        """Bytes per device of the sums that a unit holds while it misses rewards."""
        parts = self.structure or Structure(False, False)
        count = sums.channels(scope, parts.weighted, parts.additive, lossy)
        return count * self._sum_bytes

    def wait(self) -> None:
        """Blocks until a replica is free."""
        wait_for_any(self._replicas)

    def put(self, tree: Tree) -> Tree:
        """Brings a sample to the device early, where it is known which that is."""
        return self._replicas[0].put(tree) if len(self._replicas) == 1 else tree

    def examine(self, tree: Tree, bucket: Hashable, estimator: Any) -> Structure:
        """Looks at the surrogate's parts, once per shape signature."""
        key, known = (self._arguments, bucket), self._traced.structures
        if key not in known:
            known[key] = structure(self._surrogate, self._params, self._frozen, tree)
        refusals.check_parts(known[key], self.structure, estimator)
        return known[key]

    def weighed(
        self, call: Call, trees: Sequence[Tree], weights: np.ndarray, unit: Hashable
    ) -> Evaluated:
        """One gradient of sum_i a_i * weighted_i + b_i * additive_i.

        Args:
          call: Where it goes: to the batch, or to a sum of the unit.
          trees: Samples [rows].
          weights: float64[rows, 2], the numbers (a_i, b_i). Where all are 0 nothing is
            added, whatever the gradient: 0 * NaN is no 0.
          unit: Whose.
        """
        self._announce(call, split=False)
        gradient, evaluated = self._replicas[call.replica].gradient(trees, weights)
        if np.any(weights) and call.place is None:
            self._sums.direct(call.replica, gradient)
        elif np.any(weights):
            self._sums.hold(call, unit, None, None, gradient)
        return evaluated

    def unweighed(
        self,
        call: Call,
        trees: Sequence[Tree],
        unit: Hashable,
        reward: float,
        certain: bool,
    ) -> Evaluated:
        """The gradients of sum_i weighted_i and of sum_i additive_i, apart.

        Args:
          call: Where the former goes.
          trees: Samples [rows].
          unit: Whose.
          reward: Of all samples.
          certain: Whether they count, so that the latter goes to the batch.
        """
        replica, additive = self._replicas[call.replica], None
        self._announce(call, split=self.structure.additive)
        if self.structure.additive:
            weighted, additive, evaluated = replica.parts(trees)
            if certain:
                self._sums.direct(call.replica, additive)
                additive = None
        else:
            # A single part: the other coefficient meets nothing.
            weighted, evaluated = replica.gradient(trees, np.ones((len(trees), 2)))
        self._sums.hold(call, unit, reward, weighted, additive)
        return evaluated

    def fold(self, fold: Fold, table: sums.Table | None) -> None:
        """Adds a unit's sums to the batch with its advantages, or forgets them."""
        self._sums.fold(fold, table)

    def finish(self, denominator: float) -> tuple[Tree, jax.Array]:
        """The gradient and its norm; the sums are gone then."""
        return self._sums.finish(denominator)

    def _announce(self, call: Call, split: bool) -> None:
        bucket = call.items[0].bucket
        program = (self._arguments, split, call.rows, call.replica, bucket)
        if program in self._traced.programs:
            return
        self._traced.programs.add(program)
        self.compiles += 1
        if self._on_compile:
            shapes = ", ".join(str(shape) for shape, _ in bucket[1])
            self._on_compile(f"gradient of {call.rows} x {shapes}")


def _check_exact(params: Tree) -> None:
    """Requires parameters whose gradients exact sums can hold."""
    for x in jax.tree.leaves(params):
        if x.dtype.itemsize > 4:
            raise ValueError(
                f"accumulator is 'exact' and a parameter of shape {x.shape} is "
                f"{x.dtype}; exact sums are of at most 32 bits, use float32 parameters "
                "or accumulator 'plain'"
            )
