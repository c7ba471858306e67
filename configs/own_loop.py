"""Your own loss, estimator, optimizer and loop, in one file.

    python configs/own_loop.py

The first three as settings, in the loop of the package:

    python -m thundersync_jax.train --config=configs/own_loop.py --workdir=runs/own
"""

import sys
import tempfile

import jax
import jax.numpy as jnp
import optax
import own_task

from thundersync_jax import Surrogate
from thundersync_jax.config.settings import replace
from thundersync_jax.ops.advantages import Estimator
from thundersync_jax.run import state
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import run_step


def loss(settings):
    """CISPO: ratios of learner to sampler are clipped, detached, and weigh tokens."""

    def term(tokens):
        ratio = jnp.exp(tokens.logprobs - tokens.sampler_logprobs)
        weight = jax.lax.stop_gradient(jnp.minimum(ratio, 2.0)) * tokens.weights
        return Surrogate(weighted=-jnp.sum(weight * tokens.logprobs))

    return term


def advantage(settings):
    """Only the best of a group are reinforced."""
    return Estimator("best", lambda r: (r == r.max()) - (r == r.max()).mean())


def optimizer(settings, schedule):
    return optax.lion(schedule, weight_decay=settings.weight_decay)


def get_config(variant=None):
    names = {
        "loss.surrogate": "own_loop:loss",
        "loss.advantage": "own_loop:advantage",
        "optim.factory": "own_loop:optimizer",
    }
    return replace(own_task.get_config(variant), names)


def train(config, workdir, **hooks):
    """Returns the gradient norm of every step. No warm start, no checkpoints."""
    with Run(config, workdir, owner=True, **hooks) as run:
        now = state.init(run.optimizer, run.initial_params())
        update = state.Update(run.optimizer, config.optim.clip_norm, now)
        norms = []
        for step in range(1, config.steps + 1):
            run.publish(now.params, step)
            stream = run.new_stream(now.params, version=step)
            done = run_step(run, stream, run.train_jobs(step), version=step)
            now, _ = update(now, done.gradient)
            norms.append(done.report.gradient_norm)
        return norms


if __name__ == "__main__":
    hooks = {"surrogate": loss, "estimator": advantage, "optimizer": optimizer}
    with tempfile.TemporaryDirectory() as folder:
        config = own_task.get_config("smoke" if "--smoke" in sys.argv else None)
        print(train(config, folder, **hooks))
