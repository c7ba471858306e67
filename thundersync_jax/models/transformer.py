"""One decoder family: Qwen 2, 2.5 and 3, and Llama 3, by configuration.

Parameters are described once, as Flax modules, and then live as a nested dict of
arrays with all layers stacked; every function here is a pure function of that dict and
one sequence, or of a few that are decoded together.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from thundersync_jax.config import ModelConfig
from thundersync_jax.models import layers

Params = dict


class KeyValues(NamedTuple):
    """Rotated keys and values of a segment, all layers."""

    keys: jax.Array  # [L, T, KV, H], compute dtype
    values: jax.Array  # [L, T, KV, H], compute dtype


class LayerCache(NamedTuple):
    """Keys and values of one layer: slices of a stacked cache would be copies."""

    keys: jax.Array  # [slots, KV, S, H], compute dtype
    values: jax.Array  # [slots, KV, S, H], compute dtype


# Logical axes of a layer's parameters, after the leading "layers".
_LAYER_AXES = {
    "attention_norm": ("embed",),
    "query": ("embed", "heads", None),
    "key": ("embed", "kv_heads", None),
    "value": ("embed", "kv_heads", None),
    "output": ("heads", None, "embed"),
    "query_bias": ("heads", None),
    "key_bias": ("kv_heads", None),
    "value_bias": ("kv_heads", None),
    "query_norm": (None,),
    "key_norm": (None,),
    "mlp_norm": ("embed",),
    "gate": ("embed", "mlp"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
}


class Layers(nnx.Module):
    """The stacked layers' parameters: shapes and initial scales."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d, m = config.width, config.mlp_width
        n, kv, h = config.heads, config.kv_heads, config.head_dim
        # Each layer adds two terms to the residual stream; together they start at 1.
        residual = (2 * config.layers) ** -0.5

        def weight(name, *shape, std):
            axes = ("layers", *_LAYER_AXES[name])
            setattr(
                self, name, _weight(config, rngs, (config.layers, *shape), axes, std)
            )

        def constant(name, *shape, value):
            axes = ("layers", *_LAYER_AXES[name])
            setattr(self, name, _constant(config, (config.layers, *shape), axes, value))

        constant("attention_norm", d, value=1)
        weight("query", d, n, h, std=d**-0.5)
        weight("key", d, kv, h, std=d**-0.5)
        weight("value", d, kv, h, std=d**-0.5)
        weight("output", n, h, d, std=(n * h) ** -0.5 * residual)
        if config.attention_bias:
            constant("query_bias", n, h, value=0)
            constant("key_bias", kv, h, value=0)
            constant("value_bias", kv, h, value=0)
        if config.qk_norm:
            constant("query_norm", h, value=1)
            constant("key_norm", h, value=1)
        constant("mlp_norm", d, value=1)
        weight("gate", d, m, std=d**-0.5)
        weight("up", d, m, std=d**-0.5)
        weight("down", m, d, std=m**-0.5 * residual)


