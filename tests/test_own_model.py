"""A model of another family in the whole loop: sampled, trained, saved, evaluated."""

import dataclasses

import echo_task
import gru_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax import evaluate, export, train
from thundersync_jax.config import ModelConfig
from thundersync_jax.config.settings import replace
from thundersync_jax.engines.base import ScoreRequest
from thundersync_jax.engines.scoring import ScoringEngine
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics.records import read_rollouts, rollouts_path
from thundersync_jax.metrics.writer import read
from thundersync_jax.models import base
from thundersync_jax.models.base import FromLogits
from thundersync_jax.run import state

pytestmark = pytest.mark.usefixtures("quick_programs")

STEPS = 3
FLOAT32 = 1e-5  # another program, and float32 against float64
NAMED = {"model.factory": "gru_model:make", "model.width": 12}
CONFIG = replace(echo_task.SCRIPTED, {"steps": STEPS, "release": "trajectory"} | NAMED)
ENVIRONMENT = echo_task.scripted([1.0, 0.0, 0.25, 1.0])


@pytest.fixture
def first_update(monkeypatch):
    """Parameters and gradient of the first update that a run makes."""
    seen, call = [], state.Update.__call__

    def kept(self, now, gradient):
        seen.append(jax.device_get((now.params, gradient)))
        return call(self, now, gradient)

    monkeypatch.setattr(state.Update, "__call__", kept)
    return seen


def in_float64(params, trajectories, temperature):
    """Gradient of the whole batch at once, and log-probabilities by trajectory.

    loss = - sum_i (r_i - mean of its group) sum_t log pi(a_t) / all sampled tokens
    """
    groups = {}
    for one in trajectories:
        groups.setdefault(one.key.group, []).append(one.reward)

    def logprobs(params, ids):
        table = jax.nn.log_softmax(wide.logits(params, ids) / temperature)
        return table[np.arange(len(ids) - 1), ids[1:]]

    def loss(params):
        total, tokens, found = 0.0, 0, []
        for one in trajectories:
            found.append(logprobs(params, np.asarray(one.ids)))
            mask = np.asarray(one.loss_mask)[1:]
            advantage = one.reward - np.mean(groups[one.key.group])
            total -= advantage * jnp.sum(found[-1] * mask)
            tokens += mask.sum()
        return total / tokens, found

    with jax.enable_x64(True):
        wide = gru_model.make(dataclasses.replace(CONFIG.model, dtype="float64"))
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
        return jax.device_get(jax.grad(loss, has_aux=True)(params))


def relative_difference(tree, reference):
    difference = jax.tree.map(lambda x, y: np.asarray(x, float) - y, tree, reference)
    squares = [
        sum(np.sum(np.square(x)) for x in jax.tree.leaves(t))
        for t in (difference, reference)
    ]
    return np.sqrt(squares[0] / squares[1])


@pytest.mark.parametrize("shared", ["no", "group"])
def test_three_steps_and_the_gradient_of_the_first(tmp_path, first_update, shared):
    """Named by the config, or given as an argument; prompts shared, or not."""
    config = replace(CONFIG, {"share_prompt": shared})
    model = None
    if shared == "group":
        config, model = replace(config, {"model.factory": None}), gru_model.make
    result = train.train(config, tmp_path, environment=ENVIRONMENT, model=model)
    rows = read(tmp_path)[1:]
    assert len(rows) == STEPS and all(row["gradient_norm"] > 0 for row in rows)
    assert rows[0]["mismatch_max"] < FLOAT32
    params, gradient = first_update[0]
    assert {"embed", "lower", "upper", "head"} == params.keys()
    records = read_rollouts(rollouts_path(tmp_path, 1))
    trajectories = [record.trajectory for record in records]
    expected, logprobs = in_float64(params, trajectories, config.rollout.temperature)
    assert relative_difference(gradient, expected) < FLOAT32
    for one, learned in zip(trajectories, logprobs, strict=True):
        mask = np.asarray(one.loss_mask)
        sampled = np.asarray(one.logprobs)[mask]
        np.testing.assert_allclose(sampled, learned[mask[1:]], rtol=0, atol=FLOAT32)
    before = first_update[0][0], first_update[1][0]
    assert relative_difference(*before) > 1e-4  # the update arrived
    if shared == "no":
        found = evaluate.evaluate(
            config, tmp_path, samples=1, questions=4, environment=ENVIRONMENT
        )
        assert found["step"] == result["steps"] == STEPS


