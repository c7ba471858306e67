"""What the loss of a run sees of its trajectories: whole, in turns, behind a prompt."""

from collections.abc import Callable

import numpy as np

from thundersync_jax.config import Config
from thundersync_jax.errors import ConfigError
from thundersync_jax.run import objective
from thundersync_jax.stream.padding import Padded
from thundersync_jax.types import Trajectory


class Samples:
    """Makes samples, padded to the lengths of a config.

    Attributes:
      width: Ids that the policy and its teacher have.

    Args:
      config: The settings.
      width: Ids that the policy and its teacher have.
      prompt_ids: The prompt int32[N] of (step, group).
    """

    def __init__(
        self, config: Config, width: int, prompt_ids: Callable[[int, int], np.ndarray]
    ):
        self._loss, self._rollout = config.loss, config.rollout
        self._shared = config.share_prompt == "group"
        self.width = width
        self._prompt_ids = prompt_ids

    def whole(self, trajectory: Trajectory) -> Padded:
        """A trajectory, or what follows the prompt that its group shares."""
        if not self._shared:
            lengths = self._rollout.gradient_buckets
            return objective.sample(trajectory, self._loss, lengths)
        return self.behind(trajectory, self._after_prompt(trajectory))

    def behind(self, trajectory: Trajectory, start: int) -> Padded:
        """What of a complete trajectory follows its first tokens."""
        lengths = self._rollout.segment_lengths
        return objective.segment_sample(trajectory, self._loss, lengths, start)

    def turn(
        self, trajectory: Trajectory, start: int, end: int | None = None
    ) -> Padded:
        """A turn of one that may go on, new from `start` to `end`."""
        if start == 0 and self._shared:
            start = self._after_prompt(trajectory)
        given = trajectory, self._loss, self._rollout.segment_lengths, start, end
        return objective.segment_sample(*given, whole_weight=False)

    def prompt(self, step: int, group: int) -> Padded | None:
        """The prompt that a group shares; None where every sample holds its own."""
        if not self._shared:
            return None
        ids = self._prompt_ids(step, group)
        return self.behind(self.untrained(len(ids), ids), 0)

    def untrained(self, tokens: int, ids: np.ndarray | None = None) -> Trajectory:
        """A trajectory that trains nothing: of these ids, or without meaning."""
        return objective.untrained(tokens, ids, self._loss, self.width)

    def made_up(self, length: int, start: int) -> Padded:
        """One untrained token of a trajectory's, padded to a length of segments."""
        one = self.untrained(start + 1)
        return objective.segment_sample(one, self._loss, (length,), start)

    def weight(self, trajectory: Trajectory) -> float:
        """What the turns of a complete trajectory are multiplied by."""
        return objective.trajectory_weight(trajectory, self._loss)

    def shaped_reward(self, trajectory: Trajectory) -> float:
        """The reward that advantages follow from; filters look at the raw one."""
        most = self._rollout.most_action_tokens
        return objective.shaped_reward(trajectory, self._loss, most)

    def _after_prompt(self, trajectory: Trajectory) -> int:
        ids = self._prompt_ids(trajectory.key.step, trajectory.key.group)
        if not np.array_equal(trajectory.ids[: len(ids)], ids):
            raise ConfigError(
                f"share_prompt is 'group' and trajectory {trajectory.key} begins with "
                "another prompt than the task set's `prompt` says; let `start` return "
                "that text, or set share_prompt=no"
            )
        return len(ids)
