"""Samples of one open group with equal rewards share a gradient call and a fold."""

import collections
import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import stories
from jax.sharding import NamedSharding, PartitionSpec
from toy_stream import MEAN, additive, toy, weighted

from thundersync_jax import GradientStream, Surrogate, advantages, pad
from thundersync_jax.errors import StreamError
from thundersync_jax.stream import accumulator, mesh
from thundersync_jax.stream.mesh import IN_FLIGHT, Replica

PARTS = {
    "weighted": oracle.weighted_only,
    "both": oracle.both_parts,
    "additive": oracle.additive_only,
}
ESTIMATORS = {
    "mean_std_0": advantages.mean_std(ddof=0),
    "mean_only": advantages.mean_only(),
    "leave_one_out": advantages.leave_one_out(),
}


@pytest.fixture
def learner(monkeypatch):
    """A learner that is busy while it is told so: what arrives meanwhile waits."""
    state = types.SimpleNamespace(busy=True)
    load = property(lambda self: IN_FLIGHT if state.busy else 0)
    monkeypatch.setattr(Replica, "load", load)
    return state


def tell(stream, group, first, members):
    """Members (reward, score) of a group come in, from an index on."""
    for index, (reward, score) in enumerate(members, first):
        stream.complete(group, index, {"s": score})
        stream.reward(group, index, reward)


def arrive(stream, learner, members, size, group="a"):
    """The first members of a group come in before the learner is free."""
    learner.busy = True
    stream.open_group(group, size)
    tell(stream, group, 0, members)
    learner.busy = False
    stream.advance()


def known(calls, group="a"):
    """The members of the calls that went into sums of a group."""
    calls = [call for call in calls if call.place is not None]
    return [
        [x.member for x in call.items] for call in calls if call.items[0].group == group
    ]


def few_rewards(rng, fail_share):
    """Groups in which rewards repeat, with 0 to 2 samples per member."""
    groups = {}
    for name in range(rng.randint(1, 4)):
        values = rng.choice([(0.0, 1.0), (0.7,), (-1.0, 0.5, 1e4), (0.1, 1e-20)])
        members = []
        for _ in range(rng.randint(2, 9)):
            count = rng.choice([0, 1, 1, 1, 2])
            member = stories.member(rng, rng.choice(values), samples=count)
            member.failed = rng.random() < fail_share
            members.append(member)
        groups[name] = members
    return groups


def told(stream, groups, events, learner, rng):
    """A story to a learner that is rarely free."""
    for name, members in groups.items():
        stream.open_group(name, len(members))
    stream.open_group = lambda *_: None  # they are open
    for event in events:
        learner.busy = rng.random() < 0.9
        stories.tell(stream, groups, [event])
    learner.busy = False
    return stream.finish()


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("partial", ["drop", "keep"])
def test_shared_calls_change_nothing_but_the_rounding(learner, partial, parts):
    """Two sums and three, dropped groups, several samples a member, any order."""
    rng = random.Random(f"{partial} {parts}")
    shared = collections.Counter()
    for _ in range(25):
        groups = few_rewards(rng, rng.choice([0.0, 0.1, 0.1]))
        estimator = rng.choice(list(ESTIMATORS))
        if parts == "additive" and rng.random() < 0.5:
            estimator = None
        reference = oracle.whole_batch(groups, estimator, "tokens", partial, parts)
        calls = []
        stream = GradientStream(
            PARTS[parts],
            oracle.params(),
            estimator=ESTIMATORS.get(estimator),
            denominator="tokens",
            partial_groups=partial,
            open_groups=rng.randint(1, 4),
            rows_per_call=rng.choice([2, 3, 4]),
            on_call=lambda call, ended, calls=calls: calls.append(call),
        )
        events = stories.story(groups, rng, rewards=estimator is not None)
        gradient, report = told(stream, groups, events, learner, rng)
        assert oracle.distance(gradient, reference.gradient) < oracle.FLOAT32_SUMS
        scale = max(abs(reference.loss), 1.0)
        assert abs(report.loss - reference.loss) < 10 * oracle.FLOAT32_SUMS * scale
        for name, value in report.metrics.items():
            assert value == pytest.approx(reference.metrics[name], rel=1e-5, abs=1e-5)
        taken = collections.Counter()
        for call in calls:
            for item in call.items:
                kept = item.member in reference.kept.get(item.group, ())
                how = "direct" if call.place is None else "streamed"
                taken[how if kept else "discarded"] += 1
            if call.place is not None and len(call.items) > 1:
                rewards = {groups[x.group][x.member].reward for x in call.items}
                assert len(rewards) == 1 or estimator is None
                shared["calls"] += 1
                shared["dropped"] += call.items[0].group not in reference.kept
                members = {x.member for x in call.items}
                shared["many samples"] += len(members) < len(call.items)
        assert report.calls == len(calls)
        # Otherwise none needs a place, or streamed is what is ahead of the step's end.
        if estimator is not None and (partial == "drop" or parts != "additive"):
            assert (report.direct, report.streamed, report.discarded) == tuple(
                taken[how] for how in ("direct", "streamed", "discarded")
            )
    if partial == "drop" or parts != "additive":
        assert min(shared["calls"], shared["many samples"]) > 1
        assert (shared["dropped"] > 0) == (partial == "drop")


