"""Supervised learning on demonstrations, until sampling succeeds now and then.

Without rewards a policy gradient is zero. Success is that of sampling, at the training
temperature: greedy success says little about what sampling will find.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from thundersync_jax.chat.base import conversation, reply
from thundersync_jax.config import OptimConfig
from thundersync_jax.errors import StreamError
from thundersync_jax.models import base
from thundersync_jax.models.base import Model, Params
from thundersync_jax.run import state, tasks
from thundersync_jax.run.checkpoint import Checkpoints
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import heldout
from thundersync_jax.run.task_tokens import of_task
from thundersync_jax.stream import padding

POLICY_VERSION = 0  # of everything before the first policy update
_RAMP_STEPS = 20  # of the supervised learning rate


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """The policy that reinforcement learning begins with."""

    params: Params  #: of the policy
    steps: int  #: supervised ones
    elapsed_secs: float  #: of these steps, pauses between processes left out
    #: Every measurement: seconds, held-out success, its 95 % interval.
    history: list[tuple[float, float, float, float]]


class Demonstrations:
    """The training demonstrations, each rendered when it is first used."""

    def __init__(self, run: Run):
        buckets = run.config.rollout.gradient_buckets
        #: Tokens of a row: the gradient bucket of the longest demonstration.
        self.length = padding.bucket(run.demonstration_tokens, buckets)
        self._tasks, self._chat = run.tasks, run.chat
        self._rows: dict[int, dict[str, np.ndarray]] = {}

    def __len__(self) -> int:
        return len(self._tasks.train)

    def batch(self, places: Sequence[int]) -> dict[str, np.ndarray]:
        """ "tokens" int32[B, T] and "weights" float32[B, T], which are 1 on actions."""
        for place in set(places) - self._rows.keys():
            self._rows[place] = self._rendered(self._tasks.train[place])
        rows = [self._rows[place] for place in places]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _rendered(self, task: Any) -> dict[str, np.ndarray]:
        chat = of_task(self._chat, self._tasks, task)
        pieces = [(chat.prompt(conversation(self._tasks.prompt(task))), 0.0)]
        for action, observation in self._tasks.demonstrate(task):
            pieces.append((chat.action(action), 1.0))
            if observation:
                answer = reply(action, observation)
                pieces.append((chat.observation(answer), 0.0))
        tokens = np.concatenate([ids for ids, _ in pieces]).astype(np.int32)
        weights = np.concatenate([np.full(len(i), w, np.float32) for i, w in pieces])
        return padding.pad({"tokens": tokens, "weights": weights}, (self.length,)).tree


def warm_start(run: Run, params: Params, checkpoints: Checkpoints) -> WarmStart:
    """Trains on demonstrations, or takes up where an interrupted warm start was.

    Its policy is the run's reference from then on, in every process of the run.
    `params` are donated. `checkpoints` are of warm starts alone; the newest one is the
    warm start itself once its host facts say "done".
    """
    settings = run.config.warm_start
    size = settings.batch_size
    optimizer = state.make_optimizer(
        OptimConfig(settings.learning_rate, warmup_steps=_RAMP_STEPS)
    )
    now = state.init(optimizer, params)
    facts = {"done": settings.steps == 0, "elapsed_secs": 0.0, "history": []}
    step = checkpoints.latest() or 0
    if step:
        now, facts = checkpoints.restore(step, now)
        if not facts["done"]:
            run.on_line(f"warm start resumed after step {step}")
    origin = time.monotonic() - facts["elapsed_secs"]
    update = supervised_update(run.model, optimizer, now)
    if not facts["done"]:
        data = Demonstrations(run)
        run.on_line(
            f"warm start: compiling a step of {size} of {len(data):,} demonstrations "
            f"in {data.length} tokens"
        )
    while not facts["done"]:
        rows = tasks.take(range(len(data)), run.config.seed, step * size, size)
        now, loss = update(now, data.batch(rows))
        step += 1
        if step % settings.check_every_steps and step < settings.steps:
            continue
        if not np.isfinite(loss):
            raise StreamError(
                f"the warm start's loss is {float(loss)} at step {step}; lower "
                f"warm_start.learning_rate, now {settings.learning_rate}"
            )
        run.publish(now.params, POLICY_VERSION)
        questions = settings.check_questions
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
        return state.updated(optimizer, now, gradient), loss

    shardings = jax.tree.map(lambda x: x.sharding, like)
    return jax.jit(update, donate_argnums=0, out_shardings=(shardings, None))
