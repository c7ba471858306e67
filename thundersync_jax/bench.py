"""Batch, group and trajectory release side by side, and what each could reach.

    python -m thundersync_jax.bench --config=configs/bench_cpu.py

Every step is run live under all three rules in turns, so that a machine that drifts
does so for all; medians are over the steps. Each begins with the first policy: its
update is made and published, and taken back. The batch rule has the direct path, no
group sums, and full calls where they are faster. Lognormal latencies are scaled
beforehand until rollouts take as long as learning. Nothing is replayed: the rules
sample the same trajectories because keys and parameters are the same.
"""

import contextlib
import dataclasses
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax import calibration, pictures, state, tables
from thundersync_jax.checkpoint import Checkpoints
from thundersync_jax.config import Config
from thundersync_jax.display import Display
from thundersync_jax.errors import ConfigError
from thundersync_jax.flags import Flag
from thundersync_jax.flags import run as run_command
from thundersync_jax.live import Live, live
from thundersync_jax.progress import Progress
from thundersync_jax.run import Factory, Run
from thundersync_jax.schedule import RELEASES
from thundersync_jax.step import compile_all, conclude, roll_out
from thundersync_jax.tables import Column
from thundersync_jax.timing import group_correlation
from thundersync_jax.types import Trajectory
from thundersync_jax.warm_start import POLICY_VERSION, warm_start

Tree = Any
LARGEST_CONTENTION = 1.15  # beyond it the table says so
LARGEST_UNIFORM_SHARE = 0.05  # of groups: batch and group release skip them
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class _Round:
    """One step under every rule, and what its calls cost beside an idle learner's."""

    lives: dict[str, Live]
    contention: dict[str, float]


def bench(
    config: Config,
    workdir: str | Path | None = None,
    *,
    steps: int = 5,
    plot: bool = False,
    environment: Factory | None = None,
) -> dict[str, Any]:
    """Measures the release rules live.

    Args:
      config: The settings; `config.release` is not looked at.
      workdir: Whose warm start to take, or make, and where pictures go; None makes one
        and forgets it.
      steps: Measured steps.
      plot: Whether to draw bench_timeline.png and bench.png.
      environment: Makes the task set, in place of `config.env.factory`.

    Returns:
      The JSON object of `--json`; README describes it.

    Raises:
      ConfigError: `steps` < 1, or pictures without a work directory or matplotlib.
    """
    if steps < 1 or (plot and workdir is None):
        raise ConfigError(
            f"--steps is {steps} and --plot {plot} with --workdir {workdir}; expected "
            "at least 1 step, and a work directory for pictures."
        )
    if plot and not pictures.available():
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; install the extra: pip "
            "install 'thundersync_jax[plots]', or leave --plot out."
        )
    if workdir is None:
        with tempfile.TemporaryDirectory() as folder:
            return bench(config, folder, steps=steps, environment=environment)
    display = Display()
    with Run(config, workdir, environment, display.line, owner=True) as run:
        with Checkpoints(Path(workdir) / "warm_start", keep=2) as checkpoints:
            params = warm_start(run, run.initial_params(), checkpoints).params
        races = _Races(run, display, state.init(run.optimizer, params))
        with races.compiles_counted():
            races.warm_up(steps)
            races.calibrate(steps)
            rounds = [races.round(step, steps) for step in range(1, steps + 1)]
    result = _result(races, rounds)
    _print(display, result)
    if plot:
        _draw(Path(workdir), rounds, result)
    return result


