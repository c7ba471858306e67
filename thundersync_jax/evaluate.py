"""Held-out success and reward of a policy, sampled or with its likeliest tokens.

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
from thundersync_jax.metrics.records import stop_metrics
from thundersync_jax.models.base import ModelFactory
from thundersync_jax.run import placement
from thundersync_jax.run.run import Factory, Run
from thundersync_jax.run.step import heldout
from thundersync_jax.view.display import Display

_SAMPLES = 4


def evaluate(
    config: Config,
    workdir: str | Path,
    *,
    samples: int | None = None,
    questions: int | None = None,
    step: int | None = None,
    temperature: float | None = None,
    environment: Factory | None = None,
    model: ModelFactory | None = None,
) -> dict[str, Any]:
    """Evaluates a policy of a work directory: a checkpoint, or the warm start.

    The config may differ from the one that trained it (another tool, temperature or
    limit); the model may not. Returns the JSON object of `--json`.

    Args:
      workdir: Directory of a training run.
      samples: Answers per question; None takes 4, and 1 at temperature 0.
      questions: Held-out questions; None takes `evaluation.questions`.
      step: Step of the checkpoint, 0 for the warm start's policy; None takes the
        newest.
      temperature: Logits are divided by it, and 0 takes the likeliest token; None
        takes `rollout.temperature`.
      environment: Makes the task set, in place of `config.env.factory`.
      model: Makes the policy, in place of `config.model.factory`.

    Raises:
      ConfigError: There is no such policy, or fewer held-out questions than asked for.
    """
    if questions is None:
        questions = config.evaluation.questions
    if temperature is None:
        temperature = config.rollout.temperature
    if not 0 <= temperature < math.inf:
        raise ConfigError(
            f"--temperature is {temperature}, expected a number of at least 0. "
            "0 takes the likeliest token."
        )
    if samples is None:
        samples = _SAMPLES if temperature else 1
    display = Display()
    with Run(config, workdir, environment, display.line, model=model) as run:
        if not (1 <= questions <= len(run.tasks.heldout) and samples >= 1):
            raise ConfigError(
                f"--questions is {questions} and --samples {samples}; expected 1 to "
                f"{len(run.tasks.heldout)} held-out questions and at least 1 sample."
            )
        step, params = placement.policy(workdir, run.initial_params(), step)
        run.publish(params, step)
        run.artefacts.begin(f"evaluated_{step:06d}")
        evaluation = heldout(run, step, questions, samples, temperature=temperature)
    stops = stop_metrics(evaluation.stop_reasons)
    draws = sorted({*(2**i for i in range(samples.bit_length())), samples})
    result = {
        "step": step,
        "questions": questions,
        "samples": samples,
        "temperature": temperature,
        "success": evaluation.success,
        "interval": list(evaluation.interval),
        "reward": evaluation.reward,
        "parts": evaluation.parts,
        "pass_at": {str(k): evaluation.pass_at(k) for k in draws},
        "turns_mean": _mean([t.turns for t in evaluation.trajectories]),
        "action_tokens_mean": _mean([t.action_tokens for t in evaluation.trajectories]),
        "stop_reasons": evaluation.stop_reasons,
        "truncated_share": stops["truncated_share"],
    }
    display.evaluation(f"step {step}", evaluation)
    for k, value in result["pass_at"].items():
        display.line(f"pass@{k:<4} {100 * value:5.1f}%")
    display.line(
        f"{result['turns_mean']:.2f} turns and {result['action_tokens_mean']:.1f} "
        "sampled tokens per answer"
    )
    for reason, count in sorted(evaluation.stop_reasons.items()):
        display.line(f"{reason:<18} {count:5d}")
    return result


def _mean(values: list[int]) -> float:
    return float(np.mean(values or [math.nan]))


if __name__ == "__main__":
    run_command(
        evaluate,
        flags={
            "samples": Flag(int, None, "answers per question; 4, or 1 if greedy"),
            "questions": Flag(int, None, "held-out questions; the config's number"),
            "step": Flag(int, None, "checkpoint to evaluate; the newest"),
            "temperature": Flag(float, None, "of sampling, 0 is greedy; the config's"),
        },
    )
