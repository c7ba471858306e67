"""Reinforcement learning of language-model agents by gradient streaming, in JAX."""

import importlib
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors: the same names, imported on first use below
    from thundersync_jax.ops import advantages as advantages
    from thundersync_jax.stream.gradient_stream import GradientStream as GradientStream
    from thundersync_jax.stream.padding import Padded as Padded
    from thundersync_jax.stream.padding import pad as pad
    from thundersync_jax.stream.segments import Segments as Segments
    from thundersync_jax.stream.segments import State as State
    from thundersync_jax.stream.surrogate import Max as Max
    from thundersync_jax.stream.surrogate import Surrogate as Surrogate
    from thundersync_jax.stream.turn_stream import TurnStream as TurnStream

# While `python -m thundersync_jax.train` imports jax, whose callbacks swallow
# exceptions, Ctrl-C ends the process; `flags.run` takes over.
_COMMAND = any(text.partition(".")[0] == __name__ for text in sys.orig_argv)
_UNTOUCHED = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if sys.argv[:1] == ["-m"] and _COMMAND and _UNTOUCHED:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

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
