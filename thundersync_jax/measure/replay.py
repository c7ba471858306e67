"""Release rules side by side, and how far what they leave differs.

*Replayed*, the trajectories of one step come to fresh streams: only the release rule,
the order of events and the packing of calls differ. *Free runs* share nothing but the
start and the seed; with exact sums all must leave the same bits, step after step.
Comparisons by time are live (module `live`).
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from thundersync_jax.run import feed, state
from thundersync_jax.run.checkpoint import sha256
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import conclude, roll_out
from thundersync_jax.run.warm_start import POLICY_VERSION
from thundersync_jax.stream.ledger import Report
from thundersync_jax.types import Trajectory
from thundersync_jax.view import tables
from thundersync_jax.view.display import Display
from thundersync_jax.view.tables import Column

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
        """The order of arrival in a step, where `window` groups may hold sums."""
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
    groups = sorted({event.trajectory.key.group for event in events})
    if run.config.rollout.spare_members:
        # Before all else: only then are those there that came in their place.
        events = [e for e in events if not e.trajectory.stop_reason.failed]
    for group in groups:
        feed.open_group(run, stream, step, group, members)
        places = {event.trajectory.key[1:3] for event in events}
        present = {member for other, member in places if other == group}
        missing = sorted(set(range(members)) - present)
        for member in missing:  # grows
            spare = stream.fail(group, member, "no tokens")
            if spare is not None and spare not in present:
                missing.append(spare)
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

    The largest difference from `reference` of four runs in other orders and packings.
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


class Outcome(NamedTuple):
    """What a step leaves, in the order in which a difference would first show."""

    ids: np.ndarray  # int32[N] of all trajectories, one after another
    rewards: np.ndarray  # float64, NaN where there is none
    gradient: Tree
    params: Tree
    opt_state: Tree


class Difference(NamedTuple):
    """The first leaf in which a variant is not what the batch rule left."""

    step: int
    leaf: str  # its path in `Outcome`
    variant: str


@dataclasses.dataclass
class FreeRun:
    """One variant; every list has an entry per step."""

    variant: Variant
    # A hash of every leaf of the `Outcome`, by path.
    digests: list[dict[str, str]] = dataclasses.field(default_factory=list)
    streamed_shares: list[float] = dataclasses.field(default_factory=list)
    nonzero_groups: list[float] = dataclasses.field(default_factory=list)  # shares
    # Relative, of the gradient from that of plain sums; under the batch rule only.
    plain_differences: list[float] = dataclasses.field(default_factory=list)
    gradient_norm: float = 0.0  # L2, of the last step
    sha256: str = ""  # of the last parameters and optimizer state


def run_freely(
    run: Run,
    display: Display,
    variant: Variant,
    start: state.State,
    update: state.Update,
    steps: int,
) -> FreeRun:
    """Takes a variant through so many steps from `start`, which is kept."""
    free_run = FreeRun(variant)
    now, version = jax.tree.map(jnp.copy, start), POLICY_VERSION
    baselines = copy.deepcopy(run.baselines)
    run.publish(now.params, version)
    for step in range(1, steps + 1):
        trajectories, _ = roll_out(run, step, version)
        events = variant.events(trajectories, run.config.seed, step, run.open_groups)
        replayed = replay(run, now.params, events, variant.release, rush=variant.rush)
        if variant.name == "batch":
            plain = replay(
                run, now.params, events, "batch", rows=1, accumulator="plain"
            )
            free_run.plain_differences.append(
                relative_difference(replayed.gradient, plain.gradient)
            )
        now, version, _ = conclude(run, update, now, replayed, version)
        run.track_baselines(counting(replayed, trajectories))
        ids = np.concatenate([t.ids for t in trajectories])
        rewards = np.array([t.reward for t in trajectories], np.float64)
        outcome = Outcome(ids, rewards, replayed.gradient, *now)
        free_run.digests.append(_digests(outcome))
        free_run.streamed_shares.append(replayed.report.streamed_share)
        free_run.nonzero_groups.append(nonzero_groups(replayed))
        free_run.gradient_norm = replayed.report.gradient_norm
        display.line(
            f"{variant.name:<10}  step {step}  streamed share "
            f"{replayed.report.streamed_share:.2f}  gradient "
            f"{free_run.gradient_norm:.3g}"
        )
    free_run.sha256 = sha256(now)
    run.baselines = baselines
    return free_run


def first_difference(runs: Sequence[FreeRun]) -> Difference | None:
    """Where any run first differs from the batch rule's; None if nowhere."""
    (batch,) = [run for run in runs if run.variant.name == "batch"]
    for step, expected in enumerate(batch.digests):
        for run in runs:
            digests = run.digests[step]
            for leaf in dict.fromkeys((*expected, *digests)):
                if digests.get(leaf) != expected.get(leaf):
                    return Difference(step + 1, leaf, run.variant.name)
    return None


def show(display: Display, runs: Sequence[FreeRun], result: dict[str, Any]) -> None:
    """Checksums as a table, and the verdict."""
    columns = (
        Column("variant", left=True),
        Column("streamed\nshare"),
        Column("sha256 of parameters and optimizer state", left=True),
    )
    rows = [
        [
            run.variant.name,
            tables.percent(float(np.mean(run.streamed_shares))),
            run.sha256,
        ]
        for run in runs
    ]
    display.table(columns, rows)
    if difference := result["difference"]:
        verdict = (
            f"FAILED: {difference['variant']} differs from batch, first at step "
            f"{difference['step']} in {difference['leaf']}"
        )
    else:
        verdict = "identical"
        if result["untested"]:
            verdict += f", FAILED as untested: {result['untested']}"
        elif not result["passed"]:
            verdict += ", and FAILED: far from the gradient of plain sums"
    display.line(f"{result['steps']} steps, {len(runs)} variants: {verdict}")


def _digests(outcome: Outcome) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(outcome))
    return {jax.tree_util.keystr(path): sha256(leaf) for path, leaf in leaves}
