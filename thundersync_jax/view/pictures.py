"""Pictures of steps: where their time goes, under one release rule or several.

What whole runs come to is in module `curves`. matplotlib (the extra `plots`) is
imported where it is used, through its object interface: no global state, no window.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from thundersync_jax.metrics.timing import step_timing
from thundersync_jax.types import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After Okabe and Ito 2008, tells apart under every common colour blindness; tints of
# one colour belong together and differ in lightness.
DECODE, WAIT = "#2c5f98", "#c0d3e8"
VERIFY, TEACHER = "#e2a336", "#9467a8"
DIRECT, STREAMED = "#93d1b8", "#15926b"
BOUNDARY = "#c2502e"
INK, FAINT, LANE = "#2b2f33", "#868c93", "#f2f2f2"
_DPI = 160
_TIMELINE_COLORS = {
    "decode": DECODE,
    "tool": WAIT,
    "teacher": TEACHER,
    "verification": VERIFY,
    "gradient, streamed": STREAMED,
    "gradient, direct": DIRECT,
    "boundary": BOUNDARY,
}
_BAR_COLORS = {
    "rollouts, learner idle": WAIT,
    "both at work": STREAMED,
    "learner alone": DIRECT,
    "boundary": BOUNDARY,
}
_LEARNER_SHARE = 0.16  # of a panel's height, all replicas together


class Unit(NamedTuple):
    """What a time axis counts in, and how many seconds that is."""

    name: str
    short: str
    secs: float

    def text(self, secs: float) -> str:
        return f"{secs / self.secs:.2f} {self.short}"


class Bar(NamedTuple):
    """Steps under one release rule, in seconds: all of them, and medians of parts."""

    step_secs: Sequence[float]  # of each step
    rollout_secs: float  # until the last reward
    busy_in_rollout_secs: float  # while the learner worked as well
    boundary_secs: float
    predicted_secs: float  # the step's, by the formula


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_timeline(
    path: str | os.PathLike[str],
    panels: Mapping[str, Sequence[Span]],
    batch_secs: float | None = None,
) -> None:
    """Draws one step under one release rule or several, on one time axis.

    `panels` has the run's bars by release rule, each panel from its first to its last.
    `batch_secs` is the step's time under batch release, where that has no panel.
    """
    panels = {name: list(spans) for name, spans in panels.items() if spans}
    count = max(len(panels), 1)
    figure = new_figure(9.6, 0.9 + 2.2 * count)
    axes = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    lengths = {name: _end(spans) - _start(spans) for name, spans in panels.items()}
    if batch_secs is not None:
        lengths.setdefault("batch", batch_secs)
    longest = max(lengths.values(), default=1.0)
    unit = unit_of(longest)
    for axis, (name, spans) in zip(axes, panels.items(), strict=False):
        lane = _draw_panel(axis, spans, longest)
        _annotate(axis, name, spans, unit, lengths.get("batch"))
        saved = lengths.get("batch", 0.0) - lengths[name]
        if saved > 0.1 * longest:  # narrower, the words would not fit
            _draw_saved(axis, lengths[name], saved, lane, unit)
        quiet(axis)
        axis.tick_params(axis="y", length=0)
        if axis is not axes[-1]:
            axis.spines["bottom"].set_visible(False)
            axis.tick_params(axis="x", length=0)
    time_axis(axes[-1], 1.01 * longest, unit, "since the step began")
    taught = any(s.track == "teacher" for spans in panels.values() for s in spans)
    colors = {k: c for k, c in _TIMELINE_COLORS.items() if taught or k != "teacher"}
    legend(axes[0], colors, {"last reward": ("|", 10)}, 1.14)
    figure.savefig(path)


def draw_bars(path: str | os.PathLike[str], bars: Mapping[str, Bar]) -> None:
    """Draws the median step of one or more release rules, and where its time goes."""
    figure = new_figure(9.6, 1.25 + 0.62 * max(len(bars), 1))
    axis = figure.subplots()
    middles = {name: median(bar.step_secs) for name, bar in bars.items()}
    ends = [max(*bar.step_secs, bar.predicted_secs) for bar in bars.values()]
    longest = max(ends, default=1.0)
    unit = unit_of(longest)
    for row, (name, bar) in enumerate(bars.items()):
        _draw_parts(axis, row, bar, middles[name])
        text = unit.text(middles[name])
        if "batch" in middles and name != "batch":
            text += f"   {middles['batch'] / middles[name]:.2f}x"
        end = max(middles[name], bar.predicted_secs)
        axis.text(end, row, f"   {text}", va="center", color=INK, fontsize=9.5)
    axis.set_ylim(max(len(bars), 1) - 0.42, -0.5)
    time_axis(axis, 1.19 * longest, unit, "since the step began")
    marks = {"step time by the formula": ("|", 10), "a step": ("o", 4)}
    legend(axis, _BAR_COLORS, marks, 1.05)
    quiet(axis)
    axis.set_yticks(range(len(bars)), list(bars), fontsize=11, fontweight="bold")
    axis.tick_params(axis="y", length=0)
    figure.savefig(path)


def _draw_panel(axis: "Axes", spans: Sequence[Span], longest: float) -> float:
    """Trajectories by their finish, the learner below; returns the learner's middle."""
    start, end = _start(spans), _end(spans)
    rows = _by_finish([s for s in spans if s.track in ("rollout", "verify")])
    lanes = sorted({s.lane for s in spans if s.track == "learner"}) or [""]
    height = max(len(rows), 1) * _LEARNER_SHARE / (1 - _LEARNER_SHARE)
    bottom = len(rows) + 0.35 * height
    thick = 1.0 if len(rows) > 48 else 0.8  # gaps of less than a pixel flicker
    for color, bars in (
        (WAIT, [s for s in spans if s.track == "rollout" and s.name != "decode"]),
        (DECODE, [s for s in spans if s.track == "rollout" and s.name == "decode"]),
        (VERIFY, [s for s in spans if s.track == "verify"]),
        (TEACHER, [s for s in spans if s.track == "teacher" and s.lane in rows]),
    ):
        _bars(axis, bars, [rows[s.lane] for s in bars], thick, color, start)
    lane_height = height / len(lanes)
    for place, lane in enumerate(lanes):
        top = bottom + place * lane_height
        axis.broken_barh([(0, end - start)], (top, 0.9 * lane_height), color=LANE)
        calls = [s for s in spans if s.track == "learner" and s.lane == lane]
        work = sum(s.end_secs - s.start_secs for s in calls)
        edge = 0.4 if work > len(calls) * longest / 150 else 0.0
        for color, kind in ((DIRECT, False), (STREAMED, True)):
            bars = [s for s in calls if s.name.startswith(("streamed", "turn")) == kind]
            _bars(axis, bars, [top] * len(bars), 0.9 * lane_height, color, start, edge)
    boundary = [s for s in spans if s.track == "boundary"]
    tall = height - 0.1 * lane_height
    _bars(axis, boundary, [bottom] * len(boundary), tall, BOUNDARY, start)
    axis.set_ylim(bottom + height, -0.5)
    middle = bottom + tall / 2
    axis.set_yticks([len(rows) / 2, middle], [f"{len(rows)} trajectories", "learner"])
    return middle


