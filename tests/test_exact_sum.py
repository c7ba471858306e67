"""Exact sums: bits of the multiset alone, and close to what rational numbers say."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from thundersync_jax.ops import exact_sum

SHAPES = {"scalar": (), "one": (1,), "row": (7,), "matrix": (3, 5), "cube": (2, 3, 4)}
EMPTY = {"no_rows": (0, 4), "empty_rows": (3, 0), "none": (0,)}
TINY = 2.0**-149  # the smallest subnormal
LARGEST = np.float32(np.finfo(np.float32).max)


def bits(tree):
    """All bits of a state or a value: -0 is not 0, and NaN is itself."""
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))


def total(addends, state=None):
    state = exact_sum.init(addends[0]) if state is None else state
    for addend in addends:
        state = exact_sum.add(state, addend)
    return state


def row_sum(addends):
    """The value of a sum of rows [n, width]."""
    return np.asarray(exact_sum.value(total(list(np.asarray(addends, np.float32)))))


def merged(states, rng):
    """Merges in a random tree."""
    states = list(states)
    while len(states) > 1:
        left, right = (states.pop(rng.integers(len(states))) for _ in range(2))
        states.append(exact_sum.merge(left, right))
    return states[0]


def spread(rng, shape, octaves=60):
    """Normal numbers times powers of two; some are zero, some cancel others."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-octaves, octaves + 1, shape)
    return np.where(rng.random(shape) < 0.1, 0.0, x).astype(np.float32)


def trees(rng, n, octaves=60, shapes=SHAPES | EMPTY):
    addends = [
        {k: spread(rng, s, octaves) for k, s in shapes.items()} for _ in range(n)
    ]
    addends[-1] = jax.tree.map(np.negative, addends[0])
    return addends


@functools.partial(jax.jit, static_argnums=1)
def shuffled_states(addends, orders, key):
    """Limbs, tops and count of the same addends [n, ...] in many random orders."""
    like = jax.tree.map(lambda x: x[0], addends)

    def step(state, tree):
        return exact_sum.add(state, tree), None

    def one(key):
        order = jax.random.permutation(key, jax.tree.leaves(addends)[0].shape[0])
        moved = jax.tree.map(lambda x: x[order], addends)
        state, _ = jax.lax.scan(step, exact_sum.init(like), moved)
        return state, exact_sum.value(state)

    return jax.vmap(one)(jax.random.split(key, orders))


def test_a_thousand_orders_give_one_state():
    rng = np.random.default_rng(0)
    addends = jax.tree.map(lambda *x: np.stack(x), *trees(rng, 24))
    states, values = shuffled_states(addends, 1000, jax.random.key(0))
    for leaf in map(np.asarray, jax.tree.leaves((states, values))):
        assert len({order.tobytes() for order in leaf}) == 1
    expected = total([jax.tree.map(lambda x, i=i: x[i], addends) for i in range(24)])
    assert bits(jax.tree.map(lambda x: x[0], states)) == bits(expected)
    assert bits(jax.tree.map(lambda x: x[0], values)) == bits(exact_sum.value(expected))


@pytest.mark.parametrize("octaves", [0, 10, 60, 120])
def test_random_merges_of_partial_sums_give_the_bits_of_one_sum(octaves):
    rng = np.random.default_rng(octaves)
    addends = trees(rng, 20, octaves)
    expected = bits(total(addends))
    for _ in range(25):
        parts = [[] for _ in range(rng.integers(1, 8))]
        for i in rng.permutation(len(addends)):
            parts[rng.integers(len(parts))].append(addends[i])
        states = [total(part, exact_sum.init(addends[0])) for part in parts]
        assert bits(merged(states, rng)) == expected
        stack = jax.tree.map(lambda *x: jnp.stack(x), *states)
        assert bits(exact_sum.merge_stacked(stack)) == expected


@pytest.mark.parametrize("rise", [1, 5, 18, 19, 20, 37, 38, 57, 76, 200])
def test_the_range_may_grow_in_the_middle(rise):
    """First, last or between, and by one step or by more than there are slots."""
    rng = np.random.default_rng(rise)
    small = np.float32(rng.standard_normal((9, 4)) * 2.0**-80)
    large = np.float32(rng.standard_normal((2, 4)) * 2.0 ** (rise - 80))
    addends = np.concatenate([large, small])
    expected = bits(total(list(addends)))
    for at in range(10):
        parts = small[:at], large, small[at:]
        assert bits(total(list(np.concatenate(parts)))) == expected
        assert bits(total(list(np.concatenate(parts[::-1])))) == expected


