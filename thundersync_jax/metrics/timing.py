"""What ran when, as bars on a timeline, and how far a step and its run are.

Times are seconds of `time.monotonic`. Whether a device really worked during a span is
up to whoever reports it.
"""

import collections
import contextlib
import dataclasses
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from thundersync_jax.config.workdir import replace_text
from thundersync_jax.types import Span

TRACKS = {  # order and titles in the trace viewer
    "rollout": "rollouts",
    "verify": "verification",
    "teacher": "teacher",
    "learner": "learner",
    "boundary": "boundary",
}


class Timeline:
    """Collects spans from any thread; the newest `keep` of them."""

    def __init__(
        self, keep: int = 200_000, clock: Callable[[], float] = time.monotonic
    ):
        self._spans: collections.deque[Span] = collections.deque(maxlen=keep)
        self._clock = clock
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        """Takes one bar, from any thread."""
        with self._lock:
            self._spans.append(span)

    @contextlib.contextmanager
    def span(self, track: str, name: str, lane: str = "") -> Iterator[None]:
        """Adds a bar as long as the block runs, whether or not it raises."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(Span(track, name, start, self._clock(), lane))

    def spans(self, since: float = -math.inf) -> list[Span]:
        """Returns the bars that started at `since` seconds or later, in order."""
        with self._lock:
            spans = list(self._spans)
        return sorted((s for s in spans if s.start_secs >= since), key=_by_time)


def write_chrome_trace(path: str | os.PathLike[str], spans: Iterable[Span]) -> None:
    """Writes a trace for ui.perfetto.dev or chrome://tracing, replacing the file.

    A track is a process and a lane a thread of it; bars of one lane that overlap get
    rows of their own, since the format nests them otherwise.
    """
    spans = sorted(spans, key=_by_time)
    origin = spans[0].start_secs if spans else 0.0
    tracks = _group(spans, lambda span: span.track)
    known = [track for track in TRACKS if track in tracks]
    events, names = [], []
    for process, track in enumerate([*known, *sorted(tracks.keys() - TRACKS.keys())]):
        names += _names(process, 0, "process", TRACKS.get(track, track))
        threads = itertools.count()
        lanes = _lanes(tracks[track])
        for lane in sorted(lanes, key=_natural):
            for row, bars in enumerate(_rows(lanes[lane])):
                thread = next(threads)
                title = lane or track
                title += f" ({row + 1})" if row else ""
                names += _names(process, thread, "thread", title)
                events += [_event(process, thread, bar, origin) for bar in bars]
    events.sort(key=lambda event: (event["ts"], event["pid"], event["tid"]))
    trace = {"traceEvents": names + events, "displayTimeUnit": "ms"}
    replace_text(Path(path), json.dumps(trace))


def _by_time(span: Span) -> tuple[float, float]:
    return span.start_secs, span.end_secs


def _group(spans: Iterable[Span], key: Callable[[Span], str]) -> dict[str, list[Span]]:
    groups: dict[str, list[Span]] = {}
    for span in spans:
        groups.setdefault(key(span), []).append(span)
    return groups


def _lanes(spans: Iterable[Span]) -> dict[str, list[Span]]:
    return _group(spans, lambda span: span.lane)


def _natural(lane: str) -> list[Any]:
    """Sorts g2 before g10: digits and other text alternate, each compared its way."""
    parts = itertools.groupby(lane, str.isdecimal)
    words = ["".join(part) for _, part in parts]
    return [(0, int(w), "") if w.isdecimal() else (1, 0, w) for w in words]


def _rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Spreads bars over as few rows as keep them apart."""
    rows: list[list[Span]] = []
    for span in spans:
        free = (row for row in rows if row[-1].end_secs <= span.start_secs)
        if (row := next(free, None)) is None:
            rows.append(row := [])
        row.append(span)
    return rows


def _names(process: int, thread: int, kind: str, name: str) -> list[dict[str, Any]]:
    common = {"ph": "M", "pid": process, "tid": thread}
    place = process if kind == "process" else thread
    return [
        {"name": f"{kind}_name", "args": {"name": name}} | common,
        {"name": f"{kind}_sort_index", "args": {"sort_index": place}} | common,
    ]


