"""Servers that die, hang, are slow or talk nonsense: what becomes of the rollouts."""

import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest
from rollout_fakes import (
    ANSWER,
    CALL,
    PATIENCE_SECS,
    FakeEnvironment,
    after,
    drain,
    jobs,
    of_kind,
    open_pool,
    outcomes,
    roll,
)
from vllm_fake import FakeServer, engine_of

from thundersync_jax.engines.vllm import servers as vllm_servers
from thundersync_jax.engines.vllm import wire
from thundersync_jax.engines.vllm.engine import Published
from thundersync_jax.errors import ServerError
from thundersync_jax.rollout.events import Completed, Failed, Rewarded
from thundersync_jax.types import StopReason

HEALTH_SECS = vllm_servers.HEALTH_SECS
SOON_SECS = 0.5


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    """A server that is well says so within this."""
    monkeypatch.setattr(vllm_servers, "HEALTH_SECS", SOON_SECS)


@contextlib.contextmanager
def two_servers(lines, **changes):
    """Two servers that answer each member with a call and then an answer."""
    settings = {"request_timeout_secs": changes.pop("request_timeout_secs", 20.0)}
    settings["attempts"] = changes.pop("tries", 2)
    with FakeServer() as a, FakeServer() as b:
        for fake in (a, b):
            fake.script = lambda prompt: CALL if len(prompt) == 5 else ANSWER
        engine = engine_of(a, b, lines=lines, **settings)
        with open_pool(changes.pop("environment", None), engine, **changes) as pool:
            pool.update(None, 0)
            yield a, b, pool


def after_bodies(fake, count, action):
    """Acts when a server has been asked so often, and before it answers."""

    def change(body, answer):
        if len(fake.bodies) >= count:
            action()
        return answer

    fake.change = change


def test_killing_one_of_two_servers_costs_no_trajectory():
    lines = []
    with two_servers(lines) as (a, _, pool):
        after_bodies(a, 3, a.kill)
        found = outcomes(roll(pool, 8))
        assert 1 <= pool._driver._engine.retries <= 8
        assert all(isinstance(event, Rewarded) for event in found.values())
        assert {event.trajectory.turns for event in found.values()} == {2}
        # The next steps ask the other one alone.
        pool.update(None, 1)
        events = roll(pool, 4, step=1, policy_version=1)
        assert len(of_kind(events, Rewarded)) == 4
    (line,) = lines
    assert line.startswith(f"{a.address} is taken out, 1 left: ")
    assert "ConnectError" in line


def test_a_server_that_dies_between_steps_is_missed_by_the_publication():
    def publish(params, version, servers):
        lost = {}
        for server in servers:
            try:
                server.set_weight_version(str(version))
            except ConnectionError as error:
                lost[server] = str(error)
        return Published(str(version), lost)

    lines = []
    with FakeServer() as a, FakeServer() as b:
        engine = engine_of(a, b, lines=lines, publish=publish)
        with pytest.raises(ServerError) as raised, open_pool(engine=engine) as pool:
            pool.update(None, 0)
            a.kill()
            pool.update(None, 1)
            assert len(of_kind(roll(pool, 2, policy_version=1), Rewarded)) == 2
            b.kill()
            pool.update(None, 2)
    assert [line.split()[0] for line in lines] == [a.address, b.address]
    assert a.address in str(raised.value) and b.address in str(raised.value)


def test_killing_both_servers_ends_the_run_with_what_each_died_of():
    start = time.monotonic()
    with (
        pytest.raises(ServerError) as raised,
        two_servers([]) as (a, b, pool),
    ):
        after_bodies(a, 3, a.kill)
        after_bodies(b, 3, b.kill)
        roll(pool, 8)
    assert time.monotonic() - start < 5.0
    text = str(raised.value)
    assert a.address in text and b.address in text and text.count("ConnectError") >= 2
    assert "no vLLM server is left" in text


