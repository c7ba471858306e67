"""Attention: all scores at once, in blocks, and cuDNN's form, against plain numpy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from thundersync_jax.config import ModelConfig
from thundersync_jax.models import layers, transformer

# Float32 against float64; the largest entries are near 1.
FLOAT32 = 1e-5
FLOAT64 = 1e-12
BLOCK = 16  # tokens, for sequences short enough to look at
OVERHEAD = 1.25  # of a share of the flops: the masks, and rows that fill blocks
HEAD_DIM = 8


def operands(tokens, slots, heads, kv_heads, dtype=np.float32):
    """Queries, keys and values as a layer has them, and a direction for a gradient."""
    rng = np.random.default_rng(tokens + slots)
    query, direction = rng.normal(size=(2, tokens, heads, HEAD_DIM)).astype(dtype)
    keys, values = rng.normal(size=(2, kv_heads, slots, HEAD_DIM)).astype(dtype)
    return query, keys, values, direction


def reference(query, keys, values, visible, direction):
    """Attention and its gradients in float64, a head at a time, written out."""
    query, keys, values, direction = (
        np.asarray(x, np.float64) for x in (query, keys, values, direction)
    )
    mixed, grads = np.zeros_like(query), [np.zeros_like(x) for x in (query, keys)]
    grads.append(np.zeros_like(values))
    scale = query.shape[-1] ** -0.5
    for n in range(query.shape[1]):
        kv = n * len(keys) // query.shape[1]
        scores = np.where(visible, query[:, n] @ keys[kv].T * scale, -np.inf)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        mixed[:, n] = shares @ values[kv]
        pulled = direction[:, n] @ values[kv].T
        pulled = shares * (pulled - np.sum(pulled * shares, axis=1, keepdims=True))
        grads[0][:, n] = pulled @ keys[kv] * scale
        grads[1][kv] += pulled.T @ query[:, n] * scale
        grads[2][kv] += shares.T @ direction[:, n]
    return mixed, *grads


def found(query, keys, values, direction, limits, gap):
    """`attention` and its gradients, compiled."""

    @jax.jit
    def run(query, keys, values, limits, gap_start):
        hidden = None if gap is None else (gap_start, gap[1])

        def one(*inputs):
            return layers.attention(*inputs, limits, hidden, "highest")

        mixed, pull = jax.vjp(one, query, keys, values)
        return mixed, *pull(jnp.asarray(direction))

    return run(query, keys, values, limits, gap and jnp.int32(gap[0]))


def check(found, expected, tolerance):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            x, y, rtol=0, atol=tolerance * max(1, np.abs(y).max())
        )


@pytest.mark.parametrize("block", [BLOCK, 1000])
@pytest.mark.parametrize(
    ("tokens", "past", "real_past", "heads", "kv_heads"),
    [
        (64, 0, 0, 4, 4),
        (61, 0, 0, 4, 1),  # the last block has padding
        (45, 24, 17, 4, 2),
        (33, 24, 0, 2, 2),  # a past without a token
    ],
)
def test_equals_a_plain_reference(
    monkeypatch, block, tokens, past, real_past, heads, kv_heads
):
    monkeypatch.setattr(layers, "BLOCK_TOKENS", block)
    given = operands(tokens, past + tokens, heads, kv_heads)
    keys, queries = np.arange(past + tokens), past + np.arange(tokens)
    visible = keys[None] <= queries[:, None]
    visible &= ((keys < real_past) | (keys >= past))[None]
    expected = reference(*given[:3], visible, given[3])
    gap = (real_past, past) if past else None
    check(found(*given, None, gap), expected, FLOAT32)
    check(found(*given, queries.astype(np.int32), gap), expected, FLOAT32)
    with jax.enable_x64(True):
        given = operands(tokens, past + tokens, heads, kv_heads, np.float64)
        expected = reference(*given[:3], visible, given[3])
        check(found(*given, None, gap), expected, FLOAT64)


def test_queries_of_a_cache_read_up_to_their_limits(monkeypatch):
    """Positions begin anywhere in a cache that is longer than what is read of it."""
    monkeypatch.setattr(layers, "BLOCK_TOKENS", BLOCK)
    given = operands(40, 100, 4, 2)
    starts = np.array([0, 13, 60], np.int32)
    limits = starts[:, None] + np.arange(40, dtype=np.int32)[None]
    attend = jax.vmap(layers.attention, in_axes=(None, None, None, 0, None, None))
    rows = jax.jit(attend, static_argnums=(4, 5))(*given[:3], limits, None, "highest")
    for row, limit in zip(rows, limits, strict=True):
        visible = np.arange(100)[None] <= limit[:, None]
        expected, *_ = reference(*given[:3], visible, given[3])
        np.testing.assert_allclose(row, expected, atol=FLOAT32)


def test_gradients_of_keys_are_summed_over_blocks_in_float32(monkeypatch):
    """In bfloat16 every block would round the sum of all before it."""
    monkeypatch.setattr(layers, "BLOCK_TOKENS", 4)
    given = operands(512, 512, 1, 1)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in given]
    visible = np.tri(512, dtype=bool)
    expected = reference(*rounded[:3], visible, rounded[3])
    blocks = found(*rounded, None, None)
    monkeypatch.setattr(layers, "BLOCK_TOKENS", 512)
    at_once = found(*rounded, None, None)

    def error(got):
        got = np.asarray(got[2], np.float64)
        return np.linalg.norm(got - expected[2]) / np.linalg.norm(expected[2])

    assert error(blocks) < 1.5 * error(at_once)


@pytest.mark.parametrize("differentiated", [False, True])
def test_memory_is_linear_in_the_tokens(differentiated):
    """All scores of 16,384 tokens would be 4.3 GB, and quadruple with twice as many."""
    config = ModelConfig(
        vocab_size=64, layers=1, width=32, mlp_width=32, heads=4, kv_heads=2, head_dim=8
    )
    params = jax.eval_shape(
        functools.partial(transformer.init, config), jax.random.key(0)
    )

    def norm(params, tokens):
        hidden, _ = transformer.segment(config, params, tokens)
        return jnp.sum(jnp.square(hidden))

    def bytes_of(tokens):
        ids = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        program = jax.jit(jax.grad(norm) if differentiated else norm)
        compiled = program.lower(params, ids).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    sizes = [bytes_of(tokens) for tokens in (4096, 8192, 16384)]
    for shorter, longer in itertools.pairwise(sizes):
        assert 1.5 * shorter < longer < 2.2 * shorter
    scores = layers.BLOCK_TOKENS * 16384 * config.heads * 4
    assert sizes[-1] < 4 * scores


@pytest.mark.parametrize(("fsdp", "tensor"), [(8, 1), (4, 2)])
def test_devices_share_every_block(monkeypatch, fsdp, tensor):
    monkeypatch.setattr(layers, "BLOCK_TOKENS", 64)
    given = operands(200, 200, 4, 2)  # in 4 blocks of 56 rows, not of 50

    @jax.jit
    def run(query, keys, values, direction):
        def one(*inputs):
            return layers.attention(*inputs, None, None, "highest")

        mixed, pull = jax.vjp(one, query, keys, values)
        return mixed, *pull(direction)

    def on(fsdp, tensor):
        devices = np.array(jax.devices()[: fsdp * tensor]).reshape(fsdp, tensor)
        mesh = Mesh(devices, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
        ours = PartitionSpec("fsdp", "tensor"), PartitionSpec("tensor")
        specs = ours[0], ours[1], ours[1], ours[0]
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(given, specs, strict=True)
        ]
        with jax.set_mesh(mesh):
            program = run.lower(*placed).compile()
        return program(*placed), program.cost_analysis()["flops"]

    expected, alone = on(1, 1)
    got, shared = on(fsdp, tensor)
    check(got, expected, FLOAT32)
    assert shared < OVERHEAD * alone / (fsdp * tensor)


def test_cudnn_is_called_where_it_applies(monkeypatch):
    """Its call, computed by jax's own implementation of it: no GPU is needed."""
    calls = []
    call = jax.nn.dot_product_attention

    def own(*arrays, implementation, **named):
        calls.append(implementation)
        return call(*arrays, **named, implementation="xla")

    monkeypatch.setattr(jax.nn, "dot_product_attention", own)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    query, keys, values, _ = (
        jnp.asarray(x, jnp.bfloat16) for x in operands(40, 40, 4, 2)
    )
    attend = functools.partial(layers.attention, precision="highest")
    got = attend(query, keys, values, None, None)
    assert calls == ["cudnn"]
    expected, *_ = reference(query, keys, values, np.tri(40, dtype=bool), query)
    np.testing.assert_allclose(got.astype(np.float32), expected, atol=2e-2)
    # Float32, a past, limits of a cache, odd heads, tokens on several devices.
    wide = (x.astype(np.float32) for x in (query, keys, values))
    attend(*wide, None, None)
    attend(query[:20], keys, values, None, (7, 20))
    attend(query, keys, values, jnp.arange(40), None)
    attend(query[..., :5], keys[..., :5], values[..., :5], None, None)
    gpu = jax.sharding.AbstractDevice(
        device_kind="H200", num_cores=None, platform="gpu"
    )
    for fsdp in (2, 1):
        shape, names = (fsdp, 2), ("fsdp", "tensor")
        mesh = AbstractMesh(shape, names, (AxisType.Auto,) * 2, abstract_device=gpu)
        with jax.sharding.use_abstract_mesh(mesh):
            assert layers._cudnn_applies(query) == (fsdp == 1)
    monkeypatch.undo()
    attend(query, keys, values, None, None)
    assert calls == ["cudnn"]
