"""Distillation on two CPU cores: is a gradient per turn worth running turns twice?

    python -m thundersync_jax.bench --config=configs/bench_opd.py:turns4

24 agents at a time, of about 256 tokens each: a prompt of 48, then 2, 4 or 8
actions of 8 tokens (`turns2`, `turns4`, `turns8`) with tool answers between them that
fill the rest. Every tool call takes its time, lognormal with sigma 1; the bench scales
these waits until rollouts take as long as learning. Student and teacher are of one size
and have random weights: nothing is to be learned here. The teacher is made once, in a
few seconds, in runs/bench_opd_teacher.

Look at `learner_secs`: replay runs every turn but the last again, and pieces this small
use two cores badly. With nothing else running the work of turns is 1.4 (2 turns), 2.5
(4) and 3.7 (8) times that of whole trajectories. Turns are computed while tools run,
replay is not: `tail_secs` is no shorter than under trajectory release. Look at
`peak_bytes`: every open trajectory holds a gradient-sized sum. Turn release pays where
the learner idles beside long tools: try rollouts of several times the learner's work,

    --config.env.tool_latency.kind=constant --config.env.tool_latency.median_secs=3

The teacher runs every token once, whatever the rule.
"""

import dataclasses

from thundersync_jax.config import (
    Config,
    EnvConfig,
    EvaluationConfig,
    LatencyConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    TeacherConfig,
)
from thundersync_jax.envs.letters import LettersOptions

PROMPT, ACTION, CONTEXT = 48, 8, 256  # tokens
TURNS = {"turns2": 2, "turns4": 4, "turns8": 8}
VARIANTS = (*TURNS, "teacher")


def get_config(variant: str | None = None) -> Config:
    if variant not in (None, *VARIANTS):
        names = " or ".join(map(repr, VARIANTS))
        raise ValueError(f"variant is {variant!r}, expected {names}.")
    student = _student(TURNS.get(variant, 4))
    if variant != "teacher":
        return student
    return dataclasses.replace(
        student,
        steps=1,
        seed=1000,
        optim=OptimConfig(learning_rate=0.0),
        loss=LossConfig(advantage="mean_only"),
        rollout=dataclasses.replace(
            student.rollout, groups_per_step=1, group_size=4, segment_buckets=()
        ),
        env=dataclasses.replace(student.env, tool_latency=LatencyConfig()),
        open_trajectories=8,
        teacher=TeacherConfig(),
    )


def _student(turns: int) -> Config:
    answer = (CONTEXT - PROMPT - turns * ACTION) // (turns - 1)
    return Config(
        steps=5,
        partial_groups="keep",
        open_trajectories=24,
        model=ModelConfig(
            layers=4,
            width=256,
            mlp_width=768,
            heads=8,
            kv_heads=2,
            head_dim=32,
        ),
        optim=OptimConfig(learning_rate=3e-4),
        loss=LossConfig(advantage="none", distill="sampled_reverse_kl"),
        rollout=RolloutConfig(
            groups_per_step=6,
            group_size=4,
            slots=24,
            context_tokens=CONTEXT,
            turn_tokens=ACTION,
            turns=turns,
            stop_ids=(),
            cut_actions="run",
            prefill_buckets=(answer + ACTION, CONTEXT),
            gradient_buckets=(CONTEXT,),
            segment_buckets=(*sorted({PROMPT + ACTION, answer + ACTION}), CONTEXT),
            command_timeout_secs=60.0,
            trajectory_timeout_secs=120.0,
        ),
        env=EnvConfig(
            factory="thundersync_jax.envs.letters:make",
            options=LettersOptions(
                prompt_tokens=PROMPT,
                calls=(turns - 1, turns - 1),
                observation_tokens=(answer, answer),
            ),
            tool_latency=LatencyConfig("lognormal", median_secs=0.3, sigma=1.0),
        ),
        mesh=MeshConfig(rows_per_call=4),
        teacher=TeacherConfig(
            workdir="runs/bench_opd_teacher", config="configs/bench_opd.py:teacher"
        ),
        evaluation=EvaluationConfig(questions=4, every_steps=0),
    )
