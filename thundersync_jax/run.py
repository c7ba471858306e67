"""What a config stands for, built once: tasks, model, meshes, sampler, optimizer.

The commands share it. It decides nothing about the order of a run.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from thundersync_jax import (
    accumulator,
    buckets,
    devices,
    mesh,
    objective,
    state,
    task_order,
)
from thundersync_jax.config import Config, LatencyConfig
from thundersync_jax.envs.base import Environment, TaskSet, check_split, load_factory
from thundersync_jax.envs.latency import WithLatency
from thundersync_jax.errors import ConfigError
from thundersync_jax.learner_clock import LearnerClock
from thundersync_jax.models import layers, transformer
from thundersync_jax.models.decode import InProcessEngine
from thundersync_jax.rollout import render
from thundersync_jax.rollout.agent import PHASES
from thundersync_jax.rollout.events import Job
from thundersync_jax.rollout.pool import RolloutPool
from thundersync_jax.stream import GradientStream
from thundersync_jax.timeline import Timeline
from thundersync_jax.types import Trajectory, TrajectoryKey
from thundersync_jax.workdir import claim, locked

Tree = Any
Factory = Callable[..., TaskSet]
_CHANNELS = 2  # sums of an open group: the policy surrogate has no additive part
_SHARE_OF_MEMORY = 0.25  # of a device, for group sums where nothing else is said


class Run:
    """One config with everything it needs. Use it as a context: it owns threads.

    Attributes:
      latency_scale: What medians of lognormal latencies are multiplied by; a benchmark
        sets it.

    Args:
      config: The settings.
      workdir: Where the run writes.
      environment: Makes the task set, in place of `config.env.factory`.
      on_line: Takes one line of news, such as that something compiles.
      owner: Whether the work directory becomes this config's, for this process alone.
    """

    def __init__(
        self,
        config: Config,
        workdir: str | Path,
        environment: Factory | None = None,
        on_line: Callable[[str], None] = print,
        owner: bool = False,
    ):
        self.config = config
        self.latency_scale = 1.0
        self.workdir = Path(workdir)
        self.on_line = on_line
        factory = environment or load_factory(config.env.factory)
        self.tasks = _checked(factory(config.env, config.seed), config)
        self._held = contextlib.ExitStack()
        if owner:
            self._held.enter_context(locked(workdir))
            claim(workdir, config)
        devices.prepare(config)
        self.placement = devices.place(config.mesh)
        self.optimizer = state.make_optimizer(config.optim)
        self.surrogate = objective.policy_surrogate(
            config.model, config.rollout.temperature
        )
        self.estimator = objective.estimator(config.loss)
        self.timeline = Timeline()
        self.clock = LearnerClock(self.timeline.add, lambda: self.pool.wake())
        params = self.initial_params()
        self.open_groups = _open_groups(config, params)
        self._introduce(params)
        self.engine = InProcessEngine(
            config.model,
            params,
            slots=config.rollout.slots,
            context_tokens=config.rollout.context_tokens,
            steps_per_call=config.rollout.decode_steps_per_call,
            prefill_buckets=config.rollout.prefill_buckets,
            device_or_sharding=self.placement.sampler,
        )
        self.pool = RolloutPool(
            self.engine,
            self._environment,
            config.rollout,
            config.seed,
            on_span=self.timeline.add,
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error) -> None:
        self.pool.close()
        self.clock.close()
        self._held.close()

    def initial_params(self) -> Tree:
        """Random parameters from the seed, on the learner's mesh."""
        return self._init(jax.random.key(self.config.seed))

    @functools.cached_property
    def _init(self) -> Callable[[jax.Array], Tree]:
        """Compiled once: with small models it takes as long as all else together."""
        model = self.config.model
        init = functools.partial(transformer.init, model)
        shardings = mesh.parameter_shardings(
            self.placement.mesh,
            jax.eval_shape(init, jax.random.key(0)),
            transformer.logical_axes(model),
            layers.MESH_AXES,
        )
        return jax.jit(init, out_shardings=shardings)

    def publish(self, params: Tree, version: int) -> None:
        """Hands the learner's parameters to the sampler; between steps only."""
        self.pool.update(params, version)

    def new_stream(
        self, params: Tree, version: int, release: str | None = None, rows: int = 0
    ) -> GradientStream:
        """A stream for one step of this run's loss."""
        config = self.config
        return GradientStream(
            self.surrogate,
            params,
            estimator=self.estimator,
            denominator=objective.denominator(config.loss),
            release=release or config.release,
            open_groups=self.open_groups,
            partial_groups=config.partial_groups,
            policy_version=version,
            rows_per_call=rows or config.mesh.rows_per_call,
            pad_last=False,  # both programs are compiled beforehand
            on_call=self.clock.on_call,
            on_compile=lambda what: self.on_line(f"compiling {what}"),
        )

    def sample(self, trajectory: Trajectory) -> buckets.Padded:
        """What the surrogate sees of a trajectory."""
        lengths = self.config.rollout.gradient_buckets
        return objective.sample(trajectory, self.config.loss, lengths)

    def train_jobs(self, step: int) -> list[Job]:
        """The rollouts of a step, counted from 1: each task `group_size` times."""
        rollout = self.config.rollout
        groups = rollout.groups_per_step
        chosen = task_order.take(
            self.tasks.train, self.config.seed, (step - 1) * groups, groups
        )
        return make_jobs("train", step, chosen, rollout.group_size)

    def heldout_jobs(
        self, phase: str, step: int, questions: int, samples: int
    ) -> list[Job]:
        """Rollouts of the first held-out questions."""
        return make_jobs(phase, step, self.tasks.heldout[:questions], samples)

    def _introduce(self, params: Tree) -> None:
        """Says what runs where, and what streaming costs in memory."""
        shape, sampler = self.placement.mesh.shape, self.placement.sampler
        count = sum(x.size for x in jax.tree.leaves(params))
        axes = " x ".join(f"{name} {size}" for name, size in shape.items())
        self.on_line(f"{count:,} parameters; learner on {axes}, sampler on {sampler}")
        if self.config.release != "trajectory":
            return
        sums = accumulator.bytes_per_device(params) * (1 + _CHANNELS * self.open_groups)
        self.on_line(
            f"{sums / 2**20:,.1f} MiB of gradient sums per device: the batch and up to "
            f"{self.open_groups} open groups of {_CHANNELS} sums each"
        )

    def _environment(self, key: TrajectoryKey) -> Environment:
        environment = self.tasks.environment()
        if key.phase != "train":
            return environment
        env = self.config.env
        seed = (self.config.seed, PHASES[key.phase], key.step, key.group, key.member)
        return WithLatency(
            environment,
            _scaled(env.tool_latency, self.latency_scale),
            _scaled(env.verify_latency, self.latency_scale),
            seed,
        )


