"""One step: rollouts go out, events come in, one gradient comes back.

The learner's side of the loop. It runs in the main thread, reads the pool's events,
tells the stream, and otherwise waits: an event wakes it, and so does a gradient call
that ends. It never waits for a device before `finish`, and reads nothing back.

Between a verdict in the rollout thread and its gradient call on an idle learner lie, in
microseconds (2 CPU cores, 3M parameters in 13 arrays):

     15  this thread wakes up
     15  the schedule takes the reward and decides on a call
     50  numbers that the group's sums are multiplied by
     70  a look whether the sample lies on the device (with one replica it does)
     10  the replica's mesh is put in context
    180  dispatch of the compiled gradient, one handle per parameter array

Done before the verdict, at completion: token weights, padding, checks, and the copy to
the learner's device, 600 in all. After the gradient: units of the sums (70) and
dispatch of the fold (130), which waits for nothing. `bench` measures the whole way as
`dispatch_ms_median`, busy cores included.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax import state
from thundersync_jax.errors import StreamError
from thundersync_jax.learner_clock import Ran, Totals
from thundersync_jax.ledger import Report
from thundersync_jax.progress import Progress
from thundersync_jax.rollout.events import Completed, Event, Failed, Job, Rewarded
from thundersync_jax.run import Run
from thundersync_jax.stream import GradientStream
from thundersync_jax.types import Span, Trajectory

Tree = Any
_LOOK_SECS = 0.001  # between two looks at a device, where nothing wakes the loop
_WAIT_SECS = 0.25  # for events, and for calls that end


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step brought.

    Attributes:
      gradient: As `GradientStream.finish` returns it.
      report: Likewise.
      trajectories: Of all members, failed ones included where they have tokens, in
        (group, member) order.
      failures: Members without a verdict, and why, as they came.
      advantages: By (group, member), of the members that count.
      rewarded_secs: By (group, member), when the verdict came in, on the monotonic
        clock.
      calls: The gradient calls.
      start_secs: When the rollouts went out, on the same clock.
      last_reward_secs: When the last outcome came in.
    """

    gradient: Tree
    report: Report
    trajectories: list[Trajectory]
    failures: list[Failed]
    advantages: dict[tuple[int, int], float]
    rewarded_secs: dict[tuple[int, int], float]
    calls: list[Ran]
    start_secs: float
    last_reward_secs: float


