"""What is measured of a run's steps: a row of metrics each, and what they saved.

When verdicts came in and what gradient calls took tells what the same step would have
taken under a rule that releases later; `timing` has the formula.
"""

import collections
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from thundersync_jax.config import Config
from thundersync_jax.measure.live import released_secs
from thundersync_jax.metrics.learner_clock import Ran
from thundersync_jax.metrics.records import known_mean, part_means, stop_metrics
from thundersync_jax.metrics.timing import StepTiming, predicted_step_secs
from thundersync_jax.ops.losses import percentile
from thundersync_jax.run import state
from thundersync_jax.run.feed import compile_all, made_up_calls
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import Step
from thundersync_jax.stream.ledger import Report
from thundersync_jax.stream.schedule import Call, Prompt, TurnCall
from thundersync_jax.view import tables
from thundersync_jax.view.display import Display
from thundersync_jax.view.tables import Column

_PASSES = 4  # over the gradient programs, to measure them before the first step
_MEASURED_SECS = 2.0  # after which no further pass begins
_MEMBERS = 4  # calls of a kind in one measurement of a benchmark
_RECENT_CALLS = 64  # of a shape: a drifting machine drifts for both sides of a ratio
_FROM_REPORT = (  # metrics that are fields of the stream's report
    *("loss", "gradient_norm", "tokens", "streamed_share", "compiles"),
    *("kept_groups", "dropped_groups", "filtered_groups"),
    *("short_groups", "uniform_groups"),
    *("kept_members", "failed_members", "replaced_members", "invalid_rewards"),
    *("direct", "streamed", "waited", "waited_for_bucket", "skipped"),
)


def step_metrics(
    config: Config, step: Step, timing: StepTiming, version: int, clipped: float
) -> dict[str, float]:
    """One step's row of metrics.jsonl.

    Policy `version` sampled it; its gradient's norm after clipping is `clipped`.
    """
    trajectories = step.trajectories
    # Of the verdicts themselves; the stream has them less their penalties.
    rewards = [t.reward for t in trajectories if t.reward is not None]
    known = {}
    if rewards or config.loss.advantage != "none":  # without rewards in the loss
        known["reward_mean"] = known_mean(rewards).mean  # verdicts may be missing
        known["success_share"] = _mean([r == 1.0 for r in rewards])
    for name, mean in part_means(trajectories).items():
        known[f"reward_{name}"] = mean
    if step.teacher_tokens:
        tokens = sum(len(t.ids) for t in trajectories)
        share = step.teacher_tokens / max(tokens, 1)
        known["teacher_tokens_over_trajectory_tokens"] = share
    staleness = (version - t.policy_version for t in trajectories)
    return {
        **_report_metrics(step.report),
        **known,
        **stop_metrics(step.stop_reasons),
        "step_secs": timing.step_secs,
        "rollout_secs": timing.rollout_secs,
        "learner_secs": timing.learner_secs,
        "learner_busy_share": 1.0 - timing.idle_fraction,
        "tail_secs": timing.tail_secs,
        "gradient_norm_clipped": clipped,
        "learning_rate": float(state.learning_rate(config.optim, version)),
        "action_tokens_mean": _mean([t.action_tokens for t in trajectories]),
        "turns_mean": _mean([t.turns for t in trajectories]),
        "samples_mean": _mean([len(t.starts) for t in trajectories]),
        "policy_version": version,
        "staleness_max": max(staleness, default=0),
    }


def _report_metrics(report: Report) -> dict[str, float]:
    """Fields of a stream's report, and its sums over tokens as means."""
    metrics = {name: getattr(report, name) for name in _FROM_REPORT}
    for name, total in report.metrics.items():  # over the kept members
        metrics[name] = total / (report.tokens or np.nan)
    sums = collections.defaultdict(lambda: np.nan, report.diagnostics)
    tokens = sums["mismatch_tokens"] or np.nan  # of the gradients that were computed
    sizes = {k.removeprefix("mismatch_"): x for k, x in report.diagnostics.items()}
    return metrics | {
        "mismatch_mean": sums["mismatch_abs_log_ratio"] / tokens,
        "mismatch_max": sums["mismatch_max_abs_log_ratio"],
        "mismatch_kl": sums["mismatch_kl"] / tokens,
        "mismatch_p99": percentile(sizes, 99) if sizes else np.nan,
        "mismatch_truncated_share": sums["mismatch_truncated"] / tokens,
    }


