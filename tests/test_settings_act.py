"""Every setting is listed and changes something: model, optimizer, warm start.

Those of a loss are tested in `test_objective.py`, deadlines and the like in
`test_agent.py` and `test_pool.py`, what contradicts itself in `test_config.py`.
"""

import dataclasses
import functools
import sys
import types

import echo_task
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from thundersync_jax import flags, train
from thundersync_jax.chat.byte_level import ByteLevel
from thundersync_jax.config import Config, ModelConfig, OptimConfig
from thundersync_jax.config.model_folder import RopeScaling
from thundersync_jax.errors import ConfigError
from thundersync_jax.models import base, transformer
from thundersync_jax.run import state, warm_start
from thundersync_jax.run.step import Evaluation
from thundersync_jax.stream.mesh import make_mesh

pytestmark = pytest.mark.usefixtures("quick_programs")

MODEL = ModelConfig(layers=1, width=16, mlp_width=32, heads=2, kv_heads=2, head_dim=8)
# For every setting another value.
OTHER_MODEL = {
    "factory": "gru_model:make",
    "vocab_size": 272,
    "layers": 2,
    "width": 24,
    "mlp_width": 48,
    "heads": 4,
    "kv_heads": 1,
    "head_dim": 4,
    "rope_theta": 1e6,
    "rope": RopeScaling("linear", factor=2.0),
    "norm_eps": 1e-3,
    "qk_norm": True,
    "attention_bias": True,
    "tied_embeddings": False,
    "dtype": "bfloat16",
    "logprob_chunk_tokens": 4,
    "matmul_precision": "default",
}
OPTIM = OptimConfig(
    0.1,
    warmup_steps=1,
    weight_decay=0.3,
    b1=0.8,
    b2=0.7,
    clip_norm=1,
    schedule="linear",
    decay_steps=4,
)
OTHER_OPTIM = {
    "learning_rate": 0.2,
    "warmup_steps": 2,
    "schedule": "cosine",
    "decay_steps": 3,
    "floor": 0.5,
    "factory": f"{__name__}:sign_descent",
    "weight_decay": 0.1,
    "b1": 0.5,
    "b2": 0.5,
    "clip_norm": None,
}
# Of different directions and sizes, so that clipping turns their mean.
GRADIENTS = np.float32([[3.0, 4.0], [0.1, -0.2], [-0.5, 5.0]])
START = np.float32([2.0, -1.0])


@functools.cache
def program(config):
    """What a model computes, as text, and the constants in it."""
    model = base.build(config)
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((12,), jnp.int32)

    def logprobs(params, tokens):
        return base.logprobs(model, params, tokens, 1.0)

    computed = jax.make_jaxpr(logprobs)(params, tokens)
    return f"{computed}\n{computed.consts}"


# What a path changes is tested in `test_families.py`, the numbers of a scaling too.
@pytest.mark.parametrize(
    "name", [f.name for f in dataclasses.fields(ModelConfig) if f.name != "path"]
)
def test_every_setting_of_a_model_changes_its_program(name):
    """An accepted setting had no effect (THUDM/slime#397)."""
    changed = dataclasses.replace(MODEL, **{name: OTHER_MODEL[name]})
    assert program(changed) != program(MODEL)


def test_a_model_has_one_program():
    assert program.__wrapped__(MODEL) == program(MODEL)


@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_precision_reaches_every_product(precision):
    text = program(dataclasses.replace(MODEL, matmul_precision=precision))
    one = f"Precision.{precision.upper()}"
    assert text.count(f"precision=({one}, {one})") == text.count("dot_general[") > 0


