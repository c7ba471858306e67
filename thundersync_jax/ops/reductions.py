"""Reductions over the positions that count.

The masked value is selected *before* it is used: multiplying by a zero mask turns a
NaN at a position that does not count into a NaN of the whole sum.
"""

import jax
import jax.numpy as jnp


def masked_sum(value_t: jax.Array, mask_t: jax.Array) -> jax.Array:
    """Sum of `value_t` where `mask_t`, whatever stands elsewhere.

        sum_t value_t [mask_t]

    Args:
      value_t: Float array.
      mask_t: Bool array of the same shape.

    Returns:
      Scalar of the dtype of `value_t`. Its gradient at masked positions is exactly 0.
    """
    return jnp.sum(jnp.where(mask_t, value_t, jnp.zeros_like(value_t)))
