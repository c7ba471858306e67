"""The teacher of a run, which only scores: another run's policy, or that of servers."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from thundersync_jax.chat import tokenizer_files
from thundersync_jax.config import Config, ModelConfig
from thundersync_jax.config import model as model_config
from thundersync_jax.config.workdir import RESULT_FILE, VOCABULARY_FILE
from thundersync_jax.engines.scoring import ScoringEngine
from thundersync_jax.engines.vllm import engine as vllm
from thundersync_jax.engines.vllm.engine import Server
from thundersync_jax.engines.vllm.teacher import VLLMTeacher
from thundersync_jax.errors import ConfigError
from thundersync_jax.models import base
from thundersync_jax.models.base import Model, Params
from thundersync_jax.rollout import teacher as rollout_teacher
from thundersync_jax.run.checkpoint import Checkpoints


class Teacher(NamedTuple):
    """A frozen policy, and where it is."""

    vocab_size: int  # rows of its embedding
    source: str  # the work directory or the servers, for people
    model: Model | None = None  # None on servers
    params: Params = None  # on the host


def load(
    config: Config, vocabulary: Mapping[str, int], on_line: Callable[[str], None]
) -> Teacher | None:
    """The policy that a config names, made where it is missing; None without one.

    It must share `vocabulary`, the student's ids by token. ConfigError where it does
    not, or there is no policy and nothing to make it from.
    """
    if not config.teacher.given:
        return None
    if config.teacher.servers:
        teacher, words = _served(config)
    else:
        teacher, words = _trained(config, on_line)
    rollout_teacher.check_vocabulary(
        vocabulary, words, config.model.vocab_size, teacher.vocab_size
    )
    return teacher


def width(config: Config, teacher: Teacher | None) -> int:
    """Ids that the policy and its teacher have."""
    vocab_size = config.model.vocab_size
    return min(vocab_size, teacher.vocab_size) if teacher else vocab_size


def engine(
    config: Config,
    teacher: Teacher | None,
    width: int,
    device: jax.Device,
    on_line: Callable[[str], None],
) -> ScoringEngine | VLLMTeacher | None:
    """What scores as the loss needs it, here on `device`; None without a teacher."""
    if teacher is None:
        return None
    rollout, loss = config.rollout, config.loss
    questions = {
        "kind": loss.teacher_kind,
        "top_k": loss.distill_top_k or 0,
        "width": width,
        "temperature": rollout.temperature,
        "context_tokens": rollout.context_tokens,
    }
    if teacher.model is None:
        secs = config.teacher.request_timeout_secs
        return VLLMTeacher(
            config.teacher.servers, timeout_secs=secs, on_line=on_line, **questions
        )
    return ScoringEngine(
        teacher.model,
        teacher.params,
        sessions=rollout.slots,
        buckets=config.teacher.buckets or rollout.prefill_buckets,
        device_or_sharding=device,
        **questions,
    )


def maker(engine: ScoringEngine | VLLMTeacher | None) -> Callable[..., Any] | None:
    """For a rollout pool: puts the teacher into its event loop."""
    if engine is None:
        return None
    if isinstance(engine, VLLMTeacher):
        return engine.connect
    return functools.partial(rollout_teacher.LocalTeacher, engine)


def _trained(
    config: Config, on_line: Callable[[str], None]
) -> tuple[Teacher, dict[str, int]]:
    """The newest policy of a work directory, and its vocabulary."""
    workdir = Path(config.teacher.workdir)
    if not (workdir / RESULT_FILE).exists():
        _make(config, workdir, on_line)
    try:
        saved = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
        settings = model_config.from_dict(saved["model"])
        words = json.loads((workdir / VOCABULARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"teacher.workdir is {workdir}, expected the work directory of a finished "
            f"run, but {error}. Train one there."
        ) from error
    model = base.build(settings)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        step = checkpoints.latest() or 0
        like = {"params": jax.eval_shape(model.init, jax.random.key(0))}
        saved, _ = checkpoints.restore(step, like, part=True)
    params = jax.device_get(saved["params"])
    return Teacher(model.vocab_size, str(workdir), model, params), words


def _served(config: Config) -> tuple[Teacher, dict[str, int]]:
    """What servers serve, by the folder that they read, and its vocabulary."""
    servers = config.teacher.servers
    folder = config.teacher.path
    if folder is None:
        server = Server(servers[0], config.teacher.request_timeout_secs)
        tokens = config.rollout.context_tokens
        (model,) = vllm.check([server], tokens, development=False).values()
        folder = model.root
    if not Path(folder).expanduser().is_dir():
        raise ConfigError(
            f"teacher.servers serve {folder!r}, which is no directory here; expected "
            "one: its tokenizer must be compared with the policy's. Set teacher.path "
            "to a copy of it."
        )
    words = tokenizer_files.vocabulary(Path(folder).expanduser())
    model = ModelConfig(path=folder)
    return Teacher(model.vocab_size, ", ".join(servers)), words


def _make(config: Config, workdir: Path, on_line: Callable[[str], None]) -> None:
    source = config.teacher.config
    if source is None:
        raise ConfigError(
            f"teacher.workdir is {workdir}, which holds no finished run, and "
            "teacher.config is none. Train the teacher there, or name its config."
        )
    module = "thundersync_jax.train"
    command = ["-m", module, f"--config={source}", f"--workdir={workdir}"]
    on_line(f"no teacher in {workdir} yet: python {' '.join(command)}")
    # A process of its own: jax has as many devices as its first run asked for.
    process = subprocess.run([sys.executable, *command], env=os.environ)
    if process.returncode:
        raise ConfigError(
            f"making the teacher ended with status {process.returncode}; its command "
            f"was python {' '.join(command)}. Look at what it printed above."
        )
