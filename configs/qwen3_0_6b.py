"""Qwen3-0.6B on arithmetic of reasoning-gym with a calculator, in its own chat format.

    python -m thundersync_jax.train --config=configs/qwen3_0_6b.py:DIR --workdir=runs/q

DIR is the model's Hugging Face folder (config.json, tokenizer.json, safetensors). Sums,
products and greatest common divisors in equal shares are asked in sentences; the model
may call the calculator in Qwen's <tool_call> format and answers with the number.
Thinking is off: the template closes it before the model acts, so turns are short.

Hardware: one GPU of 80 GB that learner and sampler share. 596,049,920 parameters; in
GB: float32 parameters 2.4, Adam's moments 4.8, gradient sums of the batch and 4 open
groups 21.5, one gradient 2.4, keys and values of 64 slots 7.5, and the activations of
1,024 tokens. With `--config.mesh.fsdp=4` each of four devices holds a quarter of the
first four. Not run on a GPU yet. What was run, on a CPU in float32 for two steps, is
the same config with a tiny random model of the family and a template in its manner
(tests/test_qwen3_config.py).

Without DIR it is the shape alone, random and over bytes: to look at, or to complete by
`--config.model.path=DIR`, where thinking is as the template has it.
"""

from thundersync_jax.config import (
    ChatConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    LossConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
)
from thundersync_jax.envs.reasoning import ReasoningOptions

SHAPE = {
    "vocab_size": 151_936,
    "layers": 28,
    "width": 1024,
    "mlp_width": 3072,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "qk_norm": True,
}


def get_config(variant: str | None = None) -> Config:
    return Config(
        steps=200,
        open_groups=4,
        model=ModelConfig(path=variant, dtype="bfloat16", **SHAPE),
        chat=ChatConfig(thinking="default" if variant is None else "off"),
        optim=OptimConfig(learning_rate=1e-6, warmup_steps=10),
        loss=LossConfig(advantage="mean_only"),
        rollout=RolloutConfig(
            groups_per_step=16,
            group_size=8,
            slots=64,
            context_tokens=1024,
            turn_tokens=160,
            turns=4,
            prefill_buckets=(64, 384, 1024),
            gradient_buckets=(512, 1024),
        ),
        env=EnvConfig(
            options=ReasoningOptions(
                tasks=("chain_sum", "products", "gcd"),
                terms=(2, 4),
                digits=(2, 4),
                prompt="question",
            )
        ),
        mesh=MeshConfig(sampler="shared"),
        evaluation=EvaluationConfig(questions=256, every_steps=25),
    )
