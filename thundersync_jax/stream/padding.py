"""Padding to a few lengths, so that a few programs serve every trajectory."""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Padded:
    """A sample and what padding did to it; `GradientStream` takes it for the sample.

    Attributes:
      tree: Arrays of the bucket's length.
      real_tokens: Length before padding.
      padded_tokens: Length after it.
    """

    tree: Any
    real_tokens: int
    padded_tokens: int

    @classmethod
    def of(cls, sample: Any) -> "Padded":
        """A sample of a caller who may not pad: then it counts as one token."""
        return sample if isinstance(sample, cls) else cls(sample, 1, 1)


def bucket(length: int, lengths: Sequence[int]) -> int:
    """Returns the shortest of the ascending `lengths` that holds `length`.

    Raises:
      ValueError: `length` is longer than all of them.
    """
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
      lengths: Ascending bucket lengths.

    Raises:
      ValueError: The arrays differ in length, or no bucket is long enough.
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
