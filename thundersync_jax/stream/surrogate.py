"""A trajectory's loss as two scalars of the parameters, and its compiled gradients.

Gradients are compiled once per surrogate function, of (params, sample) or (params,
frozen, sample), and shape signature: every stream of a run shares them.
"""

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, MutableMapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Tree = Any  # a pytree of arrays
Params = Any  # one of parameters
Sample = Any  # one that a surrogate takes
Gradient = Any  # one like the parameters, of gradients or sums of them

# Weak, so that a function made for one step goes with what it closes over. The cache
# of jax.jit holds functions too, the latest few thousand; jax.clear_caches empties it.
_FUNCTIONS: MutableMapping[Callable, "Traced"] = weakref.WeakKeyDictionary()
_VALUES: dict[Callable, "Traced"] = {}


class Surrogate(NamedTuple):
    """What one sample contributes to the loss.

    Attributes:
      weighted: Scalar that the advantage multiplies; its gradient is the score
        gradient. None where there is none.
      additive: Scalar that does not depend on the group (a KL penalty, an entropy
        bonus, distillation). None where there is none.
      metrics: Flat dict of scalars for the report, summed over samples, or the largest
        where wrapped in `Max`. No gradient flows from them.
      diagnostics: The same, over the samples whose gradient was computed: no reason to
        compute one whose advantage is 0, as metrics are.
    """

    weighted: jax.Array | None
    additive: jax.Array | None = None
    metrics: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Max:
    """Marks a metric of which the report keeps the largest value."""

    value: Any


class Structure(NamedTuple):
    """Which parts a surrogate returns; names, of metrics and diagnostics, in order."""

    weighted: bool
    additive: bool
    sums: tuple[str, ...] = ()
    maxima: tuple[str, ...] = ()
    diagnostic_sums: tuple[str, ...] = ()
    diagnostic_maxima: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[tuple[str, bool, bool], ...]:
        """Name, whether a maximum, whether a diagnostic, of `values` from column 2."""
        kinds = itertools.product((False, True), (False, True))
        fields = self.sums, self.maxima, self.diagnostic_sums, self.diagnostic_maxima
        return tuple(
            (name, largest, diagnostic)
            for (diagnostic, largest), names in zip(kinds, fields, strict=True)
            for name in names
        )


@dataclasses.dataclass(frozen=True)
class Traced:
    """What is known of a surrogate function, for all streams of the process."""

    #: By argument layout and shape signature.
    structures: dict[Hashable, Structure] = dataclasses.field(default_factory=dict)
    programs: set[Hashable] = dataclasses.field(default_factory=set)  #: compiled ones


class Evaluated(NamedTuple):
    """Small numbers of one gradient call, fetched at the step boundary."""

    values: jax.Array  # [rows, 2 + C]: weighted, additive, the columns of `Structure`
    finite: jax.Array  # bool[], whether every entry of the gradient is finite


def traced(surrogate: Callable) -> Traced:
    """Returns what is known of a surrogate function, to be added to."""
    # Objects that are equal by value share programs: none may take the entry with it.
    if type(surrogate).__eq__ is object.__eq__:
        with contextlib.suppress(TypeError):  # no weak reference to it
            return _FUNCTIONS.setdefault(surrogate, Traced())
    return _VALUES.setdefault(surrogate, Traced())


