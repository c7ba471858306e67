"""Held-out success of a policy, sampled at the training temperature.

python -m thundersync_jax.evaluate --config=FILE.py --workdir=DIR --samples=4
"""

import collections
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from thundersync_jax import parameters, state
from thundersync_jax.config import Config
from thundersync_jax.display import Display
from thundersync_jax.errors import ConfigError
from thundersync_jax.flags import Flag
from thundersync_jax.flags import run as run_command
from thundersync_jax.intervals import wilson_interval
from thundersync_jax.rollout.events import Completed, Failed
from thundersync_jax.run import Factory, Run
from thundersync_jax.step import rollouts
from thundersync_jax.types import Trajectory


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


def evaluate(
    config: Config,
    workdir: str | Path,
    *,
    samples: int = 4,
    questions: int | None = None,
    environment: Factory | None = None,
) -> dict[str, Any]:
    """Evaluates the newest policy of a work directory: a checkpoint, or the warm start.

    The config may differ from the one that trained it (another tool, temperature or
    limit); the model may not.

    Args:
      config: The settings.
      workdir: Of a training run.
      samples: Answers per question.
      questions: Held-out questions; None takes `evaluation.questions`.
      environment: Makes the task set, in place of `config.env.factory`.

    Returns:
      The JSON object of `--json`.

    Raises:
      ConfigError: There is no policy, or fewer held-out questions than asked for.
    """
    if questions is None:
        questions = config.evaluation.questions
    display = Display()
    with Run(config, workdir, environment, display.line) as run:
        if not (1 <= questions <= len(run.tasks.heldout) and samples >= 1):
            raise ConfigError(
                f"--questions is {questions} and --samples {samples}; expected 1 to "
                f"{len(run.tasks.heldout)} held-out questions and at least 1 sample."
            )
        step, params = newest_policy(run)
        run.publish(params, step)
        found = heldout(run, step, questions, samples)
    result = {
        "step": step,
        "questions": questions,
        "samples": samples,
        "success": found.success,
        "interval": list(found.interval),
        "pass_at": {str(k): found.pass_at(k) for k in _draws(samples)},
        "turns_mean": _mean([t.turns for t in found.trajectories]),
        "action_tokens_mean": _mean([t.action_tokens for t in found.trajectories]),
        "stop_reasons": found.stop_reasons,
    }
    display.evaluation(f"step {step}", int(found.successes.sum()), found.answers)
    for k, value in result["pass_at"].items():
        display.line(f"pass@{k:<4} {100 * value:5.1f}%")
    display.line(
        f"{result['turns_mean']:.2f} turns and {result['action_tokens_mean']:.1f} "
        "sampled tokens per answer"
    )
    for reason, count in sorted(found.stop_reasons.items()):
        display.line(f"{reason:<18} {count:5d}")
    return result


def newest_policy(run: Run) -> tuple[int, Any]:
    """Returns the step and the parameters of the newest checkpoint; step 0 is the warm
    start's."""
    like = state.init(run.optimizer, run.initial_params())
    found = parameters.newest(run.workdir, like)
    if found is not None:
        return found
    raise ConfigError(
        f"{run.workdir} holds no policy; train one first with the same --workdir."
    )


def heldout(
    run: Run,
    version: int,
    questions: int,
    samples: int,
    phase: str = "evaluate",
    step: int = 0,
) -> Evaluation:
    """Answers the first held-out questions with what the sampler holds.

    Evaluations share their random numbers: two of them differ by the policy alone, and
    by nothing where that is the same.

    Args:
      run: Its sampler has the parameters to evaluate.
      version: Their policy version.
      questions: How many of the held-out tasks.
      samples: Answers per question.
      phase: With `step` it names the random numbers. The warm start, which stops by
        what it measures, has its own at every step.
      step: See `phase`.
    """
    successes = np.zeros(questions, int)
    trajectories: dict[tuple[int, int], Trajectory] = {}
    reasons: collections.Counter[str] = collections.Counter()
    jobs = run.heldout_jobs(phase, step, questions, samples)
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


def _draws(most: int) -> list[int]:
    """Powers of two, and the most there are."""
    return sorted({*(2**i for i in range(most.bit_length())), most})


def _mean(values: list[int]) -> float:
    return float(np.mean(values or [math.nan]))


if __name__ == "__main__":
    run_command(
        evaluate,
        flags={
            "samples": Flag(int, 4, "answers per question"),
            "questions": Flag(int, None, "held-out questions; the config's number"),
        },
    )