class Decoder(nnx.Module):
    """All parameters: embedding, stacked layers, final norm, and the head if untied."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        shape, axes = (config.vocab_size, config.width), ("vocab", "embed")
        self.embed = _weight(config, rngs, shape, axes, config.width**-0.5)
        self.layers = Layers(config, rngs)
        self.final_norm = _constant(config, (config.width,), ("embed",), 1)
        if not config.tied_embeddings:
            self.unembed = _weight(config, rngs, shape, axes, config.width**-0.5)


@dataclasses.dataclass(frozen=True)
class Transformer:
    """The decoder of a config as a `Model`."""

    config: ModelConfig
    token_axis: ClassVar[int] = 1  # of `KeyValues`

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.config.vocab_size

    @property
    def chunk_tokens(self) -> int:
        return self.config.logprob_chunk_tokens

    def init(self, key: jax.Array) -> Params:
        return init(self.config, key)

    def axes(self) -> Params:
        return logical_axes(self.config)

    def empty(self, slots: int) -> tuple[KeyValues, jax.Array]:
        """Keys and values [L, slots, KV, H], and a hidden vector [D]."""
        config, dtype = self.config, compute_dtype(self.config)
        shape = config.layers, slots, config.kv_heads, config.head_dim
        kept = KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        return kept, jnp.zeros(config.width, dtype)

    def segment(
        self,
        params: Params,
        tokens: jax.Array,
        kept: KeyValues | None = None,
        start: jax.Array | None = None,
    ) -> tuple[jax.Array, KeyValues]:
        return segment(self.config, params, tokens, kept, start)

    def projection(self, params: Params) -> Callable[[jax.Array], jax.Array]:
        return projection(self.config, params)

    def cast(self, params: Params) -> Params:
        return cast(self.config, params)

    def decode_params(self, params: Params) -> Params:
        """Parameters in the compute dtype, as a loop over decode steps reads them.

        The layers' are a list, and `output` has the head axis second, which is the
        order that einsum sums in: no slices and no transposed copies in every step.
        """
        params = cast(self.config, params)
        unstacked = [{} for _ in range(self.config.layers)]
        for name, stacked in params["layers"].items():
            for weights, x in zip(unstacked, stacked, strict=True):
                weights[name] = jnp.swapaxes(x, 0, 1) if name == "output" else x
        return params | {"layers": unstacked}

    def decode_cache(self, slots: int, tokens: int) -> tuple[LayerCache, ...]:
        """Zeros, one `LayerCache` per layer."""
        config = self.config
        shape = slots, config.kv_heads, tokens, config.head_dim
        zeros = np.zeros(shape, compute_dtype(config))
        return (LayerCache(zeros, zeros),) * config.layers

    def decode(
        self,
        params: Params,
        cache: tuple[LayerCache, ...],
        ids: jax.Array,
        positions: jax.Array,
    ) -> tuple[tuple[LayerCache, ...], jax.Array]:
        """A token reads keys up to its own position. Returns x [R * T, D] too."""
        config, written = self.config, []
        rows = jnp.arange(ids.shape[0])[:, None]
        attend = jax.vmap(layers.attention, in_axes=(0, 0, 0, 0, None, None))
        x = jnp.take(params["embed"], ids.reshape(-1), axis=0)
        for weights, old in zip(params["layers"], cache, strict=True):
            weights = weights | {"output": jnp.swapaxes(weights["output"], 0, 1)}
            inputs = attention_inputs(config, weights, x, positions.reshape(-1))
            query, *new = (y.reshape(*ids.shape, *y.shape[1:]) for y in inputs)
            keys, values = (
                cached.at[rows, :, positions].set(y, mode="drop", unique_indices=True)
                for cached, y in zip(old, new, strict=True)
            )
            precision = config.matmul_precision
            mixed = attend(query, keys, values, positions, None, precision)
            mixed = mixed.reshape(-1, *mixed.shape[2:])
            x = add_layer_outputs(config, weights, x, mixed)
            written.append(LayerCache(keys, values))
        return tuple(written), x

    def decode_logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """From x [R * T, D] behind the last layer."""
        config = self.config
        hidden = layers.rms_norm(hidden, params["final_norm"], config.norm_eps)
        return logits(config, head_weights(params), hidden)


def init(config: ModelConfig, key: jax.Array) -> Params:
    """Random parameters: float32 (float64 for float64 models), layers stacked."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(key))))


