"""Toy streams: scores are given numbers, events come in given orders."""

import itertools
import random

import jax.numpy as jnp
import numpy as np

from thundersync_jax import GradientStream, Surrogate, advantages
from thundersync_jax.stream.schedule import RELEASES

EXACT = 1e-6  # absolute, in float32
MEAN = advantages.mean_only()
FAIL = None  # in place of a reward
# What sums are, and how many samples may share a call (exact ones never do).
WAYS = (("plain", 1), ("plain", 4), ("exact", 1))


def weighted(params, sample):
    return Surrogate(jnp.sum(params["x"] * sample["s"]))


def additive(params, sample):
    return Surrogate(None, additive=jnp.sum(params["x"] * sample["s"]))


def toy(surrogate=weighted, params=None, **settings):
    settings = {"estimator": MEAN} | settings
    params = {"x": jnp.zeros((), jnp.float32)} if params is None else params
    return GradientStream(surrogate, params, **settings)


def feed(stream, groups):
    """Members arrive one after another, as (reward, score)."""
    for name, members in groups.items():
        stream.open_group(name, len(members))
    for name, members in groups.items():
        for index, (reward, score) in enumerate(members):
            stream.complete(name, index, {"s": score}, tokens=1)
            stream.reward(name, index, reward)


def orders(groups, count=4, seed=0):
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
    raw=None,
    surrogate=weighted,
    params=(),
    reward_first=False,
    **settings,
):
    """Tells a stream of groups of rewards (None fails) and scores, in an order.

    `tokens` and `raw`, the rewards before penalties, are laid out like the rewards.
    """
    stream = GradientStream(
        surrogate,
        {"x": jnp.zeros(params, jnp.float32)},
        **{"estimator": MEAN, "denominator": "none"} | settings,
    )
    for group, rewards in groups.items():
        stream.open_group(group, len(rewards))
    for group, member in order:
        count = 1 if tokens is None else tokens[group][member]
        reward = groups[group][member]
        verdict = None if raw is None else raw[group][member]
        judged = reward is not None and settings.get("estimator", MEAN) is not None
        if judged and reward_first:
            stream.reward(group, member, reward, verdict)
        sample = {"s": np.asarray(scores[group][member], np.float32)}
        if reward is FAIL:
            stream.sample(group, member, sample, tokens=count)
            stream.fail(group, member, reason="invalid_reward")
            continue
        stream.complete(group, member, sample, tokens=count)
        if judged and not reward_first:
            stream.reward(group, member, reward, verdict)
    gradient, report = stream.finish()
    return np.asarray(gradient["x"]), report


def every_way(groups, scores, ways=WAYS, **settings):
    """The gradients and reports of all rules, arrival orders and kinds of sums.

    Exact sums have the same bits each time.
    """
    exact = set()
    for release in RELEASES:
        for reward_first, order in zip(
            itertools.cycle([False, True]), orders(groups), strict=False
        ):
            for accumulator, rows in ways:
                gradient, report = step(
                    groups,
                    scores,
                    order,
                    release=release,
                    reward_first=reward_first,
                    rows_per_call=rows,
                    accumulator=accumulator,
                    **settings,
                )
                if accumulator == "exact":
                    exact.add(gradient.tobytes())
                yield gradient, report
    assert len(exact) <= 1


def eye(groups):
    """Scores that make the gradient the list of advantages."""
    size = sum(map(len, groups.values()))
    rows = iter(np.eye(size))
    return {g: [next(rows) for _ in rewards] for g, rewards in groups.items()}, (size,)
