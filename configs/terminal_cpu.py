"""An agent in a terminal, trained from nothing in real sandboxes on a laptop's CPU.

    python -m thundersync_jax.train --config=configs/terminal_cpu.py --workdir=runs/term

A byte-level decoder learns to read, write, copy and fix files with bash. Every attempt
has a sandbox of its own (bubblewrap: no network, nothing of the host but its programs)
and is graded in a fresh one, where the agent never was. It takes the quickstart's
model; `smoke` is two steps of it.
"""

import dataclasses

from thundersync_jax.config import (
    CheckpointConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    WarmStartConfig,
)
from thundersync_jax.envs.shell_tasks import ShellOptions


def get_config(variant: str | None = None) -> Config:
    if variant not in (None, "smoke"):
        raise ValueError(f"variant is {variant!r}, expected 'smoke' or none.")
    config = Config(
        steps=50,
        model=ModelConfig(width=128, mlp_width=384, heads=8, kv_heads=8),
        optim=OptimConfig(learning_rate=5e-4, warmup_steps=5, clip_norm=0.5),
        loss=LossConfig(advantage="mean_only"),
        rollout=RolloutConfig(
            groups_per_step=8,
            group_size=8,
            slots=64,
            environments=16,
            context_tokens=112,
            turn_tokens=24,
            turns=3,
            prefill_buckets=(32, 112),
            gradient_buckets=(112,),
        ),
        env=EnvConfig(
            factory="thundersync_jax.envs.shell_tasks:make", options=ShellOptions()
        ),
        warm_start=WarmStartConfig(
            steps=600,
            learning_rate=1.5e-3,
            target_success=0.4,
            check_every_steps=10,
            check_questions=48,
        ),
        evaluation=EvaluationConfig(questions=128, every_steps=0),
        checkpoint=CheckpointConfig(every_steps=25),
    )
    if variant is None:
        return config
    few = dataclasses.replace(config.warm_start, steps=2, check_questions=4)
    return dataclasses.replace(
        config,
        steps=2,
        rollout=dataclasses.replace(config.rollout, groups_per_step=2, group_size=4),
        warm_start=few,
        evaluation=EvaluationConfig(questions=4, every_steps=0),
    )
