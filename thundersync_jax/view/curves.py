"""Pictures of whole runs: held-out success over time, and what streaming saved."""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from thundersync_jax.view import pictures
from thundersync_jax.view.pictures import DECODE, FAINT, INK, LANE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PREDICTED = {"batch": FAINT, "group": "#b9bfc5"}  # colours by release rule
_LABEL_SHARE = 0.055  # of the axis, between two labels


class SuccessPoint(NamedTuple):
    """One held-out evaluation."""

    wall_secs: float  # since the run began
    success: float  # share
    low: float  # its 95 % interval
    high: float


def draw_success(
    path: str | os.PathLike[str],
    points: Sequence[SuccessPoint | tuple[float, float, float, float]],
    warm_start_secs: float = 0.0,
) -> None:
    """Draws held-out success, evaluations in order of time, against wall-clock time.

    The warm start is shaded until `warm_start_secs`.
    """
    points = [SuccessPoint(*point) for point in points]
    last = max([*(point.wall_secs for point in points), warm_start_secs, 1e-9])
    unit = pictures.unit_of(last)
    figure = pictures.new_figure(7.2, 4.0)
    axis = figure.subplots()
    secs = [point.wall_secs for point in points]
    low, high, success = ([100 * point[i] for point in points] for i in (2, 3, 1))
    axis.fill_between(secs, low, high, color=DECODE, alpha=0.16, linewidth=0)
    axis.plot(secs, success, "o-", color=DECODE, linewidth=2, markersize=4.5, zorder=3)
    axis.lines[-1].set_clip_on(False)  # whole markers at 0 and at 100 %
    if warm_start_secs > 0:
        axis.axvspan(0, warm_start_secs, color=LANE, zorder=0)
        narrow = warm_start_secs < 0.16 * last
        place = {"ha": "center", "va": "top", "rotation": 90 if narrow else 0}
        axis.text(warm_start_secs / 2, 97, "warm start", color=FAINT, **place)
    warm = [point for point in points if point.wall_secs <= warm_start_secs]
    for point in warm[-1:]:
        left = point.wall_secs > 0.1 * last  # else it would leave the picture
        _label(axis, point, (-8 if left else 8, 8), "right" if left else "left")
    for point in points[len(warm) :][-1:]:
        _label(axis, point, (9, 0), "left")
    pictures.time_axis(axis, 1.09 * last, unit, "of wall-clock time")
    axis.set_ylim(0, 100)
    axis.yaxis.set_major_formatter(lambda share, _: f"{share:g}%")
    title = "Held-out success with its 95% interval"
    axis.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    axis.grid(axis="y", color=LANE)
    pictures.quiet(axis)
    figure.savefig(path)


def draw_saved(
    path: str | os.PathLike[str], secs: Mapping[str, Sequence[float]], measured: str
) -> None:
    """Draws the seconds that all steps so far took, under every release rule.

    `secs` of every step, by rule: `measured` ran, the others are predicted.
    """
    totals = {
        release: [0.0, *itertools.accumulate(steps)] for release, steps in secs.items()
    }
    longest = max(max(total) for total in totals.values())
    unit = pictures.unit_of(longest)
    figure = pictures.new_figure(7.2, 4.0)
    axis = figure.subplots()
    heights, height = {}, -math.inf  # of labels, in seconds: none on another
    for release in sorted(totals, key=lambda name: totals[name][-1]):
        height = max(totals[release][-1], height + _LABEL_SHARE * longest)
        heights[release] = height
    for release, total in totals.items():
        own = release == measured
        color = pictures.STREAMED if own else _PREDICTED.get(release, FAINT)
        shown = [value / unit.secs for value in total]
        axis.plot(range(len(total)), shown, color=color, linewidth=2.4 if own else 1.6)
        text = f"{release} {unit.text(total[-1])}"
        if not own:
            text += f", {total[-1] / totals[measured][-1]:.2f}x"
        place = (len(total) - 1, heights[release] / unit.secs)
        axis.annotate(text, place, (6, 0), textcoords="offset points", va="center")
    low, high = (
        [value / unit.secs for value in totals[release]]
        for release in (measured, "batch")
    )
    axis.fill_between(range(len(low)), low, high, color=LANE, zorder=0)
    axis.set_xlim(0, len(low) - 1)
    axis.set_ylim(0, 1.04 * longest / unit.secs)
    axis.set_xlabel("steps", color=INK)
    axis.set_ylabel(unit.name, color=INK)
    title = f"Time of all steps: {measured} measured, the others predicted"
    axis.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    pictures.quiet(axis)
    figure.savefig(path)


def _label(
    axis: "Axes", point: SuccessPoint, offset: tuple[int, int], side: str
) -> None:
    axis.annotate(
        f"{point.success:.0%}",
        (point.wall_secs, 100 * point.success),
        offset,
        textcoords="offset points",
        color=DECODE,
        fontweight="bold",
        ha=side,
        va="center",
    )
