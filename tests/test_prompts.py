"""Prompts that groups share: the update of whole samples, the prompt run once."""

import random

import jax
import numpy as np
import pytest
import toy_segments as toy
import turns_of_models as models
from jax.sharding import NamedSharding, PartitionSpec

from thundersync_jax import GradientStream, advantages
from thundersync_jax.config import LossConfig
from thundersync_jax.stream import mesh, segments
from thundersync_jax.stream.mesh import IN_FLIGHT, Replica
from thundersync_jax.stream.schedule import RELEASES, Prompt

pytestmark = pytest.mark.usefixtures("quick_programs")

EXACT = 1e-10  # rounding of float64 sums of some dozen terms
FLOAT32 = 2e-5  # the same in float32
PROMPT = 3
ESTIMATORS = {
    "mean_std": advantages.mean_std(),
    "pass_at_k": advantages.pass_at_k(2),
    "batch_mean_std": advantages.batch_mean_std(),
    "fixed_baseline": advantages.fixed_baseline(0.5),
}
# Rewards by group; None fails with its sample given, as "early" does before it.
REWARDS = {
    "mixed": [1.0, 0.0, 0.25],
    "partial": [1.0, 0.0, None],
    "uniform": [0.5, 0.5],
    "empty": [1.0, "early"],
    "two": [0.0, 1.0],
}


@pytest.fixture(scope="module")
def params():
    with jax.enable_x64(True):
        yield toy.params()


def trajectories(dtype=np.float64):
    return {
        (g, m): toy.trajectory(
            (g, m), 7 + m, np.repeat([0, 1], [PROMPT, 4 + m]), PROMPT, dtype
        )
        for g, rewards in enumerate(REWARDS.values())
        for m in range(len(rewards))
    }


def told(stream, place, one, reward, shared, judged):
    """What is said of a member, and whether in this order."""
    piece = toy.cut(one, PROMPT, len(one["x"]), 8) if shared else toy.stretch(one)
    lost = lambda: stream.fail(*place, "lost")  # noqa: E731
    if reward == "early":
        return [lost], True
    if reward is None:
        return [lambda: stream.sample(*place, piece), lost], True
    reward_of = [lambda: stream.reward(*place, reward)] * judged
    return [lambda: stream.complete(*place, piece), *reward_of], False


def step(params, parts, *, shared, seed=None, dtype=np.float64, **settings):
    """A whole step; `seed` shuffles what is said, None has members one by one."""
    function = toy.segments(parts, dtype) if shared else toy.whole(parts)
    stream = GradientStream(function, params, **settings)
    ones, lanes, rng = trajectories(dtype), [], random.Random(seed)
    judged = settings["estimator"] is not None
    for g, rewards in enumerate(REWARDS.values()):
        prompt = toy.cut(ones[g, 0], 0, PROMPT) if shared else None
        stream.open_group(g, len(rewards), prompt=prompt)
        for m, reward in enumerate(rewards):
            one = ones[g, m]
            events, ordered = told(stream, (g, m), one, reward, shared, judged)
            if seed is not None and not ordered:
                rng.shuffle(events)
            lanes.append(events)
    while lanes := [events for events in lanes if events]:
        (lanes[0] if seed is None else rng.choice(lanes)).pop(0)()
    return stream.finish()


