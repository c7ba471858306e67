"""Layers as pure functions of one sequence; batching is a vmap outside.

Matrix products run in the dtype of their operands; norms, rotations and softmax in
float32 or better (`wide`).
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

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


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Lays `x` out over the mesh in context; without a mesh it returns `x`.

    Args:
      x: Any array.
      axes: One logical name or None per axis. A name whose mesh axis is absent or does
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
    """The one matrix product: einsum at the configured precision.

    Args:
      spec: Two-operand einsum.
      a: Operand, in the compute dtype.
      b: Operand, in the compute dtype.
      precision: "default", "high" or "highest".
      dtype: Of accumulation and result where it is wider than the operands.
    """
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalization over the last axis.

        scale * x / sqrt(mean(x^2) + eps)

    Args:
      x: float[..., D].
      scale: float[D].
      eps: Added to the mean square.

    Returns:
      float[..., D], the dtype of `x`.

    Source: arXiv 1910.07467.
    """
    x_wide = x.astype(wide(x.dtype))
    mean_square = jnp.mean(jnp.square(x_wide), axis=-1, keepdims=True)
    scale = scale.astype(x_wide.dtype).reshape((1,) * (x.ndim - 1) + scale.shape)
    return (x_wide * jax.lax.rsqrt(mean_square + eps) * scale).astype(x.dtype)


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding, first half of a head against the second.

        angle_ti = position_t * theta^(-2i/H)

    Args:
      x: float[T, N, H].
      positions: int32[T].
      theta: Base of the frequencies.

    Returns:
      float[T, N, H], the dtype of `x`.

    Source: arXiv 2104.09864; the halves are paired as in Llama and Qwen.
    """
    half = x.shape[-1] // 2
    dtype = wide(x.dtype)
    frequency = theta ** (-jnp.arange(half, dtype=dtype) / half)
    angle = positions.astype(dtype)[:, None, None] * frequency[None, None, :]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def attention(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: jax.Array,
    precision: str,
) -> jax.Array:
    """Softmax attention with grouped queries.

        softmax(q k^T / sqrt(H)) v over the visible keys

    Args:
      query: float[T, N, H].
      keys: float[KV, S, H], N divisible by KV; query head n reads head n // (N / KV).
      values: float[KV, S, H].
      visible: bool[T, S], at least one key per query.
      precision: Of both products.

    Returns:
      float[T, N, H], the dtype of `query`.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[0]
    dtype = wide(query.dtype)
    # The queries of a key head on one axis, for products with two such axes are slow on
    # CPU; a token's together, so that tokens may lie on several devices.
    share = heads // kv_heads
    grouped = query.reshape(tokens, kv_heads, share, head_dim)
    grouped = jnp.swapaxes(grouped, 0, 1).reshape(kv_heads, -1, head_dim)
    scores = dot("kqh,ksh->kqs", grouped, keys, precision, dtype) * head_dim**-0.5
    seen = jnp.repeat(visible, share, axis=0)
    scores = jnp.where(seen[None], scores, jnp.finfo(dtype).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    mixed = dot("kqs,ksh->kqh", shares, values, precision)
    mixed = mixed.reshape(kv_heads, tokens, share, head_dim)
    return jnp.swapaxes(mixed, 0, 1).reshape(tokens, heads, head_dim)


def swiglu(
    x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, precision: str
) -> jax.Array:
    """Gated feed-forward layer.

        (silu(x gate) * (x up)) down

    Args:
      x: float[T, D].
      gate: float[D, M].
      up: float[D, M].
      down: float[M, D].
      precision: Of the products.

    Returns:
      float[T, D].

    Source: arXiv 2002.05202.
    """
    hidden = jax.nn.silu(dot("td,dm->tm", x, gate, precision))
    hidden = constrain(hidden * dot("td,dm->tm", x, up, precision), "tokens", "mlp")
    return dot("tm,md->td", hidden, down, precision)
