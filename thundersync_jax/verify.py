"""Proof that streaming computes the batch gradient: close to it, or to the last bit.

    python -m thundersync_jax.verify --config=configs/quickstart.py --steps=3

With plain sums all release rules and orders of arrival get the parameters of the batch
rule and the same trajectories; with `--config.accumulator=exact` each runs freely from
the warm start (module `replay`), and all must end with the same bits.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.config import Config
from thundersync_jax.errors import ConfigError
from thundersync_jax.flags import Flag
from thundersync_jax.flags import run as run_command
from thundersync_jax.measure import replay
from thundersync_jax.measure.replay import FreeRun
from thundersync_jax.models.base import ModelFactory
from thundersync_jax.run import state
from thundersync_jax.run.checkpoint import Checkpoints, sha256
from thundersync_jax.run.run import Factory, Run
from thundersync_jax.run.step import roll_out
from thundersync_jax.run.warm_start import POLICY_VERSION, warm_start
from thundersync_jax.view import tables
from thundersync_jax.view.display import Display
from thundersync_jax.view.tables import Column

Tree = Any
LARGEST_DIFFERENCE = 1e-5  # float32 sums of some hundred terms
LARGEST_RATIO = 5.0  # over the control, which reorders the same sums
LEAST_SHARE = 0.5  # of groups with an advantage, and of streamed trajectories


@dataclasses.dataclass
class _Updated:
    """What a variant's own update of the last step leads to, for its checksum."""

    state: state.State
    difference: float = 0.0  # of its parameters from those of the batch rule


@dataclasses.dataclass
class _Point:
    """The comparisons of one step; differences and streamed shares are by variant."""

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
    releases: Sequence[str] | None = None,
    orders: int = 0,
    steps: int = 3,
    environment: Factory | None = None,
    model: ModelFactory | None = None,
) -> dict[str, Any]:
    """Compares variants with batch release.

    Args:
      workdir: A run whose warm start is taken, or made; None: a temporary directory.
      releases: Rules to compare, batch among them; None for all that make a difference
        for the config's loss.
      orders: Number of random orders of arrival to compare besides.
      steps: Number of steps to compare.
      environment: Makes the task set, in place of `config.env.factory`.
      model: Makes the policy, in place of `config.model.factory`.

    Returns:
      The JSON object of `--json`; docs/exactness.md has its keys, "passed" the
      verdict.

    Raises:
      ConfigError: A release rule is unknown, batch is not among them, or a number is
        too small.
    """
    releases = tuple(releases or config.releases)
    unknown = [name for name in releases if name not in config.releases]
    if unknown or "batch" not in releases or steps < 1 or orders < 0:
        raise ConfigError(
            f"--releases is {','.join(releases)} with --steps {steps} and --orders "
            f"{orders}; expected at least 1 step, no fewer than 0 orders and rules "
            f"among {', '.join(config.releases)}, batch included."
        )
    display = Display()
    variants = replay.variants(releases, orders)
    kept = None if workdir is None else contextlib.nullcontext(workdir)
    with (
        kept or tempfile.TemporaryDirectory() as workdir,
        Run(config, workdir, environment, display.line, owner=True, model=model) as run,
    ):
        with Checkpoints(Path(workdir) / "warm_start", keep=2) as checkpoints:
            params = warm_start(run, run.initial_params(), checkpoints).params
        start = state.init(run.optimizer, params)
        if config.accumulator == "exact":
            return _to_the_bit(run, display, variants, start, steps)
        return _at_equal_points(run, display, variants, start, steps)


def _to_the_bit(run, display, variants, start, steps) -> dict[str, Any]:
    """Every variant from its own parameters; only the same bits will do."""
    update = state.Update(run.optimizer, run.config.optim.clip_norm, start)
    runs = [
        replay.run_freely(run, display, variant, start, update, steps)
        for variant in variants
    ]
    result = _judge_bits(runs)
    replay.show(display, runs, result)
    return result


def _at_equal_points(run, display, variants, now, steps) -> dict[str, Any]:
    """Every variant at the parameters of the batch rule."""
    update = state.Update(run.optimizer, run.config.optim.clip_norm, now)
    points, updated = [], {}
    for step in range(1, steps + 1):
        run.publish(now.params, _version(step))
        point, gradients = _compare(run, display, now.params, variants, step)
        points.append(point)
        for name, gradient in gradients.items():
            copy = jax.tree.map(jnp.copy, now)
            updated[name] = _Updated(update(copy, gradient)[0])
        now, _ = update(now, point.gradient)
    for result in updated.values():
        result.difference = replay.relative_difference(result.state.params, now.params)
    verdict = _judge(updated, points)
    _print(display, updated, points, verdict)
    return verdict


