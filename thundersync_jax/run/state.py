"""What one optimizer update changes, and the update."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from thundersync_jax.config import OptimConfig, dotted
from thundersync_jax.errors import ConfigError

Params = Any  # a tree of arrays
Optimizer = optax.GradientTransformation
Factory = Callable[[OptimConfig, Callable[[jax.Array], jax.Array]], Optimizer]


class State(NamedTuple):
    """Parameters (float32 masters) and the optimizer's state, laid out alike."""

    params: Params
    opt_state: Any


def make_optimizer(
    config: OptimConfig, own: Optimizer | Factory | None = None
) -> Optimizer:
    """What a config names, after clipping the gradient of the whole step.

    AdamW, or a transformation of the user's, whose state may be any tree: `own`, or a
    function that makes it, in place of `optim.factory`. ConfigError where it is none.
    Clipping comes after the baseline has been applied: the gradient's pieces have no
    norm of their own.
    """
    schedule = functools.partial(learning_rate, config)
    source = "the argument optimizer"
    if own is None and config.factory is not None:
        source = f"optim.factory {config.factory!r}"
        own = dotted.load("optim.factory", config.factory, ["optim", "schedule"])
    if isinstance(own, Optimizer):
        optimizer = own
    elif own is not None:
        optimizer = own(config, schedule)
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"{source} gives {optimizer!r:.60}; expected an "
                "optax.GradientTransformation. Return it."
            )
    else:
        # `optax.adamw` has this state too, but with a mask for the decay another one.
        optimizer = optax.chain(
            optax.scale_by_adam(b1=config.b1, b2=config.b2),
            optax.stateless(functools.partial(_decayed, config.weight_decay)),
            optax.scale_by_learning_rate(schedule),
        )
    if config.clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)


def learning_rate(config: OptimConfig, updates: jax.Array | int) -> jax.Array:
    """The rate of the update after so many: linear warm-up, then the schedule.

        p = clip((updates - warmup_steps) / (decay_steps - warmup_steps), 0, 1)
        linear: 1 - (1 - floor) p;  cosine: floor + (1 - floor) (1 + cos(pi p)) / 2

    Both are shares of `optim.learning_rate`.
    """
    warm = jnp.minimum((updates + 1) / max(config.warmup_steps, 1), 1.0)
    rate = config.learning_rate * warm
    if config.schedule == "constant":
        return rate
    start, end = config.warmup_steps, config.decay_steps
    p = jnp.clip((updates - start) / (end - start), 0.0, 1.0)
    if config.schedule == "cosine":
        p = (1 - jnp.cos(jnp.pi * p)) / 2
    return rate * (1 - (1 - config.floor) * p)


def decays(params: Params) -> Params:
    """Which parameters weight decay acts on: bool for every array.

    Not on vectors, nor on what has "norm" in its name or ends in "bias" or "scale":
    layers are stacked, so that their norms and biases have two or three axes.
    """

    def leaf(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/").lower()
        named = "norm" in name or name.endswith(("bias", "scale"))
        return x.ndim > 1 and not named

    return jax.tree.map_with_path(leaf, params)


def _decayed(weight_decay: float, updates: Params, params: Params) -> Params:
    return jax.tree.map(
        lambda update, x, decay: update + weight_decay * x if decay else update,
        updates,
        params,
        decays(params),
    )


def init(optimizer: Optimizer, params: Params) -> State:
    """The state before the first update; `params` must lie on a mesh."""
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    whole = NamedSharding(mesh, PartitionSpec())

    def lay_out(x):
        on_mesh = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh
        return x if on_mesh else jax.device_put(x, whole)

    return State(params, jax.tree.map(lay_out, optimizer.init(params)))


def updated(optimizer: Optimizer, state: State, gradient: Params) -> State:
    """The state after one update."""
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state)


class Update:
    """The jitted update, laid out like `like`; the norm that it reports is clipped."""

    def __init__(self, optimizer: Optimizer, clip_norm: float | None, like: State):
        def update(state, gradient):
            gradient = jax.tree.map(
                lambda g, p: g.astype(p.dtype), gradient, state.params
            )
            norm = optax.tree.norm(gradient)
            clipped = norm if clip_norm is None else jnp.minimum(norm, clip_norm)
            return updated(optimizer, state, gradient), clipped

        shardings = jax.tree.map(lambda x: x.sharding, like)
        self._update = jax.jit(
            update, donate_argnums=0, out_shardings=(shardings, None)
        )

    def compile(self, state: State) -> None:
        """Compiles by one update that is thrown away; `state` stays."""
        copy = jax.tree.map(jnp.copy, state)
        self._update(copy, jax.tree.map(jnp.zeros_like, state.params))

    def __call__(self, state: State, gradient: Params) -> tuple[State, jax.Array]:
        """The new state and the gradient norm after clipping; `state` is donated."""
        return self._update(state, gradient)
