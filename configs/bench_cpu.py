"""The release rules on two CPU cores: agents that mostly wait for tools and verdicts.

    python -m thundersync_jax.bench --config=configs/bench_cpu.py

48 agents, 24 at a time, share 3 prompts of 320 tokens. Each makes one or two tool calls
and answers, 4 tokens a turn; every call and every verdict takes its time, lognormal
with sigma 1.2, so every group has its stragglers. The bench scales these waits until
rollouts take as long as learning. Random weights; verdicts are 0 or 1, as verifiable
rewards mostly are, and hardly any group has but one of them. Five steps take about 5
minutes on 2 cores. Look at the three step times, at the formula beside them, and at
contention: sampler and learner share the cores.

With `--config.accumulator=exact` a fourth contestant has plain sums under trajectory
release, one trajectory a call: what exact sums cost.
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
        open_groups=3,
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
            groups_per_step=3,
            group_size=16,
            slots=24,
            decode_steps_per_call=4,
            context_tokens=384,
            turn_tokens=4,
            turns=3,
            stop_ids=(),
            cut_actions="run",
            prefill_buckets=(24, 320, 384),
            gradient_buckets=(352, 384),
            command_timeout_secs=60.0,
            trajectory_timeout_secs=120.0,
            verify_timeout_secs=60.0,
        ),
        env=EnvConfig(
            factory="thundersync_jax.envs.letters:make",
            options=LettersOptions(
                prompt_tokens=320,
                calls=(1, 2),
                observation_tokens=(16, 24),
                verdict="any",
            ),
            tool_latency=LatencyConfig("lognormal", median_secs=0.1, sigma=1.2),
            verify_latency=LatencyConfig("lognormal", median_secs=0.2, sigma=1.2),
        ),
        mesh=MeshConfig(rows_per_call=4),
        evaluation=EvaluationConfig(questions=4, every_steps=0),
    )
