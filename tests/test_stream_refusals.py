"""What a stream refuses, in one line, and that a refusal loses nothing."""

import functools
import itertools
import random

import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax import GradientStream, Surrogate, advantages
from thundersync_jax.errors import StreamError
from thundersync_jax.stream.schedule import RELEASES

PARAMS = {"x": jnp.zeros(())}


def surrogate(params, sample):
    return Surrogate(params["x"] * jnp.sum(sample["s"]))


def two_parts(params, sample):
    """Parts that depend on the shape, which no surrogate's may."""
    additive = None if sample["s"].ndim == 0 else params["x"]
    return surrogate(params, sample)._replace(additive=additive)


class Unhashable:
    __hash__ = None

    def __call__(self, params, sample):
        return surrogate(params, sample)


def make(function=surrogate, **settings):
    defaults = {"estimator": advantages.mean_only(), "denominator": "tokens"}
    return GradientStream(function, PARAMS, **defaults | settings)


# What is said -> what the one line must name. The stream holds group "a" of three, of
# which member 0 is settled, 1 complete without a reward and 2 rewarded with 0.5.
MISUSE = {
    "unknown group": (lambda s: s.complete("z", 0), ["'z'", "open_group"]),
    "unknown group's reward": (lambda s: s.reward("z", 0, 1.0), ["'z'", "open_group"]),
    "unknown group's failure": (lambda s: s.fail("z", 0, "x"), ["'z'", "open_group"]),
    "group opened twice": (lambda s: s.open_group("a", 3), ["'a'", "once"]),
    "group of none": (lambda s: s.open_group("b", 0), ["'b'", "0", ">= 1"]),
    "group of a part": (lambda s: s.open_group("b", 1.5), ["'b'", "1.5", "whole"]),
    "negative member": (lambda s: s.complete("a", -1), ["-1", "0 to 2"]),
    "member beyond": (lambda s: s.reward("a", 3, 1.0), ["3", "0 to 2"]),
    "member by name": (lambda s: s.fail("a", "1", "x"), ["'1'", "0 to 2"]),
    "completed twice": (
        lambda s: s.complete("a", 1, {"s": 9.0}, tokens=1),
        ["'a' member 1", "complete", "once"],
    ),
    "sample after completion": (
        lambda s: s.sample("a", 1, {"s": 9.0}, tokens=1),
        ["'a' member 1", "complete"],
    ),
    "second reward": (lambda s: s.reward("a", 2, 2.0), ["0.5", "2.0", "one reward"]),
    "complete when settled": (lambda s: s.complete("a", 0), ["member 0", "settled"]),
    "reward when settled": (lambda s: s.reward("a", 0, 1.0), ["member 0", "settled"]),
    "failure when settled": (lambda s: s.fail("a", 0, "x"), ["member 0", "settled"]),
    "no reward": (lambda s: s.reward("a", 1, None), ["None", "finite", "fail("]),
    "NaN reward": (lambda s: s.reward("a", 1, np.nan), ["nan", "finite", "fail("]),
    "infinite reward": (lambda s: s.reward("a", 1, -np.inf), ["-inf", "fail("]),
    "reward beyond float": (lambda s: s.reward("a", 1, 10**400), ["1000", "fail("]),
    "reward in bytes": (lambda s: s.reward("a", 1, b"1"), ["b'1'", "finite"]),
    "reward in words": (lambda s: s.reward("a", 1, "1"), ["'1'", "finite", "fail("]),
    "another version": (
        lambda s: s.complete("a", 2, {"s": 3.0}, tokens=1, policy_version=8),
        ["version 8", "version 7"],
    ),
    "another version, empty": (
        lambda s: s.complete("a", 2, policy_version=8),
        ["version 8", "version 7"],
    ),
    "tokens missing": (
        lambda s: s.complete("a", 2, {"s": 3.0}),
        ["member 2", "tokens is missing", "say how many"],
    ),
    "tokens without a sample": (
        lambda s: s.complete("a", 2, tokens=4),
        ["member 2", "tokens=4", "no sample", "with it"],
    ),
    "tokens negative": (
        lambda s: s.complete("a", 2, {"s": 3.0}, tokens=-4),
        ["tokens is -4", ">= 0"],
    ),
    "tokens not a number": (
        lambda s: s.complete("a", 2, {"s": 3.0}, tokens=np.nan),
        ["tokens is nan", "whole number"],
    ),
    "words in a sample": (
        lambda s: s.complete("a", 2, {"s": 3.0, "text": "four"}, tokens=1),
        ["'four'", "numbers", "encode"],
    ),
    "integer beyond int32": (
        lambda s: s.complete("a", 2, {"s": 2**40}, tokens=1),
        ["1099511627776", "int32", "float"],
    ),
    "integers beyond int32": (
        lambda s: s.complete("a", 2, {"s": np.array([1, -(2**31) - 1])}, tokens=1),
        ["int32", "float"],
    ),
    "integer beyond uint32": (
        lambda s: s.complete("a", 2, {"s": np.uint64(2**32)}, tokens=1),
        ["4294967296", "uint32"],
    ),
    "group without a hash": (lambda s: s.open_group(["b"], 2), ["['b']", "tuple"]),
    "completion without a hash": (
        lambda s: s.complete(["a"], 2, {"s": 3.0}, tokens=1),
        ["['a']", "tuple"],
    ),
    "reward without a hash": (lambda s: s.reward({"a"}, 1, 1.0), ["{'a'}", "tuple"]),
    "failure without a hash": (lambda s: s.fail(["a"], 1, "x"), ["['a']", "tuple"]),
    "finish too early": (
        lambda s: s.finish(),
        ["2 members", "'a'/1", "'a'/2", "fail"],
    ),
}


