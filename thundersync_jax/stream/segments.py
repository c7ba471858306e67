"""A trajectory in pieces: gradients turn by turn, and prompts that a group shares.

A *segment* is some tokens of a trajectory, seen as a function

    (params, state of the segments before, sample) -> (surrogate, state)

of which one program computes the gradient. A later segment reads the state of earlier
ones (keys and values), so its loss also has a gradient through them: `docs/method.md`.
The last hidden vector of a segment is part of its state: it predicts the first token of
the next.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.stream import sums, surrogate
from thundersync_jax.stream.accumulator import sum_dtype
from thundersync_jax.stream.mesh import Replica
from thundersync_jax.stream.surrogate import Evaluated, Gradient, Params, Sample

Tree = Any


class State(NamedTuple):
    """What segments leave for those behind them. Floating-point arrays.

    Attributes:
      kept: To which every segment appends along one axis, as keys and values. A segment
        does not look at entries from its own first token on.
      last: What every segment replaces, as the hidden vector behind its last token.
    """

    kept: Tree
    last: Tree


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """A surrogate in pieces. Make one per run, which compiled programs belong to."""

    #: Maps (params, state, sample), or (params, frozen, state, sample) where a stream
    #: has `frozen`, to a `Surrogate` and to the state with the segment's own part of
    #: `kept`: its tokens alone. A sample is a dict, and its "start" int32[] says how
    #: many tokens are before it.
    function: Callable[..., tuple[surrogate.Surrogate, State]]
    #: Maps a number of slots to the state before the first token: `kept` with room for
    #: so many tokens.
    empty: Callable[[int], State]
    slots: int  #: tokens that the longest trajectory keeps
    axis: int = 0  #: of `kept`, along which tokens lie

    def __call__(self, *arguments: Any) -> tuple[surrogate.Surrogate, State]:
        return self.function(*arguments)

    @functools.cached_property
    def joined(self) -> Callable[..., surrogate.Surrogate]:
        """The function of ((params, state), [frozen,] sample), without its state."""

        def joined(both, *rest):
            params, state = both
            *frozen, sample = rest
            return self.function(params, *frozen, state, sample)[0]

        return joined


class Turn(NamedTuple):
    """What a segment of an open trajectory leaves, differentiated or replayed."""

    gradient: Gradient  # of `additive`, or of what later segments pulled through it
    state: State | None  # after the segment; None of a replayed one
    pulled: Tree  # cotangents of `kept`, all segments so far added up, float32
    of_last: Tree  # cotangent of `last` before the segment, float32
    evaluated: Evaluated  # one row; none of a replayed segment


@functools.partial(jax.jit, static_argnums=0)
def prompt_state(
    segments: Segments, params: Params, frozen: Tree, sample: Sample
) -> State:
    """The state behind a prompt: a trajectory's first tokens."""
    return _run(segments, params, frozen, segments.empty(0), sample)[1]


@functools.partial(jax.jit, static_argnums=0)
def prompt_gradient(
    segments: Segments, params: Params, frozen: Tree, sample: Sample, cotangent: State
) -> tuple[Gradient, Evaluated]:
    """Pushes the cotangent of a prompt's state, of any float dtype, through it."""

    def state_of(params):
        return _run(segments, params, frozen, segments.empty(0), sample)[1]

    state, pull = jax.vjp(state_of, params)
    (gradient,) = pull(_like(cotangent, state))
    return gradient, _no_rows(gradient)


@functools.partial(jax.jit, static_argnums=0)
def opened(segments: Segments, prompt: State | None) -> tuple[State, Tree]:
    """State of a new trajectory, behind a prompt or none, and zeros for `pulled`."""
    state = segments.empty(segments.slots)
    if prompt is not None:
        start = jnp.zeros((), jnp.int32)
        kept = _written(segments.axis, state.kept, prompt.kept, start)
        state = State(kept, prompt.last)
    pulled = jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x.dtype)), state.kept)
    return state, pulled


@functools.partial(jax.jit, static_argnums=0)
def turn(
    segments: Segments,
    params: Params,
    frozen: Tree,
    state: State,
    pulled: Tree,
    sample: Sample,
) -> Turn:
    """Gradient of one more segment, behind `state` and the `pulled` of those before."""

    def additive(params, state):
        out, own = _run(segments, params, frozen, state, sample)
        row = surrogate.parts(out)
        return row[1], (own, jax.lax.stop_gradient(row))

    grad = jax.grad(additive, argnums=(0, 1), has_aux=True)
    gradients, (own, row) = grad(params, state)
    gradient, of_state = gradients
    kept = _written(segments.axis, state.kept, own.kept, sample["start"])
    return Turn(
        gradient,
        State(kept, own.last),
        _added(pulled, of_state.kept),
        jax.tree.map(lambda x: x.astype(sum_dtype(x.dtype)), of_state.last),
        Evaluated(row[None], surrogate.all_finite(gradients)),
    )


