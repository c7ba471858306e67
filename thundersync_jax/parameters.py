"""The parameters that a run begins with, and the newest that it left."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from thundersync_jax import mesh, state
from thundersync_jax.checkpoint import Checkpoints
from thundersync_jax.config import Config
from thundersync_jax.models import layers, transformer, weights

Tree = Any


def initializer(config: Config, devices: Mesh) -> Callable[[], Tree]:
    """Makes the first parameters, laid out over a mesh, as often as it is called.

    They are random from the seed, or the weights of `model.path`. A program that draws
    them is compiled once: with small models that takes as long as all else together.
    """
    model, key = config.model, jax.random.key(config.seed)
    init = functools.partial(transformer.init, model)
    shardings = mesh.parameter_shardings(
        devices,
        jax.eval_shape(init, key),
        transformer.logical_axes(model),
        layers.MESH_AXES,
    )
    if model.path is not None:
        return functools.partial(weights.load, model.path, model, shardings)
    return functools.partial(jax.jit(init, out_shardings=shardings), key)


def newest(workdir: str | Path, like: state.State) -> tuple[int, Tree] | None:
    """The newest policy of a work directory, None where there is none.

    Args:
      workdir: Of a training run.
      like: Shapes and layout of what it saved.

    Returns:
      The step, 0 for the warm start's policy, and the parameters.
    """
    for folder in ("checkpoints", "warm_start"):
        with Checkpoints(Path(workdir) / folder) as checkpoints:
            step = checkpoints.latest()
            if step is not None:
                saved, _ = checkpoints.restore(step, like)
                return (step if folder == "checkpoints" else 0), saved.params
    return None