@pytest.mark.parametrize("function", [weighted, additive])
def test_members_alike_take_one_call_and_one_fold(learner, function, monkeypatch):
    folds, calls = [], []
    add_group = accumulator.add_group
    monkeypatch.setattr(
        accumulator, "add_group", lambda *args: folds.append(1) or add_group(*args)
    )
    stream = toy(
        function,
        rows_per_call=3,
        denominator="none",
        on_call=lambda call, ended: calls.append(call),
    )
    rewards = (1.0, 0.0, 1.0, 0.0, 1.0, 1.0)
    arrive(stream, learner, [(r, float(m)) for m, r in enumerate(rewards)], size=7)
    assert known(calls) == [[0, 2, 4], [1], [3], [5]]
    assert len(folds) == 4
    tell(stream, "a", 6, [(0.0, 6.0)])
    gradient, report = stream.finish()
    expected = 0 + 2 + 4 + 5 - 21 * 4 / 7 if function is weighted else 21
    assert float(gradient["x"]) == pytest.approx(expected, abs=1e-5)
    assert (report.streamed, report.direct, report.calls) == (6, 1, 5)


@pytest.mark.parametrize("seed", range(6))
def test_rewards_of_any_magnitude_may_share_calls(learner, seed):
    """The units of the sums grow within a group, before and after shared calls."""
    rng = np.random.default_rng(seed)
    values = rng.choice([-1, 1], 4) * 10.0 ** rng.uniform(-30, 29.9, 4)
    rewards = rng.permutation(np.repeat([*values, 0.0], 2))
    scores = np.float32(rng.normal(size=(10, 5)))
    for estimator in (advantages.mean_std(eps=0.0), MEAN):
        terms = estimator.advantages(rewards)[:, None] * scores.astype(np.float64)
        calls = []
        stream = GradientStream(
            weighted,
            {"x": jnp.zeros(5)},
            estimator=estimator,
            denominator="none",
            rows_per_call=2,
            on_call=lambda call, ended, calls=calls: calls.append(call),
        )
        members = list(zip(rewards, scores, strict=True))
        arrive(stream, learner, members[:9], size=10)
        tell(stream, "a", 9, members[9:])
        gradient, _ = stream.finish()
        assert sorted(map(len, known(calls))) == [1, 2, 2, 2, 2]
        np.testing.assert_allclose(
            gradient["x"], terms.sum(axis=0), rtol=0, atol=1e-5 * np.abs(terms).max()
        )


def test_trajectory_at_fault_in_a_shared_call_is_named(learner):
    calls = []
    stream = toy(rows_per_call=3, on_call=lambda call, ended: calls.append(call))
    members = [(1.0, 1.0), (1.0, np.nan), (1.0, 2.0), (0.0, 2.0)]
    arrive(stream, learner, members, size=5)
    tell(stream, "a", 4, [(0.0, 1.0)])
    assert known(calls) == [[0, 1, 2], [3]]
    with pytest.raises(StreamError, match="group/member 'a'/1 is not finite"):
        stream.finish()


