"""Tensors of a Hugging Face folder, and the parameters of `transformer.py` they are.

One table serves Qwen 2, 2.5 and 3 and Llama 3: they name alike what they share. Nothing
is read here.
"""

import math
from typing import NamedTuple

from thundersync_jax.config.model import ModelConfig

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# Constants that older files carry; they follow from config.json.
IGNORED_END = ".rotary_emb.inv_freq"


class Tensor(NamedTuple):
    """One tensor of a folder.

    The parameter is `stored.reshape(apart).transpose(axes)`: the files have the output
    first and the heads in one axis.
    """

    name: str
    leaf: tuple[str, ...]  # where the parameter is in the tree
    layer: int | None  # its place in a stacked leaf
    shape: tuple[int, ...]  # in the file
    apart: tuple[int, ...]  # likewise, heads and their sizes in two axes
    axes: tuple[int, ...]

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Of the parameter, without the axis of layers."""
        return tuple(self.apart[axis] for axis in self.axes)


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

    found = [_whole(EMBEDDING, "embed", vocabulary)]
    for index in range(config.layers):
        for leaf, (name, apart, axes) in layer.items():
            found.append(
                Tensor(
                    f"model.layers.{index}.{name}",
                    ("layers", leaf),
                    index,
                    _together(leaf, apart),
                    apart,
                    axes,
                )
            )
    found.append(_whole("model.norm.weight", "final_norm", (d,)))
    if not config.tied_embeddings:
        found.append(_whole(HEAD, "unembed", vocabulary))
    return found


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
