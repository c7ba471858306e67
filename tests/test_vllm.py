"""Rollouts sampled by servers: ids, affinity, versions, checks at the start."""

import asyncio
import dataclasses
import sys
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
    never,
    of_kind,
    open_pool,
    outcomes,
    roll,
)
from vllm_fake import VOCAB, FakeServer, engine_of, hashed_logits, log_softmax

from thundersync_jax.chat.byte_level import END
from thundersync_jax.config import VLLMConfig
from thundersync_jax.engines.base import Request
from thundersync_jax.engines.vllm.engine import Published, VLLMEngine
from thundersync_jax.errors import ConfigError, ServerError
from thundersync_jax.rollout.events import Completed, Rewarded
from thundersync_jax.types import StopReason


def open_servers(*fakes, environment=None, lines=None, settings=None, **changes):
    """A pool that samples from fake servers, after its first publication."""
    engine = engine_of(*fakes, lines=lines, **(settings or {}))
    return open_pool(environment, engine, **changes)


def test_sampled_ids_depend_on_neither_servers_nor_slots():
    def rolled(servers, slots):
        with FakeServer() as a, FakeServer() as b:
            fakes = (a, b)[:servers]
            with open_servers(*fakes, slots=slots, cut_actions="run") as pool:
                pool.update(None, 0)
                found = outcomes(roll(pool, 6))
            assert all(len(fake.bodies) >= 6 for fake in fakes)
        return {m: e.trajectory for m, e in found.items()}

    expected = rolled(1, 8)
    assert len({tuple(t.ids) for t in expected.values()}) == 6
    for found in (rolled(2, 8), rolled(2, 4)):
        for member, trajectory in found.items():
            np.testing.assert_array_equal(trajectory.ids, expected[member].ids)
            np.testing.assert_array_equal(
                trajectory.logprobs, expected[member].logprobs
            )


def test_logprobs_are_at_the_temperature_of_the_rollout():
    with FakeServer() as fake, open_servers(fake, temperature=0.7) as pool:
        pool.update(None, 0)
        (completed,) = of_kind(roll(pool, 1), Completed)
    trajectory, found = completed.trajectory, []
    for position in np.flatnonzero(trajectory.loss_mask):
        prefix, token = trajectory.ids[:position].tolist(), trajectory.ids[position]
        found.append(log_softmax(hashed_logits(prefix) / 0.7)[token])
    np.testing.assert_allclose(trajectory.logprobs[trajectory.loss_mask], found, 1e-6)


def test_every_turn_sends_all_ids_to_the_server_that_has_the_prefix():
    with FakeServer() as a, FakeServer() as b:
        for fake in (a, b):
            fake.script = lambda prompt: CALL if len(prompt) == 5 else ANSWER
        with open_servers(a, b) as pool:
            pool.update(None, 0)
            completed = of_kind(roll(pool, 6), Completed)
        for fake in (a, b):
            prompts = [body["prompt"] for body in fake.bodies]
            assert len(prompts) == 6  # the fewest sessions come next: three each
            assert sorted(map(len, prompts))[:3] == [5] * 3
            for event in completed:
                ids, name = event.trajectory.ids, f"-member-{event.key.member}-"
                turns = [
                    np.array_equal(prompt, ids[: len(prompt)])
                    for prompt, label in zip(prompts, fake.ids, strict=True)
                    if name in label
                ]
                assert turns in ([], [True, True])
        assert len(set(a.ids + b.ids)) == 12
        body = a.bodies[0]
        assert body["stop_token_ids"] == [END] and body["max_tokens"] == 8


def test_a_session_stays_with_its_server_though_another_is_idle():
    with FakeServer() as a, FakeServer() as b:
        a.script = lambda prompt: ANSWER
        b.script = lambda prompt: CALL if len(prompt) == 5 else ANSWER
        environment = lambda m: FakeEnvironment(step=after(0.2 * m, None))  # noqa: E731
        with open_servers(a, b, environment=environment) as pool:
            pool.update(None, 0)
            assert len(of_kind(roll(pool, 4), Rewarded)) == 4
        assert (len(a.bodies), len(b.bodies)) == (2, 4)


def test_no_batch_starts_before_weights_were_published():
    with FakeServer() as fake, open_servers(fake) as pool:
        (failed,) = roll(pool, 1)
        assert failed.stop_reason is StopReason.ENGINE_ERROR
        assert "no weights were published" in failed.reason
        pool.update(None, 4)
        (rewarded,) = of_kind(roll(pool, 1, step=1, policy_version=4), Rewarded)
        assert rewarded.trajectory.policy_version == 4
    assert fake.weight_version == "4"


def test_a_skipped_publication_is_found_out():
    """A flag left the sampler with its first weights (verl-project/verl#4248)."""
    policy = {"weights": np.ones(10), "served": np.ones(10)}

    def logits(prefix):
        return hashed_logits(prefix) * policy["served"].sum()

    def reload():
        policy["served"] = policy["weights"].copy()

    def publish(params, version, servers):
        for server in servers if version < 2 else ():
            server.reload()
            server.set_weight_version(str(version))
        return Published(str(version), {})

    with FakeServer(logits=logits) as fake:
        fake.on_reload = reload
        engine = engine_of(fake, publish=publish)
        with pytest.raises(ServerError) as raised, open_pool(engine=engine) as pool:
            pool.update(None, 0)
            assert len(of_kind(roll(pool, 1), Rewarded)) == 1
            policy["weights"] -= 0.1 * np.ones(10)
            pool.update(None, 1)
            assert policy["weights"].sum() == policy["served"].sum() == 9.0
            (rewarded,) = of_kind(roll(pool, 1, 1, policy_version=1), Rewarded)
            assert rewarded.trajectory.policy_version == 1
            assert fake.weight_version == "1"
            pool.update(None, 2)
            roll(pool, 1, 2, policy_version=2)
    assert "version is '1', the policy's '2'" in str(raised.value)


