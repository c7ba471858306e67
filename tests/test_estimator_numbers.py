"""Numbers that estimators, filters and sums are reported, or may be feared, to miss.

Cases as in `test_stream_reports.py`, and those a method that streams could fail in: one
right number under every release rule, arrival order and kind of sums.
"""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_stream import EXACT, MEAN, WAYS, additive, every_way, eye, step, toy, weighted

from thundersync_jax import Surrogate, advantages
from thundersync_jax.ops import exact_sum
from thundersync_jax.stream import sums
from thundersync_jax.stream.schedule import RELEASES

pytestmark = pytest.mark.usefixtures("quick_programs")

SAMPLE_STD = advantages.mean_std(ddof=1, eps=1e-6)
LEAVE_ONE_OUT_STD = advantages.leave_one_out_std(ddof=1, eps=0.0)


def both(params, sample):
    """The score gradient is the first number, that of a penalty the second."""
    score, penalty = sample["s"]
    return Surrogate(params["x"] * score, additive=params["x"] * penalty)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (advantages.leave_one_out(), -4.666667),
        (LEAVE_ONE_OUT_STD, -3.535898),
        (advantages.pass_at_k(2), 10 / 3 + 2 * 4 / 3),
        (advantages.fixed_baseline(0.5), 1.5 + 1.0 - 1.5 - 2.0),
        (advantages.mean_std(ddof=0, eps=0.0), -4.221159),
        (advantages.batch_mean_std(ddof=0, eps=0.0), -4.221159),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_three_distinct_rewards_are_no_line_and_yet_right(estimator, expected):
    """Two sums of a group express leave-one-out advantages only without a deviation."""
    groups = {"a": [2, 1, 0, 0]}
    for gradient, _ in every_way(groups, {"a": [1, 2, 3, 4]}, estimator=estimator):
        assert gradient == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("rewards", "late"),
    [((0, 1, 1, 0, 1), 0), ((0, 1, 2, 0, 1), 1), ((0, 1, 2, 3, 2), 2), ((5,) * 5, 0)],
)
def test_a_third_distinct_reward_waits_unless_its_estimator_is_affine(rewards, late):
    for estimator, accumulator, waits in (
        (LEAVE_ONE_OUT_STD, "plain", True),
        (LEAVE_ONE_OUT_STD, "exact", True),
        (MEAN, "exact", True),
        (MEAN, "plain", False),
    ):
        stream = toy(estimator=estimator, denominator="none", accumulator=accumulator)
        stream.open_group("a", 5)
        for member, reward in enumerate(rewards):
            stream.complete("a", member, {"s": 1.0 + member})
            stream.reward("a", member, reward)
            stream.drain()
        gradient, report = stream.finish()
        expected = estimator.advantages(rewards) @ np.arange(1.0, 6.0)
        assert float(gradient["x"]) == pytest.approx(expected, abs=1e-5)
        # With the last reward of its group in, a member waits for nothing.
        assert report.waited_for_bucket == late * waits
        assert report.streamed == 4 - late * waits


@pytest.mark.parametrize(
    "rewards", [[0.0] + [0.95] * 7, [1000.0] + [1000.95] * 7], ids=["", "offset"]
)
def test_equal_peers_raise_no_spike_and_are_filtered_together(rewards):
    """A variance as a difference of squares made -2,075 of -2.474866, and a filter
    dropped the odd member alone (NVIDIA-NeMo/RL#4158)."""
    groups = {"a": rewards, "b": [0.95] * 8}
    scores, size = eye(groups)
    others = -0.95 / 7
    deviation = np.std([0.0] + [0.95] * 6, ddof=1)
    for estimator, odd, peer in (
        (SAMPLE_STD, -2.474866, 0.353552),
        (advantages.leave_one_out(), -0.95, -others),
        (LEAVE_ONE_OUT_STD, 0.0, -others / deviation),
    ):
        for gradient, report in every_way(
            groups, scores, params=size, estimator=estimator, uniform_groups="drop"
        ):
            expected = [odd] + [peer] * 7 + [0.0] * 8
            np.testing.assert_allclose(gradient, expected, atol=2e-6)
            assert (report.kept_members, report.filtered_groups) == (8, 1)