class _Races:
    """The bench between its start and its last step."""

    def __init__(self, run: Run, display: Display, start: state.State):
        self.run = run
        self.display = display
        self.rows = run.config.mesh.rows_per_call
        self.compiles = 0
        self._start = start
        self._update = state.Update(run.optimizer, run.config.optim.clip_norm, start)
        self._idle = calibration.IdleWork()

    @contextlib.contextmanager
    def compiles_counted(self) -> Iterator[None]:
        """Counts every program that XLA compiles, whoever asked for it."""

        def listen(event: str, secs: float, **_) -> None:
            self.compiles += event == _COMPILE_EVENT

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    def warm_up(self, steps: int) -> None:
        """Compiles everything: a step under every rule that is not measured."""
        compile_all(self.run, self._start.params, POLICY_VERSION)
        self._update.compile(self._start)
        for release in RELEASES:
            self._live(steps + 1, release, f"warm-up {release}")
        # As in training: a full collection stops every thread for 0.3 s.
        gc.freeze()

    def calibrate(self, steps: int) -> None:
        """Chooses the rows per call, and the scale of lognormal latencies."""
        run, params = self.run, self._start.params
        run.publish(params, POLICY_VERSION)
        self._measure_idle()
        numbers = range(1, steps + 1)
        sampled = [roll_out(run, step, POLICY_VERSION)[0] for step in numbers]
        buckets = calibration.kinds(run, itertools.chain(*sampled))
        alone, packed = (self._idle.batch_secs(buckets, r) for r in (1, self.rows))
        if packed > (1 - calibration.LEAST_GAIN) * alone:
            self.rows = 1
        secs = [calibration.learner_secs(run, params, t, self.rows) for t in sampled]
        learner_secs = statistics.median(secs)
        self.display.line(
            f"full calls take {packed / alone:.2f} times as long as single ones; with "
            f"{self.rows} a call the learner takes {learner_secs:.2f} s a step"
        )
        env = run.config.env
        if "lognormal" in (env.tool_latency.kind, env.verify_latency.kind):
            tried = calibration.scale_latencies(
                run, POLICY_VERSION, numbers, learner_secs
            )
            for scale, found in tried:
                self.display.line(f"latencies x {scale:.3f}: rollouts {found:.2f} s")
        self.compiles = 0

    def round(self, step: int, steps: int) -> _Round:
        """One step under every rule, whose turn comes earlier with every step."""
        self._measure_idle()
        turn = (step - 1) % len(RELEASES)
        lives = {
            release: self._live(step, release, f"step {step}/{steps} {release}")
            for release in (*RELEASES[turn:], *RELEASES[:turn])
        }
        times = ", ".join(f"{r} {lives[r].timing.step_secs:.2f} s" for r in RELEASES)
        self.display.line(f"step {step}/{steps}  {times}")
        contention = {r: self._idle.contention(lives[r].step.calls) for r in RELEASES}
        return _Round(lives, contention)

    def _measure_idle(self) -> None:
        self._idle.measure(self.run, self._start.params, POLICY_VERSION, self.rows)

    def _live(self, step: int, release: str, title: str) -> Live:
        """One step under one rule, to its updated and published parameters."""
        run, params = self.run, self._start.params
        run.publish(params, POLICY_VERSION)
        donated = jax.block_until_ready(jax.tree.map(jnp.copy, self._start))
        members = run.config.rollout.groups_per_step * run.config.rollout.group_size
        with self.display.live(title):
            return live(
                run,
                params,
                POLICY_VERSION,
                step,
                release,
                rows=self.rows,
                boundary=lambda done: conclude(
                    run, self._update, donated, done, POLICY_VERSION
                ),
                progress=Progress(members, started_secs=time.monotonic()),
                on_progress=self.display.update,
            )


def _result(races: _Races, rounds: list[_Round]) -> dict[str, Any]:
    releases = {name: _summary(name, rounds) for name in RELEASES}
    batch = releases["batch"]["step_secs_median"]
    reports = [one.step.report for r in rounds for one in r.lives.values()]
    trajectory = [r.lives["trajectory"].step.report for r in rounds]
    groups = [r.lives["batch"].step.report for r in rounds]
    kept = sum(report.kept_groups for report in groups)
    return {
        "releases": releases,
        "speedup": {
            name: batch / releases[name]["step_secs_median"]
            for name in ("group", "trajectory")
        },
        "finish_time_icc": _median(
            [_finish_time_icc(r.lives["batch"]) for r in rounds]
        ),
        "open_groups_max": max(report.open_groups_max for report in trajectory),
        "group_sum_bytes": max(report.group_sum_bytes for report in reports),
        "compiles_after_warmup": races.compiles,
        "uniform_groups": sum(r.uniform_groups for r in groups) / kept if kept else 0.0,
        "latency_scale": races.run.latency_scale,
        "rows_per_call": races.rows,
        "identical_trajectories": all(map(_identical, rounds)),
    }


