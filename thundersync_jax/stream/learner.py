"""All replicas of the learner and what they add up: executes what a schedule decides.

No method but `wait` and `finish` waits for a device.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.stream import mesh, padding, refusals, sums, surrogate
from thundersync_jax.stream import segments as seg
from thundersync_jax.stream.mesh import IN_FLIGHT, Replica
from thundersync_jax.stream.schedule import BATCH, Call, Fold, Prompt
from thundersync_jax.stream.schedule.turns import TurnCall, TurnFold
from thundersync_jax.stream.surrogate import Evaluated, Gradient, Params, Sample

Tree = Any


class Learner:
    """The device side of one step. Replicas follow from where `params` lie."""

    def __init__(
        self,
        function: Callable | seg.Segments,
        params: Params,
        frozen: Tree,
        accumulator: str,
        on_compile: Callable[[str], None] | None = None,
    ):
        self.structure: surrogate.Structure | None = None  # once a sample was examined
        self.compiles = 0  # gradient programs
        self.in_pieces = isinstance(function, seg.Segments)
        self._function = function
        self._params = jax.tree.map(padding.parameter, params)
        self._frozen = jax.tree.map(padding.device_leaf, frozen)
        self._on_compile = on_compile
        views, frozen_views = mesh.split(self._params, self._frozen)
        self._replicas = list(map(Replica, views, frozen_views))
        if accumulator == "exact":
            for x in jax.tree.leaves(self._params):
                refusals.check_exact(x.dtype, len(views), self.in_pieces)
        self._sums = sums.KINDS[accumulator](views, self._params)
        self._sum_bytes = sums.bytes_per_device(self._params, accumulator)
        self._accumulator = accumulator
        self._prompts: dict[Hashable, Sample] = {}  # by group
        self._shared: dict[tuple[Hashable, int], seg.SharedPrompt] = {}  # and replica
        self._trajectories: dict[int, seg.OpenTrajectory] = {}  # by place
        self._layout = padding.number(padding.placed((self._params, self._frozen)))
        self._traced = surrogate.traced(function)

    @property
    def free(self) -> int | None:
        """The replica that takes the next call, None while all are busy enough."""
        load, index = min((r.load, i) for i, r in enumerate(self._replicas))
        return index if load < IN_FLIGHT else None

    @property
    def free_replicas(self) -> set[int]:
        """All replicas that take another call."""
        return {i for i, r in enumerate(self._replicas) if r.load < IN_FLIGHT}

    def unit_bytes(self, scope: str, lossy: bool) -> int:
        """Bytes per device of the sums that a unit holds while it misses rewards."""
        parts = self.structure or surrogate.Structure(False, False)
        count = sums.channels(scope, parts.weighted, parts.additive, lossy)
        return count * self._sum_bytes

    def wait(self, among: set[int] | None = None) -> None:
        """Blocks until a replica is free; one of these, where some are named."""
        chosen = range(len(self._replicas)) if among is None else among
        mesh.wait_for_any([self._replicas[i] for i in chosen])

    def put(self, sample: Sample) -> Sample:
        """Brings a sample to the device early, where it is known which that is."""
        return self._replicas[0].put(sample) if len(self._replicas) == 1 else sample

    def open_prompt(self, group: Hashable, sample: Sample) -> None:
        """Announces the prompt that a group shares."""
        self._prompts[group] = sample

    def bucket(self, group: Hashable, sample: Sample) -> Hashable:
        """What samples have in common that may share a call."""
        shapes = padding.shapes(sample)
        if not self.in_pieces:
            return shapes
        return *shapes, padding.shapes(self._prompts.get(group)), group

    def examine(
        self, sample: Sample, bucket: Hashable, estimator: Any
    ) -> surrogate.Structure:
        """Looks at the surrogate's parts, once per shape signature."""
        key, known = (self._layout, bucket[:3]), self._traced.structures
        if key not in known:
            function, params = self._function, self._params
            if self.in_pieces:
                params = params, self._state_shapes(bucket[3])
                function = function.joined
            known[key] = surrogate.structure(function, params, self._frozen, sample)
        refusals.check_parts(known[key], self.structure, estimator)
        return known[key]

    def weighed(
        self, call: Call, samples: Sequence[Sample], weights: np.ndarray, unit: Hashable
    ) -> Evaluated:
        """One gradient of sum_i a_i * weighted_i + b_i * additive_i.

        It goes to the batch, or to a sum of the unit. `samples` are of one shape
        signature, `weights` float64[rows, 2] the numbers (a_i, b_i). Where all are 0
        nothing is added, whatever the gradient: 0 * NaN is no 0.
        """
        gradient, evaluated = self._run(surrogate.gradient, call, samples, weights)
        if np.any(weights) and call.place is None:
            self._direct(call, gradient)
        elif np.any(weights):
            self._hold(call, unit, None, None, gradient)
        return evaluated

    def unweighed(
        self,
        call: Call,
        samples: Sequence[Sample],
        unit: Hashable,
        reward: float,
        certain: bool,
    ) -> Evaluated:
        """The gradients of sum_i weighted_i and of sum_i additive_i, apart.

        The former goes to the unit's sums, the latter to the batch where the samples
        are `certain` to count. They are of one shape signature and have one `reward`.
        """
        if not self.structure.additive:
            # A single part: the other coefficient meets nothing.
            ones = np.ones((len(samples), 2))
            weighted, evaluated = self._run(surrogate.gradient, call, samples, ones)
            self._hold(call, unit, reward, weighted, None)
            return evaluated
        program = surrogate.split_gradient
        weighted, additive, evaluated = self._run(program, call, samples)
        if certain:
            self._direct(call, additive)
            additive = None
        self._hold(call, unit, reward, weighted, additive)
        return evaluated

    def turn(self, call: TurnCall, sample: Sample) -> Evaluated:
        """Differentiates the next turn of a trajectory, or replays an earlier one."""
        item = call.item
        if call.place not in self._trajectories:
            shared = self._prompt(call.replica, item.group)
            self._trajectories[call.place] = seg.OpenTrajectory(
                self._function, self._replicas[call.replica], shared and shared.state
            )
        trajectory = self._trajectories[call.place]
        self._announce("replay" if call.replay else "turn", call.replica, item.bucket)
        if call.replay:
            gradient, evaluated = trajectory.replay(item.sample)
        else:
            gradient, evaluated = trajectory.turn(sample)
        self._sums.hold(call.as_call, item[:2], None, None, gradient)
        return evaluated

    def close_trajectory(self, fold: TurnFold, weight: float) -> None:
        """The sum of a trajectory joins the batch times its weight, or is forgotten."""
        unit = fold.group, fold.member
        where = Fold(unit, fold.place, None, (fold.replica,), fold.kept)
        self._sums.fold(where, None, weight)
        trajectory = self._trajectories.pop(fold.place, None)
        if fold.kept and trajectory and fold.group in self._prompts:
            shared = self._prompt(fold.replica, fold.group)
            shared.sums.direct(0, trajectory.of_prompt(shared.state, weight))

    def fold(self, fold: Fold, table: sums.Table | None) -> None:
        """Adds a unit's sums to the batch with its advantages, or forgets them."""
        self._sums.fold(fold, table)
        for (group, replica), shared in self._shared.items():
            if replica in fold.replicas and fold.unit in (group, BATCH):
                shared.sums.fold(fold._replace(replicas=(0,)), table)

    def close_prompt(self, prompt: Prompt) -> list[tuple[int, Evaluated]]:
        """Differentiates a prompt, all of its cotangents being in, or forgets it.

        Returns what was evaluated, by the index of each replica that it ran on.
        """
        closed = []
        for replica in prompt.replicas:
            shared = self._shared.pop((prompt.group, replica), None)
            if shared is not None and prompt.kept and not shared.sums.empty:
                gradient, evaluated = shared.gradient()
                self._sums.direct(replica, gradient)
                closed.append((replica, evaluated))
        self._prompts.pop(prompt.group, None)
        return closed

    def finish(self, denominator: float) -> tuple[Gradient, jax.Array]:
        """The gradient and its norm; the sums are gone then."""
        return self._sums.finish(denominator)

    def _run(
        self, program: Callable, call: Call, samples: Sequence[Sample], *weights: Any
    ) -> Any:
        """Starts a gradient program on the call's replica."""
        item, replica = call.items[0], self._replicas[call.replica]
        what = "gradients" if program is surrogate.split_gradient else "gradient"
        self._announce(what, call.replica, item.bucket, call.rows)
        function, params = self._function, replica.params
        if self.in_pieces:
            state = self._prompt(call.replica, item.group).state
            function, params = function.joined, (params, state)
        samples = replica.put(tuple(samples))
        return replica.start(program, function, samples, *weights, params=params)

    def _announce(
        self, what: str, replica: int, bucket: Hashable, rows: int = 1
    ) -> None:
        """Counts a program that is about to compile, and reports it."""
        program = (self._layout, what, rows, replica, bucket[:3])
        if program in self._traced.programs:
            return
        self._traced.programs.add(program)
        self.compiles += 1
        if self._on_compile:
            shapes = ", ".join(str(shape) for shape, _ in bucket[1])
            self._on_compile(f"{what} of {rows} x {shapes}")

    def _direct(self, call: Call, gradient: Gradient) -> None:
        if self.in_pieces:
            gradient, cotangent = gradient
            shared = self._prompt(call.replica, call.items[0].group)
            shared.sums.direct(0, cotangent)
        self._sums.direct(call.replica, gradient)

    def _hold(self, call, unit, reward, weighted, additive) -> None:
        if self.in_pieces:
            weighted, of_weighted = weighted or (None, None)
            additive, of_additive = additive or (None, None)
            shared = self._prompt(call.replica, call.items[0].group)
            at_home = call._replace(replica=0)
            shared.sums.hold(at_home, unit, reward, of_weighted, of_additive)
        self._sums.hold(call, unit, reward, weighted, additive)

    def _prompt(self, replica: int, group: Hashable) -> seg.SharedPrompt | None:
        """A group's prompt, run at the first call; None where its samples hold it."""
        if group not in self._prompts:
            return None
        if (group, replica) not in self._shared:
            where, sample = self._replicas[replica], self._prompts[group]
            self._shared[group, replica] = seg.SharedPrompt(
                self._function, where, sample, self._accumulator
            )
        return self._shared[group, replica]

    def _state_shapes(self, group: Hashable) -> Tree:
        """Shapes of the state that a group's samples continue."""
        segments, prompt = self._function, self._prompts.get(group)
        if prompt is None:
            return jax.eval_shape(lambda: segments.empty(segments.slots))
        state = functools.partial(seg.prompt_state, segments)
        return jax.eval_shape(state, self._params, self._frozen, prompt)
