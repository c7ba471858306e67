"""Metadata and dependencies; tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

# Lower ends: what Python 3.11 resolves. Upper ends: the series that the tests ran on.
JAX = "jax{}>=0.10.2,<0.13"
TASKS = ["reasoning-gym>=0.1.25,<0.2"]
PLOTS = ["matplotlib>=3.9,<4"]
TENSORBOARD = ["tensorboardX>=2.6.4,<3"]  # writes event files without TensorFlow
WANDB = ["wandb>=0.22,<1"]
HF = ["tokenizers>=0.22,<0.25", "jinja2>=3.1.6,<4", "safetensors>=0.6,<0.9"]
VLLM = ["httpx>=0.28,<0.29"]  # the client; servers have an environment of their own
DOCS = ["sphinx>=9.0,<10", "myst-parser>=5.1,<6"]

setup(
    name="thundersync_jax",
    version="0.1.0",
    description="Gradient-streaming reinforcement learning of language models in JAX",
    author="The thundersync_jax authors",
    license="Apache-2.0",
    python_requires=">=3.11",
    entry_points={"console_scripts": ["thundersync = thundersync_jax.__main__:main"]},
    packages=find_packages(include=["thundersync_jax", "thundersync_jax.*"]),
    install_requires=[
        JAX.format(""),
        "flax>=0.12.8,<0.13",
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12.8,<0.13",
        "numpy>=2.0,<3",
        "absl-py>=2.1,<3",
        "rich>=13.7,<16",
    ],
    extras_require={
        "cuda12": [JAX.format("[cuda12]")],
        "cuda13": [JAX.format("[cuda13]")],
        "tpu": [JAX.format("[tpu]")],
        "tasks": TASKS,
        "plots": PLOTS,
        "tensorboard": TENSORBOARD,
        "wandb": WANDB,
        "hf": HF,
        "vllm": [*HF, *VLLM],
        "docs": DOCS,
        "test": [
            *TASKS,
            *PLOTS,
            *TENSORBOARD,
            *WANDB,
            *HF,
            *VLLM,
            *DOCS,
            "hypothesis>=6.170.17,<7",
            "pytest>=8.2,<10",
            "pytest-xdist>=3.8,<4",
            "ruff>=0.17.6,<0.18",  # one minor version: the next formats differently
        ],
        # What model folders are compared with. One version: the CPU build of torch.
        "test-hf": ["torch==2.13.0", "transformers>=5.2,<6"],
    },
)