def structure(
    surrogate: Callable, params: Params, frozen: Tree, sample: Sample
) -> Structure:
    """Finds the parts of a surrogate without computing anything, or what is wrong."""
    evaluate = functools.partial(_evaluate, surrogate)
    out = jax.eval_shape(evaluate, params, frozen, sample)
    if not isinstance(out, Surrogate):
        raise TypeError(
            f"the surrogate function returned {type(out).__name__}; expected "
            "Surrogate(weighted, additive=None, metrics=None)"
        )
    both = {"weighted": out.weighted, "additive": out.additive}
    scalars = {name: x for name, x in both.items() if x is not None}
    if not scalars:
        raise TypeError("the surrogate has neither `weighted` nor `additive`; give one")
    for kind in ("metrics", "diagnostics"):
        columns = getattr(out, kind) or {}
        if not isinstance(columns, dict):
            raise TypeError(
                f"{kind} of the surrogate is a {type(columns).__name__}; expected a "
                "flat dict of scalars"
            )
        scalars |= {
            f"{kind}[{name!r}]": x.value if isinstance(x, Max) else x
            for name, x in columns.items()
        }
    for name, x in scalars.items():
        if getattr(x, "shape", None) != ():
            raise TypeError(
                f"{name} of the surrogate is {x}; expected a scalar: sum over tokens "
                "inside the surrogate function"
            )
        if name in both and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} of the surrogate has dtype {x.dtype}, not a float")
        kinds = (jnp.bool_, jnp.integer, jnp.floating)
        if not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
            raise ValueError(
                f"{name} of the surrogate has dtype {x.dtype}; expected a real number, "
                "as its absolute value"
            )
    names = *_names(out.metrics), *_names(out.diagnostics)
    return Structure(out.weighted is not None, out.additive is not None, *names)


@functools.partial(jax.jit, static_argnums=0)
def gradient(
    surrogate: Callable,
    params: Params,
    frozen: Tree,
    samples: tuple[Sample, ...],
    weights: jax.Array,
) -> tuple[Gradient, Evaluated]:
    """Gradient of sum_i a_i * weighted_i + b_i * additive_i.

    Samples are of one shape signature. `weights` [rows, 2] are the numbers (a_i, b_i);
    a row of zeros counts for nothing.
    """

    def loss(params):
        rows = _rows(surrogate, params, frozen, samples)
        w = weights.astype(rows.dtype)
        return jnp.sum(w * rows[:, :2]), jax.lax.stop_gradient(rows)

    grads, rows = jax.grad(loss, has_aux=True)(params)
    return grads, Evaluated(rows, all_finite(grads))


@functools.partial(jax.jit, static_argnums=0)
def split_gradient(
    surrogate: Callable, params: Params, frozen: Tree, samples: tuple[Sample, ...]
) -> tuple[Gradient, Gradient, Evaluated]:
    """Gradients of sum_i weighted_i and of sum_i additive_i apart, from one forward."""

    def sums(params):
        rows = _rows(surrogate, params, frozen, samples)
        return jnp.sum(rows[:, :2], axis=0), jax.lax.stop_gradient(rows)

    _, pull, rows = jax.vjp(sums, params, has_aux=True)
    one, zero = jnp.ones((), rows.dtype), jnp.zeros((), rows.dtype)
    (weighted,) = pull(jnp.stack([one, zero]))
    (additive,) = pull(jnp.stack([zero, one]))
    finite = all_finite(weighted) & all_finite(additive)
    return weighted, additive, Evaluated(rows, finite)


def parts(out: Surrogate) -> jax.Array:
    """[2 + C]: weighted, additive (0 where None), the columns of `Structure`."""
    zero = jnp.zeros(())
    values = [zero if x is None else x for x in (out.weighted, out.additive)]
    for columns in (out.metrics, out.diagnostics):
        sums, maxima = _names(columns)
        values += [columns[name] for name in sums]
        values += [columns[name].value for name in maxima]
    dtype = jnp.result_type(jnp.float32, *values)
    return jnp.stack([jnp.asarray(x, dtype) for x in values])


def all_finite(tree: Tree) -> jax.Array:
    """bool[], whether every entry of every array is finite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def _evaluate(surrogate, params, frozen, sample):
    more = () if frozen is None else (frozen,)
    return surrogate(params, *more, sample)


def _names(columns):
    """Names of sums and of maxima, of metrics or diagnostics."""
    columns = columns or {}
    maxima = {name for name, x in columns.items() if isinstance(x, Max)}
    return tuple(sorted(columns.keys() - maxima)), tuple(sorted(maxima))


def _rows(surrogate, params, frozen, samples) -> jax.Array:
    """[rows, 2 + C]: the parts of every sample."""
    if len(samples) == 1:
        return parts(_evaluate(surrogate, params, frozen, samples[0]))[None]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *samples)
    return jax.vmap(
        lambda sample: parts(_evaluate(surrogate, params, frozen, sample)),
        axis_size=len(samples),
    )(stacked)
