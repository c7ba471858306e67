"""Held-out success of a policy, sampled at the training temperature.

python -m thundersync_jax.evaluate --config=FILE.py --workdir=DIR --samples=4
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from thundersync_jax.config import Config
from thundersync_jax.errors import ConfigError
from thundersync_jax.flags import Flag
from thundersync_jax.flags import run as run_command
from thundersync_jax.models.base import ModelFactory
from thundersync_jax.run.heldout import heldout, newest_policy
from thundersync_jax.run.run import Factory, Run
from thundersync_jax.view.display import Display


def evaluate(
    config: Config,
    workdir: str | Path,
    *,
    samples: int = 4,
    questions: int | None = None,
    environment: Factory | None = None,
    model: ModelFactory | None = None,
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
      model: Makes the policy, in place of `config.model.factory`.

    Returns:
      The JSON object of `--json`.

    Raises:
      ConfigError: There is no policy, or fewer held-out questions than asked for.
    """
    if questions is None:
        questions = config.evaluation.questions
    display = Display()
    with Run(config, workdir, environment, display.line, model=model) as run:
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