def test_a_server_with_other_weights_answers_nobody():
    """As one that was restarted by somebody."""
    lines = []
    with FakeServer() as a, FakeServer() as b:
        with open_servers(a, b, lines=lines) as pool:
            pool.update(None, 3)
            a.weight_version = "default"
            events = roll(pool, 6, policy_version=3)
            pool.update(None, 4)
            events += roll(pool, 4, step=1, policy_version=4)
        assert len(of_kind(events, Rewarded)) == 10
        assert a.weight_version == "default" and b.weight_version == "4"
    (line,) = lines
    assert f"{a.address} is taken out, 1 left" in line
    assert "version is 'default', the policy's '3'" in line


def test_a_cancelled_turn_is_taken_back_and_its_late_answer_reaches_nobody():
    with FakeServer() as fake, open_servers(fake) as pool:
        pool.update(None, 0)
        fake.delay_secs = 0.5
        pool.start(jobs(4), 0)
        until(lambda: len(fake.bodies) == 4)
        pool.cancel()
        found = outcomes(drain(pool))
        assert {e.stop_reason for e in found.values()} == {StopReason.CANCELLED}
        until(lambda: len(fake.aborted) == 4)
        fake.delay_secs = 0.0
        pool.update(None, 1)
        events = roll(pool, 4, step=1, policy_version=1)
        assert len(of_kind(events, Rewarded)) == 4
    assert len(set(fake.ids)) == 8


def until(condition):
    end = time.monotonic() + PATIENCE_SECS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_nothing_is_left_running():
    before = set(threading.enumerate())
    with FakeServer() as fake:
        with open_servers(fake) as pool:
            pool.update(None, 0)
            roll(pool, 4)
            fake.hang()
            asked = len(fake.bodies)
            pool.start(jobs(3, step=1), 0)
            until(lambda: len(fake.bodies) == asked + 3)
            assert len(fake._sockets) >= 4  # one of them is kept for later
        assert not pool._thread.is_alive()
        until(lambda: len(fake.aborted) == 3)
        until(lambda: not fake._sockets)
    with FakeServer() as fake, open_servers(fake):
        pass  # nor where it never began
    until(lambda: set(threading.enumerate()) <= before)


def test_temperature_zero_takes_the_largest():
    with FakeServer() as fake:
        engine = engine_of(fake)
        loop = asyncio.new_event_loop()
        connection = engine.connect(loop, on_error=lambda error: None)
        connection.update(None, 0, 1.0)
        given = {"max_new_tokens": 3, "stop_ids": (), "temperature": 0.0, "seed": (1,)}
        request = Request("s", np.arange(1, 4, dtype=np.int32), **given)
        response = loop.run_until_complete(connection.sample(request))
        prefix = [1, 2, 3]
        for chosen, logprob in zip(response.ids, response.logprobs, strict=True):
            logprobs = log_softmax(hashed_logits(prefix))
            assert chosen == np.argmax(logprobs)
            np.testing.assert_allclose(logprob, logprobs[chosen], rtol=1e-6)
            prefix.append(int(chosen))
        wide = Request("t", np.arange(62, dtype=np.int32), **given)
        with pytest.raises(ValueError, match="62 tokens.*sample 3.*at most 64"):
            loop.run_until_complete(connection.sample(wide))
        for temperature in (0.009, 2.1, -1.0):
            hot = dataclasses.replace(request, temperature=temperature)
            with pytest.raises(ValueError, match="expected 0 or 0.01 to 2"):
                loop.run_until_complete(connection.sample(hot))
        connection._servers._keeper.cancel()
        loop.run_until_complete(asyncio.wait([connection._servers._keeper]))
        assert connection.close(0.0)
        loop.close()


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"max_model_len": 63}, "--max-model-len 63, expected at least 64"),
        ({"development": False}, "404.*VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_a_server_started_otherwise_is_refused_at_start(given, expected):
    with FakeServer() as good, FakeServer(**given) as fake:
        with pytest.raises(ConfigError, match=expected) as raised:
            engine_of(good, fake)
        assert fake.address in str(raised.value)
        assert good.address not in str(raised.value)


def test_a_server_that_is_not_there_is_refused_at_start():
    with FakeServer() as fake:
        pass
    with pytest.raises(ConfigError, match=f"{fake.address}/health: ConnectError.*/hea"):
        engine_of(fake)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    settings = VLLMConfig(("http://localhost:1",), weights_dir="/served")
    with pytest.raises(ConfigError, match=r"pip install 'thundersync_jax\[vllm\]'"):
        VLLMEngine(settings, 64, VOCAB, lambda *_: {})


def test_an_environment_may_wait_while_servers_answer_others():
    """A session in its tool call is no request."""
    with FakeServer() as fake:
        fake.script = lambda prompt: ANSWER
        environment = lambda m: FakeEnvironment(step=None if m else never)  # noqa: E731
        with open_servers(fake, environment=environment, step_timeout_secs=0.5) as pool:
            pool.update(None, 0)
            found = outcomes(roll(pool, 4))
            assert found.pop(0).stop_reason is StopReason.TIMEOUT
            assert all(isinstance(event, Rewarded) for event in found.values())
            pool.update(None, 1)
        assert len(fake.bodies) == 4 and not fake.aborted