class Shape(NamedTuple):
    """What decides how long a gradient call takes alone."""

    rows: int
    length: Any
    kind: Literal["direct", "streamed", "turn", "replay"]


def shape(ran: Ran) -> Shape:
    """The shape of a call that ran, of samples."""
    call = ran.call
    if isinstance(call, TurnCall):
        return Shape(1, _length(call.item.bucket), "replay" if call.replay else "turn")
    kind = "direct" if call.place is None else "streamed"
    return Shape(call.rows, _length(call.items[0].bucket), kind)


def _length(bucket: Any) -> Any:
    """A bucket of the learner, without the group whose prompt a sample continues."""
    return bucket[:3]


class IdleWork:
    """Medians of the newest calls on an otherwise idle learner, by shape.

    `accumulator` is None for the config's sums; `turns` adds calls of the turn rule.
    """

    def __init__(self, accumulator: str | None = None, turns: bool = False):
        self._accumulator = accumulator
        self._turns = turns
        self._secs: dict[Shape, collections.deque[float]] = {}

    def measure(self, run: Run, params: Any, version: int, rows: int) -> None:
        """Runs made-up members of every bucket, while nothing else runs."""
        sums = self._accumulator
        run.clock.take()
        made_up_calls(run, params, version, "trajectory", 1, _MEMBERS, sums)
        for n in dict.fromkeys((1, rows)):
            made_up_calls(run, params, version, "batch", n, _MEMBERS * n, sums)
        if self._turns:
            made_up_calls(run, params, version, "turn", rows=1, members=1)
        for ran in run.clock.take():
            self.add(ran)

    def add(self, ran: Ran) -> None:
        """Takes one call that ran alone."""
        if not isinstance(ran.call, Prompt):
            recent = collections.deque(maxlen=_RECENT_CALLS)
            self._secs.setdefault(shape(ran), recent).append(ran.secs)

    def contention(self, calls: Iterable[Ran]) -> float:
        """The work of calls over that of the same calls on an idle learner, or NaN.

        Shared prompts are left out, and calls of a shape that never ran alone.
        """
        samples = [ran for ran in calls if not isinstance(ran.call, Prompt)]
        pairs = [(ran.secs, self._idle_secs(shape(ran))) for ran in samples]
        known = [(secs, idle_secs) for secs, idle_secs in pairs if idle_secs]
        idle_secs = sum(idle_secs for _, idle_secs in known)
        return sum(secs for secs, _ in known) / idle_secs if known else math.nan

    def sample_secs(self, call: Call) -> float:
        """What one sample of a call's length takes, in the fastest way; 0: unknown."""
        length = _length(call.items[0].bucket)
        rows = {kind.rows for kind in self._secs if kind.length == length}
        secs = [self._idle_secs(Shape(n, length, "direct")) / n for n in rows]
        return min(secs, default=0.0)

    def batch_secs(self, buckets: Iterable[Any], rows: int) -> float:
        """What the batch rule would need alone, with so many rows per call."""
        secs = 0.0
        for bucket, count in collections.Counter(buckets).items():
            full, left = divmod(count, rows)
            if 2 * left > rows:  # as the schedule pads
                full, left = full + 1, 0
            length = _length(bucket)
            secs += full * self._idle_secs(Shape(rows, length, "direct"))
            secs += left * self._idle_secs(Shape(1, length, "direct"))
        return secs

    def _idle_secs(self, kind: Shape) -> float:
        """The median of a shape, 0 where it never ran alone."""
        # Shared streamed calls are rare, and the same program as direct ones. Exact
        # sums have no direct path.
        other = {"direct": "streamed", "streamed": "direct"}.get(kind.kind, kind.kind)
        secs = self._secs.get(kind) or self._secs.get(kind._replace(kind=other))
        return statistics.median(secs) if secs else 0.0


