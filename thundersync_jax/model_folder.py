"""The config.json of a Hugging Face folder: read into a model's shape, and written.

Dense Qwen 2, 2.5 and 3 and Llama 3 only. What such a file can ask for and this package
does not compute is refused by its name in the file. Weights are in `models/weights.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from thundersync_jax.checks import require
from thundersync_jax.errors import ConfigError
from thundersync_jax.rope_scaling import RopeScaling

if TYPE_CHECKING:
    from thundersync_jax.model_config import ModelConfig

CONFIG_FILE = "config.json"
_CONTEXT_TOKENS = 32_768  # the longest, where neither a folder nor a scaling says it
_SIZES = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
_KINDS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
# Fields of RopeScaling and their names in the file, per kind.
_ROPE_NAMES = {
    "none": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_tokens": "original_max_position_embeddings",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_tokens": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "truncate": "truncate",
    },
}


class Family(NamedTuple):
    """What the architecture's name says and config.json does not."""

    model_type: str
    qk_norm: bool
    attention_bias: bool  # on queries, keys and values, never on the output
    head_dim: int | None  # where the file has none; None: the width over the heads


FAMILIES = {
    "LlamaForCausalLM": Family("llama", False, False, None),
    "Qwen2ForCausalLM": Family("qwen2", False, True, None),
    "Qwen3ForCausalLM": Family("qwen3", True, False, 128),
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a folder.

    Raises:
      ConfigError: There is no such file, or it is none.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = "there is none" if isinstance(error, FileNotFoundError) else error
        raise ConfigError(
            f"{path} was to be read, but {why}; expected a file of a Hugging Face "
            "folder. Let model.path name a complete one (hf download NAME --local-dir "
            "DIR makes one)."
        ) from error
    require(
        isinstance(value, dict),
        f"{path} holds a {type(value).__name__}",
        "a JSON object",
        "Download the folder again.",
    )
    return value


def architecture(folder: str | os.PathLike) -> dict[str, Any]:
    """The fields of `ModelConfig` that a folder decides, with their values.

    Raises:
      ConfigError: There is no config.json, or it asks for something else than the dense
        families; the line names what and where.
    """
    path = Path(folder).expanduser() / CONFIG_FILE
    return _Reader(path, read_json(path)).fields()


def longest_context(model: ModelConfig) -> float:
    """The longest context that the model of a folder is made for, in tokens.

    A linear or YaRN factor stretches the context of training, as in vLLM; Llama 3's is
    stretched already. Infinite where config.json does not say.
    """
    path, rope = Path(model.path).expanduser() / CONFIG_FILE, model.rope
    values = read_json(path)
    most = _Reader(path, values).number(values, "max_position_embeddings", math.inf)
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
    if "original_tokens" in _ROPE_NAMES[config.rope.kind]:
        context_tokens = round(config.rope.factor * config.rope.original_tokens)
    if config.rope.kind != "none":
        rope["rope_type"] = config.rope.kind
        for field, key in _ROPE_NAMES[config.rope.kind].items():
            if (value := getattr(config.rope, field)) is not None:
                rope[key] = value
    return {
        "max_position_embeddings": context_tokens,
        **other,
        "architectures": [name],
        "model_type": FAMILIES[name].model_type,
        **{key: getattr(config, field) for field, key in _SIZES.items()},
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


class _Reader:
    """One config.json while it is read."""

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self._path = path
        self._values = values

    def fields(self) -> dict[str, Any]:
        name = self._architecture()
        family = FAMILIES[name]
        self._refuse(family)
        sizes = {
            field: self.number(self._values, key)
            for field, key in _SIZES.items()
            if field not in ("kv_heads", "head_dim")
        }
        heads, width = sizes["heads"], sizes["width"]
        if family.model_type == "llama":
            sizes["kv_heads"] = self.number(self._values, _SIZES["kv_heads"], heads)
        else:
            sizes["kv_heads"] = self.number(self._values, _SIZES["kv_heads"])
        own_head_dim = family.head_dim or width // max(heads, 1)
        sizes["head_dim"] = self.number(self._values, "head_dim", own_head_dim)
        theta, rope = self._rope()
        return {
            **sizes,
            "rope_theta": theta,
            "rope": rope,
            "norm_eps": self.number(self._values, "rms_norm_eps", 1e-6),
            "qk_norm": family.qk_norm,
            "attention_bias": family.attention_bias,
            "tied_embeddings": self._flag("tie_word_embeddings"),
        }

    def _architecture(self) -> str:
        found = self._values.get("architectures") or []
        kind = self._values.get("model_type")
        for name, family in FAMILIES.items():
            if kind == family.model_type and found in ([], [name]):
                return name
        raise self._refusal(
            f"architectures {found} and model_type {kind!r}",
            " or ".join(FAMILIES),
            "Name the folder of a dense Qwen 2, 2.5 or 3 or Llama 3 model.",
        )

    def _refuse(self, family: Family) -> None:
        """What changes the numbers and is not computed."""
        values, other = self._values, "Name the folder of another model."
        absent = ["quantization_config", "dual_chunk_attention_config"]
        off = ["mlp_bias", "use_sliding_window"]
        if not family.attention_bias:  # of these two it biases the output as well
            off.append("attention_bias")
        for key in absent:
            if values.get(key) is not None:
                raise self._refusal(f"{key} {values[key]!r}", "none", other)
        for key in off:
            if self._flag(key):
                raise self._refusal(f"{key} true", "false", other)
        for key, only in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
            if values.get(key) not in (None, only):
                raise self._refusal(f"{key} {values[key]!r}", repr(only), other)
        kinds = values.get("layer_types") or []
        for kind in kinds:
            if kind != "full_attention":
                raise self._refusal(
                    f"layer_types with {kind!r}", "'full_attention' alone", other
                )

    def _rope(self) -> tuple[float, RopeScaling]:
        values = self._values
        spelled = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
        given = values.get(spelled) or {}
        if not isinstance(given, dict):
            raise self._refusal(f"{spelled} {given!r}", "an object", "Correct it.")
        type_name = given.get("rope_type", given.get("type", "default"))
        if type_name not in _KINDS:
            raise self._refusal(
                f"{spelled} of type {type_name!r}",
                "one of " + ", ".join(_KINDS),
                "Name the folder of another model, or take the scaling out of the file "
                "where shorter contexts are enough.",
            )
        kind = _KINDS[type_name]
        names = _ROPE_NAMES[kind]
        inside = {key: value for key, value in given.items() if value is not None}
        rest = inside.keys() - {"rope_type", "type", "rope_theta", *names.values()}
        if inside.get("partial_rotary_factor") == 1.0:
            rest -= {"partial_rotary_factor"}
        if kind == "yarn":
            rest -= {"mscale", "mscale_all_dim"}
        if rest:
            raise self._refusal(
                f"{spelled} with {min(rest)} {inside[min(rest)]!r}",
                f"none beside {', '.join(['rope_theta', *names.values()])}",
                "Name the folder of another model.",
            )
        theta = self.number(inside, "rope_theta", values.get("rope_theta") or 10_000.0)
        return float(theta), self._scaling(kind, inside)

    def _scaling(self, kind: str, inside: Mapping[str, Any]) -> RopeScaling:
        inside = dict(inside)
        if "original_tokens" in _ROPE_NAMES[kind]:
            key = "original_max_position_embeddings"
            most = self._values.get("max_position_embeddings")
            inside[key] = self._values.get(key) or inside.get(key) or most
        if {"mscale", "mscale_all_dim"} <= inside.keys():
            log = 0.1 * math.log(max(self.number(inside, "factor"), 1))
            both = ("mscale", "mscale_all_dim")
            above, below = (self.number(inside, key) * log + 1 for key in both)
            inside.setdefault("attention_factor", above / below)
        fields = {}
        defaults = {f.name: f.default for f in dataclasses.fields(RopeScaling)}
        for field, key in _ROPE_NAMES[kind].items():
            optional = kind == "yarn" and field not in ("factor", "original_tokens")
            if optional and inside.get(key) is None:
                continue
            if isinstance(defaults[field], bool):
                fields[field] = inside[key]
            else:
                fields[field] = self.number(inside, key)
        try:
            return RopeScaling(kind, **fields)
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from error

    def number(self, values: Mapping[str, Any], key: str, default: Any = None) -> Any:
        value = values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refusal(
                f"{key} {'none' if value is None else repr(value)}",
                "a number",
                "Download the folder again.",
            )
        return value

    def _flag(self, key: str) -> bool:
        value = self._values.get(key)
        if value not in (None, False, True):
            raise self._refusal(f"{key} {value!r}", "true or false", "Correct it.")
        return bool(value)

    def _refusal(self, found: str, expected: str, way_out: str) -> ConfigError:
        return ConfigError(f"{self._path} has {found}, expected {expected}. {way_out}")
