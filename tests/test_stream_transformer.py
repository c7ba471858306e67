"""A streamed gradient of the transformer is one `jax.grad` of the plain batched loss.

On eight fake devices, in three layouts. The loss is written out below; who counts with
which advantage says `oracle.py`.
"""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import stories

from thundersync_jax import GradientStream, advantages
from thundersync_jax.config import LossConfig, ModelConfig
from thundersync_jax.models import layers, transformer
from thundersync_jax.models.transformer import Transformer
from thundersync_jax.run import objective, samples
from thundersync_jax.stream import mesh
from thundersync_jax.stream.mesh import IN_FLIGHT, Replica
from thundersync_jax.stream.schedule import RELEASES
from thundersync_jax.types import StopReason, Trajectory, TrajectoryKey

pytestmark = pytest.mark.usefixtures("quick_programs")

MODEL = ModelConfig(
    vocab_size=64, layers=1, width=32, mlp_width=32, heads=4, kv_heads=4, head_dim=8
)
MESHES = [(8, 1, 1), (2, 2, 2), (1, 4, 2)]  # replica, fsdp, tensor
TEMPERATURE = 0.7
FLOAT32 = 1e-5  # relative L2 over the tree: other programs, other orders of sums
LENGTH = 16
# Replicas without one of these have no work, and nothing to compile, but their share of
# the boundary.
WORKING = {0, 7}
KL, ENTROPY, CAP = 0.1, 0.05, 1.2
POLICY = LossConfig()
FULL = LossConfig(kl_coef=KL, entropy_coef=ENTROPY, importance_cap=CAP)
SURROGATES = {
    loss: objective.policy_surrogate(Transformer(MODEL), TEMPERATURE, loss)
    for loss in (POLICY, FULL)
}
ESTIMATORS = {
    "mean_std_0": advantages.mean_std(),
    "leave_one_out_std": advantages.leave_one_out_std(),
    "batch_mean_std_0": advantages.batch_mean_std(),
    "pass_at_2": advantages.pass_at_k(2),
}
# Loss, estimator, aggregation, partial_groups, uniform_groups.
STEPS = [
    (POLICY, "mean_std_0", "sequence_mean", "drop", "keep"),
    (POLICY, "batch_mean_std_0", "token_mean", "keep", "drop"),
    (FULL, "leave_one_out_std", "token_mean", "drop", "keep"),
    (FULL, "pass_at_2", "constant", "keep", "drop"),
]


@functools.cache
def parameters(seed):
    """Random ones; `transformer.init` would take longer to compile."""
    init = functools.partial(transformer.init, MODEL)
    shapes = jax.eval_shape(init, jax.random.key(0))
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(0.4 * rng.standard_normal(x.shape), x.dtype), shapes
    )


@functools.cache
def on_mesh(shape, seed):
    shardings = mesh.parameter_shardings(
        mesh.make_mesh(*shape),
        parameters(seed),
        transformer.logical_axes(MODEL),
        layers.MESH_AXES,
    )
    return jax.device_put(parameters(seed), shardings)


def trajectory(rng):
    length = rng.integers(4, LENGTH + 1)
    mask = rng.random(length) < 0.6
    mask[:2], mask[2] = False, True
    logprobs = np.where(mask, rng.uniform(-6, -2, length), 0).astype(np.float32)
    return Trajectory(
        TrajectoryKey(1, 0, 0),
        rng.integers(0, MODEL.vocab_size, length, dtype=np.int32),
        mask,
        logprobs,
        turns=1,
        stop_reason=StopReason.FINISHED,
        policy_version=0,
    )


def batch(seed, loss, aggregation):
    """Groups of 1 to 6 members with few rewards, one of them uniform."""
    rng = np.random.default_rng(seed)
    constant = 8.0 if aggregation == "constant" else None
    weighing = LossConfig(aggregation=aggregation, constant=constant)
    groups = {}
    for name, size in enumerate((6, 4, 5, 1, 4)):
        groups[name] = []
        for member in range(size):
            one = trajectory(rng)
            arrays = samples.sample(one, weighing, (LENGTH,))
            reward = 1.0 if name == 1 else rng.choice([0.0, 1.0, rng.normal()])
            failed = name == 2 and member == 1
            groups[name].append(
                stories.Member([arrays], [one.action_tokens], float(reward), failed)
            )
    return groups