class LaterReleases:
    """What each step would have taken under the rules that release later than its own.

    Verdicts come when they came. Of the samples, batch and group release leave out
    those of advantage 0, unless the loss has a part without it (`additive`). Each takes
    what it takes on an idle learner, alone or in a full call, whichever is faster: a
    prediction is the best that the rule could reach.
    """

    def __init__(self, config: Config, judged: bool, additive: bool):
        own = config.releases.index(config.release)
        # Release "turn" computes pieces, which tell nothing of whole trajectories.
        self._releases = () if config.release == "turn" else config.releases[:own]
        self._judged = judged
        self._additive = additive
        self._replicas = config.mesh.replica
        self._idle = IdleWork()

    def measure(self, run: Run, params: Any, version: int) -> None:
        """Runs every gradient program on an idle learner, before the first step."""
        start = time.monotonic()
        for _ in range(_PASSES if self._releases else 0):
            run.clock.take()
            compile_all(run, params, version)
            for ran in run.clock.take():
                self._idle.add(ran)
            if time.monotonic() - start > _MEASURED_SECS:
                break

    def step(self, step: Step, end_secs: float) -> dict[str, float]:
        """Metrics of the next step, whose new parameters were there at `end_secs`."""
        if not self._releases:
            return {}
        beside_rollouts = []
        for ran in step.calls:
            if ran.start_secs < step.last_reward_secs:
                beside_rollouts.append(ran)
            else:
                self._idle.add(ran)
        worked = max([step.last_reward_secs, *(ran.end_secs for ran in step.calls)])
        predicted = {
            f"predicted_{release}_secs": predicted_step_secs(
                *self._work(step, release), end_secs - worked
            )
            for release in self._releases
        }
        return predicted | {"contention": self._idle.contention(beside_rollouts)}

    def _work(self, step: Step, release: str) -> tuple[list[float], list[float]]:
        """Seconds after the start at which each work may begin, and what it takes."""
        released = released_secs(step, release, self._judged)
        arrivals, works = [step.last_reward_secs - step.start_secs], [0.0]
        for ran in step.calls:
            if isinstance(ran.call, Prompt):  # once, for all of its group
                group = ran.call.group
                samples = [[place for place in step.advantages if place[0] == group]]
                secs = ran.secs
            else:
                samples = [[item[:2]] for item in ran.call.items]
                secs = self._idle.sample_secs(ran.call) or ran.secs / len(samples)
            for places in samples:
                if any(self._computed(step, place) for place in places):
                    latest = max(released[place] for place in places)
                    arrivals.append(latest - step.start_secs)
                    works.append(secs / self._replicas)
        return arrivals, works

    def _computed(self, step: Step, place: tuple[int, int]) -> bool:
        """Whether a rule that knows the advantage would compute a gradient."""
        return place in step.advantages and (
            self._additive or step.advantages[place] != 0
        )


def saved_secs(
    rows: Iterable[Mapping[str, Any]], release: str
) -> dict[str, list[float]]:
    """Seconds of a run's steps by release rule, of those steps that have predictions.

    `rows` are their metrics; the seconds of `release` are measured, others predicted.
    """
    rows = [row for row in rows if row.get("predicted_batch_secs") is not None]
    secs = {
        name: [row[f"predicted_{name}_secs"] for row in rows]
        for name in ("batch", "group")
        if rows and f"predicted_{name}_secs" in rows[0]
    }
    return secs | {release: [row["step_secs"] for row in rows]} if rows else {}


def saved(rows: Sequence[Mapping[str, Any]], release: str) -> dict[str, Any] | None:
    """What a run's own release rule saved over all its steps.

    The number of steps, their seconds under each rule, the ratio of batch release's to
    the measured ones, and the mean contention. None without predictions.
    """
    secs = saved_secs(rows, release)
    if not secs:
        return None
    totals = {name: sum(steps) for name, steps in secs.items()}
    contention = known_mean(row.get("contention") for row in rows).mean
    return {
        "steps": len(secs[release]),
        "secs": totals,
        "batch_over_measured": totals["batch"] / totals[release],
        "contention": contention if math.isfinite(contention) else None,
    }


def show_saved(display: Display, figures: Mapping[str, Any], release: str) -> None:
    """Prints what `saved` returned as a table."""
    columns = (
        Column("release", 10, left=True),
        Column("seconds", 8),
        Column("over measured", 13),
        Column("", left=True),
    )
    measured = figures["secs"][release]
    cells = [
        [
            name,
            tables.seconds(secs),
            f"{secs / measured:.2f}x",
            "measured" if name == release else "predicted",
        ]
        for name, secs in figures["secs"].items()
    ]
    title = f"The {figures['steps']} steps of this run, and what other rules would take"
    display.table(columns, cells, title)
    display.line(
        "predicted: the formula on this run's verdicts and on its gradient calls, as "
        "fast as on an idle learner."
    )
    if contention := figures["contention"]:
        display.line(f"Beside rollouts these took {contention:.2f} times as long.")


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values or [np.nan]))
