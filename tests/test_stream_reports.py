"""Advantages, averages and programs that systems are reported to get wrong.

Each case is complete: a toy model whose score gradients are the given numbers, told to
a `GradientStream` in several arrival orders under every release rule. The right value
is the same for all of them.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from toy_stream import EXACT, FAIL, additive, every_way, eye, step

from thundersync_jax import GradientStream, Surrogate, advantages, pad
from thundersync_jax.ops import losses
from thundersync_jax.stream.schedule import RELEASES

pytestmark = pytest.mark.usefixtures("quick_programs")


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
        for release, accumulator in itertools.product(RELEASES, ("plain", "exact")):
            settings = {"release": release, "accumulator": accumulator}
            gradient, _ = step(groups, scores, order, params=size, **settings)
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
