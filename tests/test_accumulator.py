"""Sums add up, in place, in float32, and forget what they are told to forget."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.stream import accumulator

PARAMS = {
    "w": jnp.zeros((64, 128), jnp.float32),
    "b": [jnp.zeros((), jnp.float32), jnp.zeros(5, jnp.bfloat16)],
}


def pointers(tree):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def constant(value):
    return jax.tree.map(lambda x: jnp.full_like(x, value), PARAMS)


def assert_all(tree, value):
    for leaf in jax.tree.leaves(tree):
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), value)


def group_call(channels, parts):
    """Arguments of `add_group` that touch every sum."""
    weights = np.arange(1.0, 1 + channels * parts).reshape(channels, parts)
    return tuple(constant(n + 1.0) for n in range(parts)), weights


@pytest.mark.parametrize(("channels", "parts"), [(1, 1), (2, 1), (3, 2)])
def test_sums_are_updated_in_place(channels, parts):
    """One buffer from the first call to the last, and no temporary beside it."""
    batch, group = accumulator.init(PARAMS), accumulator.init(PARAMS, channels)
    gradients, weights = group_call(channels, parts)
    at = pointers(batch), pointers(group)
    for fresh in (True, False, False):
        group = accumulator.add_group(group, np.bool_(fresh), gradients, weights)
        batch = accumulator.add_direct(batch, gradients[0])
        batch = accumulator.close_group(batch, group, weights[:, 0])
        assert (pointers(batch), pointers(group)) == at
    largest = 64 * 128 * 4
    for function, arguments in (
        (
            accumulator._add_group,
            (group, np.bool_(False), gradients, weights, weights[:, 0]),
        ),
        (accumulator._add_direct, (batch, gradients[0])),
        (accumulator._close_group, (batch, group, weights[:, 0])),
    ):
        program = accumulator.compiled(function, arguments[0])
        memory = program.lower(*arguments).compile().memory_analysis()
        assert memory.temp_size_in_bytes < largest
        assert memory.alias_size_in_bytes >= largest


@pytest.mark.parametrize(("channels", "parts"), [(1, 1), (2, 1), (3, 2)])
def test_every_sum_takes_its_own_share_of_every_gradient(channels, parts):
    gradients, weights = group_call(channels, parts)
    group = accumulator.init(PARAMS, channels)
    for fresh in (True, False):
        group = accumulator.add_group(group, np.bool_(fresh), gradients, weights)
    expected = 2 * weights @ np.arange(1.0, parts + 1)
    for s in range(channels):
        assert_all(jax.tree.map(lambda x, s=s: x[s], group), expected[s])
    coefficients = np.arange(2.0, 2 + channels)
    batch = accumulator.add_direct(accumulator.init(PARAMS), constant(0.5))
    batch = accumulator.close_group(batch, group, coefficients)
    assert_all(batch, 0.5 + coefficients @ expected)
    gradient, norm = accumulator.finalize(batch, 4.0, PARAMS)
    assert_all(gradient, (0.5 + coefficients @ expected) / 4)
    size = sum(x.size for x in jax.tree.leaves(PARAMS))
    entry = (0.5 + coefficients @ expected) / 4
    assert float(norm) == pytest.approx(entry * size**0.5, rel=1e-5)


def test_sums_so_far_can_change_their_unit():
    gradients, weights = group_call(2, 1)
    group = accumulator.init(PARAMS, 2)
    for fresh in (True, False):
        factors = np.array([1.0, 0.5])
        group = accumulator.add_group(
            group, np.bool_(fresh), gradients, weights, factors
        )
    for s, expected in enumerate((2.0, 3.0)):
        assert_all(jax.tree.map(lambda x, s=s: x[s], group), expected)


@pytest.mark.parametrize("left", [np.nan, np.inf, 1e38])
def test_fresh_sums_forget_whatever_was_there(left):
    gradients, weights = group_call(2, 1)
    group = accumulator.init(PARAMS, 2)
    group = accumulator.add_group(
        group, np.bool_(True), (constant(left),), np.ones((2, 1))
    )
    group = accumulator.add_group(group, np.bool_(True), gradients, weights)
    batch = accumulator.close_group(accumulator.init(PARAMS), group, np.ones(2))
    assert_all(batch, 3.0)


def test_sums_are_float32_or_wider_whatever_the_parameters():
    """bfloat16 sums of ones stop at 256 (areal-project/AReaL#1634)."""
    batch, group = accumulator.init(PARAMS), accumulator.init(PARAMS, 2)
    assert {x.dtype for x in jax.tree.leaves((batch, group))} == {jnp.dtype("float32")}
    ones, weights = constant(1.0), np.ones((2, 1))
    for step in range(300):
        batch = accumulator.add_direct(batch, ones)
        group = accumulator.add_group(group, np.bool_(step == 0), (ones,), weights)
    assert_all(batch, 300.0)
    assert_all(group, 300.0)
    with jax.enable_x64(True):
        wide = accumulator.init({"w": jnp.zeros(2, jnp.float64)})
        assert wide["w"].dtype == jnp.float64


def test_gradient_of_no_calls_is_zero():
    gradient, norm = accumulator.finalize(accumulator.init(PARAMS), 1.0, PARAMS)
    assert_all(gradient, 0.0)
    assert float(norm) == 0.0


@pytest.mark.parametrize("unit", [0.0, 1e-35, 1e-20, 1.0, 1e20, 1e37])
def test_norm_is_right_for_gradients_whose_squares_are_not_float32(unit):
    batch = {"w": jnp.float32([[3.0, 0.0]]) * unit, "b": [jnp.float32([4.0]) * unit]}
    like = {"w": jnp.zeros(2), "b": [jnp.zeros((), jnp.float32)]}
    _, norm = accumulator.finalize(batch, 1.0, like)
    assert float(norm) == pytest.approx(5 * unit, rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_norm_of_a_gradient_that_is_not_finite_is_not_finite(value):
    batch = {"w": jnp.float32([[3.0, value, 1.0]])}
    _, norm = accumulator.finalize(batch, 1.0, {"w": jnp.zeros(3)})
    assert not np.isfinite(norm)


def test_bytes_per_device_are_those_of_the_sums():
    sums = accumulator.init(PARAMS)
    total = sum(x.nbytes for x in jax.tree.leaves(sums))
    assert accumulator.bytes_per_device(PARAMS) == total


def test_one_program_per_shape():
    """Another denominator, weight or `fresh` is no other program."""
    gradients, weights = group_call(2, 1)
    group, batch = accumulator.init(PARAMS, 2), accumulator.init(PARAMS)
    sizes = []
    for number in (1.0, 2.0, 3.0):
        fresh = np.bool_(number == 1.0)
        group = accumulator.add_group(
            group, fresh, gradients, number * weights, np.full(2, number)
        )
        batch = accumulator.close_group(batch, group, number * weights[:, 0])
        accumulator.finalize(batch, number, PARAMS)
        programs = (
            accumulator.compiled(accumulator._add_group, group),
            accumulator.compiled(accumulator._close_group, batch),
        )
        sizes.append([f._cache_size() for f in programs])
    assert sizes[0] == sizes[1] == sizes[2]
