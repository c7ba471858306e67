"""One trajectory's gradient is shared by all devices of a replica.

As a run computes it: parameters laid out by `mesh.parameter_shardings`, the call made
by `Replica`.
"""

import functools

import jax
import numpy as np
import pytest

from thundersync_jax.config import LossConfig, ModelConfig
from thundersync_jax.models import layers, transformer
from thundersync_jax.models.transformer import Transformer
from thundersync_jax.run import objective
from thundersync_jax.stream import mesh, surrogate
from thundersync_jax.stream.mesh import Replica

pytestmark = pytest.mark.usefixtures("quick_programs")


# Sizes that eight devices divide along either axis.
MODEL = ModelConfig(
    vocab_size=256,
    layers=2,
    width=64,
    mlp_width=128,
    heads=16,
    kv_heads=8,
    head_dim=8,
    logprob_chunk_tokens=128,
)
TOKENS = 256
DEVICES = 8
OVERHEAD = 1.3  # what is not divided: norms, the gathered embedding
REDUCTION = 1e-5  # float32 sums in another order
POLICY = objective.policy_surrogate(
    Transformer(MODEL), temperature=0.7, loss=LossConfig()
)


def parameters(fsdp, tensor):
    """Random ones on the learner's mesh, as the only replica sees them."""
    init = functools.partial(transformer.init, MODEL)
    shardings = mesh.parameter_shardings(
        mesh.make_mesh(1, fsdp, tensor),
        jax.eval_shape(init, jax.random.key(0)),
        transformer.logical_axes(MODEL),
        layers.MESH_AXES,
    )
    params = jax.device_put(init(jax.random.key(0)), shardings)
    ((view,), _) = mesh.split(params)
    return view


@functools.cache
def gradient_call(fsdp, tensor):
    """The gradient that a replica sums, and its program's flops per device."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MODEL.vocab_size, TOKENS, dtype=np.int32)
    sample = {
        "tokens": tokens,
        "weights": rng.random(TOKENS, dtype=np.float32),
        "mask": np.ones(TOKENS, bool),
        "logprobs": np.zeros(TOKENS, np.float32),
    }
    flops, gradient = [], surrogate.gradient

    def counted(*args):
        program = gradient.lower(*args).compile()
        flops.append(program.cost_analysis()["flops"])
        return program(*args[1:])  # the surrogate function is static

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surrogate, "gradient", counted)
        replica = Replica(parameters(fsdp, tensor))
        weights, samples = np.array([[1.0, 0.0]]), replica.put((sample,))
        found, _ = replica.start(surrogate.gradient, POLICY, samples, weights)
    (count,) = flops
    return jax.device_get(found), count


@pytest.mark.parametrize(("fsdp", "tensor"), [(8, 1), (4, 2), (2, 4)])
def test_each_device_does_its_share_of_one_gradient(fsdp, tensor):
    _, alone = gradient_call(1, 1)
    _, shared = gradient_call(fsdp, tensor)
    assert shared <= OVERHEAD * alone / DEVICES


@pytest.mark.parametrize(("fsdp", "tensor"), [(8, 1), (4, 2), (2, 4)])
def test_shared_gradient_is_the_gradient_of_one_device(fsdp, tensor):
    expected, _ = gradient_call(1, 1)
    found, _ = gradient_call(fsdp, tensor)
    sizes, gaps = [], []
    for leaf, other in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
        sizes.append(np.linalg.norm(leaf))
        gaps.append(np.linalg.norm(leaf - other))
    assert np.linalg.norm(gaps) < REDUCTION * np.linalg.norm(sizes)
    assert all(
        gap < 10 * REDUCTION * size for gap, size in zip(gaps, sizes, strict=True)
    )
