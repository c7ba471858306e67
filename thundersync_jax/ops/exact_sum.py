"""Sums of float32 arrays whose bits do not depend on the order of the addends.

Every addend is cut into whole numbers on one absolute grid, which are summed as int32,
three to an entry; each row keeps three steps of the grid, from that of its largest
addend down. The state is a function of the multiset of addends, and so is the value.
`docs/exactness.md` has the arithmetic, the proof and the error.

    limbs : int32[3, *leaf]       slot c sums the digits of the one step j = c (mod 3)
    tops  : int8[*leaf[:-1], 1]   highest step, or 7 once an addend was not finite

The functions are pure and may be traced. To update in place, donate the state and have
the result lie where it lay: `jax.jit(add, donate_argnums=0, out_shardings=...)`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

Tree = Any
SLOTS = 3
STEP_BITS = 19
# 8,191 digits of at most 2^18 and one carry fit into an int32.
MAX_ADDENDS = 2**31 // 2 ** (STEP_BITS - 1) - 1
# The unit of step -8 is below the smallest subnormal: lower tops would gain nothing.
LOWEST_TOP = -6
# Float32 ends in top 6.
NOT_FINITE_TOP = 7

INFINITY_BITS = 0x7F800000
NAN_BITS = 0x7FC00000


class ExactSum(NamedTuple):
    """What a sum of trees consists of; a pytree, to be treated as a whole."""

    limbs: Tree  # int32[3, *leaf]
    tops: Tree  # int8[*leaf[:-1], 1], int8[] of a scalar
    count: jax.Array  # int32[], addends; MAX_ADDENDS + 1 stands for any more


def init(tree: Tree) -> ExactSum:
    """The sum of nothing, lying where the leaves of `tree`, shaped as addends, lie.

    ValueError where a leaf is not a float of at most 32 bits.
    """
    _refuse_dtypes(tree)
    leaves, treedef = jax.tree.flatten(tree)
    limbs, tops, count = _zeros(tuple((jnp.shape(x), _layout(x)) for x in leaves))()
    return ExactSum(treedef.unflatten(limbs), treedef.unflatten(tops), count)


def add(state: ExactSum, tree: Tree, fresh: jax.Array | bool = False) -> ExactSum:
    """Adds one tree of arrays.

    Args:
      state: The sum so far.
      tree: float32 arrays like those of `init` (narrower ones are cast, exactly).
      fresh: bool[], True to forget what the sum held before: starting over in used
        memory this way costs nothing, a separate pass of zeros would.

    Returns:
      The new sum. An addend that is not finite, or one too many, leaves it marked:
      `check` says so by name.

    Raises:
      ValueError: A leaf has another shape than its sum, or is no float of at most 32
        bits.
    """
    _refuse_dtypes(tree)
    _refuse_shapes(state.limbs, tree, 0)
    return _add(state, tree, fresh)


@jax.jit
def merge(left: ExactSum, right: ExactSum) -> ExactSum:
    """The sum of both sums' addends, to the bit as if one had received them all.

    ValueError where they are of leaves of different shapes.
    """
    _refuse_shapes(left.limbs, right.limbs, 1)
    tops = jax.tree.map(jnp.maximum, left.tops, right.tops)

    def both(left_limbs, left_top, right_limbs, right_top, top):
        kept = _move(left_limbs, left_top, top)
        return kept + _move(right_limbs, right_top, top)

    limbs = jax.tree.map(both, left.limbs, left.tops, right.limbs, right.tops, tops)
    return ExactSum(limbs, tops, _counted(left.count + right.count))


@jax.jit
def merge_stacked(stack: ExactSum) -> ExactSum:
    """Merges sums along one more leading axis, as that of replicas joined in one array.

    `stack` has limbs [R, 3, *leaf], tops [R, ...] and count [R]. The sum is to the bit
    that of all their addends.
    """
    tops = jax.tree.map(lambda t: jnp.max(t, axis=0), stack.tops)

    def total(limbs, old, top):
        kept = jax.vmap(_move, (0, 0, None))(limbs, old, top)
        return jnp.sum(kept, axis=0, dtype=jnp.int32)  # in 64-bit mode, too

    limbs = jax.tree.map(total, stack.limbs, stack.tops, tops)
    return ExactSum(limbs, tops, _counted(jnp.sum(stack.count, dtype=jnp.int32)))


def value(state: ExactSum) -> Tree:
    """The sum, rounded once to a tree of float32; raises as `check` does, but in jit.

    Under jit, where nothing can be raised, rows that received an addend that was not
    finite are NaN, and everything is after too many addends.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
        check(state)
    return _value(state)


