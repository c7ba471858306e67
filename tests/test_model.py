"""The decoder: against an independent reference, in pieces, in chunks, on a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from thundersync_jax.config import ModelConfig
from thundersync_jax.models import layers, transformer
from thundersync_jax.ops import logprobs, losses

pytestmark = pytest.mark.usefixtures("quick_programs")

# Two float32 programs of one function: sums of a few hundred terms in another order.
FLOAT32 = 1e-5
# Float64 against float64; the rest is the reference's own rounding.
FLOAT64 = 1e-11

SMALL = ModelConfig(
    vocab_size=40,
    layers=2,
    width=24,
    mlp_width=40,
    heads=4,
    kv_heads=4,
    head_dim=6,
    logprob_chunk_tokens=4,
)
VARIANTS = {
    "llama": {"tied_embeddings": False, "kv_heads": 2, "rope_theta": 5e5},
    "qwen2": {"attention_bias": True, "kv_heads": 1},
    "qwen3": {"qk_norm": True, "kv_heads": 2, "rope_theta": 1e6, "norm_eps": 1e-5},
    "all": {"qk_norm": True, "attention_bias": True, "tied_embeddings": False},
}


surrogate_logprobs = jax.jit(tiny_models.logprobs, static_argnums=0)


def token_logprobs(config, params, hidden, targets, temperature):
    project = transformer.projection(config, params)
    chunk = config.logprob_chunk_tokens

    def function(logits, targets):
        return logprobs.target_logprobs(logits, targets, temperature)

    return logprobs.chunked(function, hidden, targets, project, chunk)


def random_params(config, seed=0):
    """`init` with noise on top, so that no scale is 1 and no bias 0."""
    params = transformer.init(config, jax.random.key(seed))
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    noisy = [x + 0.3 * rng.normal(size=x.shape).astype(x.dtype) for x in leaves]
    return treedef.unflatten(noisy)


def random_tokens(config, tokens, seed=1):
    return np.random.default_rng(seed).integers(0, config.vocab_size, tokens, np.int32)


def relative_difference(tree, reference):
    """L2 over the tree."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    pairs = [(np.asarray(x, float), np.asarray(y, float)) for x, y in pairs]
    difference = sum(np.sum((x - y) ** 2) for x, y in pairs)
    return np.sqrt(difference / sum(np.sum(y**2) for _, y in pairs))


