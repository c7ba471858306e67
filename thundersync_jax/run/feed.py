"""What a stream is told of groups and trajectories, be they rolled out or replayed."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from thundersync_jax.run import samples
from thundersync_jax.run.run import Run
from thundersync_jax.stream.gradient_stream import GradientStream
from thundersync_jax.stream.padding import Padded
from thundersync_jax.stream.turn_stream import TurnStream
from thundersync_jax.types import Trajectory

Stream = GradientStream | TurnStream
Params = Any  # a tree of arrays


def open_group(
    run: Run, stream: Stream, step: int, group: Hashable, members: int
) -> None:
    """Announces a group of a step, with its shared prompt and its baseline."""
    prompt = run.samples.prompt(step, group)
    named = {"prompt": prompt, "spares": run.config.rollout.spare_members}
    if isinstance(stream, GradientStream):
        named["baseline"] = run.group_baseline(step, group)
    stream.open_group(group, members, **named)


def turn(
    run: Run, stream: Stream, trajectory: Trajectory, start: int, end: int | None = None
) -> None:
    """Tells a stream of turns that the tokens from `start` to `end` are scored."""
    if isinstance(stream, GradientStream):
        return
    stream.turn(
        trajectory.key.group,
        trajectory.key.member,
        run.samples.turn(trajectory, start, end),
        tokens=int(trajectory.loss_mask[start:end].sum()),
        policy_version=trajectory.policy_version,
    )


def complete(run: Run, stream: Stream, trajectory: Trajectory) -> None:
    """All tokens of a trajectory are final, and scored where there is a teacher."""
    group, member = trajectory.key.group, trajectory.key.member
    version = trajectory.policy_version
    if isinstance(stream, TurnStream):
        weight = samples.trajectory_weight(trajectory, run.config.loss)
        stream.complete(group, member, weight, policy_version=version)
        return
    spans = samples.spans(trajectory)
    for span in spans:
        tell = stream.complete if span == spans[-1] else stream.sample
        tokens = samples.trained_tokens(trajectory, run.config.loss, *span)
        sample = run.samples.whole(trajectory, *span)
        tell(group, member, sample, tokens=tokens, policy_version=version)


def reward(run: Run, stream: Stream, trajectory: Trajectory) -> None:
    """The verdict on a trajectory is in. Filters look at it as it is."""
    if run.judged:
        key, shaped = trajectory.key, run.samples.shaped_reward(trajectory)
        stream.reward(key.group, key.member, shaped, raw=trajectory.reward)


def scored_turns(trajectory: Trajectory) -> Sequence[tuple[int, int]]:
    """Its turns that a teacher has scored: of a failed one perhaps not all."""
    mask, scores = trajectory.loss_mask, trajectory.teacher
    known = np.zeros_like(mask) if scores is None else scores.known
    missing = np.flatnonzero(mask & ~known)
    first = missing[0] if len(missing) else len(mask)
    return [(start, end) for start, end in turns(trajectory) if end <= first]


def turns(trajectory: Trajectory) -> Sequence[tuple[int, int]]:
    """Where its turns begin and end: an observation (or the prompt), then an action."""
    mask = np.append(trajectory.loss_mask, False)
    ends = np.flatnonzero(mask[:-1] & ~mask[1:]) + 1
    return list(zip([0, *ends[:-1]], ends, strict=True))


def compile_all(run: Run, params: Params, version: int) -> None:
    """Compiles what the config's release rule needs, so that no step waits."""
    if run.config.release == "turn":
        made_up_calls(run, params, version, "turn", rows=1, members=1)
        return
    made_up_calls(run, params, version, "trajectory", rows=1, members=2)
    rows = run.config.mesh.rows_per_call
    if rows > 1 and run.config.accumulator == "plain":
        # More than half a call of each length: fewer go one by one.
        made_up_calls(run, params, version, "batch", rows, members=rows)


def made_up_calls(
    run: Run,
    params: Params,
    version: int,
    release: str,
    rows: int,
    members: int,
    accumulator: str | None = None,
) -> None:
    """Computes gradients of `members` trajectories per bucket, and drops the result."""
    stream = run.new_stream(params, version, release, rows, accumulator)
    if isinstance(stream, TurnStream):
        _turns(run, stream)
    elif run.config.share_prompt == "group":
        for prompt in run.config.rollout.segment_lengths:
            for length in run.config.rollout.segment_lengths:
                shared = run.samples.made_up(prompt, 0)
                sample = run.samples.made_up(length, 1)
                _group(run, stream, (prompt, length), members, sample, shared)
    else:
        for length in run.config.rollout.gradient_buckets:
            sample = run.samples.whole(run.samples.untrained(length))
            _group(run, stream, length, members, sample)
    stream.finish()


def _group(
    run: Run,
    stream: GradientStream,
    name: Hashable,
    members: int,
    sample: Padded,
    prompt: Padded | None = None,
) -> None:
    stream.open_group(name, members, prompt=prompt)
    for member in range(members):
        stream.complete(name, member, sample, tokens=1)
        if run.judged:
            stream.reward(name, member, float(member))
        stream.drain()


def _turns(run: Run, stream: TurnStream) -> None:
    """Every length as a first turn and, replayed, as an earlier one."""
    shared = int(run.config.share_prompt == "group")  # tokens of the prompt
    for length in run.config.rollout.segment_lengths:
        prompt = run.samples.made_up(length, 0) if shared else None
        stream.open_group(length, 1, prompt=prompt)
        for start in (shared, shared + 1):
            sample = run.samples.made_up(length, start)
            stream.turn(length, 0, sample, tokens=1)
        stream.complete(length, 0)
        stream.drain()
