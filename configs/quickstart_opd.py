"""On-policy distillation: a student learns from a teacher's log-probabilities alone.

    python -m thundersync_jax.train --config=configs/quickstart_opd.py --workdir=DIR

The tasks of quickstart.py:compact, and the student of its size after a warm start. The
student acts, the teacher scores every token of it while the tool call behind it runs,
and the reverse KL between them is all there is in the loss: rewards are measured, not
used. The teacher is four times as large, with a longer warm start; the first run makes
it, once:

    python -m thundersync_jax.train --config=configs/quickstart_opd.py:teacher \
        --workdir=runs/opd_teacher
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
    TeacherConfig,
    WarmStartConfig,
)
from thundersync_jax.envs.reasoning import ReasoningOptions

VARIANTS = ("teacher",)


def get_config(variant: str | None = None) -> Config:
    student = Config(
        steps=120,
        partial_groups="keep",
        open_trajectories=64,
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=5),
        loss=LossConfig(advantage="none", distill="sampled_reverse_kl"),
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
        teacher=TeacherConfig(
            workdir="runs/opd_teacher", config="configs/quickstart_opd.py:teacher"
        ),
        warm_start=WarmStartConfig(
            steps=1000,
            learning_rate=1.5e-3,
            target_success=0.43,
            check_every_steps=3,
            check_questions=240,
        ),
        evaluation=EvaluationConfig(questions=480, every_steps=20),
        checkpoint=CheckpointConfig(every_steps=20),
    )
    if variant is None:
        return student
    return dataclasses.replace(
        student,
        steps=1,
        seed=1000,
        open_trajectories=8,
        optim=OptimConfig(learning_rate=0.0),
        loss=LossConfig(advantage="mean_only"),
        model=ModelConfig(width=128, mlp_width=384, heads=8, kv_heads=8),
        teacher=TeacherConfig(),
        warm_start=dataclasses.replace(
            student.warm_start, target_success=0.98, check_every_steps=25
        ),
    )
