"""What one optimizer update changes, and the update."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from thundersync_jax.config import OptimConfig

Tree = Any


class State(NamedTuple):
    """Parameters (float32 masters) and the optimizer's moments, laid out alike."""

    params: Tree
    opt_state: Tree


def make_optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """AdamW with linear warm-up, after clipping the gradient of the whole step.

    Clipping comes after the baseline has been applied: the gradient's pieces have no
    norm of their own.
    """
    adamw = optax.adamw(
        functools.partial(learning_rate, config),
        b1=config.b1,
        b2=config.b2,
        weight_decay=config.weight_decay,
    )
    if config.clip_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def learning_rate(config: OptimConfig, updates: jax.Array | int) -> jax.Array:
    """The rate of the update after so many: linear warm-up, then constant."""
    warm = jnp.minimum((updates + 1) / max(config.warmup_steps, 1), 1.0)
    return config.learning_rate * warm


def init(optimizer: optax.GradientTransformation, params: Tree) -> State:
    """The state before the first update; `params` must lie on a mesh."""
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    whole = NamedSharding(mesh, PartitionSpec())

    def lay_out(x):
        on_mesh = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh
        return x if on_mesh else jax.device_put(x, whole)

    return State(params, jax.tree.map(lay_out, optimizer.init(params)))


class Update:
    """The jitted update: once per step, at its boundary.

    Args:
      optimizer: As `make_optimizer` returns it.
      clip_norm: Its clipping, to report the norm after it.
      like: A state; results are laid out like it.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        clip_norm: float | None,
        like: State,
    ):
        def update(state, gradient):
            gradient = jax.tree.map(
                lambda g, p: g.astype(p.dtype), gradient, state.params
            )
            updates, opt_state = optimizer.update(
                gradient, state.opt_state, state.params
            )
            norm = optax.tree.norm(gradient)
            clipped = norm if clip_norm is None else jnp.minimum(norm, clip_norm)
            return State(optax.apply_updates(state.params, updates), opt_state), clipped

        shardings = jax.tree.map(lambda x: x.sharding, like)
        self._update = jax.jit(
            update, donate_argnums=0, out_shardings=(shardings, None)
        )

    def compile(self, state: State) -> None:
        """Compiles by one update that is thrown away; `state` stays."""
        copy = jax.tree.map(jnp.copy, state)
        self._update(copy, jax.tree.map(jnp.zeros_like, state.params))

    def __call__(self, state: State, gradient: Tree) -> tuple[State, jax.Array]:
        """Returns the new state and the gradient norm after clipping.

        `state` is donated.
        """
        return self._update(state, gradient)