def names(settings, prefix=""):
    """Of all fields, by plain recursion."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from names(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_every_field_of_the_default_config_is_listed(tmp_path, capsys, monkeypatch):
    """Settings were in no list (rllm-org/rllm#250)."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # a config's folder joins it
    path = tmp_path / "default_run.py"
    path.write_text(
        "from thundersync_jax.config import Config\nget_config = lambda: Config()\n"
    )
    with pytest.raises(SystemExit):
        flags.run(print, argv=["program", f"--config={path}", "--print_config"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(listed) == sorted(names(Config()))
    assert len(listed) > 80


def placed(x):
    """On a mesh, where a state lies."""
    mesh = make_mesh(1, 1, 1, jax.devices())
    return jax.device_put(jnp.asarray(x), NamedSharding(mesh, PartitionSpec()))


def sign_descent(optim, schedule):
    """An optimizer of one's own: optax's Lion without moments."""
    return optax.sign_sgd(schedule)


def updated(config):
    """The parameters after three updates: a matrix, and the scale of a norm."""
    optimizer = state.make_optimizer(config)
    start = {"w": placed(START[None]), "norm": placed(START)}
    now = state.init(optimizer, start)
    update = state.Update(optimizer, config.clip_norm, now)
    for gradient in GRADIENTS:
        now, _ = update(now, {"w": placed(gradient[None]), "norm": placed(gradient)})
    return np.stack([now.params["w"][0], now.params["norm"]])


def rate(config, updates):
    """Linear warm-up, then the schedule, in float64."""
    if updates < config.warmup_steps:
        return config.learning_rate * (updates + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    p = (updates - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
    left = {"linear": 1 - p, "cosine": np.cos(np.pi * p) / 2 + 0.5}[config.schedule]
    return config.learning_rate * (config.floor + (1 - config.floor) * left)


def written_out(config):
    """AdamW of Loshchilov and Hutter (arXiv 1711.05101), algorithm 2, in float64."""
    w = np.stack([START, START]).astype(np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    decay = config.weight_decay * np.array([[1.0], [0.0]])
    for step, gradient in enumerate(GRADIENTS.astype(np.float64), start=1):
        gradient = np.stack([gradient, gradient])
        if config.clip_norm is not None:
            gradient = gradient * min(1, config.clip_norm / np.linalg.norm(gradient))
        if config.factory is not None:
            w = w - rate(config, step - 1) * np.sign(gradient)
            continue
        m = config.b1 * m + (1 - config.b1) * gradient
        v = config.b2 * v + (1 - config.b2) * gradient**2
        ratio = m / (1 - config.b1**step)
        ratio /= np.sqrt(v / (1 - config.b2**step)) + 1e-8
        w = w - rate(config, step - 1) * (ratio + decay * w)
    return w


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(OptimConfig)])
def test_every_setting_of_the_optimizer_acts_as_its_equation_says(name):
    """An accepted setting had no effect (THUDM/slime#397)."""
    changed = dataclasses.replace(OPTIM, **{name: OTHER_OPTIM[name]})
    np.testing.assert_allclose(updated(changed), written_out(changed), rtol=1e-5)
    assert np.max(np.abs(written_out(changed) - written_out(OPTIM))) > 1e-3


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_schedule_ends_at_its_floor_and_stays(schedule):
    fall = {} if schedule == "constant" else {"decay_steps": 8, "floor": 0.25}
    config = OptimConfig(0.5, warmup_steps=2, schedule=schedule, **fall)
    rates = [float(state.learning_rate(config, updates)) for updates in range(12)]
    wanted = [rate(config, min(updates, 8)) for updates in range(12)]
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)
    assert rates[1] == rates[2] == 0.5
    assert rates[8] == rates[11] == (0.5 if schedule == "constant" else 0.125)


def test_matrices_decay_and_norms_and_biases_do_not():
    config = dataclasses.replace(MODEL, qk_norm=True, attention_bias=True)
    params = jax.eval_shape(
        lambda key: transformer.init(config, key), jax.random.key(0)
    )
    decays = jax.tree_util.tree_leaves_with_path(state.decays(params))
    names = {path[-1].key: decay for path, decay in decays}
    matrices = {"embed", "query", "key", "value", "output", "gate", "up", "down"}
    assert {name for name, decay in names.items() if decay} == matrices
    others = {"query_bias", "key_bias", "value_bias", "query_norm", "key_norm"}
    assert others | {"attention_norm", "mlp_norm", "final_norm"} == names.keys() - (
        matrices
    )


def no_optimizer(optim, schedule):
    return "adam"


def test_an_optimizer_is_named_made_or_given_and_nothing_else():
    config = OptimConfig(0.1, clip_norm=None)
    for given in (optax.sgd(0.1), lambda optim, schedule: optax.sgd(schedule)):
        optimizer = state.make_optimizer(config, given)
        updates, _ = optimizer.update(START, optimizer.init(START))
        np.testing.assert_allclose(updates, -0.1 * START)
    for name, message in (
        (f"{__name__}:no_optimizer", "gives 'adam'; expected an optax"),
        (f"{__name__}:placed", r"called as placed\(optim, schedule\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            state.make_optimizer(dataclasses.replace(config, factory=name))
    with pytest.raises(ConfigError, match=r"optim\.factory is 'sgd', expected an"):
        OptimConfig(factory="sgd")
    with pytest.raises(ConfigError, match=r"decay_steps is None .* more updates"):
        OptimConfig(schedule="cosine")
    with pytest.raises(ConfigError, match=r"floor is 0\.5 with optim\.schedule"):
        OptimConfig(floor=0.5)


class Saved:
    """Checkpoints that are looked at."""

    def __init__(self):
        self.steps = []

    def latest(self):
        return None

    def save(self, step, now, facts):
        self.steps.append(step)

    def wait(self):
        pass


def supervised_update(model, optimizer, like):
    """Another loss in place of the model's, which takes seconds to compile."""

    def update(now, batch):
        gradient = jnp.mean(batch["tokens"], axis=0) - 50.0
        updates, opt_state = optimizer.update(gradient, now.opt_state, now.params)
        return state.State(now.params + updates, opt_state), 0.0

    return update


def warmed(monkeypatch, **changes):
    """Steps, checkpoints, questions asked and the parameters of a short warm start."""
    defaults = {
        "steps": 4,
        "batch_size": 8,
        "learning_rate": 3e-2,
        "target_success": 1.0,
        "check_every_steps": 2,
        "check_questions": 3,
    }
    settings = {f"warm_start.{k}": x for k, x in (defaults | changes).items()}
    config = echo_task.replace(echo_task.small(), settings)
    asked = []

    def heldout(run, version, questions, samples, **rest):
        asked.append(questions)
        return Evaluation(np.array([1] * 3 + [0]), 1, [], {})

    monkeypatch.setattr(warm_start, "heldout", heldout)
    monkeypatch.setattr(warm_start, "supervised_update", supervised_update)
    run = types.SimpleNamespace(
        config=config,
        model=None,
        tasks=echo_task.tasks(),
        demonstration_tokens=20,
        chat=ByteLevel(),
        publish=lambda params, version: None,
        set_reference=lambda params: None,
        on_line=lambda line: None,
    )
    saved = Saved()
    found = warm_start.warm_start(run, placed(np.zeros(24, np.float32)), saved)
    return found.steps, tuple(saved.steps), tuple(asked), found.params.tolist()


def test_every_setting_of_the_warm_start_acts(monkeypatch):
    """An accepted setting had no effect (THUDM/slime#397)."""
    usual = warmed(monkeypatch)
    assert usual[:3] == (4, (2, 4), (3, 3))
    assert warmed(monkeypatch) == usual
    for changes, expected in (
        ({"steps": 2}, (2, (2,), (3,))),
        ({"target_success": 0.5}, (2, (2,), (3,))),
        ({"check_every_steps": 3}, (4, (3, 4), (3, 3))),
        ({"check_questions": 4}, (4, (2, 4), (4, 4))),
        ({"batch_size": 16}, usual[:3]),
        ({"learning_rate": 1e-2}, usual[:3]),
    ):
        found = warmed(monkeypatch, **changes)
        assert found[:3] == expected
        same = "check_every_steps" in changes or "check_questions" in changes
        assert (found[3] == usual[3]) == same


def test_settings_of_an_evaluation_arrive(monkeypatch):
    asked = []

    def heldout(run, version, questions, samples):
        asked.append((questions, samples))
        return Evaluation(np.array([0, 1]), samples, [], {})

    monkeypatch.setattr(train, "heldout", heldout)
    display = types.SimpleNamespace(
        evaluation=lambda label, shown: asked.append(shown.answers)
    )
    changes = {"evaluation.questions": 2, "evaluation.samples": 3}
    kept = types.SimpleNamespace(begin=lambda name: None)
    config = echo_task.small(**changes)
    run = types.SimpleNamespace(config=config, artefacts=kept)
    loop = types.SimpleNamespace(_run=run, _display=display, version=0)
    train._Loop.evaluate(loop, 0, "held-out success")
    assert asked == [(2, 3), 6]
