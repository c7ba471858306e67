"""Timelines: collected from threads, written for viewers, measured, drawn."""

import itertools
import json
import sys
import threading

import numpy as np
import pytest

from thundersync_jax.metrics import timing
from thundersync_jax.metrics.timing import Timeline, write_chrome_trace
from thundersync_jax.types import Span
from thundersync_jax.view import curves, pictures

SECS = 1e-12  # float64 sums of a few numbers of size 1


def bars(track, lane, *edges):
    return [Span(track, "bar", start, end, lane) for start, end in edges]


def test_spans_of_all_threads_are_kept_in_order_of_time():
    timeline = Timeline()

    def work(lane):
        for start in range(100):
            timeline.add(Span("rollout", "decode", start, start + 1, str(lane)))

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts = [span.start_secs for span in timeline.spans()]
    assert len(starts) == 800
    assert starts == sorted(starts)
    assert {span.start_secs for span in timeline.spans(since=98)} == {98, 99}


def test_a_block_that_raises_still_leaves_its_span():
    ticks = iter([1.0, 4.0])
    timeline = Timeline(clock=lambda: next(ticks))
    with pytest.raises(KeyError), timeline.span("boundary", "update"):
        raise KeyError
    assert timeline.spans() == [Span("boundary", "update", 1.0, 4.0)]


def test_a_long_run_keeps_the_newest_spans_only():
    timeline = Timeline(keep=3)
    for start in range(10):
        timeline.add(Span("learner", "call", start, start + 1))
    assert [span.start_secs for span in timeline.spans()] == [7, 8, 9]


def read_trace(path):
    events = json.loads(path.read_text())["traceEvents"]
    named = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] in ("process_name", "thread_name")
    }
    return named, [event for event in events if event["ph"] == "X"]


def test_trace_has_a_process_per_track_and_a_thread_per_lane(tmp_path):
    spans = [
        Span("boundary", "update", 108.0, 109.0),
        Span("rollout", "decode", 101.0, 102.5, "g10m0"),
        Span("rollout", "decode", 100.0, 101.0, "g2m0"),
        Span("verify", "verify", 102.5, 103.0, "g10m0"),
        Span("learner", "direct g2m0", 103.0, 103.25, "replica 0"),
    ]
    write_chrome_trace(tmp_path / "timeline.json", spans)
    named, events = read_trace(tmp_path / "timeline.json")
    processes = [name for key, name in named.items() if key[0] == "process_name"]
    assert processes == ["rollouts", "verification", "learner", "boundary"]
    threads = [name for key, name in named.items() if key[0] == "thread_name"]
    assert threads == ["g2m0", "g10m0", "g10m0", "replica 0", "boundary"]
    for event in events:
        assert ("thread_name", event["pid"], event["tid"]) in named
    times = [(event["ts"], event["dur"]) for event in events]
    seconds = [(0, 1), (1, 1.5), (2.5, 0.5), (3, 0.25), (8, 1)]
    assert times == [(1e6 * start, 1e6 * length) for start, length in seconds]


def test_overlapping_spans_of_one_lane_never_share_a_trace_row(tmp_path):
    rng = np.random.default_rng(0)
    starts = rng.uniform(0, 10, 60)
    ends = starts + rng.exponential(1.0, 60)
    edges = zip(starts, ends, strict=True)
    spans = [Span("learner", "call", a, b, f"replica {i % 2}") for i, (a, b) in
             enumerate(edges)]  # fmt: skip
    write_chrome_trace(tmp_path / "timeline.json", spans)
    _, events = read_trace(tmp_path / "timeline.json")
    assert len(events) == 60
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    rows = {}
    for event in events:
        rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for row in rows.values():
        for before, after in itertools.pairwise(row):
            # A thousandth of a microsecond is the last digit that is written.
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_a_trace_that_fails_leaves_the_last_one(tmp_path):
    path = tmp_path / "timeline.json"
    write_chrome_trace(path, bars("learner", "replica 0", (0, 1)))
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_chrome_trace(path, [Span("learner", object(), 0.0, 1.0)])
    assert path.read_bytes() == before


def test_overlapping_work_of_a_lane_counts_once_and_lanes_apart():
    spans = [
        *bars("learner", "replica 0", (0, 4), (1, 2), (3, 5), (7, 8)),
        *bars("learner", "replica 1", (0, 1)),
        *bars("rollout", "g0m0", (0, 100)),
    ]
    assert timing.busy_secs(spans, "learner") == {"replica 0": 6, "replica 1": 1}


