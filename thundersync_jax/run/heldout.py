"""Held-out success: answers to held-out questions, and how sure the share is."""

import collections
import dataclasses
import math

import numpy as np

from thundersync_jax.metrics.records import known_mean
from thundersync_jax.rollout.events import Completed, Failed
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import rollouts
from thundersync_jax.types import Trajectory


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Answers to held-out questions. A success is a reward of exactly 1.

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
        """The 95 % interval of `success`, over answers."""
        return wilson_interval(int(self.successes.sum()), self.answers)

    @property
    def reward(self) -> float:
        """Mean over the answers that have a reward; NaN where none has."""
        return known_mean(t.reward for t in self.trajectories).mean

    def pass_at(self, k: int) -> float:
        """Chance that one of k answers succeeds, unbiased from `samples` answers.

            mean over questions of 1 - C(n - c, k) / C(n, k)

        Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
        """
        n = self.samples
        misses = [math.comb(n - int(c), k) / math.comb(n, k) for c in self.successes]
        return 1.0 - float(np.mean(misses))


def heldout(
    run: Run,
    version: int,
    questions: int,
    samples: int,
    phase: str = "evaluate",
    step: int = 0,
    temperature: float | None = None,
) -> Evaluation:
    """Answers the first held-out questions with what the sampler holds.

    Evaluations share their random numbers: two of them differ by the policy alone, and
    by nothing where that is the same.

    Args:
      run: A run whose sampler has the parameters to evaluate.
      version: Policy version of these parameters.
      questions: How many of the held-out tasks.
      samples: Answers per question.
      phase: With `step` it names the random numbers. The warm start, which stops by
        what it measures, has its own at every step.
      step: The other part of that name.
      temperature: 0 takes the likeliest token; None for the config's.
    """
    successes = np.zeros(questions, int)
    trajectories: dict[tuple[int, int], Trajectory] = {}
    reasons: collections.Counter[str] = collections.Counter()
    if not run.config.vllm.servers:
        run.warn_once("compiling the sampler, with the first answers")
    jobs = run.heldout_jobs(phase, step, questions, samples)
    jobs = [dataclasses.replace(job, temperature=temperature) for job in jobs]
    for event in rollouts(run, jobs, version):
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


def wilson_interval(successes: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a success probability, of use near 0 and 1 as well.

    Args:
      successes: Tries that succeeded.
      total: All tries.

    Returns:
      (low, high) in [0, 1]; (0, 1) where nothing was tried.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical
    inference", JASA 22.
    """
    if total == 0:
        return 0.0, 1.0
    from scipy import stats  # slow to import, and needed here alone

    interval = stats.binomtest(successes, total).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)