@pytest.mark.parametrize("front", ["hangs", "is well"])
def test_a_hung_server_is_taken_out_and_its_turns_go_elsewhere(front):
    """Or every step would wait for it again."""
    lines = []
    with two_servers(lines, request_timeout_secs=SOON_SECS) as (a, _, pool):
        a.hang()
        a.healthy = front == "is well"
        found = outcomes(roll(pool, 6))
        assert all(isinstance(event, Rewarded) for event in found.values())
        asked = len(a.bodies)
        assert len(of_kind(roll(pool, 6, step=1), Rewarded)) == 6
        assert len(a.bodies) == asked == 3 + (front == "is well")
    (line,) = lines
    assert f"{a.address} is taken out, 1 left: no answer within 0.5 s" in line
    why = {"hangs": "/health", "is well": "one token"}[front]
    assert f"; {why}: no answer within 0.5 s" in line


def test_both_servers_hung_end_the_run_after_the_deadline_of_a_turn():
    start = time.monotonic()
    with (
        pytest.raises(ServerError, match="no vLLM server is left"),
        two_servers([], request_timeout_secs=SOON_SECS) as (a, b, pool),
    ):
        for fake in (a, b):
            fake.hang()
            fake.healthy = False
        roll(pool, 4)
    assert time.monotonic() - start < 5.0


def test_a_hung_server_is_found_where_no_turn_may_wait_for_its_deadline():
    """The trajectory's own deadline comes first, and the next step needs to know."""
    lines = []
    with two_servers(lines, trajectory_timeout_secs=3 * SOON_SECS) as (a, _, pool):
        a.hang()
        a.healthy = False
        found = outcomes(roll(pool, 4))
        failed = [e for e in found.values() if isinstance(e, Failed)]
        assert [e.stop_reason for e in failed] == [StopReason.TIMEOUT] * 2
        assert "during decoding of turn 0" in failed[0].reason
        end = time.monotonic() + PATIENCE_SECS
        while not lines and time.monotonic() < end:
            time.sleep(0.01)
        assert len(of_kind(roll(pool, 4, step=1), Rewarded)) == 4
    assert a.address in lines[0] and "/health" in lines[0]


def test_a_server_whose_idle_worker_missed_a_call_is_kept(monkeypatch):
    """vLLM's looks again after 5 s (SHM_READER_RECHECK_INTERVAL_MS)."""
    monkeypatch.setattr(vllm_servers, "HEALTH_SECS", HEALTH_SECS)
    lines = []
    with two_servers(lines, request_timeout_secs=SOON_SECS) as (a, _, pool):
        a.delay_secs = 5.5
        assert len(of_kind(roll(pool, 2), Rewarded)) == 2
        a.delay_secs = 0.0
        asked = len(a.bodies)
        assert len(of_kind(roll(pool, 2, step=1), Rewarded)) == 2
        assert len(a.bodies) > asked
    assert not lines


@pytest.mark.parametrize("keep_secs, connections", [(60.0, 1), (0.1, 2)])
def test_no_connection_is_used_that_its_server_may_be_ending(
    monkeypatch, keep_secs, connections
):
    """VLLM_HTTP_TIMEOUT_KEEP_ALIVE is 5 s: a request at that moment met a ReadError."""
    assert 0 < wire.KEEP_SECS < 5
    monkeypatch.setattr(wire, "KEEP_SECS", keep_secs)

    async def twice(url):
        async with wire.async_client() as client:
            await client.get(url)
            await asyncio.sleep(0.3)
            await client.get(url)

    with FakeServer() as fake, wire.client(PATIENCE_SECS) as client:
        client.get(f"{fake.address}/health")
        time.sleep(0.3)
        client.get(f"{fake.address}/health")
        assert fake.connections == connections
        asyncio.run(twice(f"{fake.address}/health"))
        assert fake.connections == 2 * connections


def test_one_slow_answer_of_a_server_that_is_well_costs_a_try_alone():
    lines = []
    with two_servers(lines, request_timeout_secs=SOON_SECS) as (a, b, pool):
        first = threading.Event()

        def once(body, answer):
            if not first.is_set():
                first.set()
                time.sleep(2 * SOON_SECS)
            return answer

        a.change = once
        environment = after(0.5 * SOON_SECS, None)
        pool._make_environment = lambda key: FakeEnvironment(step=environment)
        found = outcomes(roll(pool, 6))
        assert all(isinstance(event, Rewarded) for event in found.values())
        assert len(a.bodies) + len(b.bodies) > 12
        assert any("try-1" in label for label in a.ids + b.ids)
    assert not lines


