"""A policy of another family: a recurrent network as Flax modules, and its factory."""

import jax
import jax.numpy as jnp
from flax import nnx

from thundersync_jax.config import ModelConfig
from thundersync_jax.models.base import FromLogits


class GRU(nnx.Module):
    """Two recurrent layers between an embedding and a head of its own."""

    def __init__(self, vocab_size: int, width: int, rngs: nnx.Rngs, dtype=jnp.float32):
        types = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.embed = nnx.Embed(vocab_size, width, **types)
        self.lower = nnx.GRUCell(width, width, **types)
        self.upper = nnx.GRUCell(width, width, **types)
        self.head = nnx.Linear(width, vocab_size, **types)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [T, V] of tokens [T]."""
        x = self.embed(tokens)
        for cell in (self.lower, self.upper):
            _, x = jax.lax.scan(
                lambda carry, row, cell=cell: cell(carry, row), x[0] * 0, x
            )
        return self.head(x)


def make(config: ModelConfig) -> FromLogits:
    def module(key=0):
        return GRU(config.vocab_size, config.width, nnx.Rngs(key), config.dtype)

    graph = nnx.graphdef(nnx.eval_shape(module))

    def init(key):
        return nnx.to_pure_dict(nnx.state(module(key)))

    def logits(params, tokens):
        return nnx.merge(graph, params)(tokens)

    return FromLogits(config.vocab_size, init, logits)
