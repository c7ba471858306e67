"""Proof that streaming computes the batch gradient, at equal points.

    python -m thundersync_jax.verify --config=configs/quickstart.py --steps=3

It starts from the warm start and samples each step's trajectories once. In every step
all variants get the same parameters (those of the batch rule) and trajectories; the
difference is |g - g_batch|_2 / |g_batch|_2 over all parameters. Beside it stands the
control: the largest difference among batch runs that only permute and re-pack.
"""

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax import comparison, state, tables
from thundersync_jax.checkpoint import Checkpoints, sha256
from thundersync_jax.config import Config
from thundersync_jax.display import Display
from thundersync_jax.errors import ConfigError
from thundersync_jax.flags import Flag
from thundersync_jax.flags import run as run_command
from thundersync_jax.run import Factory, Run
from thundersync_jax.schedule import RELEASES
from thundersync_jax.step import roll_out
from thundersync_jax.tables import Column
from thundersync_jax.warm_start import POLICY_VERSION, warm_start

Tree = Any
LARGEST_DIFFERENCE = 1e-5  # float32 sums of some hundred terms
LARGEST_RATIO = 5.0  # over the control, which reorders the same sums
LEAST_SHARE = 0.5  # of groups with an advantage, and of streamed trajectories


@dataclasses.dataclass
class _Variant:
    """One release rule with a state of its own, for its checksum."""

    release: str
    updated: state.State | None = None
    updated_difference: float = 0.0


@dataclasses.dataclass
class _Point:
    """What one step found. Differences and streamed shares are by release rule."""

    gradient: Tree
    gradient_norm: float
    control: float
    nonzero_groups: float
    differences: dict[str, float] = dataclasses.field(default_factory=dict)
    streamed_shares: dict[str, float] = dataclasses.field(default_factory=dict)


def verify(
    config: Config,
    workdir: str | Path | None = None,
    *,
    releases: Sequence[str] = RELEASES,
    steps: int = 3,
    environment: Factory | None = None,
) -> dict[str, Any]:
    """Compares gradients of the release rules with those of batch release.

    Args:
      config: The settings.
      workdir: Whose warm start to take, or make; None makes one and forgets it.
      releases: Rules to compare, batch among them.
      steps: How many.
      environment: Makes the task set, in place of `config.env.factory`.

    Returns:
      The JSON object of `--json`; README describes it. "passed" is the verdict.

    Raises:
      ConfigError: A release rule is unknown, batch is not among them, or `steps` < 1.
    """
    unknown = [name for name in releases if name not in RELEASES]
    if unknown or "batch" not in releases or steps < 1:
        raise ConfigError(
            f"--releases is {','.join(releases)} with --steps {steps}; expected at "
            f"least 1 step and rules among {', '.join(RELEASES)}, batch included."
        )
    if workdir is None:
        with tempfile.TemporaryDirectory() as folder:
            return verify(
                config, folder, releases=releases, steps=steps, environment=environment
            )
    display = Display()
    variants = [_Variant(release) for release in releases]
    with Run(config, workdir, environment, display.line, owner=True) as run:
        with Checkpoints(Path(workdir) / "warm_start", keep=2) as checkpoints:
            params = warm_start(run, run.initial_params(), checkpoints).params
        now = state.init(run.optimizer, params)
        update = state.Update(run.optimizer, config.optim.clip_norm, now)
        points = []
        for step in range(1, steps + 1):
            run.publish(now.params, _version(step))
            point, gradients = _compare(run, display, now.params, releases, step)
            points.append(point)
            for variant in variants:
                gradient = gradients[variant.release]
                variant.updated, _ = update(_copy(now), gradient)
            now, _ = update(now, point.gradient)
        for variant in variants:
            variant.updated_difference = comparison.relative_difference(
                variant.updated.params, now.params
            )
    result = _judge(variants, points)
    _print(display, variants, points, result)
    return result