def _draw_parts(axis: "Axes", row: int, bar: Bar, step_secs: float) -> None:
    """One bar: the parts of a step, the spread of steps, and the formula's time."""
    thick, left = 0.56, 0.0
    top = row - thick / 2
    parts = (
        (WAIT, bar.rollout_secs - bar.busy_in_rollout_secs),
        (STREAMED, bar.busy_in_rollout_secs),
        (DIRECT, step_secs - bar.rollout_secs - bar.boundary_secs),
        (BOUNDARY, bar.boundary_secs),
    )
    for color, secs in parts:
        # A median of wholes is no sum of medians of parts: the rest may fall below 0.
        secs = min(max(secs, 0.0), step_secs - left)
        axis.broken_barh([(left, secs)], (top, thick), color=color, linewidth=0)
        left += secs
    axis.vlines(bar.predicted_secs, top - 0.07, top + thick, color=INK)
    below = [top + thick + 0.07] * len(bar.step_secs)
    axis.plot(bar.step_secs, below, "o", color=INK, alpha=0.5, markersize=3, mew=0)


def _annotate(
    axis: "Axes", name: str, spans: Sequence[Span], unit: Unit, batch_secs: float | None
) -> None:
    timing = step_timing(spans, _start(spans), _end(spans))
    text = f"{unit.text(timing.step_secs)}     learner idle {timing.idle_fraction:.0%}"
    if batch_secs and name != "batch":
        text += f"     {batch_secs / timing.step_secs:.2f}x batch"
    axis.set_title(name, loc="left", color=INK, fontweight="bold", fontsize=11)
    axis.set_title(text, loc="right", color=INK, fontsize=9.5)
    axis.axvline(timing.rollout_secs, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axis.axvline(timing.step_secs, color=BOUNDARY, linewidth=1.4)


def _draw_saved(
    axis: "Axes", step_secs: float, saved: float, lane: float, unit: Unit
) -> None:
    batch_secs = step_secs + saved
    axis.axvline(batch_secs, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)))
    arrow = {"arrowstyle": "->", "color": FAINT, "shrinkA": 0, "shrinkB": 3}
    axis.annotate("", (step_secs, lane), (batch_secs, lane), arrowprops=arrow)
    axis.text(
        step_secs + saved / 2,
        lane,
        f"{unit.text(saved)} sooner",
        ha="center",
        va="center",
        color=INK,
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 3},
    )


