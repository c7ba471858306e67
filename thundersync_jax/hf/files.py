"""Safetensors files: what is in them, parts of a tensor, and writing new ones.

A file is mapped for one block of one tensor at a time, so that memory stays near what
is copied out, however large the file. No jax.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from thundersync_jax.config.checks import require
from thundersync_jax.config.model_folder import read_json
from thundersync_jax.config.workdir import replacing
from thundersync_jax.errors import ConfigError

ONE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK_BYTES = 4 * 2**20  # mapped at a time; transposing larger ones leaves the caches
_ALIGNED = 8  # bytes that a header's length is a multiple of
_AGAIN = "Download or save the folder again."


class Stored(NamedTuple):
    """Where a tensor lies."""

    path: Path
    dtype: str  # as the file names it, as "BF16"
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


class Piece(NamedTuple):
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    value: Callable[[], np.ndarray]  # asked for when it is its turn


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or those that its index names.

    Raises:
      ConfigError: There are none, or both, which programs read differently.
    """
    one, index = folder / ONE_FILE, folder / INDEX_FILE
    require(
        not (one.exists() and index.exists()),
        f"{folder} holds {ONE_FILE} and {INDEX_FILE}",
        "one of them: some programs read the first and some the second",
        "Delete what is older.",
    )
    if not index.exists():
        require(
            one.exists(),
            f"{folder} holds no {ONE_FILE} and no {INDEX_FILE}",
            "weights as safetensors",
            "Download the folder, or save the model from transformers.",
        )
        return [one]
    return [folder / name for name in indexed(index)]


def indexed(index: Path) -> list[str]:
    """The files that an index names."""
    names = read_json(index).get("weight_map")
    require(
        isinstance(names, dict) and all(isinstance(n, str) for n in names.values()),
        f"{index} has no weight_map of names and files",
        "one",
        _AGAIN,
    )
    return sorted(set(names.values()))


def stored(folder: Path) -> dict[str, Stored]:
    """All tensors of a folder, by name; only headers are read.

    Raises:
      ConfigError: A file is missing, torn or no safetensors file; or one tensor is in
        two files.
    """
    found: dict[str, Stored] = {}
    for path in tensor_files(folder):
        for name, tensor in _header(path).items():
            require(
                name not in found,
                f"tensor {name} is in {found[name].path if name in found else ''} and "
                f"in {path}",
                "one file",
                _AGAIN,
            )
            found[name] = tensor
    return found


def copy_part(
    tensor: Stored,
    apart: Sequence[int],
    axes: Sequence[int],
    part: Sequence[slice],
    out: np.ndarray,
) -> None:
    """out[...] = stored.reshape(apart).transpose(axes)[part], cast to out's dtype.

    Args:
      tensor: What to read.
      apart: A shape of as many elements.
      axes: Its axes in the order of `out`.
      part: One slice per axis of `out`, with steps of 1.
      out: Written.
    """
    dtype = DTYPES[tensor.dtype]
    ours = axes.index(0)  # the axis of `out` along which the file is read
    start, stop, _ = part[ours].indices(apart[0])
    others = tuple(part[axes.index(axis)] for axis in range(1, len(apart)))
    row_bytes = math.prod(apart[1:]) * dtype.itemsize
    rows = max(1, _BLOCK_BYTES // row_bytes)
    target = [slice(None)] * out.ndim
    for first in range(start, stop, rows):
        last = min(first + rows, stop)
        block = np.memmap(
            tensor.path,
            dtype,
            "r",
            offset=tensor.offset + first * row_bytes,
            shape=(last - first, *apart[1:]),
        )
        target[ours] = slice(first - start, last - start)
        # Cast before it is turned: casts of a few bytes apart are slow.
        cast = np.ascontiguousarray(block[(slice(None), *others)]).astype(out.dtype)
        out[tuple(target)] = cast.transpose(axes)


def equal(a: Stored, b: Stored) -> bool:
    """Whether two tensors have the same numbers."""
    if a.shape != b.shape:
        return False
    rows = max(1, _BLOCK_BYTES // (8 * math.prod(a.shape[1:])))
    axes, whole = tuple(range(len(a.shape))), [slice(None)] * (len(a.shape) - 1)
    for first in range(0, a.shape[0], rows):
        part = [slice(first, min(first + rows, a.shape[0])), *whole]
        shape = (part[0].stop - first, *a.shape[1:])
        blocks = np.empty((2, *shape))
        for tensor, block in zip((a, b), blocks, strict=True):
            copy_part(tensor, a.shape, axes, part, block)
        if not np.array_equal(*blocks):
            return False
    return True


def write(
    path: Path,
    pieces: Sequence[Piece],
    dtype: np.dtype,
    metadata: Mapping[str, str],
) -> None:
    """Writes one file, tensor after tensor; it is there once it is whole.

    Args:
      path: The file to write or replace.
      pieces: Tensors in the order of the file.
      dtype: Dtype of every tensor.
      metadata: Texts that the header carries, by name.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for piece in pieces:
        end = offset + math.prod(piece.shape) * dtype.itemsize
        entry = {"dtype": _NAMES[dtype], "shape": piece.shape}
        header[piece.name] = {**entry, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for piece in pieces:
            value = np.ascontiguousarray(piece.value())
            assert (value.shape, value.dtype) == (piece.shape, dtype), piece.name
            file.write(value.reshape(-1).view(np.uint8).data)


def _header(path: Path) -> dict[str, Stored]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 8 + length <= size else b""
        header = json.loads(text)
        header.pop("__metadata__", None)
        found = {
            name: (entry["dtype"], tuple(entry["shape"]), entry["data_offsets"])
            for name, entry in header.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = "there is none" if isinstance(error, FileNotFoundError) else error
        raise ConfigError(
            f"{path} was to be read, but {why}; expected a whole safetensors file. "
            f"{_AGAIN}"
        ) from error
    for name, (dtype, shape, (begin, end)) in found.items():
        known = DTYPES.get(dtype)
        bytes_needed = math.prod(shape) * known.itemsize if known else end - begin
        require(
            0 <= begin <= end <= size - 8 - length and bytes_needed == end - begin,
            f"tensor {name} of {path} is at bytes {begin} to {end} of "
            f"{size - 8 - length}",
            f"{bytes_needed} bytes inside the file: it is torn",
            _AGAIN,
        )
    return {
        name: Stored(path, dtype, shape, 8 + length + begin)
        for name, (dtype, shape, (begin, _)) in found.items()
    }
