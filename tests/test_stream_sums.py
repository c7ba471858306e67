"""What sums of gradients are reported to lose, count twice or round away.

Cases as in `test_stream_reports.py`: every release rule and several arrival orders
give the one right number.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from toy_stream import EXACT, FAIL, MEAN, additive, every_way, feed, toy, weighted

from thundersync_jax import GradientStream, advantages
from thundersync_jax.stream.schedule import RELEASES

pytestmark = pytest.mark.usefixtures("quick_programs")


@pytest.mark.parametrize("pieces", [1, 4, 12])
def test_gradient_norm_does_not_grow_with_the_number_of_pieces(pieces):
    """The norm is of the step's gradient, before clipping (NVIDIA-NeMo/RL#1426,
    NVIDIA-NeMo/RL#3194, verl-project/verl#2282)."""
    piece = np.array([3.0, 4.0]) / pieces
    for gradient, report in every_way(
        {"a": [0.0] * pieces},
        {"a": [piece] * pieces},
        params=(2,),
        surrogate=additive,
        estimator=None,
    ):
        np.testing.assert_allclose(gradient, [3.0, 4.0], atol=EXACT)
        assert report.gradient_norm == pytest.approx(5.0, abs=EXACT)


def test_second_call_adds_to_the_first():
    """NovaSky-AI/SkyRL#2008."""
    for gradient, _ in every_way(
        {"a": [0.0], "b": [0.0]},
        {"a": [2.0], "b": [5.0]},
        surrogate=additive,
        estimator=None,
    ):
        assert gradient == 7.0


def test_constant_group_takes_no_other_group_with_it():
    """thinking-machines-lab/tinker-cookbook#163."""
    groups = {g: [1, 0, 0, 1] for g in range(5)} | {2: [1, 1, 1, 1]}
    scores = {g: [3.0, 1.0, 1.0, 9.0] for g in groups}  # 5 per mixed group
    for gradient, report in every_way(groups, scores):
        assert gradient == pytest.approx(4 * 5.0, abs=1e-5)
        assert (report.kept_members, report.uniform_groups) == (20, 1)
        assert report.direct + report.streamed + report.skipped == 20


@pytest.mark.parametrize("reward", [1.0, 0.7])
def test_step_of_constant_groups_has_gradient_exactly_zero(reward):
    """thinking-machines-lab/tinker-cookbook#163 and #507."""
    groups = {g: [reward] * 4 for g in range(5)}
    scores = {g: [123.4, -77.7, 55.5, 10.1] for g in groups}
    for estimator in (MEAN, advantages.mean_std(ddof=1, eps=0.0)):
        for gradient, report in every_way(groups, scores, estimator=estimator):
            assert gradient == 0.0
            assert (report.uniform_groups, report.kept_members) == (5, 20)
            assert report.gradient_norm == 0.0


def test_trajectory_of_the_next_step_stays_in_the_next_step():
    """A window filled on arrival (PrimeIntellect-ai/prime-rl#3013)."""
    arrivals = ["g0"] * 4 + ["g1"] * 3 + ["g2"] + ["g1"] + ["g2"] * 3
    for release in RELEASES:
        steps = []
        for names in (("g0", "g1"), ("g2",)):
            stream = GradientStream(
                additive,
                {"x": jnp.zeros((), jnp.float32)},
                estimator=None,
                release=release,
            )
            for name in names:
                stream.open_group(name, 4)
            steps.append((stream, names))
        seen = dict.fromkeys(arrivals, 0)
        for name in arrivals:
            for stream, names in steps:
                if name in names:
                    stream.complete(name, seen[name], {"s": 1.0}, tokens=1)
                else:
                    with pytest.raises(ValueError, match="not open"):
                        stream.complete(name, seen[name], {"s": 1.0}, tokens=1)
            seen[name] += 1
        reports = [stream.finish()[1] for stream, _ in steps]
        assert [report.kept_members for report in reports] == [8, 4]
        assert sum(report.tokens for report in reports) == len(arrivals)


def test_denominator_is_the_count_of_what_was_kept():
    """Pieces divided before the count is known (NVIDIA-NeMo/RL#4242)."""
    groups = {"kept": [1.0, 0.0], "lost": [1.0, FAIL]}
    scores = {"kept": [14.0, 2.0], "lost": [100.0, 100.0]}
    tokens = {"kept": [3, 5], "lost": [2, 2]}
    params_at_one = lambda p, s: weighted({"x": p["x"] + 1.0}, s)  # noqa: E731
    for gradient, report in every_way(
        groups, scores, tokens=tokens, surrogate=params_at_one, denominator="tokens"
    ):
        assert gradient == pytest.approx(0.75, abs=EXACT)
        assert report.loss == pytest.approx(0.75, abs=EXACT)
        assert report.tokens == report.denominator == 8


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_large_rewards_do_not_cancel(offset):
    """sum(r s) - b sum(s) loses the difference of 1000 and 1001 in float32."""
    groups = {"a": [offset + r for r in (1000, 1001, 1000, 1001)]}
    for gradient, _ in every_way(groups, {"a": [0.1, 0.2, 0.3, 0.4]}):
        assert gradient == pytest.approx(0.1, rel=1e-4)


