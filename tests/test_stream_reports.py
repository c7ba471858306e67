"""Numbers that systems of this kind are reported to get wrong.

Each case is complete: a toy model whose score gradients are the given numbers, told to
a `GradientStream` in several arrival orders under every release rule. The right value
is the same for all of them.
"""

import itertools
import random

import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax import GradientStream, Surrogate, advantages, pad
from thundersync_jax.ops import losses
from thundersync_jax.schedule import RELEASES

EXACT = 1e-6  # absolute, in float32
MEAN = advantages.mean_only()
FAIL = None  # in place of a reward


def weighted(params, sample):
    return Surrogate(jnp.sum(params["x"] * sample["s"]))


def additive(params, sample):
    return Surrogate(None, additive=jnp.sum(params["x"] * sample["s"]))


def orders(groups, count=6, seed=0):
    """Arrival orders: in turn, reversed, groups side by side, and shuffled ones."""
    members = [(g, m) for g, rewards in groups.items() for m in range(len(rewards))]
    rng = random.Random(seed)
    yield members
    yield members[::-1]
    yield sorted(members, key=lambda gm: gm[1])
    for _ in range(count - 3):
        yield rng.sample(members, len(members))


def step(
    groups,
    scores,
    order,
    *,
    tokens=None,
    surrogate=weighted,
    params=(),
    reward_first=False,
    **settings,
):
    """Tells a stream of groups of rewards (None fails) and scores, in an order."""
    stream = GradientStream(
        surrogate,
        {"x": jnp.zeros(params)},
        **{"estimator": MEAN, "denominator": "none"} | settings,
    )
    for group, rewards in groups.items():
        stream.open_group(group, len(rewards))
    for group, member in order:
        count = 1 if tokens is None else tokens[group][member]
        reward = groups[group][member]
        judged = reward is not None and settings.get("estimator", MEAN) is not None
        if judged and reward_first:
            stream.reward(group, member, reward)
        sample = {"s": np.asarray(scores[group][member], np.float32)}
        if reward is FAIL:
            stream.sample(group, member, sample, tokens=count)
            stream.fail(group, member, reason="invalid_reward")
            continue
        stream.complete(group, member, sample, tokens=count)
        if judged and not reward_first:
            stream.reward(group, member, reward)
    gradient, report = stream.finish()
    return np.asarray(gradient["x"]), report


def every_way(groups, scores, **settings):
    """The gradients and reports of all rules and arrival orders."""
    for release in RELEASES:
        for reward_first, order in zip(
            itertools.cycle([False, True]), orders(groups), strict=False
        ):
            for rows in (1, 4):
                yield step(
                    groups,
                    scores,
                    order,
                    release=release,
                    reward_first=reward_first,
                    rows_per_call=rows,
                    **settings,
                )


def eye(groups):
    """Scores that make the gradient the list of advantages."""
    size = sum(map(len, groups.values()))
    rows = iter(np.eye(size))
    return {g: [next(rows) for _ in rewards] for g, rewards in groups.items()}, (size,)


def test_token_mean_does_not_depend_on_the_cut():
    """Pieces divided by their own tokens (huggingface/trl#3021,
    NovaSky-AI/SkyRL#1296, PrimeIntellect-ai/prime-rl#2562)."""
    for name, sums, tokens, expected in (
        ("three", [6.0, 3.0, 4.0], [1, 3, 8], 13 / 12),
        ("two", [4.0, 6.0], [2, 6], 1.25),
    ):
        groups = {name: [0.0] * len(sums)}
        for gradient, report in every_way(
            groups,
            {name: sums},
            tokens={name: tokens},
            surrogate=additive,
            estimator=None,
            denominator="tokens",
        ):
            assert gradient == pytest.approx(expected, abs=EXACT)
            assert report.denominator == sum(tokens)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param(
            {"g0": [1, 0, 0], "g1": [1, 1, 0, 0, 1]},
            [2 / 3, -1 / 3, -1 / 3, 0.4, 0.4, -0.6, -0.6, 0.4],
            id="groups of unequal size, interleaved (THUDM/slime#1414)",
        ),
        pytest.param(
            {"a": [1, 1, 0, 0, 0, 0, 0, 1]},
            [0.625, 0.625] + [-0.375] * 5 + [0.625],
            id="group larger than a call (google/tunix#816)",
        ),
        pytest.param(
            {"a": [1, 0, 0, 0]},
            [0.75, -0.25, -0.25, -0.25],
            id="baseline of all members (ServiceNow/PipelineRL#54)",
        ),
        pytest.param(
            {"a": [1, FAIL, 0, 1], "b": [1, 0]},
            [1 / 3, 0, -2 / 3, 1 / 3, 0.5, -0.5],
            id="missing verdict is not a number (modelscope/ms-swift#8123)",
        ),
        pytest.param(
            {"a": [FAIL, -1, -1, FAIL], "b": [1, 0]},
            [0, 0, 0, 0, 0.5, -0.5],
            id="missing verdict is not 0 (huggingface/trl#6427)",
        ),
        pytest.param(
            {"a": [1, FAIL, FAIL, FAIL], "b": [1, 0]},
            [0, 0, 0, 0, 0.5, -0.5],
            id="one survivor (huggingface/trl#5773)",
        ),
    ],
)
def test_advantages_are_those_of_the_surviving_group(groups, expected):
    """Reports are in the cases' names."""
    scores, size = eye(groups)
    failed = sum(reward is FAIL for rewards in groups.values() for reward in rewards)
    for gradient, report in every_way(
        groups, scores, params=size, partial_groups="keep"
    ):
        np.testing.assert_allclose(gradient, expected, atol=EXACT)
        assert report.invalid_rewards == report.failed_members == failed
        assert report.kept_groups == len(groups)


