"""The release rules on one GPU: a model of half a billion parameters, long agents.

    launch/bench_gpu.sh

The shape of Qwen2.5-0.5B with random weights, bfloat16 activations, 6 prompts x 8
agents that read up to 8,192 tokens in 3 to 5 tool answers and write 32 at a time;
sampler and learner share the GPU. About 5e13 flops per gradient, and 26 GB of gradient
sums for 6 open groups: a card of 80 GB holds it. Meant to take five minutes without the
installation. It has not been run on a GPU yet; the variant `smoke` is the same at a
hundredth of the lengths and with a small model, for a CPU.
"""

import dataclasses

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
    waits = LatencyConfig("lognormal", median_secs=1.0, sigma=1.2)
    config = Config(
        steps=3,
        open_groups=6,
        model=ModelConfig(
            vocab_size=151_936,
            layers=24,
            width=896,
            mlp_width=4864,
            heads=14,
            kv_heads=2,
            head_dim=64,
            rope_theta=1e6,
            attention_bias=True,
            dtype="bfloat16",
        ),
        optim=OptimConfig(learning_rate=1e-5),
        rollout=RolloutConfig(
            groups_per_step=6,
            group_size=8,
            slots=48,
            decode_steps_per_call=16,
            context_tokens=8192,
            turn_tokens=32,
            turns=6,
            stop_ids=(),
            cut_actions="run",
            prefill_buckets=(1024, 2048, 8192),
            gradient_buckets=(4096, 6144, 8192),
            command_timeout_secs=120.0,
            trajectory_timeout_secs=240.0,
            verify_timeout_secs=120.0,
        ),
        env=EnvConfig(
            factory="thundersync_jax.envs.letters:make",
            options=LettersOptions(
                prompt_tokens=1024, calls=(3, 5), observation_tokens=(800, 1380)
            ),
            tool_latency=waits,
            verify_latency=waits,
        ),
        mesh=MeshConfig(sampler="shared", rows_per_call=1),
        evaluation=EvaluationConfig(questions=4, every_steps=0),
    )
    if variant is None:
        return config
    if variant != "smoke":
        raise ValueError(f"variant is {variant!r}, expected 'smoke' or none.")
    model = ModelConfig(attention_bias=True, kv_heads=2, dtype="bfloat16")
    rollout = dataclasses.replace(
        config.rollout,
        decode_steps_per_call=4,
        context_tokens=96,
        turn_tokens=4,
        prefill_buckets=(16, 96),
        gradient_buckets=(64, 96),
    )
    options = LettersOptions(prompt_tokens=12, calls=(3, 5), observation_tokens=(8, 10))
    waits = dataclasses.replace(waits, median_secs=0.1)
    env = dataclasses.replace(
        config.env, options=options, tool_latency=waits, verify_latency=waits
    )
    return dataclasses.replace(config, model=model, rollout=rollout, env=env)