@functools.partial(jax.jit, static_argnums=0)
def batched_gradient(loss, params, reference, arrays_n, advantage_n, counts_n, z):
    """The gradient of a step, all its samples at once, on one device."""

    def logprobs(params, tokens):
        hidden, _ = transformer.segment(MODEL, params, tokens)
        head = transformer.head_weights(params)
        logits = transformer.logits(MODEL, head, hidden[:-1])
        return jax.nn.log_softmax(logits / TEMPERATURE)

    def one(params, sample):
        all_t = logprobs(params, sample["tokens"])
        drawn_t = sample["tokens"][1:, None]
        log_pi_t = jnp.take_along_axis(all_t, drawn_t, axis=1)[:, 0]
        w_t = sample["weights"][1:]
        rho_t = jnp.ones_like(w_t)
        if loss.importance_cap is not None:
            ratio_t = jnp.exp(log_pi_t - sample["logprobs"][1:])
            rho_t = jax.lax.stop_gradient(jnp.minimum(ratio_t, loss.importance_cap))
        weighted, additive = -jnp.sum(w_t * rho_t * log_pi_t), 0.0
        if loss.kl_coef:
            other_t = logprobs(reference, sample["tokens"])
            log_q_t = jnp.take_along_axis(other_t, drawn_t, axis=1)[:, 0]
            kl = jnp.sum(w_t * 0.5 * (log_pi_t - log_q_t) ** 2)  # by its gradient
            entropy_t = -jnp.sum(jnp.exp(all_t) * all_t, axis=1)
            additive = loss.kl_coef * kl - loss.entropy_coef * jnp.sum(w_t * entropy_t)
        return weighted, additive

    def total(params):
        weighted_n, additive_n = jax.vmap(one, (None, 0))(params, arrays_n)
        return jnp.sum(advantage_n * weighted_n + counts_n * additive_n) / z

    return jax.grad(total)(params)


def expected(groups, counted, loss):
    """The gradient of all members; those that do not count weigh nothing."""
    names = [(g, i) for g, members in groups.items() for i in range(len(members))]
    trees = [groups[g][i].samples[0].tree for g, i in names]
    arrays = jax.tree.map(lambda *xs: np.stack(xs), *trees)
    kept = counted.kept
    advantage = np.array([kept.get(g, {}).get(i, 0.0) for g, i in names], np.float32)
    counts = np.array([i in kept.get(g, {}) for g, i in names], np.float32)
    z = np.float32(counted.denominator)
    return batched_gradient(
        loss, parameters(0), parameters(1), arrays, advantage, counts, z
    )


def streamed(shape, groups, step, monkeypatch, **settings):
    """A step on a mesh whose replicas are free and busy at random moments."""
    loss, estimator, aggregation, partial, uniform = step
    rng = random.Random(settings.pop("seed"))

    def load(replica):
        works = not WORKING.isdisjoint(d.id for d in replica._sharding.device_set)
        return rng.choice([0, 1, IN_FLIGHT]) if works else IN_FLIGHT

    monkeypatch.setattr(Replica, "load", property(load))
    calls = []
    stream = GradientStream(
        SURROGATES[loss],
        on_mesh(shape, 0),
        estimator=ESTIMATORS[estimator],
        denominator="tokens" if aggregation == "token_mean" else "trajectories",
        open_groups=rng.randint(1, 5),
        partial_groups=partial,
        uniform_groups=uniform,
        frozen=on_mesh(shape, 1) if loss is FULL else None,
        on_call=lambda call, ended: calls.append(call.replica),
        **settings,
    )
    stories.tell(stream, groups, stories.story(groups, rng))
    gradient, report = stream.finish()
    return gradient, report, calls


def distance(found, reference):
    """L2 over the tree, relative."""
    pairs = zip(*map(jax.tree.leaves, (found, reference)), strict=True)
    gaps = [np.linalg.norm(np.asarray(x) - np.asarray(y)) for x, y in pairs]
    sizes = [np.linalg.norm(x) for x in jax.tree.leaves(reference)]
    return np.linalg.norm(gaps) / np.linalg.norm(sizes)


@pytest.mark.parametrize("accumulator", ["plain", "exact"])
@pytest.mark.parametrize("shape", MESHES)
def test_streamed_gradient_is_one_gradient_of_the_batched_loss(
    shape, accumulator, monkeypatch
):
    """Exact sums also give one set of bits, whatever the rule and the order."""
    replicas = set()
    for seed, step in enumerate(STEPS):
        loss, estimator, aggregation, partial, uniform = step
        groups = batch(seed, loss, aggregation)
        z = "tokens" if aggregation == "token_mean" else "trajectories"
        counted = oracle.count(groups, estimator, z, partial, uniform)
        reference = expected(groups, counted, loss)
        bits, streams = set(), 0
        for number, release in enumerate((*RELEASES, "trajectory")):
            gradient, report, calls = streamed(
                shape,
                groups,
                step,
                monkeypatch,
                release=release,
                accumulator=accumulator,
                seed=number,
            )
            assert distance(gradient, reference) < FLOAT32
            assert report.denominator == counted.denominator
            assert report.kept_groups == len(counted.kept)
            bits.add(
                b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(gradient))
            )
            replicas.update(calls)
            streams += report.streamed > 0
        assert len(bits) == 1 or accumulator == "plain"
        assert streams >= 2
    assert len(replicas) == min(shape[0], len(WORKING))