def _summary(release: str, rounds: list[_Round]) -> dict[str, Any]:
    """Medians over the steps."""
    lives = [r.lives[release] for r in rounds]
    dispatch = [secs for one in lives for secs in one.dispatch_secs]

    def median(read):
        return _median([read(one) for one in lives])

    return {
        "step_secs": [one.timing.step_secs for one in lives],
        "step_secs_median": median(lambda one: one.timing.step_secs),
        "rollout_secs": median(lambda one: one.timing.rollout_secs),
        "learner_secs": median(lambda one: one.timing.learner_secs),
        "first_release_secs": median(lambda one: one.first_release_secs),
        "last_work_secs": median(lambda one: one.last_work_secs),
        "boundary_secs": median(lambda one: one.boundary_secs),
        "tail_secs": median(lambda one: one.timing.tail_secs),
        "dispatch_ms_median": 1e3 * _median(dispatch),
        "predicted_secs": median(lambda one: one.predicted_secs),
        "measured_over_predicted": median(
            lambda one: one.timing.step_secs / one.predicted_secs
        ),
        "learner_idle_fraction": median(lambda one: one.timing.idle_fraction),
        "contention": _median([r.contention[release] for r in rounds]),
        "streamed_share": median(lambda one: one.step.report.streamed_share),
        "padded_over_real_tokens": median(
            lambda one: one.step.report.padded_over_real_tokens
        ),
    }


def _identical(found: _Round) -> bool:
    """Whether every rule sampled, and was rewarded for, the same."""
    first, *others = (found.lives[release].step.trajectories for release in RELEASES)
    return all(
        len(first) == len(other) and all(map(_same, first, other)) for other in others
    )


def _same(one: Trajectory, other: Trajectory) -> bool:
    return (
        one.key == other.key
        and one.reward == other.reward
        and np.array_equal(one.ids, other.ids)
        and np.array_equal(one.loss_mask, other.loss_mask)
    )


def _finish_time_icc(one: Live) -> float:
    groups: dict[int, list[float]] = {}
    for (group, _), secs in one.step.rewarded_secs.items():
        groups.setdefault(group, []).append(secs - one.step.start_secs)
    return group_correlation(groups.values())


def _median(values: list[float]) -> float:
    """Over the numbers that are there; NaN where there is none."""
    there = [value for value in values if not np.isnan(value)]
    return statistics.median(there) if there else float("nan")


def _print(display: Display, result: dict[str, Any]) -> None:
    releases = result["releases"]
    batch = releases["batch"]
    speedup = {"batch": 1.0} | result["speedup"]
    times, costs = [], []
    for name, found in releases.items():
        secs = [
            found[f"{key}_secs"]
            for key in ("learner", "first_release", "last_work", "boundary", "tail")
        ]
        times.append(
            [
                name,
                tables.seconds(found["step_secs_median"]),
                f"{speedup[name]:.2f}x",
                tables.seconds(found["rollout_secs"]),
                f"{found['rollout_secs'] / batch['rollout_secs']:.2f}x",
                *map(_fine, secs),
                tables.percent(found["learner_idle_fraction"]),
            ]
        )
        costs.append(
            [
                name,
                tables.seconds(found["predicted_secs"]),
                tables.number(found["measured_over_predicted"]),
                tables.number(found["contention"], 2),
                tables.number(found["dispatch_ms_median"], 1),
                tables.percent(found["streamed_share"]),
                tables.number(found["padded_over_real_tokens"], 2),
            ]
        )
    title = f"Medians of {len(batch['step_secs'])} steps"
    display.table(_TIME_COLUMNS, times, title)
    display.table(_COST_COLUMNS, costs, "Against the formula, and what streaming costs")
    for line in _remarks(result):
        display.line(line)


