"""Exact sums in a stream: one set of bits, whatever came first and wherever it ran."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import stories
from jax.sharding import NamedSharding, PartitionSpec
from toy_stream import MEAN, every_way, step, toy, weighted

from thundersync_jax import GradientStream, Surrogate, advantages
from thundersync_jax.errors import StreamError
from thundersync_jax.ops import exact_sum
from thundersync_jax.stream import mesh, refusals, sums
from thundersync_jax.stream.learner import Learner
from thundersync_jax.stream.schedule import RELEASES

ESTIMATORS = (
    advantages.mean_std(),
    advantages.leave_one_out_std(),
    advantages.batch_mean_std(),
    advantages.pass_at_k(2),
    advantages.fixed_baseline(0.25),
)
PARTS = (oracle.weighted_only, oracle.both_parts)


def bits(gradient):
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(gradient))


def told(groups, rng, surrogate=oracle.both_parts, params=None, **settings):
    """The gradient's bits and the report of one random story."""
    settings = {"accumulator": "exact", "open_groups": rng.randint(1, 4)} | settings
    stream = GradientStream(surrogate, params or oracle.params(), **settings)
    stories.tell(stream, groups, stories.story(groups, rng))
    gradient, report = stream.finish()
    return bits(gradient), report


@pytest.mark.parametrize("surrogate", PARTS, ids=["weighted", "both"])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: e.name)
@pytest.mark.parametrize("policy", ["drop", "keep"])
def test_one_set_of_bits_under_every_rule_and_order(estimator, surrogate, policy):
    rng = random.Random(f"{estimator.name} {policy}")
    settings = {"partial_groups": policy, "uniform_groups": policy}
    plain, streamed = 0, 0
    for _ in range(3):
        groups = stories.random_groups(rng, fail_share=0.1)
        found = {}
        for accumulator, release in itertools.product(("exact", "plain"), RELEASES * 2):
            result, report = told(
                groups,
                rng,
                surrogate,
                estimator=estimator,
                release=release,
                accumulator=accumulator,
                **settings,
            )
            found.setdefault(accumulator, set()).add(result)
            streamed += report.streamed
        assert len(found["exact"]) == 1
        plain += len(found["plain"]) > 1
    assert plain > 0
    assert streamed > 0


def test_sum_of_tenths_has_one_value():
    """.1 to .7 in float32 give several sums by order; exact ones give one."""
    tenths = [n / 10 for n in range(1, 8)]
    members = [("a", member) for member in range(7)]
    settings = {
        "estimator": advantages.fixed_baseline(0.0),
        "partial_groups": "keep",
        "release": "trajectory",
    }
    rng = random.Random(0)
    found = {"plain": set(), "exact": set()}
    for accumulator, values in found.items():
        for _ in range(60):
            scores = {"a": rng.sample(tenths, 7)}
            groups = {"a": [1.0] * 7}
            gradient, _ = step(
                groups, scores, members, accumulator=accumulator, **settings
            )
            values.add(float(gradient))
    assert len(found["plain"]) > 1
    (exact,) = found["exact"]
    assert exact == np.float32(sum(np.float64(np.float32(x)) for x in tenths))


def test_reward_offset_costs_nothing():
    """With 1e6 + 1, products of reward and score would leave .125 of .1."""
    scores = {"a": [0.1, 0.2, 0.3, 0.4]}
    found = set()
    for offset in (0.0, 1e6, -1e9):
        rewards = {"a": [offset + r for r in (0.0, 1.0, 0.0, 1.0)]}
        ways = every_way(rewards, scores, ways=[("exact", 1)])
        found |= {float(gradient) for gradient, _ in ways}
    (value,) = found
    assert value == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("shape", [(2, 1, 1), (4, 1, 1), (2, 2, 1)])
def test_replicas_change_no_bit(shape, monkeypatch):
    """Sums of a group that several replicas computed are merged before they close."""
    merged = []
    fold, turns = sums.ExactSums.fold, itertools.count()

    def watched(self, one, table):
        merged.append(len(one.replicas))
        fold(self, one, table)

    monkeypatch.setattr(sums.ExactSums, "fold", watched)
    rng = random.Random(3)
    for _ in range(2):
        groups = stories.random_groups(rng, fail_share=0.1)
        found = set()
        for replicas, release in itertools.product((1, shape[0]), RELEASES):
            turn = property(lambda _, n=replicas: next(turns) % n)
            monkeypatch.setattr(Learner, "free", turn)
            place = NamedSharding(mesh.make_mesh(replicas, *shape[1:]), PartitionSpec())
            params = jax.device_put(oracle.params(), place)
            settings = {"estimator": advantages.mean_std(), "release": release}
            found.add(told(groups, rng, params=params, **settings)[0])
        assert len(found) == 1
    assert max(merged) > 1


