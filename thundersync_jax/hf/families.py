"""What the published families call a model: its config.json, and its tensors by name.

One table serves Qwen 2, 2.5 and 3 and Llama 3: they name alike what they share. The
shape in a config.json is read by `config/model_folder.py`; no tensor is read here.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from thundersync_jax.config import model_folder
from thundersync_jax.config.checks import require
from thundersync_jax.config.model import ModelConfig
from thundersync_jax.errors import ConfigError

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# Constants that older files carry; they follow from config.json.
IGNORED_END = ".rotary_emb.inv_freq"
_CONTEXT_TOKENS = 32_768  # the longest, where neither a folder nor a scaling says it


class Tensor(NamedTuple):
    """One tensor of a folder.

    The parameter is `stored.reshape(apart).transpose(axes)`: the files have the output
    first and the heads in one axis.
    """

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

    first = [_whole(EMBEDDING, "embed", vocabulary)]
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
    return [*first, *layers, *last]


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