def compared(shared, plain, tolerance):
    (found, report), (expected, other) = shared, plain
    assert toy.gap(found, expected) < tolerance
    assert report.loss == pytest.approx(other.loss, rel=tolerance, abs=tolerance)
    assert report.gradient_norm == pytest.approx(other.gradient_norm, rel=tolerance)
    assert (report.kept_groups, report.kept_members) == (
        other.kept_groups,
        other.kept_members,
    )
    assert report.kept_members > 0


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("parts", ["weighted", "both"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_shared_prompts_change_no_update_with_rewards(params, name, parts, release):
    lossy = {"partial_groups": "drop"}, {"partial_groups": "keep"}
    filtered = {"partial_groups": "keep", "uniform_groups": "drop", "open_groups": 1}
    for case, settings in enumerate((*lossy, filtered)):
        given = {"estimator": ESTIMATORS[name]} | settings
        plain = step(params, parts, shared=False, release="batch", **given)
        rows = 2 if case == 1 else 1
        given |= {"release": release, "rows_per_call": rows}
        for seed in range(2):
            shared = step(params, parts, shared=True, seed=seed, **given)
            compared(shared, plain, EXACT)


@pytest.mark.parametrize("partial", ["drop", "keep"])
@pytest.mark.parametrize("release", RELEASES)
def test_shared_prompts_change_no_update_without_rewards(params, release, partial):
    given = {"estimator": None, "partial_groups": partial}
    plain = step(params, "additive", shared=False, release="batch", **given)
    for seed in range(2):
        given["release"] = release
        shared = step(params, "additive", shared=True, seed=seed, **given)
        compared(shared, plain, EXACT)


def test_several_replicas_share_the_work_behind_a_prompt(params, monkeypatch):
    """Each runs the prompt for its own members; their cotangents are of one group."""
    rng = random.Random(0)
    load = property(lambda self: rng.choice([0, IN_FLIGHT]))
    monkeypatch.setattr(Replica, "load", load)
    layout = NamedSharding(mesh.make_mesh(replica=2), PartitionSpec())
    spread, prompts = jax.device_put(params, layout), []
    for release in ("trajectory", "group"):
        for given in (
            {"estimator": ESTIMATORS["mean_std"]},
            {"estimator": ESTIMATORS["batch_mean_std"], "partial_groups": "keep"},
        ):
            plain = step(params, "both", shared=False, release="batch", **given)
            shared = step(
                spread,
                "both",
                shared=True,
                release=release,
                seed=1,
                on_call=lambda call, ended: prompts.append(call),
                **given,
            )
            compared(shared, plain, EXACT)
    prompts = [call for call in prompts if isinstance(call, Prompt)]
    assert {prompt.replicas for prompt in prompts} == {(0,), (1,)}


@pytest.mark.parametrize("name", [*ESTIMATORS, "none"])
def test_exact_sums_have_the_same_bits_in_any_order_and_release(params, name):
    estimator = ESTIMATORS.get(name)
    parts = "both" if estimator else "additive"
    narrow = jax.tree.map(lambda x: np.asarray(x, np.float32), params)
    bits = set()
    with jax.enable_x64(False):
        given = {"estimator": estimator, "partial_groups": "keep", "dtype": np.float32}
        plain = step(narrow, parts, shared=False, release="batch", **given)
        given["accumulator"] = "exact"
        for release in RELEASES:
            for seed in (None, 1, 2):
                given |= {"release": release, "seed": seed}
                shared = step(narrow, parts, shared=True, **given)
                compared(shared, plain, FLOAT32)
                leaves = jax.tree.leaves(shared[0])
                bits.add(b"".join(np.asarray(x).tobytes() for x in leaves))
    assert len(bits) == 1


@pytest.fixture
def ran(monkeypatch):
    """Names of prompt programs that ran; shapes alone are not looked at here."""
    found, original = [], Replica.run

    def run(self, program, *arguments):
        found.append(program)
        return original(self, program, *arguments)

    monkeypatch.setattr(Replica, "run", run)
    return found


@pytest.mark.parametrize("accumulator", ["plain", "exact"])
@pytest.mark.parametrize("release", RELEASES)
def test_a_prompt_runs_once_forward_and_once_backward_per_group_that_counts(
    params, release, accumulator, ran
):
    """Groups that are dropped, filtered or at their baseline leave no prompt."""
    dtype = np.float32 if accumulator == "exact" else np.float64
    calls = []
    with jax.enable_x64(dtype == np.float64):
        given = jax.tree.map(lambda x: np.asarray(x, dtype), params)
        _, report = step(
            given,
            "both",
            shared=True,
            dtype=dtype,
            release=release,
            accumulator=accumulator,
            estimator=ESTIMATORS["mean_std"],
            uniform_groups="drop",
            on_call=lambda call, ended: calls.append(call),
        )
    prompts = [call for call in calls if isinstance(call, Prompt)]
    # Of "partial" and "empty" a member failed, "uniform" is filtered.
    assert sorted(prompt.group for prompt in prompts) == [0, 4]
    assert all(prompt.kept for prompt in prompts)
    assert (report.kept_groups, report.filtered_groups) == (2, 1)
    assert ran.count(segments.prompt_gradient) == 2
    started = {call.items[0].group for call in calls if call not in prompts}
    assert ran.count(segments.prompt_state) == len(started)
    last = {
        call.items[0].group: i for i, call in enumerate(calls) if call not in prompts
    }
    for prompt in prompts:  # all cotangents were in
        assert calls.index(prompt) > last[prompt.group]


GRPO = LossConfig(distill="sampled_reverse_kl", distill_coef=0.3)


def test_a_transformers_shared_prompts_change_no_update(params):
    """Rewards and distillation in one loss."""
    with jax.enable_x64(True):
        policy, ones = models.init(), models.step(GRPO)
        given = {"loss": GRPO, "rewards": [1.0, 0.0, 0.25, 1.0]}
        expected, whole = models.of_samples(policy, ones, **given)
        given["release"] = "group"
        found, report = models.of_samples(policy, ones, shared=True, **given)
        assert models.difference(found, expected) < EXACT
        assert report.loss == pytest.approx(whole.loss, rel=EXACT)
        assert report.metrics == pytest.approx(whole.metrics, rel=EXACT)