def reference_logits(config, params, tokens):
    """The decoder in plain numpy, float64, one token and one head at a time."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    half = config.head_dim // 2

    def norm(x, scale):
        return scale * x / np.sqrt(np.mean(x**2) + config.norm_eps)

    def rotate(x, position):
        pairs = x[:half] + 1j * x[half:]
        turns = position * config.rope_theta ** (-2 * np.arange(half) / config.head_dim)
        pairs = pairs * np.exp(1j * turns)
        return np.concatenate([pairs.real, pairs.imag])

    def head_vectors(w, name, x, heads):
        out = [x @ w[name][:, n] for n in range(heads)]
        if config.attention_bias:
            out = [y + w[f"{name}_bias"][n] for n, y in enumerate(out)]
        if config.qk_norm and name != "value":
            out = [norm(y, w[f"{name}_norm"]) for y in out]
        return out

    xs = [p["embed"][token] for token in tokens]
    for i in range(config.layers):
        w = {name: x[i] for name, x in p["layers"].items()}
        keys, values = [], []
        for t, x in enumerate(xs):
            h = norm(x, w["attention_norm"])
            query = [rotate(y, t) for y in head_vectors(w, "query", h, config.heads)]
            keys.append(
                [rotate(y, t) for y in head_vectors(w, "key", h, config.kv_heads)]
            )
            values.append(head_vectors(w, "value", h, config.kv_heads))
            for n in range(config.heads):
                kv = n * config.kv_heads // config.heads
                score = [query[n] @ k[kv] / np.sqrt(config.head_dim) for k in keys]
                share = np.exp(score) / np.sum(np.exp(score))
                mixed = sum(s * v[kv] for s, v in zip(share, values, strict=True))
                xs[t] = xs[t] + mixed @ w["output"][n]
            h = norm(xs[t], w["mlp_norm"])
            gate = h @ w["gate"]
            xs[t] = xs[t] + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    head = p["embed"] if config.tied_embeddings else p["unembed"]
    return np.stack([head @ norm(x, p["final_norm"]) for x in xs])


def reference_logprobs(config, params, tokens, temperature):
    logits = reference_logits(config, params, tokens) / temperature
    table = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    return np.array([0.0] + [table[t, tokens[t + 1]] for t in range(len(tokens) - 1)])


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_logprobs_equal_a_plain_reference(variant):
    config = dataclasses.replace(SMALL, **VARIANTS[variant])
    params, tokens = random_params(config), random_tokens(config, 9)
    got = surrogate_logprobs(config, params, tokens, 0.7)
    expected = reference_logprobs(config, params, tokens, 0.7)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=FLOAT32, atol=FLOAT32)


def test_float64_is_float64_throughout():
    with jax.enable_x64(True):
        config = dataclasses.replace(SMALL, dtype="float64", **VARIANTS["all"])
        params, tokens = random_params(config), random_tokens(config, 9)
        got = surrogate_logprobs(config, params, tokens, 0.7)
        assert got.dtype == jnp.float64
        expected = reference_logprobs(config, params, tokens, 0.7)
        np.testing.assert_allclose(got, expected, rtol=FLOAT64, atol=FLOAT64)
    with pytest.raises(ValueError, match="32 bits"):
        tiny_models.logprobs(config, params, tokens, 0.7)


def test_bfloat16_computes_in_bfloat16_and_returns_float32():
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    params, tokens = random_params(SMALL), random_tokens(SMALL, 12)
    hidden, own = transformer.segment(config, params, tokens)
    assert hidden.dtype == own.keys.dtype == jnp.bfloat16
    got = surrogate_logprobs(config, params, tokens, 1.0)
    assert got.dtype == jnp.float32
    exact = surrogate_logprobs(SMALL, params, tokens, 1.0)
    assert 1e-4 < np.max(np.abs(got - exact)) < 0.5  # 8 bits, not 24


@pytest.mark.parametrize("field", ["rope_theta", "norm_eps"])
def test_a_setting_changes_the_output(field):
    changed = dataclasses.replace(SMALL, **{field: 10 * getattr(SMALL, field) + 1})
    params, tokens = random_params(SMALL), random_tokens(SMALL, 12)
    one = surrogate_logprobs(SMALL, params, tokens, 1.0)
    other = surrogate_logprobs(changed, params, tokens, 1.0)
    assert np.max(np.abs(one - other)) > 1e-3


def test_padding_at_the_end_changes_nothing():
    """verl-project/verl#6280: log-probabilities moved with the batch's shape."""
    params, tokens = random_params(SMALL), random_tokens(SMALL, 11)
    alone = surrogate_logprobs(SMALL, params, tokens, 1.0)
    for length in (16, 40):
        padded = np.pad(tokens, (0, length - 11), constant_values=7)
        rows = np.stack([padded, random_tokens(SMALL, length, seed=2)])
        got = jax.vmap(lambda row: surrogate_logprobs(SMALL, params, row, 1.0))(rows)
        got = got[0, :11]
        np.testing.assert_allclose(got, alone, rtol=FLOAT32, atol=FLOAT32)