def _compare(run, display, params, releases, step) -> tuple[_Point, dict[str, Tree]]:
    """All rules at one point: the same parameters and trajectories."""
    trajectories, _ = roll_out(run, step, _version(step))
    batch = comparison.replay(run, params, comparison.in_order(trajectories), "batch")
    control = comparison.control_difference(
        run, params, trajectories, batch.gradient, seed=step
    )
    groups = {group for group, _ in batch.advantages}
    moving = {group for (group, _), a in batch.advantages.items() if a != 0}
    point = _Point(
        gradient=batch.gradient,
        gradient_norm=batch.report.gradient_norm,
        control=control,
        nonzero_groups=len(moving) / max(len(groups), 1),
    )
    gradients = {}
    for release in releases:
        found = _replayed(run, params, trajectories, release, step)
        difference = comparison.relative_difference(found.gradient, batch.gradient)
        share = found.report.streamed_share
        point.differences[release] = difference
        point.streamed_shares[release] = share
        gradients[release] = found.gradient
        display.line(
            f"step {step}  {release:<10}  difference {difference:.2e}  control "
            f"{control:.2e}  streamed share {share:.2f}"
        )
    return point, gradients


def _replayed(run, params, trajectories, release, step):
    if release == "batch":
        return comparison.replay(
            run, params, comparison.in_order(trajectories), release
        )
    rng = np.random.default_rng((run.config.seed, step))
    events = comparison.last_rewards_late(trajectories, rng, window=run.open_groups)
    return comparison.replay(run, params, events, release)


def _judge(variants: list[_Variant], points: list[_Point]) -> dict[str, Any]:
    # numpy's maximum and minimum keep a NaN, Python's may lose it.
    largest = float(np.max([list(point.differences.values()) for point in points]))
    control = float(np.min([point.control for point in points]))
    nonzero = min(point.nonzero_groups for point in points)
    shares = [point.streamed_shares.get("trajectory") for point in points]
    streamed = None if None in shares else float(np.min(shares))
    hashes = {variant.release: sha256(variant.updated) for variant in variants}
    untested = []
    if nonzero < LEAST_SHARE:
        untested.append(f"only {nonzero:.0%} of groups have an advantage")
    if streamed is not None and streamed < LEAST_SHARE:
        untested.append(f"only {streamed:.0%} of trajectories were streamed")
    if np.isnan(control):
        untested.append("a gradient is zero")
    elif control == 0:
        untested.append("the control shows no rounding at all")
    close = largest <= LARGEST_DIFFERENCE and largest <= LARGEST_RATIO * control
    return {
        "steps": len(points),
        "max_relative_difference": largest,
        "control_relative_difference": control,
        "nonzero_groups": nonzero,
        "streamed_share": streamed,
        "gradient_norm": points[-1].gradient_norm,
        "identical": len(set(hashes.values())) == 1,
        "sha256": hashes,
        "untested": "; ".join(untested) or None,
        "passed": bool(close and not untested),
    }


def _print(
    display: Display,
    variants: list[_Variant],
    points: list[_Point],
    result: dict[str, Any],
) -> None:
    columns = (
        Column("release", left=True),
        Column("gradient\ndifference"),
        Column("parameters'\nafter the update"),
        Column("sha256", left=True),
    )
    rows = []
    for variant in variants:
        worst = np.max([point.differences[variant.release] for point in points])
        rows.append(
            [
                variant.release,
                tables.scientific(float(worst)),
                tables.scientific(variant.updated_difference),
                result["sha256"][variant.release][:16],
            ]
        )
    control = tables.scientific(result["control_relative_difference"])
    rows.append(["control", control, tables.MISSING, tables.MISSING])
    display.table(columns, rows)
    verdict = "passed" if result["passed"] else "FAILED"
    if result["untested"]:
        verdict = f"FAILED as untested: {result['untested']}"
    display.line(f"{result['steps']} steps at equal points: {verdict}")


def _version(step: int) -> int:
    return POLICY_VERSION + step - 1


def _copy(tree: Tree) -> Tree:
    return jax.tree.map(jnp.copy, tree)


if __name__ == "__main__":
    run_command(
        verify,
        needs=("config",),
        flags={
            "releases": Flag(tuple, RELEASES, "release rules to compare"),
            "steps": Flag(int, 3, "steps to compare"),
        },
    )