def check(state: ExactSum) -> None:
    """Raises where a sum has no value. On the host: waits for the sum.

    ValueError on more than `MAX_ADDENDS` addends, or one with a NaN or an infinity, of
    which it names the leaf.
    """
    count, highest = jax.device_get(_marks(state))
    if count > MAX_ADDENDS:
        raise ValueError(
            f"an exact sum received more than {MAX_ADDENDS} addends, from where on it "
            "might overflow; read its value earlier and begin another"
        )
    broken = [
        jax.tree_util.keystr(path)
        for path, top in jax.tree.leaves_with_path(highest)
        if top == NOT_FINITE_TOP
    ]
    if broken:
        raise ValueError(
            f"leaf {', '.join(broken)}: an addend holds a NaN or an infinity, of which "
            "no order-free sum exists; find the gradient that is not finite"
        )


@jax.jit
def _add(state, tree, fresh):
    def float_bits(x):
        return lax.bitcast_convert_type(jnp.asarray(x).astype(jnp.float32), jnp.int32)

    def risen(top, bits):
        return jnp.maximum(jnp.where(fresh, jnp.int8(LOWEST_TOP), top), _top(bits))

    def total(limbs, old, top, bits):
        return _move(limbs, old, top, fresh) + _digits(bits, _steps(top))

    bits = jax.tree.map(float_bits, tree)
    tops = jax.tree.map(risen, state.tops, bits)
    limbs = jax.tree.map(total, state.limbs, state.tops, tops, bits)
    return ExactSum(limbs, tops, _counted(jnp.where(fresh, 0, state.count) + 1))


@jax.jit
def _value(state):
    full = state.count > MAX_ADDENDS

    def read(limbs, top):
        bits = jnp.where(full | (top == NOT_FINITE_TOP), NAN_BITS, _read(limbs, top))
        return lax.bitcast_convert_type(bits, jnp.float32)

    return jax.tree.map(read, state.limbs, state.tops)


@jax.jit
def _marks(state):
    highest = jax.tree.map(lambda t: jnp.max(t, initial=LOWEST_TOP), state.tops)
    return state.count, highest


