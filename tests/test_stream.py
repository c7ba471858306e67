"""The gradient of a step does not depend on how it came about.

Every property here is checked through the public `GradientStream` against
`oracle.py`, which sees the whole batch at once in float64.
"""

import collections
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import stories
from toy_stream import feed, toy

from thundersync_jax import GradientStream, Surrogate, advantages
from thundersync_jax.stream.mesh import IN_FLIGHT, Replica
from thundersync_jax.stream.schedule import RELEASES

ESTIMATORS = {
    "mean_std_0": advantages.mean_std(ddof=0, eps=1e-6),
    "mean_std_1": advantages.mean_std(ddof=1, eps=1e-6),
    "mean_only": advantages.mean_only(),
    "leave_one_out": advantages.leave_one_out(),
}
SURROGATES = {
    "weighted": oracle.weighted_only,
    "both": oracle.both_parts,
    "additive": oracle.additive_only,
}
PARAMS = oracle.params()
WAYS = ("streamed", "direct", "discarded")
SETTINGS = {
    "estimator": "mean_std_0",
    "denominator": "trajectories",
    "partial": "drop",
    "parts": "both",
}


def run(groups, events, estimator, denominator, partial, parts, **stream):
    step = GradientStream(
        SURROGATES[parts],
        PARAMS,
        estimator=ESTIMATORS.get(estimator),
        denominator=denominator,
        partial_groups=partial,
        **stream,
    )
    stories.tell(step, groups, events)
    return step.finish()


def check(result, reference, parts):
    gradient, report = result
    assert oracle.distance(gradient, reference.gradient) < oracle.FLOAT32_SUMS
    scale = max(abs(reference.loss), 1.0)
    assert abs(report.loss - reference.loss) < oracle.FLOAT32_SUMS * scale * 10
    assert report.denominator == reference.denominator
    assert report.kept_groups == len(reference.kept)
    assert report.kept_members == sum(map(len, reference.kept.values()))
    assert report.tokens == reference.tokens
    norm = np.sqrt(sum(np.sum(g**2) for g in reference.gradient.values()))
    assert report.gradient_norm == pytest.approx(norm, rel=1e-4, abs=1e-5)
    if parts != "weighted":
        for name, value in report.metrics.items():
            assert value == pytest.approx(reference.metrics[name], rel=1e-5, abs=1e-5)


@pytest.fixture
def busy(monkeypatch):
    """A learner that is busy at random moments, so that decisions come late."""
    rng = random.Random(11)
    monkeypatch.setattr(
        Replica, "load", property(lambda self: rng.choice([0, IN_FLIGHT, IN_FLIGHT]))
    )


@pytest.mark.parametrize("parts", ["weighted", "both", "additive"])
@pytest.mark.parametrize("partial", ["drop", "keep"])
@pytest.mark.parametrize("learner", ["idle", "busy"])
def test_any_story_under_any_rule_equals_the_whole_batch(
    learner, partial, parts, request
):
    """Random interleavings, failures, sizes, K, packing, estimators, denominators."""
    if learner == "busy":
        request.getfixturevalue("busy")
    rng = random.Random(f"{learner} {partial} {parts}")
    ways = collections.Counter()
    for _ in range(20):
        groups = stories.random_groups(rng, fail_share=rng.choice([0.0, 0.1, 0.3]))
        settings = {
            "estimator": rng.choice([*ESTIMATORS, *[None] * (parts == "additive")]),
            "denominator": rng.choice(["none", "groups", "trajectories", "tokens", 3]),
            "partial": partial,
            "parts": parts,
        }
        reference = oracle.whole_batch(groups, **settings)
        for release in ("trajectory", "trajectory", "group", "batch"):
            result = run(
                groups,
                stories.story(groups, rng, rewards=settings["estimator"] is not None),
                **settings,
                release=release,
                open_groups=rng.randint(1, 8),
                rows_per_call=rng.choice([1, 1, 2, 4]),
            )
            check(result, reference, parts)
            report = result[1]
            ways.update({way: getattr(report, way) for way in WAYS})
            if parts == "weighted":  # the others compute uniform groups too
                samples = [
                    groups[g][m].samples for g, a in reference.kept.items() for m in a
                ]
                taken = report.direct + report.streamed + report.skipped
                assert taken == sum(map(len, samples))
            assert report.calls <= report.direct + report.streamed + report.discarded
    taken = {"direct", "streamed", "discarded"}
    if partial == "keep":
        taken -= {"discarded"}
    assert {way for way in WAYS if ways[way]} == taken


@pytest.mark.parametrize("open_groups", range(1, 9))
def test_number_of_open_groups_changes_nothing(open_groups):
    rng = random.Random(0)
    groups = {
        g: [stories.member(rng, rng.gauss(0, 1)) for _ in "1234"] for g in range(10)
    }
    reference = oracle.whole_batch(groups, **SETTINGS)
    # Round robin: every group misses a member until the very end.
    events = [
        (kind, g, m, *rest)
        for m in range(4)
        for g in range(10)
        for kind, *rest in (("complete", 0), ("reward",))
    ]
    result = run(groups, events, **SETTINGS, open_groups=open_groups)
    check(result, reference, "both")
    report = result[1]
    assert report.open_groups_max == open_groups
    assert report.group_sum_bytes == open_groups * 3 * 16  # F0, F1, FA of four floats
    # The open groups have all but their last member streamed.
    assert report.streamed >= 3 * open_groups
    assert report.streamed + report.waited == 3 * 10


def test_reward_may_come_before_the_last_token():
    groups = {"a": [stories.member(random.Random(m), float(m)) for m in range(3)]}
    reference = oracle.whole_batch(groups, **SETTINGS)
    events = [("reward", "a", m) for m in range(3)]
    events += [("complete", "a", m, 0) for m in (2, 0, 1)]
    check(run(groups, events, **SETTINGS), reference, "both")


