"""Meshes, and the replicas inside them.

A mesh has the axes (replica, fsdp, tensor). Each index of `replica` is a sub-mesh that
holds one full copy of the parameters, sharded over (fsdp, tensor), and works on its own
trajectories; only the step boundary sees the whole mesh. Splitting and joining move no
data: they re-label the shards that every device already holds.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from thundersync_jax import accumulator

Tree = Any
AXES = ("replica", "fsdp", "tensor")

# Logical axis of a parameter -> mesh axis that shards it.
SHARDED_OVER = {
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}


def make_mesh(
    replica: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Returns a mesh with axes (replica, fsdp, tensor) over the first devices needed.

    Raises:
      ValueError: There are fewer devices than the product of the three.
    """
    devices = jax.devices() if devices is None else devices
    wanted = replica * fsdp * tensor
    if len(devices) < wanted:
        raise ValueError(
            f"mesh replica={replica} fsdp={fsdp} tensor={tensor} needs {wanted} devices "
            f"and {len(devices)} are at hand; lower mesh.replica, mesh.fsdp or mesh.tensor"
        )
    return jax.make_mesh(
        (replica, fsdp, tensor),
        AXES,
        axis_types=(AxisType.Auto,) * 3,
        devices=devices[:wanted],
    )


def parameter_shardings(mesh: Mesh, logical_axes: Tree, shapes: Tree) -> Tree:
    """Maps logical axis names to shardings: the one table is `SHARDED_OVER`.

    Args:
      mesh: With axes "fsdp" and "tensor".
      logical_axes: A tree with one tuple of names (or None) per parameter.
      shapes: A tree of arrays or shapes of the same structure; an axis whose size the
        mesh axis does not divide stays whole.
    """

    def spec(x, names):
        axes = []
        for size, name in zip(x.shape, names, strict=True):
            axis = SHARDED_OVER.get(name)
            fits = axis is not None and size % mesh.shape[axis] == 0
            axes.append(axis if fits and axis not in axes else None)
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(spec, shapes, logical_axes)


def split(tree: Tree) -> list[Tree]:
    """One view per replica of arrays that are copied over the `replica` axis.

    Arrays that lie on no mesh with a `replica` axis are one replica as they are.

    Raises:
      ValueError: An array is sharded over `replica`, or the arrays' meshes differ.
    """
    leaves, treedef = jax.tree.flatten(tree)
    meshes = {_mesh(x.sharding) for x in leaves} or {None}
    if len(meshes) != 1:
        raise ValueError(
            f"parameters lie on {len(meshes)} different meshes; put all of them on one"
        )
    mesh = meshes.pop()
    if mesh is None:
        return [tree]
    parts = [_split_leaf(x, mesh) for x in leaves]
    return [treedef.unflatten(part) for part in zip(*parts, strict=True)]


def join(trees: Sequence[Tree], like: Tree) -> Tree:
    """Joins one tree per replica into arrays on the mesh of `like`.

    Args:
      trees: Per replica, arrays [1, *param] laid out like the views of `split(like)`.
      like: The tree that was split.

    Returns:
      Arrays [R, *param].
    """

    def stack(x, *leaves):
        mesh = _mesh(x.sharding)
        if mesh is None:
            return leaves[0]
        sharding = accumulator.lead_sharding(x.sharding, "replica")
        shards = [s.data for leaf in leaves for s in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(
            (len(leaves), *x.shape), sharding, shards
        )

    return jax.tree.map(stack, like, *trees)


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
        sub = Mesh(devices, rest, axis_types=(AxisType.Auto,) * len(rest))
        sharding = NamedSharding(sub, x.sharding.spec)
        data = [shards[d] for d in devices.flat]
        views.append(jax.make_array_from_single_device_arrays(x.shape, sharding, data))
    return views
