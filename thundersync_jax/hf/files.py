"""Safetensors files: what is in them, parts of a tensor, and writing new ones.

The library of that name reads. A file is open for one block of one tensor at a time, so
that memory stays near what is copied out, however large the file: what the library maps
stays resident until it is closed. Writing goes tensor after tensor, which the library
cannot. No jax.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from thundersync_jax.config.checks import installed, require
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
    name: str
    dtype: str  # as the file names it, as "BF16"
    shape: tuple[int, ...]


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
    single, index = folder / ONE_FILE, folder / INDEX_FILE
    require(
        not (single.exists() and index.exists()),
        f"{folder} holds {ONE_FILE} and {INDEX_FILE}",
        "one of them: some programs read the first and some the second",
        "Delete what is older.",
    )
    require(
        single.exists() or index.exists(),
        f"{folder} holds no {ONE_FILE} and no {INDEX_FILE}",
        "weights as safetensors",
        "Download the folder, or save the model from transformers.",
    )
    names = indexed(index) if index.exists() else [ONE_FILE]
    return [folder / name for name in names]


def indexed(index: Path) -> list[str]:
    """The files of its own folder that an index names."""
    names = read_json(index).get("weight_map")
    require(
        isinstance(names, dict)
        and all(isinstance(n, str) and Path(n).name == n for n in names.values()),
        f"{index} has no weight_map of names and files of this folder",
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
    tensors: dict[str, Stored] = {}
    for path in tensor_files(folder):
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_slice(name)
                shape = tuple(tensor.get_shape())
                here = Stored(path, name, tensor.get_dtype(), shape)
                other = tensors.setdefault(name, here)
                require(
                    other is here,
                    f"tensor {name} is in {other.path} and in {path}",
                    "one file",
                    _AGAIN,
                )
    return tensors


def copy_part(
    tensor: Stored,
    apart: Sequence[int],
    axes: Sequence[int],
    part: Sequence[slice],
    out: np.ndarray,
) -> None:
    """out[...] = stored.reshape(apart).transpose(axes)[part], cast to out's dtype.

    The shape `apart` has as many elements, its axes are those of the file or cut one of
    them in two, and `axes` puts them in the order of `out`. `part` has one slice per
    axis of `out`, with steps of 1, and the shape of `out`.
    """
    itemsize = DTYPES[tensor.dtype].itemsize
    rows_axis = axes.index(0)  # of `out`, along which the file is read
    start, stop, _ = part[rows_axis].indices(apart[0])
    height = tensor.shape[0] // apart[0]  # rows of the file per row of `apart`
    others = [part[axes.index(axis)] for axis in range(1, len(apart))]
    # Where the last axis is one of the file, only the part of it is read.
    columns = []
    if len(tensor.shape) > 1 and tensor.shape[-1] == apart[-1]:
        columns = [others[-1]]
        others[-1] = slice(None)
    rows = max(1, _BLOCK_BYTES // (math.prod(apart[1:]) * itemsize))
    target = [slice(None)] * out.ndim
    for first in range(start, stop, rows):
        last = min(first + rows, stop)
        block = _read(tensor, slice(first * height, last * height), *columns)
        sizes = (*apart[1:-1], block.shape[-1]) if columns else apart[1:]
        block = block.reshape(last - first, *sizes)
        target[rows_axis] = slice(first - start, last - start)
        # Cast before it is turned: casts of a few bytes apart are slow.
        cast = np.ascontiguousarray(block[(slice(None), *others)]).astype(out.dtype)
        out[tuple(target)] = cast.transpose(axes)


def equal(a: Stored, b: Stored) -> bool:
    """Whether two tensors have the same numbers."""
    if a.shape != b.shape:
        return False
    end, rows = a.shape[0], max(1, _BLOCK_BYTES // (8 * math.prod(a.shape[1:])))
    blocks = [slice(row, min(row + rows, end)) for row in range(0, end, rows)]
    return all(
        np.array_equal(*(_read(x, block).astype(np.float64) for x in (a, b)))
        for block in blocks
    )


def write(
    path: Path, pieces: Sequence[Piece], dtype: np.dtype, metadata: Mapping[str, str]
) -> None:
    """Writes one file, tensor after tensor; it is there once it is whole.

    All tensors are stored as `dtype`; the header carries the texts of `metadata`.
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


def _read(tensor: Stored, *part: slice) -> np.ndarray:
    with _opened(tensor.path) as file:
        return file.get_slice(tensor.name)[part]


def _opened(path: Path) -> Any:
    """A file of the safetensors library; a context that closes it."""
    safetensors = installed("safetensors", "model folders", "hf")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (OSError, safetensors.SafetensorError) as error:
        why = "there is none" if isinstance(error, FileNotFoundError) else error
        raise ConfigError(
            f"{path} was to be read, but {why}; expected a whole safetensors file. "
            f"{_AGAIN}"
        ) from error
