"""One step live under a release rule, and everything that is measured of it.

Sampling keys and latencies depend on the step's number alone: from the same parameters
every rule samples the same trajectories and waits for the same tools and verdicts.
"""

import collections
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.measure import replay
from thundersync_jax.metrics.learner_clock import Ran
from thundersync_jax.metrics.timing import (
    Progress,
    StepTiming,
    predicted_step_secs,
    release_secs,
    step_timing,
)
from thundersync_jax.run.run import Run
from thundersync_jax.run.samples import spans
from thundersync_jax.run.step import Step, roll_out, run_step
from thundersync_jax.stream import padding
from thundersync_jax.stream.schedule import Prompt, TurnCall
from thundersync_jax.types import Span, Trajectory
from thundersync_jax.view import tables
from thundersync_jax.view.display import Display
from thundersync_jax.view.tables import Column

Tree = Any
_LOOK_SECS = 0.002  # between two looks at a device's memory
_CLOSING_TRIES = 3  # steps, until one has a gradient to compare
TOLERANCE = 0.1  # relative, within which rollouts take as long as the learner
_AIM = 0.03  # the same, at which calibration stops
_PASSES = 5  # over the steps, at most
_LEAST_SCALE = 0.02  # of latencies: below it decoding alone takes longer
LEAST_GAIN = 0.05  # of full calls, to be used: their last one keeps a step waiting
_CLOSING_COLUMNS = (
    Column("release", 10, left=True),
    Column("step\nsecs", 6),
    Column("over\nbatch", 6),
    Column("learner\nidle", 7),
    Column("tail after\nlast reward", 11),
    Column("formula\nsecs", 7),
    Column("difference", 10),
    Column("control", 8),
)
_CLOSING_NOTES = (
    "over batch: batch step time over this one. formula: a learner never idle beside "
    "ready work.",
    "difference: gradient against batch, relative. control: batch against itself in "
    "other orders.",
)


@dataclasses.dataclass(frozen=True)
class Live:
    """One step under one release rule, in seconds."""

    step: Step
    timing: StepTiming
    predicted_secs: float  # the formula on the rule's own arrivals and own work
    first_release_secs: float  # from the start until the first gradient might begin
    last_work_secs: float  # of the gradient call that ended last
    boundary_secs: float  # from the end of reward and work to the end of the step
    # Of each call that found its learner idle, from the moment it might begin (the
    # verdict in the rollout thread) until the device had it.
    dispatch_secs: list[float]
    spans: list[Span]  # bars of the step's timeline