def test_third_reward_waits_and_is_counted():
    """Binary rewards stream; each member with a third distinct one waits."""
    for rewards, late in (((0.0, 1.0, 1.0, 0.0), 0), ((0.0, 1.0, 0.5, 0.7), 1)):
        stream = toy(accumulator="exact", release="trajectory")
        stream.open_group("a", 4)
        for member, reward in enumerate(rewards):
            stream.complete("a", member, {"s": 1.0 + member})
            stream.reward("a", member, reward)
            stream.drain()
        _, report = stream.finish()
        assert report.waited_for_bucket == late
        assert report.streamed == 3 - late


@pytest.mark.parametrize("release", RELEASES)
def test_gradient_that_is_not_finite_counts_as_its_own_advantage_does(release):
    groups = {"a": [1.0, 0.5, 0.0], "b": [1.0, 0.0]}
    order = [(g, m) for g, rewards in groups.items() for m in range(len(rewards))]
    scores = {"a": [1.0, np.nan, 2.0], "b": [1.0, 1.0]}
    settings = {"accumulator": "exact", "release": release}
    gradient, _ = step(groups, scores, order, **settings)
    assert float(gradient) == -0.5  # the advantage of 0.5 is 0
    scores["b"][0] = np.nan
    with pytest.raises(StreamError, match="'b'/0 is not finite"):
        step(groups, scores, order, **settings)


def test_too_many_addends_are_said(monkeypatch):
    monkeypatch.setattr(exact_sum, "MAX_ADDENDS", 3)
    jax.clear_caches()
    stream = toy(accumulator="exact", estimator=advantages.fixed_baseline(0.0))
    stream.open_group("a", 5)
    for member in range(5):
        stream.complete("a", member, {"s": 1.0})
        stream.reward("a", member, 1.0)
    with pytest.raises(StreamError, match="more than 3 addends"):
        stream.finish()
    monkeypatch.undo()
    jax.clear_caches()


def test_sum_beyond_float32_is_said():
    stream = toy(accumulator="exact")
    stream.open_group("a", 2)
    for member, reward in enumerate((0.0, 1e20)):
        stream.complete("a", member, {"s": 1e30})
        stream.reward("a", member, reward)
    with pytest.raises(StreamError, match="infinity"):
        stream.finish()


def test_wider_parameters_are_refused():
    with jax.enable_x64(True), pytest.raises(ValueError, match="float64"):
        params = {"x": jnp.zeros((), jnp.float64)}
        GradientStream(weighted, params, estimator=MEAN, accumulator="exact")


def test_bfloat16_gradients_are_summed_without_loss():
    """1,000 additions of 1 stop at 256 in bfloat16 (areal-project/AReaL#1634)."""
    function = lambda p, s: Surrogate(jnp.sum(p["x"] * s["s"].astype(p["x"].dtype)))  # noqa: E731
    for accumulator in ("exact", "plain"):
        stream = GradientStream(
            function,
            {"x": jnp.zeros((), jnp.bfloat16)},
            estimator=advantages.fixed_baseline(0.0),
            denominator="none",
            accumulator=accumulator,
        )
        stream.open_group("a", 1000)
        for member in range(1000):
            stream.complete("a", member, {"s": np.float32(1.0)})
            stream.reward("a", member, 1.0)
        gradient, _ = stream.finish()
        assert gradient["x"].dtype == jnp.float32
        assert float(gradient["x"]) == 1000.0


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("accumulator", ["plain", "exact"])
def test_rewards_may_differ_by_less_than_a_float_can_divide_by(release, accumulator):
    groups = {"a": [0.0, 1e-310, 2e-310]}
    order = [("a", member) for member in range(3)]
    estimator = advantages.mean_std(eps=0.0)
    gradient, _ = step(
        groups, {"a": [1.0, 2.0, 3.0]}, order,
        estimator=estimator, accumulator=accumulator, release=release,
    )  # fmt: skip
    assert float(gradient) == pytest.approx(2 * 1.5**0.5, rel=1e-5)


def test_more_samples_than_addends_are_refused_as_they_come(monkeypatch):
    monkeypatch.setattr(refusals, "MOST_ADDENDS", 3)
    stream = toy(accumulator="exact", estimator=advantages.fixed_baseline(0.0))
    stream.open_group("a", 5)
    for member in range(3):
        stream.complete("a", member, {"s": 1.0})
        stream.reward("a", member, 1.0)
    with pytest.raises(ValueError, match="takes 3, use smaller steps or accumulator"):
        stream.complete("a", 3, {"s": 1.0})
    for member in (3, 4):  # nothing has changed: it may still go without them
        stream.fail("a", member, "too many")
    gradient, _ = stream.finish()
    assert float(gradient["x"]) == 0.0  # partial groups are dropped


def test_advantage_beyond_float32_is_said():
    estimator = advantages.Estimator("huge", lambda r: (r - r.mean()) * 1e300)
    stream = toy(accumulator="exact", estimator=estimator)
    stream.open_group("a", 2)
    stream.complete("a", 0, {"s": 1.0})
    stream.reward("a", 0, 1.0)
    stream.complete("a", 1, {"s": 1.0})
    with pytest.raises(StreamError, match="leaves float32; scale rewards"):
        stream.reward("a", 1, 0.0)
        stream.finish()
