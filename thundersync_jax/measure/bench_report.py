"""What a bench found: one object for programs, two or three tables for people.

All figures are medians over the steps; a speed-up is the median of the ratios of single
steps, which have the same trajectories and the same waits. Nothing is measured here.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from thundersync_jax.measure.live import TOLERANCE, Live
from thundersync_jax.metrics.timing import group_correlation
from thundersync_jax.types import Trajectory
from thundersync_jax.view import tables
from thundersync_jax.view.display import Display
from thundersync_jax.view.tables import Column

LARGEST_CONTENTION = 1.15  # beyond it the table says so
LARGEST_UNIFORM_SHARE = 0.05  # of groups: batch and group release skip them

PLAIN = "plain sums"  # trajectory release, one trajectory a call, beside exact sums
_NOISE = 0.05  # of learner times within one run

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
_TEACHER_COLUMNS = (
    Column("release", 10, left=True),
    Column("learner\nover batch", 10),
    Column("tail\nover batch", 10),
    Column("peak\nMiB", 8),
    Column("teacher over\ntrajectory tokens", 17),
)


class Cost(NamedTuple):
    """What a step with a teacher took beside time."""

    peak_bytes: int  # on the learner's fullest device, as `PeakBytes` counts them
    teacher_tokens: int  # run through the teacher
    trajectory_tokens: int  # of all trajectories


@dataclasses.dataclass(frozen=True)
class Round:
    """One step under every rule, and under `PLAIN` with exact sums."""

    lives: dict[str, Live]
    contention: dict[str, float]  # the time of calls over that on an idle learner
    costs: dict[str, Cost] = dataclasses.field(default_factory=dict)  # with a teacher


def figures(rounds: Sequence[Round], facts: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of a bench, the JSON object of `--json`; `facts` are taken over."""
    releases = {name: _summary(name, rounds) for name in rounds[0].lives}
    reports = [live.step.report for r in rounds for live in r.lives.values()]
    trajectory = [r.lives["trajectory"].step.report for r in rounds]
    groups = [r.lives["batch"].step.report for r in rounds]
    kept = sum(report.kept_groups for report in groups)
    exact = {"exact": exactness(rounds)} if PLAIN in releases else {}
    return {
        "releases": releases,
        "speedup": {
            n: _median(speedups(releases, n)) for n in releases if n != "batch"
        },
        "finish_time_icc": _median(
            [_finish_time_icc(r.lives["batch"]) for r in rounds]
        ),
        "open_groups_max": max(report.open_groups_max for report in trajectory),
        "group_sum_bytes": max(report.group_sum_bytes for report in reports),
        "uniform_groups": sum(r.uniform_groups for r in groups) / kept if kept else 0.0,
        "failed_members": sum(report.failed_members for report in reports),
        "identical_trajectories": all(map(identical, rounds)),
        **exact,
        **facts,
    }


