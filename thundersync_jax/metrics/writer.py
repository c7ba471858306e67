"""Metrics: one JSON line per step, and the same numbers to whoever else listens.

A sink is a function of (step, numbers by name); where it has a method `close`, that is
called at the end. `METRICS` is what the trainer writes; users may write other names.
"""

import json
import math
import numbers
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thundersync_jax.config import Config, dotted
from thundersync_jax.config.checks import installed
from thundersync_jax.config.settings import config_dict
from thundersync_jax.config.workdir import replace_text
from thundersync_jax.errors import ConfigError
from thundersync_jax.types import StopReason

Scalar = float | int | bool
Sink = Callable[[int, Mapping[str, Scalar]], None]

FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_WANDB_ID = "wandb_id"  # a file with the id of the run, which a resume goes on with

# name: unit, then what is measured
METRICS: dict[str, str] = {
    "step_secs": "seconds; the whole step, from its first prompt to its new parameters",
    "rollout_secs": "seconds; from the first prompt to the last verdict",
    "learner_secs": "seconds; learner calls, added up over replicas",
    "learner_busy_share": "share; of the step in which the learner was computing",
    "tail_secs": "seconds; from the last verdict to the new parameters",
    "predicted_batch_secs": "seconds; the step by the formula, under batch release",
    "predicted_group_secs": "seconds; the step by the formula, under group release",
    "contention": "1; calls beside rollouts over the same calls on an idle learner",
    "elapsed_secs": "seconds; since the work directory's run began, pauses left out",
    "reward_mean": "reward; mean over the members that have one, before any penalty",
    "success_share": "share; of the members with a reward whose reward is exactly 1",
    "heldout_success": "share; of held-out answers whose reward is exactly 1",
    "heldout_success_low": "share; lower end of its 95 % interval",
    "heldout_success_high": "share; upper end of its 95 % interval",
    "heldout_reward": "reward; mean over the held-out answers that have one",
    "loss": "1; the step's loss, at the parameters that sampled it",
    "gradient_norm": "1; L2 norm of the step's gradient, before clipping",
    "gradient_norm_clipped": "1; the same norm after clipping",
    "learning_rate": "1; of this step's update, warm-up applied",
    "tokens": "tokens; trained ones of the kept members",
    "action_tokens_mean": "tokens; trained tokens per trajectory",
    "turns_mean": "turns; per trajectory",
    "samples_mean": "samples; per trajectory, more than 1 where a history is rewritten",
    "kept_groups": "groups; that the gradient consists of, uniform ones included",
    "dropped_groups": "groups; left out because members failed",
    "filtered_groups": "groups; left out because their rewards were all equal",
    "short_groups": "groups; kept ones of which members failed that nobody replaced",
    "uniform_groups": "groups; kept ones whose rewards are all equal",
    "kept_members": "trajectories; of the kept groups, failed ones left out",
    "failed_members": "trajectories; that ended without a reward",
    "replaced_members": "trajectories; failed ones in whose place others came",
    **{
        f"stop_{reason.value}": f"trajectories; whose stop reason was {reason.value!r}"
        for reason in StopReason
    },
    "truncated_share": "share; that ended at a limit of tokens, turns, context or time",
    "invalid_rewards": "trajectories; failed ones whose verdict was no finite number",
    "direct": "trajectories; whose advantage was known when their gradient started",
    "streamed": "trajectories; that went through group sums and count",
    "streamed_share": "share; of the trajectories with a gradient, those streamed",
    "waited": "trajectories; ready before their group and yet direct: no place free",
    "waited_for_bucket": "trajectories; that waited with a third distinct reward",
    "skipped": "trajectories; with advantage 0, which cost no compute",
    "compiles": "programs; compiled by the learner during the step",
    "mismatch_mean": "nats; mean |log-ratio| of learner to sampler per computed token",
    "mismatch_max": "nats; the largest |log-ratio| of them",
    "mismatch_p99": "nats; 99 % of these |log-ratio|s are below it",
    "mismatch_truncated_share": "share; of these tokens, learner/sampler above the cap",
    "mismatch_kl": "nats; mean estimate per token of KL(sampler || learner)",
    "probe_difference": "nats; of servers from the learner, after the last publication",
    "retried_requests": "requests; tried again on servers during the step",
    "teacher_kl": "nats; mean per trained token of loss.distill, student to teacher",
    "teacher_tokens_over_trajectory_tokens": "share; run through the teacher, of all",
    "kl": "nats; mean per trained token of the KL to the reference, with loss.kl_coef",
    "entropy": "nats; mean per trained token of the policy's, with loss.entropy_coef",
    "policy_version": "updates; behind the parameters that sampled the step",
    "staleness_max": "updates; between sampling and learning, always 0",
}


