"""An independent reference of a step: sees the whole batch at once, float64 numpy.

The toy model has a closed-form gradient in two parameters, w[3] and b[]:

    weighted = <w, s> + b * t + q/2 * <w, w>      additive = <w, e> - e_0 * b

so a sample is the numbers (s, t, q, e), and nothing here differentiates anything. It
shares no code with the package: advantages are written out once more.
"""

import dataclasses
import random
from typing import Any

import jax.numpy as jnp
import numpy as np

from thundersync_jax import Max, Surrogate

W = np.array([0.5, -1.25, 2.0])
B = 0.75
FLOAT32_SUMS = 1e-5  # a few hundred float32 roundings, relative to the L2 norm


def params():
    """The parameters at which every step of the tests is taken."""
    return {"w": jnp.asarray(W, jnp.float32), "b": jnp.float32(B)}


def weighted_only(params, sample):
    """The toy surrogate without an additive part or metrics."""
    w, b = params["w"], params["b"]
    quadratic = 0.5 * sample["q"] * jnp.sum(w * w)
    return Surrogate(jnp.sum(w * sample["s"]) + b * sample["t"] + quadratic)


def both_parts(params, sample):
    """With an additive part and one metric of each kind."""
    additive = jnp.sum(params["w"] * sample["e"]) - sample["e"][0] * params["b"]
    metrics = {"t": sample["t"], "largest_t": Max(sample["t"])}
    return weighted_only(params, sample)._replace(additive=additive, metrics=metrics)


def additive_only(params, sample):
    """Without a weighted part: nothing that a reward could change."""
    return both_parts(params, sample)._replace(weighted=None)


@dataclasses.dataclass
class Member:
    """One trajectory: its samples, and the reward or failure it ends with."""

    samples: list[dict[str, np.ndarray]]
    tokens: list[int]
    reward: float
    failed: bool = False


@dataclasses.dataclass
class Reference:
    """What the step must come to."""

    gradient: dict[str, np.ndarray]
    loss: float
    kept: dict[Any, dict[int, float]]  # advantages by group and member
    tokens: int
    denominator: float
    metrics: dict[str, float]


def advantages(rewards: list[float], estimator: str) -> list[float]:
    """GRPO (population or sample deviation), mean only, and leave one out."""
    count = len(rewards)
    exact = [np.longdouble(r) for r in rewards]
    mean = sum(exact) / count
    if estimator == "mean_only":
        return [float(r - mean) for r in exact]
    if estimator == "leave_one_out":
        pairs = [(r, (sum(exact) - r) / max(count - 1, 1)) for r in exact]
        return [float(r - o) if count > 1 else 0.0 for r, o in pairs]
    ddof = int(estimator[-1])
    if count <= ddof or min(exact) == max(exact):
        return [0.0] * count
    std = (sum((r - mean) ** 2 for r in exact) / (count - ddof)) ** np.longdouble(0.5)
    return [float((r - mean) / (std + np.longdouble(1e-6))) for r in exact]


def whole_batch(
    groups: dict[Any, list[Member]],
    estimator: str | None,
    denominator: str | float,
    partial: str,
    parts: str,
) -> Reference:
    """The step by its definition, computed directly.

    Args:
      groups: By name.
      estimator: "mean_std_0", "mean_std_1", "mean_only", "leave_one_out" or None.
      denominator: As the stream takes it.
      partial: "drop" or "keep".
      parts: Which surrogate: "weighted", "both" or "additive".
    """
    kept: dict[Any, dict[int, float]] = {}
    grads = {"w": np.zeros(3), "b": np.zeros(())}
    loss, tokens, ts = 0.0, 0, []
    for name, members in groups.items():
        alive = {i: m for i, m in enumerate(members) if not m.failed}
        if not alive or (partial == "drop" and len(alive) < len(members)):
            continue
        found = [0.0] * len(alive)
        if estimator is not None:
            found = advantages([m.reward for m in alive.values()], estimator)
        kept[name] = dict(zip(alive, found, strict=True))
        for index, member in alive.items():
            tokens += sum(member.tokens)
            for x in member.samples:
                s, t, q, e = (np.asarray(x[k], np.float64) for k in "stqe")
                ts.append(float(t))
                if parts != "additive":
                    a = kept[name][index]
                    grads["w"] += a * (s + q * W)
                    grads["b"] += a * t
                    loss += a * (W @ s + B * t + q / 2 * (W @ W))
                if parts != "weighted":
                    grads["w"] += e
                    grads["b"] -= e[0]
                    loss += W @ e - e[0] * B
    count = {
        "none": 1,
        "groups": len(kept),
        "trajectories": sum(map(len, kept.values())),
        "tokens": tokens,
    }
    z = (count[denominator] if isinstance(denominator, str) else denominator) or 1
    return Reference(
        gradient={k: g / z for k, g in grads.items()},
        loss=loss / z,
        kept=kept,
        tokens=tokens,
        denominator=float(z),
        metrics={"t": sum(ts), "largest_t": max(ts, default=-np.inf)},
    )


