"""Reinforcement learning of language-model agents by gradient streaming, in JAX."""

import importlib

_HOME = {
    "GradientStream": "stream.gradient_stream",
    "Max": "stream.surrogate",
    "Padded": "stream.padding",
    "Segments": "stream.segments",
    "State": "stream.segments",
    "Surrogate": "stream.surrogate",
    "TurnStream": "stream.turn_stream",
    "advantages": "ops.advantages",
    "pad": "stream.padding",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    """Imports on first use: reading a config or `--help` must not wait for jax."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME[name]}")
    return module if name == "advantages" else getattr(module, name)
