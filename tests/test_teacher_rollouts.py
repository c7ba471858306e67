"""A teacher beside the rollouts: what is told and when, and how it fails."""

import asyncio
import re
import threading
import time
import traceback
from functools import partial

import jax
import numpy as np
import pytest
import tiny_models
from rollout_fakes import (
    ANSWER,
    CALL,
    PATIENCE_SECS,
    FakeEngine,
    FakeEnvironment,
    FakeTeacher,
    after,
    drain,
    jobs,
    key,
    limits,
    never,
    of_kind,
    open_pool,
    outcomes,
    refuse,
    roll,
    teacher_logprobs,
)

from thundersync_jax.chat import byte_level
from thundersync_jax.config import ModelConfig
from thundersync_jax.engines import scoring
from thundersync_jax.models import transformer
from thundersync_jax.models.transformer import Transformer
from thundersync_jax.rollout.events import Completed, Failed, Job, Rewarded, Turn
from thundersync_jax.rollout.pool import RolloutPool
from thundersync_jax.rollout.teacher import LocalTeacher
from thundersync_jax.types import StopReason

PROMPT = byte_level.render_prompt("2+5")
REPLY = byte_level.render_observation("2")


def calls_first(calls):
    return FakeEngine(lambda request, turn: CALL if turn < calls else ANSWER)


def taught(teacher, environment=None, calls=1, **changes):
    """A pool whose policy makes some calls and then answers."""
    return open_pool(
        environment,
        calls_first(calls),
        make_teacher=lambda loop, on_error: teacher,
        **changes,
    )


def test_a_turn_is_told_while_its_tool_call_runs():
    """And a slow teacher of an early turn holds up no later tool call."""
    tool_secs = 1.0
    returned, spans = [], []

    async def tool():
        await asyncio.sleep(tool_secs)
        returned.append(time.monotonic())

    teacher = FakeTeacher(lambda tokens, number: asyncio.sleep(0.05))
    with taught(
        teacher, lambda m: FakeEnvironment(step=tool), on_span=spans.append
    ) as pool:
        pool.start(jobs(1), 0)
        turn = pool.next_event(PATIENCE_SECS)
        assert isinstance(turn, Turn) and turn.turn == 0 and not returned
        assert turn.secs < time.monotonic() and pool.outstanding == 1
        second, completed, rewarded = drain(pool)
    assert turn.secs < returned[0] - tool_secs / 2 < returned[0] < second.secs
    assert second.secs < returned[1] < completed.secs < rewarded.secs
    # The timeline shows the same.
    score, *_ = [span for span in spans if span.track == "teacher"]
    tool_bar, *_ = [span for span in spans if span.name == "tool"]
    assert (score.name, score.lane) == ("score t0", "g0m0")
    assert tool_bar.start_secs <= score.end_secs < tool_bar.end_secs
    assert score.end_secs - score.start_secs >= 0.04


@pytest.mark.parametrize(
    "calls, turns, reply", [(0, 3, "2"), (2, 3, "2"), (3, 3, "2"), (3, 6, "2" * 40)]
)
def test_turns_hold_what_is_final_and_come_before_their_completion(calls, turns, reply):
    with taught(
        FakeTeacher(),
        lambda m: FakeEnvironment(reply=reply, step=after(0.01 * (m % 3), None)),
        calls,
        turns=turns,
    ) as pool:
        events = roll(pool, 5)
    for member in range(5):
        *told, completed, rewarded = [e for e in events if e.key.member == member]
        assert all(isinstance(event, Turn) for event in told)
        assert isinstance(completed, Completed) and isinstance(rewarded, Rewarded)
        whole = completed.trajectory
        assert [turn.turn for turn in told] == list(range(whole.turns))
        assert rewarded.trajectory.teacher is whole.teacher
        assert whole.unscored_tokens == 0
        np.testing.assert_array_equal(whole.teacher.known, whole.loss_mask)
        assert whole.times["completed"] >= told[-1].secs
        end = 0
        for turn in told:
            part = turn.trajectory
            assert turn.start == end and part.stop_reason is None
            end = len(part.ids)
            assert part.loss_mask[-1] and part.unscored_tokens == 0
            new = slice(turn.start, end)
            np.testing.assert_array_equal(part.ids, whole.ids[:end])
            np.testing.assert_array_equal(part.loss_mask, whole.loss_mask[:end])
            np.testing.assert_array_equal(
                part.teacher.logprobs, whole.teacher.logprobs[:end]
            )
            expected = np.where(part.loss_mask[:, None], teacher_logprobs(part.ids), 0)
            np.testing.assert_array_equal(part.teacher.logprobs[new], expected[new])
        # A piece begins with the observation of the turn before.
        starts = [turn.start for turn in told]
        assert starts[:2] == [0, len(PROMPT) + len(CALL)][: len(told)]


