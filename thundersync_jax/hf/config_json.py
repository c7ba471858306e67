"""The config.json of a model: written for others, and how long a context it allows.

`config/model_folder.py` reads its shape.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thundersync_jax.config.checks import require
from thundersync_jax.config.model import ModelConfig
from thundersync_jax.config.model_folder import (
    CONFIG_FILE,
    FAMILIES,
    ROPE_NAMES,
    SIZES,
    Reader,
    read_json,
)
from thundersync_jax.errors import ConfigError

_CONTEXT_TOKENS = 32_768  # the longest, where neither a folder nor a scaling says it


def longest_context(model: ModelConfig) -> float:
    """The longest context that the model of a folder is made for, in tokens.

    A linear or YaRN factor stretches the context of training, as in vLLM; Llama 3's is
    stretched already. Infinite where config.json does not say.
    """
    path, rope = Path(model.path).expanduser() / CONFIG_FILE, model.rope
    values = read_json(path)
    most = Reader(path, values).number(values, "max_position_embeddings", math.inf)
    if rope.kind == "linear":
        return most * rope.factor
    if rope.kind == "yarn":
        return max(most, rope.original_tokens * rope.factor)
    return most


def config_json(
    config: ModelConfig, dtype: str, source: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The config.json of a model, for transformers 4 and 5 and vLLM.

    Args:
      config: The model.
      dtype: Of the stored weights, as "bfloat16".
      source: A config.json that decides everything else, as end tokens.

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
    if "original_tokens" in ROPE_NAMES[config.rope.kind]:
        context_tokens = round(config.rope.factor * config.rope.original_tokens)
    if config.rope.kind != "none":
        rope["rope_type"] = config.rope.kind
        for field, key in ROPE_NAMES[config.rope.kind].items():
            if (value := getattr(config.rope, field)) is not None:
                rope[key] = value
    return {
        "max_position_embeddings": context_tokens,
        **other,
        "architectures": [name],
        "model_type": FAMILIES[name].model_type,
        **{key: getattr(config, field) for field, key in SIZES.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_parameters": rope,  # as transformers 5 spells it; 4 reads the next two
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope.kind == "none" else rope,
        "dtype": dtype,
    }


def _family_of(config: ModelConfig) -> str:
    for name, family in FAMILIES.items():
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
