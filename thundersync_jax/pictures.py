"""Pictures of a run: one step's timeline per release rule, and success over time.

matplotlib (the extra `plots`) is imported where it is used, through its object
interface: no global state, no window.
"""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from thundersync_jax.errors import ConfigError
from thundersync_jax.timing import step_timing
from thundersync_jax.types import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After Okabe and Ito 2008, tells apart under every common colour blindness; tints of
# one colour belong together and differ in lightness.
DECODE, WAIT = "#2f6f9f", "#c3d7e6"
VERIFY = "#e2a336"
DIRECT, STREAMED = "#8cc9b5", "#12805f"
BOUNDARY = "#c2502e"
_INK, _FAINT, _LANE = "#2b2f33", "#8a9097", "#f0f1f3"
_DPI = 160
_LEARNER_SHARE = 0.16  # of a panel's height, all replicas together


class SuccessPoint(NamedTuple):
    """One held-out evaluation."""

    wall_secs: float  # since the run began
    success: float  # share
    low: float  # its 95 % interval
    high: float


def draw_timeline(
    path: str | os.PathLike[str], panels: Mapping[str, Sequence[Span]]
) -> None:
    """Draws one step under several release rules on one time axis.

    Args:
      path: Of the picture.
      panels: Bars by release rule; each panel begins with its first bar. Tracks and
        names are those of the run's timeline.
    """
    panels = {name: list(spans) for name, spans in panels.items() if spans}
    figure = _figure(9.6, 0.95 + 2.05 * max(len(panels), 1))
    axes = figure.subplots(max(len(panels), 1), 1, sharex=True, squeeze=False)[:, 0]
    lengths = {name: _end(spans) - _start(spans) for name, spans in panels.items()}
    longest = max(lengths.values(), default=1.0)
    for axis, (name, spans) in zip(axes, panels.items(), strict=False):
        _draw_panel(axis, name, spans, longest)
        _annotate(axis, name, spans, longest, lengths.get("batch"))
    axes[-1].set_xlabel("seconds since the step began", color=_INK)
    axes[-1].set_xlim(0, longest * 1.01)
    _legend(figure)
    figure.savefig(path)


def draw_success(
    path: str | os.PathLike[str],
    points: Sequence[SuccessPoint | tuple[float, float, float, float]],
    warm_start_secs: float = 0.0,
) -> None:
    """Draws held-out success against wall-clock time.

    Args:
      path: Of the picture.
      points: Evaluations in the order of time.
      warm_start_secs: When the warm start ended; shaded up to there.
    """
    points = [SuccessPoint(*point) for point in points]
    figure = _figure(7.2, 4.0)
    axis = figure.subplots()
    secs = [point.wall_secs for point in points]
    axis.fill_between(
        secs,
        [100 * point.low for point in points],
        [100 * point.high for point in points],
        color=DECODE,
        alpha=0.16,
        linewidth=0,
    )
    axis.plot(secs, [100 * p.success for p in points], color=DECODE, linewidth=2)
    axis.plot(secs, [100 * p.success for p in points], "o", color=DECODE, markersize=4)
    axis.set_xlim(0, max([*secs, warm_start_secs, 1e-9]) * 1.09)
    axis.set_ylim(0, 100)
    if warm_start_secs > 0:
        axis.axvspan(0, warm_start_secs, color=_LANE, zorder=0)
        axis.text(
            warm_start_secs / 2, 97, "warm start", color=_FAINT, ha="center", va="top"
        )
    for point in points[-1:]:
        axis.annotate(
            f"{point.success:.0%}",
            (point.wall_secs, 100 * point.success),
            (8, 0),
            textcoords="offset points",
            color=DECODE,
            fontweight="bold",
            va="center",
        )
    axis.set_xlabel("seconds of wall-clock time", color=_INK)
    axis.set_ylabel("held-out success, %", color=_INK)
    axis.set_title("Held-out success, 95% interval", loc="left", color=_INK)
    axis.grid(axis="y", color=_LANE)
    _quiet(axis)
    figure.savefig(path)