def _compare(run, display, params, variants, step) -> tuple[_Point, dict[str, Tree]]:
    """All variants at one point: the same parameters and trajectories."""
    trajectories, _ = roll_out(run, step, _version(step))
    batch = replay.replay(run, params, replay.in_order(trajectories), "batch")
    control = replay.control_difference(
        run, params, trajectories, batch.gradient, seed=step
    )
    point = _Point(
        gradient=batch.gradient,
        gradient_norm=batch.report.gradient_norm,
        control=control,
        nonzero_groups=replay.nonzero_groups(batch),
    )
    gradients = {}
    for variant in variants:
        events = variant.events(trajectories, run.config.seed, step, run.open_groups)
        replayed = replay.replay(
            run, params, events, variant.release, rush=variant.rush
        )
        difference = replay.relative_difference(replayed.gradient, batch.gradient)
        share = replayed.report.streamed_share
        point.differences[variant.name] = difference
        point.streamed_shares[variant.name] = share
        gradients[variant.name] = replayed.gradient
        display.line(
            f"step {step}  {variant.name:<10}  difference {difference:.2e}  control "
            f"{control:.2e}  streamed share {share:.2f}"
        )
    run.track_baselines(replay.counting(batch, trajectories))
    return point, gradients


def _judge(updated: dict[str, _Updated], points: list[_Point]) -> dict[str, Any]:
    # numpy's maximum and minimum keep a NaN, Python's may lose it.
    largest = float(np.max([list(point.differences.values()) for point in points]))
    control = float(np.min([point.control for point in points]))
    nonzero = min(point.nonzero_groups for point in points)
    shares = [point.streamed_shares.get("trajectory") for point in points]
    hashes = {name: sha256(result.state) for name, result in updated.items()}
    untested = _thin(nonzero, shares)
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
        "streamed_share": _least(shares),
        "gradient_norm": points[-1].gradient_norm,
        "identical": len(set(hashes.values())) == 1,
        "sha256": hashes,
        "untested": "; ".join(untested) or None,
        "passed": bool(close and not untested),
    }


def _judge_bits(runs: list[FreeRun]) -> dict[str, Any]:
    by_name = {free_run.variant.name: free_run for free_run in runs}
    batch = by_name["batch"]
    difference = replay.first_difference(runs)
    nonzero = min(batch.nonzero_groups)
    streaming = by_name.get("trajectory")
    shares = streaming.streamed_shares if streaming else [None]
    # The same bits everywhere, but of what? Plain sums know.
    largest = float(np.max(batch.plain_differences))
    untested = _thin(nonzero, shares)
    if np.isnan(largest):
        untested.append("a gradient is zero")
    identical = difference is None
    return {
        "steps": len(batch.digests),
        "max_relative_difference": largest,
        "nonzero_groups": nonzero,
        "streamed_share": _least(shares),
        "gradient_norm": batch.gradient_norm,
        "identical": identical,
        "difference": difference._asdict() if difference else None,
        "sha256": {name: free_run.sha256 for name, free_run in by_name.items()},
        "sha256_of_all": batch.sha256 if identical else None,
        "untested": "; ".join(untested) or None,
        "passed": identical and largest <= LARGEST_DIFFERENCE and not untested,
    }


def _thin(nonzero: float, shares: Sequence[float | None]) -> list[str]:
    """What was too rare for the verdict to mean anything."""
    untested = []
    if nonzero < LEAST_SHARE:
        untested.append(f"only {nonzero:.0%} of groups have an advantage")
    least = _least(shares)
    if least is not None and not least >= LEAST_SHARE:
        untested.append(f"only {least:.0%} of trajectories were streamed")
    return untested


def _least(shares: Sequence[float | None]) -> float | None:
    """The least of the steps; None without trajectory release."""
    return None if None in shares else float(np.min(shares))


def _print(
    display: Display,
    updated: dict[str, _Updated],
    points: list[_Point],
    result: dict[str, Any],
) -> None:
    columns = (
        Column("variant", left=True),
        Column("gradient\ndifference"),
        Column("parameters'\nafter the update"),
        Column("sha256", left=True),
    )
    rows = []
    for name, update in updated.items():
        worst = np.max([point.differences[name] for point in points])
        rows.append(
            [
                name,
                tables.scientific(float(worst)),
                tables.scientific(update.difference),
                result["sha256"][name][:16],
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


if __name__ == "__main__":
    run_command(
        verify,
        needs=("config",),
        flags={
            "releases": Flag(tuple, None, "rules to compare; all of the loss's"),
            "orders": Flag(int, 0, "random orders of arrival to compare besides"),
            "steps": Flag(int, 3, "steps to compare"),
        },
    )