def test_one_survivor_of_four_is_counted_and_nothing_is_nan():
    """The sample deviation of one number (huggingface/trl#5773)."""
    groups = {"a": [1, FAIL, FAIL, FAIL], "b": [1, 0]}
    scores, size = eye(groups)
    deviation = 0.5**0.5
    for gradient, report in every_way(
        groups,
        scores,
        params=size,
        partial_groups="keep",
        estimator=advantages.mean_std(ddof=1, eps=0.0),
    ):
        expected = [0, 0, 0, 0, 0.5 / deviation, -0.5 / deviation]
        np.testing.assert_allclose(gradient, expected, atol=EXACT)
        assert (report.kept_groups, report.kept_members) == (2, 3)


def test_all_arrival_orders_of_a_group_give_one_baseline():
    """Statistics of the first element only (ServiceNow/PipelineRL#54)."""
    groups = {"a": [1, 0, 0, 0]}
    scores, size = eye(groups)
    for order in itertools.permutations([("a", m) for m in range(4)]):
        for release in RELEASES:
            gradient, _ = step(groups, scores, order, params=size, release=release)
            np.testing.assert_allclose(gradient, [0.75] + [-0.25] * 3, atol=EXACT)


def test_last_call_need_not_be_full():
    """Ten trajectories in calls of four (google/tunix#1179)."""
    groups = {"a": [0.0] * 10}
    for gradient, report in every_way(
        groups, {"a": range(1, 11)}, surrogate=additive, estimator=None
    ):
        assert gradient == pytest.approx(55, abs=EXACT)
        assert report.direct + report.streamed == 10


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_stands_at_a_masked_position_does_not_matter(poison):
    """Zero times NaN (NovaSky-AI/SkyRL#1633, jax-ml/jax#17070)."""

    def surrogate(params, sample):
        logprobs = params["x"] + sample["s"]
        weights = jnp.array([1.0, 0.0])
        return Surrogate(None, additive=-losses.policy_gradient(logprobs, weights))

    for gradient, report in every_way(
        {"a": [0.0]},
        {"a": [[1.0, poison]]},
        params=(2,),
        surrogate=surrogate,
        estimator=None,
    ):
        np.testing.assert_array_equal(gradient, [1.0, 0.0])
        assert report.loss == 1.0


@pytest.mark.parametrize(
    ("partial", "expected", "counts"),
    [
        ("drop", [0.0, 0.0, 0.0, 0.0], (1, 0, 0)),
        ("keep", [1 / 3, -2 / 3, 0.0, 1 / 3], (0, 1, 3)),
    ],
)
def test_partial_group_is_dropped_or_short_never_taken_for_full(
    partial, expected, counts
):
    """verl-project/verl#6437, areal-project/AReaL#1416, areal-project/AReaL#1559."""
    groups = {"a": [1, 0, FAIL, 1]}
    scores, size = eye(groups)
    for gradient, report in every_way(
        groups, scores, params=size, partial_groups=partial
    ):
        np.testing.assert_allclose(gradient, expected, atol=EXACT)
        found = (report.dropped_groups, report.short_groups, report.kept_members)
        assert found == counts


def test_reward_mean_is_over_the_verdicts_there_are():
    """huggingface/trl#4501."""
    groups = {"a": [0.5, FAIL, FAIL, 0.8, 0.6, 0.7]}
    for _, report in every_way(groups, {"a": [1.0] * 6}, partial_groups="keep"):
        assert report.reward_mean == pytest.approx(0.65)
        assert (report.rewards, report.invalid_rewards) == (4, 2)


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
                additive, {"x": jnp.zeros(())}, estimator=None, release=release
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
    for known in (3, None):
        stream = GradientStream(
            weighted, {"x": jnp.zeros(())}, estimator=MEAN, policy_version=known
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


def test_lengths_in_buckets_share_a_few_programs():
    """32 lengths, two of them compiled (verl-project/verl#7272,
    sgl-project/sglang-jax#609)."""

    def surrogate(params, sample):  # new for this test, so that all is compiled here
        return Surrogate(None, additive=params["x"] * jnp.sum(sample["s"]))

    lengths = range(100, 132)
    compiles = []
    for release in RELEASES:
        stream = GradientStream(
            surrogate,
            {"x": jnp.zeros(())},
            estimator=None,
            denominator="none",
            release=release,
            partial_groups="keep",
        )
        stream.open_group("a", 32)
        for member, length in enumerate(lengths):
            stream.complete("a", member, pad({"s": np.ones(length)}, (128, 192)))
        gradient, report = stream.finish()
        assert float(gradient["x"]) == sum(lengths)
        compiles.append(report.compiles)
    assert compiles == [2, 0, 0]


def test_last_smaller_batch_is_no_other_program():
    """patrick-kidger/diffrax#111."""

    def surrogate(params, sample):
        return additive(params, sample)

    groups = {"a": [0.0] * 10}
    gradient, report = step(
        groups,
        {"a": range(1, 11)},
        [("a", m) for m in range(10)],
        surrogate=surrogate,
        estimator=None,
        release="batch",
        rows_per_call=4,
    )
    assert (float(gradient), report.compiles, report.calls) == (55.0, 1, 3)
