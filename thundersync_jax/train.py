"""Trains a policy: warm start, then one streamed update per step.

    python -m thundersync_jax.train --config=configs/quickstart.py --workdir=DIR

The same command again resumes. A step whose gradient is exactly zero counts, but leaves
parameters, optimizer state and policy version as they are.
"""

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thundersync_jax.chat import base
from thundersync_jax.config import Config
from thundersync_jax.config.workdir import (
    RESULT_FILE,
    check_claim,
    save_result,
    saved_result,
)
from thundersync_jax.flags import run as run_command
from thundersync_jax.measure import live, steps
from thundersync_jax.metrics.records import write_rollouts
from thundersync_jax.metrics.timing import RunProgress, step_timing, write_chrome_trace
from thundersync_jax.metrics.writer import Metrics, Sink, named_sinks, read
from thundersync_jax.models.base import ModelFactory
from thundersync_jax.ops.advantages import Estimator
from thundersync_jax.rollout import interrupts
from thundersync_jax.run import policy_term, state
from thundersync_jax.run.checkpoint import Checkpoints, sha256
from thundersync_jax.run.feed import compile_all
from thundersync_jax.run.run import Factory, Run
from thundersync_jax.run.step import conclude, heldout, run_step
from thundersync_jax.run.warm_start import POLICY_VERSION, warm_start
from thundersync_jax.view import curves, pictures
from thundersync_jax.view.display import Display, StepRow

_SHOWN_FAILURES = 3  # of a step; its trajectories' file has all
_SAVE_SECS = 20.0  # for the checkpoint that SIGTERM asks for


def train(
    config: Config,
    workdir: str | Path,
    *,
    environment: Factory | None = None,
    surrogate: policy_term.Factory | None = None,
    estimator: Estimator | Callable[..., Estimator] | None = None,
    model: ModelFactory | None = None,
    optimizer: state.Optimizer | state.Factory | None = None,
    sinks: Sequence[Sink] = (),
) -> dict[str, Any]:
    """Runs a config to its end in a work directory, from wherever it was.

    Args:
      workdir: Holds config, checkpoints, metrics, rollouts and pictures.
      environment: Makes the task set, in place of `config.env.factory`.
      surrogate: Makes the policy term of the loss, in place of `loss.surrogate`.
      estimator: The advantage, or a function of the `LossConfig` that returns it, in
        place of `loss.advantage`.
      model: Makes the policy, in place of `config.model.factory`.
      optimizer: An optax transformation, or a function as `optim.factory` names it, in
        place of AdamW.
      sinks: Loggers beside those of `metrics.sinks`, called as sink(step, scalars).

    Returns:
      The JSON object of `--json`.
    """
    workdir = Path(workdir)
    display = Display()
    if result := saved_result(workdir, config.steps):
        check_claim(workdir, config)
        display.line(f"finished already; the result is in {workdir / RESULT_FILE}")
        return result
    display.line("preparing tasks, model and sampler")
    with (
        display.patience() as started,
        Run(
            config,
            workdir,
            environment,
            display.line,
            owner=True,
            surrogate=surrogate,
            estimator=estimator,
            model=model,
            optimizer=optimizer,
        ) as run,
        Checkpoints(workdir / "warm_start", keep=2) as warm_checkpoints,
        Checkpoints(workdir / "checkpoints", config.checkpoint.keep) as checkpoints,
    ):
        warm = warm_start(run, run.initial_params(), warm_checkpoints)
        now = state.init(run.optimizer, warm.params)
        facts = {"version": POLICY_VERSION, "elapsed_secs": warm.elapsed_secs}
        start = checkpoints.latest() or 0
        if start:
            now, facts = checkpoints.restore(start, now)
            run.restore_baselines(facts["baselines"])
            display.line(f"resumed after step {start}")
        origin = time.monotonic() - facts["elapsed_secs"]

        def elapsed_secs() -> float:  # pauses between processes left out
            return time.monotonic() - origin

        loop = _Loop(run, display, now, facts["version"], start)
        first = start + bool(start)  # to be written
        loggers = [*named_sinks(config, workdir, first), *sinks]
        with Metrics(workdir, first, loggers, display.line) as metrics:
            if not start:
                row = loop.evaluate(0, "after the warm start")
                metrics.write(0, row | {"elapsed_secs": elapsed_secs()})
            started()
            written = start  # the latest step with a row
            try:
                for step in range(start + 1, config.steps + 1):
                    row = loop.step(step)
                    if _due(step, config.evaluation.every_steps, config.steps):
                        row |= loop.evaluate(step, "held-out")
                    metrics.write(step, row | {"elapsed_secs": elapsed_secs()})
                    written = step
                    if _due(step, config.checkpoint.every_steps, config.steps):
                        checkpoints.save(step, loop.now, loop.facts(elapsed_secs()))
            except KeyboardInterrupt:
                if interrupts.terminated() and loop.whole == written:
                    _save_at_once(checkpoints, written, loop, elapsed_secs())
                raise
        checkpoints.wait()
        if config.closing_comparison:
            live.closing_comparison(run, display, loop.now.params, loop.version)
        rows = read(workdir)
        saved = steps.saved(rows, config.release)
        if saved:
            steps.show_saved(display, saved, config.release)
        _draw(config, workdir, display, rows, warm.history)
        result = _result(config, rows, loop, elapsed_secs()) | {"saved": saved}
    save_result(workdir, result)
    return result


