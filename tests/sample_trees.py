"""Random trees of samples: streamed, in one batch, and as float64 sums over tokens.

    python tests/sample_trees.py --cases=5000

A member's conversation goes on, is rewritten, branches off an earlier moment, returns
to another branch or begins anew, as compaction and sub-agents do. The recorder is told,
and what it makes goes to streams as a run's trajectories do. The reference knows no
samples: it has every sampled token once, with the tokens that were before it. The
policy is linear in a decaying sum of all tokens before, so that a token's gradient has
a closed form and depends on each of them. `test_samples.py` runs a few hundred cases.
"""

import argparse
import collections
import dataclasses
import functools
import os
import time
import types

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from thundersync_jax.config import LossConfig, RolloutConfig
from thundersync_jax.engines.base import Scored
from thundersync_jax.models.base import FromLogits
from thundersync_jax.rollout.recorder import Recorder
from thundersync_jax.run import feed, objective, samples
from thundersync_jax.stream.gradient_stream import GradientStream
from thundersync_jax.types import StopReason, TrajectoryKey

VOCAB, DECAY, TEMPERATURE, CONSTANT = 5, 0.6, 0.8, 7.0
MOST_TOKENS = 24  # of a context, before the action
BUCKETS = (8, 16, 32)
ESTIMATORS = ("mean_only", "leave_one_out", "fixed_baseline")
AGGREGATIONS = ("sequence_mean", "token_mean", "constant")
# What the loss is made of, without its weights.
KINDS = {
    "rewards": {},
    "credit": {"turn_credit": "environment"},
    "teacher": {"advantage": "none", "distill": "sampled_reverse_kl"},
    "both": {"distill": "sampled_reverse_kl", "distill_coef": 0.5},
}
MOVES = ("goes on", "rewritten", "branches", "returns", "begins anew")
PLAIN = 2e-6  # float32 gradients and sums, relative to the sum of the addends' sizes
EXACT = 2e-6  # float32 gradients; the sums add nothing to that
SEEN = collections.Counter()


@dataclasses.dataclass
class Token:
    """One that was sampled."""

    before: tuple[int, ...]  # all that the policy had seen
    id: int
    teacher: float  # log q
    weight: float = 1.0  # u and v of its turn
    credit: float = 0.0


@dataclasses.dataclass
class Member:
    """A trajectory as recorded, and its tokens as they were sampled."""

    trajectory: object
    tokens: list[Token]


@dataclasses.dataclass
class Case:
    """One step."""

    kind: str
    loss: LossConfig
    shared: bool  # whether groups share their prompts
    prompts: dict[int, np.ndarray]
    groups: dict[int, list[Member]]


def case(seed: int) -> Case:
    """The step of a number."""
    rng = np.random.default_rng(seed)
    kind = str(rng.choice([*KINDS]))
    loss = {"aggregation": str(rng.choice(AGGREGATIONS))}
    if loss["aggregation"] == "constant":
        loss["constant"] = CONSTANT
    if kind != "teacher":
        loss["advantage"] = str(rng.choice(ESTIMATORS))
        if loss["advantage"] == "fixed_baseline":
            loss["baseline"] = oracle.FIXED_BASELINE
    shared = bool(rng.random() < 0.3)
    prompts = {g: ids(rng, 1, 5) for g in range(rng.integers(1, 4))}
    groups = {
        g: [member(rng, g, m, prompt, kind, shared) for m in range(rng.integers(1, 5))]
        for g, prompt in prompts.items()
    }
    return Case(kind, LossConfig(**loss, **KINDS[kind]), shared, prompts, groups)


def ids(rng, least: int, most: int) -> np.ndarray:
    """Some random tokens."""
    return rng.integers(0, VOCAB, rng.integers(least, most + 1))


