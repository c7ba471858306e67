"""The settings of the model: its shape, and how it computes."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from thundersync_jax.config import dotted, model_folder
from thundersync_jax.config.checks import positive, require
from thundersync_jax.config.groups import ChatConfig, MeshConfig, WarmStartConfig
from thundersync_jax.config.model_folder import RopeScaling
from thundersync_jax.config.rollout import RolloutConfig
from thundersync_jax.config.settings import check_types

_BYTE_LEVEL_IDS = 262  # 256 bytes and the special tokens of chat/byte_level.py
_END = 261  # of them, ends an action
ComputeDtype = Literal["float32", "bfloat16", "float64"]
MatmulPrecision = Literal["default", "high", "highest"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Qwen and Llama family, or what `factory` makes of the fields.

    A `path` decides every field of `SHAPE`, whatever else was given for it, as the
    settings are made: replacing the path replaces the shape, and `path=None` keeps the
    shape alone.
    """

    path: str | None = None  # a Hugging Face folder: its shape and its weights
    factory: str | None = None  # "module:function" for another model, from this config
    vocab_size: int = 264  # rows of the embedding; the byte-level ids need 262
    layers: int = 2  # decoder layers, stacked and scanned
    width: int = 64  # size of the residual stream
    mlp_width: int = 192  # hidden units of the SwiGLU
    heads: int = 4  # query heads
    kv_heads: int = 4  # key and value heads; fewer than heads is grouped-query
    head_dim: int = 16  # size of one head; even, RoPE turns pairs
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    rope: RopeScaling = dataclasses.field(default_factory=RopeScaling)
    norm_eps: float = 1e-6  # added to the mean square in RMSNorm
    qk_norm: bool = False  # RMSNorm on queries and keys, as in Qwen3
    attention_bias: bool = False  # biases on q, k and v, as in Qwen2
    tied_embeddings: bool = True  # the head is the transposed embedding
    dtype: ComputeDtype = "float32"  # activations; the master weights are float32
    logprob_chunk_tokens: int = 512  # tokens whose logits exist at a time
    matmul_precision: MatmulPrecision = "highest"  # of float32 products on TPU and GPU

    def __post_init__(self):
        if isinstance(self.path, str):
            for name, value in model_folder.architecture(self.path).items():
                object.__setattr__(self, name, value)
        if isinstance(self.rope, Mapping):  # as config.json of a work directory has it
            object.__setattr__(self, "rope", RopeScaling(**self.rope))
        check_types(self, "model.")
        if self.factory is not None:
            dotted.check("model.factory", self.factory)
        sizes = ["vocab_size", "layers", "width", "mlp_width", "heads", "kv_heads"]
        sizes += ["head_dim", "logprob_chunk_tokens", "rope_theta", "norm_eps"]
        positive(self, "model.", sizes)
        require(
            self.heads % self.kv_heads == 0,
            f"model.heads is {self.heads} with model.kv_heads {self.kv_heads}",
            "a multiple: every key head serves the same number of query heads",
            f"Set model.kv_heads to a divisor of {self.heads}.",
        )
        require(
            self.head_dim % 2 == 0,
            f"model.head_dim is {self.head_dim}",
            "an even number, since RoPE turns pairs",
            f"Set model.head_dim to {self.head_dim + 1}.",
        )


# What a folder's config.json decides.
SHAPE = (
    *model_folder.SIZES,
    *("rope_theta", "rope", "norm_eps"),
    *("qk_norm", "attention_bias", "tied_embeddings"),
)


def is_shape(name: str) -> bool:
    """Whether a folder decides the setting of this name, as model.width."""
    group, _, field = name.partition(".")
    return group == "model" and field.partition(".")[0] in SHAPE


def from_dict(saved: Mapping[str, Any]) -> ModelConfig:
    """The model of a saved `config_dict`, with its shape of then and without a path."""
    return ModelConfig(**{**saved, "path": None})


def check_tokens(
    model: ModelConfig,
    chat: ChatConfig,
    rollout: RolloutConfig,
    warm_start: WarmStartConfig,
) -> None:
    """Refuses settings that no token of the model can follow."""
    ids, vocab_size, path = rollout.stop_ids, model.vocab_size, model.path
    require(
        chat.format != "template" or path is not None,
        "chat.format is 'template' with model.path none",
        "a model folder: the template is a file of it",
        "Set model.path or chat.format to 'bytes'.",
    )
    in_bytes = chat.format == "bytes" or path is None
    require(
        vocab_size >= _BYTE_LEVEL_IDS or not in_bytes,
        f"model.vocab_size is {vocab_size}",
        f"at least the {_BYTE_LEVEL_IDS} ids of the byte-level tokenizer",
        "Set model.vocab_size to 264.",
    )
    require(
        not chat.drop_thoughts or rollout.samples > 1,
        f"chat.drop_thoughts is True with rollout.samples {rollout.samples}",
        "more: a history without its thoughts is another sample",
        f"Set rollout.samples to {max(2, rollout.turns)}, which is always enough.",
    )
    only = ("system", None), ("thinking", "default"), ("drop_thoughts", False)
    for name, idle in only:
        value = getattr(chat, name)
        require(
            value == idle or not in_bytes,
            f"chat.{name} is {value!r} with byte-level tokens",
            f"{'none' if idle is None else repr(idle)}: only templates use it",
            f"Leave chat.{name} out, or set model.path to a folder with a template.",
        )
    require(
        rollout.thinking_tokens is None or not in_bytes,
        f"rollout.thinking_tokens is {rollout.thinking_tokens} with byte-level tokens",
        "none: they know no thoughts",
        "Leave it out, or set model.path to a folder with a template.",
    )
    if ids is None:
        return
    require(
        max(ids, default=0) < vocab_size,
        f"rollout.stop_ids is {ids} with model.vocab_size {vocab_size}",
        "ids that can be sampled",
        "Lower rollout.stop_ids or raise model.vocab_size.",
    )
    require(
        warm_start.steps == 0 or _END in ids or not in_bytes,
        f"rollout.stop_ids is {ids} with warm_start.steps {warm_start.steps}",
        f"{_END} among them: demonstrations end in it",
        f"Add {_END} or set warm_start.steps to 0.",
    )


def check_sharding(
    model: ModelConfig, mesh: MeshConfig, rollout: RolloutConfig
) -> None:
    """Refuses a mesh that cannot hold equal parts of the model and of its tokens."""
    shared = []
    if model.factory is None:
        shared += [("mesh.fsdp", mesh.fsdp, "model.width", model.width)]
        for name in ("heads", "kv_heads", "mlp_width"):
            size = getattr(model, name)
            shared += [("mesh.tensor", mesh.tensor, f"model.{name}", size)]
    for bucket in (*rollout.gradient_buckets, *rollout.segment_buckets):
        shared += [("mesh.fsdp", mesh.fsdp, "rollout.gradient_buckets", bucket)]
    for axis, devices, name, size in shared:
        require(
            size % devices == 0,
            f"{axis} is {devices} with {size} in {name}",
            f"a divisor of {size}: every device holds an equal part",
            f"Change {axis} or {name}.",
        )
