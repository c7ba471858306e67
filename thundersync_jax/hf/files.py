"""A Hugging Face folder: its config.json, the names of its tensors, and their files.

The shape in a config.json is read by `config/model_folder.py`. A file is open for one
block of one tensor at a time: what the safetensors library maps stays resident until it
is closed. It cannot write tensor after tensor, so that is done here. No jax.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from thundersync_jax.config import model_folder
from thundersync_jax.config.checks import installed, require
from thundersync_jax.config.model import ModelConfig
from thundersync_jax.config.workdir import replacing
from thundersync_jax.errors import ConfigError

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
IGNORED_END = ".rotary_emb.inv_freq"  # constants of older files, as config.json tells
_CONTEXT_TOKENS = 32_768  # the longest, where neither a folder nor a scaling says it


class Tensor(NamedTuple):
    """A tensor of a folder. Its parameter: `stored.reshape(apart).transpose(axes)`."""

    name: str
    leaf: tuple[str, ...]  # path of the parameter in the tree
    layer: int | None  # index in a stacked leaf; None: not stacked
    shape: tuple[int, ...]  # in the file
    apart: tuple[int, ...]  # in the file, but heads and their sizes in two axes
    axes: tuple[int, ...]  # of `apart`, in the order of the parameter

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Of the parameter, without the axis of layers."""
        return tuple(self.apart[axis] for axis in self.axes)


def longest_context(model: ModelConfig) -> float:
    """The longest context that the model of a folder is made for, in tokens.

    A linear or YaRN factor stretches the context of training, as in vLLM; Llama 3's is
    stretched already. Infinite where config.json does not say.
    """
    path, rope = Path(model.path).expanduser() / model_folder.CONFIG_FILE, model.rope
    values = model_folder.read_json(path)
    most, key = math.inf, "max_position_embeddings"
    if values.get(key) is not None:
        most = model_folder.Reader(path, values).number(values, key)
    if rope.kind == "linear":
        return most * rope.factor
    if rope.kind == "yarn":
        return max(most, rope.original_tokens * rope.factor)
    return most