def start(release, function=surrogate):
    stream = make(function, release=release, policy_version=7)
    stream.open_group("a", 3)
    stream.complete("a", 0, {"s": 1.0}, tokens=2, policy_version=7)
    stream.reward("a", 0, 1.0)
    stream.complete("a", 1, {"s": 2.0}, tokens=2)
    stream.reward("a", 2, 0.5)
    return stream


def end(stream):
    """The rest of the step; its right value is known."""
    stream.reward("a", 1, 0.0)
    stream.complete("a", 2, {"s": 5.0}, tokens=1, policy_version=7)
    gradient, report = stream.finish()
    assert float(gradient["x"]) == pytest.approx((0.5 - 0.5 * 2) / 5, abs=1e-6)
    assert (report.kept_members, report.tokens, report.rewards) == (3, 5, 3)
    assert report.failed_members == report.dropped_groups == 0


def refused(call, names):
    with pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    for name in names:
        assert name in message, message


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_refused_and_loses_nothing(case, release):
    call, names = MISUSE[case]
    stream = start(release)
    refused(lambda: call(stream), names)
    refused(lambda: call(stream), names)  # nor does it count as having been said
    end(stream)


def test_a_whole_step_of_misuse_loses_nothing():
    for release in RELEASES:
        stream = start(release)
        for case in random.Random(0).sample(list(MISUSE), len(MISUSE)):
            call, names = MISUSE[case]
            refused(functools.partial(call, stream), names)
        end(stream)


def test_parts_that_change_with_the_sample_are_refused_and_lose_nothing():
    for release in RELEASES:
        stream = start(release, two_parts)
        odd = functools.partial(stream.complete, "a", 2, {"s": np.ones(2)}, tokens=1)
        refused(odd, ["same parts"])
        end(stream)


def test_refused_first_sample_leaves_no_trace():
    """Neither its version nor its parts become the step's."""
    stream = make(two_parts, denominator="none")
    odd = {"s": np.ones(2)}
    refused(lambda: stream.complete("z", 0, odd, policy_version=1), ["'z'"])
    stream.open_group("a", 2)
    for member in range(2):
        stream.complete("a", member, {"s": float(member)}, policy_version=2)
        stream.reward("a", member, float(member))
    assert float(stream.finish()[0]["x"]) == 0.5


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"release": "turn"}, ["'turn'", "'batch', 'group', 'trajectory'"]),
        ({"partial_groups": "maybe"}, ["'maybe'", "'drop', 'keep', 'fail'"]),
        ({"denominator": "token"}, ["'token'", "'tokens'"]),
        ({"denominator": None}, ["None", "'tokens'", "a number above 0"]),
        ({"denominator": True}, ["True", "a number above 0"]),
        ({"denominator": np.ones(2)}, ["a number above 0"]),
        ({"denominator": np.float32(-1)}, ["-1", "above 0"]),
        ({"denominator": 0}, ["denominator is 0", "above 0"]),
        ({"denominator": np.nan}, ["denominator is nan", "above 0"]),
        ({"open_groups": 0}, ["open_groups is 0", "at least 1", "'group'"]),
        ({"open_groups": None}, ["open_groups is None", "at least 1"]),
        ({"open_groups": True}, ["open_groups is True", "at least 1"]),
        ({"rows_per_call": True}, ["rows_per_call is True", "at least 1"]),
        ({"rows_per_call": 0}, ["rows_per_call is 0", "at least 1"]),
        ({"estimator": "mean_std"}, ["'mean_std'", "advantages.mean_std()"]),
        ({"estimator": advantages.mean_std}, ["advantages.mean_std()"]),
        ({"function": None}, ["surrogate is None", "function"]),
        ({"function": Unhashable()}, ["surrogate is", "no hash", "__hash__"]),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(settings, names):
    refused(lambda: make(**settings), names)