def test_an_action_that_was_cut_is_scored_too():
    teacher = FakeTeacher()
    engine = FakeEngine(lambda request, turn: [53] * request.max_new_tokens)
    with open_pool(engine=engine, make_teacher=lambda *_: teacher) as pool:
        turn, completed, _ = roll(pool, 1)
    assert completed.trajectory.stop_reason is StopReason.LENGTH
    assert turn.trajectory.action_tokens == completed.trajectory.action_tokens == 8
    assert completed.trajectory.unscored_tokens == 0


def test_without_a_teacher_and_in_evaluation_nothing_is_scored():
    teacher = FakeTeacher()
    with taught(teacher) as pool:
        pool.start([Job(key()._replace(phase="evaluate"), 0)], 0)
        events = drain(pool)
    assert [type(event) for event in events] == [Completed, Rewarded]
    assert events[1].trajectory.teacher is None and not teacher.asked
    assert teacher.closed
    with open_pool(engine=calls_first(1)) as pool:
        assert [type(event) for event in roll(pool, 1)] == [Completed, Rewarded]


def test_the_last_scores_hold_no_slot():
    """A teacher that takes its time leaves the sampler to others."""
    answered = asyncio.Event()

    async def last_waits(tokens, number):
        if number == 1:
            await answered.wait()

    with taught(FakeTeacher(last_waits), slots=4) as pool:
        pool.start(jobs(9), 0)
        for _ in range(9):
            assert isinstance(pool.next_event(PATIENCE_SECS), Turn)
        pool._loop.call_soon_threadsafe(answered.set)
        events = drain(pool)
    assert len(of_kind(events, Turn)) == len(of_kind(events, Rewarded)) == 9


@pytest.mark.parametrize("number", [0, 1])
def test_a_teacher_that_raises_costs_one_member_and_no_waiting(number):
    """At once, though a tool call would take its time; and it is not tried again."""

    async def refuse_long(tokens, asked):
        if asked == number and len(tokens) > len(PROMPT) + number * 10 + len(CALL):
            raise ConnectionError("refused\nby a peer")

    environments = []

    def environment(member):
        environments.append(member)
        # Member 2 has the longer prompt, and a tool that never returns after turn 0.
        prompt = "2+5" + "0" * 9 * (member == 2)
        step = never if member == 2 and number == 0 else None
        return FakeEnvironment(prompt=prompt, step=step)

    start = time.monotonic()
    teacher = FakeTeacher(refuse_long)
    with taught(teacher, environment, attempts=3) as pool:
        events = roll(pool, 4)
    assert time.monotonic() - start < PATIENCE_SECS / 2
    found = outcomes(events)
    failed = found.pop(2)
    assert failed.stop_reason is StopReason.TEACHER_ERROR
    assert failed.reason == (
        f"scoring of turn {number}: ConnectionError: refused (attempt 1 of 3)"
    )
    assert all(isinstance(event, Rewarded) for event in found.values())
    assert sorted(environments) == [0, 1, 2, 3]
    assert failed.trajectory.unscored_tokens > 0
    # Only what was told before.
    mine = [type(event) for event in events if event.key.member == 2]
    assert mine == [Turn] * number + [Failed]
    sessions = {session for session, *_ in teacher.asked}
    assert sessions == set(teacher.released)


def test_turns_of_a_retried_attempt_come_anew():
    """What the teacher still says of the stopped attempt is not heard."""
    first_asked = asyncio.Event()

    async def stubborn(tokens, number):
        # The second score of the first attempt: it swallows its cancellation.
        if number == 1 and not first_asked.is_set():
            first_asked.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)

    made = []

    def environment(member):
        made.append(member)

        async def second_fails():
            if len(made) == 1 and len(env.actions) == 2:
                await first_asked.wait()
                await refuse()
            elif len(env.actions) == 2:
                await asyncio.sleep(0.2)

        env = FakeEnvironment(step=second_fails)
        return env

    teacher = FakeTeacher(stubborn)
    with taught(teacher, environment, attempts=2) as pool:
        events = roll(pool, 1)
    told = [(e.key.attempt, e.turn) for e in events if isinstance(e, Turn)]
    assert told == [(0, 0), (1, 0), (1, 1)]
    assert events[-1].key.attempt == 1
    assert events[-1].trajectory.unscored_tokens == 0
    assert len(set(teacher.released)) == 2


def test_cancelled_members_are_released_and_tell_nothing_more():
    held = asyncio.Event()
    teacher = FakeTeacher(lambda tokens, number: held.wait())
    with taught(teacher, lambda m: FakeEnvironment(step=never)) as pool:
        pool.start(jobs(4), 0)
        while len(teacher.asked) < 4:
            time.sleep(0.01)
        pool.cancel()
        events = drain(pool)
        # Before the outcome, as the engine: the reader may begin anew right after it.
        sessions = {session for session, *_ in teacher.asked}
        assert set(teacher.released) == sessions and len(sessions) == 4
        pool._loop.call_soon_threadsafe(held.set)
        assert {e.stop_reason for e in events} == {StopReason.CANCELLED}
        assert len(events) == 4
        pool.start(jobs(2, step=1), 0)
        told = [pool.next_event(PATIENCE_SECS) for _ in range(2)]
        assert [(type(e), e.key.step) for e in told] == [(Turn, 1)] * 2