def _event(process: int, thread: int, span: Span, origin: float) -> dict[str, Any]:
    start = round((span.start_secs - origin) * 1e6, 3)
    end = round((span.end_secs - origin) * 1e6, 3)
    return {
        "name": span.name,
        "cat": span.track,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": round(end - start, 3),  # of rounded ends: neighbours must not overlap
    }


class StepTiming(NamedTuple):
    """One step in seconds, from its start to the end of its boundary."""

    step_secs: float  # T, the whole step
    rollout_secs: float  # R, from the start to the last verdict
    learner_secs: float  # L, gradient work summed over replicas
    boundary_secs: float  # F, the step boundary
    idle_fraction: float  # of the replicas' time: neither gradient nor boundary
    tail_secs: float  # from the last verdict to the end of the step


def step_timing(
    spans: Sequence[Span], start_secs: float, end_secs: float, replicas: int = 1
) -> StepTiming:
    """Measures one step by the bars, or parts of bars, within it.

    It goes from when its first rollout could start to when its new parameters were
    there. A learner replica that never worked has no bar.
    """
    within = clip(spans, start_secs, end_secs)
    verdicts = [s.end_secs for s in within if s.track in ("rollout", "verify")]
    rollout_secs = max(verdicts, default=start_secs) - start_secs
    step_secs = end_secs - start_secs
    return StepTiming(
        step_secs=step_secs,
        rollout_secs=rollout_secs,
        learner_secs=sum(busy_secs(within, "learner").values()),
        boundary_secs=union_secs(s for s in within if s.track == "boundary"),
        idle_fraction=idle_fraction(within, start_secs, end_secs, replicas),
        tail_secs=step_secs - rollout_secs,
    )


def idle_fraction(
    spans: Sequence[Span], start_secs: float, end_secs: float, replicas: int = 1
) -> float:
    """Returns the share of the replicas' time without a call and boundary, 0 to 1."""
    spans = clip(spans, start_secs, end_secs)
    boundary = [span for span in spans if span.track == "boundary"]
    lanes = _lanes(span for span in spans if span.track == "learner")
    replicas = max(replicas, len(lanes), 1)
    available = replicas * (end_secs - start_secs)
    busy = sum(union_secs([*lane, *boundary]) for lane in lanes.values())
    busy += (replicas - len(lanes)) * union_secs(boundary)
    return 1.0 - busy / available if available > 0 else 0.0


def busy_secs(spans: Iterable[Span], track: str) -> dict[str, float]:
    """Returns the seconds of each lane of a track covered by at least one bar."""
    lanes = _lanes(span for span in spans if span.track == track)
    return {lane: union_secs(bars) for lane, bars in lanes.items()}


def union_secs(spans: Iterable[Span]) -> float:
    """Returns the seconds covered by at least one of the bars."""
    total, reached = 0.0, -math.inf
    for span in sorted(spans, key=_by_time):
        total += max(0.0, span.end_secs - max(span.start_secs, reached))
        reached = max(reached, span.end_secs)
    return total


def clip(spans: Iterable[Span], start_secs: float, end_secs: float) -> list[Span]:
    """Returns the parts of the bars between two times, none of them empty."""
    parts = []
    for span in spans:
        start = max(span.start_secs, start_secs)
        end = min(span.end_secs, end_secs)
        if start < end:
            parts.append(Span(span.track, span.name, start, end, span.lane))
    return parts


def release_secs(
    rewarded: Mapping[tuple[Hashable, int], float], release: str
) -> dict[tuple[Hashable, int], float]:
    """When a release rule lets each gradient start, by (group, member).

    That is the last verdict of all under "batch", of its group under "group" and its
    own under "trajectory". `rewarded` has the seconds of the verdicts.
    """
    if release == "trajectory":
        return dict(rewarded)
    if release == "batch":
        return dict.fromkeys(rewarded, max(rewarded.values(), default=0.0))
    if release == "group":
        last_of: dict[Hashable, float] = {}
        for (group, _), secs in rewarded.items():
            last_of[group] = max(secs, last_of.get(group, secs))
        return {key: last_of[key[0]] for key in rewarded}
    raise ValueError(
        f"release is {release!r}; expected 'batch', 'group' or 'trajectory'."
    )