@pytest.mark.parametrize(("replicas", "idle"), [(1, 0.7), (2, 0.8), (4, 0.85)])
def test_idle_counts_replicas_that_never_worked_and_the_boundary_as_work(
    replicas, idle
):
    spans = [
        *bars("learner", "replica 0", (13, 15)),
        *bars("boundary", "", (19, 20)),
        *bars("learner", "replica 0", (0, 9), (20, 30)),  # other steps
    ]
    measured = timing.idle_fraction(spans, 10, 20, replicas)
    assert measured == pytest.approx(idle, abs=SECS)


def test_step_is_measured_from_its_bars():
    spans = [
        *bars("rollout", "g0m0", (10, 14)),
        *bars("verify", "g0m0", (14, 16)),
        *bars("learner", "replica 0", (15, 18)),
        *bars("boundary", "", (18, 18.5)),
    ]
    step = timing.step_timing(spans, 10.0, 18.5)
    assert step == pytest.approx((8.5, 6.0, 3.0, 0.5, 1 - 3.5 / 8.5, 2.5), abs=SECS)


def simulate(arrivals, works, boundary):
    """One learner that takes ready work in the order of arrival."""
    now = 0.0
    for arrival, work in sorted(zip(arrivals, works, strict=True)):
        now = max(now, arrival) + work
    return now + boundary


def test_formula_is_the_step_time_of_a_learner_that_never_idles_beside_work():
    rng = np.random.default_rng(1)
    for _ in range(200):
        count = rng.integers(1, 9)
        arrivals, works = rng.exponential(1.0, count), rng.exponential(0.4, count)
        predicted = timing.predicted_step_secs(arrivals, works, 0.3)
        assert predicted == pytest.approx(simulate(arrivals, works, 0.3), abs=SECS)
    assert timing.predicted_step_secs([], [], 0.3) == 0.3


def test_earlier_release_is_never_slower_and_batch_is_rollout_plus_learner():
    rng = np.random.default_rng(2)
    for _ in range(50):
        rewarded = {(g, m): rng.exponential(2.0) for g in range(4) for m in range(4)}
        works = {key: rng.exponential(0.2) for key in rewarded}
        steps = []
        for release in ("batch", "group", "trajectory"):
            arrivals = timing.release_secs(rewarded, release)
            ordered = [(arrivals[key], works[key]) for key in rewarded]
            steps.append(timing.predicted_step_secs(*zip(*ordered, strict=True), 0.1))
        batch = max(rewarded.values()) + sum(works.values()) + 0.1
        assert steps[0] == pytest.approx(batch, abs=1e-9)
        assert steps == sorted(steps, reverse=True)
        assert steps[0] <= 2 * steps[2] + 1e-9  # no more than twice as fast


def test_group_release_waits_for_the_last_of_its_group():
    rewarded = {("a", 0): 1.0, ("a", 1): 5.0, ("b", 0): 2.0}
    group = timing.release_secs(rewarded, "group")
    assert group == {("a", 0): 5.0, ("a", 1): 5.0, ("b", 0): 2.0}
    assert set(timing.release_secs(rewarded, "batch").values()) == {5.0}
    with pytest.raises(ValueError, match=r"'trajectories'.*expected 'batch', 'group'"):
        timing.release_secs(rewarded, "trajectories")


def panel(replicas=1, scale=1.0, shift=50.0):
    spans = []
    for member in range(6):
        a, lane = shift + 0.1 * member * scale, f"g0m{member}"
        b, c, d = a + 0.2 * scale, a + 0.5 * scale, a + 0.6 * scale
        replica = f"replica {member % replicas}"
        spans += [
            Span("rollout", "decode", a, b, lane),
            Span("rollout", "tool", b, c, lane),
            Span("verify", "verify", c, d, lane),
            Span("learner", f"streamed {lane}", d, d + 0.1 * scale, replica),
        ]
    return [*spans, Span("boundary", "update", d + 0.1 * scale, d + 0.2 * scale)]


