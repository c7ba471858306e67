"""How far a run is: counts of steps and, apart from them, of trajectories.

Counters only, no clock and no screen.
"""

import dataclasses


@dataclasses.dataclass
class Progress:
    """Where the running step stands. Whoever learns something raises a count."""

    total: int  # trajectories of the step so far
    completed: int = 0  # tokens final
    verified: int = 0  # verdict in
    streamed: int = 0  # gradient started
    failed: int = 0
    tokens: int = 0  # of completed trajectories
    learner_secs: float = 0.0  # gradient work so far
    started_secs: float = 0.0  # on the monotonic clock
    added: int = 0  # of the total, since the step began: in place of lost groups

    def add(self, members: int) -> None:
        """The step grows by a group."""
        self.total += members
        self.added += members


@dataclasses.dataclass
class RunProgress:
    """Where the whole run stands. A step is one update, however many calls it takes."""

    steps: int  # of the whole run
    steps_done: int = 0  # a resumed run starts with more
    trajectories: int = 0  # of the steps begun, replacements once their step is done
    trajectories_done: int = 0  # settled: verified or failed

    def begin(self, total: int, now_secs: float = 0.0) -> Progress:
        """A step of `total` trajectories starts."""
        self.trajectories += total
        return Progress(total, started_secs=now_secs)

    def end(self, progress: Progress) -> None:
        """That step's update is done."""
        self.steps_done += 1
        self.trajectories += progress.added
        self.trajectories_done += progress.verified + progress.failed

    @property
    def title(self) -> str:
        """Names the running step, counted from 1."""
        return f"step {min(self.steps_done + 1, self.steps)}/{self.steps}"

    def __str__(self) -> str:
        return (
            f"{self.steps_done}/{self.steps} steps, "
            f"{self.trajectories_done}/{self.trajectories} trajectories"
        )