def test_a_model_of_logits_teaches():
    """The scoring engine in pieces, two sessions at a time, against the whole."""
    model = gru_model.make(ModelConfig(vocab_size=20, width=8))
    params = model.init(jax.random.key(1))
    engine = ScoringEngine(
        model,
        params,
        kind="sampled",
        top_k=0,
        width=20,
        temperature=0.7,
        sessions=2,
        context_tokens=16,
        buckets=(4,),
    )
    rng, found = np.random.default_rng(0), {}
    tokens = rng.integers(0, 20, (3, 15)).astype(np.int32)
    for name, ids in enumerate(tokens):
        engine.submit(ScoreRequest(name, ids[:9], np.arange(2, 9)))
    while engine.busy:
        for answer in engine.step():
            name = answer.session
            found.setdefault(name, []).append(answer.logprobs[:, 0])
            if len(found[name]) == 1:
                engine.submit(ScoreRequest(name, tokens[name], np.arange(10, 15)))
            else:
                engine.release(name)
    logprobs = jax.jit(base.logprobs, static_argnums=0)
    for name, ids in enumerate(tokens):
        expected = np.delete(logprobs(model, params, ids, 0.7), [0, 1, 9])
        scores = np.concatenate(found[name])
        np.testing.assert_allclose(scores, expected, rtol=0, atol=FLOAT32)


def test_what_follows_a_position_reaches_neither_sampler_nor_pieces():
    """Leftovers of other sessions lie behind it; this model counts all that it gets."""

    def logits(params, tokens):
        counts = jnp.sum(jnp.eye(7)[tokens], axis=0).at[0].set(0)  # 0 fills up
        return params["w"] * jnp.broadcast_to(counts, (len(tokens), 7))

    model = FromLogits(7, lambda key: {"w": jnp.ones(())}, logits)
    params = {"w": jnp.float32(2.0)}
    cache = jnp.full((1, 1, 6), 5, jnp.int32)
    cache, hidden = model.decode(
        params, cache, jnp.array([[3, 4]]), jnp.array([[0, 1]])
    )
    expected = 2 * np.cumsum(np.eye(7)[[3, 4]], axis=0)
    np.testing.assert_array_equal(model.decode_logits(params, hidden), expected)
    np.testing.assert_array_equal(cache[0, 0], [3, 4, 5, 5, 5, 5])
    kept = jnp.full(6, 5.0).at[0].set(3.0)
    rows, own = model.segment(params, jnp.array([4]), kept, jnp.int32(1))
    np.testing.assert_array_equal(rows, expected[1:])
    np.testing.assert_array_equal(own, [4.0])


def other(**changes):
    """The same model with something about it changed, as a factory."""
    return lambda config: dataclasses.replace(gru_model.make(config), **changes)


@pytest.mark.parametrize(
    "settings, arguments, message",
    [
        ({"vllm.servers": ("http://host:1",), "vllm.weights_dir": "f"}, {}, "decoder"),
        ({"model.factory": "gru_model"}, {}, "module:function"),
        ({"model.factory": "gru_model:missing"}, {}, "no function 'missing'"),
        ({"model.factory": "json:dump"}, {}, r"dump\(config.model\)"),
        ({}, {"model": other(vocab_size=300)}, "vocab_size 300 with model.vocab_size"),
        ({}, {"model": lambda config: None}, "vocab_size None"),
        ({}, {"model": other(logits=lambda p, t: jnp.ones(3))}, r"shape \(3,\)"),
    ],
)
def test_refusals(tmp_path, settings, arguments, message):
    with pytest.raises(ConfigError, match=message):
        config = replace(CONFIG, settings)
        train.train(config, tmp_path, environment=ENVIRONMENT, **arguments)


def test_servers_and_folders_hold_the_decoder_alone(tmp_path):
    folder = {"vllm.servers": ("http://host:1",), "vllm.weights_dir": "f"}
    config = replace(echo_task.SCRIPTED, folder)
    with pytest.raises(ConfigError, match="vllm.servers .* the argument model"):
        train.train(config, tmp_path, environment=ENVIRONMENT, model=gru_model.make)
    with pytest.raises(ConfigError, match="model.factory is 'gru_model:make'"):
        export.export(CONFIG, folder=str(tmp_path), initial=True)
