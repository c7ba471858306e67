"""Sums of gradients for one step: what is kept between a trajectory and its baseline.

    batch : [1, *param]   the sum of everything whose coefficient is known
    group : [S, *param]   S sums of one open group whose coefficients are still unknown

The S sums are linear combinations, F0, F1 and FA of `docs/method.md`, in float32 or the
parameters' float64. Sums are donated: use the returned one. Replicas' sums are joined
along the leading 1 of the batch sum.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

Tree = Any


@functools.cache
def sum_dtype(dtype: Any) -> Any:
    """The dtype gradients of a parameter dtype are summed in: float32 or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def init(params: Tree, channels: int = 1) -> Tree:
    """Zero sums [channels, *param] that lie where the parameters lie."""
    leaves, treedef = jax.tree.flatten(params)
    specs = tuple(
        ((channels, *x.shape), sum_dtype(x.dtype), lead_sharding(x.sharding))
        for x in leaves
    )
    return treedef.unflatten(_zeros(specs)())


def bytes_per_device(params: Tree) -> int:
    """Bytes of one sum on one device: the batch has one, an open group S."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * sum_dtype(x.dtype).itemsize
        for x in jax.tree.leaves(params)
    )


def add_direct(batch: Tree, gradient: Tree) -> Tree:
    """Adds a gradient whose coefficient is already inside it. `batch` is donated."""
    return compiled(_add_direct, batch)(batch, gradient)


def add_group(
    group: Tree,
    fresh: jax.Array,
    gradients: tuple[Tree, ...],
    weights: jax.Array,
    factors: jax.Array | None = None,
) -> Tree:
    """Adds one call's gradients to the sums [S, *param] of an open group, donated.

    Sum s receives sum_n weights[s, n] * gradients[n], weights [S, N], and is multiplied
    by factors[s] before, None for 1. True in `fresh`, bool[], forgets what the sums
    held: starting over in a used place costs nothing, a separate pass of zeros would.
    """
    if factors is None:
        factors = np.ones(len(weights))
    return compiled(_add_group, group)(group, fresh, gradients, weights, factors)


def close_group(batch: Tree, group: Tree, coefficients: jax.Array) -> Tree:
    """Adds a group's sums times `coefficients` [S]. `batch` is donated, `group` not."""
    return compiled(_close_group, batch)(batch, group, coefficients)


def finalize(batches: Tree, denominator: Any, like: Tree) -> tuple[Tree, jax.Array]:
    """Reduces batch sums [R, *param] over replicas and divides once, by Z > 0.

    Returns the gradient [*param], laid out as `like`, and its L2 norm over the tree.
    """
    shardings = tuple(x.sharding for x in jax.tree.leaves(like))
    return _finalize(shardings, batches, denominator)


def lead_sharding(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """The sharding of an array with one more leading axis, which is not split."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = PartitionSpec(None, *sharding.spec)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def compiled(function: Callable, sums: Tree) -> Callable:
    """The program of a function that updates `sums` in place.

    On a mesh its result lies as `sums` do: left to itself, the compiler spreads a sum
    as it spread the gradient, and then neither memory is reused nor can replicas join.
    """
    leaves, treedef = jax.tree.flatten(sums)
    if not isinstance(leaves[0].sharding, NamedSharding):
        return _jit(function, None, ())
    return _jit(function, treedef, tuple(x.sharding for x in leaves))


@functools.lru_cache(maxsize=256)
def _jit(function, treedef, shardings):
    layout = {"out_shardings": treedef.unflatten(shardings)} if treedef else {}
    return jax.jit(function, donate_argnums=0, **layout)


def _add_direct(batch, gradient):
    return jax.tree.map(lambda b, g: b + g.astype(b.dtype)[None], batch, gradient)


def _add_group(group, fresh, gradients, weights, factors):
    def add(sums, *leaves):
        # One elementwise expression over [S, *param]: written sum by sum and stacked,
        # XLA makes a copy of the whole array instead of updating it in place.
        def spread(number_s):
            axes = tuple(range(1, sums.ndim))
            return jnp.expand_dims(number_s, axes).astype(sums.dtype)

        total = jnp.where(fresh, jnp.zeros_like(sums), spread(factors) * sums)
        for n, leaf in enumerate(leaves):
            total += spread(weights[:, n]) * leaf.astype(sums.dtype)[None]
        return total

    return jax.tree.map(add, group, *gradients)


def _close_group(batch, group, coefficients):
    def close(total, sums):
        for s in range(sums.shape[0]):
            total += coefficients[s].astype(total.dtype) * sums[s : s + 1]
        return total

    return jax.tree.map(close, batch, group)


@functools.lru_cache(maxsize=256)
def _zeros(specs):
    def zeros():
        return [jnp.zeros(shape, dtype) for shape, dtype, _ in specs]

    return jax.jit(zeros, out_shardings=[sharding for *_, sharding in specs])


@functools.partial(jax.jit, static_argnums=0)
def _finalize(shardings, batches, denominator):
    leaves, treedef = jax.tree.flatten(batches)
    gradient = []
    for sums, sharding in zip(leaves, shardings, strict=True):
        leaf = jnp.sum(sums, axis=0) / jnp.asarray(denominator, sums.dtype)
        if isinstance(sharding, NamedSharding):
            leaf = jax.lax.with_sharding_constraint(leaf, sharding)
        gradient.append(leaf)
    return treedef.unflatten(gradient), _norm(gradient)


def _norm(leaves):
    """L2 over all leaves; squares of 1e20 and of 1e-30 would leave float32."""
    largest = functools.reduce(
        jnp.maximum, [jnp.max(jnp.abs(x), initial=0.0) for x in leaves]
    )
    # A power of two, by which division is exact.
    unit = jnp.ldexp(jnp.ones_like(largest), jnp.frexp(largest)[1] - 1)
    unit = jnp.where((largest > 0) & jnp.isfinite(largest), unit, 1.0)
    return unit * jnp.sqrt(sum(jnp.sum(jnp.square(x / unit)) for x in leaves))
