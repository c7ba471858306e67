"""One replica of the learner: its parameters and its running gradient calls.

A replica starts calls without ever waiting for the device. It decides nothing: the
schedule says what runs, the stream says with which numbers.
"""

import collections
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.stream import mesh, surrogate

Tree = Any
IN_FLIGHT = 2  # the running call and one behind it: later news still changes the next
_LOOK_SECS = 1e-4


class Replica:
    """Gradients of one step on one sub-mesh.

    Args:
      function: The surrogate function, or a `Segments`.
      params: Parameters on this replica's devices.
      frozen: The surrogate's further argument on the same devices, or None.
    """

    def __init__(self, function: Callable, params: Tree, frozen: Tree = None):
        self.function = function
        self.params = params
        self.frozen = frozen
        self._sharding = mesh.whole_sharding(jax.tree.leaves(params)[0])
        self._running: collections.deque[jax.Array] = collections.deque()

    @property
    def load(self) -> int:
        """How many of this replica's calls have not ended yet."""
        while self._running and self._running[0].is_ready():
            self._running.popleft()
        return len(self._running)

    def wait(self) -> None:
        """Blocks until the oldest running call has ended."""
        if self._running:
            self._running[0].block_until_ready()

    def put(self, sample: Tree) -> Tree:
        """Brings a sample to this replica's devices; again it costs nothing.

        All arrays get one kind of placement: committed or not makes another program.
        """
        return jax.device_put(sample, self._sharding)

    def gradient(
        self, samples: Sequence[Tree], weights: np.ndarray, prompt: Tree = None
    ) -> tuple[Tree, surrogate.Evaluated]:
        """Starts the gradient of sum_i a_i * weighted_i + b_i * additive_i.

        Args:
          samples: `rows` samples of one shape signature.
          weights: float[rows, 2], the numbers (a_i, b_i).
          prompt: A state that all of them continue, with a gradient of its own beside
            that of the parameters.
        """
        given = self._given(prompt)
        samples = self.put(tuple(samples))
        return self.start(surrogate.gradient, *given, samples, weights)

    def parts(
        self, samples: Sequence[Tree], prompt: Tree = None
    ) -> tuple[Tree, Tree, surrogate.Evaluated]:
        """Starts the gradients of sum_i weighted_i and of sum_i additive_i."""
        given = self._given(prompt)
        return self.start(surrogate.split_gradient, *given, self.put(tuple(samples)))

    def start(self, program: Callable, *arguments: Any) -> Any:
        """Starts a program whose last result is an `Evaluated`: one more running."""
        found = self.run(program, *arguments)
        self._running.append(found[-1].finite)
        return found

    def run(self, program: Callable, *arguments: Any) -> Any:
        """Starts a small program that counts as none of the running."""
        with self._mesh():
            return program(*arguments)

    def _given(self, prompt):
        """What the surrogate is, and its arguments before the samples."""
        if prompt is None:
            return self.function, self.params, self.frozen
        return self.function.joined, (self.params, prompt), self.frozen

    def _mesh(self):
        """The replica's mesh in context, for sharding constraints inside surrogates."""
        if isinstance(self._sharding, jax.sharding.NamedSharding):
            return jax.set_mesh(self._sharding.mesh)
        return contextlib.nullcontext()


def wait_for_any(replicas: Sequence[Replica]) -> None:
    """Blocks until one of the replicas, all of them full, can take a call."""
    if len(replicas) == 1:
        replicas[0].wait()
    while min(replica.load for replica in replicas) >= IN_FLIGHT:
        time.sleep(_LOOK_SECS)  # no way to wait for the first of several devices