def test_samples_of_a_member_share_its_advantage_and_count_once():
    """Two samples of a member are the same gradient as one with both parts."""
    rng = random.Random(3)
    groups = {"a": [stories.member(rng, r, samples=2) for r in (1.0, 0.0)]}
    summed = {
        "a": [
            stories.Member(
                [jax.tree.map(lambda *xs: sum(xs), *m.samples)],
                [sum(m.tokens)],
                m.reward,
            )
            for m in groups["a"]
        ]
    }
    for release in RELEASES:
        (two, report), (one, _) = (
            run(g, stories.story(g, rng), **SETTINGS, release=release)
            for g in (groups, summed)
        )
        assert oracle.distance(two, one) < oracle.FLOAT32_SUMS
        assert report.denominator == 2


def test_frozen_arrays_are_an_argument_and_get_no_gradient():
    traces = []

    def surrogate(params, frozen, sample):
        traces.append(1)
        gap = params["x"] - frozen["reference"]
        return Surrogate(
            params["x"] * sample["s"], additive=frozen["beta"] * gap**2 / 2
        )

    for reference, expected in ((1.0, 0.5 + 2 * 0.1 * 2.0), (5.0, 0.5 - 2 * 0.1 * 2.0)):
        for release in RELEASES:
            stream = GradientStream(
                surrogate,
                {"x": jnp.float32(3.0)},
                estimator=advantages.mean_only(),
                denominator="none",
                release=release,
                frozen={"reference": jnp.float32(reference), "beta": 0.1},
            )
            feed(stream, {"a": [(1.0, 2.0), (0.0, 1.0)]})
            gradient, _ = stream.finish()
            assert set(gradient) == {"x"}
            assert float(gradient["x"]) == pytest.approx(expected, abs=1e-6)
    # Parts, and a direct and a split program; another reference is not another one.
    assert len(traces) == 3


@pytest.mark.smoke
def test_metrics_and_loss_are_equal_under_every_release_rule():
    rng = random.Random(8)
    groups = {
        g: [stories.member(rng, r) for r in rewards]
        for g, rewards in {"uniform": (1, 1, 1), "mixed": (0, 1, 0)}.items()
    }
    reference = oracle.whole_batch(groups, **SETTINGS)
    for release in RELEASES:
        _, report = run(groups, stories.story(groups, rng), **SETTINGS, release=release)
        assert report.metrics == pytest.approx(reference.metrics, rel=1e-6)
        assert report.loss == pytest.approx(reference.loss, rel=1e-5)
        assert report.uniform_groups == 1


def test_without_an_estimator_completion_settles_a_member():
    rng = random.Random(2)
    groups = {g: [stories.member(rng, 0.0) for _ in range(2)] for g in range(3)}
    settings = SETTINGS | {"estimator": None, "parts": "additive"}
    reference = oracle.whole_batch(groups, **settings)
    for release in RELEASES:
        events = stories.story(groups, rng, rewards=False)
        result = run(groups, events, **settings, release=release)
        check(result, reference, "additive")


@pytest.mark.parametrize("kept", ["failed", "nothing sampled", "no groups"])
def test_nothing_kept_is_a_gradient_of_zero(kept):
    """All groups fell away, or there were none (THUDM/slime#1860)."""
    for release in RELEASES:
        stream = toy(release=release, denominator="tokens")
        if kept != "no groups":
            stream.open_group("a", 2)
        if kept == "failed":
            stream.complete("a", 0, {"s": 1.0}, tokens=3)
            stream.reward("a", 0, 1.0)
        if kept != "no groups":
            for member in (1,) if kept == "failed" else (0, 1):
                stream.fail("a", member, reason="gone")
        gradient, report = stream.finish()
        assert float(gradient["x"]) == 0.0
        assert (report.loss, report.denominator, report.tokens) == (0.0, 1.0, 0)
        assert report.dropped_groups == (kept != "no groups")


def test_group_of_one_has_advantage_zero_and_counts():
    for estimator in ESTIMATORS.values():
        for release in RELEASES:
            stream = toy(estimator=estimator, release=release)
            feed(stream, {"a": [(1.0, 5.0)], "b": [(1.0, 2.0), (0.0, 1.0)]})
            gradient, report = stream.finish()
            advantage = estimator.advantages([1.0, 0.0])[0]
            assert float(gradient["x"]) == pytest.approx(advantage / 3, abs=1e-6)
            assert (report.kept_members, report.uniform_groups) == (3, 1)


def test_on_call_tells_every_call_and_when_it_ended():
    calls = []
    stream = toy(on_call=lambda call, ended: calls.append((call, ended)))
    feed(stream, {"a": [(1.0, 2.0), (0.0, 1.0)], "b": [(1.0, 2.0), (0.0, 1.0)]})
    _, report = stream.finish()
    assert len(calls) == report.calls == 4
    assert all(ended.is_ready() for _, ended in calls)
    assert [call.place is None for call, _ in calls] == [False, True, False, True]


def test_only_the_owning_thread_may_use_a_stream():
    stream = toy()
    feed(stream, {"a": [(1.0, 2.0), (0.0, 1.0)]})
    caught = []

    def use():
        for call in (stream.finish, stream.advance, lambda: stream.open_group("b", 1)):
            with pytest.raises(ValueError, match=r"intruder.*owns it") as error:
                call()
            caught.append(error)

    thread = threading.Thread(target=use, name="intruder")
    thread.start()
    thread.join()
    assert len(caught) == 3
    assert float(stream.finish()[0]["x"]) == pytest.approx(0.25)
