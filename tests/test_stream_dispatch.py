"""How a stream uses the machine: programs, devices in flight, host time."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_stream import additive, feed, toy, weighted

from thundersync_jax import GradientStream, Surrogate, TurnStream, advantages
from thundersync_jax.stream.mesh import IN_FLIGHT, Replica
from thundersync_jax.stream.schedule import RELEASES

SAME_NUMBER = {
    "python": lambda x: x,
    "numpy scalar": np.float32,
    "numpy float64": np.float64,
    "numpy array": lambda x: np.array(x, np.float32),
    "jax array": jnp.float32,
    "weakly typed": lambda x: jnp.asarray(x),
    "committed": lambda x: jax.device_put(jnp.float32(x), jax.devices()[0]),
    "on another device": lambda x: jax.device_put(jnp.float32(x), jax.devices()[1]),
}


@pytest.fixture
def compiles():
    """Counts programs that XLA compiles."""
    seen = []

    def listen(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            seen.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def fresh_surrogate(traces=None):
    """A function object that nothing was compiled for yet."""

    def surrogate(params, sample):
        if traces is not None:
            traces.append(1)
        return Surrogate(params["x"] * jnp.sum(sample["s"]))

    return surrogate


def step(surrogate, samples, params=None, **settings):
    params = {"x": jnp.zeros(())} if params is None else params
    settings = {"estimator": advantages.mean_only(), "denominator": "none"} | settings
    stream = GradientStream(surrogate, params, **settings)
    stream.open_group("a", len(samples))
    for member, sample in enumerate(samples):
        stream.complete("a", member, {"s": sample})
        stream.reward("a", member, float(member))
    return stream.finish()


def test_each_shape_is_compiled_once_over_all_streams(compiles):
    traces = []
    surrogate = fresh_surrogate(traces)
    samples = [0.5, np.ones(1), np.ones(2), 1.5]
    step(surrogate, samples)
    counts = len(traces), len(compiles)
    assert counts[0] == 2 * 3  # one look at the parts and one compilation per shape
    for release in RELEASES:
        _, report = step(surrogate, samples, release=release)
        assert report.compiles == 0
    assert (len(traces), len(compiles)) == counts


def test_report_counts_the_programs_that_xla_compiled(compiles):
    surrogate = fresh_surrogate()
    step(fresh_surrogate(), [0.5, 1.5])  # the sums' programs
    before = len(compiles)
    _, report = step(surrogate, [0.5, np.ones(3), np.ones(3)])
    assert report.compiles == len(compiles) - before == 2
    elsewhere = {"x": jax.device_put(jnp.zeros(()), jax.devices()[1])}
    _, report = step(surrogate, [0.5, 1.5], params=elsewhere)
    assert report.compiles == 1


@pytest.mark.parametrize(("parts", "expected"), [(1, [1, 1, 0]), (2, [2, 1, 1])])
def test_shared_call_of_one_part_runs_the_program_of_a_direct_one(
    parts, expected, compiles, monkeypatch
):
    def make():
        scored = fresh_surrogate()
        extra = lambda x: x if parts == 2 else None  # noqa: E731
        return lambda p, s: scored(p, s)._replace(additive=extra(scored(p, s).weighted))

    def compiled(surrogate, rewards, release):
        before = len(compiles)
        stream = toy(surrogate, release=release, rows_per_call=2)
        monkeypatch.setattr(Replica, "load", property(lambda self: IN_FLIGHT))
        stream.open_group("a", len(rewards))
        for member, reward in enumerate(rewards):
            if member == len(rewards) - 1:
                monkeypatch.undo()
                stream.advance()
            stream.complete("a", member, {"s": np.ones(3)})
            stream.reward("a", member, reward)
        _, report = stream.finish()
        assert report.compiles == len(compiles) - before or surrogate is warm
        return report.compiles

    warm, surrogate = make(), make()
    for rule in ("trajectory", "batch"):
        compiled(warm, [1.0, 0.5, 0.0], rule)  # the programs of the sums
    alone = compiled(surrogate, [1.0, 0.5, 0.0], "trajectory")
    shared = compiled(surrogate, [1.0, 1.0, 0.0], "trajectory")
    assert [alone, shared, compiled(surrogate, [1.0, 0.0], "batch")] == expected


def test_one_number_is_one_program_however_it_is_given(compiles):
    surrogate = fresh_surrogate()
    numbers = [give(0.1) for give in SAME_NUMBER.values()]
    jnp.asarray(jnp.asarray(0.1), jnp.float32)  # the cast itself is a program once
    uncommitted = {"x": jnp.zeros(())}
    step(surrogate, [0.1, 0.2], uncommitted)
    before = len(compiles)
    committed = jax.device_put(uncommitted, jax.devices()[0])
    for params in (uncommitted, committed, {"x": 0.0}):
        gradient, report = step(surrogate, numbers, params)
        assert report.compiles == len(compiles) - before == 0
        assert float(gradient["x"]) == pytest.approx(0.0, abs=1e-6)


def test_parts_are_announced_before_they_compile():
    lines = []
    step(fresh_surrogate(), [0.5, np.ones((2, 3))], on_compile=lines.append)
    assert len(lines) == 2
    assert "(2, 3)" in lines[1]


@pytest.mark.parametrize("whole", [True, False])
def test_drain_starts_all_that_may_start_and_leaves_the_rest(whole, monkeypatch):
    """Calls that run until somebody waits for them: 2 of 7 could start at once."""
    running, calls = [], []

    def note(call, ended):
        calls.append(call)
        running.append(ended)

    monkeypatch.setattr(Replica, "load", property(lambda self: len(running)))
    monkeypatch.setattr(Replica, "wait", lambda self: running.pop(0))
    if whole:
        stream = toy(release="trajectory", on_call=note)
    else:
        params = {"x": jnp.zeros(())}
        stream = TurnStream(additive, params, context="turn", on_call=note)
    stream.open_group("a", 8)
    for member in range(7):
        sample = {"s": float(member)}
        if whole:
            stream.complete("a", member, sample)
            stream.reward("a", member, float(member % 2))
        else:
            stream.turn("a", member, sample)
    assert len(calls) == IN_FLIGHT and stream.advance()
    stream.drain()
    assert len(calls) == 7 and not stream.advance()
    assert running  # it waits for places on the device, not for results


def test_at_most_one_call_waits_behind_the_running_one(monkeypatch):
    """Late information must still be able to change the next decision."""
    ended = set()
    monkeypatch.setattr(
        Replica,
        "load",
        property(lambda self: sum(id(x) not in ended for x in self._running)),
    )
    calls = []

    def note(call, done):
        calls.append((call, done))

    stream = GradientStream(
        fresh_surrogate(),
        {"x": jnp.zeros(())},
        estimator=advantages.mean_only(),
        denominator="none",
        on_call=note,
    )
    stream.open_group("a", 8)
    for member in range(7):
        stream.complete("a", member, {"s": float(member)})
        stream.reward("a", member, float(member % 2))
    assert len(calls) == IN_FLIGHT == 2
    assert stream.advance()  # work is left, no device can take it
    ended.add(id(calls[0][1]))
    assert stream.advance()
    assert len(calls) == 3
    # The last reward makes the rest final: late information changed the next calls.
    stream.complete("a", 7, {"s": 7.0})
    stream.reward("a", 7, 1.0)
    assert len(calls) == 3
    monkeypatch.undo()
    gradient, report = stream.finish()
    assert [call.place is None for call, _ in calls] == [False] * 3 + [True] * 5
    assert float(gradient["x"]) == pytest.approx(16 - 28 / 2)
    assert (report.streamed, report.direct, report.waited) == (3, 5, 4)


def test_final_backlog_is_packed_into_full_calls(monkeypatch):
    stream = GradientStream(
        fresh_surrogate(),
        {"x": jnp.zeros(())},
        estimator=advantages.mean_only(),
        denominator="none",
        release="group",
        rows_per_call=4,
    )
    monkeypatch.setattr(Replica, "load", property(lambda self: IN_FLIGHT))
    for group in range(3):
        stream.open_group(group, 3)
        for member, reward in enumerate((0.0, 1.0, 3.0)):
            stream.complete(group, member, {"s": float(group)})
            stream.reward(group, member, reward)
    assert stream.advance()
    monkeypatch.undo()
    assert stream.finish()[1].calls == 3  # 4 + 4 + 1


def test_advance_starts_waiting_work_without_an_event(monkeypatch):
    calls = []
    stream = GradientStream(
        fresh_surrogate(),
        {"x": jnp.zeros(())},
        estimator=advantages.mean_only(),
        on_call=lambda call, ended: calls.append(call),
    )
    assert not stream.advance()
    monkeypatch.setattr(Replica, "load", property(lambda self: IN_FLIGHT))
    stream.open_group("a", 2)
    stream.complete("a", 0, {"s": 1.0})
    stream.reward("a", 0, 1.0)
    assert not calls
    assert stream.advance()
    monkeypatch.undo()
    assert not stream.advance()
    assert len(calls) == 1


class Slotted:
    """No weak reference, and found by value."""

    __slots__ = ()

    def __call__(self, params, sample):
        return weighted(params, sample)

    def __eq__(self, other):
        return isinstance(other, Slotted)

    def __hash__(self):
        return 1


def test_surrogate_of_one_step_goes_with_what_it_closes_over():
    big = np.ones(3)

    def make():
        held = big.copy()
        function = lambda p, s: Surrogate(jnp.sum(p["x"] * s["s"] * held))  # noqa: E731
        stream = toy(function)
        feed(stream, {"a": [(1.0, 2.0), (0.0, 1.0)]})
        stream.finish()
        return weakref.ref(function)

    gone = make()
    jax.clear_caches()  # those of jax.jit are jax's
    gc.collect()
    assert gone() is None


def test_equal_surrogates_share_their_programs():
    reports = []
    for _ in range(3):
        stream = toy(Slotted())
        feed(stream, {"a": [(1.0, 2.0), (0.0, 1.0)]})
        reports.append(stream.finish()[1])
        gc.collect()
    assert [report.compiles > 0 for report in reports] == [True, False, False]