def live(
    run: Run,
    params: Tree,
    version: int,
    step: int,
    release: str,
    *,
    rows: int = 0,
    accumulator: str | None = None,
    boundary: Callable[[Step], None] = lambda step: None,
    progress: Progress | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Live:
    """Runs one step, the one of this number, and measures it.

    The sampler holds `params`, those of `version`. `rows` (trajectories per call, 0 the
    config's) and `accumulator` are as in `replay.replay`, `progress` and `on_progress`
    as in `run_step`. `boundary` does the rest of the step once its gradient is there.
    """
    stream = run.new_stream(params, version, release, rows, accumulator)
    done = run_step(run, stream, run.train_jobs(step), version, progress, on_progress)
    boundary(done)
    end = time.monotonic()
    spans, replicas = run.timeline.spans(since=done.start_secs), run.config.mesh.replica
    arrivals = _arrivals(done, release, run.judged)
    last_reward_secs = done.last_reward_secs
    worked = max([last_reward_secs, *(ran.end_secs for ran in done.calls)])
    return Live(
        step=done,
        timing=step_timing(spans, done.start_secs, end, replicas),
        predicted_secs=predicted_secs(done, arrivals, end - worked, replicas),
        first_release_secs=min(arrivals, default=last_reward_secs) - done.start_secs,
        last_work_secs=done.calls[-1].secs if done.calls else 0.0,
        boundary_secs=end - worked,
        dispatch_secs=_dispatch_secs(done.calls, arrivals),
        spans=spans,
    )


def compare(
    run: Run,
    params: Tree,
    version: int,
    step: int,
    releases: Sequence[str] | None = None,
) -> dict[str, Live]:
    """Runs the same step under several release rules, from the same parameters.

    None for `releases` takes all that make a difference for the run's loss. The
    boundary is the gradient's reduction alone: nothing is updated. A step that had to
    compile is done again, so that no rule pays for another's programs.
    """
    releases = releases or run.config.releases
    if not any(span.track == "rollout" for span in run.timeline.spans()):
        live(run, params, version, step, releases[0])  # the sampler compiles
    results = {}
    for release in releases:
        results[release] = live(run, params, version, step, release)
        if results[release].step.report.compiles:
            results[release] = live(run, params, version, step, release)
    return results


def closing_comparison(run: Run, display: Display, params: Tree, version: int) -> None:
    """Prints one more step, from the final parameters, under every release rule."""
    first = run.config.steps + 1
    for step in range(first, first + _CLOSING_TRIES):
        lives = compare(run, params, version, step)
        batch = lives["batch"].step
        if batch.report.gradient_norm > 0:
            break
    control, differences = None, dict.fromkeys(lives)
    if batch.report.gradient_norm > 0:
        control = replay.control_difference(
            run, params, batch.trajectories, batch.gradient, seed=step
        )
        differences = {
            release: replay.relative_difference(measured.step.gradient, batch.gradient)
            for release, measured in lives.items()
        }
    batch_secs = lives["batch"].timing.step_secs
    rows = [
        [
            release,
            tables.seconds(measured.timing.step_secs),
            f"{batch_secs / measured.timing.step_secs:.2f}x",
            tables.percent(measured.timing.idle_fraction),
            tables.seconds(measured.timing.tail_secs),
            tables.seconds(measured.predicted_secs),
            tables.scientific(differences[release]),
            tables.scientific(control),
        ]
        for release, measured in lives.items()
    ]
    title = "One more step from the final parameters, under every release rule"
    display.table(_CLOSING_COLUMNS, rows, title)
    for note in _CLOSING_NOTES:
        display.line(note)
    if not run.additive:
        groups = {group for group, _ in batch.advantages}
        moving = {group for (group, _), a in batch.advantages.items() if a != 0}
        display.line(
            f"{len(groups - moving)} of {len(groups)} groups have advantages of 0 "
            "alone, no gradient: only batch and group release know in time."
        )


def predicted_secs(
    step: Step, arrivals: Sequence[float], boundary_secs: float, replicas: int
) -> float:
    """The step time of a learner never idle beside ready work, for these arrivals.

    `arrivals` are seconds [calls] of the monotonic clock at which each call of the step
    might begin; `boundary_secs` is F; replicas count as one so many times as fast.
    """
    work = [ran.secs / replicas for ran in step.calls]
    times = [secs - step.start_secs for secs in (*arrivals, step.last_reward_secs)]
    return predicted_step_secs(times, [*work, 0.0], boundary_secs)


def released_secs(
    step: Step, release: str, judged: bool
) -> dict[tuple[int, int], float]:
    """When a rule lets the gradient of each (group, member) start.

    It waits for verdicts where rewards are in the loss (`judged`). Failed members hold
    up their group as well.
    """
    failed = {failed.key[1:3]: failed.secs for failed in step.failures}
    ended = step.rewarded_secs if judged else step.completed_secs
    return release_secs(ended | failed, release)


def _arrivals(step: Step, release: str, judged: bool) -> list[float]:
    """When each call might begin: its last sample is released, or its turn scored."""
    rule = "trajectory" if release == "turn" else release
    released = released_secs(step, rule, judged)

    def arrival(call):
        if isinstance(call, Prompt):
            return max(t for (group, _), t in released.items() if group == call.group)
        if isinstance(call, TurnCall) and not call.replay:
            return step.turn_secs[call.item[:3]]
        items = [call.item] if isinstance(call, TurnCall) else call.items
        return max(released[item[:2]] for item in items)

    return [arrival(ran.call) for ran in step.calls]


def _dispatch_secs(calls: Sequence[Ran], arrivals: Sequence[float]) -> list[float]:
    free: dict[int, float] = {}
    waits = []
    for ran, arrival in zip(calls, arrivals, strict=True):
        if free.get(ran.replica, 0.0) <= arrival:
            waits.append(ran.dispatched_secs - arrival)
        free[ran.replica] = ran.end_secs
    return waits


def sample(
    run: Run, params: Tree, version: int, step: int
) -> tuple[list[Trajectory], float]:
    """A step's trajectories from a sampler that remembers nothing, and R in seconds."""
    run.publish(params, version)
    return roll_out(run, step, version)


def kinds(run: Run, trajectories: Iterable[Trajectory]) -> list[Any]:
    """The bucket of each sample of some trajectories, as the learner has it."""

    def bucket(trajectory, span):
        shapes = padding.shapes(run.samples.whole(trajectory, *span).tree)
        prompt = run.samples.prompt(trajectory.key.step, trajectory.key.group)
        return shapes if prompt is None else (*shapes, padding.shapes(prompt.tree))

    return [bucket(t, span) for t in trajectories for span in spans(t)]


def learner_secs(
    run: Run, params: Tree, trajectories: Sequence[Trajectory], rows: int
) -> float:
    """L of the batch rule, seconds of gradient work with so many rows per call."""
    run.clock.take()
    replay.replay(run, params, replay.in_order(trajectories), "batch", rows)
    return sum(ran.secs for ran in run.clock.take())


def scale_latencies(
    run: Run, params: Tree, version: int, steps: Sequence[int], wanted_secs: float
) -> list[tuple[float, float]]:
    """Sets `run.latency_scale` so that the median rollout takes `wanted_secs`.

    Returns the scales that were tried, with the median R of the steps; the best is set.
    """
    tried: list[tuple[float, float]] = []
    while True:
        secs = statistics.median(sample(run, params, version, n)[1] for n in steps)
        tried.append((run.latency_scale, secs))
        best = min(tried, key=lambda entry: abs(entry[1] / wanted_secs - 1))
        enough = min(scale for scale, _ in tried) < _LEAST_SCALE
        enough |= abs(best[1] / wanted_secs - 1) <= _AIM or len(tried) == _PASSES
        if enough:
            run.latency_scale = best[0]
            return tried
        run.latency_scale = next_scale(tried, wanted_secs)


def next_scale(tried: Sequence[tuple[float, float]], wanted_secs: float) -> float:
    """The next guess after pairs of scale and R, which grows about linearly with it."""
    scale, secs = tried[-1]
    if len(tried) > 1:
        before, before_secs = tried[-2]
        slope = (secs - before_secs) / (scale - before) if scale != before else 0.0
        guess = scale + (wanted_secs - secs) / slope if slope > 0 else 0.0
        if guess > 0:
            return float(np.clip(guess, scale / 4, scale * 4))
    return scale * float(np.clip(wanted_secs / secs, 0.1, 10.0))


class PeakBytes:
    """As a context it watches devices: `bytes` is the most that one has held."""

    def __init__(self, devices: Collection[jax.Device]):
        self.bytes = 0
        self._devices = frozenset(devices)
        self._told = bool(devices) and all(device.memory_stats() for device in devices)
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="peak-bytes", daemon=True
        )

    def __enter__(self) -> "PeakBytes":
        if self._told:
            self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        if self._told:
            self._thread.join()

    def look(self) -> None:
        """Counts what is alive, where devices do not tell by themselves."""
        if self._devices and not self._told:
            self.bytes = max(self.bytes, alive_bytes(self._devices))

    def _watch(self) -> None:
        while True:
            stats = [device.memory_stats() for device in self._devices]
            self.bytes = max(self.bytes, *(device["bytes_in_use"] for device in stats))
            if self._ended.wait(_LOOK_SECS):
                return


def alive_bytes(devices: Collection[jax.Device]) -> int:
    """Bytes of the arrays that are alive, of the fullest of some devices."""
    buffers: dict[jax.Device, dict[int | str, int]] = collections.defaultdict(dict)
    for array in jax.live_arrays():
        if array.sharding.device_set.isdisjoint(devices):
            continue
        try:
            # Shards are arrays that jax has to make first; most arrays are whole.
            whole = len(array.sharding.device_set) == 1
            parts = [array] if whole else [s.data for s in array.addressable_shards]
            for part in parts:
                (device,) = part.sharding.device_set
                # Views of replicas are further arrays of the same buffers. Asking for
                # the address of what a program still writes would wait for it.
                ready = part.is_ready()
                where = part.unsafe_buffer_pointer() if ready else f"array {id(part)}"
                buffers[device][where] = part.nbytes
        except RuntimeError:  # a sampler on the learner's device has just donated it
            continue
    return max((sum(buffers[device].values()) for device in devices), default=0)
