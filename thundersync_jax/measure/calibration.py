"""What a benchmark has to know before it measures: how fast the learner is alone.

What a gradient call costs on an otherwise idle learner, hence whether packing pays and
what contention is; and by how much lognormal latencies must be scaled for rollouts to
take as long as learning, where streaming gains most.
"""

import collections
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from thundersync_jax.measure import replay
from thundersync_jax.metrics.learner_clock import Ran
from thundersync_jax.run.compiling import made_up_calls
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import roll_out
from thundersync_jax.stream import padding
from thundersync_jax.stream.schedule import Prompt, TurnCall
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
    length: Any
    kind: Literal["direct", "streamed", "turn", "replay"]


def shape(ran: Ran) -> Shape:
    """The shape of a call that ran, of samples."""
    call = ran.call
    if isinstance(call, TurnCall):
        return Shape(1, _length(call.item.bucket), "replay" if call.replay else "turn")
    kind = "direct" if call.place is None else "streamed"
    return Shape(call.rows, _length(call.items[0].bucket), kind)


def _length(bucket: Any) -> Any:
    """A bucket of the learner, without the group whose prompt a sample continues."""
    return bucket[:3]


class IdleWork:
    """Medians of calls on an otherwise idle learner, by shape.

    Measured again between the steps of a benchmark, so that a machine that drifts does
    so for both sides of a ratio.

    Args:
      accumulator: How sums are taken; None as the config says.
      turns: Whether calls of the turn rule are among them.
    """

    def __init__(self, accumulator: str | None = None, turns: bool = False):
        self._accumulator = accumulator
        self._turns = turns
        self._secs: dict[Shape, list[float]] = collections.defaultdict(list)

    def measure(self, run: Run, params: Tree, version: int, rows: int) -> None:
        """Runs made-up members of every bucket, while nothing else runs."""
        sums = self._accumulator
        run.clock.take()
        made_up_calls(run, params, version, "trajectory", 1, _MEMBERS, sums)
        for each in dict.fromkeys((1, rows)):
            made_up_calls(run, params, version, "batch", each, _MEMBERS * each, sums)
        if self._turns:
            made_up_calls(run, params, version, "turn", rows=1, members=1)
        for ran in run.clock.take():
            self.add(ran)

    def add(self, ran: Ran) -> None:
        """Takes one call that ran alone."""
        if not isinstance(ran.call, Prompt):
            self._secs[shape(ran)].append(ran.secs)

    def contention(self, calls: Iterable[Ran]) -> float:
        """The work of calls over that of the same calls on an idle learner.

        Prompts that groups share are left out. NaN where there are no calls.
        """
        calls = [ran for ran in calls if not isinstance(ran.call, Prompt)]
        alone = sum(self._alone_secs(shape(ran)) for ran in calls)
        return sum(ran.secs for ran in calls) / alone if calls else math.nan

    def batch_secs(self, buckets: Iterable[Any], rows: int) -> float:
        """What the batch rule would need alone, with so many rows per call."""
        secs = 0.0
        for bucket, count in collections.Counter(buckets).items():
            full, left = divmod(count, rows)
            if 2 * left > rows:  # as the schedule pads
                full, left = full + 1, 0
            length = _length(bucket)
            secs += full * self._alone_secs(Shape(rows, length, "direct"))
            secs += left * self._alone_secs(Shape(1, length, "direct"))
        return secs

    def _alone_secs(self, kind: Shape) -> float:
        # Shared streamed calls are rare, and the same program as direct ones. Exact
        # sums have no direct path.
        other = {"direct": "streamed", "streamed": "direct"}.get(kind.kind, kind.kind)
        found = self._secs.get(kind) or self._secs[kind._replace(kind=other)]
        return statistics.median(found)


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
    """The bucket of each trajectory, as the learner has it."""

    def bucket(one):
        found = padding.shapes(run.samples.whole(one).tree)
        prompt = run.samples.prompt(one.key.step, one.key.group)
        return found if prompt is None else (*found, padding.shapes(prompt.tree))

    return [bucket(one) for one in trajectories]


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
