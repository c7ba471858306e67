"""Layers as pure functions of one sequence; batching is a vmap outside.

Matrix products run in the dtype of their operands; norms, rotations and softmax in
float32 or better (`wide`).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from thundersync_jax.config.model import ModelConfig
from thundersync_jax.config.model_folder import RopeScaling

# Logical axis -> mesh axis, for parameters and activations alike. "tokens" and "embed"
# share `fsdp`: activations are cut by token, the weights they meet are gathered.
MESH_AXES: dict[str, str | None] = {
    "layers": None,
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "tokens": "fsdp",
}

# Queries whose scores exist at a time. At 4,096 tokens on CPU the gradient of a layer
# took .54 (128), .65 (256), .69 (512), .77 (1,024) of the time with all scores at once;
# smaller blocks leave too little to devices that share one.
BLOCK_TOKENS = 256
CUDNN_HEAD_DIM = 128  # the largest that its kernels have on every GPU they run on


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Lays `x` out over the mesh in context; without a mesh it returns `x`.

    `axes` are a logical name or None per axis. A name whose mesh axis is absent or does
    not divide the size is left out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return x
    spec = [MESH_AXES.get(name) for name in axes]
    divides = [
        axis in mesh.shape and size % mesh.shape[axis] == 0
        for axis, size in zip(spec, x.shape, strict=True)
    ]
    kept = [axis if ok else None for axis, ok in zip(spec, divides, strict=True)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*kept))


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of sums and exponentials: float32, float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def dot(
    spec: str,
    a: jax.Array,
    b: jax.Array,
    precision: str,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Einsum of two operands at the configured precision; `dtype` may be wider."""
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalization over the last axis.

        scale * x / sqrt(mean(x^2) + eps)

    Args:
      x: float[..., D]; the result has its shape and dtype.
      scale: float[D].

    Source: arXiv 1910.07467.
    """
    x_wide = x.astype(wide(x.dtype))
    mean_square = jnp.mean(jnp.square(x_wide), axis=-1, keepdims=True)
    scale = scale.astype(x_wide.dtype).reshape((1,) * (x.ndim - 1) + scale.shape)
    return (x_wide * jax.lax.rsqrt(mean_square + eps) * scale).astype(x.dtype)


def attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    limits: jax.Array | None,
    gap: tuple[jax.Array | int, int] | None,
    precision: str,
) -> jax.Array:
    """Softmax attention with grouped queries.

        softmax(q k^T / sqrt(H)) v over the keys that a query may read

    Up to `BLOCK_TOKENS` queries are taken at once, more in blocks whose scores are
    recomputed for the gradient: beside its operands it needs memory for a block's
    scores and a few arrays of the operands' size, linear in T and in S. Causal
    attention in half precision is cuDNN's on a GPU (`_cudnn_applies`).

    Args:
      query: float[T, N, H]; the result has its shape and dtype.
      keys: float[KV, S, H], N divisible by KV; query head n reads head n // (N / KV).
      values: float[KV, S, H].
      limits: int32[T], the last key that each query may read. None: the last T keys
        are the queries' own, and each reads up to its own.
      gap: Nobody reads the keys from the first number up to the second, that one not
        included. None: there is no gap. Every query must have a key left.
    """
    tokens, slots = query.shape[0], keys.shape[1]
    if limits is None:
        if gap is None and slots == tokens and _cudnn_applies(query):
            return _cudnn(query, keys, values)
        limits = slots - tokens + jnp.arange(tokens, dtype=jnp.int32)
    if tokens <= BLOCK_TOKENS:
        return _at_once(query, keys, values, limits, gap, precision)
    return _in_blocks(query, keys, values, limits, gap, precision)


def _at_once(query, keys, values, limits, gap, precision):
    """`attention` with the scores of all queries at a time."""
    tokens, heads, head_dim = query.shape
    kv_heads, slots, _ = keys.shape
    dtype = wide(query.dtype)
    # The queries of a key head on one axis, for products with two such axes are slow on
    # CPU; a token's together, so that tokens may lie on several devices.
    share = heads // kv_heads
    grouped = query.reshape(tokens, kv_heads, share, head_dim)
    grouped = jnp.swapaxes(grouped, 0, 1).reshape(kv_heads, -1, head_dim)
    scores = dot("kqh,ksh->kqs", grouped, keys, precision, dtype) * head_dim**-0.5
    index = jnp.arange(slots, dtype=jnp.int32)
    visible = index[None] <= limits[:, None]
    if gap is not None:
        start, stop = gap
        visible &= ((index < start) | (index >= stop))[None]
    visible = jnp.repeat(visible, share, axis=0)
    scores = jnp.where(visible[None], scores, jnp.finfo(dtype).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    mixed = dot("kqs,ksh->kqh", shares, values, precision)
    mixed = mixed.reshape(kv_heads, tokens, share, head_dim)
    return jnp.swapaxes(mixed, 0, 1).reshape(tokens, heads, head_dim)


def _in_blocks(query, keys, values, limits, gap, precision):
    """`attention` with the scores of one block of queries at a time."""
    tokens, dtype = query.shape[0], query.dtype
    blocks = -(-tokens // BLOCK_TOKENS)
    devices = _mesh_size("tokens")
    rows = -(-tokens // (blocks * devices)) * devices
    pad = blocks * rows - tokens
    # Block i holds queries i, i + blocks, ...: tokens that lie on several devices in
    # contiguous pieces stay where they are, and each has its share of every block.
    query = jnp.pad(query, ((0, pad), (0, 0), (0, 0)))
    query = jnp.swapaxes(query.reshape(rows, blocks, *query.shape[1:]), 0, 1)
    limits = jnp.pad(limits, (0, pad), mode="edge").reshape(rows, blocks).T
    # The gradients of keys and values are summed over the blocks in this dtype.
    keys, values = keys.astype(wide(dtype)), values.astype(wide(dtype))

    @jax.checkpoint
    def block(query, limits):
        query = constrain(query, "tokens", "heads", None)
        own = keys.astype(dtype), values.astype(dtype)
        return _at_once(query, *own, limits, gap, precision)

    def step(_, operands):
        return None, block(*operands)

    _, mixed = jax.lax.scan(step, None, (query, limits))
    return jnp.swapaxes(mixed, 0, 1).reshape(-1, *mixed.shape[2:])[:tokens]


def _cudnn_applies(query):
    """Whether cuDNN may compute causal attention; decided while a program is traced."""
    mesh = jax.sharding.get_abstract_mesh()
    device = None if mesh.empty else mesh.abstract_device
    platform = jax.default_backend() if device is None else device.platform
    half = query.dtype in (jnp.bfloat16, jnp.float16)
    head_dim = query.shape[-1]
    known = head_dim % 8 == 0 and head_dim <= CUDNN_HEAD_DIM
    return platform in ("gpu", "cuda") and half and known and _mesh_size("tokens") == 1


def _mesh_size(name):
    """Devices of the mesh in context over which a logical axis is cut."""
    return jax.sharding.get_abstract_mesh().shape.get(MESH_AXES[name], 1)


def _cudnn(query, keys, values):
    """Lowered for CUDA, with its gradient, but not run so far, for want of a GPU.

    The gradient repeats itself bit for bit only where XLA is asked for deterministic
    operations (--xla_gpu_deterministic_ops=true).
    """
    keys, values = jnp.swapaxes(keys, 0, 1), jnp.swapaxes(values, 0, 1)
    return jax.nn.dot_product_attention(
        query, keys, values, is_causal=True, implementation="cudnn"
    )


def swiglu(
    x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, precision: str
) -> jax.Array:
    """Gated feed-forward layer.

        (silu(x gate) * (x up)) down

    Args:
      x: float[T, D].
      gate, up: float[D, M].
      down: float[M, D].

    Source: arXiv 2002.05202.
    """
    hidden = jax.nn.silu(dot("td,dm->tm", x, gate, precision))
    hidden = constrain(hidden * dot("td,dm->tm", x, up, precision), "tokens", "mlp")
    return dot("tm,md->td", hidden, down, precision)


def rotate(config: ModelConfig, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates heads by their positions, first half of a head against the second.

        angle_ti = position_t * frequency_i;  cos and sin times the attention factor

    Args:
      x: float[T, N, H], queries or keys; the result has its shape and dtype.
      positions: int32[T].

    Source: arXiv 2104.09864; the halves are paired as in Llama and Qwen.
    """
    dtype = wide(x.dtype)
    frequency = frequencies(config).astype(dtype)
    angle = positions.astype(dtype)[:, None, None] * frequency[None, None, :]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    if (factor := attention_factor(config.rope)) != 1:
        sin, cos = sin * factor, cos * factor
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each pair, float64[H/2]: theta^(-2i/H), then scaled."""
    half = config.head_dim // 2
    plain = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    rope = config.rope
    if rope.kind == "none":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    fast = _llama3(rope, plain) if rope.kind == "llama3" else _yarn(config, half)
    return plain * fast + plain / rope.factor * (1 - fast)


def attention_factor(rope: RopeScaling) -> float:
    """What queries and keys are multiplied by: 1 but for YaRN."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(max(rope.factor, 1.0)) + 1.0


def _llama3(rope: RopeScaling, plain: np.ndarray) -> np.ndarray:
    """Share [H/2] of the plain frequency, by turns in the context of pretraining."""
    turns = rope.original_tokens * plain / (2 * math.pi)
    share = (turns - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return np.clip(share, 0, 1)


def _yarn(config: ModelConfig, half: int) -> np.ndarray:
    """Share [H/2] of the plain frequency: a ramp over the pairs, not over the turns."""
    rope = config.rope

    def pair(turns):
        """The pair that turns so often in the context of pretraining."""
        wavelength = rope.original_tokens / (2 * math.pi * turns)
        return half * math.log(wavelength) / math.log(config.rope_theta)

    low, high = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # Pairs are bounded by the size of a head, twice their number, as published.
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    return 1 - np.clip((np.arange(half) - low) / (high - low), 0, 1)