def _scaled(latency: LatencyConfig, factor: float) -> LatencyConfig:
    if latency.kind != "lognormal":
        return latency
    return dataclasses.replace(latency, median_secs=factor * latency.median_secs)


def make_jobs(phase: str, step: int, tasks: Sequence[Any], members: int) -> list[Job]:
    """Every task as a group of so many members."""
    return [
        Job(TrajectoryKey(step, group, member, phase=phase), task)
        for group, task in enumerate(tasks)
        for member in range(members)
    ]


def _open_groups(config: Config, params: Tree) -> int:
    """How many groups may hold sums: what the config asks for, as far as it fits.

    Under batch and group release it is what comparisons with trajectory release use.
    """
    one = _CHANNELS * accumulator.bytes_per_device(params)
    budget = config.group_sum_bytes
    if budget is None:
        memory = jax.tree.leaves(params)[0].addressable_shards[0].device.memory_stats()
        budget = int((memory or {}).get("bytes_limit", 0) * _SHARE_OF_MEMORY) or None
    wished = config.open_groups or config.rollout.groups_per_step
    if budget is None and config.open_groups is None:
        raise ConfigError(
            "open_groups is none and the device does not tell its memory; set "
            f"open_groups, or group_sum_bytes at {one:,} bytes a group"
        )
    if budget is not None and budget < one:
        raise ConfigError(
            f"group_sum_bytes is {budget:,} and the sums of one open group take "
            f"{one:,} bytes per device; raise it, or shard over mesh.fsdp"
        )
    return wished if budget is None else min(wished, budget // one)


def _checked(tasks: TaskSet, config: Config) -> TaskSet:
    """The tasks that fit the context, if they are what the config needs."""
    if not isinstance(tasks, TaskSet):
        raise ConfigError(
            f"env.factory {config.env.factory!r} returned {type(tasks).__name__}; "
            "expected an envs.base.TaskSet"
        )
    if config.warm_start.steps and tasks.demonstrate is None:
        raise ConfigError(
            f"warm_start.steps is {config.warm_start.steps} and the task set has no "
            "`demonstrate`; give it one or set warm_start.steps=0"
        )
    fitting = _fitting(tasks, config)
    asked = {"evaluation.questions": config.evaluation.questions}
    if config.warm_start.steps:
        asked["warm_start.check_questions"] = config.warm_start.check_questions
    for name, questions in asked.items():
        if len(fitting.heldout) < questions:
            raise ConfigError(
                f"{name} is {questions} and {len(fitting.heldout)} held-out tasks fit "
                f"rollout.context_tokens {config.rollout.context_tokens}; ask for "
                "fewer or raise the limit"
            )
    return fitting


def _fitting(tasks: TaskSet, config: Config) -> TaskSet:
    """Leaves out the tasks whose prompt or demonstration exceeds the context."""
    limit = config.rollout.context_tokens

    def fits(task):
        length = len(render.render_prompt(tasks.prompt(task)))
        if tasks.demonstrate is not None:
            for action, observation in tasks.demonstrate(task):
                length += len(render.render_action(action))
                if observation:
                    length += len(render.render_observation(observation))
        return length < limit

    fitting = dataclasses.replace(
        tasks,
        train=[task for task in tasks.train if fits(task)],
        heldout=[task for task in tasks.heldout if fits(task)],
    )
    check_split(fitting)
    return fitting
