"""An independent reference of a step: sees the whole batch at once, float64 numpy.

The toy model has a closed-form gradient in two parameters, w[3] and b[]:

    weighted = <w, s> + b * t + q/2 * <w, w>      additive = <w, e> - e_0 * b

so a sample is eight numbers, s[3], t, q and e[3], and nothing here differentiates
anything. It shares no code with the package: advantages are written out once more, with
fractions, so that rewards of any size lose no digits.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import stories

from thundersync_jax import Max, Surrogate

W = np.array([0.5, -1.25, 2.0])
B = 0.75
FLOAT32_SUMS = 1e-5  # a few hundred float32 roundings, relative to the L2 norm
UNIT = 2.0**-24  # of one float32 rounding
EXACT_ADDEND = 2.0**-38  # what exact sums lose, relative to a row's largest addend
SCOPES = {"batch_mean_std_0": "batch", "fixed_baseline": "member", "tracked": "member"}
FIXED_BASELINE = 0.25


def params():
    """The parameters at which every step of the tests is taken."""
    return {"w": jnp.asarray(W, jnp.float32), "b": jnp.float32(B)}


def parts_of(sample):
    """s[..., 3], t[...], q[...] and e[..., 3] of samples [..., 8]."""
    return sample[..., :3], sample[..., 3], sample[..., 4], sample[..., 5:]


def weighted_only(params, sample):
    """The toy surrogate without an additive part or metrics."""
    w, b = params["w"], params["b"]
    s, t, q, _ = parts_of(sample)
    return Surrogate(jnp.sum(w * s) + b * t + 0.5 * q * jnp.sum(w * w))


def both_parts(params, sample):
    """With an additive part and one metric of each kind."""
    _, t, _, e = parts_of(sample)
    additive = jnp.sum(params["w"] * e) - e[0] * params["b"]
    metrics = {"t": t, "largest_t": Max(t)}
    return weighted_only(params, sample)._replace(additive=additive, metrics=metrics)


def additive_only(params, sample):
    """Without a weighted part: nothing that a reward could change."""
    return both_parts(params, sample)._replace(weighted=None)


@dataclasses.dataclass
class Count:
    """Who counts in a step, and with which advantage.

    Attributes:
      kept: Advantages by group and member.
      largest: The largest |A| among those a member's advantage is computed with.
      dropped: Groups that failed members took along.
      filtered: Groups whose verdicts are all equal, where those are filtered.
      uniform: Kept groups whose rewards are all equal.
      tokens: Of kept members.
      denominator: Z.
    """

    kept: dict[Any, dict[int, float]]
    largest: dict[tuple[Any, int], float]
    dropped: set[Any]
    filtered: set[Any]
    uniform: set[Any]
    tokens: int
    denominator: float


@dataclasses.dataclass
class Reference(Count):
    """What the step must come to.

    Attributes:
      gradient: By leaf.
      loss: Of which it is the gradient.
      metrics: Over kept members.
      addends: Sizes of what is summed, by leaf and "loss": |A_i| |s_i| + |e_i|, over Z.
      spread: The same with the largest |A| of the scope in place of every |A_i|: sums
        of score gradients that are weighed only later round on this scale.
      samples: How many were summed.
    """

    gradient: dict[str, np.ndarray]
    loss: float
    metrics: dict[str, float]
    addends: dict[str, np.ndarray]
    spread: dict[str, np.ndarray]
    samples: int


def advantages(rewards: Iterable[float], estimator: str) -> list[float]:
    """Advantages of the members of one scope, by the estimator's equation."""
    exact = [Fraction(float(r)) for r in rewards]
    count = len(exact)
    kind, _, option = estimator.removeprefix("batch_").rpartition("_")
    if estimator == "tracked":
        return [float(r) for r in exact]
    if estimator == "fixed_baseline":
        return [float(r - Fraction(FIXED_BASELINE)) for r in exact]
    if count == 1:
        return [0.0]
    if kind == "pass_at":
        return _best_of(exact, min(int(option), count))
    mean = sum(exact) / count
    if estimator == "mean_only":
        return [float(r - mean) for r in exact]
    if estimator == "leave_one_out":
        return [float(r - (count * mean - r) / (count - 1)) for r in exact]
    if estimator == "leave_one_out_std":
        by_reward = {r: _normalised(r, _without(exact, r), 1, 1e-6) for r in set(exact)}
    elif kind == "mean_std":
        by_reward = _standardised(exact, int(option), 1e-6)
    else:
        assert estimator == "mean_std_no_eps", estimator
        by_reward = _standardised(exact, 0, 0.0)
    return [by_reward[r] for r in exact]


