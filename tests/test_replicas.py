"""Replicas work on their own trajectories; only the step boundary sees them all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from thundersync_jax import GradientStream, Surrogate, advantages, pad
from thundersync_jax.stream import accumulator, mesh
from thundersync_jax.stream.mesh import Replica
from thundersync_jax.stream.schedule import RELEASES

pytestmark = pytest.mark.usefixtures("quick_programs")

MESHES = [(4, 2, 1), (2, 2, 2)]
REDUCTION = 1e-5  # float32 sums in another order
AXES = {"embed": ("embed", "mlp"), "head": ("mlp", None), "scale": (None,)}
TABLE = {"embed": "fsdp", "mlp": "tensor"}


def make_params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {"embed": draw(8, 16), "head": draw(16, 4), "scale": draw(4)}


def surrogate(params, sample):
    """A small network, so that sharded parameters meet in matrix products."""
    hidden_th = jnp.tanh(params["embed"][sample["tokens"]])
    logits_tv = (hidden_th @ params["head"]) * params["scale"][None]
    picked_t = jax.nn.log_softmax(logits_tv)[:, 0]
    weighted = -jnp.sum(picked_t * sample["weights"])
    return Surrogate(weighted, additive=1e-2 * jnp.sum(jnp.square(logits_tv)))


def on_mesh(shape):
    params = make_params()
    grid = mesh.make_mesh(*shape)
    shardings = mesh.parameter_shardings(grid, params, AXES, TABLE)
    return jax.device_put(params, shardings)


def step(params, function=surrogate, groups=6, size=4, **settings):
    rng = np.random.default_rng(1)
    settings = {"estimator": advantages.mean_std(), "open_groups": 3} | settings
    stream = GradientStream(function, params, **settings)
    for group in range(groups):
        stream.open_group(group, size)
    for member in range(size):
        for group in range(groups):
            length = int(rng.integers(1, 9))
            tokens = rng.integers(0, 8, length)
            weights = rng.random(length).astype(np.float32)
            sample = pad({"tokens": tokens, "weights": weights}, (8,))
            stream.complete(group, member, sample, tokens=length)
            stream.reward(group, member, float(rng.random()))
    return stream.finish()


def distance(found, expected):
    """L2 over the tree, relative."""
    gaps = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), found, expected)
    norm = lambda tree: np.sqrt(  # noqa: E731
        sum(np.sum(np.square(np.asarray(x))) for x in jax.tree.leaves(tree))
    )
    return norm(gaps) / norm(expected)


@pytest.fixture(scope="module")
def alone():
    return step(make_params(), release="batch")


@pytest.fixture
def spread(monkeypatch):
    """Calls go to all replicas in turn; toy ones end before the next event comes."""
    load = property(lambda self: len(self._running) / 1000)
    monkeypatch.setattr(Replica, "load", load)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("shape", MESHES)
def test_step_over_replicas_equals_one_replica(shape, release, alone, spread):
    calls = []
    params = on_mesh(shape)
    gradient, report = step(
        params,
        release=release,
        on_call=lambda call, ended: calls.append(call),
    )
    assert distance(gradient, alone[0]) < REDUCTION
    assert report.loss == pytest.approx(alone[1].loss, rel=1e-5)
    assert report.gradient_norm == pytest.approx(alone[1].gradient_norm, rel=1e-5)
    assert {call.replica for call in calls} == set(range(shape[0]))
    if release == "trajectory":  # sums of one group lay on several replicas
        places = {}
        for call in calls:
            if call.place is not None:
                places.setdefault(call.items[0].group, set()).add(call.replica)
        assert max(map(len, places.values())) > 1


@pytest.mark.parametrize("shape", MESHES)
def test_gradient_lies_where_the_parameters_lie(shape):
    params = on_mesh(shape)
    gradient, report = step(params, groups=1)
    for name, x in params.items():
        assert gradient[name].sharding.is_equivalent_to(x.sharding, x.ndim)
        assert gradient[name].dtype == jnp.float32
    shards = 1
    if shape[1] > 1:
        assert params["embed"].sharding.shard_shape((8, 16))[0] == 4
        shards = 2
    assert report.group_sum_bytes <= 3 * 4 * (8 * 16 // shards + 16 * 4 + 4)


def test_ranks_and_chunks_are_each_summed_once(spread):
    """Two ranks, three chunks, local gradients 1 and 2 (NVIDIA-NeMo/RL#3660)."""
    params = jax.device_put(
        {"x": jnp.zeros(())}, NamedSharding(mesh.make_mesh(2), PartitionSpec())
    )
    for release in RELEASES:
        for partial in ("drop", "keep"):
            seen = []
            stream = GradientStream(
                lambda p, s: Surrogate(None, additive=p["x"] * s),
                params,
                estimator=None,
                denominator="none",
                release=release,
                partial_groups=partial,
                on_call=lambda call, ended, seen=seen: seen.append(call.replica),
            )
            stream.open_group("a", 6)
            for member, value in enumerate([1.0, 2.0] * 3):
                stream.complete("a", member, value)
            assert float(stream.finish()[0]["x"]) == 9.0
            assert set(seen) == {0, 1}


def slow_surrogate(params, sample):
    """Runs for some ten milliseconds, longer in the longer bucket."""
    s = sample["s"]
    start = jnp.outer(s, s) / len(s)
    busy = jax.lax.fori_loop(0, 2000, lambda _, x: jnp.tanh(x @ x), start)
    return Surrogate(params["x"] * (jnp.sum(s) + 1e-30 * jnp.sum(busy)))


def test_second_replica_starts_another_length_while_the_first_is_running():
    grid = mesh.make_mesh(2, 2, 2)
    params = {"x": jnp.float32(0.1)}
    params = jax.device_put(params, NamedSharding(grid, PartitionSpec()))
    log, beside = [], []

    def note(call, ended):
        beside.append([c.replica for c, e in log if not e.is_ready()])
        log.append((call, ended))

    for _ in range(3):  # the first compiles for one replica, the second for the other
        log.clear()
        beside.clear()
        stream = GradientStream(
            slow_surrogate, params, estimator=advantages.mean_only(), on_call=note
        )
        stream.open_group("a", 3)
        for member, length in enumerate((96, 32)):
            sample = pad({"s": np.ones(length, np.float32)}, (32, 96))
            stream.complete("a", member, sample)
            stream.reward("a", member, float(member))
        running = {call.replica for call, ended in log if not ended.is_ready()}
        stream.fail("a", 2, reason="late")
        stream.finish()
    (first, _), (second, _) = log
    assert (first.replica, second.replica) == (0, 1)
    assert first.items[0].bucket != second.items[0].bucket
    assert beside == [[], [0]]  # the first was running when the second started
    assert running == {0, 1}


def test_joining_and_splitting_copy_nothing():
    params = on_mesh((2, 2, 2))
    views, _ = mesh.split(params)
    joined = mesh.join([jax.tree.map(lambda x: x[None], v) for v in views], params)
    assert joined["embed"].shape == (2, 8, 16)

    def pointers(*arrays):
        shards = [s for x in arrays for s in x.addressable_shards]
        return sorted(s.data.unsafe_buffer_pointer() for s in shards)

    for name, x in params.items():
        assert pointers(*(view[name] for view in views)) == pointers(x)
    parts = [jax.tree.map(lambda x: x[None] + 0, view) for view in views]
    joined = mesh.join(parts, params)
    for name, x in joined.items():
        assert pointers(*(part[name] for part in parts)) == pointers(x)
        np.testing.assert_array_equal(x, np.stack([params[name]] * 2))


def test_frozen_arrays_may_lie_with_the_parameters_or_elsewhere():
    """Shards stay, and what lies elsewhere is brought once, not with every call."""

    def function(params, frozen, sample):
        gap = jnp.sum(jnp.square(params["embed"] - frozen["reference"]["embed"]))
        out = surrogate(params, sample)
        return out._replace(additive=frozen["beta"] * gap)

    expected = None
    for params, reference in (
        (make_params(), make_params()),
        (on_mesh((2, 2, 1)), on_mesh((2, 2, 1))),
        (on_mesh((2, 2, 1)), jax.device_put(make_params(), jax.devices()[5])),
        (
            jax.device_put(make_params(), jax.devices()[3]),
            jax.device_put(make_params(), jax.devices()[5]),
        ),
    ):
        reference = jax.tree.map(lambda x: x + 1, reference)
        frozen = {"reference": reference, "beta": 0.5}
        gradient, _ = step(params, function, groups=1, release="batch", frozen=frozen)
        expected = gradient if expected is None else expected
        assert distance(gradient, expected) < REDUCTION
        assert (
            gradient["head"].sharding.device_set == params["head"].sharding.device_set
        )


MIXED = {
    "all": PartitionSpec(("fsdp", "tensor")),
    "rows": PartitionSpec("fsdp"),
    "columns": PartitionSpec(None, "tensor"),
    "whole": PartitionSpec(),
    "bias": PartitionSpec(),
    "scale": PartitionSpec("tensor"),
}


def mixed_surrogate(params, sample):
    x = sample["x"]
    for name in ("all", "rows", "columns", "whole"):
        x = jnp.tanh(x @ params[name].T + params["bias"][None])
    x = x * params["scale"][None]
    return Surrogate(jnp.sum(x), additive=jnp.sum(jnp.square(x)))


def mixed_step(params, **settings):
    settings = {"estimator": advantages.mean_std(), "open_groups": 2} | settings
    stream = GradientStream(mixed_surrogate, params, **settings)
    rng = np.random.default_rng(3)
    for group in range(4):
        stream.open_group(group, 3)
    for member in range(3):
        for group in range(4):
            x = rng.normal(size=(2, 8)).astype(np.float32)
            stream.complete(group, member, {"x": x})
            stream.reward(group, member, float(rng.random()))
    return stream.finish()[0]


@pytest.mark.parametrize("partial", ["drop", "keep"])  # additive held back, and not
@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 2, 2)])
def test_every_parameter_may_have_its_own_layout(shape, partial, spread):
    """The compiler would spread sums of whole arrays as it spreads their gradients."""
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(size=(8,) if name in ("bias", "scale") else (8, 8)) / 2
        for name in MIXED
    }
    params = jax.tree.map(jnp.float32, params)
    expected = mixed_step(params, release="batch")
    grid = mesh.make_mesh(*shape)
    placed = {
        n: jax.device_put(x, NamedSharding(grid, MIXED[n])) for n, x in params.items()
    }
    for release in RELEASES:
        gradient = mixed_step(placed, release=release, partial_groups=partial)
        assert distance(gradient, expected) < REDUCTION
        for name, x in placed.items():
            assert gradient[name].sharding.is_equivalent_to(x.sharding, x.ndim)


