"""Turn by turn: the update of whole trajectories, in another order of work."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax import objective
from thundersync_jax.config import LossConfig, ModelConfig
from thundersync_jax.models import transformer
from thundersync_jax.stream import GradientStream
from thundersync_jax.turn_stream import TurnStream
from thundersync_jax.types import (
    StopReason,
    TeacherScores,
    Trajectory,
    TrajectoryKey,
)

MODEL = ModelConfig(
    vocab_size=16,
    layers=2,
    width=16,
    mlp_width=24,
    heads=4,
    kv_heads=2,
    head_dim=4,
    rope_theta=100.0,
    qk_norm=True,
    attention_bias=True,
    dtype="float64",
    logprob_chunk_tokens=5,
)
LOSS = LossConfig(advantage="none", distill="sampled_reverse_kl")
TEMPERATURE, SLOTS = 0.7, 40
# Rounding of float64 sums of some hundred terms.
EXACT = 1e-12


@pytest.fixture(scope="module", autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def params(wide):
    return transformer.init(MODEL, jax.random.key(3))


def trajectory(group, member, pieces, prompt, loss=LOSS):
    """One with so many (action, observation) tokens per turn."""
    rng = np.random.default_rng((group, member))
    shared = np.random.default_rng(group).integers(0, 16, prompt)
    lengths = [n for pair in pieces for n in pair]
    ids = np.concatenate([shared, rng.integers(0, 16, sum(lengths))]).astype(np.int32)
    mask = np.repeat([False] + [True, False] * len(pieces), [prompt, *lengths])
    known = mask.copy()
    kind = {"sampled_reverse_kl": 1}.get(loss.distill, loss.distill_top_k or 16)
    logits = rng.normal(size=(len(ids), 16))
    table = np.asarray(jax.nn.log_softmax(logits))
    teacher_ids = None
    if kind == 1:
        table = np.take_along_axis(table, ids[:, None], axis=1)
    elif kind < 16:
        teacher_ids = np.argsort(-table, axis=1)[:, :kind].astype(np.int32)
        table = np.take_along_axis(table, teacher_ids, axis=1)
    return Trajectory(
        key=TrajectoryKey(1, group, member),
        ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-2.0), np.float32(0)),
        turns=len(pieces),
        stop_reason=StopReason.FINISHED,
        policy_version=0,
        teacher=TeacherScores(
            np.where(known[:, None], table, 0).astype(np.float32), teacher_ids, known
        ),
    )


SHAPES = [
    [[(3, 4), (2, 5), (4, 0)], [(2, 3), (5, 2)]],
    [[(6, 0)], [(1, 1), (1, 6), (2, 2), (3, 1)]],
]


def step(loss=LOSS, prompt=5):
    return [
        trajectory(g, m, pieces, prompt, loss)
        for g, members in enumerate(SHAPES)
        for m, pieces in enumerate(members)
    ]


def turns(one, start=0):
    """(start, end) of every turn: the observation before it, and its action."""
    mask = one.loss_mask
    ends = [
        t + 1 for t in range(len(mask)) if mask[t] and not mask[t + 1 : t + 2].any()
    ]
    return list(zip([start, *ends[:-1]], ends, strict=True))


def whole(params, trajectories, loss=LOSS, release="batch", **rest):
    surrogate = objective.policy_surrogate(MODEL, TEMPERATURE, loss)
    stream = GradientStream(
        surrogate,
        params,
        estimator=objective.estimator(loss),
        denominator=objective.denominator(loss),
        release=release,
        **rest,
    )
    for group in range(2):
        stream.open_group(group, 2)
    for one in trajectories:
        sample = objective.sample(one, loss, (SLOTS,))
        tokens = one.action_tokens
        stream.complete(one.key.group, one.key.member, sample, tokens=tokens)
    return stream.finish()


def by_turns(
    params, trajectories, segments, loss=LOSS, prompt=0, lengths=(12, 40), **rest
):
    """The same turn by turn, the trajectories' turns interleaved."""
    stream = TurnStream(
        segments, params, denominator=objective.denominator(loss), **rest
    )
    for group in range(2):
        shared = None
        if prompt:
            first = trajectories[2 * group]
            shared = objective.segment_sample(first, loss, lengths, 0, prompt)
        stream.open_group(group, 2, prompt=shared)
    waiting = {one.key: turns(one, prompt) for one in trajectories}
    rng = np.random.default_rng(0)
    while any(waiting.values()):
        one = trajectories[rng.integers(len(trajectories))]
        if not waiting[one.key]:
            continue
        start, end = waiting[one.key].pop(0)
        tree = objective.segment_sample(one, loss, lengths, start, end, False)
        place = one.key.group, one.key.member
        stream.turn(*place, tree, tokens=int(one.loss_mask[start:end].sum()))
        if not waiting[one.key]:
            stream.complete(*place, objective.trajectory_weight(one, loss))
    return stream.finish()


def segments_of(loss=LOSS):
    return objective.policy_segments(MODEL, TEMPERATURE, loss, SLOTS)


def difference(found, expected):
    def norm(tree):
        return jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree)))

    return float(norm(jax.tree.map(jnp.subtract, found, expected)) / norm(expected))


@pytest.mark.parametrize("prompt", [0, 5], ids=["own prompt", "shared prompt"])
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_turn_by_turn_equals_whole_trajectories(params, aggregation, prompt):
    loss = dataclasses.replace(LOSS, aggregation=aggregation)
    expected, of_whole = whole(params, step(), loss)
    found, report = by_turns(params, step(), segments_of(loss), loss, prompt)
    assert difference(found, expected) < EXACT
    assert report.loss == pytest.approx(of_whole.loss, rel=EXACT)
    assert report.tokens == of_whole.tokens
    assert report.metrics["teacher_kl"] == pytest.approx(
        of_whole.metrics["teacher_kl"], rel=EXACT
    )
