"""Meshes, and the replicas inside them.

A mesh has the axes (replica, fsdp, tensor). Each index of `replica` is a sub-mesh with
one full copy of the parameters. Splitting and joining move no data: they re-label the
shards that every device already holds.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

Tree = Any
AXES = ("replica", "fsdp", "tensor")
IN_FLIGHT = 2  # the running call and one behind it: later news still changes the next
_LOOK_SECS = 1e-4


def make_mesh(
    replica: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh with axes (replica, fsdp, tensor) over the first devices needed."""
    devices = jax.devices() if devices is None else devices
    wanted = replica * fsdp * tensor
    if len(devices) < wanted:
        raise ValueError(
            f"mesh replica={replica} fsdp={fsdp} tensor={tensor} needs {wanted} "
            f"devices and {len(devices)} are at hand; lower mesh.replica, mesh.fsdp or "
            "mesh.tensor"
        )
    return jax.make_mesh(
        (replica, fsdp, tensor),
        AXES,
        axis_types=(AxisType.Auto,) * 3,
        devices=devices[:wanted],
    )


def parameter_shardings(
    mesh: Mesh, shapes: Tree, logical_axes: Tree, table: Mapping[str, str | None]
) -> Tree:
    """Maps logical axis names to shardings on a mesh with axes "fsdp" and "tensor".

    An axis of `shapes` whose size the mesh axis does not divide stays whole, as one
    without a name. `table` has the mesh axis of each name, None where it stays whole.
    """

    def spec(x, names):
        axes = []
        for size, name in zip(x.shape, names, strict=True):
            axis = table.get(name)
            fits = axis is not None and size % mesh.shape[axis] == 0
            axes.append(axis if fits and axis not in axes else None)
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(spec, shapes, logical_axes)


def split(params: Tree, frozen: Tree = None) -> tuple[list[Tree], list[Tree]]:
    """One view per replica of arrays that are copied over the `replica` axis.

    Parameters that lie on no mesh with such an axis are one replica as they are.
    Arrays of `frozen` that lie elsewhere are copied whole to every replica.
    """
    leaves = jax.tree.leaves(params)
    if not leaves:
        raise ValueError("params holds no array; give what is to be differentiated")
    places = {_mesh(x.sharding) or frozenset(x.sharding.device_set) for x in leaves}
    if len(places) != 1:
        raise ValueError(
            f"parameters lie on {len(places)} different meshes or devices; put all of "
            "them on one"
        )
    mesh = _mesh(leaves[0].sharding)
    _check_auto(leaves[0].sharding)
    views = [params] if mesh is None else _views(params, lambda x: _split_leaf(x, mesh))
    first = [jax.tree.leaves(view)[0] for view in views]

    def frozen_views(x):
        if mesh is not None and _mesh(x.sharding) == mesh:
            return _split_leaf(x, mesh)
        return [
            x
            if x.sharding.device_set == p.sharding.device_set
            else jax.device_put(x, whole_sharding(p))
            for p in first
        ]

    if not jax.tree.leaves(frozen):
        return views, [frozen] * len(views)
    return views, _views(frozen, frozen_views)


def whole_sharding(parameter: jax.Array) -> Sharding:
    """Where an array lies that every device of a replica needs whole."""
    sharding = parameter.sharding
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def join(trees: Sequence[Tree], params: Tree) -> Tree:
    """Joins arrays [1, ...] on the views of `split(params)` to [R, ...] on its mesh."""
    mesh = _mesh(jax.tree.leaves(params)[0].sharding)
    if mesh is None:
        return trees[0]

    def stack(*leaves):
        x = leaves[0]
        split = isinstance(x.sharding, NamedSharding)
        spec = PartitionSpec("replica", *(x.sharding.spec[1:] if split else ()))
        kind = x.sharding.memory_kind
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        shards = [s.data for leaf in leaves for s in leaf.addressable_shards]
        shape = len(leaves), *x.shape[1:]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    return jax.tree.map(stack, *trees)


