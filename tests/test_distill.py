"""Divergences from a teacher: values, gradients, tails, and what must reach neither."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.ops import distill, losses

pytestmark = pytest.mark.usefixtures("quick_programs")

# A few roundings of float32 at magnitude 1.
FLOAT32 = 2e-6
# The same of values around 5, and of what one minus a sum leaves.
LARGER = 1e-5
REMAINDER = 5e-7
NAMES = tuple(distill.DIVERGENCES)


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


def reference_kl(p, q):
    return np.sum(np.where(p > 0, p * (np.log(p) - np.log(q)), 0))


def reference(name, p, q):
    """The definitions, in float64."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if name == "reverse_kl":
            return reference_kl(p, q)
        if name == "forward_kl":
            return reference_kl(q, p)
        middle = (p + q) / 2
        return (reference_kl(p, middle) + reference_kl(q, middle)) / 2


def softmax(x):
    powers = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return powers / np.sum(powers, axis=-1, keepdims=True)


def draw(*shape, seed=0):
    """Logits of a student and of a teacher, in float64."""
    return 2 * np.random.default_rng(seed).normal(size=(2, *shape))


def differences(function, x, step=1e-6):
    """Gradient by difference quotients, in float64."""
    moves = step * np.eye(x.size).reshape(x.size, *x.shape)
    slopes = [(function(x + one) - function(x - one)) / (2 * step) for one in moves]
    return np.reshape(slopes, x.shape)


def of_logits(name, teacher_logprob):
    """A divergence as a function of the student's logits."""

    def function(logits):
        found = distill.logprobs(logits, len(teacher_logprob), 1.0)
        return distill.DIVERGENCES[name](found, teacher_logprob)

    return function


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_equal_the_definitions(name):
    student, teacher = draw(9)
    q = softmax(teacher)
    function = of_logits(name, jnp.float32(np.log(q)))
    value, gradient = jax.value_and_grad(function)(jnp.float32(student))
    np.testing.assert_allclose(value, reference(name, softmax(student), q), FLOAT32)
    expected = differences(lambda x: reference(name, softmax(x), q), student)
    np.testing.assert_allclose(gradient, expected, atol=FLOAT32)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_zero_at_the_teacher_and_the_teacher_has_none(name):
    student, teacher = jnp.float32(draw(9))
    logprob_v = jax.nn.log_softmax(teacher)
    value, gradient = jax.value_and_grad(of_logits(name, logprob_v))(teacher)
    assert abs(value) < FLOAT32
    np.testing.assert_allclose(gradient, np.zeros(9), atol=FLOAT32)
    divergence = distill.DIVERGENCES[name]
    of_teacher = jax.grad(divergence, argnums=1)(jax.nn.log_softmax(student), logprob_v)
    np.testing.assert_array_equal(of_teacher, np.zeros(9))


