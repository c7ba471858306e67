"""Weights of Hugging Face folders: into sharded parameters, and back."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.config import model_folder
from thundersync_jax.config.checks import require
from thundersync_jax.config.model import ModelConfig
from thundersync_jax.config.workdir import replace_json, replacing
from thundersync_jax.errors import ConfigError
from thundersync_jax.hf import files
from thundersync_jax.models import layers, transformer

Params = Any  # the tree of `transformer.init`
_GENERATION_FILE = "generation_config.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
STORED_DTYPES = ("float32", "bfloat16", "float16", "float64")
# Of a folder's model and of savings that were cut off; others stay.
_WEIGHT_FILES = ("model.safetensors*", "model-*-of-*.safetensors*")
# Where an index names the files of the first kind, new ones are of the second.
_GENERATIONS = ("", "-b")


def check(folder: str | os.PathLike, config: ModelConfig) -> dict[str, files.Stored]:
    """The tensors of a folder, where they are this model's; only headers are read.

    Raises:
      ConfigError: A tensor is missing, not expected, of another shape, or of a dtype
        that cannot be read; or a file is torn.
    """
    folder = Path(folder).expanduser()
    stored = files.stored(folder)
    require(  # before a name is made for every one of them
        config.layers <= len(stored),
        f"{folder / model_folder.CONFIG_FILE} tells of {config.layers} layers and the "
        f"weights are {len(stored)} tensors",
        "no more layers than tensors",
        "Correct num_hidden_layers, or download the folder again.",
    )
    expected = {tensor.name: tensor.shape for tensor in files.tensors(config)}
    if missing := [name for name in expected if name not in stored]:
        raise ConfigError(
            f"{folder} has no tensor {_few(missing)}, expected shape "
            f"{list(expected[missing[0]])}: config.json tells of {config.layers} "
            "layers. Download or save the folder again."
        )
    if config.tied_embeddings:
        expected[files.HEAD] = expected[files.EMBEDDING]
    ignored = files.IGNORED_END
    extra = [n for n in stored if n not in expected and not n.endswith(ignored)]
    if extra:
        raise ConfigError(
            f"{folder} has a tensor {_few(extra)} of shape "
            f"{list(stored[extra[0]].shape)}, expected none of this name: the model of "
            "config.json does not use it. Name the folder of a dense Qwen 2, 2.5 or 3 "
            "or Llama 3 model."
        )
    for name, shape in expected.items():
        if name not in stored:  # the head of tied embeddings
            continue
        tensor = stored[name]
        require(
            tensor.shape == shape,
            f"tensor {name} of {tensor.path} has shape {list(tensor.shape)}",
            f"{list(shape)}, as config.json tells",
            "Correct config.json, or download the folder again.",
        )
        require(
            tensor.dtype in files.DTYPES,
            f"tensor {name} of {tensor.path} is stored as {tensor.dtype}",
            "one of " + ", ".join(files.DTYPES),
            "Name the folder of weights that are not quantized.",
        )
    return stored


def load(folder: str | os.PathLike, config: ModelConfig, shardings: Any) -> Params:
    """The parameters of a Hugging Face folder, laid out over devices.

    Like `shardings`, this is the tree of `transformer.init`: float32 (float64 for
    float64 models).

    Raises:
      ConfigError: As `check`, with nothing on a device then, or a weight is NaN or
        infinite.
    """
    stored = check(folder, config)
    if config.tied_embeddings and files.HEAD in stored:
        require(
            files.equal(stored[files.EMBEDDING], stored[files.HEAD]),
            f"{files.HEAD} of {folder} differs from {files.EMBEDDING} although "
            "config.json has tie_word_embeddings true",
            "the same numbers",
            "Set tie_word_embeddings to false if the head is its own.",
        )
    dtype = np.dtype(layers.wide(transformer.compute_dtype(config)))
    leaves: dict[tuple[str, ...], list[files.Tensor]] = {}
    for tensor in files.tensors(config):
        leaves.setdefault(tensor.leaf, []).append(tensor)

    def leaf(path, sharding):
        return _leaf(leaves[tuple(key.key for key in path)], stored, dtype, sharding)

    return jax.tree.map_with_path(leaf, shardings)


def save(
    folder: str | os.PathLike,
    config: ModelConfig,
    params: Params,
    dtype: str = "float32",
    *,
    metadata: Mapping[str, str] | None = None,
    tokenizer_from: str | os.PathLike | None = None,
    generation: Mapping[str, Any] | None = None,
    most_shard_bytes: float = 5e9,
) -> None:
    """Writes a folder that transformers and vLLM load.

    Every file is there once it is whole; config.json comes last.

    Args:
      folder: Folder to write, made where it is missing. A model in it is replaced.
      config: Shape of the model. Other entries of config.json come from that of
        `tokenizer_from`.
      params: The tree of `transformer.init`, on any devices of this process.
      dtype: Dtype of the stored weights, one of `STORED_DTYPES`.
      metadata: Texts for the headers of the safetensors files, by name.
      tokenizer_from: A folder whose tokenizer, chat template and generation_config.json
        are copied; None: `config.path`.
      generation: Content of generation_config.json; None: a copy.
      most_shard_bytes: Weights that take more are cut into several files.

    Raises:
      ConfigError: No published family has such a model.
      ValueError: Weights that are not finite, in `dtype`, or have other shapes.
    """
    folder, source = Path(folder).expanduser(), tokenizer_from or config.path
    source = Path(source).expanduser() if source is not None else None
    other = {}
    if source is not None and (source / model_folder.CONFIG_FILE).is_file():
        other = model_folder.read_json(source / model_folder.CONFIG_FILE)
    described = files.config_json(config, dtype, other)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder, config, params, dtype, metadata, most_shard_bytes)
    if source is not None and source.resolve() != folder.resolve():
        for pattern in (*_TOKENIZER_FILES, _GENERATION_FILE):
            for path in source.glob(pattern):
                copy = folder / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                with replacing(copy) as file:
                    file.write(path.read_bytes())
    if generation is None and source is None:
        generation = {"_from_model_config": True}
    if generation is not None:
        replace_json(folder / _GENERATION_FILE, generation)
    replace_json(folder / model_folder.CONFIG_FILE, described)


def write_tensors(
    folder: str | os.PathLike,
    config: ModelConfig,
    params: Params,
    dtype: str = "float32",
    metadata: Mapping[str, str] | None = None,
    most_shard_bytes: float = 5e9,
) -> None:
    """Replaces the weights of a folder, its safetensors files alone.

    Whoever reads meanwhile, or after this was killed, finds all of the old weights or
    all of the new. The host holds two copies of one tensor at most. Arguments and
    errors are those of `save`.
    """
    require(
        dtype in STORED_DTYPES,
        f"the dtype of saved weights is {dtype!r}",
        "one of " + ", ".join(STORED_DTYPES),
        "Take float32 to lose nothing.",
    )
    folder, stored = Path(folder).expanduser(), jnp.dtype(dtype)
    pieces = [_piece(tensor, params, stored) for tensor in files.tensors(config)]
    shards = _shards(pieces, stored, most_shard_bytes)
    names = _file_names(folder, len(shards))
    places: dict[str, str] = {}
    # vLLM and transformers look for "format" and refuse other values.
    texts = {"format": "pt", **(metadata or {})}
    for name, shard in zip(names, shards, strict=True):
        files.write(folder / name, shard, stored, texts)
        places |= {piece.name: name for piece in shard}
    if len(shards) > 1:
        total = sum(int(np.prod(piece.shape)) for piece in pieces) * stored.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": places}
        replace_json(folder / files.INDEX_FILE, index)
        names.append(files.INDEX_FILE)
    for pattern in _WEIGHT_FILES:
        for path in folder.glob(pattern):
            if path.name not in names:
                path.unlink()


def _few(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _leaf(
    tensors: Sequence[files.Tensor],
    stored: Mapping[str, files.Stored],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    """One parameter, read per part and put on the devices that hold the part."""
    shape = tensors[0].parameter_shape
    stacked = tensors[0].layer is not None
    if stacked:
        shape = len(tensors), *shape

    def read(index):
        sizes = zip(index, shape, strict=True)
        out = np.empty([len(range(n)[s]) for s, n in sizes], dtype)
        chosen = tensors[index[0]] if stacked else tensors
        part = index[1:] if stacked else index
        for tensor, place in zip(chosen, out if stacked else [out], strict=True):
            source = stored[tensor.name]
            files.copy_part(source, tensor.apart, tensor.axes, part, place)
        return out

    holders: dict[tuple, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        key = tuple((s.start, s.stop) for s in index)
        holders.setdefault(key, []).append(device)
    arrays = []
    for key, devices in holders.items():
        part = read([slice(*ends) for ends in key])
        # Not jax.make_array_from_callback: it holds the parts of all devices at once.
        arrays += jax.block_until_ready([jax.device_put(part, d) for d in devices])
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _piece(tensor: files.Tensor, params: Params, dtype: np.dtype) -> files.Piece:
    leaf = params
    for key in tensor.leaf:
        leaf = leaf[key]
    shape = leaf.shape if tensor.layer is None else leaf.shape[1:]
    if shape != tensor.parameter_shape:
        raise ValueError(
            f"parameter {'.'.join(tensor.leaf)} has shape {leaf.shape}, expected "
            f"{tensor.parameter_shape} for {tensor.name}; give the model's own config"
        )

    def value():
        # Narrow casts run on the device: half as many bytes come to the host.
        on_device = dtype if dtype.itemsize < leaf.dtype.itemsize else leaf.dtype
        layer = None if tensor.layer is None else np.int32(tensor.layer)
        array = np.asarray(_cast_layer(leaf, layer, on_device))
        array = array.astype(dtype, copy=False)
        if not np.isfinite(array).all():
            raise ValueError(
                f"{tensor.name} is not finite in {dtype}; nothing is saved. A wider "
                "dtype holds larger numbers"
            )
        return array.transpose(np.argsort(tensor.axes)).reshape(tensor.shape)

    return files.Piece(tensor.name, tensor.shape, value)


@jax.jit(static_argnums=2)
def _cast_layer(leaf, layer, dtype):
    return (leaf if layer is None else leaf[layer]).astype(dtype)


def _shards(
    pieces: Sequence[files.Piece], dtype: np.dtype, most_bytes: float
) -> list[list[files.Piece]]:
    shards: list[list[files.Piece]] = [[]]
    filled = 0
    for piece in pieces:
        size = int(np.prod(piece.shape)) * dtype.itemsize
        if shards[-1] and filled + size > most_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(piece)
        filled += size
    return shards


def _file_names(folder: Path, count: int) -> list[str]:
    """Of the next weights; those that an index names now are kept until it changes."""
    if count == 1:
        return [files.ONE_FILE]
    index = folder / files.INDEX_FILE
    current = set(files.indexed(index)) if index.exists() else set()
    for mark in _GENERATIONS:
        numbers = range(1, count + 1)
        names = [f"model-{i:05}-of-{count:05}{mark}.safetensors" for i in numbers]
        if current.isdisjoint(names):
            return names
    raise ConfigError(
        f"{index} names files of two savings, expected one. Delete it and the "
        "safetensors files."
    )
