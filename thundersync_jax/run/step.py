"""One step: rollouts go out, events come in, one gradient comes back.

It runs in the main thread, reads the pool's events and tells the stream. An event wakes
it, and so does a gradient call that ends; only `finish` waits for a device.
"""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import jax
import numpy as np

from thundersync_jax.errors import StreamError
from thundersync_jax.metrics.learner_clock import Ran, Totals
from thundersync_jax.metrics.records import known_mean, part_means
from thundersync_jax.metrics.timing import Progress
from thundersync_jax.rollout import interrupts
from thundersync_jax.rollout.events import Completed, Event, Failed, Job, Rewarded, Turn
from thundersync_jax.run import feed, state
from thundersync_jax.run.feed import Params, Stream
from thundersync_jax.run.run import Run
from thundersync_jax.stream.ledger import Report
from thundersync_jax.stream.schedule.roster import Roster
from thundersync_jax.types import Span, Trajectory

_WAIT_SECS = 0.25  # for events, and for calls that end


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step brought; seconds are on the monotonic clock."""

    gradient: Params  #: of the step's loss, as the stream's `finish` returns it
    report: Report  #: of the stream
    trajectories: list[Trajectory]  #: with tokens, failed ones too, in order of keys
    failures: list[Failed]  #: members without a verdict, and why, as they came
    advantages: dict[tuple[int, int], float]  #: of the members that count
    rewarded_secs: dict[tuple[int, int], float]  #: when verdicts came in
    #: When tokens were final, and scored where there is a teacher.
    completed_secs: dict[tuple[int, int], float]
    turn_secs: dict[tuple[int, int, int], float]  #: when a teacher had scored a turn
    teacher_tokens: int  #: tokens that a teacher ran through its model
    calls: list[Ran]  #: the gradient calls
    start_secs: float  #: when the rollouts went out
    last_reward_secs: float  #: when the last outcome came in

    @property
    def stop_reasons(self) -> dict[str, int]:
        """How many members ended for each reason, failed ones included."""
        return _stop_reasons(self.trajectories, self.failures)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Answers to held-out questions. A success is a reward of exactly 1."""

    successes: np.ndarray  #: int[Q], among the `samples` answers of each question
    samples: int  #: answers per question
    trajectories: list[Trajectory]  #: with tokens, in (question, sample) order
    stop_reasons: dict[str, int]  #: how often each occurred, failures included

    @property
    def answers(self) -> int:
        """How many answers were asked for; a failed one is no success."""
        return len(self.successes) * self.samples

    @property
    def success(self) -> float:
        """Share of answers that succeed."""
        return float(self.successes.sum() / self.answers)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of `success`, over answers."""
        return wilson_interval(int(self.successes.sum()), self.answers)

    @property
    def reward(self) -> float:
        """Mean over the answers that have a reward; NaN where none has."""
        return known_mean(t.reward for t in self.trajectories).mean

    @property
    def parts(self) -> dict[str, float]:
        """Mean of every part of the verdicts, over the answers that have it."""
        return part_means(self.trajectories)

    def pass_at(self, k: int) -> float:
        """Chance that one of k answers succeeds, unbiased from `samples` answers.

            mean over questions of 1 - C(n - c, k) / C(n, k)

        Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
        """
        n = self.samples
        misses = [math.comb(n - int(c), k) / math.comb(n, k) for c in self.successes]
        return 1.0 - float(np.mean(misses))


def run_step(
    run: Run,
    stream: Stream,
    jobs: Sequence[Job],
    version: int,
    progress: Progress | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Step:
    """Rolls out the jobs and streams their gradients.

    Further members are rolled out in place of failed ones, `rollout.spare_members` of a
    group, and under `uniform_groups='replace'` further groups in place of lost ones
    (`replacements`).

    Args:
      stream: A new one, of the parameters that the sampler of the run holds.
      jobs: All members of the groups to begin with.
      version: Policy version of the parameters.
      progress: Counts to raise; None for counts that nobody reads.
      on_progress: Called after every event.

    Raises:
      StreamError: More of all members failed than `rollout.failed_share_limit` allows,
        or the gradient is not finite.
      ValueError: The jobs are of several steps.
    """
    run.clock.take()  # what ran before belongs to no step
    start = time.monotonic()
    progress = progress or Progress(len(jobs), started_secs=start)
    progress.paused = lambda: run.pool.paused
    before, taught = run.clock.totals, run.teacher_tokens
    outcomes, replaced = _Outcomes(start, run.judged), 0
    step = jobs[0].key.step
    _open_groups(run, stream, jobs, step)
    for event in rollouts(run, jobs, version, stream.advance):
        assert event.key.step == step, f"{event.key} came in step {step}"
        spare = _tell(run, stream, event, outcomes)
        outcomes.take(event)
        _count(progress, event, run.clock.totals, before)
        if spare is not None:
            run.pool.add([run.spare_job(step, event.key.group, spare)], version)
            progress.add(1)
        for group in _replacements(run, len(stream.lost_groups), replaced):
            further = run.replacement_jobs(step, group)
            _open_groups(run, stream, further, step)
            run.pool.add(further, version)
            progress.add(len(further))
            replaced += 1
        on_progress(progress)
    _check_failures(outcomes, run.config.rollout.failed_share_limit)
    gradient, report = stream.finish()
    calls = run.clock.take()
    worked = max([outcomes.last_reward_secs, *(ran.end_secs for ran in calls)])
    run.timeline.add(Span("boundary", "close and reduce", worked, time.monotonic()))
    return Step(
        gradient=gradient,
        report=report,
        trajectories=outcomes.in_order,
        failures=outcomes.failures,
        advantages=stream.advantages,
        rewarded_secs=outcomes.rewarded_secs,
        completed_secs=outcomes.completed_secs,
        turn_secs=outcomes.turn_secs,
        teacher_tokens=run.teacher_tokens - taught,
        calls=calls,
        start_secs=start,
        last_reward_secs=outcomes.last_reward_secs,
    )


def conclude(
    run: Run, update: state.Update, now: state.State, done: Step, version: int
) -> tuple[state.State, int, float]:
    """The rest of the step boundary: the update, and its publication to the sampler.

    Donates `now`, of policy version `version`; nothing happens where the gradient is
    exactly 0. Returns the state, its policy version, and the norm after clipping.
    """
    if done.report.gradient_norm == 0:
        return now, version, 0.0
    with run.timeline.span("boundary", "update"):
        now, clipped = update(now, done.gradient)
        jax.block_until_ready(now.params)
    run.publish(now.params, version + 1)
    return now, version + 1, float(clipped)


def roll_out(run: Run, step: int, version: int) -> tuple[list[Trajectory], float]:
    """Samples a step's trajectories, replacements included, and computes nothing.

    Returns them in order, failed ones too, and the seconds until the last outcome.
    """
    start = time.monotonic()
    lossy = run.config.partial_groups == "drop"
    roster = Roster(run.judged, drop_partial=lossy, drop_uniform=run.judged)
    outcomes, lost, replaced = _Outcomes(start, run.judged), set(), 0
    jobs, spares = run.train_jobs(step), run.config.rollout.spare_members
    for group, members in _sizes(jobs, step):
        roster.open_group(group, members, spares=spares)
    for event in rollouts(run, jobs, version):
        outcomes.take(event)
        place = event.key.group, event.key.member
        if isinstance(event, Completed):
            roster.complete(*place)
        elif isinstance(event, Rewarded) and run.judged:
            roster.reward(*place, event.reward, raw=None)
        elif isinstance(event, Failed) and not outcomes.unjudged(event):
            roster.fail(*place, replace=not run.pool.ended)
            if (spare := roster.replaced_by(*place)) is not None:
                run.pool.add([run.spare_job(step, event.key.group, spare)], version)
        if roster.verdict(event.key.group) not in (None, "kept"):
            lost.add(event.key.group)
        for group in _replacements(run, len(lost), replaced):
            further = run.replacement_jobs(step, group)
            roster.open_group(group, len(further), spares=spares)
            run.pool.add(further, version)
            replaced += 1
    return outcomes.in_order, outcomes.last_reward_secs - start


def rollouts(
    run: Run,
    jobs: Sequence[Job],
    version: int,
    advance: Callable[[], Any] = lambda: None,
):
    """Starts jobs of one step and yields the pool's events until every outcome is in.

    Whoever reads an event may add jobs to the pool. `advance` is called before every
    wait, which ends with an event or with a call that has ended.
    """
    run.compile_sampler()
    run.pool.start(jobs, version)
    try:
        while run.pool.outstanding:
            advance()
            interrupts.check()
            event = run.pool.next_event(_WAIT_SECS)
            if event is not None:
                yield event
    except BaseException:
        run.pool.close()  # whoever gives up a step gives up the run
        raise


def heldout(
    run: Run,
    version: int,
    questions: int,
    samples: int,
    phase: str = "evaluate",
    step: int = 0,
    temperature: float | None = None,
) -> Evaluation:
    """Answers the first held-out questions with the parameters that the sampler holds.

    `phase` and `step` name the random numbers. Evaluations share theirs: two of them
    differ by the policy alone, and by nothing where that is the same. The warm start,
    which stops by what it measures, has its own at every step. Temperature 0 takes the
    likeliest token; None is the config's.
    """
    successes = np.zeros(questions, int)
    outcomes = _Outcomes(last_reward_secs=0.0, judged=True)
    jobs = run.heldout_jobs(phase, step, questions, samples)
    jobs = [dataclasses.replace(job, temperature=temperature) for job in jobs]
    for event in rollouts(run, jobs, version):
        outcomes.take(event)
        if isinstance(event, Rewarded):
            successes[event.key.group] += event.reward == 1.0
    trajectories = outcomes.in_order
    reasons = _stop_reasons(trajectories, outcomes.failures)
    return Evaluation(successes, samples, trajectories, reasons)


def wilson_interval(successes: int, total: int) -> tuple[float, float]:
    """The 95 % interval (low, high) of a success probability; (0, 1) without a try.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical
    inference", JASA 22.
    """
    if total == 0:
        return 0.0, 1.0
    from scipy import stats  # slow to import, and needed here alone

    interval = stats.binomtest(successes, total).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


@dataclasses.dataclass
class _Outcomes:
    """What the events of a step have brought so far; fields as in `Step`."""

    last_reward_secs: float
    judged: bool  # whether rewards are in the loss
    trajectories: dict[tuple[int, int], Trajectory] = field(default_factory=dict)
    failures: list[Failed] = field(default_factory=list)
    rewarded_secs: dict[tuple[int, int], float] = field(default_factory=dict)
    completed_secs: dict[tuple[int, int], float] = field(default_factory=dict)
    turn_secs: dict[tuple[int, int, int], float] = field(default_factory=dict)

    def unjudged(self, event: Failed) -> bool:
        """Whether all that failed is a verdict that the loss does not need."""
        return not self.judged and event.key[1:3] in self.completed_secs

    def take(self, event: Event) -> None:
        place = event.key.group, event.key.member
        if isinstance(event, Turn):
            self.turn_secs[*place, event.turn] = event.secs
            return
        if isinstance(event, Completed):
            self.completed_secs[place] = event.secs
        else:
            self.last_reward_secs = max(self.last_reward_secs, event.secs)
        if isinstance(event, Failed):
            if self.unjudged(event):
                return
            self.failures.append(event)
        elif isinstance(event, Rewarded):
            self.rewarded_secs[place] = event.secs
        if event.trajectory is not None:
            self.trajectories[place] = event.trajectory

    @property
    def in_order(self) -> list[Trajectory]:
        """The trajectories by (group, member)."""
        return [self.trajectories[place] for place in sorted(self.trajectories)]


def _stop_reasons(
    trajectories: Sequence[Trajectory], failures: Sequence[Failed]
) -> dict[str, int]:
    ends = {t.key[1:3]: t.stop_reason for t in trajectories}
    ends |= {failed.key[1:3]: failed.stop_reason for failed in failures}
    return collections.Counter(reason.value for reason in ends.values())


def _open_groups(run: Run, stream: Stream, jobs: Sequence[Job], step: int) -> None:
    for group, members in _sizes(jobs, step):
        feed.open_group(run, stream, step, group, members)


def _sizes(jobs: Sequence[Job], step: int) -> list[tuple[int, int]]:
    """The groups of some jobs, and how many members each has."""
    others = {job.key.step for job in jobs} - {step}
    if others:
        raise ValueError(
            f"jobs of step {step} come with jobs of step {min(others)}; what is rolled "
            "out in a step is recorded in it, pass those of one step."
        )
    return sorted(collections.Counter(job.key.group for job in jobs).items())


def replacements(first: int, bound: int, lost: int, replaced: int) -> range:
    """Numbers of the groups to open now in place of lost ones, one for one.

    The step begins with `first` groups and opens at most `bound` more, numbered on;
    `lost` of all do not count and `replaced` were opened in their place, so far. Which
    make the batch follows from outcomes alone, not from who finished first:
    docs/losses.md has the proof.

    Source: DAPO, arXiv 2503.14476, section 3.2.
    Differs: DAPO samples whole batches more until enough groups survive, and drops the
      surplus.
    """
    return range(first + replaced, first + min(bound, lost))


def _replacements(run: Run, lost: int, replaced: int) -> Sequence[int]:
    if run.pool.ended:
        return ()
    first, bound = run.config.rollout.groups_per_step, run.config.most_replacements
    return replacements(first, bound, lost, replaced)


def _tell(run: Run, stream: Stream, event: Event, outcomes: _Outcomes) -> int | None:
    """Passes an event on; returns the member to roll out in place of a failed one."""
    if isinstance(event, Turn):
        feed.turn(run, stream, event.trajectory, event.start)
    elif isinstance(event, Completed):
        feed.complete(run, stream, event.trajectory)
    elif isinstance(event, Rewarded):
        feed.reward(run, stream, event.trajectory)
    elif outcomes.unjudged(event):
        run.warn_once(
            f"verdicts fail, and distillation goes on without them; {event.key}: "
            f"{event.stop_reason.value}: {event.reason}"
        )
    else:
        place = event.key.group, event.key.member
        try:
            reason = event.stop_reason.value
            return stream.fail(*place, reason, replace=not run.pool.ended)
        except StreamError as error:
            raise StreamError(f"{error}; {event.key}: {event.reason}") from error
    return None


def _count(progress: Progress, event: Event, now: Totals, before: Totals) -> None:
    if isinstance(event, Turn):
        return
    if isinstance(event, Completed):
        progress.completed += 1
        progress.tokens += event.trajectory.action_tokens
    elif isinstance(event, Rewarded):
        progress.verified += 1
    else:
        progress.failed += 1
    progress.streamed = now.samples - before.samples
    progress.learner_secs = now.busy_secs - before.busy_secs


def _check_failures(outcomes: _Outcomes, limit: float) -> None:
    failures = outcomes.failures
    ended = outcomes.rewarded_secs if outcomes.judged else outcomes.completed_secs
    total = len(ended) + len(failures)
    if len(failures) > limit * total:
        first = failures[0]
        raise StreamError(
            f"{len(failures)} of {total} trajectories failed, more than "
            f"rollout.failed_share_limit {limit:g} allows; the first: {first.key}: "
            f"{first.stop_reason.value}: {first.reason}"
        )
