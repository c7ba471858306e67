"""What a stream is told of a run's groups and trajectories, under every release rule.

The same whether they are rolled out right now (`step`) or replayed (`comparison`).
"""

from collections.abc import Hashable, Sequence

import numpy as np

from thundersync_jax.run.run import Run
from thundersync_jax.stream.gradient_stream import GradientStream
from thundersync_jax.stream.turn_stream import TurnStream
from thundersync_jax.types import Trajectory

Stream = GradientStream | TurnStream


def open_group(
    run: Run, stream: Stream, step: int, group: Hashable, members: int
) -> None:
    """Announces a group of a step, with its shared prompt and its baseline."""
    given = {"prompt": run.samples.prompt(step, group)}
    if isinstance(stream, GradientStream):
        given["baseline"] = run.group_baseline(step, group)
    stream.open_group(group, members, **given)


def turn(
    run: Run,
    stream: Stream,
    trajectory: Trajectory,
    start: int,
    end: int | None = None,
) -> None:
    """A teacher has scored a turn, which is new from `start` to `end`, or the end.

    Whole trajectories are computed when they are complete; to them it is no news.
    """
    if isinstance(stream, GradientStream):
        return
    place = trajectory.key.group, trajectory.key.member
    stream.turn(
        *place,
        run.samples.turn(trajectory, start, end),
        tokens=int(trajectory.loss_mask[start:end].sum()),
        policy_version=trajectory.policy_version,
    )


def complete(run: Run, stream: Stream, trajectory: Trajectory) -> None:
    """All tokens of a trajectory are final, and scored where there is a teacher."""
    place = trajectory.key.group, trajectory.key.member
    version = trajectory.policy_version
    if isinstance(stream, TurnStream):
        weight = run.samples.weight(trajectory)
        stream.complete(*place, weight, policy_version=version)
        return
    tokens = trajectory.action_tokens
    sample = run.samples.whole(trajectory)
    stream.complete(*place, sample, tokens=tokens, policy_version=version)


def reward(run: Run, stream: Stream, trajectory: Trajectory) -> None:
    """The verdict on a trajectory is in. Filters look at it as it is."""
    if run.judged:
        place = trajectory.key.group, trajectory.key.member
        shaped = run.samples.shaped_reward(trajectory)
        stream.reward(*place, shaped, raw=trajectory.reward)


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