def config_json(
    config: ModelConfig, dtype: str, source: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of a model, for transformers 4 and 5 and vLLM.

    `dtype` is that of the stored weights, as "bfloat16"; `source` a config.json that
    decides all else, such as end tokens.

    Raises:
      ConfigError: No published family has such a model.
    """
    name = _family_of(config)
    other = dict(source or {})
    # Where it stands at the top it would win over the one beside the scaling.
    other.pop("original_max_position_embeddings", None)
    other.pop("torch_dtype", None)
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    context_tokens = _CONTEXT_TOKENS
    if "original_tokens" in model_folder.ROPE_NAMES[config.rope.kind]:
        context_tokens = round(config.rope.factor * config.rope.original_tokens)
    if config.rope.kind != "none":
        rope["rope_type"] = config.rope.kind
        for field, key in model_folder.ROPE_NAMES[config.rope.kind].items():
            if (value := getattr(config.rope, field)) is not None:
                rope[key] = value
    return {
        "max_position_embeddings": context_tokens,
        **other,
        "architectures": [name],
        "model_type": model_folder.FAMILIES[name].model_type,
        **{key: getattr(config, field) for field, key in model_folder.SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_parameters": rope,  # as transformers 5 spells it; 4 reads the next two
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope.kind == "none" else rope,
        "dtype": dtype,
    }


def tensors(config: ModelConfig) -> list[Tensor]:
    """All tensors of a model, in the order in which they are written."""
    d, m, h = config.width, config.mlp_width, config.head_dim
    n, kv = config.heads, config.kv_heads
    vocabulary = (config.vocab_size, d)
    # Parameter: name in the file, shape with the heads apart, order of axes.
    layer = {
        "attention_norm": ("input_layernorm.weight", (d,), (0,)),
        "query": ("self_attn.q_proj.weight", (n, h, d), (2, 0, 1)),
        "key": ("self_attn.k_proj.weight", (kv, h, d), (2, 0, 1)),
        "value": ("self_attn.v_proj.weight", (kv, h, d), (2, 0, 1)),
        "output": ("self_attn.o_proj.weight", (d, n, h), (1, 2, 0)),
        "mlp_norm": ("post_attention_layernorm.weight", (d,), (0,)),
        "gate": ("mlp.gate_proj.weight", (m, d), (1, 0)),
        "up": ("mlp.up_proj.weight", (m, d), (1, 0)),
        "down": ("mlp.down_proj.weight", (d, m), (1, 0)),
    }
    if config.attention_bias:
        layer["query_bias"] = ("self_attn.q_proj.bias", (n, h), (0, 1))
        layer["key_bias"] = ("self_attn.k_proj.bias", (kv, h), (0, 1))
        layer["value_bias"] = ("self_attn.v_proj.bias", (kv, h), (0, 1))
    if config.qk_norm:
        layer["query_norm"] = ("self_attn.q_norm.weight", (h,), (0,))
        layer["key_norm"] = ("self_attn.k_norm.weight", (h,), (0,))
    layers = [
        Tensor(
            f"model.layers.{i}.{name}",
            ("layers", leaf),
            i,
            _together(leaf, apart),
            apart,
            axes,
        )
        for i in range(config.layers)
        for leaf, (name, apart, axes) in layer.items()
    ]
    last = [_whole("model.norm.weight", "final_norm", (d,))]
    if not config.tied_embeddings:
        last.append(_whole(HEAD, "unembed", vocabulary))
    return [_whole(EMBEDDING, "embed", vocabulary), *layers, *last]


def _family_of(config: ModelConfig) -> str:
    for name, family in model_folder.FAMILIES.items():
        if family[1:3] == (config.qk_norm, config.attention_bias):
            require(
                name != "LlamaForCausalLM" or config.width % config.heads == 0,
                f"model.width is {config.width} with model.heads {config.heads}",
                "a multiple, which transformers requires of a Llama",
                "Change one of them, or set model.qk_norm for a Qwen3.",
            )
            return name
    raise ConfigError(
        "model.qk_norm and model.attention_bias are both true, expected at most one to "
        "save the model: no published family has both. Leave one out."
    )


def _whole(name: str, leaf: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, (leaf,), None, shape, shape, tuple(range(len(shape))))


def _together(leaf: str, apart: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in the file: heads and their sizes are one axis."""
    if leaf in ("query", "key", "value"):
        return math.prod(apart[:2]), apart[2]
    if leaf == "output":
        return apart[0], math.prod(apart[1:])
    if leaf.endswith("_bias"):
        return (math.prod(apart),)
    return apart


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
      ConfigError: There are none, or one beside an index of others, which programs read
        differently.
    """
    single, index = folder / ONE_FILE, folder / INDEX_FILE
    require(
        single.exists() or index.exists(),
        f"{folder} holds no {ONE_FILE} and no {INDEX_FILE}",
        "weights as safetensors",
        "Download the folder, or save the model from transformers.",
    )
    names = indexed(index) if index.exists() else [ONE_FILE]
    require(
        ONE_FILE in names or not single.exists(),
        f"{folder} holds {ONE_FILE} and {INDEX_FILE}, which names {len(names)} others",
        "one model: some programs read the first and some the second",
        f"Delete {ONE_FILE}, or {INDEX_FILE} with its files.",
    )
    return [folder / name for name in names]


def indexed(index: Path) -> list[str]:
    """The files of its own folder that an index names."""
    names = model_folder.read_json(index).get("weight_map")
    require(
        isinstance(names, dict)
        and bool(names)
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

    The axes of `apart` are those of the file, of which one may be cut in two. `part`
    has one slice per axis of `out`, with steps of 1, and the shape of `out`.

    Raises:
      ConfigError: A number of the part is not finite in out's dtype.
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
        with np.errstate(over="ignore"):  # refused below
            cast = np.ascontiguousarray(block[(slice(None), *others)]).astype(out.dtype)
        require(
            bool(np.isfinite(cast).all()),
            f"tensor {tensor.name} of {tensor.path} holds NaN or infinity, in "
            f"{out.dtype}",
            "finite numbers: such a model samples and learns nothing",
            "Download the folder again, or take a checkpoint of before.",
        )
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
    """Writes one file of tensors as `dtype`; it is there once it is whole."""
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
        raise ConfigError(
            f"{path} was to be read, but {model_folder.not_there(path) or error}; "
            f"expected a whole safetensors file. {_AGAIN}"
        ) from error
