"""What a config stands for, built once: tasks, model, meshes, sampler, optimizer."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.chat.base import conversation
from thundersync_jax.config import Config
from thundersync_jax.config.run import check_addends, check_family
from thundersync_jax.config.workdir import (
    check_claim,
    claim,
    claim_day,
    first_day,
    locked,
    resumed,
)
from thundersync_jax.engines import in_process
from thundersync_jax.engines.in_process import EngineGroup, InProcessEngine
from thundersync_jax.engines.vllm.engine import VLLMEngine
from thundersync_jax.engines.vllm.publish import Publisher
from thundersync_jax.envs import base as envs
from thundersync_jax.metrics.learner_clock import LearnerClock
from thundersync_jax.metrics.records import Artefacts
from thundersync_jax.metrics.timing import Timeline
from thundersync_jax.models import base as models
from thundersync_jax.models.base import ModelFactory, Params
from thundersync_jax.ops.advantages import Estimator
from thundersync_jax.rollout.agent import PHASES
from thundersync_jax.rollout.events import Job
from thundersync_jax.rollout.pool import RolloutPool
from thundersync_jax.run import objective, placement, policy_term, state, teaching
from thundersync_jax.run import tasks as run_tasks
from thundersync_jax.run.samples import Samples
from thundersync_jax.run.task_tokens import of_task
from thundersync_jax.stream.gradient_stream import GradientStream
from thundersync_jax.stream.turn_stream import TurnStream
from thundersync_jax.types import Trajectory, TrajectoryKey

_KIND = 40  # characters of a line by which warnings are told apart
Factory = Callable[..., envs.TaskSet]


class Run:
    """One config with everything it needs. Use it as a context: it owns threads.

    Attributes:
      tasks: The tasks that fit the context.
      chat: How text becomes token ids.
      model: The policy as functions of its parameters.
      additive: Whether the loss has a part that no advantage multiplies.
      demonstration_tokens: Of the longest demonstration, prompt included, where a warm
        start needs it.
      latency_scale: What medians of lognormal latencies are multiplied by; a benchmark
        sets it.
      baselines: Mean rewards of training tasks, by index, for "tracked_baseline".
      artefacts: What verdicts bring along.

    Args:
      workdir: Where the run writes.
      environment: Makes the task set, in place of `config.env.factory`.
      on_line: Takes one line of news, such as that something compiles.
      owner: Whether the work directory becomes this config's, for this process alone.
      surrogate: Makes the policy term of the loss, in place of `loss.surrogate`.
      estimator: The advantage, or a function of the `LossConfig` that returns it, in
        place of `loss.advantage`.
      model: Makes the policy, in place of `config.model.factory`.
      optimizer: An optax transformation, or a function as `optim.factory` names it, in
        place of AdamW.
    """

    def __init__(
        self,
        config: Config,
        workdir: str | Path,
        environment: Factory | None = None,
        on_line: Callable[[str], None] = print,
        owner: bool = False,
        *,
        surrogate: policy_term.Factory | None = None,
        estimator: Estimator | Callable[..., Estimator] | None = None,
        model: ModelFactory | None = None,
        optimizer: state.Optimizer | state.Factory | None = None,
    ):
        self.config = config = resumed(workdir, config) if owner else config
        self.latency_scale = 1.0
        self._publisher: Publisher | None = None
        self._retries = 0
        self._compiled = False  # whether the sampler is
        self._warned: set[str] = set()
        self.workdir = Path(workdir)
        self.on_line = on_line
        self.on_line("loading the tasks")
        factory = environment or envs.load_factory(config.env.factory)
        day = first_day(workdir)
        found = run_tasks.prepared(factory, config, workdir, on_line, day)
        self.tasks, self.chat = found.tasks, found.chat
        self.demonstration_tokens = found.demonstration_tokens
        self._reference: Params = None
        self._order: tuple[int, list[int]] = (0, [])  # of the latest step asked for
        self.timeline = Timeline()
        if model is not None:
            check_family(config, "the argument model makes another policy")
        with contextlib.ExitStack() as held:  # let go where something is refused
            if owner:
                held.enter_context(locked(workdir))
                check_claim(workdir, config)
                others = found.check(workdir, config.env.accept_tasks)
                envs.reap(self.tasks)
            placement.prepare(config)  # before anything of the user's runs jax
            self.placement = placement.place(config)
            self.model = models.build(config.model, model)
            self.optimizer = state.make_optimizer(config.optim, optimizer)
            self.estimator = objective.estimator(config.loss, estimator)
            self.baselines = objective.baselines(config.loss)
            self._term = policy_term.load(config.loss, surrogate)
            self._term.check_samples(config.rollout.samples)
            self.additive = config.loss.has_additive or self._term.additive
            check_addends(config, self.additive)
            remote = self._connected()
            self.teacher = teaching.load(config, self.chat.vocabulary(), self.on_line)
            width = teaching.width(config, self.teacher)
            self._set_surrogate(width)
            source = config.model.path
            line = f"loading {source}" if source else "drawing random parameters"
            self.on_line(line)
            self._make_params = placement.initializer(
                config, self.model, self.placement.mesh
            )
            self._params = params = self._make_params()
            memory = placement.plan(
                config, self.model, self.estimator, params, self.additive
            )
            self.open_groups = memory.open_groups
            if owner:  # nothing refuses the config any more
                changes = claim(workdir, config, self.chat.vocabulary())
                for change in [*changes, *others]:
                    self.on_line(f"changed on resume: {change}")
                found.claim(workdir)
                claim_day(workdir, day)
            reference = objective.with_reference(config.loss, self._term)
            for line in placement.introduction(
                config, self.placement, params, memory, self.teacher, reference
            ):
                self.on_line(line)
            self.scoring = teaching.engine(
                config, self.teacher, width, self.placement.teacher, self.on_line
            )
            self.engine = remote or self._local(params)
            most_bytes = config.metrics.artefact_bytes
            self.artefacts = Artefacts(workdir, most_bytes, self.warn_once)
            self.clock = LearnerClock(self.timeline.add, lambda: self.pool.wake())
            self.pool = self._new_pool()
            self._held = held.pop_all()

    def _set_surrogate(self, width: int) -> None:
        config = self.config
        self.samples = Samples(config, width, self._prompt_ids)
        rollout, loss, term = config.rollout, config.loss, self._term
        temperature, slots = rollout.temperature, rollout.context_tokens
        self.surrogate = objective.policy_surrogate(
            self.model, temperature, loss, width, term
        )
        self.segments = objective.policy_segments(
            self.model, temperature, loss, slots, width, term
        )

    def _new_pool(self) -> RolloutPool:
        return RolloutPool(
            self.engine,
            self._environment,
            self.config.rollout,
            self.config.seed,
            on_span=self.timeline.add,
            make_teacher=teaching.maker(self.scoring),
            chat=self.chat,
            chat_of=lambda task: of_task(self.chat, self.tasks, task),
            deadlines_of=self.tasks.deadlines,
            folder=self.workdir / "attempts",
            keep=self.artefacts.keep,
        )

    def _connected(self) -> VLLMEngine | None:
        """The servers that sample, asked whether they can; None without any."""
        config, tokens = self.config, self.config.rollout.context_tokens
        if not config.vllm.servers:
            return None
        self._publisher = Publisher(config.vllm, config.model, tokens, self.on_line)
        publish, vocab_size = self._publisher.publish, config.model.vocab_size
        return VLLMEngine(config.vllm, tokens, vocab_size, publish, self.on_line)

    def _local(self, params: Params) -> InProcessEngine | EngineGroup:
        rollout = self.config.rollout
        return in_process.make(
            self.placement.samplers,
            self.model,
            params,
            slots=rollout.slots,
            context_tokens=rollout.context_tokens,
            steps_per_call=rollout.decode_steps_per_call,
            prefill_buckets=rollout.prefill_buckets,
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error) -> None:
        self.pool.close()
        self.clock.close()
        self._held.close()

    def initial_params(self) -> Params:
        """The first parameters on the learner's mesh, made anew by later calls."""
        params, self._params = self._params, None
        return self._make_params() if params is None else params

    def compile_sampler(self) -> None:
        """Compiles the sampler, once: later it would be on a trajectory's deadline."""
        if not self._compiled:
            if not self.config.vllm.servers:
                self.on_line("compiling the sampler")
            self.pool.compile()
            self._compiled = True

    def publish(self, params: Params, version: int) -> None:
        """Hands the learner's parameters to the sampler; between steps only."""
        with self.timeline.span("boundary", "publish"):
            self.pool.update(params, version)

    def set_reference(self, params: Params) -> None:
        """The policy that the loss compares with: a copy, where it does."""
        if objective.with_reference(self.config.loss, self._term):
            self._reference = jax.tree.map(jnp.copy, params)

    def new_stream(
        self,
        params: Params,
        version: int,
        release: str | None = None,
        rows: int = 0,
        accumulator: str | None = None,
    ) -> GradientStream | TurnStream:
        """A stream for one step of this run's loss; a `TurnStream` for release "turn".

        `release`, `rows` per call and `accumulator` are the config's unless given.
        """
        config = self.config
        compared = objective.with_reference(config.loss, self._term)
        if compared and self._reference is None:
            raise ValueError(
                f"loss.kl_coef is {config.loss.kl_coef} and the loss compares with a "
                "reference policy, expected its parameters; call warm_start, or "
                "set_reference with them"
            )
        release = release or config.release
        common = {
            "denominator": objective.denominator(config.loss),
            "partial_groups": config.partial_groups,
            "frozen": self._reference,
            "policy_version": version,
            "on_call": self.clock.on_call,
            "on_compile": lambda what: self.on_line(f"compiling {what}"),
        }
        if release == "turn":
            self._term.check_turns()
            places = config.open_trajectories
            return TurnStream(self.segments, params, open_trajectories=places, **common)
        return GradientStream(
            self.segments if config.share_prompt == "group" else self.surrogate,
            params,
            estimator=self.estimator,
            release=release,
            open_groups=self.open_groups,
            # Rolling out others instead is the step's business.
            uniform_groups="keep" if config.uniform_groups == "keep" else "drop",
            accumulator=accumulator or config.accumulator,
            rows_per_call=rows or config.mesh.rows_per_call,
            pad_last=False,  # both programs are compiled beforehand
            **common,
        )

    def server_metrics(self) -> dict[str, float]:
        """What servers did since the last call; nothing without servers."""
        if self._publisher is None:
            return {}
        before, self._retries = self._retries, self.engine.retries
        return {
            "probe_difference": self._publisher.difference,
            "retried_requests": self._retries - before,
        }

    @property
    def judged(self) -> bool:
        """Whether rewards are in the loss."""
        return self.estimator is not None

    @property
    def teacher_tokens(self) -> int:
        """Tokens that the teacher has run through its model so far."""
        return 0 if self.scoring is None else self.scoring.tokens_run

    def warn_once(self, line: str) -> None:
        """Prints a line that would otherwise be printed at every step."""
        if line[:_KIND] not in self._warned:
            self._warned.add(line[:_KIND])
            self.on_line(line)

    def train_jobs(self, step: int) -> list[Job]:
        """The rollouts of a step, counted from 1: each task `group_size` times."""
        rollout = self.config.rollout
        tasks = [self.task(step, group) for group in range(rollout.groups_per_step)]
        return run_tasks.make_jobs("train", step, tasks, rollout.group_size)

    def replacement_jobs(self, step: int, group: int) -> list[Job]:
        """The rollouts of a group, of the next number, that replaces a lost one."""
        members = range(self.config.rollout.group_size)
        return [self.spare_job(step, group, member) for member in members]

    def spare_job(self, step: int, group: int, member: int) -> Job:
        """The rollout of a member, of the next number, that replaces a failed one."""
        return Job(TrajectoryKey(step, group, member), self.task(step, group))

    def task(self, step: int, group: int) -> Any:
        """The task of a group: a function of (seed, step, group)."""
        return self.tasks.train[self._task_index(step, group)]

    def group_baseline(self, step: int, group: int) -> float:
        """What is subtracted from the rewards of a group, 0 unless it is tracked."""
        if self.config.loss.advantage != "tracked_baseline":
            return 0.0
        return self.baselines.value(str(self._task_index(step, group)))

    def track_baselines(self, trajectories: Sequence[Trajectory]) -> None:
        """Moves the baselines by shaped rewards, from which they are subtracted."""
        if self.config.loss.advantage != "tracked_baseline":
            return
        rewards: dict[str, list[float]] = {}
        for trajectory in trajectories:
            index = self._task_index(trajectory.key.step, trajectory.key.group)
            shaped = self.samples.shaped_reward(trajectory)
            rewards.setdefault(str(index), []).append(shaped)
        self.baselines.update(rewards)

    def restore_baselines(self, state: dict[str, Any]) -> None:
        """Puts the baselines back to where `baselines.state()` was taken."""
        self.baselines = objective.baselines(self.config.loss, state)

    def heldout_jobs(
        self, phase: str, step: int, questions: int, samples: int
    ) -> list[Job]:
        """Rollouts of the first held-out questions."""
        return run_tasks.make_jobs(phase, step, self.tasks.heldout[:questions], samples)

    def _prompt_ids(self, step: int, group: int) -> np.ndarray:
        task = self.task(step, group)
        prompt = conversation(self.tasks.prompt(task))
        return of_task(self.chat, self.tasks, task).prompt(prompt)

    def _task_index(self, step: int, group: int) -> int:
        """Where the task of a group is in the training tasks."""
        if self._order[0] != step:
            tasks = len(self.tasks.train)
            self._order = step, run_tasks.order(tasks, self.config, step)
        return self._order[1][group]

    def _environment(self, context: envs.Context) -> envs.Environment:
        environment = envs.make(self.tasks.environment, context)
        key = context.key
        if key.phase != "train":
            return environment
        env = self.config.env
        seed = (self.config.seed, PHASES[key.phase], key.step, key.group, key.member)
        return envs.WithLatency(
            environment,
            envs.scaled(env.tool_latency, self.latency_scale),
            envs.scaled(env.verify_latency, self.latency_scale),
            seed,
        )
