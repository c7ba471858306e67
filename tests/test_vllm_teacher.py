"""A teacher on servers: the scores of the student's own tokens, or none."""

import asyncio
import contextlib
import re
import time

import numpy as np
import pytest
from rollout_fakes import (
    ANSWER,
    CALL,
    PATIENCE_SECS,
    FakeEngine,
    FakeEnvironment,
    drain,
    jobs,
    of_kind,
    open_pool,
    outcomes,
    roll,
)
from vllm_fake import FakeServer, hashed_logits, log_softmax

from thundersync_jax.engines.vllm import servers
from thundersync_jax.engines.vllm.teacher import VLLMTeacher
from thundersync_jax.errors import ConfigError, ServerError
from thundersync_jax.rollout.events import Completed, Rewarded, Turn
from thundersync_jax.types import StopReason

WIDTH = 262
SOON_SECS = 0.5


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr(servers, "HEALTH_SECS", SOON_SECS)


def teacher_of(*fakes, **changes):
    given = {"kind": "sampled", "top_k": 0, "width": WIDTH, "temperature": 1.0}
    given |= {"context_tokens": 64, "timeout_secs": 20.0, "on_line": lambda line: None}
    return VLLMTeacher([fake.address for fake in fakes], **{**given, **changes})


@contextlib.contextmanager
def taught(*fakes, environment=None, limits=None, **changes):
    """A pool whose policy makes a call and then answers, scored by fake servers."""
    teacher = teacher_of(*fakes, **changes)
    for fake in fakes:
        fake.bodies.clear()  # of the check at the start
        fake.ids.clear()
    engine = FakeEngine(lambda request, turn: ANSWER if turn else CALL)
    connect = teacher.connect
    with open_pool(environment, engine, make_teacher=connect, **(limits or {})) as pool:
        yield pool, teacher


def narrow(prefix):
    """Logits whose likeliest ids are none of the padding."""
    return hashed_logits(prefix) - 50.0 * (np.arange(264) >= WIDTH)


def test_every_sampled_token_has_its_own_score():
    with FakeServer() as a, FakeServer() as b, taught(a, b) as (pool, teacher):
        completed = of_kind(roll(pool, 4), Completed)
        assert len(completed) == 4
        sent = a.bodies + b.bodies
        assert teacher.tokens_run == sum(len(body["prompt"]) for body in sent)
        # A session stays with its server, and no token is sent before it is final.
        for fake in (a, b):
            assert len(fake.bodies) == 4
    for event in completed:
        trajectory = event.trajectory
        scores = trajectory.teacher
        assert scores.ids is None and scores.logprobs.shape[1] == 1
        np.testing.assert_array_equal(scores.known, trajectory.loss_mask)
        for position in np.flatnonzero(trajectory.loss_mask):
            prefix, token = trajectory.ids[:position], trajectory.ids[position]
            expected = log_softmax(hashed_logits(prefix.tolist()))[token]
            np.testing.assert_allclose(scores.logprobs[position], [expected], 1e-6)


def test_likeliest_ids_are_the_teachers_best_first():
    with (
        FakeServer(logits=narrow) as fake,
        taught(fake, kind="top_k", top_k=4) as (pool, _),
    ):
        (completed,) = of_kind(roll(pool, 1), Completed)
    trajectory = completed.trajectory
    for position in np.flatnonzero(trajectory.loss_mask):
        logprobs = log_softmax(narrow(trajectory.ids[:position].tolist()))
        best = np.argsort(-logprobs)[:4]
        np.testing.assert_array_equal(trajectory.teacher.ids[position], best)
        np.testing.assert_allclose(
            trajectory.teacher.logprobs[position], logprobs[best], rtol=1e-6
        )


def test_a_turn_is_scored_while_its_tool_call_runs():
    returned = []

    async def tool():
        if not returned:
            await asyncio.sleep(1.0)
        returned.append(time.monotonic())

    environment = lambda m: FakeEnvironment(step=tool)  # noqa: E731
    with FakeServer() as fake, taught(fake, environment=environment) as (pool, _):
        pool.start(jobs(1), 0)
        turn = pool.next_event(PATIENCE_SECS)
        assert isinstance(turn, Turn) and not returned
        assert len(of_kind(drain(pool), Rewarded)) == 1


