"""A policy as a Hugging Face folder, for `transformers`, vLLM and others.

    python -m thundersync_jax.export --config=FILE.py --workdir=DIR --folder=OUT

Tokenizer and chat template are those of `model.path`, or the byte-level vocabulary.
Servers start from the folder of `--initial` (`launch/local_vllm.sh`).
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from thundersync_jax.chat import byte_level as tokenizer
from thundersync_jax.config import Config
from thundersync_jax.config.workdir import replace_json
from thundersync_jax.errors import ConfigError
from thundersync_jax.flags import Flag
from thundersync_jax.flags import run as run_command
from thundersync_jax.hf import weights
from thundersync_jax.models.transformer import Transformer
from thundersync_jax.run import placement


def export(
    config: Config,
    workdir: str | Path | None = None,
    *,
    folder: str | None = None,
    step: int | None = None,
    dtype: str = "float32",
    initial: bool = False,
    untied: bool = False,
) -> dict[str, Any]:
    """Writes the folder; an existing one is replaced file by file.

    Returns the JSON object of `--json`.

    Args:
      workdir: Directory of a training run; not needed for `initial`.
      folder: Directory to write.
      step: Step of the checkpoint to write, 0 for the warm start's policy; None takes
        the newest.
      dtype: Type of the stored weights, "float32" or "bfloat16".
      initial: Whether to take the parameters that a run begins with.
      untied: Whether a head that is the transposed embedding becomes a tensor of its
        own. vLLM on CPU packs a tied head once and never reloads it.

    Raises:
      ConfigError: No folder is named, it is the one that the model comes from, or the
        work directory holds no such policy.
    """
    if folder is None or dtype not in weights.STORED_DTYPES:
        raise ConfigError(
            f"--folder is {folder or 'missing'} and --dtype {dtype!r}; expected a "
            f"directory to write and one of {', '.join(weights.STORED_DTYPES)}."
        )
    model = config.model
    if model.factory is not None:
        raise ConfigError(
            f"model.factory is {model.factory!r}; expected none: a Hugging Face folder "
            "holds the decoder alone. Save the parameters of another model yourself, "
            "from the checkpoint."
        )
    source = config.model.path
    if source is not None and _place(folder) == _place(source):
        raise ConfigError(
            f"--folder is {folder}, which is model.path; expected another one, for the "
            "weights there would be lost."
        )
    if workdir is None and not initial:
        raise ConfigError(
            "--workdir is missing; expected that of a training run, or --initial for "
            "the parameters that a run begins with."
        )
    if initial and step is not None:
        raise ConfigError(
            f"--step is {step} with --initial, expected one of them: no checkpoint "
            "holds the parameters that a run begins with."
        )
    placement.prepare(config)
    mesh = placement.place(config).mesh
    params = placement.initializer(config, Transformer(model), mesh)()
    step, params = (0, params) if initial else placement.policy(workdir, params, step)
    if untied and model.tied_embeddings:
        params = params | {"unembed": params["embed"]}
        # A path would decide about the head again.
        model = dataclasses.replace(model, path=None, tied_embeddings=False)
    byte_level = source is None
    generation = {"eos_token_id": tokenizer.END} if byte_level else None
    weights.save(
        folder, model, params, dtype, tokenizer_from=source, generation=generation
    )
    if byte_level:
        replace_json(Path(folder) / "tokenizer.json", tokenizer.tokenizer_json())
        config_file = Path(folder) / "tokenizer_config.json"
        replace_json(config_file, tokenizer.tokenizer_config())
    print(f"wrote {folder}: {model.layers} layers, {dtype}, step {step}")
    context_tokens = config.rollout.context_tokens
    token_bytes = 2 * model.layers * model.kv_heads * model.head_dim
    token_bytes *= jnp.dtype(dtype).itemsize
    return {
        "folder": str(folder),
        "step": step,
        "context_tokens": context_tokens,
        # Keys and values of all slots at full length.
        "cache_bytes": config.rollout.slots * context_tokens * token_bytes,
    }


def _place(folder: str) -> str:
    return os.path.realpath(os.path.expanduser(folder))


if __name__ == "__main__":
    run_command(
        export,
        flags={
            "folder": Flag(str, None, "directory to write"),
            "step": Flag(int, None, "checkpoint to write; the newest"),
            "dtype": Flag(str, "float32", "of the stored weights"),
            "initial": Flag(bool, False, "the parameters that a run begins with"),
            "untied": Flag(bool, False, "a tied head as a tensor of its own"),
        },
        needs=("config",),
    )