def test_all_of_a_shared_call_are_named_where_their_values_are_finite(learner):
    """A gradient of infinity at a value of 0: no row can be told from another."""
    root = lambda p, s: Surrogate(jnp.sqrt(p["x"] * s["s"] ** 2))  # noqa: E731
    stream = toy(root, rows_per_call=2)
    arrive(stream, learner, [(1.0, 1.0), (1.0, 2.0), (0.0, 0.0)], size=4)
    tell(stream, "a", 3, [(0.0, 0.0)])
    with pytest.raises(StreamError, match="'a'/0, 'a'/1,.* is not finite"):
        stream.finish()


@pytest.mark.parametrize("last", ["failure", "same reward"])
def test_shared_call_of_a_group_that_counts_for_nothing_may_be_anything(learner, last):
    stream = toy(rows_per_call=2, open_groups=1, denominator="none")
    arrive(stream, learner, [(1.0, np.nan), (1.0, 2.0)], 3, "bad")
    if last == "failure":
        stream.fail("bad", 2, reason="gone")
    else:
        tell(stream, "bad", 2, [(1.0, 1.0)])
    arrive(stream, learner, [(1.0, 1.0), (1.0, 2.0), (0.0, 1.0)], 4, "good")
    tell(stream, "good", 3, [(0.0, 4.0)])
    gradient, report = stream.finish()
    assert float(gradient["x"]) == pytest.approx(0.5 * (3 - 5))
    counts = (report.streamed, report.discarded, report.skipped)
    assert counts == ((3, 2, 0) if last == "failure" else (5, 0, 1))


def test_computed_tokens_of_shared_calls_are_those_of_their_rows(learner):
    function = lambda p, s: Surrogate(p["x"] * jnp.sum(s["s"]))  # noqa: E731
    stream = toy(function, rows_per_call=2)
    stream.open_group("a", 5)
    for member, length in enumerate((3, 5, 2, 4, 1)):
        stream.complete("a", member, pad({"s": np.ones(length)}, (4, 8)))
    for member, reward in enumerate((1.0, 1.0, 1.0, 0.0)):
        stream.reward("a", member, reward)
    learner.busy = False
    stream.advance()
    stream.reward("a", 4, 0.0)
    gradient, report = stream.finish()
    assert float(gradient["x"]) == pytest.approx((10 * 0.4 - 5 * 0.6) / 5)
    assert report.padded_over_real_tokens == (2 * 4 + 8 + 4 + 4) / 15
    assert (report.calls, report.streamed, report.direct) == (4, 4, 1)


@pytest.mark.parametrize("shape", [(1, 2, 1), (2, 1, 2)])
def test_shared_calls_on_a_mesh_give_the_same_sums(learner, shape):
    grid = mesh.make_mesh(*shape)
    place = NamedSharding(grid, PartitionSpec())
    rng = random.Random(2)
    members = [stories.member(rng, r) for r in (1.0, 0.0, 1.0, 1.0, 1.0, 0.0)]
    settings = ("mean_std_0", "trajectories", "drop", "both")
    reference = oracle.whole_batch({"a": members}, *settings)
    calls = []
    stream = GradientStream(
        oracle.both_parts,
        jax.device_put(oracle.params(), place),
        estimator=ESTIMATORS["mean_std_0"],
        rows_per_call=2,
        on_call=lambda call, ended: calls.append(call),
    )
    stream.open_group("a", 6)
    for index, member in enumerate(members):
        if index == 5:
            learner.busy = False
            stream.advance()
        stream.complete("a", index, member.samples[0])
        stream.reward("a", index, member.reward)
    gradient, _ = stream.finish()
    assert known(calls) == [[0, 2], [1], [3, 4]]
    assert oracle.distance(gradient, reference.gradient) < oracle.FLOAT32_SUMS
