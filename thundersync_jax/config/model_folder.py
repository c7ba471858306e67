"""The config.json of a Hugging Face folder: read into a model's shape, and written.

What such a file asks for and this package does not compute is refused by its name.
"""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from thundersync_jax.config.checks import effective, is_number, positive, require
from thundersync_jax.config.settings import check_types
from thundersync_jax.errors import ConfigError

RopeKind = Literal["none", "linear", "llama3", "yarn"]

CONFIG_FILE = "config.json"
_ADAPTER_FILE = "adapter_config.json"
_POINTER = b"version https://git-lfs."  # what git-lfs leaves in a file's place
_LARGEST = 1e300  # beyond it numbers of JSON are none that can be computed with
SIZES = {
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
ROPE_NAMES = {
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


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts beyond those of pretraining.

    Numbers of other kinds keep their defaults. `models/layers.py` has the frequencies.

    Source: linear arXiv 2306.15595, llama3 arXiv 2407.21783, yarn arXiv 2309.00071.
    """

    kind: RopeKind = "none"  # as config.json names it; none: "default" there
    factor: float = 1.0  # slow frequencies are divided by it; linear: all of them
    original_tokens: int = 8192  # context of pretraining, of llama3 and yarn
    low_freq_factor: float = 1.0  # llama3: fewer turns in that context are slow
    high_freq_factor: float = 4.0  # llama3: more turns are left as they are
    beta_fast: float = 32.0  # yarn: more turns in that context are left as they are
    beta_slow: float = 1.0  # yarn: fewer turns are slow
    attention_factor: float | None = None  # yarn: of cos and sin; none: of the factor
    truncate: bool = True  # yarn: the ramp between them ends at whole pairs

    def __post_init__(self):
        prefix = "model.rope."
        check_types(self, prefix)
        sizes = ["factor", "original_tokens", "low_freq_factor", "high_freq_factor"]
        positive(self, prefix, [*sizes, "beta_fast", "beta_slow", "attention_factor"])
        for names, kinds in (
            (["factor"], ("linear", "llama3", "yarn")),
            (["original_tokens"], ("llama3", "yarn")),
            (["low_freq_factor", "high_freq_factor"], ("llama3",)),
            (["beta_fast", "beta_slow", "attention_factor", "truncate"], ("yarn",)),
        ):
            effective(self, prefix, names, "kind", kinds)
        for slow, fast in (
            ("low_freq_factor", "high_freq_factor"),
            ("beta_slow", "beta_fast"),
        ):
            require(
                getattr(self, slow) < getattr(self, fast),
                f"{prefix}{slow} is {getattr(self, slow)} with {prefix}{fast} "
                f"{getattr(self, fast)}",
                "less: slow frequencies turn less often than fast ones",
                f"Lower {prefix}{slow}.",
            )


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
    """A JSON object of a folder; ConfigError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = not_there(path) or error
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


def not_there(path: Path) -> str:
    """Why a file has no content of its own, as "it is empty"; "" where it has."""
    if not path.exists():
        return "there is none"
    if not path.is_file():
        return "it is no file"
    with open(path, "rb") as file:
        start = file.read(len(_POINTER))
    if start == _POINTER:
        return "it is a pointer of git-lfs (`git lfs pull` in its folder fetches it)"
    return "" if start else "it is empty"


def architecture(folder: str | os.PathLike) -> dict[str, Any]:
    """The fields of `ModelConfig` that a folder decides; ConfigError for others."""
    path = Path(folder).expanduser() / CONFIG_FILE
    require(
        path.exists() or not path.with_name(_ADAPTER_FILE).exists(),
        f"model.path is {folder}, which holds an adapter ({_ADAPTER_FILE})",
        "a whole model",
        "Merge the adapter into its model (merge_and_unload of peft) and save that.",
    )
    return Reader(path, read_json(path)).fields()


class Reader:
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
            for field, key in SIZES.items()
            if field not in ("kv_heads", "head_dim")
        }
        heads, width = sizes["heads"], sizes["width"]
        own_kv_heads = heads if family.model_type == "llama" else None
        sizes["kv_heads"] = self.number(self._values, SIZES["kv_heads"], own_kv_heads)
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
        names = self._values.get("architectures") or []
        kind = self._values.get("model_type")
        for name, family in FAMILIES.items():
            if kind == family.model_type and names in ([], [name]):
                return name
        raise self._refusal(
            f"architectures {names} and model_type {kind!r}",
            " or ".join(FAMILIES),
            "Name the folder of a dense Qwen 2, 2.5 or 3 or Llama 3 model.",
        )

    def _refuse(self, family: Family) -> None:
        """What changes the numbers and is not computed."""
        values, other = self._values, "Name the folder of another model."
        off = ["mlp_bias", "use_sliding_window"]
        if not family.attention_bias:  # of these two it biases the output as well
            off.append("attention_bias")
        for key in ("quantization_config", "dual_chunk_attention_config"):
            if values.get(key) is not None:
                raise self._refusal(f"{key} {values[key]!r}", "none", other)
        for key in off:
            if self._flag(key):
                raise self._refusal(f"{key} true", "false", other)
        for key, only in (("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
            if values.get(key) not in (None, only):
                raise self._refusal(f"{key} {values[key]!r}", repr(only), other)
        kinds = values.get("layer_types") or []
        if not isinstance(kinds, list):
            raise self._refusal(f"layer_types {kinds!r}", "a list", "Correct it.")
        for kind in kinds:
            if kind != "full_attention":
                raise self._refusal(
                    f"layer_types with {kind!r}", "'full_attention' alone", other
                )

    def _rope(self) -> tuple[float, RopeScaling]:
        values = self._values
        spelled = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
        scaling = values.get(spelled) or {}
        if not isinstance(scaling, dict):
            raise self._refusal(f"{spelled} {scaling!r}", "an object", "Correct it.")
        type_name = scaling.get("rope_type", scaling.get("type", "default"))
        if not isinstance(type_name, str) or type_name not in _KINDS:
            raise self._refusal(
                f"{spelled} of type {type_name!r}",
                "one of " + ", ".join(_KINDS),
                "Name the folder of another model, or take the scaling out of the file "
                "where shorter contexts are enough.",
            )
        kind = _KINDS[type_name]
        names = ROPE_NAMES[kind]
        inside = {key: value for key, value in scaling.items() if value is not None}
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
        if "original_tokens" in ROPE_NAMES[kind]:
            key = "original_max_position_embeddings"
            most = self._values.get("max_position_embeddings")
            inside[key] = self._values.get(key) or inside.get(key) or most
        if {"mscale", "mscale_all_dim"} <= inside.keys():
            log = 0.1 * math.log(max(self.number(inside, "factor"), 1))
            scales = ("mscale", "mscale_all_dim")
            above, below = (self.number(inside, key) * log + 1 for key in scales)
            if not below:
                scale = f"mscale_all_dim {inside['mscale_all_dim']!r}"
                raise self._refusal(scale, "a number above 0", "Correct it.")
            inside.setdefault("attention_factor", above / below)
        fields = {}
        defaults = {f.name: f.default for f in dataclasses.fields(RopeScaling)}
        for field, key in ROPE_NAMES[kind].items():
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
        if not is_number(value) or abs(value) > _LARGEST:
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

    def _refusal(self, received: str, expected: str, way_out: str) -> ConfigError:
        return ConfigError(
            f"{self._path} has {received}, expected {expected}. {way_out}"
        )
