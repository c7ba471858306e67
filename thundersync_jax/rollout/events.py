"""What a rollout pool is given and what it tells: a job in, one outcome out."""

import dataclasses
from typing import Any

from thundersync_jax.types import StopReason, Trajectory, TrajectoryKey


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


@dataclasses.dataclass(frozen=True)
class Rewarded:
    """The verdict of a completed member; the trajectory now carries it."""

    key: TrajectoryKey
    reward: float
    trajectory: Trajectory


@dataclasses.dataclass(frozen=True)
class Failed:
    """A member without a verdict, before or after its `Completed`.

    Attributes:
      key: With the last attempt.
      stop_reason: What kind of failure; CONTEXT_OVERFLOW is a prompt without room.
      reason: One line that names what was stopped.
      trajectory: The tokens up to there, None where not even the prompt is known.
    """

    key: TrajectoryKey
    stop_reason: StopReason
    reason: str
    trajectory: Trajectory | None = None


Event = Completed | Rewarded | Failed