def test_rewards_times_ten_are_gradients_times_ten():
    """A second whitening, over the batch, changes both groups (axon-rl/gem#113,
    amazon-science/reskill#12)."""
    groups = {"a": [1, 0], "b": [10, 0]}
    scores, size = eye(groups)
    for estimator, factor in ((MEAN, 1), (advantages.leave_one_out(), 2)):
        for scale in (1, 10):
            scaled = {g: [scale * r for r in rewards] for g, rewards in groups.items()}
            expected = factor * scale * np.array([0.5, -0.5, 5.0, -5.0])
            for gradient, _ in every_way(
                scaled, scores, params=size, estimator=estimator
            ):
                np.testing.assert_allclose(gradient, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("policy", "plain", "penalised", "tokens"),
    [("keep", 0.8 / 24, 9.2 / 24, 24), ("drop", 0.8 / 4, 1.2 / 4, 4)],
)
def test_filter_takes_tokens_and_penalty_of_a_uniform_group_or_leaves_both(
    policy, plain, penalised, tokens
):
    """They stayed in the divisor, and a KL penalty pushed where no advantage did
    (huggingface/trl#6367, #6365, #5588, #5640). Per token, group y has scores 1 and .2
    and penalties of .1, group x penalties of .4."""
    groups = {"x": [1, 1], "y": [1, 0]}
    settings = {
        "tokens": {"x": [10, 10], "y": [2, 2]},
        "denominator": "tokens",
        "uniform_groups": policy,
    }
    scores = {"x": [3.0, 5.0], "y": [2.0, 0.4]}
    penalties = {"x": [4.0, 4.0], "y": [0.2, 0.2]}
    for gradient, report in every_way(groups, scores, **settings):
        assert gradient == pytest.approx(plain, abs=EXACT)
        assert report.tokens == report.denominator == tokens
    pairs = {g: list(zip(scores[g], penalties[g], strict=True)) for g in groups}
    for gradient, report in every_way(groups, pairs, surrogate=both, **settings):
        assert gradient == pytest.approx(penalised, abs=EXACT)
        assert report.filtered_groups == (policy == "drop")
        assert report.uniform_groups == (policy == "keep")


def test_filtered_group_leaves_neither_gradient_nor_tokens():
    """All of it may have been streamed before its last reward came."""
    groups = {"x": [1, 1, 1, 1], "y": [1, 0]}
    scores = {"x": [0.1, 0.2, 0.3, 0.4], "y": [2.0, 1.0]}
    for gradient, report in every_way(
        groups,
        scores,
        tokens={"x": [5] * 4, "y": [2, 2]},
        denominator="tokens",
        uniform_groups="drop",
    ):
        assert gradient == pytest.approx(0.125, abs=EXACT)
        assert (report.tokens, report.filtered_groups) == (4, 1)


def test_filter_looks_at_rewards_before_penalties():
    """A length penalty made all-wrong groups survive (NVIDIA-NeMo/RL#2431,
    verl-project/verl-recipe#125); nor does one that makes rewards equal filter."""
    raw = {"wrong": [0, 0, 0, 0], "mixed": [1, 0], "long": [1, 0.5]}
    shaped = {"wrong": [0, 0, -0.5, -0.5], "mixed": [1, 0], "long": [0.5, 0.5]}
    scores, size = eye(raw)
    rest = [0.5, -0.5, 0.0, 0.0]
    for policy, wrong in (("drop", [0.0] * 4), ("keep", [0.25, 0.25, -0.25, -0.25])):
        for gradient, report in every_way(
            shaped, scores, raw=raw, params=size, uniform_groups=policy
        ):
            np.testing.assert_allclose(gradient, wrong + rest, atol=EXACT)
            assert report.filtered_groups == (policy == "drop")
            assert report.kept_groups == 3 - report.filtered_groups


