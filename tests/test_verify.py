"""The verify command: what it proves, and that it can fail."""

import dataclasses

import echo_task
import jax
import numpy as np
import pytest

from thundersync_jax import verify as verify_module
from thundersync_jax.errors import ConfigError
from thundersync_jax.measure import live, replay
from thundersync_jax.run.run import Run
from thundersync_jax.stream import sums
from thundersync_jax.types import StopReason, Trajectory, TrajectoryKey
from thundersync_jax.verify import verify

CONFIG = echo_task.small(**{"loss.advantage": "mean_only", "rollout.group_size": 6})


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Holds the warm start, made by the first verify."""
    return tmp_path_factory.mktemp("verify")


def test_release_rules_and_orders_agree_with_batch(workdir):
    result = verify(CONFIG, workdir, steps=2, orders=2)
    assert result["passed"], result
    assert 0 < result["max_relative_difference"] <= 1e-5
    assert 0 < result["control_relative_difference"] <= 1e-5
    assert result["nonzero_groups"] >= 0.5
    assert result["streamed_share"] >= 0.5
    names = {"batch", "group", "trajectory", "order 1", "order 2"}
    assert set(result["sha256"]) == names


@pytest.mark.parametrize("factor", [0.9, 1.0001])
def test_a_wrong_baseline_fails(workdir, monkeypatch, factor):
    right = sums.line

    def wrong(*arguments):
        scale, offset = right(*arguments)
        return scale, offset * factor

    monkeypatch.setattr(sums, "line", wrong)
    result = verify(CONFIG, workdir, steps=1)
    assert not result["passed"]
    assert not result["untested"]
    assert result["max_relative_difference"] > 1e-5


def test_without_streaming_it_is_untested(workdir, monkeypatch):
    right = replay.replay

    def grouped(run, params, events, release, *rest, **named):
        release = "group" if release == "trajectory" else release
        return right(run, params, events, release, *rest, **named)

    monkeypatch.setattr(replay, "replay", grouped)
    result = verify(CONFIG, workdir, steps=1)
    assert not result["passed"]
    assert "streamed" in result["untested"]


def judged(difference=2e-7, control=1e-7, nonzero=1.0, streamed=1.0):
    """The verdict on one point with these figures."""
    point = verify_module._Point(
        gradient={},
        gradient_norm=1.0,
        control=control,
        nonzero_groups=nonzero,
        differences={"batch": 0.0, "trajectory": difference},
        streamed_shares={"batch": 0.0, "trajectory": streamed},
    )
    updated = verify_module._Updated({"x": np.ones(2)})
    return verify_module._judge({"batch": updated, "trajectory": updated}, [point])


@pytest.mark.parametrize(
    "figures",
    [
        {"difference": 2e-5, "control": 1e-5},  # too far from batch
        {"difference": 6e-7},  # six times the control
        {"difference": np.nan},
        {"control": np.nan},
        {"control": 0.0, "difference": 0.0},
        {"nonzero": 0.4},
        {"streamed": 0.4},
    ],
)
def test_every_bound_of_the_verdict_can_fail_it(figures):
    assert judged()["passed"]
    assert not judged(**figures)["passed"]


def test_unknown_rules_and_missing_batch_are_refused(tmp_path):
    for releases in (("batch", "turn"), ("group", "trajectory"), ("trajectory",)):
        with pytest.raises(ConfigError, match="batch included"):
            verify(CONFIG, tmp_path, releases=releases)
    for numbers in ({"steps": 0}, {"orders": -1}):
        with pytest.raises(ConfigError, match="at least 1 step, no fewer than 0 "):
            verify(CONFIG, tmp_path, **numbers)


def test_last_rewards_come_late_within_what_may_be_open():
    """No group ends before all other members of its window are rewarded."""
    given = [_trajectory(g, m) for g in range(6) for m in range(4)]
    rng = np.random.default_rng(0)
    events = replay.last_rewards_late(given, rng, window=3)
    assert len(events) == 2 * len(given)
    for start in (0, 24):
        window = events[start : start + 24]
        early, late = window[:18], window[18:]
        groups = {event.trajectory.key.group for event in window}
        assert len(groups) == 3
        for group in groups:
            assert len(_members(early, group)) == 3
            assert len(_members(late, group)) == 1


def test_every_random_order_is_another_one_in_every_step():
    """Rewards come before tokens and after, and groups are mixed."""
    given = [_trajectory(g, m) for g in range(3) for m in range(4)]
    failed = dataclasses.replace(given[5], stop_reason=StopReason.TIMEOUT, reward=None)
    given[5] = failed
    *rules, first, second = replay.variants(("batch", "group", "trajectory"), 2)
    assert [rule.order for rule in rules] == [0, 0, 0]
    assert [one.rush for one in (*rules, first, second)] == [False] * 4 + [True]
    found = {}
    for variant in (first, second):
        for step in (1, 2):
            events = variant.events(given, seed=0, step=step, window=1)
            again = variant.events(given, seed=0, step=step, window=1)
            assert _names(events) == _names(again)
            assert sorted(_names(events)) == sorted(_names(replay.in_order(given)))
            places = {name: at for at, name in enumerate(_names(events))}
            early = [
                places["reward", key] < places["complete", key]
                for kind, key in places
                if kind == "reward"
            ]
            assert 0 < sum(early) < len(early)
            found[tuple(_names(events))] = None
    assert len(found) == 4


def _members(events, group):
    keys = {event.trajectory.key for event in events}
    return {key.member for key in keys if key.group == group}


def _names(events):
    return [(event.kind, event.trajectory.key) for event in events]


def test_same_ids_live_under_every_release_rule(tmp_path):
    with Run(CONFIG, tmp_path, on_line=lambda line: None) as run:
        lives = live.compare(run, run.initial_params(), 0, step=3)
    batch = lives["batch"].step.trajectories
    for rule in lives.values():
        for one, other in zip(batch, rule.step.trajectories, strict=True):
            np.testing.assert_array_equal(one.ids, other.ids)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert rule.timing.step_secs >= rule.timing.rollout_secs > 0
    assert jax.tree.all(
        jax.tree.map(
            lambda a, b: a.shape == b.shape,
            lives["group"].step.gradient,
            lives["batch"].step.gradient,
        )
    )


def _trajectory(group, member):
    ids = np.arange(3, dtype=np.int32)
    return Trajectory(
        key=TrajectoryKey(0, group, member),
        ids=ids,
        loss_mask=ids > 0,
        logprobs=np.zeros(3, np.float32),
        turns=1,
        stop_reason=StopReason.FINISHED,
        policy_version=0,
        reward=float(member),
    )
