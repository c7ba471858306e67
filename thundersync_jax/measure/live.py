"""One step live under a release rule, and everything that is measured of it.

Sampling keys and latencies depend on the step's number alone: from the same parameters
every rule samples the same trajectories and waits for the same tools and verdicts.
"""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from thundersync_jax.metrics.learner_clock import Ran
from thundersync_jax.metrics.progress import Progress
from thundersync_jax.metrics.timing import StepTiming, predicted_step_secs, step_timing
from thundersync_jax.metrics.timing import release_secs as release_times
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import Step, run_step
from thundersync_jax.stream.schedule import Prompt, TurnCall
from thundersync_jax.types import Span

Tree = Any


@dataclasses.dataclass(frozen=True)
class Live:
    """One step under one release rule, in seconds.

    Attributes:
      step: What the step brought.
      timing: Its times.
      predicted_secs: The formula on the rule's own arrivals and own work.
      first_release_secs: From the start until the first gradient might begin.
      last_work_secs: Of the gradient call that ended last.
      boundary_secs: From the end of reward and work to the end of the step.
      dispatch_secs: For each call that found its learner idle, from the moment it
        might begin (the verdict in the rollout thread) until the device had it.
      spans: Its bars.
    """

    step: Step
    timing: StepTiming
    predicted_secs: float
    first_release_secs: float
    last_work_secs: float
    boundary_secs: float
    dispatch_secs: list[float]
    spans: list[Span]


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
    """Runs one step and measures it.

    Args:
      run: Its sampler holds `params`.
      params: Where the gradient is taken.
      version: Their policy version.
      step: Which tasks, keys and latencies.
      release: The release rule.
      rows: Rows per call; 0 for the config's.
      accumulator: How sums are taken; None as the config says.
      boundary: What belongs to the step after its gradient is there.
      progress: As of `run_step`.
      on_progress: Likewise.
    """
    stream = run.new_stream(params, version, release, rows, accumulator)
    done = run_step(run, stream, run.train_jobs(step), version, progress, on_progress)
    boundary(done)
    end = time.monotonic()
    spans = run.timeline.spans(since=done.start_secs)
    arrivals = _arrivals(done, release, run.judged)
    worked = max([done.last_reward_secs, *(ran.end_secs for ran in done.calls)])
    return Live(
        step=done,
        timing=step_timing(spans, done.start_secs, end, run.config.mesh.replica),
        predicted_secs=predicted_secs(
            done, arrivals, end - worked, run.config.mesh.replica
        ),
        first_release_secs=min(arrivals, default=done.last_reward_secs)
        - done.start_secs,
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

    None for `releases` takes all that make a difference for the run's loss.

    The boundary is the gradient's reduction alone: nothing is updated. A step that had
    to compile is done again, so that no rule pays for another's programs.
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


def predicted_secs(
    step: Step, arrivals: Sequence[float], boundary_secs: float, replicas: int
) -> float:
    """The step time of a learner never idle beside ready work, for these arrivals.

    Args:
      step: Whose calls are the work, and whose last reward is waited for.
      arrivals: When each call might begin, on the clock of the step.
      boundary_secs: F.
      replicas: Taken for one learner that is so many times as fast.
    """
    work = [ran.secs / replicas for ran in step.calls]
    times = [secs - step.start_secs for secs in (*arrivals, step.last_reward_secs)]
    return predicted_step_secs(times, [*work, 0.0], boundary_secs)


def _arrivals(step: Step, release: str, judged: bool) -> list[float]:
    """When each call might begin: at the release of its last sample.

    A turn once it is scored; a replay once its trajectory is complete; a shared prompt
    once the last of its group is released.
    """
    failed = {failed.key[1:3]: failed.secs for failed in step.failures}
    ended = step.rewarded_secs if judged else step.completed_secs
    rule = "trajectory" if release == "turn" else release
    released = release_times(ended | failed, rule)

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


_LOOK_SECS = 0.002


class PeakBytes:
    """Watches some devices while it is used as a context.

    Attributes:
      bytes: The most so far, of the fullest device.

    Args:
      devices: All of one kind; with none it does nothing.
    """

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
            self.bytes = max(self.bytes, *(one["bytes_in_use"] for one in stats))
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