def count(
    groups: Mapping[Any, list[stories.Member]],
    estimator: str | None,
    denominator: str | float,
    partial: str,
    uniform: str = "keep",
    baselines: Mapping[Any, float] | None = None,
) -> Count:
    """Who counts, by the definitions.

    Args:
      groups: By name.
      estimator: A name that `advantages` knows, or None.
      denominator: As the stream takes it.
      partial: "drop" or "keep".
      uniform: "keep" or "drop".
      baselines: Subtracted from the rewards of a group, 0 where none is given.
    """
    alive = {
        name: {i: m for i, m in enumerate(members) if not m.failed}
        for name, members in groups.items()
    }
    dropped = {
        name
        for name, members in groups.items()
        if not alive[name] or (partial == "drop" and len(alive[name]) < len(members))
    }
    filtered = {
        name
        for name in groups.keys() - dropped
        if uniform == "drop" and len({m.verdict for m in alive[name].values()}) == 1
    }
    alive = {n: m for n, m in alive.items() if n not in dropped | filtered}
    rewards = {
        (name, index): member.reward - (baselines or {}).get(name, 0.0)
        for name, members in alive.items()
        for index, member in members.items()
    }
    found, largest = _by_scope(rewards, estimator)
    tokens = sum(sum(m.tokens) for members in alive.values() for m in members.values())
    z = {"none": 1, "groups": len(alive), "trajectories": len(found), "tokens": tokens}
    return Count(
        kept={name: {i: found[name, i] for i in alive[name]} for name in alive},
        largest=largest,
        dropped=dropped,
        filtered=filtered,
        uniform={
            name
            for name in alive
            if estimator and len({rewards[name, i] for i in alive[name]}) == 1
        },
        tokens=tokens,
        denominator=float(z.get(denominator, denominator) or 1),
    )


def whole_batch(
    groups: Mapping[Any, list[stories.Member]],
    estimator: str | None,
    denominator: str | float,
    partial: str,
    parts: str,
    uniform: str = "keep",
    baselines: Mapping[Any, float] | None = None,
) -> Reference:
    """The step of the toy model by its definition, computed directly.

    Args:
      groups, estimator, denominator, partial, uniform, baselines: As for `count`.
      parts: Which surrogate: "weighted", "both" or "additive".
    """
    counted = count(groups, estimator, denominator, partial, uniform, baselines)
    names = [(name, i) for name, kept in counted.kept.items() for i in kept]
    members = [groups[name][i] for name, i in names]
    found = [counted.kept[name][i] for name, i in names]
    largest = [counted.largest[name] for name in names]
    z = counted.denominator
    gradient, addends, spread = (
        {"w": row[:3] / z, "b": row[3] / z, "loss": row[4] / z}
        for row in _sums(members, found, largest, parts)
    )
    loss = float(gradient.pop("loss"))
    ts = [float(parts_of(x)[1]) for m in members for x in m.samples]
    return Reference(
        **vars(counted),
        gradient=gradient,
        loss=loss,
        metrics={"t": sum(ts), "largest_t": max(ts, default=-np.inf)},
        addends=addends,
        spread=spread,
        samples=len(ts),
    )


def streaming(
    groups: Mapping[Any, list[stories.Member]],
    events: list[tuple],
    reference: Reference,
    baselines: Mapping[Any, float],
    batch: bool,
    most: float,
    lossy: bool,
) -> tuple[int, int]:
    """What an idle learner with room for every group makes of a story.

    Args:
      groups: By name.
      events: As `stories.story` returns them.
      reference: The step.
      baselines: Of the groups.
      batch: Whether all groups share their sums.
      most: Of how many distinct rewards sums may be begun.
      lossy: Whether a group may still be lost before it is complete.

    Returns:
      Samples that count and whose gradient starts before all rewards are in, and the
      members that wait because their reward is one too many.
    """
    heard, settled = collections.Counter(), []
    for kind, name, index, *_ in events:
        heard[name, index] += {"sample": 0, "fail": 2}.get(kind, 1)
        if kind != "sample" and heard[name, index] >= 2:
            settled.append((name, index))
    by_group: dict[Any, list[tuple]] = {}
    for name, index in settled:
        by_group.setdefault(name, []).append((name, index))
    units = [members[:-1] for members in by_group.values()]
    if batch:  # complete at the end; joined with whole groups where these may be lost
        last = sorted(by_group.values(), key=lambda members: settled.index(members[-1]))
        units = [[x for members in last for x in sorted(members)] if lossy else settled]
    streamed = waits = 0
    for unit in units:
        begun: set[float] = set()
        for name, index in unit:
            member = groups[name][index]
            if index not in reference.kept.get(name, ()) or not member.samples:
                continue
            reward = member.reward - baselines.get(name, 0.0)
            if reward in begun or len(begun) < most:
                begun.add(reward)
                streamed += len(member.samples)
            else:
                waits += 1
    return streamed, waits


