"""The programs of a run compile for TPUs, and none is needed: libtpu has the compiler.

They run where libtpu is installed, in the version that jax[tpu] asks for.
"""

import dataclasses
import functools
import importlib.util

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from thundersync_jax.config import LossConfig, ModelConfig, OptimConfig
from thundersync_jax.engines import generation
from thundersync_jax.engines.base import Request
from thundersync_jax.engines.in_process import InProcessEngine
from thundersync_jax.models import layers, transformer
from thundersync_jax.models.transformer import Transformer
from thundersync_jax.ops import exact_sum
from thundersync_jax.run import objective, state
from thundersync_jax.stream import accumulator, mesh, surrogate

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)

TOPOLOGY = "v5e:2x2"
# What libtpu would ask a TPU's host for; several processes may compile, none has a TPU.
HOST = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
TILED = "T(8,128)"  # in the layouts of a program for TPUs, and of no other
MODEL = ModelConfig(
    vocab_size=512,
    layers=2,
    width=256,
    mlp_width=512,
    heads=4,
    kv_heads=2,
    head_dim=128,
    qk_norm=True,
    dtype="bfloat16",
)
TOKENS = 2 * layers.BLOCK_TOKENS  # so that attention goes in blocks


@pytest.fixture(scope="module")
def devices():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in HOST.items():
            patch.setenv(name, value)
        found = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY)
    return list(found.devices)


def placed(shapes, shardings):
    """Arrays that are not there, laid out."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings,
    )


def parameters(devices, fsdp, tensor):
    """Those of a run with one replica."""
    init = functools.partial(transformer.init, MODEL)
    shapes = jax.eval_shape(init, jax.random.key(0))
    whole = mesh.make_mesh(1, fsdp, tensor, devices)
    axes = transformer.logical_axes(MODEL)
    shardings = mesh.parameter_shardings(whole, shapes, axes, layers.MESH_AXES)
    return placed(shapes, shardings)


def replica_view(params):
    """Parameters as the only replica has them, and its mesh: as `mesh.split` does."""
    whole = jax.tree.leaves(params)[0].sharding.mesh
    rest = whole.axis_names[1:]
    own = Mesh(whole.devices[0], rest, axis_types=(AxisType.Auto,) * len(rest))
    specs = jax.tree.map(lambda x: NamedSharding(own, x.sharding.spec), params)
    return placed(params, specs), own


def program(jitted, *arguments):
    """Compiles; what comes out is checked to be a TPU's."""
    compiled = jitted.lower(*arguments).compile()
    assert TILED in compiled.as_text()
    return compiled


def bytes_of(tree):
    """Bytes per device."""
    shards = [
        np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    ]
    return int(sum(shards))


@pytest.mark.parametrize(
    ("dtype", "fsdp", "tensor"), [("bfloat16", 4, 1), ("float32", 2, 2)]
)
def test_gradient_of_a_trajectory(devices, dtype, fsdp, tensor):
    view, own = replica_view(parameters(devices, fsdp, tensor))
    model = dataclasses.replace(MODEL, dtype=dtype)
    policy = objective.policy_surrogate(
        Transformer(model), temperature=0.7, loss=LossConfig()
    )
    dtypes = {"tokens": np.int32, "weights": np.float32, "mask": bool}
    dtypes["logprobs"] = np.float32
    whole = NamedSharding(own, PartitionSpec())
    sample = {
        name: jax.ShapeDtypeStruct((TOKENS,), dtype, sharding=whole)
        for name, dtype in dtypes.items()
    }
    weights = jax.ShapeDtypeStruct((1, 2), np.float32)
    with jax.set_mesh(own):
        compiled = program(surrogate.gradient, policy, view, None, (sample,), weights)
    # Each device has its share of the parameters, and of the layers' gradient.
    memory, embed = compiled.memory_analysis(), view["embed"]
    assert memory.argument_size_in_bytes < 1.1 * bytes_of(view)
    most = bytes_of(view["layers"]) + embed.size * embed.dtype.itemsize
    assert memory.output_size_in_bytes < 1.1 * most