@pytest.mark.parametrize(
    ("params", "names"),
    [
        ({}, ["params holds no array"]),
        ({"x": jnp.zeros(3, int)}, ["int32", "frozen"]),
    ],
)
def test_parameters_without_a_gradient_are_refused_at_start(params, names):
    refused(lambda: GradientStream(surrogate, params, estimator=None), names)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda p, s: p["x"], ["Surrogate(weighted"]),
        (lambda p, s: Surrogate(None), ["neither", "give one"]),
        (lambda p, s: Surrogate(p["x"] * jnp.ones(2)), ["weighted", "scalar"]),
        (lambda p, s: Surrogate(None, jnp.int32(1)), ["additive", "int32"]),
        (lambda p, s: Surrogate(p["x"], None, {"m": jnp.ones(2)}), ["'m'", "scalar"]),
        (lambda p, s: Surrogate(p["x"], None, [1.0]), ["metrics", "dict"]),
    ],
)
def test_surrogates_of_another_form_are_refused_before_they_run(function, names):
    stream = make(function)
    stream.open_group("a", 1)
    with pytest.raises(TypeError) as error:
        stream.complete("a", 0, {"s": 1.0}, tokens=1)
    assert all(name in str(error.value) for name in names), error.value


def test_complex_metric_is_refused_and_loses_nothing():
    stream = make(lambda p, s: Surrogate(p["x"], None, {"m": jnp.complex64(1j)}))
    stream.open_group("a", 1)
    names = ["metrics['m']", "complex64", "real"]
    refused(lambda: stream.complete("a", 0, {"s": 1.0}, tokens=1), names)
    stream.fail("a", 0, reason="no sample")
    stream.finish()


def test_numbers_of_numpy_are_numbers():
    gradients = []
    for two, three in ((2, 3), (np.float32(2), np.int64(3)), (np.int8(2), np.uint8(3))):
        stream = make(denominator=two, open_groups=three, rows_per_call=three)
        stream.open_group("a", 2)
        for member in range(2):
            stream.complete("a", member, {"s": float(member)})
            stream.reward("a", member, float(member))
        gradients.append(float(stream.finish()[0]["x"]))
    assert gradients == [0.25] * 3


def test_rewards_have_no_place_without_an_estimator():
    function = lambda p, s: Surrogate(None, additive=p["x"] * s["s"])  # noqa: E731
    for release in RELEASES:
        stream = make(function, estimator=None, release=release)
        stream.open_group("a", 1)
        refused(functools.partial(stream.reward, "a", 0, 1.0), ["estimator is None"])
        stream.complete("a", 0, {"s": 4.0}, tokens=2)
        refused(functools.partial(stream.fail, "a", 0, "late"), ["settled"])
        assert float(stream.finish()[0]["x"]) == 2.0
        stream = make(estimator=None, release=release)
        stream.open_group("a", 1)
        weighted = functools.partial(stream.complete, "a", 0, {"s": 4.0}, tokens=2)
        refused(weighted, ["`weighted`", "`additive`"])


def test_failure_under_fail_ends_the_step():
    for release, settled in itertools.product(RELEASES, (0, 1, 2)):
        stream = make(release=release, partial_groups="fail")
        stream.open_group("a", 3)
        for member in range(settled):
            stream.complete("a", member, {"s": 1.0}, tokens=1)
            stream.reward("a", member, float(member))
        with pytest.raises(
            StreamError, match=r"'a' member 2 failed .sandbox died.*drop"
        ):
            stream.fail("a", 2, reason="sandbox died")
        refused(stream.finish, ["ended with a failed member", "make"])


def test_finished_stream_takes_nothing_more():
    stream = start("trajectory")
    end(stream)
    for call in (stream.finish, stream.advance, lambda: stream.open_group("b", 1)):
        refused(call, ["is finished", "every step"])


def test_error_inside_a_gradient_ends_the_step():
    """A sample that was lost half-way must not be missing from a gradient."""
    traces = []

    def fragile(params, sample):
        traces.append(1)
        if len(traces) == 2:  # the first looks at its parts, the second compiles it
            raise RuntimeError("out of memory")
        return surrogate(params, sample)

    stream = make(fragile)
    stream.open_group("a", 2)
    stream.complete("a", 0, {"s": 1.0}, tokens=1)
    with pytest.raises(RuntimeError, match="out of memory"):
        stream.reward("a", 0, 1.0)
    refused(lambda: stream.complete("a", 1, {"s": 1.0}, tokens=1), ["RuntimeError"])
    refused(stream.finish, ["stopped at RuntimeError", "make"])


def test_error_in_the_surrogates_own_code_reaches_the_caller_and_loses_nothing():
    def picky(params, sample):
        if sample["s"].ndim:
            raise KeyError("mask")
        return surrogate(params, sample)

    stream = start("trajectory", picky)
    with pytest.raises(KeyError, match="mask"):
        stream.complete("a", 2, {"s": np.ones(2)}, tokens=1)
    end(stream)
