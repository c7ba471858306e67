"""Trains a policy: warm start, then one streamed update per step.

    python -m thundersync_jax.train --config=configs/quickstart.py --workdir=DIR

The same command again resumes. A step whose gradient is exactly zero (nothing kept, or
every advantage 0 and no other term) updates nothing: parameters, optimizer state and
policy version stay, the step counts.
"""

import collections
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thundersync_jax.chat import base
from thundersync_jax.config import Config
from thundersync_jax.config.workdir import (
    RESULT_FILE,
    check_claim,
    save_result,
    saved_result,
)
from thundersync_jax.flags import run as run_command
from thundersync_jax.measure import live, replay
from thundersync_jax.metrics.progress import RunProgress
from thundersync_jax.metrics.records import known_mean, write_rollouts
from thundersync_jax.metrics.timing import StepTiming, step_timing, write_chrome_trace
from thundersync_jax.metrics.writer import Metrics, Sink, read
from thundersync_jax.ops.advantages import Estimator
from thundersync_jax.ops.losses import percentile
from thundersync_jax.run import policy_term, state
from thundersync_jax.run.checkpoint import Checkpoints, sha256
from thundersync_jax.run.compiling import compile_all
from thundersync_jax.run.heldout import Evaluation, heldout
from thundersync_jax.run.run import Factory, Run
from thundersync_jax.run.step import Step, conclude, run_step
from thundersync_jax.run.warm_start import POLICY_VERSION, warm_start
from thundersync_jax.stream.ledger import Report
from thundersync_jax.view import pictures
from thundersync_jax.view.display import Display, ReleaseRow, StepRow

_CLOSING_TRIES = 3  # steps, until one has a gradient to compare
_SHOWN_FAILURES = 3  # of a step; its trajectories' file has all
# Metrics that are fields of the stream's report.
_FROM_REPORT = (
    *("loss", "gradient_norm", "tokens", "streamed_share", "compiles"),
    *("kept_groups", "dropped_groups", "filtered_groups"),
    *("short_groups", "uniform_groups"),
    *("kept_members", "failed_members", "invalid_rewards"),
    *("direct", "streamed", "waited", "waited_for_bucket", "skipped"),
)


