"""What a rollout pool is given and what it tells: a job in, one outcome out.

`secs` of an event is when it happened, on the monotonic clock; whoever reads it may be
busy then.
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


@dataclasses.dataclass(frozen=True)
class Completed:
    """The tokens of a member are final; its verdict is out."""

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
    """A member without a verdict, before or after its `Completed`.

    Attributes:
      key: With the last attempt.
      stop_reason: What kind of failure; CONTEXT_OVERFLOW is a prompt without room.
      reason: One line that names what was stopped.
      trajectory: The tokens up to there, None where not even the prompt is known.
      secs: As of every event.
    """

    key: TrajectoryKey
    stop_reason: StopReason
    reason: str
    trajectory: Trajectory | None = None
    secs: float = _now()


Event = Completed | Rewarded | Failed
