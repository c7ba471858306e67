"""The release rules of a loss side by side, and what each could reach.

    python -m thundersync_jax.bench --config=configs/bench_cpu.py

Every step is run live under all of them in turns (docs/speed.md), each time from the
first policy, so that keys and parameters, and with them the trajectories, are the same.
`--engines` measures samplers instead: the in-process one beside `vllm.servers`.
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

from thundersync_jax.config import Config, VLLMConfig
from thundersync_jax.engines import in_process
from thundersync_jax.engines.base import Engine, RemoteEngine
from thundersync_jax.engines.vllm.engine import VLLMEngine
from thundersync_jax.engines.vllm.publish import Publisher
from thundersync_jax.errors import ConfigError, StreamError
from thundersync_jax.flags import Flag
from thundersync_jax.flags import run as run_command
from thundersync_jax.measure import bench_report, engine_bench, live
from thundersync_jax.measure.live import Live, PeakBytes
from thundersync_jax.measure.steps import IdleWork
from thundersync_jax.metrics.timing import Progress
from thundersync_jax.models import base as models
from thundersync_jax.run import placement, state
from thundersync_jax.run.checkpoint import Checkpoints
from thundersync_jax.run.feed import compile_all
from thundersync_jax.run.run import Factory, Run
from thundersync_jax.run.step import Step, conclude
from thundersync_jax.run.warm_start import POLICY_VERSION, warm_start
from thundersync_jax.types import Trajectory
from thundersync_jax.view import pictures
from thundersync_jax.view.display import Display

_CALIBRATION_STEPS = 5  # at most
_IDLE_MEASUREMENTS = 2  # before rows per call are chosen
_REQUESTS = (16, 64)  # at once, where samplers are measured
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def bench(
    config: Config,
    workdir: str | Path | None = None,
    *,
    steps: int = 5,
    plot: bool = False,
    engines: bool = False,
    environment: Factory | None = None,
) -> dict[str, Any]:
    """Measures the release rules live; a work directory is for pictures only.

    Args:
      config: The settings; `config.release` does not matter.
      workdir: A run whose warm start is taken, or made, and where pictures go; None: a
        temporary directory.
      steps: Number of measured steps; of rounds of requests with `engines`.
      plot: Whether to draw bench_timeline.png and bench.png.
      engines: Whether to measure samplers instead.
      environment: Makes the task set, in place of `config.env.factory`.

    Returns:
      The JSON object of `--json`; docs/speed.md describes it.

    Raises:
      ConfigError: `steps` < 1, or pictures without a work directory or matplotlib.
      StreamError: There is nothing to measure.
    """
    if steps < 1:
        raise ConfigError(f"--steps is {steps}; expected at least 1.")
    if engines:
        return _bench_engines(config, steps)
    if plot and workdir is None:
        raise ConfigError(
            "--plot is given without --workdir; expected a work directory for pictures."
        )
    if plot and not pictures.available():
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; install the extra: pip "
            "install 'thundersync_jax[plots]', or leave --plot out."
        )
    display = Display()
    kept = None if workdir is None else contextlib.nullcontext(workdir)
    with (
        kept or tempfile.TemporaryDirectory() as workdir,
        Run(config, workdir, environment, display.line, owner=True) as run,
    ):
        with Checkpoints(Path(workdir) / "warm_start", keep=2) as checkpoints:
            params = warm_start(run, run.initial_params(), checkpoints).params
        races = _Races(run, display, state.init(run.optimizer, params))
        with races.compiles_counted():
            races.warm_up(steps)
            races.calibrate(steps)
            rounds = [races.round(step, steps) for step in range(1, steps + 1)]
    result = bench_report.figures(rounds, races.facts)
    bench_report.show(display, result)
    if plot:
        _draw(Path(workdir), rounds, result)
    return result


def _bench_engines(config: Config, repeats: int) -> dict[str, Any]:
    """The in-process engine and servers, sampling turns of the longest length."""
    display, model, rollout = Display(), config.model, config.rollout
    # The sampler has its devices here although there are servers.
    local = dataclasses.replace(config, vllm=VLLMConfig())
    placement.prepare(local)
    places = placement.place(local)
    policy = models.build(model)
    params = placement.initializer(config, policy, places.mesh)()
    context_tokens = rollout.context_tokens
    compared: dict[str, Engine | RemoteEngine] = {
        "in process": in_process.make(
            places.samplers,
            policy,
            params,
            slots=max(_REQUESTS),
            context_tokens=context_tokens,
            steps_per_call=rollout.decode_steps_per_call,
            prefill_buckets=rollout.prefill_buckets,
        )
    }
    if config.vllm.servers:
        publisher = Publisher(config.vllm, model, context_tokens, display.line)
        compared["vLLM"] = VLLMEngine(
            config.vllm,
            context_tokens,
            model.vocab_size,
            publisher.publish,
            display.line,
        )
    loads = [
        engine_bench.Load(
            requests=requests,
            prompt_tokens=context_tokens - rollout.turn_tokens,
            tokens=rollout.turn_tokens,
            vocab_size=model.vocab_size,
            temperature=rollout.temperature,
        )
        for requests in _REQUESTS
    ]
    speeds = engine_bench.measure(compared, loads, repeats, params)
    for line in engine_bench.table(speeds, "vLLM" if "vLLM" in compared else None):
        display.line(line)
    return {"engines": engine_bench.record(speeds)}


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A release rule with its sums, which takes its turn in every step."""

    name: str
    release: str
    accumulator: str | None = None  # "plain" or "exact"; None: the config's


