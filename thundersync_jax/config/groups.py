"""The settings of environments, engines, meshes and of a run's rhythm."""

import dataclasses
import re
from typing import Any, Literal

from thundersync_jax.config import dotted
from thundersync_jax.config.checks import (
    at_least_zero,
    check_servers,
    effective,
    positive,
    require,
    share,
)
from thundersync_jax.config.settings import (
    changeable,
    check_types,
    is_frozen_dataclass,
)
from thundersync_jax.stream import refusals, schedule

# What streams choose from, and what a run offers beyond it.
Release = Literal[schedule.Release, "turn"]
Accumulator = refusals.Accumulator
PartialGroups = refusals.PartialGroups
UniformGroups = Literal[refusals.UniformGroups, "replace"]
LatencyKind = Literal["none", "constant", "lognormal", "straggler"]
Sampler = Literal["own_device", "shared"]
TeacherDevice = Literal["own_device", "sampler"]
SharePrompt = Literal["no", "group"]
ChatFormat = Literal["auto", "bytes", "template"]
Thinking = Literal["default", "on", "off"]
PublishedDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class LatencyConfig:
    """Time added to a call. `EnvConfig` checks it, since it knows the full name."""

    kind: LatencyKind = "none"  # none: nobody waits; straggler: member 0 alone
    median_secs: float = 0.0  # that constant, or the median of the lognormal
    sigma: float = 0.0  # of the lognormal: standard deviation of the logarithm


