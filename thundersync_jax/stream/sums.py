"""What one step adds up, on all replicas: plain float32 sums, or exact ones.

Both take gradients as they come and have the step's gradient in the end:

    direct   a gradient whose coefficients are inside it
    hold     gradients of a unit (a group, or the batch) whose coefficients are unknown
    fold     the sums of a unit join the batch, now that they are known

Plain sums are linear combinations of a unit's gradients (module `accumulator`), exact
ones one sum per distinct reward (`docs/exactness.md`). Neither waits for a device.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.errors import StreamError
from thundersync_jax.ops import exact_sum
from thundersync_jax.ops.advantages import line
from thundersync_jax.stream import accumulator, mesh
from thundersync_jax.stream.schedule import Call, Fold

Tree = Any
Table = Mapping[float, float]  # advantages by reward
_UNIT_RANGE = 2.0**20  # weights stay below it, far from both ends of float32


def channels(scope: str, weighted: bool, additive: bool, lossy: bool) -> int:
    """How many gradient-sized sums a unit holds while it misses rewards.

    `scope` is the estimator's, `weighted` and `additive` are parts of samples, and
    groups may be dropped or filtered where `lossy`.
    """
    if scope == "batch":  # its members have joined for certain
        return 2 * weighted
    if scope == "member" or not weighted:
        return int(lossy)
    return 2 + (additive and lossy)


def bytes_per_device(params: Tree, kind: str = "plain") -> int:
    """Bytes of one sum on one device."""
    if kind == "plain":
        return accumulator.bytes_per_device(params)

    def leaf_bytes(x):
        entries = math.prod(x.sharding.shard_shape(x.shape))
        rows = math.prod(x.sharding.shard_shape(x.shape)[:-1])
        return 4 * exact_sum.SLOTS * entries + rows

    return sum(leaf_bytes(x) for x in jax.tree.leaves(params))


class PlainSums:
    """Sums in float32 (float64 of float64 gradients).

    F0, F1 and FA of `docs/method.md`, a unit's first held reward being the centre.
    `views` are the parameters of every replica, `params` those on the whole mesh.
    """

    def __init__(self, views: Sequence[Tree], params: Tree):
        self.empty = True  # whether the batch has received nothing
        self._views, self._params = views, params
        self._batches = [accumulator.init(view) for view in views]
        self._sums: dict[tuple[int, int], Tree] = {}  # by replica and place
        # float64[S] of sums that hold something: what they are multiples of.
        self._units: dict[tuple[int, int], np.ndarray] = {}
        self._rewards: dict[Any, dict[float, None]] = {}  # by unit, the centre first

    def direct(self, replica: int, gradient: Tree) -> None:
        """Adds to the batch."""
        self.empty = False
        self._batches[replica] = accumulator.add_direct(
            self._batches[replica], gradient
        )

    def hold(
        self,
        call: Call,
        unit: Any,
        reward: float | None,
        weighted: Tree | None,
        additive: Tree | None,
    ) -> None:
        """Adds the score gradient of a call to the sums of a unit, or `additive`.

        Samples of a call have one reward, None where nothing is `weighted`. `additive`
        is their gradient that no advantage multiplies, where it is held back.
        """
        rows, gradients = [], [g for g in (weighted, additive) if g is not None]
        if weighted is not None:
            rewards = self._rewards.setdefault(unit, {})
            rewards.setdefault(reward)
            rows += [[1.0, 0.0], [reward - next(iter(rewards)), 0.0]]
        if additive is not None:
            rows.append([0.0, 1.0])
        weights = np.array(rows)
        weights = weights[:, weights.any(axis=0)]
        key = call.replica, call.place
        if key not in self._sums:
            view = self._views[call.replica]
            self._sums[key] = accumulator.init(view, len(weights))
        fresh = np.bool_(key not in self._units)
        weights, factors = self._in_units(key, weights)
        self._sums[key] = accumulator.add_group(
            self._sums[key], fresh, tuple(gradients), weights, factors
        )

    def fold(self, fold: Fold, table: Table | None, scale: float = 1.0) -> None:
        """Adds a unit's sums, of which additive ones take `scale`, or forgets them."""
        rewards = list(self._rewards.pop(fold.unit, ()))
        for replica in fold.replicas:
            units = self._units.pop((replica, fold.place), None)
            if units is None:  # every gradient there had the coefficient 0
                continue
            numbers = scale * units
            if fold.kept and rewards:
                farthest = max(rewards, key=lambda r: abs(r - rewards[0]))
                slope, offset = line(table, rewards[0], farthest, units[1])
                numbers[:2] = offset * units[0], slope
            if fold.kept and np.any(numbers):
                self.empty = False
                self._batches[replica] = accumulator.close_group(
                    self._batches[replica], self._sums[replica, fold.place], numbers
                )

    def read(self, replica: int) -> Tree:
        """What the batch has received of a replica so far, float32."""
        return _first(self._batches[replica])

    def finish(self, denominator: float) -> tuple[Tree, jax.Array]:
        """The gradient, laid out like the parameters, and its norm; ends the sums."""
        self._sums.clear()  # before the gradient comes
        batches, self._batches = self._batches, []
        sums = mesh.join(batches, self._params)
        del batches
        return accumulator.finalize(sums, denominator, self._params)

    def _in_units(self, key, weights):
        """Weights over the units of their sums, and what changed units do to the sums.

        Float32 sums then hold weights of any size: a unit is the first weight other
        than 0, and another one once a weight is out of all proportion to it.
        """
        sizes = np.max(np.abs(weights), axis=1)
        before = self._units.get(key, np.zeros_like(sizes))
        units = np.where(sizes > _UNIT_RANGE * before, sizes, before)
        self._units[key] = units
        ones = np.where(units == 0, 1.0, units)
        factors = np.where(before == 0, 1.0, before / ones)
        return weights / ones[:, None], factors


