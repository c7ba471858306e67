"""Proof that streaming computes the batch gradient, at equal points.

    python -m thundersync_jax.verify --config=configs/quickstart.py --steps=3

It starts from the warm start and samples each step's trajectories once. In every step
all variants get the same parameters (those of the batch rule) and trajectories; the
difference is |g - g_batch|_2 / |g_batch|_2 over all parameters. Beside it stands the
control: the largest difference among batch runs that only permute and re-pack.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax import comparison, state
from thundersync_jax.checkpoint import Checkpoints, sha256
from thundersync_jax.config import Config
from thundersync_jax.display import Display
from thundersync_jax.errors import ConfigError
from thundersync_jax.flags import Flag
from thundersync_jax.flags import run as run_command
from thundersync_jax.rollout.events import Completed
from thundersync_jax.run import Run
from thundersync_jax.schedule import RELEASES
from thundersync_jax.step import rollouts
from thundersync_jax.types import Trajectory
from thundersync_jax.warm_start import POLICY_VERSION, warm_start

Tree = Any
LARGEST_DIFFERENCE = 1e-5  # float32 sums of some hundred terms
LARGEST_RATIO = 5.0  # over the control, which reorders the same sums


@dataclasses.dataclass
class _Variant:
    """One release rule with a state of its own, for its checksum."""

    release: str
    updated: state.State | None = None
    difference: float = 0.0
    updated_difference: float = 0.0


def verify(
    config: Config,
    workdir: str | Path,
    *,
    releases: Sequence[str] = RELEASES,
    steps: int = 3,
) -> dict[str, Any]:
    """Compares gradients of the release rules with those of batch release.

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
    display = Display()
    variants = [_Variant(release) for release in releases]
    nonzero, streamed, norms, controls = [], [], [], []
    with Run(config, workdir, on_line=display.line) as run:
        with Checkpoints(Path(workdir) / "warm_start", keep=2) as checkpoints:
            params = warm_start(run, run.initial_params(), checkpoints).params
        now = state.init(run.optimizer, params)
        update = state.Update(run.optimizer, config.optim.clip_norm, now)
        for step in range(1, steps + 1):
            run.publish(now.params, _version(step))
            trajectories = _sample(run, step)
            batch = comparison.replay(
                run, now.params, comparison.in_order(trajectories), "batch"
            )
            control = comparison.control_difference(
                run, now.params, trajectories, batch.gradient, seed=step
            )
            controls.append(control)
            norms.append(batch.report.gradient_norm)
            groups = {group for group, _ in batch.advantages}
            moving = {g for (g, _), a in batch.advantages.items() if a != 0}
            nonzero.append(len(moving) / max(len(groups), 1))
            for variant in variants:
                found = _replayed(run, now.params, trajectories, variant.release, step)
                difference = comparison.relative_difference(
                    found.gradient, batch.gradient
                )
                variant.difference = max(variant.difference, difference)
                if variant.release == "trajectory":
                    streamed.append(found.report.streamed_share)
                variant.updated, _ = update(_copy(now), found.gradient)
                display.line(
                    f"step {step}  {variant.release:<10}  difference "
                    f"{difference:.2e}  control {control:.2e}  streamed share "
                    f"{found.report.streamed_share:.2f}"
                )
            now, _ = update(now, batch.gradient)
        for variant in variants:
            variant.updated_difference = comparison.relative_difference(
                variant.updated.params, now.params
            )
    result = _judge(variants, controls, nonzero, streamed, norms, steps)
    _print(display, variants, result)
    return result


def _sample(run: Run, step: int) -> list[Trajectory]:
    """The step's trajectories, rolled out once; failed ones as they failed."""
    jobs, version = run.train_jobs(step), _version(step)
    events = [e for e in rollouts(run, jobs, version) if not isinstance(e, Completed)]
    missing = [str(e.key) for e in events if e.trajectory is None]
    if missing:
        raise ConfigError(
            f"{len(missing)} trajectories have no tokens, the first is {missing[0]}; "
            "verify needs an environment that starts. Look at its errors in train."
        )
    return sorted((e.trajectory for e in events), key=lambda t: t.key)


def _replayed(run, params, trajectories, release, step):
    if release == "batch":
        return comparison.replay(
            run, params, comparison.in_order(trajectories), release
        )
    rng = np.random.default_rng((run.config.seed, step))
    events = comparison.last_rewards_late(trajectories, rng, window=run.open_groups)
    return comparison.replay(run, params, events, release)


def _judge(variants, controls, nonzero, streamed, norms, steps) -> dict[str, Any]:
    largest = max(variant.difference for variant in variants)
    control = min(controls)
    hashes = {variant.release: sha256(variant.updated) for variant in variants}
    untested = []
    if min(nonzero) < 0.5:
        untested.append(f"only {min(nonzero):.0%} of groups have an advantage")
    if streamed and min(streamed) < 0.5:
        untested.append(f"only {min(streamed):.0%} of trajectories were streamed")
    if control == 0:
        untested.append("the control shows no rounding at all")
    close = largest <= LARGEST_DIFFERENCE and largest <= LARGEST_RATIO * control
    return {
        "steps": steps,
        "max_relative_difference": largest,
        "control_relative_difference": control,
        "nonzero_groups": min(nonzero),
        "streamed_share": min(streamed, default=None),
        "gradient_norm": norms[-1],
        "identical": len(set(hashes.values())) == 1,
        "sha256": hashes,
        "untested": "; ".join(untested) or None,
        "passed": close and not untested,
    }


def _print(display: Display, variants: Sequence[_Variant], result: dict[str, Any]):
    display.line("")
    display.line("release     gradient difference  after the update  sha256")
    for variant in variants:
        checksum = result["sha256"][variant.release]
        display.line(
            f"{variant.release:<10}  {variant.difference:19.2e}"
            f"  {variant.updated_difference:16.2e}  {checksum[:16]}"
        )
    display.line(f"control     {result['control_relative_difference']:19.2e}")
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
        flags={
            "releases": Flag(tuple, RELEASES, "release rules to compare"),
            "steps": Flag(int, 3, "steps to compare"),
        },
    )