def _top(bits):
    """The lowest top that holds a row, int8[*rows, 1], from the bits of its floats."""
    # Not a maximum of floats: between devices that loses a NaN (tried, on CPUs). In
    # eight bits the pass over a leaf takes a quarter of the time.
    exponent = ((bits >> 23) & 0xFF).astype(jnp.uint8)
    if exponent.ndim:
        exponent = jnp.max(exponent, axis=-1, keepdims=True, initial=0)
    exponent = exponent.astype(jnp.int32)  # |x| < 2^(exponent - 126)
    top = -((126 + STEP_BITS - 1 - exponent) // STEP_BITS)
    top = jnp.maximum(top, LOWEST_TOP)
    return jnp.where(exponent == 255, NOT_FINITE_TOP, top).astype(jnp.int8)


def _steps(top):
    """The step that each slot of a row holds, int32[3, *rows, 1]."""
    top = top.astype(jnp.int32)[None]
    slot = lax.broadcasted_iota(jnp.int32, (SLOTS, *(1,) * (top.ndim - 1)), 0)
    return top - (top - slot) % SLOTS


def _move(limbs, old, new, fresh=False):
    """Clears the slots whose step falls out when the top rises."""
    return jnp.where((_steps(old) == _steps(new)) & ~jnp.asarray(fresh), limbs, 0)


def _digits(bits, step):
    """d_j of float32 bits[*leaf] at the steps j = step[3, *rows, 1]."""
    bits = bits[None]
    exponent = (bits >> 23) & 0xFF
    fraction = bits & 0x7FFFFF
    mantissa = jnp.where(exponent > 0, fraction | 0x800000, fraction)
    # |x| = mantissa 2^(exponent - 150). Wanted are the 19 bits of step j and the one
    # below them, shifted to the top of the word, so that what is above them falls off.
    shift = jnp.maximum(exponent, 1) - (150 - 13) - STEP_BITS * step
    word = jnp.where(shift < 32, mantissa << jnp.clip(shift, 0, 31), 0)
    word = lax.shift_right_logical(word, jnp.clip(-shift, 0, 31))
    # The uppermost of the 19 has been rounded up into step j + 1: read as a sign, it
    # is taken off again.
    digit = ((word >> 12) + 1) >> 1
    sign = bits >> 31
    return (digit ^ sign) - sign


def _read(limbs, top):
    """The float32 bits nearest to the sum that three slots hold."""
    top = top.astype(jnp.int32)

    def step(back):
        slot = (top - back) % SLOTS
        return jnp.where(slot == 0, limbs[0], jnp.where(slot == 1, limbs[1], limbs[2]))

    high, middle, low = _carry(step(0), step(1), step(2))
    sign = high >> 31
    high, middle, low = _carry(*((x ^ sign) - sign for x in (high, middle, low)))
    for _ in range(SLOTS - 1):  # now the leading bit comes into `high`
        empty = high == 0
        high, middle = jnp.where(empty, middle, high), jnp.where(empty, low, middle)
        low, top = jnp.where(empty, 0, low), jnp.where(empty, top - 1, top)
    # 31 bits from the leading one on; the last one also stands for all below it.
    rest = (middle << 12) | (low >> 7) | _sticky(low, 7)
    spare = jnp.maximum(lax.clz(high) - 1, 0)
    word = (high << spare) | (rest >> (31 - spare)) | _sticky(rest, 31 - spare)
    exponent = STEP_BITS * top - spare + 30 + 127
    return jnp.where(high == 0, 0, _round(word, exponent) | (sign << 31))


def _carry(high, middle, low):
    """Limbs of the same sum with `middle` and `low` in [0, 2^19)."""
    mask = 2**STEP_BITS - 1
    middle = middle + (low >> STEP_BITS)
    return high + (middle >> STEP_BITS), middle & mask, low & mask


def _sticky(word, bits):
    """1 where any of the lowest bits is set."""
    return ((word & ((1 << bits) - 1)) != 0).astype(jnp.int32)


def _round(word, exponent):
    """Float32 bits of word 2^(exponent - 157), 2^30 <= word < 2^31."""
    # A subnormal has fewer bits; never none, for addends are multiples of 2^-149.
    drop = 7 + jnp.clip(1 - exponent, 0, 23)
    mantissa = word >> drop
    rest, half = word & ((1 << drop) - 1), 1 << (drop - 1)
    up = (rest > half) | ((rest == half) & (mantissa & 1 == 1))
    # The leading bit of the mantissa, and its carry, count up the exponent.
    bits = ((jnp.clip(exponent, 1, 254) - 1) << 23) + mantissa + up.astype(jnp.int32)
    return jnp.where(exponent > 254, INFINITY_BITS, bits)


def _counted(count):
    """Stops counting where the exact number no longer matters, before it wraps."""
    return jnp.minimum(count, MAX_ADDENDS + 1)


def _refuse_dtypes(tree):
    for path, leaf in jax.tree.leaves_with_path(tree):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits > 32:
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} is {dtype}; exact sums are of "
                "floats of at most 32 bits"
            )


def _refuse_shapes(limbs, tree, lead):
    """Another shape might broadcast. `lead` axes come before those of a leaf."""

    def refuse(path, limbs, leaf):
        expected, shape = limbs.shape[1:], jnp.shape(leaf)[lead:]
        if shape != expected:
            raise ValueError(
                f"leaf {jax.tree_util.keystr(path)} has shape {shape}, its sum has "
                f"{expected}; sums take trees of the shapes they were made for"
            )

    jax.tree.map_with_path(refuse, limbs, tree)


def _layout(leaf):
    """Where a leaf lies, if that is known and tells where its sum should."""
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
        return None
    sharding = leaf.sharding
    named = isinstance(sharding, NamedSharding)
    return sharding if named or len(sharding.device_set) == 1 else None


def _layouts(shape, sharding):
    """Shardings of limbs and tops of a leaf: slots and ends of rows are not split."""
    if not isinstance(sharding, NamedSharding):
        return sharding, sharding
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    limbs, tops = PartitionSpec(None, *spec), PartitionSpec(*spec[:-1], None)
    if not shape:
        tops = PartitionSpec()
    kind = sharding.memory_kind
    return tuple(
        NamedSharding(sharding.mesh, s, memory_kind=kind) for s in (limbs, tops)
    )


@functools.lru_cache(maxsize=256)
def _zeros(specs):
    def zeros():
        limbs = [jnp.zeros((SLOTS, *shape), jnp.int32) for shape, _ in specs]
        tops = [
            jnp.full((*shape[:-1], *(1,) * bool(shape)), LOWEST_TOP, jnp.int8)
            for shape, _ in specs
        ]
        return limbs, tops, jnp.zeros((), jnp.int32)

    layouts = [_layouts(shape, sharding) for shape, sharding in specs]
    named = [s for _, s in specs if isinstance(s, NamedSharding)]
    count = NamedSharding(named[-1].mesh, PartitionSpec()) if named else None
    shardings = [limbs for limbs, _ in layouts], [tops for _, tops in layouts], count
    return jax.jit(zeros, out_shardings=shardings)