def contestants(config: Config) -> tuple[Contestant, ...]:
    """The release rules, and what exact sums are measured against."""
    rules = tuple(Contestant(release, release) for release in config.releases)
    plain = Contestant(bench_report.PLAIN, "trajectory", "plain")
    return (*rules, plain) if config.accumulator == "exact" else rules


class _Races:
    """The bench between its start and its last step."""

    def __init__(self, run: Run, display: Display, start: state.State):
        exact = run.config.accumulator == "exact"
        self.run = run
        self.display = display
        self.contestants = contestants(run.config)
        self.rows = 1 if exact else run.config.mesh.rows_per_call
        self.compiles = 0
        self._start = start
        self._update = state.Update(run.optimizer, run.config.optim.clip_norm, start)
        turns = "turn" in run.config.releases
        accumulators = {contestant.accumulator for contestant in self.contestants}
        self._idle = {kind: IdleWork(kind, turns) for kind in accumulators}

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
        """Compiles everything: a step of every contestant that is not measured."""
        compile_all(self.run, self._start.params, POLICY_VERSION)
        self._update.compile(self._start)
        self._measure_idle()  # programs of the others' sums
        for contestant in self.contestants:
            self._live(steps + 1, contestant, f"warm-up {contestant.name}")
        # As in training: a full collection stops every thread for 0.3 s.
        gc.freeze()

    def calibrate(self, steps: int) -> None:
        """Chooses the rows per call, and the scale of lognormal latencies."""
        run, params = self.run, self._start.params
        for _ in range(_IDLE_MEASUREMENTS):
            self._measure_idle()
        numbers = range(1, min(steps, _CALIBRATION_STEPS) + 1)
        with self.display.live("calibration"):
            sampled = [
                live.sample(run, params, POLICY_VERSION, step)[0] for step in numbers
            ]
            learner_secs = self._choose_rows(sampled)
            env = run.config.env
            if "lognormal" in (env.tool_latency.kind, env.verify_latency.kind):
                for scale, secs in live.scale_latencies(
                    run, params, POLICY_VERSION, numbers, learner_secs
                ):
                    self.display.line(f"latencies x {scale:.3f}: rollouts {secs:.2f} s")
        self.compiles = 0

    def _choose_rows(self, sampled: list[list[Trajectory]]) -> float:
        """Full calls or single ones; returns the learner's median seconds a step."""
        run, params = self.run, self._start.params
        if not all(sampled):
            raise StreamError("a step has no trajectory with tokens; look at the env")
        packing = "one trajectory a call"
        if self.rows > 1:
            buckets = live.kinds(run, itertools.chain(*sampled))
            idle = self._idle[None]
            alone, packed = (idle.batch_secs(buckets, r) for r in (1, self.rows))
            if packed > (1 - live.LEAST_GAIN) * alone:
                self.rows = 1
            packing = (
                f"full calls take {packed / alone:.2f} times as long as single ones; "
                f"with {self.rows} a call"
            )
        learner_secs = statistics.median(
            live.learner_secs(run, params, trajectories, self.rows)
            for trajectories in sampled
        )
        if learner_secs == 0:
            raise StreamError(
                "the learner has nothing to do: most steps have only groups that are "
                "uniform or failed; warm the policy up longer or take another env"
            )
        self.display.line(f"{packing} the learner takes {learner_secs:.2f} s a step")
        return learner_secs

    def round(self, step: int, steps: int) -> bench_report.Round:
        """One step of every contestant, whose turn comes earlier with every step."""
        self._measure_idle()
        turn = (step - 1) % len(self.contestants)
        results = {
            contestant.name: self._live(
                step, contestant, f"step {step}/{steps} {contestant.name}"
            )
            for contestant in (*self.contestants[turn:], *self.contestants[:turn])
        }
        names = [contestant.name for contestant in self.contestants]
        lives = {name: results[name][0] for name in names}
        costs = {name: cost for name, (_, cost) in results.items() if cost}
        times = [f"{n} {live.timing.step_secs:.2f} s" for n, live in lives.items()]
        self.display.line(f"step {step}/{steps}  {', '.join(times)}")
        contention = {
            name: self._idle[contestant.accumulator].contention(lives[name].step.calls)
            for name, contestant in zip(names, self.contestants, strict=True)
        }
        return bench_report.Round(lives, contention, costs)

    @property
    def facts(self) -> dict[str, Any]:
        """What belongs to the bench as a whole."""
        return {
            "compiles_after_warmup": self.compiles,
            "latency_scale": self.run.latency_scale,
            "rows_per_call": self.rows,
        }

    def _measure_idle(self) -> None:
        for idle in self._idle.values():
            idle.measure(self.run, self._start.params, POLICY_VERSION, self.rows)

    def _live(
        self, number: int, contestant: Contestant, title: str
    ) -> tuple[Live, bench_report.Cost | None]:
        """One step of a contestant, to its updated and published parameters."""
        run, params = self.run, self._start.params
        run.publish(params, POLICY_VERSION)
        donated = jax.block_until_ready(jax.tree.map(jnp.copy, self._start))
        members = run.config.rollout.groups_per_step * run.config.rollout.group_size
        # Looking takes time: where there is no teacher, nobody asks.
        devices = tuple(run.placement.mesh.devices.flat) if run.scoring else ()

        def on_progress(progress: Progress) -> None:
            self.display.update(progress)
            peak.look()

        def boundary(done: Step) -> None:
            peak.look()
            conclude(run, self._update, donated, done, POLICY_VERSION)

        with PeakBytes(devices) as peak, self.display.live(title):
            measured = live.live(
                run,
                params,
                POLICY_VERSION,
                number,
                contestant.release,
                rows=self.rows,
                accumulator=contestant.accumulator,
                boundary=boundary,
                progress=Progress(members, started_secs=time.monotonic()),
                on_progress=on_progress,
            )
        # Kept, the gradients of all steps would fill the learner's devices.
        step = dataclasses.replace(measured.step, gradient=None)
        measured = dataclasses.replace(measured, step=step)
        if not run.scoring:
            return measured, None
        tokens = sum(len(trajectory.ids) for trajectory in step.trajectories)
        return measured, bench_report.Cost(peak.bytes, step.teacher_tokens, tokens)