def tolerances(reference: Reference, exact: bool) -> dict[str, np.ndarray]:
    """How far float32 sums may be from the reference, by leaf and "loss".

    Plain sums may round once per addend, at the scale of what they held. With exact
    sums it is 8 roundings, however many addends: 3 in a gradient, then the sum, its
    coefficient, their product, the batch sum, and the division.
    """
    found = {}
    for name, size in reference.addends.items():
        if exact:
            lost = EXACT_ADDEND * reference.samples * np.max(size, initial=0.0)
            found[name] = 8 * UNIT * size + lost
        else:
            found[name] = (16 + 4 * reference.samples) * UNIT * reference.spread[name]
    return found


def distance(gradient, reference: dict[str, np.ndarray]) -> float:
    """L2 norm of the difference over the tree, relative to the reference's or to 1."""
    flat = [
        np.concatenate([np.ravel(t[k]) for k in "wb"]) for t in (gradient, reference)
    ]
    found, expected = (np.asarray(x, np.float64) for x in flat)
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1.0))


def _by_scope(rewards, estimator):
    """The advantage of every (group, member), and the largest |A| of its scope."""
    scopes = {}
    kind = SCOPES.get(estimator, "group")
    for group, index in rewards:
        scope = {"batch": None, "group": group, "member": (group, index)}[kind]
        scopes.setdefault(scope, []).append((group, index))
    found, largest = {}, {}
    for names in scopes.values():
        values = [0.0] * len(names)
        if estimator is not None:
            values = advantages([rewards[name] for name in names], estimator)
        found |= zip(names, values, strict=True)
        largest |= dict.fromkeys(names, max(map(abs, values)))
    return {n: found[n] for n in rewards}, {n: largest[n] for n in rewards}


def _sums(members, found, largest, parts):
    """Gradients and loss, float64[5]: the sum, the sizes summed, those by `largest`."""
    samples = [x for member in members for x in member.samples]
    counts = [len(member.samples) for member in members]
    a, top = (np.repeat(np.array(values), counts) for values in (found, largest))
    s, t, q, e = parts_of(np.array(samples, np.float64).reshape(len(samples), 8))
    t, q, first = t[:, None], q[:, None], e[:, :1]
    terms = np.hstack([s + q * W, t, s @ W[:, None] + B * t + q * (W @ W) / 2])
    sizes = np.hstack([abs(s) + abs(q * W), abs(t), abs(s) @ abs(W[:, None])])
    sizes[:, 4:] += B * abs(t) + abs(q) * (W @ W) / 2
    total, addends, spread = a @ terms, abs(a) @ sizes, top @ sizes
    if parts == "additive":
        total, addends, spread = np.zeros(5), np.zeros(5), np.zeros(5)
    if parts != "weighted":
        size = np.hstack(
            [abs(e), abs(first), abs(e) @ abs(W[:, None]) + B * abs(first)]
        )
        total = total + np.sum(np.hstack([e, -first, e @ W[:, None] - first * B]), 0)
        addends, spread = addends + size.sum(0), spread + size.sum(0)
    return total, addends, spread


def _standardised(rewards, ddof, eps):
    return {r: _normalised(r, rewards, ddof, eps) for r in set(rewards)}


def _normalised(reward, others, ddof, eps):
    """(reward - mean) / (std + eps) with the moments of `others`; 0 without spread."""
    if len(others) <= ddof or len(set(others)) == 1:
        return 0.0
    mean = sum(others) / len(others)
    variance = sum((r - mean) ** 2 for r in others) / (len(others) - ddof)
    return float(reward - mean) / (math.sqrt(variance) + eps)


def _without(rewards, reward):
    rest = list(rewards)
    rest.remove(reward)
    return rest


def _best_of(rewards, k):
    """N / C(N, k) * sum of max(I) - max(I without i) over the sets I of k with i."""
    total = [Fraction(0)] * len(rewards)
    for chosen in itertools.combinations(range(len(rewards)), k):
        best = max(chosen, key=lambda i: rewards[i])
        second = max(rewards[i] for i in chosen if i != best)
        total[best] += rewards[best] - second  # nobody else is missed
    share = Fraction(len(rewards), math.comb(len(rewards), k))
    return [float(share * x) for x in total]
