"""All replicas of the learner and what they add up: executes what a schedule decides.

It decides nothing itself. The stream says which numbers a call's gradients are
multiplied by, or that they are not known yet. No method but `wait` and `finish` waits
for a device.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.stream import mesh, padding, refusals, sums
from thundersync_jax.stream import segments as seg
from thundersync_jax.stream.prompts import Prompts
from thundersync_jax.stream.replica import IN_FLIGHT, Replica, wait_for_any
from thundersync_jax.stream.schedule import Call, Fold, Prompt
from thundersync_jax.stream.surrogate import Evaluated, Structure, structure, traced

Tree = Any


class Learner:
    """The device side of one step.

    Args:
      surrogate: The surrogate function, or a `Segments` where groups share prompts.
      params: Parameters to differentiate; replicas follow from where they lie.
      frozen: The surrogate's further argument, or None.
      accumulator: "plain" or "exact".
      on_compile: Called with one line before a gradient program compiles.

    Attributes:
      structure: The parts of the surrogate, once a sample was examined.
      compiles: Gradient programs compiled so far.
      prompts: Those that groups share, or None.
      replicas: Where gradients are computed.
      sums: What they add up to.
    """

    def __init__(
        self,
        surrogate: Callable | seg.Segments,
        params: Tree,
        frozen: Tree,
        accumulator: str,
        on_compile: Callable[[str], None] | None = None,
    ):
        self.structure: Structure | None = None
        self.compiles = 0
        self._surrogate = surrogate
        self._params = jax.tree.map(padding.parameter, params)
        self._frozen = jax.tree.map(padding.device_leaf, frozen)
        if accumulator == "exact":
            _check_exact(self._params)
        self._on_compile = on_compile
        views, frozen_views = mesh.split(self._params, self._frozen)
        self.replicas = [
            Replica(surrogate, *both) for both in zip(views, frozen_views, strict=True)
        ]
        shared = isinstance(surrogate, seg.Segments)
        refusals.check_replicas(len(views), shared, accumulator)
        self.prompts = Prompts(self.replicas, accumulator) if shared else None
        self.sums = sums.KINDS[accumulator](views, self._params)
        self._sum_bytes = sums.bytes_per_device(self._params, accumulator)
        arguments = padding.placed((self._params, self._frozen))
        self._arguments = padding.number(arguments)
        self._traced = traced(surrogate)

    @property
    def free(self) -> int | None:
        """The replica that takes the next call, None while all are busy enough."""
        load, index = min((r.load, i) for i, r in enumerate(self.replicas))
        return index if load < IN_FLIGHT else None

    @property
    def free_replicas(self) -> set[int]:
        """All replicas that take another call."""
        return {i for i, r in enumerate(self.replicas) if r.load < IN_FLIGHT}

    def unit_bytes(self, scope: str, lossy: bool) -> int:
        """Bytes per device of the sums that a unit holds while it misses rewards."""
        parts = self.structure or Structure(False, False)
        count = sums.channels(scope, parts.weighted, parts.additive, lossy)
        return count * self._sum_bytes

    def wait(self, among: set[int] | None = None) -> None:
        """Blocks until a replica is free; one of these, where some are named."""
        chosen = range(len(self.replicas)) if among is None else among
        wait_for_any([self.replicas[i] for i in chosen])

    def put(self, tree: Tree) -> Tree:
        """Brings a sample to the device early, where it is known which that is."""
        return self.replicas[0].put(tree) if len(self.replicas) == 1 else tree

    def bucket(self, group: Hashable, tree: Tree) -> Hashable:
        """What samples have in common that may share a call."""
        shapes = padding.shapes(tree)
        if self.prompts is None:
            return shapes
        return *shapes, padding.shapes(self.prompts.tree(group)), group

    def examine(self, tree: Tree, bucket: Hashable, estimator: Any) -> Structure:
        """Looks at the surrogate's parts, once per shape padding."""
        key, known = (self._arguments, bucket[:3]), self._traced.structures
        if key not in known:
            given = self._surrogate, self._params
            if self.prompts is not None:
                given = self._with_prompt(bucket[3])
            known[key] = structure(*given, self._frozen, tree)
        refusals.check_parts(known[key], self.structure, estimator)
        return known[key]

    def weighed(
        self, call: Call, trees: Sequence[Tree], weights: np.ndarray, unit: Hashable
    ) -> Evaluated:
        """One gradient of sum_i a_i * weighted_i + b_i * additive_i.

        Args:
          call: Where it goes: to the batch, or to a sum of the unit.
          trees: Samples [rows].
          weights: float64[rows, 2], the numbers (a_i, b_i). Where all are 0 nothing is
            added, whatever the gradient: 0 * NaN is no 0.
          unit: Whose.
        """
        self._announce(call, "gradient")
        prompt = self._prompt(call)
        gradient, evaluated = self.replicas[call.replica].gradient(
            trees, weights, prompt
        )
        if np.any(weights) and call.place is None:
            self._direct(call, gradient)
        elif np.any(weights):
            self._hold(call, unit, None, None, gradient)
        return evaluated

    def unweighed(
        self,
        call: Call,
        trees: Sequence[Tree],
        unit: Hashable,
        reward: float,
        certain: bool,
    ) -> Evaluated:
        """The gradients of sum_i weighted_i and of sum_i additive_i, apart.

        Args:
          call: Where the former goes.
          trees: Samples [rows].
          unit: Whose.
          reward: Of all samples.
          certain: Whether they count, so that the latter goes to the batch.
        """
        replica, additive = self.replicas[call.replica], None
        split = self.structure.additive
        self._announce(call, "gradients" if split else "gradient")
        prompt = self._prompt(call)
        if split:
            weighted, additive, evaluated = replica.parts(trees, prompt)
            if certain:
                self._direct(call, additive)
                additive = None
        else:
            # A single part: the other coefficient meets nothing.
            ones = np.ones((len(trees), 2))
            weighted, evaluated = replica.gradient(trees, ones, prompt)
        self._hold(call, unit, reward, weighted, additive)
        return evaluated

    def fold(self, fold: Fold, table: sums.Table | None) -> None:
        """Adds a unit's sums to the batch with its advantages, or forgets them."""
        self.sums.fold(fold, table)
        if self.prompts is not None:
            self.prompts.fold(fold, table)

    def close(
        self,
        prompt: Prompt,
        record: Callable[[Hashable, Evaluated], None],
        on_call: Callable[[Prompt, jax.Array], None] | None = None,
    ) -> None:
        """Differentiates a prompt: all cotangents of its state are in.

        Args:
          prompt: On which replicas.
          record: Told of its group and of what was evaluated, on each.
          on_call: Called with the prompt on one replica, and an array that is ready
            when it has ended.
        """
        for replica, evaluated in self.prompts.close(prompt, self.sums.direct):
            record(prompt.group, evaluated)
            if on_call:
                on_call(prompt._replace(replicas=(replica,)), evaluated.finite)

    def finish(self, denominator: float) -> tuple[Tree, jax.Array]:
        """The gradient and its norm; the sums are gone then."""
        return self.sums.finish(denominator)

    def announce(
        self, what: str, replica: int, bucket: Hashable, rows: int = 1
    ) -> None:
        """Counts a program that is about to compile, and says so.

        Args:
          what: It computes of a sample.
          replica: Where.
          bucket: Of the sample, as `bucket` returns it.
          rows: Samples per call.
        """
        program = (self._arguments, what, rows, replica, bucket[:3])
        if program in self._traced.programs:
            return
        self._traced.programs.add(program)
        self.compiles += 1
        if self._on_compile:
            shapes = ", ".join(str(shape) for shape, _ in bucket[1])
            self._on_compile(f"{what} of {rows} x {shapes}")

    def _prompt(self, call: Call) -> Tree:
        if self.prompts is None:
            return None
        return self.prompts.of(call.items[0].group, call.replica).state

    def _announce(self, call: Call, what: str) -> None:
        self.announce(what, call.replica, call.items[0].bucket, call.rows)

    def _direct(self, call: Call, gradient: Tree) -> None:
        if self.prompts is not None:
            gradient, cotangent = gradient
            self.prompts.direct(call, cotangent)
        self.sums.direct(call.replica, gradient)

    def _hold(self, call, unit, reward, weighted, additive) -> None:
        if self.prompts is not None:
            weighted, of_weighted = weighted or (None, None)
            additive, of_additive = additive or (None, None)
            self.prompts.hold(call, unit, reward, of_weighted, of_additive)
        self.sums.hold(call, unit, reward, weighted, additive)

    def _with_prompt(self, group: Hashable):
        """The surrogate behind a prompt, and the shapes of what it differentiates."""
        segments, prompt = self._surrogate, self.prompts.tree(group)
        state = jax.eval_shape(
            lambda: (
                segments.empty(segments.slots)
                if prompt is None
                else seg.prompt_state(segments, self._params, self._frozen, prompt)
            )
        )
        return segments.joined, (self._params, state)


def _check_exact(params: Tree) -> None:
    """Requires parameters whose gradients exact sums can hold."""
    for x in jax.tree.leaves(params):
        if x.dtype.itemsize > 4:
            raise ValueError(
                f"accumulator is 'exact' and a parameter of shape {x.shape} is "
                f"{x.dtype}; exact sums are of at most 32 bits, use float32 parameters "
                "or accumulator 'plain'"
            )