@functools.partial(jax.jit, static_argnums=0)
def replay(
    segments: Segments,
    params: Params,
    frozen: Tree,
    state: State,
    pulled: Tree,
    of_last: Tree,
    of_last_before: Tree,
    sample: Sample,
) -> Turn:
    """Pushes what later segments, all replayed already, pulled through an earlier one.

    `state` is `kept` of the closed trajectory and `last` before the segment, `pulled`
    and `of_last` are cotangents of `kept` and of `last` after the segment;
    `of_last_before` of that before it, from its own `additive`.
    """
    start = sample["start"]

    def own_state(params, state):
        return _run(segments, params, frozen, state, sample)[1]

    own, pull = jax.vjp(own_state, params, state)
    of_own = State(_read(segments.axis, pulled, own.kept, start), of_last)
    gradients = pull(_like(of_own, own))
    gradient, of_state = gradients
    added = _added(pulled, of_state.kept)
    # What its own tokens and all behind them were given has been passed on.
    before = functools.partial(_before, segments.axis, start=start)
    pulled = jax.tree.map(before, added)
    of_last = _added(of_last_before, of_state.last)
    return Turn(gradient, None, pulled, of_last, _no_rows(gradients))


@functools.partial(jax.jit, static_argnums=0)
def of_prompt(
    segments: Segments, prompt: State, pulled: Tree, of_last: Tree, weight: float
) -> State:
    """What a replayed trajectory pulls of its prompt's state, times its weight."""
    start = jnp.zeros((), jnp.int32)
    cotangent = State(_read(segments.axis, pulled, prompt.kept, start), of_last)

    def weigh(x):
        x = x.astype(sum_dtype(x.dtype))
        return x * jnp.asarray(weight, x.dtype)

    return jax.tree.map(weigh, cotangent)


class OpenTrajectory:
    """What an open trajectory holds on its replica: its state, and cotangents of it."""

    def __init__(self, segments: Segments, replica: Replica, prompt: State | None):
        self._segments, self._replica = segments, replica
        self._state, self._pulled = replica.run(opened, segments, prompt)
        self._samples: list[Sample] = []  # by turn, as the next two
        self._lasts: list[Tree] = []  # `State.last` before the turn
        self._of_lasts: list[Tree] = []  # their cotangents

    def turn(self, sample: Sample) -> tuple[Gradient, Evaluated]:
        """Starts the next turn. Returns its gradient and what was evaluated."""
        sample = self._replica.put(sample)
        done = self._replica.start(
            turn, self._segments, self._state, self._pulled, sample
        )
        self._samples.append(sample)
        self._lasts.append(self._state.last)
        self._of_lasts.append(done.of_last)
        self._state, self._pulled = done.state, done.pulled
        return done.gradient, done.evaluated

    def replay(self, index: int) -> tuple[Gradient, Evaluated]:
        """Pushes what later turns pulled through an earlier one, last to first."""
        done = self._replica.start(
            replay,
            self._segments,
            State(self._state.kept, self._lasts[index]),
            self._pulled,
            self._of_lasts[index + 1],
            self._of_lasts[index],
            self._samples[index],
        )
        self._pulled, self._of_lasts[index] = done.pulled, done.of_last
        return done.gradient, done.evaluated

    def of_prompt(self, prompt: State, weight: float) -> State:
        """The cotangent of its prompt's state, once replayed, times its weight."""
        pulled, of_last, weight = self._pulled, self._of_lasts[0], np.float64(weight)
        return self._replica.run(
            of_prompt, self._segments, prompt, pulled, of_last, weight
        )


class SharedPrompt:
    """A group's prompt on one replica: run forward once, and backward once."""

    def __init__(self, segments: Segments, replica: Replica, sample: Sample, kind: str):
        self._segments, self._replica = segments, replica
        self._sample = replica.put(sample)
        self.state = replica.run(
            prompt_state, segments, replica.params, replica.frozen, self._sample
        )
        # Of cotangents of the state, for this replica alone.
        self.sums = sums.KINDS[kind]([self.state], self.state)

    def gradient(self) -> tuple[Gradient, Evaluated]:
        """Starts the gradient of the prompt, of everything in the sums."""
        cotangent = self.sums.read(0)
        return self._replica.start(
            prompt_gradient, self._segments, self._sample, cotangent
        )


def _run(segments, params, frozen, state, sample):
    more = () if frozen is None else (frozen,)
    return segments.function(params, *more, state, sample)


def _no_rows(gradients) -> Evaluated:
    return Evaluated(jnp.zeros((0, 2)), surrogate.all_finite(gradients))


def _like(cotangent: Tree, primal: Tree) -> Tree:
    """In the dtype of what it belongs to, as a VJP wants it."""
    return jax.tree.map(lambda c, x: c.astype(x.dtype), cotangent, primal)


def _added(pulled, more):
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), pulled, more)


def _slots(axis, own, start):
    """Where the tokens of a segment lie, padding included."""
    return start + jnp.arange(own.shape[axis], dtype=jnp.int32)


def _written(axis, kept, own, start):
    """`kept` with a segment's part in place; padding that finds no room is dropped."""

    def write(whole, piece):
        moved = jnp.moveaxis(whole, axis, 0)
        rows = jnp.moveaxis(piece, axis, 0).astype(whole.dtype)
        moved = moved.at[_slots(axis, piece, start)].set(rows, mode="drop")
        return jnp.moveaxis(moved, 0, axis)

    return jax.tree.map(write, kept, own)


def _read(axis, pulled, own, start):
    """The part of `pulled` that belongs to a segment."""

    def read(whole, piece):
        where = _slots(axis, piece, start)
        return jnp.take(whole, where, axis=axis, mode="fill", fill_value=0)

    return jax.tree.map(read, pulled, own)


def _before(axis, pulled, start):
    shape = [1] * pulled.ndim
    shape[axis] = -1
    index = jnp.arange(pulled.shape[axis], dtype=jnp.int32).reshape(shape)
    return jnp.where(index < start, pulled, jnp.zeros_like(pulled))
