"""Any function of logits, applied chunk by chunk, is what it is of all at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from thundersync_jax.ops import distill, logprobs


def both_kinds(logits, operands):
    """A function with a written gradient and plain ones, of chunks."""
    targets, teacher_cv, ids_ck = operands
    alone = logprobs.target_logprobs(logits, targets, 0.7)
    table = jax.vmap(lambda x: distill.logprobs(x, 11, 0.7))(logits)
    whole = jax.vmap(distill.reverse_kl)(table, teacher_cv)
    few = jax.vmap(lambda x, ids: distill.top_k_logprobs(x, ids, 11, 0.7))
    known = jnp.take_along_axis(teacher_cv, ids_ck, axis=-1)
    part = jax.vmap(distill.jensen_shannon)(
        few(logits, ids_ck), jax.vmap(distill.with_tail)(known)
    )
    return {"alone": alone, "kl": (whole, part)}


@pytest.mark.parametrize("chunk_tokens", [1, 4, 13, 64])
def test_chunks_change_neither_values_nor_gradients(chunk_tokens):
    rng = np.random.default_rng(5)
    hidden, head = (jnp.float32(rng.normal(size=s)) for s in [(13, 6), (12, 6)])
    teacher = jax.nn.log_softmax(jnp.float32(rng.normal(size=(13, 11))))
    ids = jnp.argsort(-teacher, axis=-1)[:, :3]
    operands = rng.integers(11, size=13, dtype=np.int32), teacher, ids
    mixed = jnp.float32(rng.normal(size=(3, 13)))

    def loss(apply):
        def function(hidden, head):
            found = apply(hidden, lambda x: x @ head.T)
            return sum(map(jnp.vdot, mixed, jax.tree.leaves(found))), found

        return jax.jit(jax.value_and_grad(function, argnums=(0, 1), has_aux=True))

    found = loss(
        lambda hidden, project: logprobs.chunked(
            both_kinds, hidden, operands, project, chunk_tokens
        )
    )(hidden, head)
    expected = loss(lambda hidden, project: both_kinds(project(hidden), operands))(
        hidden, head
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        found,
        expected,
    )


VOCAB, CHUNK, K = 32_000, 512, 16


def top_k(logits, operands):
    ids_ck, teacher_ck = operands
    few = jax.vmap(lambda x, ids: distill.top_k_logprobs(x, ids, VOCAB, 1.0))
    teacher = jax.vmap(distill.with_tail)(teacher_ck)
    return jax.vmap(distill.reverse_kl)(few(logits, ids_ck), teacher)


def full(logits, teacher_cv):
    table = jax.vmap(lambda x: distill.logprobs(x, VOCAB, 1.0))(logits)
    return jax.vmap(distill.reverse_kl)(table, teacher_cv)


def compiled(divergence, tokens, by_token=None, everywhere=None):
    """The gradient of a sum of divergences, of a head of width 8."""

    def loss(head, hidden, operands):
        found = logprobs.chunked(
            divergence, hidden, operands, lambda x: x @ head.T, CHUNK
        )
        return jnp.sum(found)

    def rows(width, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((tokens, width), dtype, sharding=by_token)

    operands = rows(VOCAB) if divergence is full else (rows(K, jnp.int32), rows(K))
    head = jax.ShapeDtypeStruct((VOCAB, 8), jnp.float32, sharding=everywhere)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return gradient.lower(head, rows(8), operands).compile()


@pytest.mark.parametrize("divergence", [top_k, full])
def test_neither_logits_nor_operands_exist_twice_for_all_tokens(divergence):
    """A teacher's whole distributions are T x V floats, and are not copied."""
    short, long = (
        compiled(divergence, tokens).memory_analysis().temp_size_in_bytes
        for tokens in (4096, 8192)
    )
    assert short < 3 * CHUNK * VOCAB * 4
    assert long - short < 10e6  # all logits of the added tokens would be 524 MB


@pytest.mark.parametrize("divergence", [top_k, full])
def test_devices_keep_their_tokens_and_operands(divergence):
    """Each of eight does an eighth; all that they exchange is the head's gradient."""
    mesh = Mesh(np.array(jax.devices("cpu")), ("fsdp",), axis_types=(AxisType.Auto,))
    by_token, everywhere = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in [("fsdp", None), ()]
    )
    alone = compiled(divergence, 4096).cost_analysis()["flops"]
    shared = compiled(divergence, 4096, by_token, everywhere)
    assert shared.cost_analysis()["flops"] < 1.3 * alone / 8
    text = shared.as_text()
    for exchange in ("all-gather", "all-to-all", "collective-permute"):
        assert f" {exchange}(" not in text