class Replica:
    """One sub-mesh with its copy of the parameters; starts programs without waiting."""

    def __init__(self, params: Tree, frozen: Tree = None):
        self.params = params
        self.frozen = frozen
        self._sharding = whole_sharding(jax.tree.leaves(params)[0])
        self._running: collections.deque[jax.Array] = collections.deque()

    @property
    def load(self) -> int:
        """How many of this replica's calls have not ended yet."""
        while self._running and self._running[0].is_ready():
            self._running.popleft()
        return len(self._running)

    def wait(self) -> None:
        """Blocks until the oldest running call has ended."""
        if self._running:
            self._running[0].block_until_ready()

    def put(self, sample: Tree) -> Tree:
        """Brings a sample to this replica's devices; again it costs nothing."""
        return jax.device_put(sample, self._sharding)

    def start(
        self,
        program: Callable,
        function: Callable,
        *arguments: Any,
        params: Tree = None,
    ) -> Any:
        """Starts a gradient program: one more running.

        A program is of (surrogate function, params, frozen, *arguments) and its last
        result is an `Evaluated`. `params` None are the replica's own parameters.
        """
        params = self.params if params is None else params
        results = self.run(program, function, params, self.frozen, *arguments)
        self._running.append(results[-1].finite)
        return results

    def run(self, program: Callable, *arguments: Any) -> Any:
        """Starts a small program, in the replica's mesh, that does not count."""
        sharding = self._sharding
        named = isinstance(sharding, NamedSharding)
        with jax.set_mesh(sharding.mesh) if named else contextlib.nullcontext():
            return program(*arguments)


def wait_for_any(replicas: Sequence[Replica]) -> None:
    """Blocks until one of the replicas, all of them full, can take a call."""
    if len(replicas) == 1:
        replicas[0].wait()
    while min(replica.load for replica in replicas) >= IN_FLIGHT:
        time.sleep(_LOOK_SECS)  # no way to wait for the first of several devices


def _views(tree, split_leaf):
    leaves, treedef = jax.tree.flatten(tree)
    parts = [split_leaf(x) for x in leaves]
    return [treedef.unflatten(part) for part in zip(*parts, strict=True)]


def _check_auto(sharding: Sharding) -> None:
    types = sharding.mesh.axis_types if isinstance(sharding, NamedSharding) else ()
    if any(kind != AxisType.Auto for kind in types):
        raise ValueError(
            f"parameters lie on a mesh with axes {sharding.mesh.axis_names} of types "
            f"{', '.join(str(kind) for kind in types)}; make it with mesh.make_mesh, "
            f"or give jax.make_mesh axis_types=(AxisType.Auto,) * {len(types)}"
        )


def _mesh(sharding: Sharding) -> Mesh | None:
    if isinstance(sharding, NamedSharding) and "replica" in sharding.mesh.shape:
        return sharding.mesh
    return None


def _split_leaf(x: jax.Array, mesh: Mesh) -> list[jax.Array]:
    names = [n for part in x.sharding.spec for n in np.atleast_1d(part)]
    if "replica" in names:
        raise ValueError(
            f"a parameter of shape {x.shape} is sharded over `replica`; replicas hold "
            "full copies, shard it over the other axes"
        )
    axis = mesh.axis_names.index("replica")
    rest = tuple(n for n in mesh.axis_names if n != "replica")
    shards = {s.device: s.data for s in x.addressable_shards}
    views = []
    for devices in np.moveaxis(mesh.devices, axis, 0):
        if rest:
            sub = Mesh(devices, rest, axis_types=(AxisType.Auto,) * len(rest))
            sharding = NamedSharding(sub, x.sharding.spec)
        else:
            sharding = jax.sharding.SingleDeviceSharding(devices)
        data = [shards[d] for d in np.ravel(devices)]
        views.append(jax.make_array_from_single_device_arrays(x.shape, sharding, data))
    return views
