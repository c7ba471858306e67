"""The release rules on two CPU cores: tool-using agents that mostly wait.

python -m thundersync_jax.bench --config=configs/bench_cpu.py
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


def get_config(variant: str | None = None) -> Config:
    return Config(
        steps=5,
        open_groups=4,
        model=ModelConfig(
            layers=4,
            width=256,
            mlp_width=768,
            heads=8,
            kv_heads=2,
            head_dim=32,
        ),
        optim=OptimConfig(learning_rate=3e-4),
        rollout=RolloutConfig(
            groups_per_step=4,
            group_size=16,
            slots=24,
            decode_steps_per_call=4,
            context_tokens=224,
            turn_tokens=4,
            turns=3,
            stop_ids=(),
            cut_actions="run",
            prefill_buckets=(32, 48, 128, 224),
            gradient_buckets=(176, 224),
        ),
        env=EnvConfig(
            factory="thundersync_jax.envs.letters:make",
            options=LettersOptions(
                prompt_tokens=128, calls=(1, 2), observation_tokens=(24, 40)
            ),
            tool_latency=LatencyConfig("lognormal", median_secs=0.06, sigma=1.2),
            verify_latency=LatencyConfig("lognormal", median_secs=0.12, sigma=1.2),
        ),
        mesh=MeshConfig(rows_per_call=4),
        evaluation=EvaluationConfig(questions=4, every_steps=0),
    )