def time_axis(axis: "Axes", right_secs: float, unit: Unit, since: str) -> None:
    from matplotlib.ticker import MaxNLocator

    locator = MaxNLocator(8, steps=[1, 2, 5, 10])
    ticks = locator.tick_values(0, right_secs / unit.secs)
    axis.set_xticks([unit.secs * tick for tick in ticks], [f"{t:g}" for t in ticks])
    axis.set_xlim(0, right_secs)
    axis.set_xlabel(f"{unit.name} {since}", color=INK)


def legend(
    axis: "Axes",
    colors: Mapping[str, str],
    marks: Mapping[str, tuple[str, float]],
    height: float,
) -> None:
    """One row above the axis, at so many of its heights: patches, marks with sizes."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries = [Patch(color=color, label=label) for label, color in colors.items()]
    for label, (marker, size) in marks.items():
        style = {"linestyle": "None", "marker": marker, "markersize": size}
        entries.append(Line2D([], [], color=INK, label=label, **style))
    axis.legend(
        handles=entries,
        loc="lower left",
        bbox_to_anchor=(0, height),
        borderaxespad=0,
        borderpad=0,
        ncols=len(entries),
        frameon=False,
        fontsize=8.5,
        handlelength=1.1,
        handletextpad=0.5,
        columnspacing=1.5,
        labelcolor=INK,
    )


def _bars(
    axis: "Axes",
    spans: Sequence[Span],
    tops: Sequence[float],
    height: float,
    color: str,
    start: float,
    edge: float = 0.0,
) -> None:
    """Many rectangles as one collection: thousands stay quick."""
    from matplotlib.collections import PolyCollection

    corners = []
    for span, top in zip(spans, tops, strict=True):
        left, right = span.start_secs - start, span.end_secs - start
        low = top + height
        corners.append([(left, top), (right, top), (right, low), (left, low)])
    axis.add_collection(
        PolyCollection(corners, facecolors=color, edgecolors="white", linewidths=edge)
    )


def _by_finish(spans: Sequence[Span]) -> dict[str, int]:
    """Returns a row per trajectory, the first to finish on top."""
    finish: dict[str, float] = {}
    for span in spans:
        finish[span.lane] = max(span.end_secs, finish.get(span.lane, span.end_secs))
    return {lane: row for row, lane in enumerate(sorted(finish, key=finish.get))}


def unit_of(longest_secs: float) -> Unit:
    if longest_secs < 600:
        return Unit("seconds", "s", 1.0)
    if longest_secs < 3 * 3600:
        return Unit("minutes", "min", 60.0)
    return Unit("hours", "h", 3600.0)


def _start(spans: Sequence[Span]) -> float:
    return min(span.start_secs for span in spans)


def _end(spans: Sequence[Span]) -> float:
    return max(span.end_secs for span in spans)


def quiet(axis: "Axes") -> None:
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(FAINT)
    axis.tick_params(colors=INK, labelsize=9)
    axis.set_axisbelow(True)


def new_figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    figure.get_layout_engine().set(h_pad=0.08)  # inches
    FigureCanvasAgg(figure)
    return figure
