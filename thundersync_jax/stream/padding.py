"""Samples as programs see them: few lengths, few dtypes, and what tells them apart.

A program belongs to a *shape signature*: the structure, shapes and dtypes of its
arrays, and for parameters their layout.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any

_NUMBERS: dict[Hashable, int] = {}
_FRESH = itertools.count()


@dataclasses.dataclass(frozen=True)
class Padded:
    """A sample and what padding did to it; `GradientStream` takes it for the sample."""

    tree: Any  # arrays of the bucket's length
    real_tokens: int  # length before padding
    padded_tokens: int  # length after it

    @classmethod
    def of(cls, sample: Any) -> "Padded":
        """A sample as programs take it; one that is not padded counts as one token."""
        padded = sample if isinstance(sample, cls) else cls(sample, 1, 1)
        tree = jax.tree.map(sample_leaf, padded.tree)
        return dataclasses.replace(padded, tree=tree)


def bucket(length: int, lengths: Sequence[int]) -> int:
    """Returns the shortest of the ascending `lengths` that holds `length`."""
    index = bisect.bisect_left(lengths, length)
    if index == len(lengths):
        raise ValueError(
            f"{length} tokens fit none of the bucket lengths {tuple(lengths)}; "
            "add a longer bucket or shorten the trajectory"
        )
    return lengths[index]


def pad(arrays: dict[str, Any], lengths: Sequence[int]) -> Padded:
    """Pads the first axis of every array with zeros to the shortest fitting bucket.

    Args:
      arrays: Arrays [T, ...] of one length T. Zeros must mean "nothing" in each of
        them (weight 0, masked out): the mask says what is padding, never a token id.
      lengths: Ascending bucket lengths; ValueError where none is long enough.
    """
    sizes = {name: len(x) for name, x in arrays.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"lengths {sizes} differ; one sample has one length")
    real = next(iter(sizes.values()))
    padded = bucket(real, lengths)

    def extend(x):
        x = np.asarray(x)
        longer = np.zeros((padded, *x.shape[1:]), x.dtype)
        longer[:real] = x
        return longer

    return Padded({k: extend(x) for k, x in arrays.items()}, real, padded)


def sample_leaf(x: Any) -> Any:
    """One dtype per kind of number: 0.1 and float32(0.1) share a program.

    Numbers and numpy arrays are copied, so that a caller may fill a buffer again.
    """
    if isinstance(x, jax.Array):
        weak = getattr(x, "weak_type", False)  # PRNG key arrays have no such thing
        return jnp.asarray(x, x.dtype) if weak else x
    array = np.array(x)
    if not jax.dtypes.issubdtype(array.dtype, np.number) and array.dtype != np.bool_:
        raise ValueError(
            f"{x!r:.60} of dtype {array.dtype} is no array of numbers; leave it out of "
            "the tree or encode it"
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    converted = array.astype(dtype, copy=False)
    if dtype != array.dtype and array.dtype.kind in "iu" and (converted != array).any():
        raise ValueError(
            f"{x!r:.60} does not fit {dtype}, the integers of jax; give it in parts or "
            "as a float, or set jax_enable_x64"
        )
    return converted


def device_leaf(x: Any) -> jax.Array:
    """An array that stays where it is. Committed: placement is part of a program."""
    x = sample_leaf(x)
    x = x if isinstance(x, jax.Array) else jax.device_put(x)
    return x if x.committed else jax.device_put(x, x.sharding)


def parameter(x: Any) -> jax.Array:
    """A floating-point array on a device, which has a gradient."""
    x = device_leaf(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"a parameter of shape {x.shape} has dtype {x.dtype}, which has no "
            "gradient; pass it in `frozen`"
        )
    return x


def shapes(tree: Tree) -> Hashable:
    """Structure, shapes and dtypes of a sample."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((x.shape, x.dtype) for x in leaves)


def placed(tree: Tree) -> Hashable:
    """Structure, shapes, dtypes and layout of arrays on devices."""
    return shapes(tree), tuple(x.sharding for x in jax.tree.leaves(tree))


def number(key: Hashable) -> int:
    """One small number per key: hashing hundreds of shapes per call takes a while."""
    return _NUMBERS.setdefault(key, next(_FRESH))
