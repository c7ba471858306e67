"""The settings of a run: nested frozen dataclasses, checked as they are built."""

# ruff: noqa: F401
from thundersync_jax.config.groups import (
    Accumulator,
    ChatConfig,
    ChatFormat,
    CheckpointConfig,
    EnvConfig,
    EvaluationConfig,
    LatencyConfig,
    LatencyKind,
    MeshConfig,
    MetricsConfig,
    PartialGroups,
    PublishedDtype,
    Release,
    Sampler,
    SharePrompt,
    TeacherConfig,
    TeacherDevice,
    Thinking,
    UniformGroups,
    VLLMConfig,
    WarmStartConfig,
)
from thundersync_jax.config.loss import LossConfig, OptimConfig
from thundersync_jax.config.model import ModelConfig
from thundersync_jax.config.model_folder import RopeScaling
from thundersync_jax.config.rollout import MOST_STOP_IDS, CutActions, RolloutConfig
from thundersync_jax.config.run import Config