def _draw_panel(
    axis: "Axes", name: str, spans: Sequence[Span], longest: float
) -> None:
    """Trajectories as rows in the order they finished, the learner below them."""
    start = _start(spans)
    rows = _by_finish([s for s in spans if s.track in ("rollout", "verify")])
    learner = sorted({s.lane for s in spans if s.track == "learner"}) or [""]
    height = max(len(rows), 1) * _LEARNER_SHARE / (1 - _LEARNER_SHARE)
    gap = height * 0.35
    for color, bars in (
        (WAIT, [s for s in spans if s.track == "rollout" and s.name != "decode"]),
        (DECODE, [s for s in spans if s.track == "rollout" and s.name == "decode"]),
        (VERIFY, [s for s in spans if s.track == "verify"]),
    ):
        _bars(axis, bars, [rows[s.lane] for s in bars], 0.86, color, start)
    each = height / len(learner)
    bottom = len(rows) + gap
    for place, lane in enumerate(learner):
        top = bottom + place * each
        axis.broken_barh([(0, _end(spans) - start)], (top, 0.9 * each), color=_LANE)
        calls = [s for s in spans if s.track == "learner" and s.lane == lane]
        for color, kind in ((DIRECT, False), (STREAMED, True)):
            bars = [s for s in calls if s.name.startswith("streamed") == kind]
            _bars(axis, bars, [top] * len(bars), 0.9 * each, color, start, edge=0.35)
    boundary = [s for s in spans if s.track == "boundary"]
    _bars(axis, boundary, [bottom] * len(boundary), 0.9 * height, BOUNDARY, start)
    axis.set_ylim(bottom + height, -0.5)
    axis.set_yticks(
        [len(rows) / 2, bottom + height / 2],
        [f"{len(rows)} trajectories", "learner"],
        color=_INK,
    )
    _quiet(axis)
    axis.tick_params(axis="y", length=0)


def _annotate(
    axis: "Axes",
    name: str,
    spans: Sequence[Span],
    longest: float,
    batch_secs: float | None,
) -> None:
    start, end = _start(spans), _end(spans)
    timing = step_timing(spans, start, end)
    text = f"{timing.step_secs:.2f} s     learner idle {timing.idle_fraction:.0%}"
    if batch_secs and name != "batch":
        text += f"     {batch_secs / timing.step_secs:.2f}× batch"
    axis.set_title(name, loc="left", color=_INK, fontweight="bold", fontsize=11)
    axis.set_title(text, loc="right", color=_INK, fontsize=9.5)
    axis.axvline(timing.rollout_secs, color=_FAINT, linewidth=0.8, linestyle=(0, (4, 3)))
    axis.axvline(timing.step_secs, color=BOUNDARY, linewidth=1.2)


def _legend(figure: "Figure") -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    entries = [
        Patch(color=DECODE, label="decode"),
        Patch(color=WAIT, label="tool"),
        Patch(color=VERIFY, label="verification"),
        Patch(color=STREAMED, label="gradient, streamed"),
        Patch(color=DIRECT, label="gradient, direct"),
        Patch(color=BOUNDARY, label="boundary"),
        Line2D([], [], color=_FAINT, linestyle=(0, (4, 3)), label="last reward"),
    ]
    figure.legend(
        handles=entries,
        loc="outside upper left",
        ncols=len(entries),
        frameon=False,
        fontsize=8.5,
        handlelength=1.1,
        columnspacing=1.3,
        labelcolor=_INK,
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


def _start(spans: Sequence[Span]) -> float:
    return min(span.start_secs for span in spans)


def _end(spans: Sequence[Span]) -> float:
    return max(span.end_secs for span in spans)


def _quiet(axis: "Axes") -> None:
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(_FAINT)
    axis.tick_params(colors=_INK, labelsize=9)
    axis.set_axisbelow(True)


def _figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            "pictures need matplotlib, which is not installed; install the extra: "
            "pip install 'thundersync_jax[plots]'."
        ) from error
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
