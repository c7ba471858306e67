"""`Config`, the settings of a run, and what its groups have to agree on.

A config file is Python with `get_config(variant: str | None = None) -> Config`; a
variant is `dataclasses.replace` on a base. Nothing here touches a device.
"""

import dataclasses
import os
from dataclasses import field

from thundersync_jax.config.checks import at_least_zero, positive, require
from thundersync_jax.config.groups import (
    Accumulator,
    ChatConfig,
    CheckpointConfig,
    EnvConfig,
    EvaluationConfig,
    MeshConfig,
    MetricsConfig,
    PartialGroups,
    Release,
    SharePrompt,
    TeacherConfig,
    UniformGroups,
    VLLMConfig,
    WarmStartConfig,
)
from thundersync_jax.config.loss import LossConfig, OptimConfig
from thundersync_jax.config.model import ModelConfig, check_sharding, check_tokens
from thundersync_jax.config.rollout import LEAST_SLOTS, RolloutConfig
from thundersync_jax.config.settings import changeable, check_types
from thundersync_jax.errors import ConfigError
from thundersync_jax.stream import refusals
from thundersync_jax.types import MOST_ADDENDS

_MOST_STEPS = 2**31
# Members of a group that an estimator needs to tell one reward from another.
_LEAST_MEMBERS = {
    "batch_mean_std": 1,
    "fixed_baseline": 1,
    "tracked_baseline": 1,
    "leave_one_out_std": 3,
    "none": 1,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """A run."""

    seed: int = 0  # of tasks, initial parameters, sampling and latencies
    steps: int = changeable(100)  # optimizer updates
    release: Release = "trajectory"  # when the gradient of a trajectory may start
    share_prompt: SharePrompt = "no"  # group: the prompt of a group runs once
    open_trajectories: int = 8  # of release turn: those with sums and states at a time
    accumulator: Accumulator = "plain"  # float32 sums; exact: bits know no order
    open_groups: int | None = 4  # groups with sums at a time; none: as many as fit
    group_sum_bytes: int | None = None  # per device, for those sums; none: device says
    partial_groups: PartialGroups = "drop"  # what a group with failed members does
    uniform_groups: UniformGroups = "keep"  # what one does whose rewards are all equal
    closing_comparison: bool = changeable(False)  # one more step under every rule
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def __post_init__(self):
        check_types(self, "")
        at_least_zero(self, "", ["seed", "open_groups"])
        positive(self, "", ["steps", "open_trajectories", "group_sum_bytes"])
        require(
            self.steps < _MOST_STEPS,
            f"steps is {self.steps}",
            f"less than {_MOST_STEPS}: random numbers derive from 32 bits of a step",
            "Set steps to what the run may take.",
        )
        _check(self)

    @property
    def releases(self) -> tuple[Release, ...]:
        """The release rules that make a difference for this loss."""
        if self.loss.advantage != "none":
            return "batch", "group", "trajectory"
        if self.accumulator == "exact" or self.rollout.samples > 1:
            return "batch", "trajectory"
        return "batch", "trajectory", "turn"

    @property
    def most_replacements(self) -> int:
        """How many groups a step may roll out in place of lost ones."""
        if self.uniform_groups != "replace":
            return 0
        return self.rollout.replacement_groups or self.rollout.groups_per_step


def _check(config: Config) -> None:
    """Raises a ConfigError where settings contradict each other or have no effect."""
    if config.model.factory is not None:
        check_family(config, f"model.factory is {config.model.factory!r}")
    _check_folders(config)
    _check_samplers(config)
    _check_stream(config)
    _check_groups(config)
    _check_teacher(config)
    _check_turns(config)
    _check_prompts(config)
    check_addends(config, config.loss.has_additive)
    check_tokens(config.model, config.chat, config.rollout, config.warm_start)
    check_sharding(config.model, config.mesh, config.rollout)


def check_family(config: Config, cause: str) -> None:
    """Refuses settings of the decoder where, for this cause, another model is made."""
    for name, value in (
        ("model.path", config.model.path),
        ("vllm.servers", config.vllm.servers),
    ):
        require(
            not value,
            f"{name} is {value!r} and {cause}",
            "the decoder, the one family that such folders and servers hold",
            f"Leave {name} out, or train the decoder.",
        )


def _check_folders(config: Config) -> None:
    source, target = config.model.path, config.vllm.weights_dir
    places = {os.path.realpath(os.path.expanduser(p)) for p in (source, target) if p}
    require(
        not (source and target) or len(places) == 2,
        f"vllm.weights_dir is {target!r}, which is model.path",
        "another folder: new weights are written there",
        "Copy the model there with thundersync_jax.export --initial.",
    )


def _check_stream(config: Config) -> None:
    """What streams refuse as well, in their words."""
    try:
        rewards = config.loss.advantage != "none"
        refusals.check_uniform(config.uniform_groups, rewards)
        if config.release == "trajectory" and config.open_groups is not None:
            refusals.check_open_groups(config.open_groups)
        if config.accumulator == "exact":
            shared = config.share_prompt == "group"
            dtype, replicas = config.model.dtype, config.mesh.replica
            refusals.check_exact(dtype, replicas, shared)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_groups(config: Config) -> None:
    loss, size = config.loss, config.rollout.group_size
    own = ":" in loss.advantage  # its members are the user's business
    least = 1 if own else _LEAST_MEMBERS.get(loss.advantage, 2)
    require(
        size >= least,
        f"rollout.group_size is {size} with loss.advantage {loss.advantage!r}",
        f"at least {least}: with fewer members every advantage is 0",
        "Set rollout.group_size to 8 or the like.",
    )
    require(
        loss.advantage != "pass_at_k" or 2 <= loss.pass_k <= size,
        f"loss.pass_k is {loss.pass_k} with rollout.group_size {size}",
        "at least 2 attempts and no more than a group has",
        "Set loss.pass_k to 2, or loss.advantage to 'leave_one_out' for the best of 1.",
    )
    require(
        config.uniform_groups == "keep" or size > 1,
        f"uniform_groups is {config.uniform_groups!r} with rollout.group_size {size}",
        "'keep': the reward of a group of one is always equal to itself",
        "Set uniform_groups to 'keep' or raise rollout.group_size.",
    )
    most = config.rollout.most_action_tokens
    require(
        loss.length_free_tokens < most,
        f"loss.length_free_tokens is {loss.length_free_tokens} with at most {most} "
        "sampled tokens (rollout.turns times rollout.turn_tokens)",
        "fewer, or loss.length_penalty would never be taken off",
        f"Lower loss.length_free_tokens to {most // 2} or the like.",
    )
    replacements = config.rollout.replacement_groups
    require(
        config.uniform_groups == "replace" or replacements is None,
        f"rollout.replacement_groups is {replacements} with uniform_groups "
        f"{config.uniform_groups!r}",
        "none: only 'replace' uses it",
        "Set rollout.replacement_groups to none or uniform_groups to 'replace'.",
    )


def _check_teacher(config: Config) -> None:
    loss, teacher = config.loss, config.teacher
    require(
        loss.distill == "none" or teacher.given,
        f"loss.distill is {loss.distill!r} with teacher.workdir none",
        "the work directory of a run whose policy teaches, or servers that do",
        "Set teacher.workdir or teacher.servers.",
    )
    name = "servers" if teacher.servers else "workdir"
    require(
        loss.distill != "none" or not teacher.given,
        f"teacher.{name} is {getattr(teacher, name)!r} with loss.distill 'none'",
        "none: nobody asks the teacher",
        f"Set loss.distill to 'sampled_reverse_kl' or leave teacher.{name} out.",
    )
    _check_remote_teacher(config)
    require(
        config.release != "group" or loss.advantage != "none",
        "release is 'group' with loss.advantage 'none'",
        "'batch', 'trajectory' or 'turn': without rewards nobody waits for a group",
        "Set release to 'trajectory'.",
    )
    require(
        config.release != "turn" or loss.truncated != "mask",
        "loss.truncated is 'mask' with release 'turn'",
        "'trajectory' or 'batch': how it ends is not known while a trajectory goes on",
        "Set release to 'trajectory' or loss.truncated to 'keep'.",
    )
    require(
        config.release != "turn" or config.rollout.samples == 1,
        f"rollout.samples is {config.rollout.samples} with release 'turn'",
        "1: what later turns read of earlier ones is passed back along one history",
        "Set release to 'trajectory' or rollout.samples to 1.",
    )


def _check_remote_teacher(config: Config) -> None:
    loss, temperature = config.loss, config.rollout.temperature
    if not config.teacher.servers:
        return
    samplers = {server.rstrip("/") for server in config.vllm.servers}
    shared = samplers & {server.rstrip("/") for server in config.teacher.servers}
    require(
        not shared,
        f"vllm.servers and teacher.servers both have {min(shared, default='')!r}",
        "others: a server that samples gets the student's weights",
        "Start a server of its own for the teacher.",
    )
    require(
        temperature == 1,
        f"rollout.temperature is {temperature} with teacher.servers",
        "1: servers give log-probabilities of a prompt before any temperature, and "
        "student and teacher must be compared at the same one",
        "Set rollout.temperature to 1, or let a run teach: teacher.workdir.",
    )
    require(
        loss.teacher_kind != "full",
        f"loss.distill is {loss.distill!r} with loss.distill_top_k none and "
        "teacher.servers",
        "a number of likeliest ids: servers do not send whole distributions",
        "Set loss.distill_top_k to 16 or the like.",
    )


def _check_samplers(config: Config) -> None:
    devices, slots = config.mesh.sampler_devices, config.rollout.slots
    require(
        devices == 1 or (slots % devices == 0 and slots // devices >= LEAST_SLOTS),
        f"mesh.sampler_devices is {devices} with rollout.slots {slots}",
        f"a divisor of the slots that leaves each at least {LEAST_SLOTS}",
        f"Set rollout.slots to {devices * max(LEAST_SLOTS, slots // devices)}.",
    )
    temperature = config.rollout.temperature
    require(
        not config.vllm.servers or 0.01 <= temperature <= 2,
        f"rollout.temperature is {temperature} with vllm.servers",
        "0.01 to 2: vLLM refuses higher ones and raises lower ones",
        "Change it, or sample in this process (vllm.servers left out).",
    )


def _check_turns(config: Config) -> None:
    rewarded = config.loss.advantage != "none"  # otherwise comparisons have it
    if config.release != "turn":
        require(
            config.open_trajectories == 8 or not rewarded,
            f"open_trajectories is {config.open_trajectories} with loss.advantage "
            f"{config.loss.advantage!r}",
            "8, its default: only release 'turn' uses it, which takes no rewards",
            "Leave open_trajectories out.",
        )
        return
    require(
        not rewarded,
        f"release is 'turn' with loss.advantage {config.loss.advantage!r}",
        "'none': what a reward multiplies would need a second sum per trajectory",
        "Set loss.advantage to 'none' or release to 'trajectory'.",
    )
    require(
        config.accumulator == "plain",
        "release is 'turn' with accumulator 'exact'",
        "'plain': the programs of turns are others, and so are their bits",
        "Set accumulator to 'plain' or release to 'trajectory'.",
    )


def _check_prompts(config: Config) -> None:
    shared, loss = config.share_prompt == "group", config.loss
    require(
        not shared or config.rollout.group_size > 1,
        "share_prompt is 'group' with rollout.group_size 1",
        "'no': nobody is there to share it with",
        "Set share_prompt to 'no' or raise rollout.group_size.",
    )
    require(
        not config.rollout.segment_buckets or shared or loss.advantage == "none",
        f"rollout.segment_buckets is {config.rollout.segment_buckets} with "
        f"share_prompt {config.share_prompt!r} and loss.advantage {loss.advantage!r}",
        "(): nothing is computed in pieces",
        "Leave it out, or set share_prompt to 'group'.",
    )


def check_addends(config: Config, additive: bool) -> None:
    """Refuses more addends of an exact sum than it holds; `additive` doubles them."""
    if config.accumulator != "exact":
        return
    rollout = config.rollout
    # A lost group is replaced by one other: a step sums no more than it asked for.
    addends = rollout.groups_per_step * rollout.group_size * rollout.samples
    kind = "trajectories" if rollout.samples == 1 else "samples"
    twice = " twice, for the loss has a part without advantage" if additive else ""
    require(
        addends * (1 + additive) <= MOST_ADDENDS,
        f"accumulator is 'exact' with {addends} {kind} per step{twice}",
        f"at most {MOST_ADDENDS} addends, which is what 32-bit integers hold",
        "Lower rollout.groups_per_step, or set accumulator to 'plain'.",
    )
