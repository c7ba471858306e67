"""What a pool's caller has started: which members, and how many are outstanding."""

import asyncio
import dataclasses
import time
from collections.abc import Sequence

from thundersync_jax.rollout.agent import PHASES, WAITING, Agent
from thundersync_jax.rollout.events import Failed, Job
from thundersync_jax.types import StopReason, TrajectoryKey


@dataclasses.dataclass(eq=False)
class Member:
    """One member from its start to its outcome; belongs to the event loop."""

    job: Job
    policy_version: int
    queued_secs: float
    agent: Agent | None = None
    task: asyncio.Task | None = None

    @property
    def doing(self) -> str:
        """What it is busy with."""
        return self.agent.doing if self.agent else WAITING

    def failed(self, stop_reason: StopReason, reason: str, attempts: int) -> Failed:
        """Its outcome; the reason names the attempt where several are allowed."""
        agent = self.agent
        if agent is None:
            return Failed(self.job.key, stop_reason, reason)
        if attempts > 1:
            reason += f" (attempt {agent.key.attempt + 1} of {attempts})"
        trajectory = None
        if agent.recorder is not None:
            trajectory = agent.recorder.trajectory(stop_reason, reason, agent.times)
        return Failed(agent.key, stop_reason, reason, trajectory)


class Batch:
    """The members of one batch, which may grow; belongs to the caller's thread."""

    def __init__(self, policy_version: int):
        self.policy_version = policy_version
        self.outstanding = 0  # members whose outcome has not been read
        self._keys: set[TrajectoryKey] = set()

    def take(self, jobs: Sequence[Job]) -> dict[TrajectoryKey, Member]:
        """Returns new members, and counts them.

        Raises:
          ValueError: A key is not new or names no known phase; nothing has changed.
        """
        now = time.monotonic()
        members = {}
        for job in jobs:
            key = job.key._replace(attempt=0)
            if key in members or key in self._keys or key.phase not in PHASES:
                expected = f"every member once, phases {', '.join(PHASES)}"
                raise ValueError(f"job {key} cannot start; expected {expected}.")
            members[key] = Member(job, self.policy_version, now)
        self._keys.update(members)
        self.outstanding += len(members)
        return members
