"""Numbers of losses, through a whole stream: tokens, turns, penalties, precision.

Cases as in `test_stream_reports.py`: one right number under every release rule, arrival
order and kind of sums.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from toy_stream import EXACT, every_way, step

from thundersync_jax import GradientStream, Surrogate, advantages
from thundersync_jax.config import LossConfig
from thundersync_jax.measure.steps import _report_metrics
from thundersync_jax.ops import losses
from thundersync_jax.run import objective
from thundersync_jax.stream import mesh, sums
from thundersync_jax.stream.mesh import Replica
from thundersync_jax.stream.schedule import RELEASES

pytestmark = pytest.mark.usefixtures("quick_programs")

STUDENT = np.float32([1.0, 0.0])
TEACHER = jax.nn.log_softmax(np.float32([2.0, 0.0]))
POLICY = np.log(np.float32([0.7, 0.3]))
REFERENCE = np.log(np.float32([0.5, 0.5]))
# Both tokens, each with its probability: an expectation without sampling.
TOKENS = {"a": [[0.7, 0.0], [0.0, 0.3]]}


def summed(params, sample):
    """A loss per token whose sum is given, and the weight its aggregation gave it."""
    return Surrogate(None, additive=jnp.sum(params["x"] * sample["s"]))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (LossConfig(aggregation="token_mean"), 1.083333),
        (LossConfig(aggregation="sequence_mean"), 2.5),
        (LossConfig(aggregation="constant", constant=16), 0.270833),
    ],
    ids=lambda value: getattr(value, "aggregation", ""),
)
def test_three_aggregations_are_three_numbers(loss, expected):
    """The setting was ignored (AI-Hypercomputer/maxtext#4025)."""
    tokens, totals = [1, 3, 8], [6.0, 3.0, 4.0]
    scores = []
    for count, total in zip(tokens, totals, strict=True):
        mask = np.arange(10) < count
        weights = losses.token_weights(mask, loss.aggregation, loss.constant)
        scores.append(np.sum(weights * total / count))
    for gradient, report in every_way(
        {"a": [0.0] * 3},
        {"a": scores},
        tokens={"a": tokens},
        surrogate=summed,
        estimator=None,
        denominator=objective.denominator(loss),
    ):
        assert gradient == pytest.approx(expected, abs=EXACT)
        assert report.tokens == 12


def per_token(params, sample):
    """Sums over tokens as metrics: the values, and how many there are."""
    total = jnp.sum(sample["s"])
    return Surrogate(None, params["x"] * total, {"kl": total})


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("accumulator", ["plain", "exact"])
def test_mean_over_tokens_is_no_mean_of_means(accumulator, replicas, monkeypatch):
    """Two tokens of mean 2 on one rank and six of mean 1 on another are 1.25
    (huggingface/trl#6380), as a gradient too (huggingface/trl#3021)."""
    load = property(lambda self: len(self._running) / 1000)  # takes turns
    monkeypatch.setattr(Replica, "load", load)
    place = NamedSharding(mesh.make_mesh(replicas, 1, 1), PartitionSpec())
    params = {"x": jax.device_put(jnp.zeros(()), place)}
    for release in RELEASES:
        calls = []
        stream = GradientStream(
            per_token,
            params,
            estimator=None,
            denominator="tokens",
            release=release,
            accumulator=accumulator,
            on_call=lambda call, ended, seen=calls: seen.append(call.replica),
        )
        stream.open_group("a", 2)
        stream.complete("a", 0, {"s": np.full(2, 2.0, np.float32)}, tokens=2)
        stream.complete("a", 1, {"s": np.full(6, 1.0, np.float32)}, tokens=6)
        gradient, report = stream.finish()
        assert float(gradient["x"]) == 1.25
        assert _report_metrics(report)["kl"] == 1.25
        assert set(calls) == set(range(replicas))


def policy(params, sample):
    """A surrogate whose parameters are log-probabilities, weights come as scores."""
    return Surrogate(losses.policy_gradient(params["x"], sample["s"]))


def test_every_turn_of_a_trajectory_is_trained():
    """Three turns of two tokens at advantage .5, in one sample or one each: 3, where
    the last turn alone gives 1 (NovaSky-AI/SkyRL#1507)."""
    turn = np.array([0, 1, 1], bool)  # what was observed, then two trained tokens
    whole = losses.token_weights(np.tile(turn, 3), "constant", 1.0)
    nothing = np.zeros(9, np.float32)
    weights = {"a": [np.r_[whole, nothing], np.r_[nothing, whole]]}
    for gradient, _ in every_way({"a": [1, 0]}, weights, params=18, surrogate=policy):
        assert -gradient[:9].sum() == pytest.approx(3.0, abs=EXACT)
        np.testing.assert_allclose(gradient[:9], -0.5 * whole, atol=EXACT)
    turns = np.split(whole, 3)
    for release in RELEASES:
        for accumulator in ("plain", "exact"):
            stream = GradientStream(
                policy,
                {"x": jnp.zeros(3)},
                estimator=advantages.mean_only(),
                denominator="none",
                release=release,
                accumulator=accumulator,
            )
            stream.open_group("a", 2)
            for one in turns:
                stream.sample("a", 0, {"s": one})
            stream.complete("a", 0)
            stream.complete("a", 1, {"s": 0 * turns[0]})
            stream.reward("a", 0, 1.0)
            stream.reward("a", 1, 0.0)
            gradient = np.asarray(stream.finish()[0]["x"])
            assert -gradient.sum() == pytest.approx(3.0, abs=EXACT)


def cut_short(params, sample):
    """A token per member, of ratios 1.3 and 1.1 of learner to sampler."""
    logprobs, weights = params["x"] - 1.0, sample["s"]
    sampler = -1.0 - jnp.log(jnp.array([1.3, 1.3, 1.1, 1.1]))
    ratio = losses.importance_weights(logprobs, sampler, weights != 0, 1.2)
    return Surrogate(losses.policy_gradient(logprobs, ratio * weights))


def test_importance_weights_are_cut_whatever_the_sign_of_the_advantage():
    """A cut that depends on it, as that of a clipped ratio, is not linear: at ratio 1.3
    and clip .2 advantage .75 gives 0 and -.25 gives -.325."""
    scores = {"a": list(np.eye(4))}
    expected = [-1.2 * 0.75, 1.2 * 0.25, 1.1 * 0.25, 1.1 * 0.25]
    for gradient, _ in every_way(
        {"a": [1, 0, 0, 0]}, scores, params=4, surrogate=cut_short
    ):
        np.testing.assert_allclose(gradient, expected, atol=EXACT)


def test_a_surrogate_is_given_no_advantage_to_be_clipped_with():
    def clipped(params, sample, advantage):
        ratio = jnp.exp(params["x"])
        return Surrogate(jnp.minimum(ratio * advantage, 1.2 * advantage))

    with pytest.raises(TypeError, match="advantage"):
        step({"a": [1, 0]}, {"a": [1, 1]}, [("a", 0)], surrogate=clipped)


def teacher_credit(params, sample):
    """The advantage of a token is the teacher's log-probability over the student's."""
    logprobs = jax.nn.log_softmax(params["x"] + STUDENT)
    ones, credit = jnp.ones(2), TEACHER - logprobs
    _, additive = losses.turn_credit(logprobs, sample["s"], 0 * ones, credit)
    return Surrogate(None, additive=additive)


def student(params, sample):
    logprobs = jax.nn.log_softmax(params["x"] + STUDENT)
    return Surrogate(losses.policy_gradient(logprobs, sample["s"]))


def test_advantage_from_a_teacher_is_detached():
    """Its gradient flowed through the student: .134362 instead of .050113
    (THUDM/slime#1449, meta-pytorch/torchforge#527). As credit, and as reward."""
    token, advantage = {"a": [[1.0, 0.0]]}, 0.186334
    ways = [
        *every_way(
            {"a": [0]}, token, params=2, surrogate=teacher_credit, estimator=None
        ),
        *every_way(
            {"a": [advantage]},
            token,
            params=2,
            surrogate=student,
            estimator=advantages.fixed_baseline(0.0),
        ),
    ]
    for gradient, _ in ways:
        np.testing.assert_allclose(-gradient, [0.050113, -0.050113], atol=EXACT)


@functools.cache  # a program belongs to its function
def penalised(estimator, beta):
    def surrogate(params, sample):
        logprobs = jax.nn.log_softmax(params["x"] + POLICY)
        kl = losses.kl_penalty(logprobs, REFERENCE, sample["s"], estimator)
        weighted = losses.policy_gradient(logprobs, sample["s"])
        return Surrogate(weighted, beta * kl if beta else None)

    return surrogate


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_penalty_adds_the_gradient_of_the_kl_times_its_coefficient(estimator):
    """k1 gave 0 and k3 .2 (huggingface/trl#4967, #6503, NVIDIA-NeMo/RL#2506), or any
    coefficient nothing (NovaSky-AI/SkyRL#1353)."""
    logprob_gradients = np.eye(2) - [0.7, 0.3]
    scores = [-0.7 * logprob_gradients[0], -0.3 * logprob_gradients[1]]
    without = 0.5 * scores[0] - 0.5 * scores[1]
    for beta in (0.0, 1.0, 0.25):
        expected = without + beta * np.array([0.177933, -0.177933])
        for gradient, _ in every_way(
            {"a": [1, 0]}, TOKENS, params=2, surrogate=penalised(estimator, beta)
        ):
            np.testing.assert_allclose(gradient, expected, atol=EXACT)


@pytest.mark.parametrize("kind", [sums.PlainSums, sums.ExactSums])
@pytest.mark.parametrize("value", [0.01, 1.0])
def test_a_thousand_small_gradients_of_bfloat16_parameters(kind, value):
    """A sum in bfloat16 stops at 4 and at 256 (areal-project/AReaL#1634,
    mlnomadpy/flaxchat#6)."""
    params = {"x": jnp.zeros((), jnp.bfloat16)}
    total = kind([params], params)
    gradient = {"x": jnp.float32(value)}
    for _ in range(1000):
        total.direct(0, gradient)
    found, _ = total.finish(1.0)
    assert found["x"].dtype == jnp.float32
    assert float(found["x"]) == pytest.approx(1000 * value, abs=1e-3)