def test_segments_continue_like_the_whole():
    config = dataclasses.replace(SMALL, **VARIANTS["qwen3"])
    params, tokens = random_params(config), random_tokens(config, 15)
    cuts, slots = (6, 15), 17
    direction = np.random.default_rng(3).normal(size=(15, config.width))
    direction = direction.astype(np.float32)

    def whole(params):
        return jnp.sum(direction * transformer.segment(config, params, tokens)[0])

    def pieces(params):
        shape = (config.layers, slots, config.kv_heads, config.head_dim)
        # NaN would show if a slot beyond the past were used; it is large instead,
        # because 0 * NaN is NaN in the backward pass of any masked attention.
        past = transformer.KeyValues(jnp.full(shape, 99.0), jnp.full(shape, 99.0))
        start, total = 0, 0.0
        for stop in cuts:
            hidden, own = transformer.segment(
                config, params, tokens[start:stop], past, jnp.int32(start)
            )
            past = jax.tree.map(
                lambda a, b, s=start, e=stop: a.at[:, s:e].set(b), past, own
            )
            total += jnp.sum(direction[start:stop] * hidden)
            start = stop
        return total

    value, gradient = jax.jit(jax.value_and_grad(whole))(params)
    value_in_pieces, gradient_in_pieces = jax.jit(jax.value_and_grad(pieces))(params)
    np.testing.assert_allclose(value_in_pieces, value, rtol=FLOAT32, atol=FLOAT32 * 15)
    assert relative_difference(gradient_in_pieces, gradient) < FLOAT32


def test_gradient_equals_finite_differences():
    with jax.enable_x64(True):
        config = dataclasses.replace(SMALL, dtype="float64", **VARIANTS["all"])
        params, tokens = random_params(config), random_tokens(config, 9)
        weights = losses.token_weights(np.arange(9) > 3, "token_mean")

        def loss(params):
            got = tiny_models.logprobs(config, params, tokens, 0.7)
            return losses.policy_gradient(got, weights)

        direction = random_params(config, seed=5)
        value_and_gradient = jax.jit(jax.value_and_grad(loss))
        _, gradient = value_and_gradient(params)
        slope = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradient, direction)))

        def moved(step):
            there = jax.tree.map(lambda x, d: x + step * d, params, direction)
            return value_and_gradient(there)[0]

        measured = (moved(1e-5) - moved(-1e-5)) / 2e-5
        np.testing.assert_allclose(slope, measured, rtol=1e-6)


def test_chunks_do_not_change_logprobs_or_gradients():
    params, targets = random_params(SMALL), random_tokens(SMALL, 13)
    hidden = np.random.default_rng(3).normal(size=(13, SMALL.width)).astype(np.float32)

    def loss(params, hidden, chunk):
        config = dataclasses.replace(SMALL, logprob_chunk_tokens=chunk)
        got = token_logprobs(config, params, hidden, targets, 0.7)
        return jnp.sum(got * jnp.arange(13)), got

    gradient = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)
    whole_gradient, whole = gradient(params, hidden, 64)
    for chunk in (1, 4, 13):
        chunk_gradient, got = gradient(params, hidden, chunk)
        np.testing.assert_allclose(got, whole, rtol=FLOAT32)
        assert relative_difference(chunk_gradient, whole_gradient) < FLOAT32


def test_logits_never_exist_for_all_tokens():
    """NVIDIA-NeMo/RL#2882 and NVIDIA-NeMo/labs-molt#121: the head held T x V floats."""
    config = ModelConfig(vocab_size=32_000, width=8, logprob_chunk_tokens=512)
    chunk_bytes = 512 * config.vocab_size * 4

    def scratch_bytes(tokens, differentiate):
        def head(params, hidden, targets):
            args = config, params, hidden, targets, 1.0
            return jnp.sum(token_logprobs(*args))

        function = jax.grad(head, argnums=(0, 1)) if differentiate else head
        shapes = (
            {"embed": jax.ShapeDtypeStruct((config.vocab_size, 8), jnp.float32)},
            jax.ShapeDtypeStruct((tokens, 8), jnp.float32),
            jax.ShapeDtypeStruct((tokens,), jnp.int32),
        )
        compiled = jax.jit(function).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert scratch_bytes(4096, differentiate=False) < 2 * chunk_bytes
    short, long = (scratch_bytes(tokens, differentiate=True) for tokens in (4096, 8192))
    assert short < 3 * chunk_bytes
    assert long - short < 10e6  # all logits of the added tokens would be 524 MB


def test_logprob_is_at_the_sampling_temperature():
    """huggingface/trl#4159: logits 2, 0 at temperature .5 give token 0 -.018150."""
    logits = jnp.array([2.0, 0.0])
    got = logprobs.target_logprobs(logits, jnp.int32(0), 0.5)
    np.testing.assert_allclose(got, -0.018150, atol=1e-6)


