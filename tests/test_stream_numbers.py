"""Samples, parameters and rewards of every kind give the right number, or none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_stream import additive, feed, step, toy, weighted

from thundersync_jax import Surrogate, advantages, pad
from thundersync_jax.errors import StreamError
from thundersync_jax.stream.schedule import RELEASES


def two_parts(params, sample):
    return weighted(params, sample)._replace(
        additive=jnp.sum(params["x"] * sample["s"])
    )


def test_members_without_samples_count_and_add_nothing():
    for release in RELEASES:
        stream = toy(release=release)
        stream.open_group("a", 3)
        for member, reward in ((1, 1.0), (2, 0.0)):
            stream.complete("a", member, {"s": float(member)})
            stream.reward("a", member, reward)
        stream.complete("a", 0)
        stream.reward("a", 0, 1.0)
        gradient, _ = stream.finish()
        assert float(gradient["x"]) == pytest.approx((1 / 3 - 2 * 2 / 3) / 3, abs=1e-6)


def test_a_caller_may_fill_one_buffer_again_and_again():
    buffer = np.zeros((), np.float32)
    for release in RELEASES:
        stream = toy(release=release, denominator="none")
        stream.open_group("a", 4)
        for member in range(4):
            buffer[...] = member
            stream.complete("a", member, {"s": buffer})
        for member in range(4):
            stream.reward("a", member, float(member == 3))
        assert float(stream.finish()[0]["x"]) == pytest.approx(3 - 6 / 4)


@pytest.mark.parametrize("value", [0.01, 1.0])
def test_bfloat16_gradients_are_summed_in_float32(value):
    """A sum in bfloat16 stops at 4 and at 256 (areal-project/AReaL#1634)."""
    params = {"x": jnp.zeros((), jnp.bfloat16)}
    expected = 1000 * float(jnp.bfloat16(value))  # one gradient has bfloat16's digits
    for partial in ("drop", "keep"):  # through group sums, and directly
        settings = {"estimator": None, "denominator": "none"}
        stream = toy(additive, params, partial_groups=partial, **settings)
        stream.open_group("a", 1000)
        for member in range(1000):
            stream.complete("a", member, {"s": np.float32(value)})
        gradient, _ = stream.finish()
        assert gradient["x"].dtype == jnp.float32
        assert float(gradient["x"]) == pytest.approx(expected, rel=1e-4)


def test_gradient_that_is_not_finite_ends_the_step_and_names_the_trajectory():
    for release in RELEASES:
        stream = toy(release=release)
        members = [(1.0, 1.0), (0.0, np.nan), (0.0, 2.0)]
        feed(stream, {"good": [(1.0, 1.0), (0.0, 2.0)], "bad": members})
        with pytest.raises(StreamError, match="'bad'/1 is not finite") as error:
            stream.finish()
        assert "good" not in str(error.value)
        with pytest.raises(ValueError, match="finished"):
            stream.finish()


@pytest.mark.parametrize("metrics", [None, {"m": 1.0}])
@pytest.mark.parametrize("partial", ["drop", "keep"])
def test_gradient_that_counts_for_nothing_may_be_anything(partial, metrics):
    """Samples of a group with equal rewards, streamed, direct or skipped."""
    function = lambda p, s: weighted(p, s)._replace(metrics=metrics)  # noqa: E731
    for release in RELEASES:
        stream = toy(
            function, release=release, denominator="none", partial_groups=partial
        )
        bad, good = [(1.0, np.nan), (1.0, np.inf), (1.0, 1.0)], [(1.0, 2.0), (0.0, 1.0)]
        feed(stream, {"bad": bad, "good": good})
        gradient, report = stream.finish()
        assert float(gradient["x"]) == 0.5
        assert report.uniform_groups == 1
        assert np.isfinite(report.loss)


@pytest.mark.parametrize("function", [additive, two_parts])
def test_additive_gradient_counts_whatever_the_rewards(function):
    for release in RELEASES:
        for partial in ("drop", "keep"):
            stream = toy(function, release=release, partial_groups=partial)
            feed(stream, {"bad": [(1.0, 1.0), (1.0, np.nan)]})
            with pytest.raises(StreamError, match="'bad'/1 is not finite"):
                stream.finish()


def test_sample_of_advantage_0_in_a_mixed_group_is_named_where_it_was_summed():
    stream = toy(release="trajectory")
    feed(stream, {"bad": [(1.0, 1.0), (0.5, np.nan), (0.0, 2.0)]})
    with pytest.raises(StreamError, match="'bad'/1 is not finite"):
        stream.finish()


def test_gradient_of_a_dropped_group_may_be_anything():
    stream = toy(open_groups=1, denominator="none")
    stream.open_group("bad", 2)
    stream.complete("bad", 0, {"s": np.nan})
    stream.reward("bad", 0, 1.0)
    stream.fail("bad", 1, reason="gone")
    feed(stream, {"a": [(1.0, 2.0), (0.0, 1.0)]})  # the same place for its sums
    gradient, report = stream.finish()
    assert float(gradient["x"]) == 0.5
    assert (report.discarded, report.streamed) == (1, 1)


def test_sums_that_leave_float32_end_the_step():
    for release in RELEASES:
        stream = toy(additive, release=release, estimator=None)
        stream.open_group("a", 2)
        for member in range(2):
            stream.complete("a", member, {"s": 3e38})
        with pytest.raises(StreamError, match="scale rewards or losses down"):
            stream.finish()


@pytest.mark.parametrize("unit", [1e-40, 1e-12, 1.0, 1e12, 1e29])
def test_scale_of_rewards_does_not_matter_to_a_normalised_advantage(unit):
    for release in RELEASES:
        for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
            stream = toy(release=release, estimator=advantages.mean_std(eps=0.0))
            rewards, scores = (0.0, 2 * unit, unit), (1.0, 1e6, 3.0)
            stream.open_group("a", 3)
            for member in order:
                stream.complete("a", member, {"s": scores[member]})
                stream.reward("a", member, rewards[member])
            expected = (1e6 - 1.0) * 1.5**0.5 / 3
            assert float(stream.finish()[0]["x"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("partial", ["drop", "keep"])
@pytest.mark.parametrize("seed", range(8))
def test_rewards_of_any_magnitude_meet_the_float64_sum(seed, partial):
    """From 1e-30 to 1e30 in one group: sums in one fixed unit overflow."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 7))
    scores = rng.normal(size=(size, 5)) * 10.0 ** rng.uniform(-3, 3, (size, 1))
    rewards = rng.choice([-1, 0, 1], size) * 10.0 ** rng.uniform(-30, 29.9, size)
    if seed == 0:
        rewards, scores = np.array([0, 1e-40, 1, 0]), scores[[0, 1, 0, 1]]
    scores = np.float32(scores)
    for estimator in (advantages.mean_std(eps=0.0), advantages.mean_only()):
        terms = estimator.advantages(rewards)[:, None] * scores.astype(np.float64)
        scale = np.abs(terms).max()
        for release in RELEASES:
            for order in (range(len(rewards)), np.argsort(np.abs(rewards))):
                gradient, _ = step(
                    {"a": list(rewards)},
                    {"a": list(scores)},
                    [("a", int(member)) for member in order],
                    params=(5,),
                    estimator=estimator,
                    release=release,
                    partial_groups=partial,
                )
                np.testing.assert_allclose(
                    gradient, terms.sum(axis=0), rtol=0, atol=1e-5 * scale
                )


def test_first_small_difference_does_not_set_the_scale_of_the_rest():
    stream = toy()
    feed(stream, {"a": [(0.0, 1.0), (1e-40, 2.0), (1.0, 1.2), (0.0, 1.0)]})
    batch = toy(release="batch")
    feed(batch, {"a": [(0.0, 1.0), (1e-40, 2.0), (1.0, 1.2), (0.0, 1.0)]})
    expected = (1.2 - 5.2 / 4) / 4
    for each in (stream, batch):
        assert float(each.finish()[0]["x"]) == pytest.approx(expected, rel=1e-5)


def test_float64_parameters_keep_float64_throughout():
    with jax.enable_x64(True):
        results = []
        for release in RELEASES:
            stream = toy(release=release, params={"x": jnp.zeros((), jnp.float64)})
            feed(stream, {"a": [(0.1, 0.3), (0.7, 1.1), (0.3, -0.4)]})
            results.append(float(stream.finish()[0]["x"]))
        expected = np.dot(
            [0.1 - 1.1 / 3, 0.7 - 1.1 / 3, 0.3 - 1.1 / 3], [0.3, 1.1, -0.4]
        )
        assert results == pytest.approx([expected / 3] * 3, rel=1e-14)


def test_odd_samples_are_samples():
    """PRNG keys, None leaves, integers, empty trees, in one call or in several."""
    key = jax.random.key(1)

    def surrogate(params, sample):
        noise = jax.random.uniform(sample["key"]) if sample else 1.0
        return Surrogate(params["x"] * noise)

    noise = [float(jax.random.uniform(jax.random.fold_in(key, m))) for m in range(2)]
    for release in RELEASES:
        for rows in (1, 4):
            stream = toy(surrogate, release=release, rows_per_call=rows)
            stream.open_group("a", 2)
            stream.open_group("empty", 2)
            for m in range(2):
                sample = {"key": jax.random.fold_in(key, m), "none": None, "int": 3}
                stream.complete("a", m, sample)
                stream.complete("empty", m, {})
                stream.reward("a", m, bool(m))
                stream.reward("empty", np.int64(m), np.float32(m))
            expected = (noise[1] - noise[0]) / 2 / 4
            assert float(stream.finish()[0]["x"]) == pytest.approx(expected, abs=1e-6)


def test_padding_counts_what_is_computed_over_what_is_real():
    stream = toy(lambda params, sample: Surrogate(params["x"] * jnp.sum(sample["s"])))
    stream.open_group("a", 2)
    for member, length in enumerate((3, 5)):
        stream.complete("a", member, pad({"s": np.ones(length)}, (4, 8)))
        stream.reward("a", member, float(member))
    gradient, report = stream.finish()
    assert float(gradient["x"]) == pytest.approx(0.5 * (5 - 3) / 2)
    assert report.padded_over_real_tokens == (4 + 8) / (3 + 5)
