"""What ran when: bars of rollouts, verification, learner and boundary.

Spans are collected from any thread and written as a Chrome trace that Perfetto opens.
Times are seconds of `time.monotonic`. Nothing is measured here (module `timing`) and
nothing is drawn (module `pictures`); whether a device really worked during a span is up
to whoever reports it.
"""

import collections
import contextlib
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from thundersync_jax.types import Span

# Order and titles in the trace viewer.
TRACKS = {
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
    rows of their own, since the format nests them otherwise. Times are microseconds
    since the first bar.
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
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(trace), encoding="utf-8")
    os.replace(partial, path)


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
        row = next(free, None)
        if row is None:
            rows.append([span])
        else:
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