def _fine(secs: float) -> str:
    return tables.number(secs, 3 if secs < 1 else 2)


def _remarks(result: dict[str, Any]) -> Iterator[str]:
    releases = result["releases"]
    batch = releases["batch"]
    pairs = zip(batch["step_secs"], releases["trajectory"]["step_secs"], strict=True)
    ratios = [a / b for a, b in pairs]
    mib = result["group_sum_bytes"] / 2**20
    yield f"trajectory over batch, by step: {min(ratios):.2f}x to {max(ratios):.2f}x"
    yield (
        f"latencies x {result['latency_scale']:.3f}; {result['rows_per_call']} rows a "
        f"call; at most {result['open_groups_max']} open groups, {mib:.1f} MiB of sums"
    )
    yield (
        f"finish times within a group correlate by {result['finish_time_icc']:.2f}; "
        f"{result['uniform_groups']:.0%} of groups uniform; "
        f"{result['compiles_after_warmup']} compilations after the warm-up"
    )
    if not result["identical_trajectories"]:
        yield "NOT COMPARABLE: the rules sampled different trajectories"
    apart = batch["rollout_secs"] / batch["learner_secs"]
    if result["latency_scale"] != 1.0 and abs(apart - 1) > calibration.TOLERANCE:
        yield f"rollouts took {apart:.2f} times the learner's work; meant was 1"
    if result["uniform_groups"] > LARGEST_UNIFORM_SHARE:
        yield "many uniform groups, which batch and group release skip in time"
    for name, found in releases.items():
        if found["contention"] > LARGEST_CONTENTION:
            yield (
                f"{name}: gradient calls took {found['contention']:.2f} times as long "
                "as on an idle learner; rollouts and learner share what they run on"
            )


def _draw(workdir: Path, rounds: list[_Round], result: dict[str, Any]) -> None:
    """The step of middle length as a timeline, and all of them as bars."""
    batch = [r.lives["batch"].timing.step_secs for r in rounds]
    middle = rounds[batch.index(statistics.median_low(batch))]
    pictures.draw_timeline(
        workdir / "bench_timeline.png",
        {release: middle.lives[release].spans for release in RELEASES},
    )
    bars = {}
    for release, found in result["releases"].items():
        alone = found["tail_secs"] - found["boundary_secs"]
        bars[release] = pictures.Bar(
            step_secs=found["step_secs"],
            rollout_secs=found["rollout_secs"],
            busy_in_rollout_secs=max(0.0, found["learner_secs"] - alone),
            boundary_secs=found["boundary_secs"],
            predicted_secs=found["predicted_secs"],
        )
    pictures.draw_bars(workdir / "bench.png", bars)


_TIME_COLUMNS = (
    Column("release", 10, left=True),
    Column("step\nsecs", 6),
    Column("over\nbatch", 6),
    Column("rollout\nsecs", 7),
    Column("of\nbatch", 6),
    Column("learner\nsecs", 7),
    Column("first\nrelease", 7),
    Column("last\nwork", 6),
    Column("\nboundary", 8),
    Column("\ntail", 6),
    Column("learner\nidle", 7),
)
_COST_COLUMNS = (
    Column("release", 10, left=True),
    Column("formula\nsecs", 7),
    Column("measured\nover it", 8),
    Column("\ncontention", 10),
    Column("dispatch\nms", 8),
    Column("\nstreamed", 8),
    Column("padded over\nreal tokens", 11),
)


if __name__ == "__main__":
    run_command(
        bench,
        needs=("config",),
        flags={
            "steps": Flag(int, 5, "steps to measure"),
            "plot": Flag(bool, False, "draw bench_timeline.png and bench.png"),
        },
    )