def nearest(exact):
    """The float32 nearest to a fraction, by trying its neighbours."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(s * np.inf)) for s in (-1, 1)]
    return min(
        (x for x in (guess, *near) if np.isfinite(x)),
        key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint32)) & 1),
    )


@pytest.mark.parametrize("octaves", [0, 3, 20, 60, 120])
@pytest.mark.parametrize("n", [1, 2, 8, 50])
def test_error_against_rational_numbers(n, octaves):
    rng = np.random.default_rng([n, octaves])
    addends = spread(rng, (n, 12, 6), octaves)
    addends[:, :6] *= np.float32(2.0**-4)  # other places on the grid
    got = row_sum(addends)
    for r, row in enumerate(np.moveaxis(addends, 1, 0)):
        bound = n * Fraction(float(np.abs(row).max())) / 2**38
        for entry, column in zip(got[r], row.T, strict=True):
            exact = sum(map(Fraction, column.tolist()))
            half = Fraction(float(np.spacing(abs(entry)))) / 2
            assert abs(Fraction(float(entry)) - exact) <= bound + half


@pytest.mark.parametrize("bottom", [-149, -126, -113, -96, 90])
def test_addends_within_the_grid_are_summed_and_rounded_exactly(bottom):
    """Random bits within 39 binary places, so that nothing is cut: the value is the
    float32 nearest to the rational sum, subnormals and ties included."""
    rng = np.random.default_rng(bottom + 200)
    width = 30 if bottom > 0 else 37
    top = -(-(bottom + width + 1 - 18) // 19)  # where the grid may begin
    bottom = max(bottom, 19 * (top - 2), -149)
    mantissas = rng.integers(-(2**20), 2**20, (11, 200))
    shifts = rng.integers(0, width - 20, (11, 200))
    addends = np.ldexp(mantissas.astype(np.float64), shifts + bottom)
    ties = [[2**24, 1], [2**24 + 2, 1], [-(2**24), -1], [2**25, 2], [2**25, 3]]
    for column, tie in enumerate(ties):
        addends[:, column] = 0
        addends[:2, column] = np.ldexp(np.float64(tie), bottom)
    assert (addends.astype(np.float32) == addends).all()
    got = row_sum(addends.astype(np.float32))
    for entry, column in zip(got, addends.T, strict=True):
        assert entry == nearest(sum(map(Fraction, column.tolist())))


@pytest.mark.parametrize("n", [8, 64, 1024])
def test_closer_than_plain_sums(n):
    rng = np.random.default_rng(n)
    addends = rng.standard_normal((n, 20, 1000)).astype(np.float32)
    exact = np.sum(addends.astype(np.float64), axis=0)
    plain = functools.reduce(np.add, addends)

    def relative(sums):
        return np.quantile(np.abs(sums - exact) / np.abs(exact), (0.5, 0.999))

    assert (relative(row_sum(addends)) < relative(plain)).all()


def test_as_many_addends_as_promised_and_no_more():
    """The largest digits there are, all of one sign, in all three slots."""
    assert exact_sum.MAX_ADDENDS >= 4096
    # Odd steps are all 2^18 once rounded: the largest that a slot ever receives.
    x = np.float32([2.0**18 - 2.0**-6, -(2.0**17) - 0.5, 2.0**-1 + 2.0**-20, 0.75])
    state = exact_sum.init(x)
    many = jax.jit(
        lambda s: jax.lax.fori_loop(
            0, exact_sum.MAX_ADDENDS, lambda _, s: exact_sum.add(s, x), s
        )
    )
    state = many(state)
    expected = [
        nearest(exact_sum.MAX_ADDENDS * Fraction(value)) for value in x.tolist()
    ]
    np.testing.assert_array_equal(exact_sum.value(state), np.float32(expected))
    state = exact_sum.add(state, x)
    with pytest.raises(ValueError, match="more than 8191 addends"):
        exact_sum.value(state)
    assert np.isnan(jax.jit(exact_sum.value)(state)).all()
    # Merging adds the counts, however often, and does not wrap round to a small one.
    half = exact_sum.ExactSum(state.limbs, state.tops, jnp.int32(4096))
    for _ in range(40):
        half = exact_sum.merge(half, half)
        with pytest.raises(ValueError, match="more than 8191 addends"):
            exact_sum.check(half)
    stack = jax.tree.map(lambda x: jnp.stack([x] * 3), total([x] * 3000))
    with pytest.raises(ValueError, match="more than 8191 addends"):
        exact_sum.check(exact_sum.merge_stacked(stack))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_the_leafs_name(bad):
    rng = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        addends = trees(rng, 4)
        where = tuple(rng.integers(s) for s in shape)
        wrong = dict(addends[1], **{name: np.copy(addends[1][name])})
        wrong[name][where] = bad
        for order in ([0, 1, 2, 3], [1, 0, 2, 3], [0, 2, 3, 1]):
            state = total([wrong if i == 1 else addends[i] for i in order])
            both = exact_sum.merge(total([addends[0]]), state)
            for marked in (state, both):
                with pytest.raises(ValueError, match=rf"leaf \['{name}'\]: an addend"):
                    exact_sum.check(marked)
                with pytest.raises(ValueError, match="NaN or an infinity"):
                    exact_sum.value(marked)
            seen = jax.jit(exact_sum.value)(state)
            row = seen[name][where[:-1]]
            assert np.isnan(row).all()
            assert sum(np.isnan(x).sum() for x in seen.values()) == row.size
            exact_sum.check(exact_sum.add(state, addends[2], fresh=True))


def test_zeros_subnormals_and_the_ends_of_float32():
    assert bits(row_sum([[-0.0, 0.0]] * 3)) == bits(np.float32([0.0, 0.0]))
    assert bits(row_sum([[3.0, -TINY], [-3.0, TINY]])) == bits(np.float32([0, 0]))
    subnormal = np.float32([[TINY, 2.0**-127, -(2.0**-126)], [TINY, 2.0**-127, TINY]])
    expected = np.float64(subnormal).sum(axis=0).astype(np.float32)
    assert bits(row_sum(subnormal)) == bits(expected)
    # The smallest there is beside the largest in another row, and beside it.
    assert bits(row_sum([[[TINY], [LARGEST]]])) == bits(np.float32([[TINY], [LARGEST]]))
    assert bits(row_sum([[TINY, LARGEST]])) == bits(np.float32([0.0, LARGEST]))
    power = np.float32(2.0**127)
    assert row_sum([[power], [power]]) == np.inf
    assert row_sum([[-power]] * 4096) == -np.inf
    assert row_sum([[power]] * 3 + [[-power]] * 2) == power
    assert row_sum([[LARGEST], [2.0**103], [-(2.0**80)]]) == LARGEST
    assert row_sum([[LARGEST], [2.0**103]]) == np.inf  # a tie, away from the odd


def test_small_addends_add_up_beside_a_large_one():
    """Where plain sums would lose each of them."""
    addends = np.float32([[2.0**20]] + [[2.0**-10]] * 4000)
    assert row_sum(addends) == np.float32(2.0**20 + 4000 * 2.0**-10)
    assert row_sum(np.float32([[1e30], [3.0], [-1e30]])) == 0  # below 2^-57
    assert row_sum(np.float32([[1e8], [3.0], [-1e8]])) == 3


def test_the_last_bit_of_the_grid_decides_a_tie():
    """2^17 fills its range: 2^-7 is half a unit in the last place, 2^-38 the grid."""
    last = np.exp2(np.arange(-38, -8))
    tie = np.broadcast_to([[2.0**17], [2.0**-7]], (2, 30))
    above, below = np.nextafter(np.float32(2.0**17), np.float32([np.inf, 0]))
    for sign in (1, -1):
        up = row_sum(sign * np.concatenate([tie, [last]]))
        down = row_sum(sign * np.concatenate([tie, [-last]]))
        np.testing.assert_array_equal(up, sign * np.full(30, above))
        np.testing.assert_array_equal(down, sign * np.full(30, 2.0**17))
    half = [[2.0**17] * 30, [-(2.0**-8)] * 30]
    np.testing.assert_array_equal(row_sum([*half, -last]), np.full(30, below))


def test_rounding_to_the_grid_has_no_drift():
    """Cut off instead of rounded, 4,000 addends would lose 2,000 units."""
    unit = 2.0**-38  # beside 1/2
    x = unit * np.random.default_rng(0).uniform(0, 10, (4000, 64))
    x = x.astype(np.float32)
    x[:, 0] = 0.5
    error = row_sum(x) - np.float64(x).sum(axis=0)
    assert 5 * unit < abs(error).max() < 200 * unit


def mesh():
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)


SPECS = {
    "whole": PartitionSpec(),
    "rows": PartitionSpec("fsdp"),
    "last": PartitionSpec(None, "tensor"),
    "both": PartitionSpec("fsdp", "tensor"),
    "crossed": PartitionSpec("tensor", "fsdp"),
    "joint": PartitionSpec(None, ("fsdp", "tensor")),
}


def in_place(state):
    layout = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(exact_sum.add, donate_argnums=0, out_shardings=layout)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_splitting_over_devices_changes_no_bit_and_no_place(spec):
    rng = np.random.default_rng(1)
    addends = [
        {"w": spread(rng, (8, 16), 40), "b": spread(rng, (), 9)} for _ in "abcdef"
    ]
    addends[3]["w"][2, 5] = 2.0**100
    layout = {
        "w": NamedSharding(mesh(), spec),
        "b": NamedSharding(mesh(), PartitionSpec()),
    }
    placed = [jax.device_put(x, layout) for x in addends]
    state = exact_sum.init(placed[0])
    for limb, leaf in zip(state.limbs.values(), placed[0].values(), strict=True):
        assert limb.sharding.shard_shape(limb.shape)[1:] == leaf.sharding.shard_shape(
            leaf.shape
        )
    places, add = pointers(state), in_place(state)
    for addend in placed:
        state = add(state, addend)
        assert pointers(state) == places
    assert bits(state) == bits(total(addends))
    assert bits(exact_sum.value(state)) == bits(exact_sum.value(total(addends)))
    halves = total(placed[:2]), total(placed[2:])
    assert bits(exact_sum.merge(*halves)) == bits(state)


@pytest.mark.parametrize("column", range(16))
def test_a_nan_in_any_shard_is_noticed(column):
    x = np.ones((8, 16), np.float32)
    x[3, column] = np.nan
    placed = jax.device_put(x, NamedSharding(mesh(), SPECS["joint"]))
    with pytest.raises(ValueError, match="NaN"):
        exact_sum.value(total([placed]))


def pointers(state):
    large = jax.tree.leaves(state.limbs) + jax.tree.leaves(state.tops)
    return [s.data.unsafe_buffer_pointer() for x in large for s in x.addressable_shards]


def test_updated_in_place_with_little_beside_it():
    x = jnp.ones((512, 256), jnp.float32)
    state = exact_sum.init({"w": x})
    places, add = pointers(state), in_place(state)
    for fresh in (False, True, False):
        state = add(state, {"w": x}, fresh)
        assert pointers(state) == places
    assert bits(state) == bits(total([{"w": x}] * 2))
    memory = add.lower(state, {"w": x}, False).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * x.nbytes
    assert memory.temp_size_in_bytes < x.nbytes / 2


def test_memory_is_three_words_and_a_byte_per_row():
    state = exact_sum.init(
        {"w": jnp.ones((64, 100), jnp.float32), "b": jnp.ones((), jnp.float32)}
    )
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    assert held == 12 * (6400 + 1) + 64 + 1 + 4


def test_jit_changes_no_bit():
    addends = trees(np.random.default_rng(5), 3, 60, {"w": (3, 5)})
    compiled = total(addends)
    with jax.disable_jit():
        plain = total(addends)
        both = exact_sum.merge(plain, plain)
        value = exact_sum.value(plain)
    assert bits(plain) == bits(compiled)
    assert bits(both) == bits(exact_sum.merge(compiled, compiled))
    assert bits(value) == bits(exact_sum.value(compiled))
    assert bits(value) == bits(jax.jit(exact_sum.value)(compiled))


def test_starting_afresh_forgets_range_sums_and_count():
    rng = np.random.default_rng(6)
    used, addend = total(trees(rng, 5, 120)), trees(rng, 2, 3)[0]
    assert bits(exact_sum.add(used, addend, fresh=np.bool_(True))) == bits(
        total([addend])
    )


def test_narrower_floats_are_cast_exactly():
    rng = np.random.default_rng(7)
    wide = jnp.asarray(rng.standard_normal((4, 3, 5)), jnp.bfloat16)
    expected = row_sum(wide.astype(jnp.float32))
    got = exact_sum.value(total(list(wide)))
    assert got.dtype == jnp.float32
    assert bits(got) == bits(expected)


def test_trees_that_do_not_fit_are_refused():
    state = exact_sum.init({"w": jnp.ones((2, 3), jnp.float32)})
    with pytest.raises(ValueError, match=r"leaf \['w'\] has shape \(3,\)"):
        exact_sum.add(state, {"w": jnp.ones(3, jnp.float32)})
    with pytest.raises(ValueError, match=r"leaf \['w'\] has shape \(1, 3\)"):
        exact_sum.merge(state, exact_sum.init({"w": jnp.ones((1, 3), jnp.float32)}))
    for wrong in (np.ones((2, 3), np.int32), np.ones((2, 3), np.float64)):
        with pytest.raises(ValueError, match=r"leaf \['w'\] is (int32|float64)"):
            exact_sum.init({"w": wrong})
        with pytest.raises(ValueError, match=r"leaf \['w'\] is (int32|float64)"):
            exact_sum.add(state, {"w": wrong})