def _draw(
    workdir: Path, rounds: list[bench_report.Round], result: dict[str, Any]
) -> None:
    """The step of middle length as a timeline, and all of them as bars."""
    rules = [name for name in result["releases"] if name != bench_report.PLAIN]
    batch = [r.lives["batch"].timing.step_secs for r in rounds]
    middle = rounds[batch.index(statistics.median_low(batch))]
    pictures.draw_timeline(
        workdir / "bench_timeline.png",
        {release: middle.lives[release].spans for release in rules},
    )
    bars = {}
    for release in rules:
        figures = result["releases"][release]
        alone = figures["tail_secs"] - figures["boundary_secs"]
        bars[release] = pictures.Bar(
            step_secs=figures["step_secs"],
            rollout_secs=figures["rollout_secs"],
            busy_in_rollout_secs=max(0.0, figures["learner_secs"] - alone),
            boundary_secs=figures["boundary_secs"],
            predicted_secs=figures["predicted_secs"],
        )
    pictures.draw_bars(workdir / "bench.png", bars)


if __name__ == "__main__":
    run_command(
        bench,
        needs=("config",),
        flags={
            "steps": Flag(int, 5, "steps to measure"),
            "plot": Flag(bool, False, "draw bench_timeline.png and bench.png"),
            "engines": Flag(bool, False, "measure samplers instead"),
        },
    )