def member(rng, group, index, prompt, kind, shared) -> Member:
    """Plays a conversation and records it."""
    key = TrajectoryKey(1, group, index)
    recorder = Recorder(key, prompt, 0, samples=None)
    context, told = prompt, [prompt]
    tokens: list[Token] = []
    scores = []
    for turn in range(rng.integers(1, 7)):
        if turn:
            move = str(rng.choice(MOVES))
            SEEN[move] += 1
            kept = len(prompt) if shared else 0
            context = moved(rng, move, told, prompt, kept)
            recorder.context(context)
        action = ids(rng, 1, 4)
        recorder.action(action, np.full(len(action), -1.0), 0)
        u, v = (rng.normal(size=2)) if kind == "credit" else (1.0, 0.0)
        recorder.credit(u, v)
        q = -rng.exponential(1.0, len(action)).astype(np.float32)
        places = recorder.length - len(action) + np.arange(len(action))
        scores.append((recorder.sample, places, q))
        tokens += [
            Token((*context, *action[:i]), token, float(q[i]), *np.float32([u, v]))
            for i, token in enumerate(action)
        ]
        told.append(np.concatenate([context, action]))
    if kind in ("teacher", "both"):
        for i in rng.permutation(len(scores)):
            sample, places, q = scores[i]
            recorder.score(places, Scored(q[:, None], None), sample)
    SEEN["samples"] += recorder.sample + 1
    failed = rng.random() < 0.1
    reason = StopReason.TIMEOUT if failed else StopReason.FINISHED
    reward = None if failed else float(rng.choice([0.0, 1.0, 0.5, rng.normal()]))
    trajectory = recorder.trajectory(reason)
    return Member(dataclasses.replace(trajectory, reward=reward), tokens)


def moved(rng, move, told, prompt, kept) -> np.ndarray:
    """The next context, of which the first `kept` tokens are those of the prompt."""
    said = ids(rng, 0, 3)
    latest, earlier = told[-1], told[rng.integers(len(told))]
    if move == "rewritten":  # a summary in place of what was before
        tail = latest[rng.integers(kept, len(latest) + 1) :]
        found = np.concatenate([prompt, said, tail])
    elif move == "branches":
        found = earlier[: rng.integers(max(kept, 1), len(earlier) + 1)]
        found = np.concatenate([found, said])
    elif move == "begins anew":
        found = np.concatenate([prompt[:kept], ids(rng, 1, 3)])
    else:
        found = np.concatenate([earlier if move == "returns" else latest, said])
    if len(found) <= MOST_TOKENS:
        return found
    return np.concatenate([prompt, found[len(found) - 6 :]])


def logits(params, tokens):
    """Row t has W h_t with h_t = sum_(s <= t) DECAY^(t - s) e(tokens[s])."""
    age = jnp.arange(len(tokens))[:, None] - jnp.arange(len(tokens))[None]
    weight = jnp.where(age >= 0, jnp.float32(DECAY) ** jnp.maximum(age, 0), 0)
    return weight @ jax.nn.one_hot(tokens, VOCAB) @ params["w"].T


MODEL = FromLogits(VOCAB, lambda key: {"w": jnp.zeros((VOCAB, VOCAB))}, logits)
W = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32)


@functools.cache
def surrogate(kind: str, shared: bool):
    """What a run's stream would get; weights and advantages are no part of it."""
    loss = LossConfig(**KINDS[kind])
    if shared:
        return objective.policy_segments(MODEL, TEMPERATURE, loss, BUCKETS[-1])
    return objective.policy_surrogate(MODEL, TEMPERATURE, loss)


def streamed(case: Case, seed: int, partial: str, **settings):
    """Gradient and report of the case's trajectories, told in a random order."""
    rng = np.random.default_rng(seed)
    rollout = RolloutConfig(
        context_tokens=BUCKETS[-1], gradient_buckets=BUCKETS, samples=6
    )
    config = types.SimpleNamespace(
        loss=case.loss, rollout=rollout, share_prompt="group" if case.shared else "no"
    )
    run = types.SimpleNamespace(
        config=config,
        judged=case.loss.advantage != "none",
        group_baseline=lambda step, group: 0.0,
        samples=samples.Samples(config, VOCAB, lambda step, g: case.prompts[g]),
    )
    stream = GradientStream(
        surrogate(case.kind, case.shared),
        {"w": jnp.asarray(W)},
        estimator=objective.estimator(case.loss),
        denominator=objective.denominator(case.loss),
        partial_groups=partial,
        **settings,
    )
    for group, members in case.groups.items():
        feed.open_group(run, stream, 1, group, len(members))
    lanes = []
    for one in (one for members in case.groups.values() for one in members):
        trajectory = one.trajectory
        if trajectory.stop_reason.failed:
            place = trajectory.key[1:3]
            lanes.append([functools.partial(stream.fail, *place, "told so")])
            continue
        told = [
            functools.partial(what, run, stream, trajectory)
            for what in (feed.complete, feed.reward)
        ]
        lanes.append(told[:: rng.choice([-1, 1])])
    while lanes:
        lane = lanes[rng.integers(len(lanes))]
        lane.pop(0)()
        if rng.random() < 0.5:
            stream.drain()
        lanes = [lane for lane in lanes if lane]
    gradient, report = stream.finish()
    return np.asarray(gradient["w"]), report


