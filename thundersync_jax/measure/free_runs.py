"""Free runs: every variant from its own parameters, and where two first differ.

Variants share nothing but the start and the seed: each publishes its own parameters,
samples its own trajectories, streams its own gradient and makes its own update. With
exact sums all of them must leave the same bits, step after step. Variants whose
gradients are compared at equal points are in module `verify`.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.measure import replay
from thundersync_jax.measure.replay import Replay, Variant
from thundersync_jax.run import state
from thundersync_jax.run.checkpoint import sha256
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import conclude, roll_out
from thundersync_jax.run.warm_start import POLICY_VERSION
from thundersync_jax.types import Trajectory
from thundersync_jax.view import tables
from thundersync_jax.view.display import Display
from thundersync_jax.view.tables import Column

Tree = Any


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
        replayed = replay.replay(
            run, now.params, events, variant.release, rush=variant.rush
        )
        if variant.name == "batch":
            plain = replay.replay(
                run, now.params, events, "batch", rows=1, accumulator="plain"
            )
            free_run.plain_differences.append(
                replay.relative_difference(replayed.gradient, plain.gradient)
            )
        now, version, _ = conclude(run, update, now, replayed, version)
        run.track_baselines(replay.counting(replayed, trajectories))
        free_run.digests.append(_digests(_outcome(trajectories, replayed, now)))
        free_run.streamed_shares.append(replayed.report.streamed_share)
        free_run.nonzero_groups.append(replay.nonzero_groups(replayed))
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


def _outcome(
    trajectories: Sequence[Trajectory], replayed: Replay, now: state.State
) -> Outcome:
    return Outcome(
        np.concatenate([t.ids for t in trajectories]),
        np.array([t.reward for t in trajectories], np.float64),
        replayed.gradient,
        *now,
    )


def _digests(outcome: Outcome) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(outcome))
    return {jax.tree_util.keystr(path): sha256(leaf) for path, leaf in leaves}
