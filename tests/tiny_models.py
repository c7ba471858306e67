"""Tiny models of each family, random parameters of them and where they lie."""

import dataclasses
import functools

import jax
import numpy as np

from thundersync_jax.config.model import ModelConfig
from thundersync_jax.models import base, layers, transformer
from thundersync_jax.stream.mesh import make_mesh, parameter_shardings

QWEN3 = ModelConfig(
    vocab_size=48,
    layers=3,
    width=16,
    mlp_width=24,
    heads=4,
    kv_heads=2,
    head_dim=6,
    qk_norm=True,
)
QWEN2 = dataclasses.replace(QWEN3, qk_norm=False, attention_bias=True)
LLAMA = dataclasses.replace(QWEN3, qk_norm=False, tied_embeddings=False, kv_heads=4)
MODELS = {"qwen3": QWEN3, "qwen2": QWEN2, "llama": LLAMA}


def logprobs(config, params, tokens, temperature):
    """`base.logprobs` of the decoder of a config."""
    model = transformer.Transformer(config)
    return base.logprobs(model, params, tokens, temperature)


def shapes(config):
    init = functools.partial(transformer.init, config)
    return jax.eval_shape(init, jax.random.key(0))


def shardings(config, mesh=(1, 2, 2)):
    axes = transformer.logical_axes(config)
    table = layers.MESH_AXES
    return parameter_shardings(make_mesh(*mesh), shapes(config), axes, table)


def random_params(config, mesh=(1, 2, 2), seed=0):
    rng = np.random.default_rng(seed)
    values = jax.tree.map(
        lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes(config)
    )
    return jax.device_put(values, shardings(config, mesh))


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
