"""Rotary position embedding, with the scalings of the Qwen and Llama families.

Frequencies are constants of a model: float64 numpy arrays, made while a program is
traced and rounded once, to the dtype of the angles.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.model_config import ModelConfig
from thundersync_jax.models import layers
from thundersync_jax.rope_scaling import RopeScaling


def rotate(config: ModelConfig, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates heads by their positions, first half of a head against the second.

        angle_ti = position_t * frequency_i;  cos and sin times the attention factor

    Args:
      config: The model.
      x: float[T, N, H], queries or keys.
      positions: int32[T].

    Returns:
      float[T, N, H], the dtype of `x`.

    Source: arXiv 2104.09864; the halves are paired as in Llama and Qwen.
    """
    dtype = layers.wide(x.dtype)
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