def reference(case: Case, partial: str):
    """The gradient [V, V], the sum of its addends' sizes and the trained tokens."""
    total, size, counted, members = np.zeros((VOCAB, VOCAB)), 0.0, 0, 0
    for group in case.groups.values():
        kept = [one for one in group if not one.trajectory.stop_reason.failed]
        if not kept or (len(kept) < len(group) and partial == "drop"):
            continue
        advantages = [0.0] * len(kept)
        if case.loss.advantage != "none":
            rewards = [one.trajectory.reward for one in kept]
            advantages = oracle.advantages(rewards, case.loss.advantage)
        members += len(kept)
        for one, advantage in zip(kept, advantages, strict=True):
            counted += len(one.tokens)
            scale = {
                "sequence_mean": 1 / len(one.tokens),
                "token_mean": 1.0,
                "constant": 1 / CONSTANT,
            }[case.loss.aggregation]
            for token in one.tokens:
                logprob, score = of_token(token)
                factor = -(advantage * token.weight + token.credit)
                if case.loss.distill != "none":
                    factor += case.loss.distill_coef * (logprob - token.teacher)
                total += scale * factor * score
                size += np.linalg.norm(scale * score) * max(1.0, abs(factor))
    z = {"token_mean": counted}.get(case.loss.aggregation, members) or 1
    return total / z, size / z, counted


def of_token(token: Token):
    """log pi and its gradient [V, V], in float64."""
    ages = np.arange(len(token.before))[::-1]
    h = np.zeros(VOCAB)
    np.add.at(h, np.array(token.before), DECAY**ages)
    x = W.astype(np.float64) @ h / TEMPERATURE
    p = np.exp(x - x.max())
    p /= p.sum()
    chosen = np.eye(VOCAB)[token.id]
    return float(np.log(p[token.id])), np.outer(chosen - p, h) / TEMPERATURE


def check_recorded(case: Case) -> None:
    """Every sampled token is trained once, behind what it was sampled behind."""
    for one in (one for members in case.groups.values() for one in members):
        trajectory, found = one.trajectory, collections.Counter()
        for start, end in trajectory.samples:
            sequence = trajectory.ids[start:end].tolist()
            for i in np.flatnonzero(trajectory.loss_mask[start:end]):
                found[(*sequence[:i], sequence[i])] += 1
        expected = collections.Counter((*t.before, t.id) for t in one.tokens)
        assert found == expected
        assert trajectory.action_tokens == len(one.tokens)


def check(seed: int) -> None:
    """Streamed, batch and reference agree; in exact sums to the last bit."""
    rng = np.random.default_rng((seed, 1))
    tried, partial = case(seed), str(rng.choice(["drop", "keep"]))
    check_recorded(tried)
    expected, size, tokens = reference(tried, partial)
    rules = ["batch", "group", "trajectory"]
    if tried.loss.advantage == "none":
        rules.remove("group")
    rule, rows = str(rng.choice(rules)), int(rng.integers(1, 4))
    plain = {
        release: streamed(tried, seed, partial, release=release, rows_per_call=rows)
        for release in ("batch", rule)
    }
    exact = [
        streamed(tried, seed + i, partial, release=release, accumulator="exact")
        for i, release in enumerate(("batch", rule))
    ]
    for (gradient, report), bound in [
        *((found, PLAIN) for found in plain.values()),
        *((found, EXACT) for found in exact),
    ]:
        assert np.linalg.norm(gradient - expected) <= bound * size + 1e-12
        assert report.tokens == tokens
    (first, _), (second, report) = exact
    assert first.tobytes() == second.tobytes()
    SEEN[tried.kind] += 1
    SEEN["shared prompt" if tried.shared else "own prompts"] += 1
    SEEN["streamed"] += report.streamed


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    began = time.perf_counter()
    for number in range(args.cases):
        check(args.first + number)
        if (number + 1) % 250 == 0:
            secs = time.perf_counter() - began
            print(f"{number + 1} of {args.cases} cases, {secs:.0f} s", flush=True)
    for name, count in SEEN.items():
        print(f"{name}: {count}")


if __name__ == "__main__":
    main()