class Metrics:
    """The metrics of a run: `metrics.jsonl`, and what sinks make of the same numbers.

    A line is with the operating system when `write` returns, so a killed process loses
    none. A sink that raises is reported once, and everything else goes on.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        resume_step: int | None = None,
        sinks: Sequence[Sink] = (),
        on_line: Callable[[str], None] = print,
    ):
        """Opens the file, and takes out what would come twice.

        Args:
          resume_step: The first step that will be written: lines at or after it are
            dropped. None keeps every whole line.
          sinks: Other loggers, called as sink(step, scalars) after each line.
          on_line: Called with one line about a sink that raises.
        """
        path = Path(workdir) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        self._names = _trim(path, resume_step)  # of what is written, by step
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115, closed in close
        self._sinks = tuple(sinks)
        self._on_line, self._reported = on_line, set()

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes numbers of a step by name, each once: of Python, numpy or jax.

        What comes after other steps gets a line of its own, which `read` puts in place.
        What is not finite is null in the file, since JSON knows no NaN.

        Raises:
          ValueError: A number again, or a value that is no number.
        """
        plain = {name: _plain(name, value) for name, value in scalars.items()}
        names = self._names.setdefault(step, set())
        if twice := sorted(names & plain.keys()):
            raise ValueError(
                f"metric {twice[0]!r} of step {step} is written already; a step has "
                "one number of a name. Collect them, then write."
            )
        line = {"step": step} | {k: _finite(v) for k, v in plain.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        names.update(plain)
        for sink in self._sinks:
            self._protected(sink, sink, step, plain)

    def close(self) -> None:
        """Closes the file and the sinks; there is nothing left to write."""
        self._file.close()
        for sink in self._sinks:
            if hasattr(sink, "close"):
                self._protected(sink, sink.close)

    def _protected(self, sink: Sink, function: Callable[..., None], *arguments) -> None:
        try:
            function(*arguments)
        except Exception as error:  # whatever a logger meets, the run does not end
            if id(sink) not in self._reported:
                self._reported.add(id(sink))
                name = getattr(sink, "__qualname__", type(sink).__qualname__)
                text = " ".join(str(error).split())
                self._on_line(
                    f"the metrics sink {name} failed with {type(error).__name__}: "
                    f"{text}; training goes on, metrics.jsonl has every number, and "
                    "further errors of this sink are not printed"
                )


def named_sinks(
    config: Config, workdir: str | os.PathLike, resume_step: int | None = None
) -> list[Sink]:
    """The sinks of a config from `resume_step` on, TensorBoard only where installed.

    Raises:
      ConfigError: wandb is not installed, or there is no function of that name.
    """
    sinks: list[Sink] = []
    for name in config.metrics.sinks:
        if name == "tensorboard":
            sinks += _tensorboard(Path(workdir), resume_step)
        elif name == "wandb":
            sinks.append(_Wandb(config, Path(workdir)))
        else:
            parameters = ["step", "scalars"]
            sinks.append(dotted.load("metrics.sinks", name, parameters))
    return sinks


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """One dict per step in order, "step" among its keys; torn lines are left out.

    Raises:
      ConfigError: A line whose step is no whole number; the line is named.
    """
    path = Path(workdir) / FILE
    steps: dict[int, dict[str, Any]] = {}
    for _, line in _whole_lines(path) if path.exists() else ():
        steps.setdefault(line["step"], {}).update(line)
    return [steps[step] for step in sorted(steps)]


def _trim(path: Path, resume_step: int | None) -> dict[int, set[str]]:
    """Keeps the whole lines before a step; returns the names they have, by step."""
    names: dict[int, set[str]] = {}
    if not path.exists():
        return names
    kept = [
        (text, line)
        for text, line in _whole_lines(path)
        if resume_step is None or line["step"] < resume_step
    ]
    for _, line in kept:
        names.setdefault(line["step"], set()).update(line.keys() - {"step"})
    text = "".join(text for text, _ in kept)
    if text != path.read_text(encoding="utf-8", errors="replace"):
        replace_text(path, text)
    return names


def _whole_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    lines = []
    # Whoever was killed while writing may have cut a character in two.
    text = path.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        try:
            scalars = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and isinstance(scalars, dict) and "step" in scalars:
            if type(scalars["step"]) is not int:
                raise ConfigError(
                    f"{path}:{number} has step {scalars['step']!r}, expected a whole "
                    "number. Correct or delete that line."
                )
            lines.append((line, scalars))
    return lines


def _plain(name: str, value: Any) -> Scalar:
    if isinstance(value, bool | int | float):
        # numpy's float64 is a float to Python, and json would print it otherwise.
        value = getattr(value, "item", lambda: value)()
    elif np.shape(value) == () and hasattr(value, "dtype"):
        value = np.asarray(value).item()
    if name == "step" or not isinstance(value, numbers.Real):
        raise ValueError(
            f"metric {name!r} is {value!r}, expected a single number, and a name other "
            "than 'step'. Reduce it first."
        )
    return value


def _finite(value: Scalar) -> Scalar | None:
    return value if math.isfinite(value) else None


def _tensorboard(workdir: Path, resume_step: int | None) -> list[Sink]:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return []
    # TensorBoard then forgets what an earlier run wrote from this step on.
    folder = str(workdir / TENSORBOARD_FOLDER)
    return [_TensorBoard(SummaryWriter(folder, purge_step=resume_step))]


class _TensorBoard:
    """Event files of the `tensorboard` extra."""

    def __init__(self, writer: Any):
        self._writer = writer

    def __call__(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        for name, value in scalars.items():
            if math.isfinite(value):  # it would print a warning
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A Weights & Biases run; WANDB_MODE and WANDB_PROJECT say where, as ever."""

    def __init__(self, config: Config, workdir: Path):
        wandb = installed("wandb", "metrics.sinks", "wandb")
        path = workdir / _WANDB_ID
        if not path.exists():
            replace_text(path, uuid.uuid4().hex)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "thundersync_jax"),
            name=workdir.name,
            dir=str(workdir),
            id=path.read_text(encoding="utf-8"),
            resume="allow",
            config=config_dict(config),
        )

    def __call__(self, step: int, scalars: Mapping[str, Scalar]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()