def test_logical_axes_name_every_axis():
    config = dataclasses.replace(SMALL, **VARIANTS["all"])
    params, axes = (
        transformer.init(config, jax.random.key(0)),
        transformer.logical_axes(config),
    )
    jax.tree.map(
        lambda x, names: np.testing.assert_equal(x.ndim, len(names)), params, axes
    )
    names = {
        name
        for leaf in jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
        for name in leaf
    }
    assert names - {None} <= set(layers.MESH_AXES)


# Sizes that every mesh of eight divides.
SHARDED = ModelConfig(
    vocab_size=256,
    layers=2,
    width=64,
    mlp_width=128,
    heads=8,
    kv_heads=8,
    head_dim=16,
    logprob_chunk_tokens=128,
)
# Two key heads and their biases on four tensor devices: they stay whole.
UNEVEN = dataclasses.replace(SHARDED, kv_heads=2, qk_norm=True, attention_bias=True)


def place(config, params, fsdp, tensor):
    """Parameters on a mesh of fsdp x tensor fake devices, and the mesh."""
    devices = np.array(jax.devices("cpu")[: fsdp * tensor]).reshape(fsdp, tensor)
    mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def put(x, names):
        axes = [layers.MESH_AXES.get(name) for name in names]
        sizes = [mesh.shape.get(axis, 1) for axis in axes]
        fits = [n % size == 0 for n, size in zip(x.shape, sizes, strict=True)]
        spec = [axis if fit else None for axis, fit in zip(axes, fits, strict=True)]
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(put, params, transformer.logical_axes(config)), mesh


@functools.cache
def surrogate_gradient(config, fsdp, tensor):
    """Loss and gradient of one trajectory on a mesh, and flops per device."""
    placed, mesh = place(config, random_params(config), fsdp, tensor)
    tokens = random_tokens(config, 256)

    def loss(params, tokens):
        got = tiny_models.logprobs(config, params, tokens, 0.7)
        return losses.policy_gradient(got, jnp.ones_like(got))

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.value_and_grad(loss)).lower(placed, tokens).compile()
        return compiled(placed, tokens), compiled.cost_analysis()["flops"]


@pytest.mark.parametrize(
    "config, fsdp, tensor",
    [
        (SHARDED, 2, 1),
        (SHARDED, 1, 2),
        (SHARDED, 8, 1),
        (SHARDED, 4, 2),
        (SHARDED, 2, 4),
        (UNEVEN, 2, 4),
    ],
)
def test_sharded_gradient_equals_unsharded(config, fsdp, tensor):
    (value, expected), _ = surrogate_gradient(config, 1, 1)
    (sharded_value, got), _ = surrogate_gradient(config, fsdp, tensor)
    np.testing.assert_allclose(sharded_value, value, rtol=FLOAT32)
    assert relative_difference(got, expected) < FLOAT32


@pytest.mark.parametrize("fsdp, tensor", [(8, 1), (4, 2), (2, 4)])
def test_devices_share_the_work_of_one_trajectory(fsdp, tensor):
    """Replicated activations would let every device do all of it: 8 times an eighth."""
    _, alone = surrogate_gradient(SHARDED, 1, 1)
    _, flops = surrogate_gradient(SHARDED, fsdp, tensor)
    assert flops < 1.3 * alone / 8


@pytest.mark.parametrize("fsdp, tensor", [(8, 1), (4, 2), (2, 4)])
def test_devices_share_the_gradient_of_one_trajectory(fsdp, tensor):
    """Gathered weights have whole gradients, unless these are scattered again."""
    placed, _ = place(SHARDED, random_params(SHARDED), fsdp, tensor)
    (_, gradient), _ = surrogate_gradient(SHARDED, fsdp, tensor)

    def share(x):
        return x.sharding.shard_shape(x.shape)

    found, expected = (jax.tree.map(share, x["layers"]) for x in (gradient, placed))
    assert found == expected