# What student and teacher give any probability, and which divergences are finite.
SUPPORTS = {
    "both lack one": ([1, 1, 0], [1, 1, 0], dict.fromkeys(NAMES, True)),
    "the student lacks one": (
        [1, 1, 0],
        [1, 1, 1],
        {"reverse_kl": True, "forward_kl": False, "jensen_shannon": True},
    ),
    "the teacher lacks one": (
        [1, 1, 1],
        [1, 1, 0],
        {"reverse_kl": False, "forward_kl": True, "jensen_shannon": True},
    ),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", SUPPORTS)
def test_probabilities_of_zero(case, name):
    """0 log 0 is 0, in value and gradient; what is infinite is infinity, not NaN."""
    *masks, finite = SUPPORTS[case]
    with np.errstate(divide="ignore"):
        student, teacher = draw(3) + np.log(np.float64(masks))
    q = softmax(teacher)
    with np.errstate(divide="ignore"):
        function = of_logits(name, jnp.float32(np.log(q)))
    value, gradient = jax.value_and_grad(function)(jnp.float32(student))
    expected = reference(name, softmax(student), q)
    np.testing.assert_allclose(value, expected, FLOAT32)
    assert np.isfinite(value) == finite[name]
    if not finite[name]:
        return
    slopes = differences(lambda x: reference(name, softmax(x), q), student)
    np.testing.assert_allclose(gradient, slopes, atol=FLOAT32)


def test_a_probability_that_underflows_is_zero():
    student = jnp.float32([0.0, -200.0])
    value = distill.reverse_kl(student, jnp.float32([0.0, -np.inf]))
    assert value == 0


def test_jensen_shannon_is_bounded_and_symmetric():
    one, other = jnp.float32([0.0, -np.inf]), jnp.float32([-np.inf, 0.0])
    np.testing.assert_allclose(distill.jensen_shannon(one, other), np.log(2), FLOAT32)
    one, other = jax.nn.log_softmax(jnp.float32(draw(9)))
    found = distill.jensen_shannon(one, other), distill.jensen_shannon(other, one)
    np.testing.assert_allclose(*found, FLOAT32)


def coarse(p, ids):
    return np.append(p[ids], np.sum(np.delete(p, ids)))


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_top_k_is_the_divergence_of_the_coarser_distributions(name, size):
    """Never above the whole one, and not the sum that is cut at K."""

    @jax.jit
    def found(student, teacher, ids):
        def function(x):
            both = (distill.top_k_logprobs(one, ids, 9, 1.0) for one in (x, teacher))
            return distill.DIVERGENCES[name](*both)

        return jax.value_and_grad(function)(student)

    for seed in range(20):
        student, teacher = draw(9, seed=seed)
        p, q = softmax(student), softmax(teacher)
        ids = np.argsort(-q)[:size].astype(np.int32)

        def expected(x, ids=ids, q=q):
            return reference(name, coarse(softmax(x), ids), coarse(q, ids))

        value, gradient = found(np.float32(student), np.float32(teacher), ids)
        np.testing.assert_allclose(value, expected(student), atol=LARGER)
        slopes = differences(expected, student)
        np.testing.assert_allclose(gradient, slopes, atol=LARGER)
        whole = reference(name, p, q)
        assert value <= whole + LARGER
        if size == 8:  # one other
            np.testing.assert_allclose(value, whole, atol=LARGER)
    assert size == 8 or abs(value - reference(name, p[ids], q[ids])) > 0.01


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_known_part_leaves_the_tail(size):
    for seed in range(20):
        q = np.sort(softmax(draw(9, seed=seed)[1]))[::-1]
        found = distill.with_tail(jnp.float32(np.log(q[:size])))
        np.testing.assert_allclose(found[:-1], np.log(q[:size]), rtol=FLOAT32)
        np.testing.assert_allclose(np.exp(found[-1]), sum(q[size:]), atol=REMAINDER)


@pytest.mark.parametrize("name", NAMES)
def test_top_k_equals_the_whole_where_the_others_share_one_ratio(name):
    student, teacher = draw(9)
    ids = np.array([4, 0, 7], np.int32)
    rest = np.delete(np.arange(9), ids)
    student[rest] = teacher[rest] - 0.8
    both = [
        distill.top_k_logprobs(jnp.float32(x), ids, 9, 1.0) for x in (student, teacher)
    ]
    value = distill.DIVERGENCES[name](*both)
    expected = reference(name, softmax(student), softmax(teacher))
    np.testing.assert_allclose(value, expected, FLOAT32)


def test_the_tail_does_not_cancel():
    """1 - sum is 0 in float32 here, or a rounding of it."""
    logits = np.array([60.0, 59.0, 20.0, 19.0])
    ids = np.array([0, 1], np.int32)
    found = distill.top_k_logprobs(jnp.float32(logits), ids, 4, 1.0)
    expected = np.log(coarse(softmax(logits), ids))
    np.testing.assert_allclose(found, expected, rtol=FLOAT32)
    assert expected[-1] < -39

    def tail(x):
        return distill.top_k_logprobs(x, ids, 4, 1.0)[-1]

    p = softmax(logits)
    slopes = np.append(-p[:2], p[2:] / np.sum(p[2:]) - p[2:])
    np.testing.assert_allclose(jax.grad(tail)(jnp.float32(logits)), slopes, FLOAT32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("others", [-np.inf, -400.0])
def test_k_entries_may_hold_all_the_mass(others, name):
    """The tail's probability is 0, or underflows, on one side or on both."""
    ids = np.array([0, 2], np.int32)
    bare = jnp.float32([1.0, others, 0.0, others])
    full = jnp.float32([1.0, 0.5, 0.0, 0.2])
    exact = distill.top_k_logprobs(bare, ids, 4, 1.0)
    tail = others + np.log(2) - np.logaddexp(1, 0)
    np.testing.assert_allclose(exact[-1], tail, rtol=FLOAT32)
    floored = distill.with_tail(exact[:-1])
    np.testing.assert_allclose(floored[-1], np.log(2**-23), rtol=FLOAT32)

    for student, teacher_kplus1 in [(bare, exact), (full, floored)]:

        def function(x, teacher_kplus1=teacher_kplus1):
            found = distill.top_k_logprobs(x, ids, 4, 1.0)
            return distill.DIVERGENCES[name](found, teacher_kplus1)

        value, gradient = jax.value_and_grad(function)(student)
        assert np.isfinite(value) and np.all(np.isfinite(gradient))
        q = np.exp(np.float64(teacher_kplus1))
        p = coarse(softmax(np.float64(student)), ids)
        np.testing.assert_allclose(value, reference(name, p, q), atol=FLOAT32)


def test_a_k_that_leaves_no_tail_is_refused():
    with pytest.raises(ValueError, match="3 ids of a vocabulary of 3 leave no tail"):
        distill.top_k_logprobs(jnp.ones(4), np.arange(3, dtype=np.int32), 3, 1.0)


def test_an_id_that_is_no_token_is_no_neighbour_of_it():
    found = distill.top_k_logprobs(jnp.ones(8), np.array([1, 6], np.int32), 5, 1.0)
    assert np.all(np.isnan(found))


@pytest.mark.parametrize("student_rows, teacher_rows", [(8, 10), (10, 8)])
def test_padded_vocabularies_are_compared_over_the_ids_of_both(
    student_rows, teacher_rows
):
    """151,936 logits against 152,064 (huggingface/trl#2215, #6252): the rows of padding
    count on neither side, whatever they hold."""
    student, teacher = draw(8)

    def padded(logits, rows):
        return jnp.float32(np.append(logits, [9.0, 5.0][: rows - 8]))

    rows = padded(student, student_rows), padded(teacher, teacher_rows)
    width = min(student_rows, teacher_rows)
    p, q = softmax(student), softmax(teacher)
    found = [distill.logprobs(x, width, 1.0) for x in rows]
    value = distill.reverse_kl(*found)
    np.testing.assert_allclose(value, reference("reverse_kl", p, q), FLOAT32)
    ids = np.argsort(-q)[:3].astype(np.int32)
    found = [distill.top_k_logprobs(x, ids, width, 1.0) for x in rows]
    expected = reference("reverse_kl", coarse(p, ids), coarse(q, ids))
    np.testing.assert_allclose(distill.reverse_kl(*found), expected, 1e-5)
    gradient = jax.grad(lambda x: distill.logprobs(x, width, 1.0)[0])(rows[0])
    np.testing.assert_array_equal(gradient[8:], np.zeros(student_rows - 8))


@pytest.mark.parametrize("width", [0, 9])
def test_a_width_beyond_the_logits_is_refused(width):
    with pytest.raises(ValueError, match=f"width={width} of 8 logits"):
        distill.logprobs(jnp.ones(8), width, 1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_were_not_scored_reach_neither_value_nor_gradient(name, bad):
    student, teacher = jnp.float32(draw(3, 5))
    weight_t = jnp.float32([0.5, 0.0, 2.0])
    teacher_tv = jax.nn.log_softmax(teacher)

    def loss(logits, teacher_tv):
        teacher_tv = losses.select(weight_t != 0, teacher_tv)
        found = jax.vmap(distill.DIVERGENCES[name])(
            jax.vmap(lambda x: distill.logprobs(x, 5, 1.0))(logits), teacher_tv
        )
        return losses.weighted_sum(found, weight_t)

    expected = jax.value_and_grad(loss)(student, teacher_tv)
    found = jax.value_and_grad(loss)(student, teacher_tv.at[1].set(bad))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    np.testing.assert_array_equal(found[1][1], np.zeros(5))
    assert np.all(np.isfinite(found[1]))
    value, slope_t = jax.value_and_grad(losses.weighted_sum)(
        jnp.float32([1.0, bad, 1.0]), weight_t
    )
    assert value == 2.5
    np.testing.assert_array_equal(slope_t, weight_t)
