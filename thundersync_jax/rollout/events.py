"""Jobs of a rollout pool and its events: a job in, one outcome out.

The events of one attempt come in this order: its turns where a teacher scores them, its
`Completed`, its outcome. `secs` of an event is when it happened, in seconds on the
monotonic clock; whoever reads it may be busy then.
"""

import dataclasses
import time
from typing import Any

from thundersync_jax.types import StopReason, Trajectory, TrajectoryKey


def _now() -> Any:
    return dataclasses.field(default_factory=time.monotonic, compare=False)


@dataclasses.dataclass(frozen=True)
class Job:
    """One member to roll out: its key (attempt 0) and the environment's task."""

    key: TrajectoryKey
    task: Any
    temperature: float | None = None  # of its sampling; None: rollout.temperature


@dataclasses.dataclass(frozen=True)
class Turn:
    """A teacher has scored an action; its tool call may still run.

    The trajectory has the tokens up to the action's end, with `teacher` scores of every
    action so far. Its stop reason is open, and so is the credit of this turn.
    """

    key: TrajectoryKey  # with the attempt; a later attempt's turns begin anew
    turn: int  # number of the action, from 0
    # Index of the first token since the last action: 0 for the first turn, and then
    # that of the observation before this one.
    start: int
    trajectory: Trajectory
    sample: int = 0  # of the trajectory, that the action is in
    secs: float = _now()


@dataclasses.dataclass(frozen=True)
class Completed:
    """The tokens of a member are final, and scored; its verdict is out."""

    key: TrajectoryKey
    trajectory: Trajectory
    secs: float = _now()


@dataclasses.dataclass(frozen=True)
class Rewarded:
    """The verdict of a completed member; the trajectory now carries it."""

    key: TrajectoryKey
    reward: float
    trajectory: Trajectory
    secs: float = _now()


@dataclasses.dataclass(frozen=True)
class Failed:
    """A member without a verdict, before or after its `Completed`."""

    key: TrajectoryKey  # with the last attempt
    stop_reason: StopReason  # CONTEXT_OVERFLOW is a prompt without room
    reason: str  # one line that names what was stopped
    trajectory: Trajectory | None = None  # None where not even the prompt is known
    secs: float = _now()


Event = Turn | Completed | Rewarded | Failed