class _Loop:
    """The steps of a run, one after the other.

    Attributes:
      now: Parameters and optimizer state.
      version: Policy version of `now`.
      whole: The step that `now` is the end of; None while one is being updated.
    """

    def __init__(
        self, run: Run, display: Display, now: state.State, version: int, start: int
    ):
        self.now, self.version = now, version
        self.whole: int | None = start
        self._run, self._display = run, display
        self._update = state.Update(run.optimizer, run.config.optim.clip_norm, now)
        run.publish(now.params, version)
        compile_all(run, now.params, version)
        self._update.compile(now)
        self._later = steps.LaterReleases(run.config, run.judged, run.additive)
        self._later.measure(run, now.params, version)
        # A full collection walks all that compiling left: every thread stops for 0.3 s.
        gc.freeze()
        self._progress = RunProgress(run.config.steps, steps_done=start)

    def step(self, step: int) -> dict[str, float]:
        """Rollouts, gradient, update and publication; returns their metrics."""
        run, display, progress = self._run, self._display, self._progress
        run.artefacts.begin(f"step_{step:06d}")
        with display.live(progress.title):
            jobs = run.train_jobs(step)
            counts = progress.begin(len(jobs), time.monotonic())
            stream = run.new_stream(self.now.params, self.version)
            done = run_step(run, stream, jobs, self.version, counts, display.update)
            sampled_by, self.whole = self.version, None  # the update donates `now`
            self.now, self.version, clipped = conclude(
                run, self._update, self.now, done, sampled_by
            )
            self.whole = step
            end = time.monotonic()
            progress.end(counts)
        counted = [t for t in done.trajectories if t.key[1:3] in done.advantages]
        run.track_baselines(counted)
        kept = run.config.metrics
        if kept.rollouts != "off":
            write_rollouts(
                run.workdir,
                step,
                done.trajectories,
                done.advantages,
                run.chat,
                kept.rollouts == "gzip",
                kept.rollout_bytes,
            )
        spans = run.timeline.spans(since=done.start_secs)
        timing = step_timing(spans, done.start_secs, end, run.config.mesh.replica)
        row = steps.step_metrics(run.config, done, timing, sampled_by, clipped)
        row |= self._later.step(done, end)
        row |= run.server_metrics()
        display.row(_display_row(run.config, row, step))
        _warn_of_mismatch(run, row["mismatch_mean"], step)
        for failed in done.failures[:_SHOWN_FAILURES]:
            display.line(f"{failed.key}: {failed.stop_reason.value}: {failed.reason}")
        if step == run.config.steps:
            write_chrome_trace(run.workdir / "timeline.json", run.timeline.spans())
            if pictures.available():
                pictures.draw_timeline(
                    run.workdir / "timeline.png",
                    {run.config.release: spans},
                    row.get("predicted_batch_secs"),
                )
        return row

    def evaluate(self, step: int, label: str) -> dict[str, float]:
        """Held-out questions, one of them shown; returns their metrics."""
        settings, run = self._run.config.evaluation, self._run
        run.artefacts.begin(f"heldout_{step:06d}")
        evaluation = heldout(run, self.version, settings.questions, settings.samples)
        self._display.evaluation(label, evaluation)
        if answers := evaluation.trajectories:
            shown = answers[step % len(answers)]
            self._display.sample(shown, pieces=base.pieces(run.chat, shown))
        low, high = evaluation.interval
        return {
            "heldout_success": evaluation.success,
            "heldout_success_low": low,
            "heldout_success_high": high,
            "heldout_reward": evaluation.reward,
            **{f"heldout_reward_{name}": x for name, x in evaluation.parts.items()},
        }

    def facts(self, elapsed_secs: float) -> dict[str, Any]:
        """What a checkpoint holds beside the state."""
        return {
            "version": self.version,
            "elapsed_secs": elapsed_secs,
            "baselines": self._run.baselines.state(),
        }