class ExactSums:
    """Sums whose bits depend on trajectories and rewards alone.

    The same methods and attributes as `PlainSums`. Memory of a sum is used again once
    it is folded. Parameters of more than 32 bits raise a ValueError.
    """

    def __init__(self, views: Sequence[Tree], params: Tree):
        self.empty = True
        self._views, self._params = views, params
        self._batches = [exact_sum.init(view) for view in views]
        self._sums: list[dict[tuple, Tree]] = [{} for _ in views]  # by place and reward
        self._free: list[list[Tree]] = [[] for _ in views]

    def direct(self, replica: int, gradient: Tree) -> None:
        self.empty = False
        batch = self._batches[replica]
        self._batches[replica] = _in_place(exact_sum.add, batch, gradient, False)

    def hold(
        self,
        call: Call,
        unit: Any,
        reward: float | None,
        weighted: Tree | None,
        additive: Tree | None,
    ) -> None:
        """Adds to the sum of a reward, and to the additive one."""
        held, free = self._sums[call.replica], self._free[call.replica]
        for key, gradient in ((reward, weighted), (None, additive)):
            if gradient is None:
                continue
            old = held.pop((call.place, key), None)
            fresh = old is None
            if fresh:
                old = free.pop() if free else exact_sum.init(self._views[call.replica])
            new = _in_place(exact_sum.add, old, gradient, np.bool_(fresh))
            held[call.place, key] = new

    def fold(self, fold: Fold, table: Table | None) -> None:
        """Adds one sum of a unit to the batch, or forgets it."""
        key = fold.place, fold.reward
        states = {
            replica: self._sums[replica].pop(key)
            for replica in fold.replicas
            if key in self._sums[replica]
        }
        if not states:
            return
        coefficient = 1.0
        if fold.kept and fold.reward is not None:
            coefficient = table[fold.reward]
            if abs(coefficient) > float(np.finfo(np.float32).max):
                raise StreamError(
                    f"the advantage {coefficient:g} of reward {fold.reward:g} leaves "
                    "float32; scale rewards or the estimator down"
                )
        home, *others = states
        if fold.kept and coefficient != 0:
            for other in others:  # before they are rounded
                layout = jax.tree.map(lambda x: x.sharding, states[home])
                moved = jax.device_put(states[other], layout)
                states[home] = _in_place(exact_sum.merge, states[home], moved)
            self.empty = False
            batch, state = self._batches[home], states[home]
            if fold.reward is None:
                self._batches[home] = _in_place(exact_sum.merge, batch, state)
            else:
                # Two programs: in one, XLA works every entry out again for each of its
                # uses, in four times the time.
                more = _value(state), np.float32(coefficient)
                self._batches[home] = _in_place(_added_multiple, batch, *more)
        for replica, state in states.items():
            self._free[replica].append(state)

    def read(self, replica: int) -> Tree:
        """What the batch has received of a replica so far, float32 and unchecked."""
        return _value(self._batches[replica])

    def finish(self, denominator: float) -> tuple[Tree, jax.Array]:
        self._sums.clear()
        self._free.clear()
        stacks = [_stack(batch) for batch in self._batches]
        self._batches = []
        total = exact_sum.merge_stacked(mesh.join(stacks, self._params))
        del stacks
        try:
            exact_sum.check(total)
        except ValueError as error:
            raise StreamError(
                f"{error}; nothing was updated. Smaller steps, rewards or losses fit, "
                "or accumulator 'plain'"
            ) from None
        return accumulator.finalize(_read(total), denominator, self._params)


KINDS = {"plain": PlainSums, "exact": ExactSums}


@jax.jit
def _first(batch: Tree) -> Tree:
    return jax.tree.map(lambda x: x[0], batch)


def _in_place(function: Callable, state: Tree, *arguments: Any) -> Tree:
    return accumulator.compiled(function, state)(state, *arguments)


@jax.jit
def _value(state: Tree) -> Tree:
    return exact_sum.value(state)


def _added_multiple(batch, value, coefficient):
    return exact_sum.add(batch, jax.tree.map(lambda x: coefficient * x, value))


def _stack(state: Tree) -> Tree:
    """With the replica axis in front, on which replicas' sums are joined."""
    layout = jax.tree.map(lambda x: accumulator.lead_sharding(x.sharding), state)
    leaves, treedef = jax.tree.flatten(layout)
    return _stacked(treedef, tuple(leaves))(state)


@functools.lru_cache(maxsize=64)
def _stacked(treedef, leaves):
    return jax.jit(
        lambda state: jax.tree.map(lambda x: x[None], state),
        donate_argnums=0,
        out_shardings=treedef.unflatten(leaves),
    )


@jax.jit
def _read(total: Tree) -> Tree:
    return jax.tree.map(lambda x: x[None], exact_sum.value(total))
