"""Against a real vLLM server: whose numbers are the learner's, and who is in charge.

    THUNDERSYNC_VLLM=/path/to/vllm pytest tests/test_vllm_real.py

starts one on a free port, with a tiny Qwen3 of random parameters, and stops it.
"""

import asyncio
import re
import time
import urllib.request

import jax
import numpy as np
import pytest
import tiny_models
from rollout_fakes import (
    PATIENCE_SECS,
    drain,
    jobs,
    of_kind,
    open_pool,
    outcomes,
    roll,
)
from vllm_process import MARKS, Process

from thundersync_jax import export
from thundersync_jax.config import Config, ModelConfig, VLLMConfig
from thundersync_jax.engines.vllm.engine import VLLMEngine
from thundersync_jax.engines.vllm.publish import Publisher
from thundersync_jax.engines.vllm.teacher import VLLMTeacher
from thundersync_jax.errors import ServerError
from thundersync_jax.models import transformer
from thundersync_jax.rollout.events import Completed, Rewarded
from thundersync_jax.types import StopReason

pytestmark = MARKS
# On CPU, vLLM dies of heads below 32 at its first token, and its reload leaves the head
# of a model with tied embeddings as it was.
MODEL = ModelConfig(
    heads=2,
    kv_heads=1,
    head_dim=32,
    qk_norm=True,
    rope_theta=1_000.0,
    tied_embeddings=False,
)
CONTEXT = 512
TOLERANCE = 1e-4  # nats, of float32 on both sides


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server, the process that it is, and its folder."""
    folder = tmp_path_factory.mktemp("served") / "weights"
    export.export(Config(model=MODEL), folder=str(folder), initial=True)
    with Process(folder, CONTEXT) as process:
        process.wait()
        yield process.server, process, str(folder)


def params_of(seed):
    return transformer.init(MODEL, jax.random.key(seed))


learner_logprobs = jax.jit(
    lambda params, ids, temperature: tiny_models.logprobs(
        MODEL, params, ids, temperature
    )
)


@jax.jit
def learner_distributions(params, ids):
    """float32[T, V], log-probabilities of what comes after each token."""
    hidden, _ = transformer.segment(MODEL, params, ids)
    head = transformer.head_weights(params)
    return jax.nn.log_softmax(transformer.logits(MODEL, head, hidden))


def engine_of(served, lines=None):
    server, _, folder = served
    settings = VLLMConfig((server.address,), folder)
    on_line = print if lines is None else lines.append
    publisher = Publisher(settings, MODEL, CONTEXT, on_line)
    vocab_size = MODEL.vocab_size
    return VLLMEngine(settings, CONTEXT, vocab_size, publisher.publish, on_line)


def padded(ids):
    """One length, so that the learner compiles once."""
    return np.pad(ids, (0, CONTEXT - len(ids)))


def largest_gap(params, trajectory, temperature):
    mask = trajectory.loss_mask
    ids = padded(trajectory.ids)
    found = learner_logprobs(params, ids, np.float32(temperature))
    return np.max(np.abs(np.asarray(found)[: len(mask)] - trajectory.logprobs)[mask])


def test_sampled_logprobs_are_the_learners_after_every_update(served):
    lines, gaps = [], []
    limits = {"temperature": 0.7, "turn_tokens": 24, "context_tokens": 160}
    limits |= {"prefill_buckets": (160,), "gradient_buckets": (160,)}
    engine = engine_of(served, lines)
    with open_pool(engine=engine, cut_actions="run", turns=4, **limits) as pool:
        for version in range(3):
            params = params_of(version)
            pool.update(params, version)
            events = roll(pool, 8, step=version, policy_version=version)
            rewarded = of_kind(events, Rewarded)
            assert len(rewarded) == 8
            for event in rewarded:
                assert event.trajectory.policy_version == version
                gaps.append(largest_gap(params, event.trajectory, 0.7))
            assert max(gaps) < TOLERANCE
            # Of other weights they are far off: nothing here holds by chance.
            assert largest_gap(params_of(9), events[0].trajectory, 0.7) > 0.01
    assert len(lines) == 1  # the first probe's
    assert served[1].alive
    print(f"largest gap of {len(gaps)} trajectories: {max(gaps):.1e} nats")


def test_the_same_prompt_is_answered_by_the_new_weights(served):
    server = served[0]
    prompt = np.random.default_rng(0).integers(0, 256, 300).astype(np.int32)
    given = {"max_tokens": 4, "temperature": 0.7, "seed": 1}
    with open_pool(engine=engine_of(served)) as pool:
        for version in range(2):
            params = params_of(10 + version)
            pool.update(params, version)
            for _ in range(2):  # the second one finds the prefix in the cache
                found = server.complete(prompt, **given)
                ids = padded(np.concatenate([prompt, found.ids]))
                expected = learner_logprobs(params, ids, np.float32(0.7))
                np.testing.assert_allclose(
                    found.logprobs, expected[300:304], atol=TOLERANCE, rtol=0
                )
        assert server.weight_version().startswith("policy 1,")


def test_stops_limits_and_temperature_zero(served):
    server = served[0]
    prompt = np.arange(8, dtype=np.int32)
    given = {"max_tokens": 12, "temperature": 0.0, "seed": 1}
    whole = server.complete(prompt, **given)
    assert len(whole.ids) == 12 and not whole.stopped
    last = int(np.flatnonzero(whole.ids == whole.ids[-1])[0])
    cut = server.complete(prompt, **given, stop_ids=[int(whole.ids[-1])])
    assert cut.stopped and cut.ids.tolist() == whole.ids[: last + 1].tolist()
    # The folder's end token ends nothing that was not asked to end there.
    sampled = server.complete(prompt, max_tokens=400, temperature=2.0, seed=2)
    assert len(sampled.ids) == 400
    again = server.complete(prompt, max_tokens=400, temperature=2.0, seed=2)
    other = server.complete(prompt, max_tokens=400, temperature=2.0, seed=3)
    assert sampled.ids[:50].tolist() == again.ids[:50].tolist()
    assert sampled.ids[:50].tolist() != other.ids[:50].tolist()
    # What does not fit is cut without a word.
    with pytest.raises(ValueError, match="504 of 510 tokens, ended by 'length'"):
        server.complete(prompt, max_tokens=510, temperature=1.0, seed=1)
    with pytest.raises(ValueError, match="status 400: .*out of vocabulary"):
        server.complete(np.array([5, 5_000]), max_tokens=1, temperature=1.0, seed=1)


@pytest.mark.parametrize("kind", ["sampled", "top_k"])
def test_a_teachers_scores_are_the_learners_numbers(served, kind):
    server = served[0]
    params = params_of(3)
    with open_pool(engine=engine_of(served)) as pool:
        pool.update(params, 0)
    teacher = VLLMTeacher(
        [server.address],
        kind=kind,
        top_k=5 if kind == "top_k" else 0,
        width=MODEL.vocab_size,
        temperature=1.0,
        context_tokens=CONTEXT - 1,
        timeout_secs=60.0,
    )
    ids = np.random.default_rng(1).integers(0, 256, 100).astype(np.int32)
    positions = np.array([1, 17, 60, 99])
    loop = asyncio.new_event_loop()
    connection = teacher.connect(loop, on_error=print)
    scored = loop.run_until_complete(connection.logprobs("s", ids, positions))
    close(loop, connection)
    assert teacher.tokens_run == 100
    logprobs = np.asarray(learner_distributions(params, padded(ids)))[positions - 1]
    if kind == "sampled":
        expected = logprobs[range(4), ids[positions]][:, None]
    else:
        np.testing.assert_array_equal(scored.ids, np.argsort(-logprobs)[:, :5])
        expected = np.take_along_axis(logprobs, scored.ids, axis=1)
    np.testing.assert_allclose(scored.logprobs, expected, atol=TOLERANCE, rtol=0)


def close(loop, connection):
    keeper = connection._servers._keeper
    keeper.cancel()
    loop.run_until_complete(asyncio.wait([keeper]))
    loop.close()


def test_cancelled_turns_are_given_up_by_the_server(served):
    server = served[0]
    limits = {"context_tokens": CONTEXT, "turn_tokens": 480, "stop_ids": ()}
    limits |= {"prefill_buckets": (CONTEXT,), "gradient_buckets": (CONTEXT,)}
    with open_pool(engine=engine_of(served), **limits) as pool:
        pool.update(params_of(0), 0)
        pool.start(jobs(8), 0)
        until(lambda: running(server) > 3)
        pool.cancel()
        found = outcomes(drain(pool))
        assert {e.stop_reason for e in found.values()} == {StopReason.CANCELLED}
        start = time.monotonic()
        pool.update(params_of(1), 1)  # it waits for what runs
        until(lambda: running(server) == 0)
        assert time.monotonic() - start < 5.0


def running(server):
    with urllib.request.urlopen(f"{server.address}/metrics") as answer:
        text = answer.read().decode()
    counts = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.M)
    return sum(map(float, counts))


def until(condition):
    end = time.monotonic() + PATIENCE_SECS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_killed_server_ends_the_run_with_the_reason(served):
    """The last test: nothing is served after it."""
    _, process, _ = served
    with (
        pytest.raises(ServerError, match="no vLLM server is left.*/health"),
        open_pool(engine=engine_of(served)) as pool,
    ):
        pool.update(params_of(0), 0)
        assert len(of_kind(roll(pool, 2), Completed)) == 2
        process.kill()
        start = time.monotonic()
        roll(pool, 4, step=1)
    assert time.monotonic() - start < 10.0
