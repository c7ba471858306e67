"""Release rules side by side: the same trajectories, and how far gradients differ.

Trajectories are replayed into fresh streams, so that only the release rule, the order
of events and the packing of calls differ. Comparisons in which every rule decodes for
itself are live (module `live`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import optax

from thundersync_jax.run import feed
from thundersync_jax.run.run import Run
from thundersync_jax.stream.ledger import Report
from thundersync_jax.types import Trajectory

Tree = Any


class Event(NamedTuple):
    """What comes to a stream: "turn", "complete", "reward" or "fail", and of what."""

    kind: str
    trajectory: Trajectory
    start: int = 0  # of a turn
    end: int = 0


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way in which the trajectories of a step may come to a stream.

    Order 0 is the rule's own: under batch release that of the members, else one in
    which every group's last reward is late. The others are random; every second of
    them comes in one rush, so that work piles up.
    """

    name: str  # of the release rule or the order
    release: str
    order: int = 0

    @property
    def rush(self) -> bool:
        """Whether the stream gets no time between events."""
        return self.order > 0 and self.order % 2 == 0

    def events(
        self, trajectories: Sequence[Trajectory], seed: int, step: int, window: int
    ) -> list[Event]:
        """The order in which a step's trajectories arrive, another one in each step.

        `window` is the number of groups that may hold sums at a time.
        """
        if self.order:
            rng = np.random.default_rng((seed, step, self.order))
            return interleaved(trajectories, rng)
        if self.release == "batch":
            return in_order(trajectories)
        rng = np.random.default_rng((seed, step))
        events = last_rewards_late(trajectories, rng, window)
        return with_turns(events, rng) if self.release == "turn" else events


def variants(releases: Sequence[str], orders: int) -> list[Variant]:
    """The release rules, then random orders of arrival under trajectory release."""
    rules = [Variant(release, release) for release in releases]
    numbers = range(1, orders + 1)
    return rules + [Variant(f"order {n}", "trajectory", n) for n in numbers]


@dataclasses.dataclass(frozen=True)
class Replay:
    """The gradient of replayed trajectories."""

    gradient: Tree
    report: Report
    advantages: dict[tuple[int, int], float]


def replay(
    run: Run,
    params: Tree,
    events: Sequence[Event],
    release: str,
    rows: int = 0,
    accumulator: str | None = None,
    rush: bool = False,
) -> Replay:
    """Feeds the events of one step to a fresh stream, at these parameters.

    A member without events has failed. `rows` is the number of trajectories per call, 0
    the config's; `accumulator` is "plain" or "exact", None the config's. With `rush`
    all events come at once, otherwise the stream has time to work between them.
    """
    first = events[0].trajectory
    step, version = first.key.step, first.policy_version
    stream = run.new_stream(params, version, release, rows, accumulator)
    members = run.config.rollout.group_size
    for group in sorted({event.trajectory.key.group for event in events}):
        feed.open_group(run, stream, step, group, members)
        places = {event.trajectory.key[1:3] for event in events}
        present = {member for other, member in places if other == group}
        for member in set(range(members)) - present:
            stream.fail(group, member, "no tokens")
    for kind, trajectory, start, end in events:
        if kind == "turn":
            feed.turn(run, stream, trajectory, start, end)
        elif kind == "complete":
            feed.complete(run, stream, trajectory)
        elif kind == "reward":
            feed.reward(run, stream, trajectory)
        else:
            group, member = trajectory.key[1:3]
            stream.fail(group, member, trajectory.stop_reason.value)
        if not rush:
            stream.drain()
    gradient, report = stream.finish()
    return Replay(gradient, report, stream.advantages)


def in_order(trajectories: Sequence[Trajectory]) -> list[Event]:
    """Events in (group, member) order."""
    ordered = sorted(trajectories, key=lambda t: t.key)
    return [event for t in ordered for event in _events(t)]