class Stuck:
    """A scoring engine that hangs, or dies of `error`, at its first step."""

    def __init__(self, error=None):
        self.unblock = threading.Event()
        self._error = error
        self._asked = 0

    def submit(self, request):
        self._asked += 1

    def step(self):
        if self._error is not None:
            raise self._error
        self.unblock.wait(PATIENCE_SECS)
        return []

    def release(self, session):
        pass

    @property
    def busy(self):
        return self._asked > 0


@pytest.mark.parametrize(
    "deadline, reason",
    [
        ("trajectory_timeout_secs", "trajectory deadline of 0.4 s passed during "),
        ("step_timeout_secs", "step deadline of 0.4 s passed during "),
    ],
)
def test_a_teacher_that_hangs_holds_neither_the_deadline_nor_the_end(deadline, reason):
    engine = Stuck()
    pool = RolloutPool(
        calls_first(1),
        lambda _: FakeEnvironment(),
        limits(**{deadline: 0.4}),
        seed=0,
        make_teacher=partial(LocalTeacher, engine),
    )
    start = time.monotonic()
    (failed,) = roll(pool, 1)
    assert failed.stop_reason is StopReason.TIMEOUT
    assert failed.reason == reason + "scoring of turn 0"
    assert failed.trajectory.turns == 2 and failed.trajectory.unscored_tokens > 0
    pool.close()
    assert time.monotonic() - start < 8.0
    engine.unblock.set()


def test_death_of_the_teachers_thread_is_raised_with_its_traceback():
    start = time.monotonic()
    with (
        pytest.raises(MemoryError) as raised,
        open_pool(make_teacher=partial(LocalTeacher, Stuck(MemoryError()))) as pool,
    ):
        roll(pool, 8)
    assert time.monotonic() - start < 5.0
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert "step" in [frame.name for frame in frames]
    assert "teacher" not in [thread.name for thread in threading.enumerate()]


CONFIG = ModelConfig(
    vocab_size=byte_level.VOCAB_SIZE,
    layers=2,
    width=16,
    mlp_width=24,
    heads=2,
    kv_heads=1,
    head_dim=8,
)


PARAMS = transformer.init(CONFIG, jax.random.key(1))


def model(**changes):
    settings = {
        "kind": "sampled",
        "top_k": 0,
        "width": CONFIG.vocab_size,
        "temperature": 1.0,
        "sessions": 3,
        "context_tokens": 64,
        "buckets": (64,),
    }
    return scoring.ScoringEngine(Transformer(CONFIG), PARAMS, **(settings | changes))


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"width": 257}, "has token 257; student and teacher share ids 0 .. 256"),
        ({"context_tokens": 9}, r"shape \(10,\); .* at most 9, the teacher's context"),
    ],
)
def test_what_the_engine_refuses_fails_the_member(changes, why):
    make_teacher = partial(LocalTeacher, model(**changes))
    with open_pool(engine=calls_first(1), make_teacher=make_teacher) as pool:
        (failed,) = roll(pool, 1)
    assert failed.stop_reason is StopReason.TEACHER_ERROR
    assert re.match(f"scoring of turn 0: ValueError: session .* {why}", failed.reason)


def test_a_model_scores_what_agents_say():
    """The whole way: pool, thread, engine, and the trajectory run once."""
    engine = model()

    def policy(request, turn):
        # Actions of many lengths.
        rng = np.random.default_rng(request.seed)
        words = rng.integers(65, 91, rng.integers(0, 6)).tolist()
        return [*CALL[: turn < 2], *words, byte_level.END]

    with open_pool(
        engine=FakeEngine(policy), make_teacher=partial(LocalTeacher, engine)
    ) as pool:
        events = roll(pool, 6)
    surrogate_logprobs = jax.jit(tiny_models.logprobs, static_argnums=0)
    tokens = 0
    for event in of_kind(events, Completed):
        trajectory = event.trajectory
        assert trajectory.unscored_tokens == 0
        ids = np.zeros(64, np.int32)
        ids[: len(trajectory.ids)] = trajectory.ids
        expected = surrogate_logprobs(CONFIG, PARAMS, ids, 1.0)
        expected = np.asarray(expected)[: len(trajectory.ids)] * trajectory.loss_mask
        np.testing.assert_allclose(
            trajectory.teacher.logprobs[:, 0], expected, rtol=0, atol=1e-5
        )
        tokens += len(trajectory.ids)
    assert 0.9 < engine.tokens_run / tokens <= 1.0
    assert not engine._sessions
