"""A tool-using agent, trained from nothing on a laptop's CPU.

    python -m thundersync_jax.train --config=configs/quickstart.py --workdir=runs/qs

A two-layer byte-level decoder answers arithmetic questions of reasoning-gym with a
calculator: it has to copy the numbers of a sentence into a tool call and the result
into its answer. The warm start stops at about 40 % sampled held-out success; GRPO does
the rest. Tools and verdicts take tens of milliseconds, some of them a second: drawn,
not real, with the long tail of real ones.

The variant `compact` is smaller: a question is a bare expression, and hardly any of a
step is learning. The checksums that README and docs name are its own.
"""

import dataclasses

from thundersync_jax.config import (
    CheckpointConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    LatencyConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    WarmStartConfig,
)
from thundersync_jax.envs.reasoning import ReasoningOptions

VARIANTS = ("compact",)


def get_config(variant: str | None = None) -> Config:
    compact = Config(
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
    if variant == "compact":
        return compact
    rollout = dataclasses.replace(
        compact.rollout,
        groups_per_step=10,
        group_size=16,
        context_tokens=96,
        prefill_buckets=(12, 72, 96),
        gradient_buckets=(96,),
    )
    options = dataclasses.replace(compact.env.options, prompt="question")
    return dataclasses.replace(
        compact,
        steps=110,
        model=ModelConfig(width=128, mlp_width=384, heads=8, kv_heads=8),
        optim=OptimConfig(
            learning_rate=3e-4,
            warmup_steps=10,
            clip_norm=0.5,
            schedule="cosine",
            decay_steps=110,
            floor=0.1,
        ),
        rollout=rollout,
        env=EnvConfig(
            options=options,
            tool_latency=LatencyConfig("lognormal", median_secs=0.04, sigma=1.0),
            verify_latency=LatencyConfig("lognormal", median_secs=0.03, sigma=1.0),
        ),
    )