def permuted(
    trajectories: Sequence[Trajectory], rng: np.random.Generator
) -> list[Event]:
    """Events of one trajectory after another in random order."""
    order = rng.permutation(len(trajectories))
    return [event for i in order for event in _events(trajectories[i])]


def last_rewards_late(
    trajectories: Sequence[Trajectory], rng: np.random.Generator, window: int
) -> list[Event]:
    """An order in which streaming has to work: every group's last reward is late.

    Groups come in windows of `window`, as many as may hold sums at a time. Within a
    window events interleave at random, and a group's last outcome follows only after
    all others of the window.
    """
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.key.group, []).append(trajectory)
    names = list(rng.permutation(sorted(groups)))
    events: list[Event] = []
    for start in range(0, len(names), window):
        early, late = [], []
        for name in names[start : start + window]:
            members = [groups[name][i] for i in rng.permutation(len(groups[name]))]
            early += [_events(t) for t in members[:-1]]
            late += [_events(t) for t in members[-1:]]
        events += _in_turns(early, rng)
        events += _in_turns(late, rng)
    return events


def interleaved(
    trajectories: Sequence[Trajectory], rng: np.random.Generator
) -> list[Event]:
    """All events in random order, a member's reward before its tokens or after."""
    events = in_order(trajectories)
    return [events[i] for i in rng.permutation(len(events))]


def with_turns(events: Sequence[Event], rng: np.random.Generator) -> list[Event]:
    """Every trajectory's turns as events of their own, in order, before its end."""
    placed = [(float(i), event) for i, event in enumerate(events)]
    for i, event in enumerate(events):
        if event.kind != "reward":
            turns = feed.scored_turns(event.trajectory)
            times = np.sort(rng.uniform(-1, i, len(turns)))
            for time, (start, end) in zip(times, turns, strict=True):
                placed.append((time, Event("turn", event.trajectory, start, end)))
    return [event for _, event in sorted(placed, key=lambda pair: pair[0])]


def counting(result: Replay, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The trajectories that count."""
    return [t for t in trajectories if t.key[1:3] in result.advantages]


def nonzero_groups(result: Replay) -> float:
    """Share of the groups that count in which an advantage is not 0."""
    groups = {group for group, _ in result.advantages}
    if not result.report.rewards:  # then every group has a gradient of its own
        return float(bool(groups))
    moving = {group for (group, _), a in result.advantages.items() if a != 0}
    return len(moving) / max(len(groups), 1)


def relative_difference(gradient: Tree, reference: Tree) -> float:
    """L2 norm of the difference over that of the reference, over the whole tree."""
    difference = optax.tree.sub(gradient, reference)
    return float(optax.tree.norm(difference) / optax.tree.norm(reference))


def control_difference(
    run: Run,
    params: Tree,
    trajectories: Sequence[Trajectory],
    reference: Tree,
    seed: int,
) -> float:
    """How far batch gradients differ among themselves: the yardstick.

    The largest difference from `reference` among four further batch runs with the
    trajectories permuted and packed with other numbers of rows per call.
    """
    rng = np.random.default_rng(seed)
    differences = []
    for rows in (1, max(2, run.config.mesh.rows_per_call // 2)) * 2:
        again = replay(run, params, permuted(trajectories, rng), "batch", rows)
        differences.append(relative_difference(again.gradient, reference))
    return float(np.max(differences))


def _events(trajectory: Trajectory) -> list[Event]:
    if trajectory.stop_reason.failed:
        return [Event("fail", trajectory)]
    return [Event("complete", trajectory), Event("reward", trajectory)]


def _in_turns(rows: list[list[Event]], rng: np.random.Generator) -> list[Event]:
    """Random order over trajectories, each one's own events in theirs."""
    rest = [list(row) for row in rows]
    events = []
    while any(rest):
        row = rest[rng.choice([i for i, r in enumerate(rest) if r])]
        events.append(row.pop(0))
    return events
