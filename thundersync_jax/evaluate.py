"""Held-out success of a policy, sampled at the training temperature.

python -m thundersync_jax.evaluate --config=FILE.py --workdir=DIR --samples=4
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thundersync_jax.intervals import wilson_interval
from thundersync_jax.rollout.events import Completed, Failed
from thundersync_jax.run import Run
from thundersync_jax.step import rollouts
from thundersync_jax.types import StopReason, Trajectory


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Answers to held-out questions. A success is a score of exactly 1.

    Attributes:
      successes: int[Q], successes among the `samples` answers of each question.
      samples: Answers per question.
      trajectories: All that have tokens, in (question, sample) order.
      stop_reasons: How often each occurred, failures included.
    """

    successes: np.ndarray
    samples: int
    trajectories: list[Trajectory]
    stop_reasons: dict[str, int]

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
        """Of 95 %, over answers."""
        return wilson_interval(int(self.successes.sum()), self.answers)

    def pass_at(self, k: int) -> float:
        """Chance that one of k answers succeeds, unbiased from `samples` answers.

            mean over questions of 1 - C(n - c, k) / C(n, k)

        Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
        """
        n = self.samples
        misses = [math.comb(n - int(c), k) / math.comb(n, k) for c in self.successes]
        return 1.0 - float(np.mean(misses))


def heldout(
    run: Run, version: int, step: int, questions: int, samples: int
) -> Evaluation:
    """Answers the first held-out questions with what the sampler holds.

    Args:
      run: Its sampler has the parameters to evaluate.
      version: Their policy version.
      step: Names the sampling seeds, so that evaluations differ between steps.
      questions: How many of the held-out tasks.
      samples: Answers per question.
    """
    successes = np.zeros(questions, int)
    trajectories: dict[tuple[int, int], Trajectory] = {}
    reasons: collections.Counter[str] = collections.Counter()
    for event in rollouts(run, run.heldout_jobs(step, questions, samples), version):
        if isinstance(event, Completed):
            continue
        key, trajectory = event.key, event.trajectory
        if trajectory is not None:
            trajectories[key.group, key.member] = trajectory
        if isinstance(event, Failed):
            reasons[event.stop_reason.value] += 1
            continue
        reasons[trajectory.stop_reason.value] += 1
        successes[key.group] += event.reward == 1.0
    ordered = [trajectories[place] for place in sorted(trajectories)]
    return Evaluation(successes, samples, ordered, dict(reasons))
