"""Release rules side by side: the same trajectories, and how far gradients differ.

Trajectories are replayed into fresh streams, so that only the release rule, the order
of events and the packing of calls differ. Comparisons in which every rule decodes for
itself are live (module `live`).
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.ledger import Report
from thundersync_jax.run import Run
from thundersync_jax.types import Trajectory

Tree = Any
Event = tuple[str, Trajectory]  # "complete", "reward" or "fail", and of what
_POLL_SECS = 0.0005


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
) -> Replay:
    """Feeds events to a fresh stream, leaving it time to work between them.

    Args:
      run: Makes streams.
      params: Where the gradient is taken.
      events: All events of one step, in their order of arrival. A member without any
        has failed.
      release: The release rule.
      rows: Rows per call; 0 for the config's.
    """
    version = events[0][1].policy_version
    stream = run.new_stream(params, version, release, rows)
    members = run.config.rollout.group_size
    for group in dict.fromkeys(t.key.group for _, t in events):
        stream.open_group(group, members)
        there = {t.key.member for _, t in events if t.key.group == group}
        for member in set(range(members)) - there:
            stream.fail(group, member, "no tokens")
    for kind, trajectory in events:
        group, member = trajectory.key.group, trajectory.key.member
        if kind == "complete":
            tokens = trajectory.action_tokens
            stream.complete(group, member, run.sample(trajectory), tokens=tokens)
        elif kind == "reward":
            stream.reward(group, member, trajectory.reward)
        else:
            stream.fail(group, member, trajectory.stop_reason.value)
        while stream.advance():
            time.sleep(_POLL_SECS)
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
    return [
        e for i in rng.permutation(len(trajectories)) for e in _events(trajectories[i])
    ]


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
        events += _interleaved(early, rng)
        events += _interleaved(late, rng)
    return events


def relative_difference(gradient: Tree, reference: Tree) -> float:
    """L2 norm of the difference over that of the reference, over the whole tree."""
    difference = jax.tree.map(jnp.subtract, gradient, reference)
    return float(_norm(difference) / _norm(reference))


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
        return [("fail", trajectory)]
    return [("complete", trajectory), ("reward", trajectory)]


def _interleaved(rows: list[list[Event]], rng: np.random.Generator) -> list[Event]:
    """Random order over trajectories, each one's own events in theirs."""
    rest = [list(row) for row in rows]
    events = []
    while any(rest):
        row = rest[rng.choice([i for i, r in enumerate(rest) if r])]
        events.append(row.pop(0))
    return events


def _norm(tree: Tree) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))
