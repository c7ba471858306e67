"""The teacher of a run: another run's newest policy, which only scores.

Where its work directory holds none, the config that it comes from is trained there
first, once, by the command that a person would type.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from thundersync_jax import state, token_numbers
from thundersync_jax.checkpoint import Checkpoints
from thundersync_jax.config import Config, ModelConfig, OptimConfig
from thundersync_jax.errors import ConfigError
from thundersync_jax.models import transformer
from thundersync_jax.models.scoring import ScoringEngine
from thundersync_jax.rollout import teacher as rollout_teacher
from thundersync_jax.rollout import tokenizer
from thundersync_jax.workdir import RESULT_FILE, VOCABULARY_FILE

Tree = Any


class Teacher(NamedTuple):
    """A frozen policy."""

    model: ModelConfig
    params: Tree  # on the host


def load(config: Config, on_line: Callable[[str], None]) -> Teacher | None:
    """The policy that a config names, made where it is missing; None without one.

    Raises:
      ConfigError: There is none and nothing to make it from, or it speaks of other
        tokens than the policy.
    """
    if config.teacher.workdir is None:
        return None
    workdir = Path(config.teacher.workdir)
    if not (workdir / RESULT_FILE).exists():
        _make(config, workdir, on_line)
    try:
        saved = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
        model, optim = ModelConfig(**saved["model"]), OptimConfig(**saved["optim"])
        vocabulary = json.loads((workdir / VOCABULARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"teacher.workdir is {workdir}, expected the work directory of a finished "
            f"run, but {error}. Train one there."
        ) from error
    rollout_teacher.check_vocabulary(
        tokenizer.vocabulary(), vocabulary, config.model.vocab_size, model.vocab_size
    )
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        step = checkpoints.latest() or 0
        saved, _ = checkpoints.restore(step, _like(model, optim))
    return Teacher(model, jax.device_get(saved.params))


def width(config: Config, teacher: Teacher | None) -> int:
    """Ids that the policy and its teacher have."""
    models = [config.model] + ([teacher.model] if teacher else [])
    return min(model.vocab_size for model in models)


def engine(
    config: Config, teacher: Teacher | None, width: int, device: jax.Device
) -> ScoringEngine | None:
    """The engine that scores what the loss needs; None without a teacher."""
    if teacher is None:
        return None
    rollout, loss = config.rollout, config.loss
    return ScoringEngine(
        teacher.model,
        teacher.params,
        kind=token_numbers.teacher_kind(loss),
        top_k=loss.distill_top_k or 0,
        width=width,
        temperature=rollout.temperature,
        sessions=rollout.slots,
        context_tokens=rollout.context_tokens,
        buckets=config.teacher.buckets or rollout.prefill_buckets,
        device_or_sharding=device,
    )


def maker(engine: ScoringEngine | None) -> Callable[..., Any] | None:
    """For a rollout pool: puts the teacher into its event loop."""
    if engine is None:
        return None
    return functools.partial(rollout_teacher.LocalTeacher, engine)


def _make(config: Config, workdir: Path, on_line: Callable[[str], None]) -> None:
    given = config.teacher.config
    if given is None:
        raise ConfigError(
            f"teacher.workdir is {workdir}, which holds no finished run, and "
            "teacher.config is none. Train the teacher there, or name its config."
        )
    module = "thundersync_jax.train"
    command = ["-m", module, f"--config={given}", f"--workdir={workdir}"]
    on_line(f"no teacher in {workdir} yet: python {' '.join(command)}")
    # A process of its own: jax has as many devices as its first run asked for.
    found = subprocess.run([sys.executable, *command], env=os.environ)
    if found.returncode:
        raise ConfigError(
            f"making the teacher ended with status {found.returncode}; its command was "
            f"python {' '.join(command)}. Look at what it printed above."
        )


def _like(model: ModelConfig, optim: OptimConfig) -> state.State:
    """The shapes of what a run of these settings saves."""
    init = functools.partial(transformer.init, model)
    params = jax.eval_shape(init, jax.random.key(0))
    optimizer = state.make_optimizer(optim)
    return state.State(params, jax.eval_shape(optimizer.init, params))
