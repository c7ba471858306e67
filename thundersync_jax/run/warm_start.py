"""Supervised learning on demonstrations, until sampling succeeds now and then.

A model that starts from nothing never finds a reward, and a policy gradient without
rewards is zero. The warm start ends when sampled held-out success at the training
temperature passes a target: greedy success says little about what sampling will find.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from thundersync_jax.config import OptimConfig
from thundersync_jax.errors import ConfigError, StreamError
from thundersync_jax.models import base
from thundersync_jax.models.base import Model, Params
from thundersync_jax.run import state, tasks
from thundersync_jax.run.checkpoint import Checkpoints
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import heldout
from thundersync_jax.stream import padding

POLICY_VERSION = 0  # of everything before the first policy update
_RAMP_STEPS = 20  # of the supervised learning rate


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """The policy that reinforcement learning begins with.

    Attributes:
      params: Parameters of the policy.
      steps: Number of supervised steps.
      elapsed_secs: Seconds that these steps took, pauses between processes left out.
      history: Every measurement: seconds, held-out success, its 95 % interval.
    """

    params: Params
    steps: int
    elapsed_secs: float
    history: list[tuple[float, float, float, float]]


def demonstrations(run: Run) -> dict[str, np.ndarray]:
    """All training demonstrations: "tokens" int32[N, T] and "weights" float32[N, T].

    Weights are 1 on action tokens; T is the gradient bucket of the longest.
    """
    chat, rows = run.chat, []
    for task in run.tasks.train:
        pieces = [(chat.prompt(run.tasks.prompt(task)), 0.0)]
        for action, observation in run.tasks.demonstrate(task):
            pieces.append((chat.action(action), 1.0))
            if observation:
                pieces.append((chat.observation(observation), 0.0))
        tokens = np.concatenate([ids for ids, _ in pieces]).astype(np.int32)
        weights = np.concatenate([np.full(len(i), w, np.float32) for i, w in pieces])
        rows.append({"tokens": tokens, "weights": weights})
    if not all(row["weights"].any() for row in rows):
        raise ConfigError(
            "a demonstration has no action; `demonstrate` must return at least one "
            "(action, observation) pair for every training task"
        )
    longest = max(len(row["tokens"]) for row in rows)
    length = padding.bucket(longest, run.config.rollout.gradient_buckets)
    padded = [padding.pad(row, (length,)).tree for row in rows]
    return {name: np.stack([row[name] for row in padded]) for name in padded[0]}


def warm_start(run: Run, params: Params, checkpoints: Checkpoints) -> WarmStart:
    """Trains on demonstrations, or takes up where an interrupted warm start was.

    Its policy is the run's reference from then on, in every process of the run.
    `params` are donated. `checkpoints` are of warm starts alone; the newest one is the
    warm start itself once its host facts say "done".
    """
    settings = run.config.warm_start
    optimizer = state.make_optimizer(
        OptimConfig(settings.learning_rate, warmup_steps=_RAMP_STEPS)
    )
    now = state.init(optimizer, params)
    facts = {"done": settings.steps == 0, "elapsed_secs": 0.0, "history": []}
    start = checkpoints.latest() or 0
    if start:
        now, facts = checkpoints.restore(start, now)
        if not facts["done"]:
            run.on_line(f"warm start resumed after step {start}")
    origin = time.monotonic() - facts["elapsed_secs"]
    update = supervised_update(run.model, optimizer, now)
    data = demonstrations(run) if not facts["done"] else {}
    step = start
    if data:
        count, length = data["tokens"].shape
        run.on_line(
            f"warm start: compiling a step of {settings.batch_size} of {count:,} "
            f"demonstrations in {length} tokens"
        )
    while not facts["done"]:
        rows = tasks.take(
            range(len(run.tasks.train)),
            run.config.seed,
            step * settings.batch_size,
            settings.batch_size,
        )
        now, loss = update(now, {name: x[rows] for name, x in data.items()})
        step += 1
        if step % settings.check_every_steps and step < settings.steps:
            continue
        if not np.isfinite(loss):
            raise StreamError(
                f"the warm start's loss is {float(loss)} at step {step}; lower "
                f"warm_start.learning_rate, now {settings.learning_rate}"
            )
        run.publish(now.params, POLICY_VERSION)
        questions = run.config.warm_start.check_questions
        evaluation = heldout(
            run, POLICY_VERSION, questions, 1, phase="warm_start", step=step
        )
        success = evaluation.success
        reached = success >= settings.target_success
        elapsed = time.monotonic() - origin
        facts = {
            "done": reached or step >= settings.steps,
            "elapsed_secs": elapsed,
            "history": [*facts["history"], [elapsed, success, *evaluation.interval]],
        }
        run.on_line(
            f"warm start  step {step:4d}  loss {float(loss):6.3f}  "
            f"held-out success {100 * success:5.1f}%"
        )
        checkpoints.save(step, now, facts)
    checkpoints.wait()
    run.set_reference(now.params)
    history = [tuple(point) for point in facts["history"]]
    return WarmStart(now.params, step, facts["elapsed_secs"], history)


def supervised_update(
    model: Model, optimizer: optax.GradientTransformation, like: state.State
):
    """Returns the jitted (state, batch) -> (state, loss); the state is donated.

        loss = - sum_t w_t log pi(token_t) / sum_t w_t

    over a batch of "tokens" int32[B, T] and "weights" float32[B, T]. The new state is
    laid out like `like`.
    """

    def loss_of(params, batch):
        def weighted(tokens, weights):
            logprobs = base.logprobs(model, params, tokens, 1.0)
            return -jnp.sum(jnp.where(weights > 0, logprobs, 0) * weights)

        total = jnp.sum(jax.vmap(weighted)(batch["tokens"], batch["weights"]))
        return total / jnp.sum(batch["weights"])

    def update(now, batch):
        loss, gradient = jax.value_and_grad(loss_of)(now.params, batch)
        updates, opt_state = optimizer.update(gradient, now.opt_state, now.params)
        return state.State(optax.apply_updates(now.params, updates), opt_state), loss

    shardings = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))
