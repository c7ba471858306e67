"""A tool-using agent, trained from nothing on a laptop's CPU.

    python -m thundersync_jax.train --config=configs/quickstart.py --workdir=runs/qs

A two-layer byte-level decoder answers arithmetic questions of reasoning-gym with a
calculator: it has to copy the question into a tool call and the result into its answer.
The warm start stops at about 40 % sampled held-out success; GRPO does the rest.
"""

from thundersync_jax.config import (
    CheckpointConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    LatencyConfig,
    LossConfig,
    OptimConfig,
    RolloutConfig,
    WarmStartConfig,
)
from thundersync_jax.envs.reasoning import ReasoningOptions


def get_config(variant: str | None = None) -> Config:
    return Config(
        steps=160,
        open_groups=32,
        optim=OptimConfig(learning_rate=5e-4, warmup_steps=10),
        loss=LossConfig(advantage="mean_only"),
        rollout=RolloutConfig(
            groups_per_step=32,
            group_size=8,
            slots=128,
            context_tokens=32,
            turn_tokens=12,
            turns=2,
            prefill_buckets=(12, 32),
            gradient_buckets=(24, 32),
        ),
        env=EnvConfig(
            options=ReasoningOptions(
                tasks=("chain_sum",), terms=(2, 2), digits=(2, 2), train_tasks=16_384
            ),
            tool_latency=LatencyConfig("lognormal", median_secs=0.04, sigma=1.0),
            verify_latency=LatencyConfig("lognormal", median_secs=0.03, sigma=1.0),
        ),
        warm_start=WarmStartConfig(
            steps=600,
            learning_rate=1.5e-3,
            target_success=0.43,
            check_every_steps=3,
            check_questions=240,
        ),
        evaluation=EvaluationConfig(questions=480, every_steps=20),
        checkpoint=CheckpointConfig(every_steps=20),
    )