def run_step(
    run: Run,
    stream: GradientStream,
    jobs: Sequence[Job],
    version: int,
    progress: Progress | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Step:
    """Rolls out the jobs and streams their gradients.

    Args:
      run: Its sampler holds the stream's parameters.
      stream: New, of this step.
      jobs: All members of all groups.
      version: Policy version of the parameters.
      progress: Counts to raise.
      on_progress: Called after every event.

    Raises:
      StreamError: More members failed than `rollout.failed_share_limit` allows, or the
        gradient is not finite.
    """
    run.clock.take()  # what ran before belongs to no step
    start = time.monotonic()
    progress = progress or Progress(len(jobs), started_secs=start)
    work = run.clock.totals
    sizes = collections.Counter(job.key.group for job in jobs)
    for group in sorted(sizes):
        stream.open_group(group, sizes[group])
    trajectories: dict[tuple[int, int], Trajectory] = {}
    rewarded: dict[tuple[int, int], float] = {}
    failures: list[Failed] = []
    last_reward = start
    for event in rollouts(run, jobs, version, stream.advance):
        place = event.key.group, event.key.member
        _tell(run, stream, event)
        if isinstance(event, Failed):
            failures.append(event)
        elif isinstance(event, Rewarded):
            rewarded[place] = event.secs
        if not isinstance(event, Completed):
            last_reward = max(last_reward, event.secs)
        if event.trajectory is not None:
            trajectories[place] = event.trajectory
        _count(progress, event, run.clock.totals, work)
        on_progress(progress)
    _check_failures(failures, len(jobs), run.config.rollout.failed_share_limit)
    gradient, report = stream.finish()
    calls = run.clock.take()
    worked = max([last_reward, *(ran.end_secs for ran in calls)])
    run.timeline.add(Span("boundary", "close and reduce", worked, time.monotonic()))
    return Step(
        gradient=gradient,
        report=report,
        trajectories=[trajectories[place] for place in sorted(trajectories)],
        failures=failures,
        advantages=stream.advantages,
        rewarded_secs=rewarded,
        calls=calls,
        start_secs=start,
        last_reward_secs=last_reward,
    )


def conclude(
    run: Run, update: state.Update, now: state.State, done: Step, version: int
) -> tuple[state.State, int, float]:
    """The rest of the step boundary: the update, and its publication to the sampler.

    Args:
      run: Of the step.
      update: The optimizer's.
      now: Before the update; donated.
      done: The step. Where its gradient is exactly 0 nothing happens.
      version: Policy version of `now`.

    Returns:
      The state, its policy version, and the gradient's norm after clipping.
    """
    if done.report.gradient_norm == 0:
        return now, version, 0.0
    with run.timeline.span("boundary", "update and publish"):
        now, clipped = update(now, done.gradient)
        jax.block_until_ready(now.params)
        run.publish(now.params, version + 1)
    return now, version + 1, float(clipped)


def compile_all(run: Run, params: Tree, version: int) -> None:
    """Compiles every gradient program that a step may need, so that none waits."""
    made_up_calls(run, params, version, "trajectory", rows=1, members=2)
    if (rows := run.config.mesh.rows_per_call) > 1:
        made_up_calls(run, params, version, "batch", rows, members=2)


def made_up_calls(
    run: Run, params: Tree, version: int, release: str, rows: int, members: int
) -> None:
    """Computes gradients of trajectories without meaning, and drops the result.

    Args:
      run: Its buckets and surrogate.
      params: Where gradients are taken.
      version: Their policy version.
      release: Under "trajectory" all members but the last of a bucket are streamed.
      rows: Rows per call.
      members: Trajectories per length bucket; all weights are 0.
    """
    stream = run.new_stream(params, version, release, rows)
    for length in run.config.rollout.gradient_buckets:
        arrays = {
            "tokens": np.zeros(length, np.int32),
            "weights": np.zeros(length, np.float32),
        }
        stream.open_group(length, members)
        for member in range(members):
            stream.complete(length, member, arrays, tokens=1)
            stream.reward(length, member, float(member))
            while stream.advance():
                time.sleep(_LOOK_SECS)
    stream.finish()


def roll_out(run: Run, step: int, version: int) -> tuple[list[Trajectory], float]:
    """Samples a step's trajectories and computes nothing.

    Returns:
      The trajectories in order, failed ones as they failed, and R, the seconds until
      the last outcome.
    """
    start = time.monotonic()
    outcomes = [
        event
        for event in rollouts(run, run.train_jobs(step), version)
        if not isinstance(event, Completed)
    ]
    found = [event.trajectory for event in outcomes if event.trajectory is not None]
    last = max(event.secs for event in outcomes)
    return sorted(found, key=lambda trajectory: trajectory.key), last - start


def rollouts(
    run: Run,
    jobs: Sequence[Job],
    version: int,
    advance: Callable[[], Any] = lambda: None,
):
    """Starts the jobs and yields the pool's events until every outcome is in.

    Args:
      run: Its pool rolls out.
      jobs: All of one step.
      version: Of the parameters that the sampler holds.
      advance: Called before every wait, which an event ends or a call that has ended.
    """
    run.pool.start(jobs, version)
    try:
        while run.pool.outstanding:
            advance()
            event = run.pool.next_event(_WAIT_SECS)
            if event is not None:
                yield event
    except BaseException:
        run.pool.close()  # whoever gives up a step gives up the run
        raise


def _tell(run: Run, stream: GradientStream, event: Event) -> None:
    group, member = event.key.group, event.key.member
    if isinstance(event, Completed):
        trajectory = event.trajectory
        stream.complete(
            group,
            member,
            run.sample(trajectory),
            tokens=trajectory.action_tokens,
            policy_version=trajectory.policy_version,
        )
    elif isinstance(event, Rewarded):
        stream.reward(group, member, event.reward)
    else:
        try:
            stream.fail(group, member, event.stop_reason.value)
        except StreamError as error:
            raise StreamError(f"{error}; {event.key}: {event.reason}") from error


def _count(progress: Progress, event: Event, now: Totals, before: Totals) -> None:
    if isinstance(event, Completed):
        progress.completed += 1
        progress.tokens += event.trajectory.action_tokens
    elif isinstance(event, Rewarded):
        progress.verified += 1
    else:
        progress.failed += 1
    progress.streamed = now.samples - before.samples
    progress.learner_secs = now.busy_secs - before.busy_secs


def _check_failures(failures: list[Failed], total: int, limit: float) -> None:
    if len(failures) > limit * total:
        first = failures[0]
        raise StreamError(
            f"{len(failures)} of {total} trajectories failed, more than "
            f"rollout.failed_share_limit {limit:g} allows; the first: {first.key}: "
            f"{first.stop_reason.value}: {first.reason}"
        )