def train(
    config: Config,
    workdir: str | Path,
    *,
    environment: Factory | None = None,
    surrogate: policy_term.Factory | None = None,
    estimator: Estimator | Callable[..., Estimator] | None = None,
    sinks: Sequence[Sink] = (),
) -> dict[str, Any]:
    """Runs a config to its end in a work directory, from wherever it was.

    Args:
      config: The settings.
      workdir: Holds config, checkpoints, metrics, rollouts and pictures.
      environment: Makes the task set, in place of `config.env.factory`.
      surrogate: Makes the policy term of the loss, in place of `loss.surrogate`.
      estimator: The advantage, or a function of the `LossConfig` that returns it, in
        place of `loss.advantage`.
      sinks: Loggers beside metrics.jsonl, called as sink(step, scalars).

    Returns:
      The JSON object of `--json`.
    """
    workdir = Path(workdir)
    display = Display()
    if result := saved_result(workdir, config.steps):
        check_claim(workdir, config)
        display.line(f"finished already; the result is in {workdir / RESULT_FILE}")
        return result
    with (
        Run(
            config,
            workdir,
            environment,
            display.line,
            owner=True,
            surrogate=surrogate,
            estimator=estimator,
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
        clock = _Clock(facts["elapsed_secs"])
        update = state.Update(run.optimizer, config.optim.clip_norm, now)
        version = facts["version"]
        run.publish(now.params, version)
        compile_all(run, now.params, version)
        update.compile(now)
        # A full collection walks all that compiling left behind: 0.3 s in which every
        # thread stands still. Nothing of it will be freed.
        gc.freeze()
        progress = RunProgress(config.steps, steps_done=start)
        with Metrics(workdir, start + bool(start), sinks) as metrics:
            if not start:
                found = _evaluate(run, display, version, 0, "after the warm start")
                metrics.write(0, {**_heldout(found), "elapsed_secs": clock.secs})
            for step in range(start + 1, config.steps + 1):
                with display.live(progress.title):
                    now, version, scalars = _step(
                        run, display, progress, update, now, version, step
                    )
                if _due(step, config.evaluation.every_steps, config.steps):
                    found = _evaluate(run, display, version, step, "held-out")
                    scalars |= _heldout(found)
                metrics.write(step, scalars | {"elapsed_secs": clock.secs})
                if _due(step, config.checkpoint.every_steps, config.steps):
                    facts = {"version": version, "elapsed_secs": clock.secs}
                    facts["baselines"] = run.baselines.state()
                    checkpoints.save(step, now, facts)
        checkpoints.wait()
        _close(run, display, now, version, warm.history)
        result = _result(run, now, version, clock.secs)
    save_result(workdir, result)
    return result


def _step(run, display, progress, update, now, version, step):
    """One step: rollouts, gradient, update, publication, and its row."""
    jobs = run.train_jobs(step)
    counts = progress.begin(len(jobs), time.monotonic())
    stream = run.new_stream(now.params, version)
    done = run_step(run, stream, jobs, version, counts, display.update)
    sampled_by = version
    now, version, clipped = conclude(run, update, now, done, version)
    end = time.monotonic()
    progress.end(counts)
    run.track_baselines([t for t in done.trajectories if t.key[1:3] in done.advantages])
    write_rollouts(run.workdir, step, done.trajectories, done.advantages, run.chat)
    spans = run.timeline.spans(since=done.start_secs)
    timing = step_timing(spans, done.start_secs, end, run.config.mesh.replica)
    scalars = _scalars(run.config, done, timing, sampled_by, clipped)
    scalars |= run.server_metrics()
    display.row(_row(run.config, done, scalars, step))
    _warn_of_mismatch(run, scalars, step)
    for failed in done.failures[:_SHOWN_FAILURES]:
        display.line(f"{failed.key}: {failed.stop_reason.value}: {failed.reason}")
    return now, version, scalars


def _warn_of_mismatch(run: Run, scalars: dict[str, float], step: int) -> None:
    mean, limit = scalars["mismatch_mean"], run.config.rollout.mismatch_warning
    if mean > limit:
        run.warn_once(
            f"sampler and learner disagree: mean |log-ratio| {mean:.2g} nats at step "
            f"{step}, above rollout.mismatch_warning {limit:g}; this is said once, "
            "mismatch_mean in metrics.jsonl has every step"
        )


def _scalars(
    config: Config, done: Step, timing: StepTiming, version: int, clipped: float
) -> dict[str, float]:
    report, trajectories = done.report, done.trajectories
    # Of the verdicts themselves: the stream was told of them less their penalties.
    rewards = [t.reward for t in trajectories if t.reward is not None]
    known = {}
    if rewards or config.loss.advantage != "none":  # without rewards in the loss
        known["reward_mean"] = known_mean(rewards).mean  # verdicts may be missing
        known["success_share"] = _mean([r == 1.0 for r in rewards])
    if done.teacher_tokens:
        tokens = sum(len(t.ids) for t in trajectories)
        share = done.teacher_tokens / max(tokens, 1)
        known["teacher_tokens_over_trajectory_tokens"] = share
    return (
        _from_report(report)
        | known
        | {
            "step_secs": timing.step_secs,
            "rollout_secs": timing.rollout_secs,
            "learner_secs": timing.learner_secs,
            "learner_busy_share": 1.0 - timing.idle_fraction,
            "tail_secs": timing.tail_secs,
            "gradient_norm_clipped": clipped,
            "learning_rate": float(state.learning_rate(config.optim, version)),
            "action_tokens_mean": _mean([t.action_tokens for t in trajectories]),
            "turns_mean": _mean([t.turns for t in trajectories]),
            "policy_version": version,
            "staleness_max": max(
                (version - t.policy_version for t in trajectories), default=0
            ),
        }
    )


def _from_report(report: Report) -> dict[str, float]:
    """Its fields, and its sums over tokens as means."""
    found = {name: getattr(report, name) for name in _FROM_REPORT}
    for name, total in report.metrics.items():  # over the kept members
        found[name] = total / (report.tokens or np.nan)
    sums = collections.defaultdict(lambda: np.nan, report.diagnostics)
    tokens = sums["mismatch_tokens"] or np.nan  # of the gradients that were computed
    sizes = {k.removeprefix("mismatch_"): x for k, x in report.diagnostics.items()}
    return found | {
        "mismatch_mean": sums["mismatch_abs_log_ratio"] / tokens,
        "mismatch_max": sums["mismatch_max_abs_log_ratio"],
        "mismatch_kl": sums["mismatch_kl"] / tokens,
        "mismatch_p99": percentile(sizes, 99) if sizes else np.nan,
        "mismatch_truncated_share": sums["mismatch_truncated"] / tokens,
    }


def _row(config: Config, done: Step, scalars: dict[str, float], step: int) -> StepRow:
    return StepRow(
        step=step,
        steps=config.steps,
        reward=scalars.get("reward_mean"),
        success=scalars.get("success_share"),
        gradient_norm=scalars["gradient_norm"],
        kept_groups=done.report.kept_groups,
        groups=config.rollout.groups_per_step,
        uniform_groups=done.report.uniform_groups,
        teacher_kl=scalars.get("teacher_kl"),
        streamed_share=done.report.streamed_share,
        rollout_secs=scalars["rollout_secs"],
        step_secs=scalars["step_secs"],
        learner_busy=scalars["learner_busy_share"],
        staleness=scalars["staleness_max"],
    )


def _evaluate(run, display, version, step, label) -> Evaluation:
    settings = run.config.evaluation
    found = heldout(run, version, settings.questions, settings.samples)
    display.evaluation(label, int(found.successes.sum()), found.answers)
    if found.trajectories:
        one = found.trajectories[step % len(found.trajectories)]
        display.sample(one, pieces=base.pieces(run.chat, one))
    return found


def _heldout(found: Evaluation) -> dict[str, float]:
    low, high = found.interval
    return {
        "heldout_success": found.success,
        "heldout_success_low": low,
        "heldout_success_high": high,
    }


def _close(run: Run, display: Display, now: state.State, version: int, warm) -> None:
    """One more step under every release rule, as a table and as pictures."""
    first = run.config.steps + 1
    for step in range(first, first + _CLOSING_TRIES):
        lives = live.compare(run, now.params, version, step)
        batch = lives["batch"].step
        if batch.report.gradient_norm > 0:
            break
    control = None
    if batch.report.gradient_norm > 0:
        control = replay.control_difference(
            run, now.params, batch.trajectories, batch.gradient, seed=step
        )
    display.closing_table(
        [
            ReleaseRow(
                release,
                one.timing.step_secs,
                one.timing.idle_fraction,
                one.timing.tail_secs,
                one.predicted_secs,
                None
                if control is None
                else replay.relative_difference(one.step.gradient, batch.gradient),
                control,
            )
            for release, one in lives.items()
        ]
    )
    if not run.config.loss.has_additive:
        groups: dict[int, list[float]] = {}
        for (group, _), advantage in batch.advantages.items():
            groups.setdefault(group, []).append(advantage)
        idle = sum(not any(advantages) for advantages in groups.values())
        display.line(
            f"{idle} of {len(groups)} groups have advantages of 0 alone, no gradient: "
            "only batch and group release know in time."
        )
    write_chrome_trace(run.workdir / "timeline.json", run.timeline.spans())
    _draw(run, display, {release: one.spans for release, one in lives.items()}, warm)


def _draw(run: Run, display: Display, panels, warm) -> None:
    if not pictures.available():
        display.line("no pictures: pip install 'thundersync_jax[plots]' brings them")
        return
    points = list(warm)
    for row in read(run.workdir):
        if "heldout_success" in row:
            names = ("heldout_success", "heldout_success_low", "heldout_success_high")
            points.append((row["elapsed_secs"], *(row[name] for name in names)))
    pictures.draw_timeline(run.workdir / "timeline.png", panels)
    pictures.draw_success(
        run.workdir / "success.png",
        points,
        warm[-1][0] if warm else 0.0,
    )


def _result(run, now, version, secs) -> dict[str, Any]:
    rows = read(run.workdir)
    measured = [row for row in rows if "heldout_success" in row]
    return {
        "heldout_success": {
            "warm_start": measured[0]["heldout_success"],
            "end": measured[-1]["heldout_success"],
        },
        "questions": run.config.evaluation.questions,
        "steps": run.config.steps,
        "updates": version - POLICY_VERSION,
        "wall_secs": secs,
        "sha256": sha256(now),
    }


class _Clock:
    """Seconds of the run so far, pauses between its processes left out."""

    def __init__(self, before_secs: float):
        self._origin = time.monotonic() - before_secs

    @property
    def secs(self) -> float:
        return time.monotonic() - self._origin


def _mean(values: list[float]) -> float:
    return float(np.mean(values or [np.nan]))


def _due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


if __name__ == "__main__":
    run_command(train)
