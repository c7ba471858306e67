"""Steps to tell a stream: members of groups, and the order in which things happen."""

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

ORDERS = ("in turn", "side by side", "shuffled")


@dataclasses.dataclass
class Member:
    """One trajectory: its samples, and the reward or failure it ends with."""

    samples: list[np.ndarray]  # float32[8], what the toy surrogates see
    tokens: list[int]
    reward: float
    failed: bool = False
    raw: float | None = None  # the verdict where `reward` was shaped

    @property
    def verdict(self) -> float:
        """What a filter looks at."""
        return self.reward if self.raw is None else self.raw


def member(rng: random.Random, reward: float, samples: int = 1) -> Member:
    """A member with random samples."""
    drawn = [
        np.array([rng.gauss(0, 1) for _ in range(8)], np.float32)
        for _ in range(samples)
    ]
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
    groups: dict[Any, list[Member]],
    rng: random.Random,
    rewards: bool = True,
    order: str = "shuffled",
) -> list[tuple]:
    """Everything that happens to all members, in some order.

    Args:
      groups: By name.
      rng: Draws what the order leaves open.
      rewards: Whether members get any.
      order: One of `ORDERS`: at random, member after member, or the first members of
        all groups before any second one, so that every group misses one to the end.

    Returns:
      Tuples ("sample", group, member, index), ("complete", group, member, index),
      ("reward", group, member), ("fail", group, member). The index of "complete" is
      that of a last sample that comes with it, or None.
    """
    lanes = _lanes(groups, rng, rewards)
    if order != "shuffled":
        if order == "side by side":
            lanes.sort(key=lambda lane: lane[0][2])
        return [event for lane in lanes for event in lane]
    events = []
    while lanes:
        lane = rng.choice(lanes)
        events.append(lane.pop(0))
        lanes = [lane for lane in lanes if lane]
    return events


def tell(
    stream,
    groups: dict[Any, list[Member]],
    events: list[tuple],
    baselines: Mapping[Any, float] | None = None,
) -> None:
    """Tells a stream a story."""
    for name, members in groups.items():
        extra = {"baseline": baselines[name]} if name in (baselines or {}) else {}
        stream.open_group(name, len(members), **extra)
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
            shaped = {} if member.raw is None else {"raw": member.raw}
            stream.reward(name, index, member.reward, **shaped)
        else:
            stream.fail(name, index, reason="told so")


def _lanes(groups, rng, rewards):
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
    return lanes