def predicted_step_secs(
    arrivals: Sequence[float], works: Sequence[float], boundary_secs: float
) -> float:
    """Step time of one learner that never idles beside ready work.

    In the order of arrival,

        T = F + max_i ( a_(i) + sum_{j >= i} w_(j) )

    with a_i the seconds after the step's start at which work i may begin, w_i those
    that it takes, and F the boundary, paid once at the end.
    """
    latest, remaining = 0.0, 0.0
    for arrival, work in sorted(zip(arrivals, works, strict=True), reverse=True):
        remaining += work
        latest = max(latest, arrival + remaining)
    return boundary_secs + latest


def group_correlation(groups: Iterable[Sequence[float]]) -> float:
    """How alike the values of one group are: the intraclass correlation ICC(1).

    With the mean squares between groups (MSB) and within groups (MSW) of a one-way
    analysis of variance, N values in n groups of sizes k_g:

        ICC(1) = (MSB - MSW) / (MSB + (k0 - 1) MSW),  k0 = (N - sum k_g^2 / N) / (n - 1)

    It is 1 where all values of a group are equal, about 0 where groups tell nothing,
    negative where members differ more than groups do. NaN with fewer than two groups,
    without a group of two, or where all values are equal. Empty groups are left out.

    Source: Shrout and Fleiss 1979, "Intraclass correlations", equation for ICC(1,1);
    k0 for unequal groups after Donner 1986.
    """
    groups = [np.asarray(group, np.float64) for group in groups if len(group)]
    sizes = np.asarray([len(group) for group in groups], np.float64)
    count, values = len(groups), sizes.sum()
    if count < 2 or values == count:
        return math.nan
    grand = np.concatenate(groups).mean()
    means = np.asarray([group.mean() for group in groups])
    between = np.sum(sizes * (means - grand) ** 2) / (count - 1)
    within = sum(np.sum((g - g.mean()) ** 2) for g in groups) / (values - count)
    size = (values - np.sum(sizes**2) / values) / (count - 1)
    scale = between + (size - 1) * within
    return float((between - within) / scale) if scale > 0 else math.nan


@dataclasses.dataclass
class Progress:
    """Where the running step stands. Whoever learns something raises a count."""

    total: int  # trajectories of the step so far
    completed: int = 0  # tokens final
    verified: int = 0  # verdict in
    streamed: int = 0  # gradient started
    failed: int = 0
    tokens: int = 0  # of completed trajectories
    learner_secs: float = 0.0  # gradient work so far
    started_secs: float = 0.0  # on the monotonic clock
    added: int = 0  # of the total, since the step began: in place of others
    paused: Callable[[], bool] = lambda: False  # whether no environment can be started

    def add(self, members: int) -> None:
        """The step grows."""
        self.total += members
        self.added += members


@dataclasses.dataclass
class RunProgress:
    """Where the whole run stands. A step is one update, however many calls it takes."""

    steps: int  # of the whole run
    steps_done: int = 0  # a resumed run starts with more
    trajectories: int = 0  # of the steps begun, replacements once their step is done
    trajectories_done: int = 0  # settled: verified or failed

    def begin(self, total: int, now_secs: float = 0.0) -> Progress:
        """A step of `total` trajectories starts."""
        self.trajectories += total
        return Progress(total, started_secs=now_secs)

    def end(self, progress: Progress) -> None:
        """That step's update is done."""
        self.steps_done += 1
        self.trajectories += progress.added
        self.trajectories_done += progress.verified + progress.failed

    @property
    def title(self) -> str:
        """Names the running step, counted from 1."""
        return f"step {min(self.steps_done + 1, self.steps)}/{self.steps}"

    def __str__(self) -> str:
        return (
            f"{self.steps_done}/{self.steps} steps, "
            f"{self.trajectories_done}/{self.trajectories} trajectories"
        )