def test_every_order_of_seven_tenths_is_one_exact_sum():
    """In float32 they are several sums, 2.7999997 to 2.8000004."""
    tenths = np.arange(1, 8, dtype=np.float32) / np.float32(10)
    orders = np.array(list(itertools.permutations(tenths)))
    assert len(orders) == 5040

    def one(state, value):
        return exact_sum.add(state, value), None

    def total(order):
        state, _ = jax.lax.scan(one, exact_sum.init(jnp.zeros(())), order)
        return exact_sum.value(state)

    exact = np.unique(jax.jit(jax.vmap(total))(jnp.asarray(orders)))
    plain = np.unique(np.cumsum(orders, axis=1, dtype=np.float32)[:, -1])
    assert len(plain) == 4
    assert exact.tolist() == [np.float32(tenths.astype(np.float64).sum())]

    rng = random.Random(0)
    found = {kind: set() for kind, _ in WAYS}
    for release, (kind, _), _ in itertools.product(RELEASES, WAYS, range(10)):
        gradient, _ = step(
            {"a": [1.0] * 7},
            {"a": rng.sample(list(tenths), 7)},
            [("a", member) for member in range(7)],
            estimator=advantages.fixed_baseline(0.0),
            release=release,
            accumulator=kind,
        )
        found[kind].add(float(gradient))
    assert found["exact"] == set(exact.tolist())
    assert max(abs(value / 2.8 - 1) for value in found["plain"]) < 1e-6


@pytest.mark.parametrize("accumulator", ["plain", "exact"])
@pytest.mark.parametrize(
    ("surrogate", "estimator"),
    [(additive, None), (weighted, advantages.fixed_baseline(0.0))],
    ids=["without rewards", "with"],
)
def test_a_step_that_broke_off_leaves_nothing_in_another(
    surrogate, estimator, accumulator
):
    """Eight trajectories, stopped after five: 36 from the start, not 51 or 21."""
    for release in RELEASES:
        streams = []
        for told in (5, 8):
            stream = toy(
                surrogate,
                estimator=estimator,
                denominator="none",
                release=release,
                accumulator=accumulator,
            )
            streams.append(stream)  # nor need the first one be gone
            stream.open_group("a", 8)
            for member in range(told):
                stream.complete("a", member, {"s": 1.0 + member})
                if estimator is not None:
                    stream.reward("a", member, 1.0)
        with pytest.raises(ValueError, match="3 members are outstanding"):
            streams[0].finish()
        assert float(streams[1].finish()[0]["x"]) == 36.0


@pytest.mark.parametrize("accumulator", ["plain", "exact"])
def test_a_million_parameters_in_one_four_and_sixteen_open_groups(accumulator):
    """4 MB per plain sum, and the same gradient however many groups are open."""
    params = {"x": jnp.zeros(1_000_000)}
    sum_bytes = sums.bytes_per_device(params, accumulator)
    assert sum_bytes == {"plain": 4_000_000, "exact": 12_000_001}[accumulator]
    gradients = []
    for open_groups in (1, 4, 16):
        stream = toy(
            params=params,
            open_groups=open_groups,
            accumulator=accumulator,
            denominator="none",
        )
        for group in range(16):
            stream.open_group(group, 2)
        for member, group in itertools.product(range(2), range(16)):
            stream.complete(group, member, {"s": np.float32(0.1 * (group - member))})
            stream.reward(group, member, float(member))
            stream.drain()
        gradient, report = stream.finish()
        assert report.open_groups_max == open_groups
        assert report.group_sum_bytes == open_groups * 2 * sum_bytes
        gradients.append(np.asarray(gradient["x"]))
    for gradient in gradients:
        np.testing.assert_allclose(gradient, -16 * 0.05, rtol=1e-6)
    if accumulator == "exact":
        assert len({gradient.tobytes() for gradient in gradients}) == 1