def test_sums_on_a_mesh_stay_where_they_are():
    """Donated memory is used again though gradients lie another way."""
    grid = mesh.make_mesh(1, 2, 2)
    place = lambda spec: jax.device_put(  # noqa: E731
        {"x": jnp.ones((8, 8))}, NamedSharding(grid, spec)
    )
    params, gradient = place(PartitionSpec()), place(PartitionSpec("fsdp", "tensor"))
    batch, group = accumulator.init(params), accumulator.init(params, 2)
    pointers = lambda: [  # noqa: E731
        s.data.unsafe_buffer_pointer()
        for x in (batch["x"], group["x"])
        for s in x.addressable_shards
    ]
    before, weights = pointers(), np.ones((2, 1))
    group = accumulator.add_group(group, np.bool_(True), (gradient,), weights)
    batch = accumulator.add_direct(batch, gradient)
    batch = accumulator.close_group(batch, group, np.ones(2))
    assert pointers() == before
    assert batch["x"].sharding == accumulator.lead_sharding(params["x"].sharding)


@pytest.mark.parametrize("shape", [(1,), (2,)])
def test_a_mesh_may_have_replicas_only(shape, spread):
    grid = jax.make_mesh(
        shape,
        ("replica",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[: shape[0]],
    )
    params = jax.device_put(make_params(), NamedSharding(grid, PartitionSpec()))
    expected, _ = step(make_params(), release="batch")
    for release in RELEASES:
        gradient, _ = step(params, release=release, frozen=None)
        assert distance(gradient, expected) < REDUCTION


@pytest.mark.parametrize("names", [("replica",), ("replica", "fsdp"), ("fsdp",)])
def test_mesh_with_explicit_axes_is_refused_at_start(names):
    """What jax.make_mesh makes where it is told nothing."""
    grid = jax.make_mesh((2, 1)[: len(names)], names, devices=jax.devices()[:2])
    params = jax.device_put({"x": jnp.zeros(())}, NamedSharding(grid, PartitionSpec()))
    with pytest.raises(ValueError, match=r"Explicit.*AxisType\.Auto,\) \* \d"):
        GradientStream(surrogate, params, estimator=None)


def test_parameters_sharded_over_replicas_are_refused():
    grid = mesh.make_mesh(2, 2)
    params = jax.device_put(
        {"x": jnp.zeros(4)}, NamedSharding(grid, PartitionSpec("replica"))
    )
    with pytest.raises(ValueError, match="sharded over `replica`"):
        GradientStream(surrogate, params, estimator=None)


def test_parameters_in_two_places_are_refused():
    params = {
        "x": jax.device_put(jnp.zeros(4), jax.devices()[0]),
        "y": jax.device_put(jnp.zeros(4), jax.devices()[1]),
    }
    with pytest.raises(ValueError, match="2 different meshes or devices"):
        GradientStream(surrogate, params, estimator=None)


def test_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(ValueError, match=r"needs 16 devices and 8 .* lower"):
        mesh.make_mesh(4, 2, 2)