def test_dropped_group_leaves_neither_gradient_nor_tokens():
    """A group that streamed and then lost a member."""
    groups = {"x": [1, 1, 1, FAIL], "y": [1, 0]}
    scores = {"x": [0.1, 0.2, 0.3, 0.4], "y": [2.0, 1.0]}
    tokens = {"x": [5] * 4, "y": [2, 2]}
    for gradient, report in every_way(
        groups, scores, tokens=tokens, denominator="tokens"
    ):
        assert gradient == pytest.approx(0.125, abs=EXACT)
        assert (report.tokens, report.dropped_groups) == (4, 1)


def test_failure_after_streaming_withdraws_only_the_failed_member():
    groups = {"a": [1, 0, FAIL]}
    for gradient, _ in every_way(groups, {"a": [1, 2, 4]}, partial_groups="keep"):
        assert gradient == pytest.approx(-0.5, abs=EXACT)


def test_gradient_is_whole_before_anything_could_clip_it():
    """The baseline is applied before the norm is taken."""
    groups = {"a": [1, 0]}
    scores = {"a": [[3.0, 4.0], [1.0, 2.0]]}
    for gradient, report in every_way(groups, scores, params=(2,)):
        np.testing.assert_allclose(gradient, [1.0, 1.0], atol=EXACT)
        assert report.gradient_norm == pytest.approx(2**0.5, abs=EXACT)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (MEAN, 2.5),
        (advantages.mean_std(ddof=1, eps=0.0), 3.928203),
        (advantages.mean_std(ddof=0, eps=0.0), 4.535898),
    ],
)
def test_every_group_has_its_own_mean_and_scale(estimator, expected):
    groups = {"g1": [1, 0, 0, 0], "g2": [1, 1, 0, 0]}
    scores = {"g1": [1, 2, 3, 4], "g2": [8, 6, 4, 2]}
    for open_groups in (1, 4):
        for gradient, _ in every_way(
            groups, scores, estimator=estimator, open_groups=open_groups
        ):
            assert gradient == pytest.approx(expected, abs=2e-6)


def test_two_policy_versions_in_one_step_are_refused_with_both_numbers():
    for known, release, accumulator in itertools.product(
        (3, None), RELEASES, ("plain", "exact")
    ):
        stream = GradientStream(
            weighted,
            {"x": jnp.zeros((), jnp.float32)},
            estimator=MEAN,
            policy_version=known,
            release=release,
            accumulator=accumulator,
        )
        stream.open_group("a", 2)
        stream.complete("a", 0, {"s": 1.0}, policy_version=3)
        with pytest.raises(ValueError, match=r"version 4 .* version 3"):
            stream.complete("a", 1, {"s": 2.0}, policy_version=4)
        stream.complete("a", 1, {"s": 2.0})  # the version is optional
        stream.reward("a", 0, 1.0)
        stream.reward("a", 1, 0.0)
        assert float(stream.finish()[0]["x"]) == pytest.approx(-0.25, abs=EXACT)


@pytest.mark.parametrize(
    "scores", [[123.4, -77.7, 55.5, 10.1], [1000.0, 2000.0, -500.0, 7.7]]
)
def test_equal_rewards_leave_no_residue_for_the_deviation_to_blow_up(scores):
    """Three times .7 has a mean that is off by 1e-16, which eps divides."""
    for rewards in ([0.7] * 4, [0.1 + 0.2] * 3, [1e6 + 0.1] * 7):
        count = len(rewards)
        groups = {"a": rewards}
        for gradient, report in every_way(
            groups,
            {"a": (scores * 2)[:count]},
            estimator=advantages.mean_std(ddof=0, eps=1e-6),
        ):
            assert gradient == 0.0
            assert report.uniform_groups == 1


def test_nearly_equal_rewards_keep_their_difference():
    groups = {"a": [1, 1, 1, 0.999]}
    for gradient, _ in every_way(
        groups,
        {"a": [123.4, -77.7, 55.5, 10.1]},
        estimator=advantages.mean_std(ddof=0, eps=1e-6),
    ):
        assert gradient == pytest.approx(40.839819, rel=1e-5)


@pytest.mark.parametrize("accumulator", ["plain", "exact"])
def test_members_at_their_baseline_leave_no_sums(accumulator):
    """Each has advantage 0 and its group may still fail: nothing is there to fold."""
    stream = toy(
        estimator=advantages.fixed_baseline(1.0),
        accumulator=accumulator,
        denominator="none",
    )
    feed(stream, {"at it": [(1.0, 5.0)] * 3, "off it": [(1.0, 3.0), (0.0, 4.0)]})
    gradient, report = stream.finish()
    assert float(gradient["x"]) == -4.0
    assert report.kept_members == 5