def member(rng: random.Random, reward: float, samples: int = 1) -> Member:
    """A member with random samples."""
    drawn = [_sample(rng) for _ in range(samples)]
    return Member(drawn, [rng.randint(0, 9) for _ in drawn], float(reward))


def random_groups(rng: random.Random, fail_share: float) -> dict[Any, list[Member]]:
    """Groups of unequal size, some uniform, members of no, one or several samples."""
    groups = {}
    for g in range(rng.randint(1, 6)):
        kind = rng.choice(["binary", "real", "uniform", "large", "negative"])
        members = []
        for _ in range(rng.randint(1, 5)):
            reward = {
                "binary": float(rng.random() < 0.5),
                "real": rng.gauss(0, 1),
                "uniform": 0.7,
                "large": 1e4 + rng.randint(0, 3),
                "negative": -rng.random(),
            }[kind]
            drawn = member(rng, reward, samples=rng.choice([0, 1, 1, 1, 2, 3]))
            failed = rng.random() < fail_share
            members.append(dataclasses.replace(drawn, failed=failed))
        groups[rng.choice([g, f"g{g}", ("group", g)])] = members
    return groups


def story(
    groups: dict[Any, list[Member]], rng: random.Random, rewards: bool = True
) -> list[tuple]:
    """A random interleaving of everything that happens to all members.

    Returns:
      Tuples ("sample", group, member, index), ("complete", group, member, index),
      ("reward", group, member), ("fail", group, member). The index of "complete" is
      that of a last sample that comes with it, or None.
    """
    lanes = []
    for name, members in groups.items():
        for index, member in enumerate(members):
            count = len(member.samples)
            together = count > 0 and rng.random() < 0.7
            lane = [("sample", name, index, i) for i in range(count - together)]
            lane.append(("complete", name, index, count - 1 if together else None))
            if rewards:
                lane.insert(rng.randint(0, len(lane)), ("reward", name, index))
            if member.failed:  # anywhere before it would be settled
                lane[rng.randint(0, len(lane) - 1) :] = [("fail", name, index)]
            lanes.append(lane)
    events = []
    while lanes:
        lane = rng.choice(lanes)
        events.append(lane.pop(0))
        lanes = [lane for lane in lanes if lane]
    return events


def tell(stream, groups: dict[Any, list[Member]], events: list[tuple]) -> None:
    """Tells a stream a story."""
    for name, members in groups.items():
        stream.open_group(name, len(members))
    for kind, name, index, *rest in events:
        member = groups[name][index]
        if kind == "sample":
            (i,) = rest
            stream.sample(name, index, member.samples[i], tokens=member.tokens[i])
        elif kind == "complete":
            i = rest[0]
            last = () if i is None else (member.samples[i],)
            tokens = None if i is None else member.tokens[i]
            stream.complete(name, index, *last, tokens=tokens)
        elif kind == "reward":
            stream.reward(name, index, member.reward)
        else:
            stream.fail(name, index, reason="told so")


def distance(gradient, reference: dict[str, np.ndarray]) -> float:
    """L2 norm of the difference over the tree, relative to the reference's or to 1."""
    flat = [
        np.concatenate([np.ravel(t[k]) for k in "wb"]) for t in (gradient, reference)
    ]
    found, expected = (np.asarray(x, np.float64) for x in flat)
    return float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), 1.0))


def _sample(rng: random.Random) -> dict[str, np.ndarray]:
    draw = lambda *shape: np.array(  # noqa: E731
        [rng.gauss(0, 1) for _ in range(int(np.prod(shape)))], np.float32
    ).reshape(shape)
    return {"s": draw(3), "t": draw(), "q": draw(), "e": draw(3)}