def _save_at_once(
    checkpoints: Checkpoints, step: int, loop: _Loop, elapsed_secs: float
) -> None:
    """Saves the step that has just ended, or waits until it is saved."""
    with interrupts.patience(_SAVE_SECS):
        if step > (checkpoints.latest() or 0):
            checkpoints.save(step, loop.now, loop.facts(elapsed_secs))
        checkpoints.wait()


def _warn_of_mismatch(run: Run, mean: float, step: int) -> None:
    limit = run.config.rollout.mismatch_warning
    if mean > limit:
        run.warn_once(
            f"sampler and learner disagree: mean |log-ratio| {mean:.2g} nats at step "
            f"{step}, above rollout.mismatch_warning {limit:g}; this is printed once, "
            "mismatch_mean in metrics.jsonl has every step"
        )


def _display_row(config: Config, row: dict[str, float], step: int) -> StepRow:
    return StepRow(
        step=step,
        steps=config.steps,
        reward=row.get("reward_mean"),
        success=row.get("success_share"),
        gradient_norm=row["gradient_norm"],
        kept_groups=row["kept_groups"],
        groups=config.rollout.groups_per_step,
        uniform_groups=row["uniform_groups"],
        teacher_kl=row.get("teacher_kl"),
        streamed_share=row["streamed_share"],
        rollout_secs=row["rollout_secs"],
        step_secs=row["step_secs"],
        learner_busy=row["learner_busy_share"],
        staleness=row["staleness_max"],
    )


def _draw(config, workdir, display, rows, warm) -> None:
    """Success over time, and the seconds that streaming saved over the steps."""
    if not pictures.available():
        display.line("no pictures: pip install 'thundersync_jax[plots]' brings them")
        return
    points = list(warm)
    for row in rows:
        if "heldout_success" in row:
            names = ("heldout_success", "heldout_success_low", "heldout_success_high")
            points.append((row["elapsed_secs"], *(row[name] for name in names)))
    warm_start_secs = warm[-1][0] if warm else 0.0
    curves.draw_success(workdir / "success.png", points, warm_start_secs)
    if secs := steps.saved_secs(rows, config.release):
        curves.draw_saved(workdir / "saved.png", secs, config.release)


def _result(
    config: Config, rows: list[dict[str, Any]], loop: _Loop, secs: float
) -> dict[str, Any]:
    measured = [row for row in rows if "heldout_success" in row]
    first, last = (measured[0], measured[-1]) if measured else ({}, {})
    return {
        **{
            name: {"warm_start": first.get(name), "end": last.get(name)}
            for name in ("heldout_success", "heldout_reward")
        },
        "questions": config.evaluation.questions,
        "steps": config.steps,
        "updates": loop.version - POLICY_VERSION,
        "wall_secs": secs,
        "sha256": sha256(loop.now),
    }


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


if __name__ == "__main__":
    run_command(train)