def _summary(release: str, rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over the steps; the peak is over all of them, tokens are added up."""
    lives = [r.lives[release] for r in rounds]
    dispatch = [secs for live in lives for secs in live.dispatch_secs]
    reports = [live.step.report for live in lives]
    timings = [live.timing for live in lives]
    step_secs = [timing.step_secs for timing in timings]
    predicted = [live.predicted_secs for live in lives]
    ratios = [a / b for a, b in zip(step_secs, predicted, strict=True)]
    return {
        "step_secs": step_secs,
        "step_secs_median": _median(step_secs),
        "rollout_secs": _median([t.rollout_secs for t in timings]),
        "learner_secs": _median([t.learner_secs for t in timings]),
        "first_release_secs": _median([live.first_release_secs for live in lives]),
        "last_work_secs": _median([live.last_work_secs for live in lives]),
        "boundary_secs": _median([live.boundary_secs for live in lives]),
        "tail_secs": _median([t.tail_secs for t in timings]),
        "dispatch_ms_median": 1e3 * _median(dispatch),
        "predicted_secs": _median(predicted),
        "measured_over_predicted": _median(ratios),
        "learner_idle_fraction": _median([t.idle_fraction for t in timings]),
        "contention": _median([r.contention[release] for r in rounds]),
        "streamed_share": _median([r.streamed_share for r in reports]),
        "padded_over_real_tokens": _median(
            [r.padded_over_real_tokens for r in reports]
        ),
        **_teaching([r.costs[release] for r in rounds if release in r.costs]),
    }


def _teaching(costs: Sequence[Cost]) -> dict[str, float]:
    """The figures of benches with a teacher."""
    if not costs:
        return {}
    tokens = sum(cost.teacher_tokens for cost in costs)
    of_trajectories = sum(cost.trajectory_tokens for cost in costs)
    return {
        "peak_bytes": max(cost.peak_bytes for cost in costs),
        "teacher_tokens_over_trajectory_tokens": _ratio(tokens, of_trajectories),
    }


def speedups(releases: Mapping[str, Any], release: str) -> list[float]:
    """Batch step time over this rule's, step by step: what drifts, drifts for both."""
    pairs = zip(
        releases["batch"]["step_secs"], releases[release]["step_secs"], strict=True
    )
    return [batch / other for batch, other in pairs]


def exactness(rounds: Sequence[Round]) -> dict[str, float]:
    """What exact sums cost under trajectory release, where `PLAIN` took part."""
    pairs = [(r.lives["trajectory"].timing, r.lives[PLAIN].timing) for r in rounds]
    ratios = [_ratio(exact.learner_secs, plain.learner_secs) for exact, plain in pairs]
    speedups = [plain.step_secs / exact.step_secs for exact, plain in pairs]
    return {
        "learner_secs": _median([exact.learner_secs for exact, _ in pairs]),
        "plain_learner_secs": _median([plain.learner_secs for _, plain in pairs]),
        "learner_ratio": _median(ratios),
        "speedup_kept": _median(speedups),
    }


def identical(steps: Round) -> bool:
    """Whether every rule sampled, and was rewarded for, the same."""
    first, *others = (live.step.trajectories for live in steps.lives.values())
    return all(
        len(first) == len(other) and all(map(_same, first, other)) for other in others
    )


def _same(first: Trajectory, other: Trajectory) -> bool:
    return (
        first.key == other.key
        and first.reward == other.reward
        and np.array_equal(first.ids, other.ids)
        and np.array_equal(first.loss_mask, other.loss_mask)
    )


def _finish_time_icc(live: Live) -> float:
    groups: dict[int, list[float]] = {}
    for (group, _), secs in live.step.rewarded_secs.items():
        groups.setdefault(group, []).append(secs - live.step.start_secs)
    return group_correlation(groups.values())


def _median(values: list[float]) -> float:
    """Over the numbers that are there; NaN where there is none."""
    known = [value for value in values if not np.isnan(value)]
    return statistics.median(known) if known else float("nan")


def show(display: Display, result: Mapping[str, Any]) -> None:
    """The figures as two or three tables and a few lines."""
    releases = result["releases"]
    batch = releases["batch"]
    speedup = {"batch": 1.0} | result["speedup"]
    times, costs = [], []
    for name, figures in releases.items():
        secs = [
            figures[f"{key}_secs"]
            for key in ("learner", "first_release", "last_work", "boundary", "tail")
        ]
        times.append(
            [
                name,
                tables.seconds(figures["step_secs_median"]),
                f"{speedup[name]:.2f}x",
                tables.seconds(figures["rollout_secs"]),
                f"{_ratio(figures['rollout_secs'], batch['rollout_secs']):.2f}x",
                *map(_fine, secs),
                tables.percent(figures["learner_idle_fraction"]),
            ]
        )
        costs.append(
            [
                name,
                tables.seconds(figures["predicted_secs"]),
                tables.number(figures["measured_over_predicted"]),
                tables.number(figures["contention"], 2),
                tables.number(figures["dispatch_ms_median"], 1),
                tables.percent(figures["streamed_share"]),
                tables.number(figures["padded_over_real_tokens"], 2),
            ]
        )
    title = f"Medians of {len(batch['step_secs'])} steps"
    display.table(_TIME_COLUMNS, times, title)
    display.table(_COST_COLUMNS, costs, "Against the formula, and what streaming costs")
    if "peak_bytes" in batch:
        rows = [
            [
                name,
                f"{_ratio(figures['learner_secs'], batch['learner_secs']):.2f}x",
                f"{_ratio(figures['tail_secs'], batch['tail_secs']):.2f}x",
                tables.number(figures["peak_bytes"] / 2**20, 1),
                tables.number(figures["teacher_tokens_over_trajectory_tokens"]),
            ]
            for name, figures in releases.items()
        ]
        display.table(_TEACHER_COLUMNS, rows, "Work, memory and the teacher")
    for line in _remarks(result):
        display.line(line)


def _ratio(above: float, below: float) -> float:
    return above / below if below else float("nan")


def _fine(secs: float) -> str:
    return tables.number(secs, 3 if secs < 1 else 2)


def _remarks(result: Mapping[str, Any]) -> Iterator[str]:
    releases = result["releases"]
    batch = releases["batch"]
    ratios = speedups(releases, "trajectory")
    mib = result["group_sum_bytes"] / 2**20
    yield f"trajectory over batch, by step: {min(ratios):.2f}x to {max(ratios):.2f}x"
    if exact := result.get("exact"):
        yield (
            f"exact sums: learner {_fine(exact['learner_secs'])} s, plain sums "
            f"{_fine(exact['plain_learner_secs'])} s with one trajectory a call, "
            f"{exact['learner_ratio']:.2f} times; {exact['speedup_kept']:.0%} of plain "
            "sums' speed-up kept"
        )
    yield (
        f"latencies x {result['latency_scale']:.3f}; {result['rows_per_call']} rows a "
        f"call; at most {result['open_groups_max']} open groups, {mib:.1f} MiB of sums"
    )
    yield (
        "finish times within a group correlate by "
        f"{tables.number(result['finish_time_icc'], 2)}; "
        f"{result['uniform_groups']:.0%} of groups uniform; "
        f"{result['compiles_after_warmup']} compilations after the warm-up"
    )
    if result["failed_members"]:
        yield f"{result['failed_members']} trajectories failed, all rules together"
    if not result["identical_trajectories"]:
        yield "NOT COMPARABLE: the rules sampled different trajectories"
    apart = _ratio(batch["rollout_secs"], batch["learner_secs"])
    if result["latency_scale"] != 1.0 and not abs(apart - 1) <= TOLERANCE:
        yield f"rollouts took {apart:.2f} times the learner's work; meant was 1"
    rules = releases.keys() - {PLAIN}
    least = min(releases[release]["learner_secs"] for release in rules)
    if batch["learner_secs"] > (1 + _NOISE) * least:
        yield (
            "batch took more learner time than another rule, for the same gradients or "
            "more: it was disturbed, and speed-ups are too good by as much"
        )
    if result["uniform_groups"] > LARGEST_UNIFORM_SHARE:
        yield "many uniform groups, which batch and group release skip in time"
    for name, figures in releases.items():
        if figures["contention"] > LARGEST_CONTENTION:
            yield (
                f"{name}: gradient calls took {figures['contention']:.2f} times as "
                "long as on an idle learner; rollouts and learner share the processors"
            )
