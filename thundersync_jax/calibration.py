"""What a benchmark has to know before it measures: how fast the learner is alone.

What a gradient call costs on an otherwise idle learner, hence whether packing pays and
what contention is; and by how much lognormal latencies must be scaled for rollouts to
take as long as learning, where streaming gains most.
"""

import collections
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from thundersync_jax import comparison, signature
from thundersync_jax.compiling import made_up_calls
from thundersync_jax.learner_clock import Ran
from thundersync_jax.run import Run
from thundersync_jax.step import roll_out
from thundersync_jax.types import Trajectory

Tree = Any
TOLERANCE = 0.1  # rollouts and learner agree within it
_AIM = 0.03  # and calibration stops here
_PASSES = 5  # over the steps, at most
_LEAST_SCALE = 0.02
_MEMBERS = 4  # calls of a kind in one measurement
LEAST_GAIN = 0.05  # of full calls, to be used: their last one keeps a step waiting


class Shape(NamedTuple):
    """What decides how long a gradient call takes alone."""

    rows: int
    bucket: Any
    streamed: bool


def shape(ran: Ran) -> Shape:
    """The shape of a call that ran."""
    call = ran.call
    return Shape(call.rows, call.items[0].bucket, call.place is not None)


class IdleWork:
    """Medians of calls on an otherwise idle learner, by shape.

    Measured again between the steps of a benchmark, so that a machine that drifts does
    so for both sides of a ratio.

    Args:
      accumulator: How sums are taken; None as the config says.
    """

    def __init__(self, accumulator: str | None = None):
        self._accumulator = accumulator
        self._secs: dict[Shape, list[float]] = collections.defaultdict(list)

    def measure(self, run: Run, params: Tree, version: int, rows: int) -> None:
        """Runs made-up members of every bucket, while nothing else runs."""
        sums = self._accumulator
        run.clock.take()
        made_up_calls(run, params, version, "trajectory", 1, _MEMBERS, sums)
        for each in dict.fromkeys((1, rows)):
            made_up_calls(run, params, version, "batch", each, _MEMBERS * each, sums)
        for ran in run.clock.take():
            self.add(ran)

    def add(self, ran: Ran) -> None:
        """Takes one call that ran alone."""
        self._secs[shape(ran)].append(ran.secs)

    def contention(self, calls: Iterable[Ran]) -> float:
        """The work of calls over that of the same calls on an idle learner.

        NaN where there are no calls.
        """
        calls = list(calls)
        alone = sum(self._alone_secs(shape(ran)) for ran in calls)
        return sum(ran.secs for ran in calls) / alone if calls else math.nan

    def batch_secs(self, buckets: Iterable[Any], rows: int) -> float:
        """What the batch rule would need alone, with so many rows per call."""
        secs = 0.0
        for bucket, count in collections.Counter(buckets).items():
            full, left = divmod(count, rows)
            if 2 * left > rows:  # as the schedule pads
                full, left = full + 1, 0
            secs += full * self._alone_secs(Shape(rows, bucket, False))
            secs += left * self._alone_secs(Shape(1, bucket, False))
        return secs

    def _alone_secs(self, kind: Shape) -> float:
        # Shared streamed calls are rare, and the same program as direct ones. Exact
        # sums have no direct path.
        other = kind._replace(streamed=not kind.streamed)
        return statistics.median(self._secs.get(kind) or self._secs[other])


def sample(
    run: Run, params: Tree, version: int, step: int
) -> tuple[list[Trajectory], float]:
    """Rolls a step out as a benchmark will: with a sampler that remembers nothing.

    Returns:
      As `roll_out`.
    """
    run.publish(params, version)
    return roll_out(run, step, version)


def kinds(run: Run, trajectories: Iterable[Trajectory]) -> list[Any]:
    """The length bucket of each trajectory, as in `Shape`."""
    return [signature.shapes(run.samples.whole(one).tree) for one in trajectories]


def learner_secs(
    run: Run, params: Tree, trajectories: Sequence[Trajectory], rows: int
) -> float:
    """L of the batch rule, seconds of gradient work with so many rows per call."""
    run.clock.take()
    comparison.replay(run, params, comparison.in_order(trajectories), "batch", rows)
    return sum(ran.secs for ran in run.clock.take())


def scale_latencies(
    run: Run, params: Tree, version: int, steps: Sequence[int], wanted_secs: float
) -> list[tuple[float, float]]:
    """Sets `run.latency_scale` so that the median rollout takes `wanted_secs`.

    Returns:
      The scales that were tried, with the median R of the steps; the best one is set.
    """
    tried: list[tuple[float, float]] = []
    while True:
        secs = statistics.median(
            sample(run, params, version, step)[1] for step in steps
        )
        tried.append((run.latency_scale, secs))
        best = min(tried, key=lambda entry: abs(entry[1] / wanted_secs - 1))
        # Below the least scale decoding alone takes longer: none would help.
        enough = min(scale for scale, _ in tried) < _LEAST_SCALE
        enough |= abs(best[1] / wanted_secs - 1) <= _AIM or len(tried) == _PASSES
        if enough:
            run.latency_scale = best[0]
            return tried
        run.latency_scale = next_scale(tried, wanted_secs)


def next_scale(tried: Sequence[tuple[float, float]], wanted_secs: float) -> float:
    """The next guess: R grows about linearly with the scale.

    Args:
      tried: (scale, R in seconds), the newest last.
      wanted_secs: R that is asked for.
    """
    scale, secs = tried[-1]
    if len(tried) > 1:
        before, before_secs = tried[-2]
        slope = (secs - before_secs) / (scale - before) if scale != before else 0.0
        guess = scale + (wanted_secs - secs) / slope if slope > 0 else 0.0
        if guess > 0:
            return float(np.clip(guess, scale / 4, scale * 4))
    return scale * float(np.clip(wanted_secs / secs, 0.1, 10.0))