def logical_axes(config: ModelConfig) -> Params:
    """The tree of `init` with a tuple of logical axis names in place of each array."""
    decoder = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0)))
    names = jax.tree.map(
        lambda variable: variable.get_metadata("axes"),
        nnx.state(decoder),
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    return nnx.to_pure_dict(names)


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """That of products and activations; ValueError: float64 where jax has 32 bits."""
    if config.dtype == "float64" and not jax.config.jax_enable_x64:
        raise ValueError(
            "model.dtype=float64 but jax computes in 32 bits; set JAX_ENABLE_X64=1 "
            "or choose float32"
        )
    return jnp.dtype(config.dtype)


def cast(config: ModelConfig, params: Params) -> Params:
    """Parameters as they enter products: in the compute dtype, norms as they are."""
    dtype = compute_dtype(config)

    def leaf(path, x):
        return x if path[-1].key.endswith("_norm") else x.astype(dtype)

    return jax.tree.map_with_path(leaf, params)


def segment(
    config: ModelConfig,
    params: Params,
    tokens: jax.Array,
    past: KeyValues | None = None,
    past_length: jax.Array | int | None = None,
) -> tuple[jax.Array, KeyValues]:
    """Runs the decoder over a piece of one sequence.

    Args:
      tokens: int32[T], at positions past_length .. past_length + T - 1.
      past: Keys and values of the tokens before, [L, S, KV, H]; None at the start.
      past_length: int32[], how many of the S are real; None means all.

    Returns:
      Hidden vectors float[T, D] after the final norm, in the compute dtype, and the
      segment's own keys and values [L, T, KV, H].
    """
    slots = 0 if past is None else past.keys.shape[1]
    past_length = slots if past_length is None else past_length
    positions = past_length + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    gap = None if past is None else (past_length, slots)
    embed = layers.constrain(params["embed"], "vocab", None)
    x = jnp.take(embed, tokens, axis=0).astype(compute_dtype(config))
    x = layers.constrain(x, "tokens", None)

    @jax.checkpoint
    def step(x, operands):
        weights, past = operands
        return layer(config, weights, x, past, positions, gap)

    x, own = jax.lax.scan(step, x, (params["layers"], past))
    return layers.rms_norm(x, params["final_norm"], config.norm_eps), own


def head_weights(params: Params) -> jax.Array:
    """The matrix [V, D] that turns hidden vectors into logits."""
    return params.get("unembed", params["embed"])


def logits(config: ModelConfig, head: jax.Array, hidden: jax.Array) -> jax.Array:
    """float32[T, V] (float64 for float64 models) of hidden vectors float[T, D]."""
    # The cast stands here, inside a chunk, so that the gradient of the head is summed
    # over chunks in the parameters' dtype.
    head = head.astype(hidden.dtype)
    dtype = layers.wide(hidden.dtype)
    return layers.dot("td,vd->tv", hidden, head, config.matmul_precision, dtype)


def projection(config: ModelConfig, params: Params) -> Callable[[jax.Array], jax.Array]:
    """Hidden vectors [C, D] to logits [C, V], laid out over the mesh."""
    head = layers.constrain(head_weights(params), "vocab", None)

    def project(hidden_c):
        hidden_c = layers.constrain(hidden_c, "tokens", None)
        return layers.constrain(logits(config, head, hidden_c), "tokens", "vocab")

    return project


def layer(
    config: ModelConfig,
    weights: Params,
    x: jax.Array,
    past: KeyValues | None,
    positions: jax.Array,
    gap: tuple[jax.Array | int, int] | None,
) -> tuple[jax.Array, KeyValues]:
    """One layer over a segment x [T, D]; its keys and values [T, KV, H] too.

    `weights` are without the leading axis, `past` are keys and values [S, KV, H] of the
    tokens before, `gap` says which of the S + T keys nobody reads, as for
    `layers.attention`.
    """
    # Laid out as they lie, and then gathered: so their gradients are scattered again.
    weights = {
        name: layers.constrain(weight, *_LAYER_AXES[name])
        for name, weight in weights.items()
    }
    weights = {
        name: layers.constrain(weight, *_gathered(name))
        for name, weight in cast(config, weights).items()
    }
    query, key, value = attention_inputs(config, weights, x, positions)
    query = layers.constrain(query, "tokens", "heads", None)
    # Every query may read every key: keys are gathered over the token axis.
    key = layers.constrain(key, None, "kv_heads", None)
    value = layers.constrain(value, None, "kv_heads", None)
    own = KeyValues(key, value)
    if past is not None:
        key = jnp.concatenate([past.keys.astype(key.dtype), key])
        value = jnp.concatenate([past.values.astype(value.dtype), value])
    key, value = jnp.swapaxes(key, 0, 1), jnp.swapaxes(value, 0, 1)
    precision = config.matmul_precision
    mixed = layers.attention(query, key, value, None, gap, precision)
    mixed = layers.constrain(mixed, "tokens", "heads", None)
    return add_layer_outputs(config, weights, x, mixed), own


def attention_inputs(
    config: ModelConfig, weights: Params, x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries [T, N, H] and keys, and values [T, KV, H], of one layer."""
    normed = layers.rms_norm(x, weights["attention_norm"], config.norm_eps)

    def project(name):
        product = layers.dot(
            "td,dnh->tnh", normed, weights[name], config.matmul_precision
        )
        if config.attention_bias:
            product = product + weights[f"{name}_bias"][None]
        return product

    query, key, value = project("query"), project("key"), project("value")
    if config.qk_norm:
        query = layers.rms_norm(query, weights["query_norm"], config.norm_eps)
        key = layers.rms_norm(key, weights["key_norm"], config.norm_eps)
    query = layers.rotate(config, query, positions)
    key = layers.rotate(config, key, positions)
    return query, key, value


def add_layer_outputs(
    config: ModelConfig, weights: Params, x: jax.Array, mixed: jax.Array
) -> jax.Array:
    """Adds attention's output [T, N, H] and the feed-forward layer to x [T, D]."""
    precision = config.matmul_precision
    x = x + layers.dot("tnh,nhd->td", mixed, weights["output"], precision)
    x = layers.constrain(x, "tokens", None)
    normed = layers.rms_norm(x, weights["mlp_norm"], config.norm_eps)
    x = x + layers.swiglu(
        normed, weights["gate"], weights["up"], weights["down"], precision
    )
    return layers.constrain(x, "tokens", None)


def _gathered(name):
    """Layout of a layer's weight while it is used: whole along "embed"."""
    return [None if axis == "embed" else axis for axis in _LAYER_AXES[name]]


def _weight(config, rngs, shape, axes, std):
    dtype = layers.wide(compute_dtype(config))
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, dtype), axes=axes)


def _constant(config, shape, axes, value):
    dtype = layers.wide(compute_dtype(config))
    return nnx.Param(jnp.full(shape, value, dtype), axes=axes)