@dataclasses.dataclass(frozen=True)
class EnvConfig:
    """Which tasks, and how long their tools and verifiers take."""

    factory: str = "thundersync_jax.envs.reasoning:make"  # module:function of the tasks
    options: Any = None  # a frozen dataclass that the factory reads; none: its own
    tool_latency: LatencyConfig = LatencyConfig()  # added to every tool call
    verify_latency: LatencyConfig = LatencyConfig()  # added to every verification
    accept_tasks: str | None = changeable(None)  # sha256 of others to resume with; any

    def __post_init__(self):
        check_types(self, "env.")
        dotted.check("env.factory", self.factory)
        if self.options is not None:
            require(
                is_frozen_dataclass(self.options),
                f"env.options is {self.options!r}",
                "an instance of a frozen dataclass, or none",
                "Declare its class with @dataclasses.dataclass(frozen=True).",
            )
            check_types(self.options, "env.options.")
        accepted = self.accept_tasks
        require(
            accepted in (None, "any") or re.fullmatch("[0-9a-f]{6,64}", accepted),
            f"env.accept_tasks is {accepted!r}",
            "6 to 64 digits that a sha256 begins with, as the refusal has them, or any",
            "Set env.accept_tasks to none.",
        )
        for name in ("tool_latency", "verify_latency"):
            _check_latency(f"env.{name}.", getattr(self, name))


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Where the learner and the sampler run."""

    replica: int = 1  # learner copies that work on their own trajectories
    fsdp: int = 1  # devices of a replica that share parameters and tokens
    tensor: int = 1  # devices of a replica that share heads and hidden units
    sampler: Sampler = "own_device"  # the sampler's device: its own, or the learner's
    sampler_devices: int = 1  # of its own, which share the slots; servers need none
    rows_per_call: int = 8  # trajectories of a call: final or of equal reward; exact: 1

    def __post_init__(self):
        check_types(self, "mesh.")
        positive(self, "mesh.", ["replica", "fsdp", "tensor", "rows_per_call"])
        positive(self, "mesh.", ["sampler_devices"])
        require(
            self.sampler == "own_device" or self.sampler_devices == 1,
            f"mesh.sampler_devices is {self.sampler_devices} with mesh.sampler "
            f"{self.sampler!r}",
            "1: a shared sampler has the learner's first device",
            "Set mesh.sampler to 'own_device' or mesh.sampler_devices to 1.",
        )


@dataclasses.dataclass(frozen=True)
class ChatConfig:
    """How text becomes token ids, and ids become actions."""

    format: ChatFormat = "auto"  # auto: the model folder's template if it has one
    system: str | None = None  # first message; none: the task set's, if it has one
    thinking: Thinking = "default"  # of templates that know the switch
    drop_thoughts: bool = False  # out of earlier turns, where the template does it
    arguments: tuple[str, ...] = ()  # others of the template's, as name=value in JSON

    def __post_init__(self):
        check_types(self, "chat.")
        names = [argument.partition("=")[0] for argument in self.arguments]
        require(
            all("=" in a for a in self.arguments) and len(set(names)) == len(names),
            f"chat.arguments is {self.arguments}",
            "name=value, every name once",
            "Write keep_thoughts=true, or date_string='1 May 2026'.",
        )


@dataclasses.dataclass(frozen=True)
class VLLMConfig:
    """Servers that sample in place of the in-process engine."""

    servers: tuple[str, ...] = changeable(())  # as http://localhost:8000; (): none
    weights_dir: str | None = changeable(None)  # the folder that they serve, and reload
    dtype: PublishedDtype = "float32"  # of the weights there: the servers' --dtype
    request_timeout_secs: float = changeable(60.0)  # deadline of one try of a turn
    attempts: int = changeable(2)  # tries of a turn, on another server where there is
    publish_timeout_secs: float = changeable(300.0)  # deadline of one server's reload
    probe_tolerance: float | None = None  # nats; none: 1e-4 of float32, 0.3 of bfloat16

    def __post_init__(self):
        check_types(self, "vllm.")
        positive(self, "vllm.", ["request_timeout_secs", "attempts"])
        positive(self, "vllm.", ["publish_timeout_secs", "probe_tolerance"])
        names = [field.name for field in dataclasses.fields(self)][1:]
        effective(self, "vllm.", names, "servers")
        check_servers("vllm.servers", self.servers)
        require(
            not self.servers or self.weights_dir is not None,
            f"vllm.servers is {self.servers} with vllm.weights_dir none",
            "the folder that the servers serve: new weights are written there",
            "Set vllm.weights_dir.",
        )


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
    """Which policy `loss.distill` pulls towards, and where it scores."""

    workdir: str | None = None  # of the run whose newest policy it is
    config: str | None = None  # FILE.py[:variant] that makes such a run where none is
    device: TeacherDevice = "own_device"  # its own, or the sampler's
    buckets: tuple[int, ...] = ()  # padded lengths of a turn; (): rollout's prefill's
    servers: tuple[str, ...] = ()  # vLLM servers that score; (): in this process
    path: str | None = None  # the folder that they serve; none: as they say
    request_timeout_secs: float = changeable(60.0)  # of one try of scoring a turn

    def __post_init__(self):
        check_types(self, "teacher.")
        effective(self, "teacher.", ["config", "device", "buckets"], "workdir")
        effective(self, "teacher.", ["path", "request_timeout_secs"], "servers")
        positive(self, "teacher.", ["request_timeout_secs"])
        check_servers("teacher.servers", self.servers)
        require(
            not (self.servers and self.workdir),
            f"teacher.workdir is {self.workdir!r} with teacher.servers {self.servers}",
            "one teacher: a run's policy, or what servers serve",
            "Set teacher.workdir to none or leave teacher.servers out.",
        )

    @property
    def given(self) -> bool:
        """Whether there is a teacher."""
        return self.workdir is not None or bool(self.servers)


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised steps on demonstrations that give RL its first signal."""

    steps: int = 0  # most supervised steps; 0: no warm start
    batch_size: int = 64  # demonstrations per supervised step
    learning_rate: float = 3e-3  # of the supervised steps
    target_success: float = 0.4  # stop at this sampled held-out success
    check_every_steps: int = 25  # supervised steps between two measurements
    check_questions: int = 128  # held-out questions per measurement

    def __post_init__(self):
        check_types(self, "warm_start.")
        at_least_zero(self, "warm_start.", ["steps"])
        sizes = ["batch_size", "learning_rate", "check_every_steps", "check_questions"]
        positive(self, "warm_start.", sizes)
        share(self, "warm_start.", ["target_success"])


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation, sampled at the training temperature."""

    questions: int = 200  # held-out questions
    every_steps: int = changeable(20)  # between two evaluations; 0: first and last only
    samples: int = 1  # answers per question

    def __post_init__(self):
        check_types(self, "evaluation.")
        positive(self, "evaluation.", ["questions", "samples"])
        at_least_zero(self, "evaluation.", ["every_steps"])


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When the state of the run is saved."""

    every_steps: int = changeable(10)  # between two checkpoints; the last is saved
    keep: int = changeable(2)  # newest checkpoints kept

    def __post_init__(self):
        check_types(self, "checkpoint.")
        positive(self, "checkpoint.", ["every_steps", "keep"])


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """What is kept of a step, and who is told its metrics beside metrics.jsonl."""

    sinks: tuple[str, ...] = changeable(("tensorboard",))  # wandb; module:function
    rollouts: Literal["text", "gzip", "off"] = changeable("text")  # as files; off
    rollout_bytes: int | None = changeable(None)  # of all such files; the oldest go
    artefact_bytes: int = changeable(100_000_000)  # of a step's artefacts, compressed

    def __post_init__(self):
        check_types(self, "metrics.")
        at_least_zero(self, "metrics.", ["artefact_bytes"])
        positive(self, "metrics.", ["rollout_bytes"])
        for name in self.sinks:
            if name not in ("tensorboard", "wandb"):
                dotted.check("metrics.sinks", name)
        require(
            len(set(self.sinks)) == len(self.sinks),
            f"metrics.sinks is {self.sinks}",
            "every sink once",
            "Correct metrics.sinks.",
        )


def _check_latency(prefix: str, latency: LatencyConfig) -> None:
    check_types(latency, prefix)
    at_least_zero(latency, prefix, ["median_secs", "sigma"])
    if latency.kind != "none":
        way_out = f"Turn it off with {prefix}kind='none'."
        positive(latency, prefix, ["median_secs"], way_out)
