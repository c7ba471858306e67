"""One verdict of every group comes three seconds late: what may start before it does?

    python -m thundersync_jax.bench --config=configs/bench_stragglers.py:groups4

32 trajectories of one turn, all at once, from a small Qwen3 shape with random weights.
Stop ids end an action at random, after 128 tokens at the latest. Member 0 of every
group is verified 3 s after it ends. Look at `tail_secs`, from the last reward to the
update: under batch release all learner work lies there, and under group release nearly
all, since every group waits for its late member. Under trajectory release only the late
members' own gradients are left: four with 4 groups of 8 (`groups4`, the default), one
with 1 group of 32 (`group32`).
"""

from thundersync_jax.config import (
    Config,
    EnvConfig,
    EvaluationConfig,
    LatencyConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
)
from thundersync_jax.envs.letters import LettersOptions

GROUPS = {"groups4": (4, 8), "group32": (1, 32)}  # prompts, trajectories of each


def get_config(variant: str | None = None) -> Config:
    if variant not in (None, *GROUPS):
        names = " or ".join(map(repr, GROUPS))
        raise ValueError(f"variant is {variant!r}, expected {names}.")
    groups, size = GROUPS[variant or "groups4"]
    return Config(
        steps=8,
        open_groups=groups,
        model=ModelConfig(
            vocab_size=512,
            layers=4,
            width=256,
            mlp_width=768,
            heads=8,
            head_dim=32,
            qk_norm=True,
        ),
        optim=OptimConfig(learning_rate=3e-4),
        rollout=RolloutConfig(
            groups_per_step=groups,
            group_size=size,
            context_tokens=160,
            turn_tokens=128,
            turns=1,
            stop_ids=(1, 507, 508, 509, 510, 511),
            cut_actions="run",
            prefill_buckets=(32, 160),
            gradient_buckets=(64, 96, 128, 160),
        ),
        env=EnvConfig(
            factory="thundersync_jax.envs.letters:make",
            options=LettersOptions(),
            verify_latency=LatencyConfig("straggler", median_secs=3.0),
        ),
        mesh=MeshConfig(rows_per_call=4, sampler_devices=2),
        evaluation=EvaluationConfig(questions=16, every_steps=0),
    )
