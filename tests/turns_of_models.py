"""Steps of made-up trajectories of a small transformer, by turns, prompts and whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.config import LossConfig, ModelConfig
from thundersync_jax.models import transformer
from thundersync_jax.models.transformer import Transformer
from thundersync_jax.run import objective, samples
from thundersync_jax.stream.gradient_stream import GradientStream
from thundersync_jax.stream.turn_stream import TurnStream
from thundersync_jax.types import StopReason, TeacherScores, Trajectory, TrajectoryKey

VOCAB = 8
MODEL = ModelConfig(
    vocab_size=VOCAB,
    layers=2,
    width=8,
    mlp_width=8,
    heads=2,
    kv_heads=2,
    head_dim=4,
    rope_theta=100.0,
    qk_norm=True,
    attention_bias=True,
    dtype="float64",
    logprob_chunk_tokens=6,
)
OPD = LossConfig(advantage="none", distill="sampled_reverse_kl")
TEMPERATURE, PROMPT, PIECE, SLOTS = 0.7, 4, 10, 22
# (observation, action) tokens of every turn, by group and member; groups have a prompt
# of PROMPT tokens. One starts with a token that is trained, another ends untrained.
SHAPES = [
    [[(0, 3), (2, 3), (0, 4), (2, 0)], [(1, 5)]],
    [[(2, 2), (4, 1), (1, 1), (3, 2)], [(0, 2), (6, 4)]],
]


@functools.cache
def init(model=MODEL, seed=3):
    return transformer.init(model, jax.random.key(seed))


def trajectory(group, member, pieces, loss=OPD):
    rng = np.random.default_rng((group, member))
    prompt = np.random.default_rng(group).integers(0, VOCAB, PROMPT)
    lengths = [n for pair in pieces for n in pair]
    ids = np.concatenate([prompt, rng.integers(0, VOCAB, sum(lengths))])
    mask = np.repeat([False, *[False, True] * len(pieces)], [PROMPT, *lengths])
    logits = rng.normal(size=(len(ids), VOCAB))
    table = logits - np.log(np.sum(np.exp(logits), axis=1, keepdims=True))
    likeliest = None
    if loss.distill == "sampled_reverse_kl":
        table = np.take_along_axis(table, ids[:, None], axis=1)
    elif loss.distill_top_k:
        likeliest = np.argsort(-table, axis=1)[:, : loss.distill_top_k]
        table = np.take_along_axis(table, likeliest, axis=1)
        likeliest = likeliest.astype(np.int32)
    scores = np.where(mask[:, None], table, 0).astype(np.float32)
    return Trajectory(
        key=TrajectoryKey(1, group, member),
        ids=ids.astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-2.0), np.float32(0)),
        turns=len(pieces),
        stop_reason=StopReason.FINISHED,
        policy_version=0,
        teacher=TeacherScores(scores, likeliest, mask.copy()),
    )


def step(loss=OPD, shapes=SHAPES):
    return [
        trajectory(g, m, pieces, loss)
        for g, members in enumerate(shapes)
        for m, pieces in enumerate(members)
    ]


def turns_of(group, member, shared, shapes=SHAPES):
    """(start, end) of every turn."""
    ends = PROMPT + np.cumsum([sum(pair) for pair in shapes[group][member]])
    return list(zip([PROMPT * shared, *ends[:-1]], ends, strict=True))


@functools.cache
def surrogate_of(loss, model=MODEL):
    return objective.policy_surrogate(Transformer(model), TEMPERATURE, loss)


@functools.cache
def segments_of(loss, model=MODEL):
    return objective.policy_segments(Transformer(model), TEMPERATURE, loss, SLOTS)


def prompt_of(group, trajectories, loss):
    first = next(one for one in trajectories if one.key.group == group)
    return samples.segment_sample(first, loss, (PIECE,), 0, PROMPT)


def of_samples(
    params, trajectories, loss=OPD, *, shared=False, rewards=None, **settings
):
    """A `GradientStream` of whole trajectories, or of what follows a shared prompt.

    `compiled` is the loss whose functions are used, where only weights differ.
    """
    compiled = settings.pop("compiled", loss)
    model = settings.pop("model", MODEL)
    function = (segments_of if shared else surrogate_of)(compiled, model)
    stream = GradientStream(
        function,
        params,
        estimator=objective.estimator(loss),
        denominator=objective.denominator(loss),
        **settings,
    )
    for group in sorted({one.key.group for one in trajectories}):
        size = sum(one.key.group == group for one in trajectories)
        prompt = prompt_of(group, trajectories, loss) if shared else None
        stream.open_group(group, size, prompt=prompt)
    for index, one in enumerate(trajectories):
        place = one.key.group, one.key.member
        sample = (
            samples.segment_sample(one, loss, (SLOTS,), PROMPT)
            if shared
            else samples.sample(one, loss, (SLOTS,))
        )
        if stream._estimator is not None:
            stream.reward(*place, rewards[index])
        stream.complete(*place, sample, tokens=one.action_tokens)
    return stream.finish()


def of_turns(params, trajectories, loss=OPD, *, shared=False, **settings):
    """A `TurnStream`, the trajectories' turns interleaved."""
    compiled = settings.pop("compiled", loss)
    model, shapes = settings.pop("model", MODEL), settings.pop("shapes", SHAPES)
    stream = TurnStream(
        segments_of(compiled, model),
        params,
        denominator=objective.denominator(loss),
        **settings,
    )
    for group in sorted({one.key.group for one in trajectories}):
        size = sum(one.key.group == group for one in trajectories)
        prompt = prompt_of(group, trajectories, loss) if shared else None
        stream.open_group(group, size, prompt=prompt)
    waiting = {one.key: turns_of(*one.key[1:3], shared, shapes) for one in trajectories}
    rng = np.random.default_rng(0)
    while live := [one for one in trajectories if waiting[one.key]]:
        one = live[rng.integers(len(live))]
        start, end = waiting[one.key].pop(0)
        place = one.key.group, one.key.member
        sample = samples.segment_sample(one, loss, (PIECE,), start, end, False)
        stream.turn(*place, sample, tokens=int(one.loss_mask[start:end].sum()))
        if not waiting[one.key]:
            stream.complete(*place, samples.trajectory_weight(one, loss))
    return stream.finish()


def difference(found, expected):
    """L2 over the tree, relative."""

    def norm(tree):
        leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(tree)]
        return np.sqrt(sum(np.sum(x * x) for x in leaves))

    off = jax.tree.map(
        lambda x, y: np.asarray(x, np.float64) - np.asarray(y, np.float64),
        found,
        expected,
    )
    return float(norm(off) / norm(expected))


def float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