def test_the_last_long_answer_of_a_step_takes_no_server_out():
    """It alone is out, and takes longer than allowed: its trajectory fails."""
    lines = []
    with two_servers(lines, request_timeout_secs=SOON_SECS) as (a, b, pool):
        for fake in (a, b):
            fake.change = lambda body, answer: (
                time.sleep(2 * SOON_SECS * (len(body["prompt"]) > 1)) or answer
            )
        (failed,) = roll(pool, 1)
        assert failed.reason.count("no answer within 0.5 s") == 2
        for fake in (a, b):
            fake.change = None
        assert len(of_kind(roll(pool, 2, step=1), Rewarded)) == 2
    assert not lines


def shorter(answer):
    answer["choices"][0]["token_ids"].pop()
    return answer


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda body, answer: "<html>", "no JSON but '<html>'"),
        (lambda body, answer: "{", "no JSON but '{'"),
        (lambda body, answer: shorter(answer), "of 8 tokens, ended by 'stop'"),
        (lambda body, answer: [], "no 'choices'"),
    ],
)
def test_a_wrong_answer_is_asked_for_elsewhere_and_never_trained(change, expected):
    with two_servers([]) as (a, b, pool):
        a.change = change
        found = outcomes(roll(pool, 4))
        assert all(isinstance(event, Rewarded) for event in found.values())
        b.change = change
        events = roll(pool, 4, step=1)
        assert not of_kind(events, Completed)
        for failed in outcomes(events).values():
            assert failed.stop_reason is StopReason.ENGINE_ERROR
            assert "decoding of turn 0: ValueError: failed 2 times" in failed.reason
            assert expected in failed.reason and failed.trajectory.turns == 0


def test_tries_are_as_many_as_allowed_and_have_names_of_their_own():
    lines = []
    with two_servers(lines, tries=3) as (a, b, pool):
        for fake in (a, b):
            fake.change = lambda body, answer: "oops"
        (failed,) = roll(pool, 1)
        labels = a.ids + b.ids
        assert len(labels) == len(set(labels)) == 3
        assert sorted(label[-5:] for label in labels) == ["try-0", "try-1", "try-2"]
        assert "failed 3 times" in failed.reason
        for fake in (a, b):
            fake.choose_status = lambda body: 400
        (failed,) = roll(pool, 1, step=1)
        assert len(a.ids + b.ids) == 4  # it would be refused again
        assert "RefusedRequest" in failed.reason and "status 400" in failed.reason
    assert not lines


def test_a_server_that_names_no_weights_any_more_is_taken_out():
    """As one that came back without its development mode."""
    lines = []
    with two_servers(lines) as (a, _, pool):
        a.development = False
        assert len(of_kind(roll(pool, 4), Rewarded)) == 4
    (line,) = lines
    assert a.address in line and "not told (status 404: Not Found)" in line


def test_a_server_that_fails_once_is_kept_and_one_that_cannot_do_a_token_is_not():
    lines = []
    with two_servers(lines) as (a, b, pool):
        statuses = [500]
        for fake in (a, b):
            fake.choose_status = lambda body: statuses.pop() if statuses else 200
        assert len(of_kind(roll(pool, 2), Rewarded)) == 2
        assert not lines
        a.choose_status = lambda body: 503
        assert len(of_kind(roll(pool, 2, step=1), Rewarded)) == 2
    (line,) = lines
    assert a.address in line and "status 503: the engine is not well" in line
    assert "; one token: status 503" in line


def test_a_server_gone_in_the_middle_of_a_step_takes_its_sessions_prefixes_along():
    """The other server goes on with all ids, not with the latest ones."""
    with two_servers([]) as (a, b, pool):
        pool._make_environment = lambda key: FakeEnvironment(step=after(0.1, None))
        pool.start(jobs(2), 0)
        while not (a.bodies and b.bodies):
            time.sleep(0.005)
        a.kill()
        completed = of_kind(drain(pool), Completed)
        assert len(completed) == 2
        for event in completed:
            ids = event.trajectory.ids
            second = [x["prompt"] for x in b.bodies if len(x["prompt"]) > 5]
            assert any(np.array_equal(p, ids[: len(p)]) for p in second)