def test_padding_among_the_likeliest_ids_fails_the_trajectory():
    def padded(prefix):
        return hashed_logits(prefix) + 50.0 * (np.arange(264) >= WIDTH)

    with (
        FakeServer(logits=padded) as fake,
        taught(fake, kind="top_k", top_k=4) as (pool, _),
    ):
        (failed,) = outcomes(roll(pool, 1)).values()
    assert failed.stop_reason is StopReason.TEACHER_ERROR
    assert "expected 4 below 262: others are padding" in failed.reason


def without_token(body, answer):
    """Tables of the likeliest ids alone."""
    for position, table in enumerate(answer["choices"][0]["prompt_logprobs"]):
        if position:
            del table[str(body["prompt"][position])]
    return answer


@pytest.mark.parametrize(
    "change, expected",
    [
        (without_token, "scoring of turn 0: ValueError: failed 2 times.*no '"),
        (lambda body, answer: "oops", "no JSON but 'oops'"),
    ],
)
def test_a_wrong_score_fails_the_trajectory_where_no_server_knows_better(
    change, expected
):
    with FakeServer() as a, FakeServer() as b, taught(a, b) as (pool, _):
        a.change = change
        assert len(of_kind(roll(pool, 3), Rewarded)) == 3
        b.change = change
        (failed,) = outcomes(roll(pool, 1, step=1)).values()
        assert failed.stop_reason is StopReason.TEACHER_ERROR
        assert failed.trajectory.reward is None
        assert re.search(expected, failed.reason)


def test_a_killed_server_is_replaced_and_the_last_one_ends_the_run():
    lines = []
    with (
        FakeServer() as a,
        FakeServer() as b,
        pytest.raises(ServerError) as raised,
        taught(a, b, on_line=lines.append) as (pool, _),
    ):
        a.kill()
        assert len(of_kind(roll(pool, 4), Rewarded)) == 4
        b.kill()
        roll(pool, 4, step=1)
    assert [line.split()[0] for line in lines] == [a.address, b.address]
    assert a.address in str(raised.value) and b.address in str(raised.value)


def test_a_hung_server_costs_its_deadline_once():
    with (
        FakeServer() as a,
        FakeServer() as b,
        taught(a, b, timeout_secs=SOON_SECS) as (pool, _),
    ):
        a.hang()
        a.healthy = False
        assert len(of_kind(roll(pool, 4), Rewarded)) == 4
        asked = len(a.bodies)
        assert len(of_kind(roll(pool, 4, step=1), Rewarded)) == 4
        assert len(a.bodies) == asked


@pytest.mark.parametrize(
    "given, server, expected",
    [
        ({"kind": "full"}, {}, "full distributions.*loss.distill_top_k"),
        ({"temperature": 0.7}, {}, "temperature 0.7, expected 1: .*before temperature"),
        ({"kind": "top_k", "top_k": WIDTH}, {}, "fewer than all"),
        ({}, {"max_model_len": 64}, "--max-model-len 64, expected at least 65"),
    ],
)
def test_what_no_server_can_do_is_refused_at_start(given, server, expected):
    with FakeServer(**server) as fake, pytest.raises(ConfigError, match=expected):
        teacher_of(fake, **given)


def test_a_server_with_too_few_logprobs_is_refused_at_start():
    with FakeServer() as fake:
        fake.choose_status = lambda body: 400 if body["prompt_logprobs"] > 20 else 200
        teacher_of(fake, kind="top_k", top_k=20)
        with pytest.raises(ConfigError, match="status 400.*--max-logprobs 21"):
            teacher_of(fake, kind="top_k", top_k=21)


def test_a_teacher_needs_no_development_mode():
    with FakeServer(development=False) as fake, taught(fake) as (pool, _):
        assert len(of_kind(roll(pool, 2), Rewarded)) == 2