def test_sums_of_a_step_and_its_update(devices):
    params = parameters(devices, fsdp=2, tensor=2)

    def stacked(rows):
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype), params
        )
        leads = [accumulator.lead_sharding(x.sharding) for x in jax.tree.leaves(params)]
        return placed(shapes, jax.tree.unflatten(jax.tree.structure(params), leads))

    batch, group, gradient = stacked(1), stacked(2), params
    add = accumulator.compiled(accumulator._add_direct, batch)
    found = [program(add, batch, gradient)]
    add = accumulator.compiled(accumulator._add_group, group)
    rows = np.ones((2, 1), np.float32), np.ones(2, np.float32)
    found.append(program(add, group, np.bool_(True), (gradient,), *rows))
    close = accumulator.compiled(accumulator._close_group, batch)
    found.append(program(close, batch, group, np.ones(2, np.float32)))
    for compiled, sums in zip(found, (batch, group, batch), strict=True):
        assert compiled.memory_analysis().alias_size_in_bytes >= bytes_of(sums)
    jitted = jax.jit(lambda batch: accumulator.finalize(batch, 7.0, params))
    program(jitted, batch)

    optim = OptimConfig()
    optimizer = state.make_optimizer(optim)
    moments = jax.eval_shape(optimizer.init, params)
    mesh_of = jax.tree.leaves(params)[0].sharding.mesh
    whole = NamedSharding(mesh_of, PartitionSpec())
    of_params = {x.shape: x.sharding for x in jax.tree.leaves(params)}
    moments = placed(
        moments, jax.tree.map(lambda x: of_params.get(x.shape, whole), moments)
    )
    now = state.State(params, moments)
    update = state.Update(optimizer, optim.clip_norm, now)
    compiled = program(update._update, now, gradient)
    assert compiled.memory_analysis().alias_size_in_bytes >= 3 * bytes_of(params)


def test_exact_sums_of_a_step(devices):
    params = parameters(devices, fsdp=2, tensor=2)
    # One of each rank: more are more of the same code.
    params = {name: params[name] for name in ("embed", "final_norm")} | {
        name: params["layers"][name] for name in ("gate", "key_norm")
    }
    leaves, treedef = jax.tree.flatten(params)
    zeros = exact_sum._zeros(tuple((x.shape, x.sharding) for x in leaves))
    shapes = jax.eval_shape(zeros)
    limbs, tops, count = placed(shapes, zeros.lower().compile().output_shardings)
    sums = exact_sum.ExactSum(treedef.unflatten(limbs), treedef.unflatten(tops), count)
    add = accumulator.compiled(exact_sum.add, sums)
    compiled = program(add, sums, params, np.bool_(True))
    assert compiled.memory_analysis().alias_size_in_bytes >= bytes_of(sums.limbs)
    program(accumulator.compiled(exact_sum.merge, sums), sums, sums)
    program(jax.jit(exact_sum.value), sums)


class Recorder:
    """Stands for a jitted function, and keeps what it was called with."""

    def __init__(self, jitted):
        self.jitted, self.calls = jitted, []

    def __call__(self, *arguments):
        self.calls.append(
            jax.tree.map(
                lambda x: (
                    jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x
                ),
                arguments,
            )
        )
        return self.jitted(*arguments)


def test_programs_of_the_sampler(devices, monkeypatch):
    """Those that an engine calls for two sessions with one long prompt."""
    recorders = {
        name: Recorder(function)
        for name, function in vars(generation).items()
        if isinstance(function, type(generation.decode))
    }
    for name, recorder in recorders.items():
        monkeypatch.setattr(generation, name, recorder)
    model = dataclasses.replace(MODEL, layers=1)
    engine = InProcessEngine(
        Transformer(model),
        transformer.init(model, jax.random.key(0)),
        slots=4,
        context_tokens=TOKENS + 64,
        steps_per_call=4,
        prefill_buckets=(TOKENS,),
    )
    prompt = np.arange(TOKENS, dtype=np.int32) % MODEL.vocab_size
    for session in range(2):
        engine.submit(Request(session, prompt, 2, (), 1.0, (session,)))
    while engine.busy:
        engine.step()
    assert {"prefill", "decode"} <= {n for n, r in recorders.items() if r.calls}
    place = SingleDeviceSharding(devices[0])

    def on_device(x):
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    for recorder in recorders.values():
        for arguments in {str(call): call for call in recorder.calls}.values():
            program(recorder.jitted, *jax.tree.map(on_device, arguments))
