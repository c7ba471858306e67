"""When gradient calls ran, and that their ends wake whoever waits."""

import functools
import threading
import time

import echo_task
import jax
import jax.numpy as jnp
import pytest

from thundersync_jax.config import EnvConfig, LatencyConfig
from thundersync_jax.config.settings import replace
from thundersync_jax.envs.letters import LettersOptions
from thundersync_jax.metrics import learner_clock
from thundersync_jax.metrics.learner_clock import LearnerClock
from thundersync_jax.run import step as step_module
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import rollouts
from thundersync_jax.stream.schedule import Call, Item

LATE_SECS = 2.0
CONFIG = replace(
    echo_task.small(warm_start_steps=0),
    {
        "release": "trajectory",
        "rollout.groups_per_step": 2,
        "rollout.group_size": 4,
        "rollout.cut_actions": "run",
        "env": EnvConfig(
            factory="thundersync_jax.envs.letters:make",
            options=LettersOptions(prompt_tokens=8, train_tasks=4),
            verify_latency=LatencyConfig("straggler", median_secs=LATE_SECS),
        ),
    },
)


class Ended:
    """Stands for an array that is ready when it is let go."""

    def __init__(self):
        self._event = threading.Event()

    def let_go(self):
        self._event.set()

    def block_until_ready(self):
        self._event.wait()


def call(member, replica=0):
    return Call(replica, (Item(0, member, 0, "bucket"),), None, 1)


@pytest.fixture
def stand_ins(monkeypatch):
    """Nothing runs behind what stands for an array."""
    monkeypatch.setattr(learner_clock, "_behind", lambda ended: ended)


def test_a_call_begins_when_the_one_before_it_has_ended(stand_ins):
    spans, ends = [], []
    clock = LearnerClock(spans.append, lambda: ends.append(time.monotonic()))
    arrays = [Ended(), Ended(), Ended()]
    for member, array in enumerate(arrays[:2]):
        clock.on_call(call(member), array)
    clock.on_call(call(2, replica=1), arrays[2])
    for array in (arrays[2], *arrays[:2]):
        time.sleep(0.02)
        array.let_go()
    ran = clock.take()
    assert [one.call.items[0].member for one in ran] == [2, 0, 1]
    alone, first, second = ran
    assert first.start_secs == first.dispatched_secs
    assert second.dispatched_secs < first.end_secs == second.start_secs
    assert alone.end_secs < first.end_secs < second.end_secs
    assert len(spans) == len(ends) == 3
    assert clock.totals.busy_secs == pytest.approx(sum(one.secs for one in ran))
    assert clock.take() == []
    clock.close()


def test_a_clock_that_has_died_says_of_what(stand_ins):
    clock = LearnerClock(lambda span: None)
    clock.on_call(call(0), "no array")
    with pytest.raises(RuntimeError, match="clock of replica 0 has stopped") as died:
        clock.take()
    assert "block_until_ready" in str(died.value.__cause__)


def test_an_ended_call_wakes_whoever_waits_for_events(tmp_path):
    """Ready work is dispatched when a device is free, not at the next event."""
    with Run(CONFIG, tmp_path, on_line=lambda line: None) as run:
        jobs = run.train_jobs(1)
        run.pool.start(jobs, 0)
        for _ in range(2 * len(jobs) - 2):  # all but the verdicts on two stragglers
            assert run.pool.next_event(60.0) is not None
        start = time.monotonic()
        run.clock.on_call(call(0), jnp.zeros(()))
        assert run.pool.next_event(60.0) is None
        assert time.monotonic() - start < LATE_SECS / 2
        while run.pool.outstanding:
            run.pool.next_event(60.0)


def test_whoever_is_woken_looks_for_work(tmp_path, monkeypatch):
    monkeypatch.setattr(step_module, "_WAIT_SECS", 60.0)
    looks = []
    with Run(CONFIG, tmp_path, on_line=lambda line: None) as run:
        jobs = run.train_jobs(1)
        events = rollouts(run, jobs, 0, lambda: looks.append(time.monotonic()))
        for _ in range(2 * len(jobs) - 2):
            next(events)
        waker = threading.Timer(LATE_SECS / 4, run.pool.wake)
        woken = time.monotonic() + LATE_SECS / 4
        waker.start()
        late = next(events)
        assert late.secs > woken
        assert sum(woken - 0.01 <= look < late.secs for look in looks) == 1
        list(events)


def test_waking_a_pool_ends_nothing(tmp_path):
    with Run(CONFIG, tmp_path, on_line=lambda line: None) as run:
        run.pool.start(run.train_jobs(1), 0)
        run.pool.wake()
        start = time.monotonic()
        assert run.pool.next_event(60.0) is None
        assert time.monotonic() - start < 30.0
        events = []
        while run.pool.outstanding:
            run.pool.wake()
            events.append(run.pool.next_event(60.0))
        assert sum(event is not None for event in events) == 16


def test_folding_a_gradient_is_part_of_its_call():
    """The sums themselves are given to the next fold and cannot be waited for."""

    @functools.partial(jax.jit, donate_argnums=0)
    def fold(sums, gradient):
        turn = lambda _, x: jnp.cos(x @ gradient)  # noqa: E731
        return jax.lax.fori_loop(0, 200, turn, sums)

    gradient, wakes = jnp.ones((256, 256)), []
    sums = jax.block_until_ready(fold(jnp.ones((256, 256)), gradient))
    start = time.monotonic()
    sums = jax.block_until_ready(fold(sums, gradient))
    fold_secs = time.monotonic() - start
    clock = LearnerClock(lambda s: None, lambda: wakes.append(time.monotonic()))
    for _ in range(2):
        ended = jnp.zeros((), bool)
        sums = fold(sums, gradient)  # donates what the last one returned
        clock.on_call(call(0), ended)
    first, second = clock.take()
    for ran in (first, second):
        assert fold_secs / 3 < ran.secs < 20 * fold_secs
    # Whoever waits is woken by the gradient: a call may be queued behind the fold.
    assert wakes[0] < first.end_secs - fold_secs / 3
    clock.close()