@pytest.mark.parametrize(
    "panels",
    [
        {},
        {"batch": panel(scale=2.0), "group": [], "trajectory": panel(replicas=2)},
        {"batch": panel(scale=5000.0)},
        {"trajectory": [Span("rollout", "decode", 1.0, 2.0, "g0m0")]},
    ],
)
def test_timeline_is_drawn_from_any_spans_without_global_state(panels, tmp_path):
    pytest.importorskip("matplotlib")
    before = "matplotlib.pyplot" in sys.modules
    pictures.draw_timeline(tmp_path / "timeline.png", panels)
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_a_step_without_a_batch_panel_is_compared_with_batch_seconds(
    tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib")
    figures, make = [], pictures.new_figure
    monkeypatch.setattr(
        pictures, "new_figure", lambda *size: figures.append(make(*size)) or figures[-1]
    )
    pictures.draw_timeline(tmp_path / "one.png", {"trajectory": panel()}, 2.6)
    ((axis,),) = [figure.axes for figure in figures]
    assert axis.get_title(loc="right").split()[-2:] == ["2.00x", "batch"]
    assert [text.get_text() for text in axis.texts][-1] == "1.30 s sooner"
    assert axis.get_xlim()[1] > 2.6


def drawn_bars(bars, tmp_path, monkeypatch):
    """The axis that `draw_bars` fills: its bars' pieces by row, and its texts."""
    pytest.importorskip("matplotlib")
    figures, make = [], pictures.new_figure
    monkeypatch.setattr(
        pictures, "new_figure", lambda *size: figures.append(make(*size)) or figures[-1]
    )
    pictures.draw_bars(tmp_path / "bars.png", bars)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    ((axis,),) = [figure.axes for figure in figures]
    pieces = {row: [] for row in range(len(bars))}
    for collection in axis.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            if box.width > 0:
                pieces[round((box.y0 + box.y1) / 2)].append((box.x0, box.x1))
    return pieces, [text.get_text().split() for text in axis.texts]


@pytest.mark.parametrize("boundary_secs", [0.0, 0.1, 3.0])
def test_the_pieces_of_a_bar_make_up_the_median_step(
    boundary_secs, tmp_path, monkeypatch
):
    """Also where the medians of the parts add up to more than that."""
    bars = {
        "batch": pictures.Bar([4.0, 9.0, 4.5], 2.5, 0.0, boundary_secs, 4.4),
        "group": pictures.Bar([3.0], 2.5, 0.5, boundary_secs, 3.0),
        "trajectory": pictures.Bar([2.25, 2.75], 2.5, 2.0, boundary_secs, 2.0),
    }
    pieces, texts = drawn_bars(bars, tmp_path, monkeypatch)
    for row, middle in enumerate((4.5, 3.0, 2.5)):
        assert pieces[row][0][0] == 0.0
        assert pieces[row][-1][1] == pytest.approx(middle)
        for (_, end), (start, _) in itertools.pairwise(pieces[row]):
            assert start == pytest.approx(end)
    assert texts == [
        ["4.50", "s"],
        ["3.00", "s", "1.50x"],
        ["2.50", "s", "1.80x"],
    ]


def test_bars_without_batch_compare_with_nothing(tmp_path, monkeypatch):
    bars = {"trajectory": pictures.Bar([7200.0], 7200.0, 7200.0, 0.0, 7200.0)}
    _, texts = drawn_bars(bars, tmp_path, monkeypatch)
    assert texts == [["120.00", "min"]]


@pytest.mark.parametrize("points", [[], [(60.0, 0.4, 0.3, 0.5), (900.0, 1, 0.98, 1)]])
def test_success_is_drawn_from_any_points(points, tmp_path):
    pytest.importorskip("matplotlib")
    curves.draw_success(tmp_path / "success.png", points, warm_start_secs=80.0)
    assert (tmp_path / "success.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("steps", [1, 40])
def test_saved_seconds_are_drawn_as_sums_over_the_steps(steps, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    figures, make = [], pictures.new_figure
    monkeypatch.setattr(
        pictures, "new_figure", lambda *size: figures.append(make(*size)) or figures[-1]
    )
    secs = {"batch": [3.0] * steps, "group": [2.5] * steps, "trajectory": [2.0] * steps}
    curves.draw_saved(tmp_path / "saved.png", secs, "trajectory")
    assert (tmp_path / "saved.png").read_bytes().startswith(b"\x89PNG")
    ((axis,),) = [figure.axes for figure in figures]
    ends = [line.get_ydata()[-1] for line in axis.lines]
    assert ends == pytest.approx([3.0 * steps, 2.5 * steps, 2.0 * steps])
    texts = [text.get_text() for text in axis.texts]
    assert texts[0] == f"batch {3 * steps:.2f} s, 1.50x"
    assert texts[2] == f"trajectory {2 * steps:.2f} s"


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
_BLINDNESS = {
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
_TO_XYZ = np.asarray(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
)


def lab(color, blindness):
    values = np.asarray([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(
        values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4
    )
    seen = np.clip(np.asarray(_BLINDNESS[blindness]) @ linear, 0, 1)
    x, y, z = np.cbrt(_TO_XYZ @ seen / [0.9505, 1.0, 1.089])
    return np.asarray([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("blindness", _BLINDNESS)
def test_colours_differ_under_every_colour_blindness(blindness):
    colors = [pictures.DECODE, pictures.WAIT, pictures.VERIFY, pictures.DIRECT]
    colors += [pictures.STREAMED, pictures.BOUNDARY]
    seen = [lab(color, blindness) for color in colors]
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(one - other) > 15  # CIE 1976; 2.3 is just noticeable
