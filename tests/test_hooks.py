"""A loss, an estimator, an optimizer and loggers of one's own, through the whole loop.

Each trains three steps, and every step is computed again: plain logits of the recorded
trajectories, advantages in float64, and the optimizer written out. The parameters are
those of the checkpoint before.
"""

import json
import struct
import subprocess
import sys
from pathlib import Path

import echo_task
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from thundersync_jax import train
from thundersync_jax.config import LossConfig, OptimConfig
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics.records import read_rollouts, rollouts_path
from thundersync_jax.metrics.writer import read
from thundersync_jax.models import transformer
from thundersync_jax.run.checkpoint import Checkpoints
from thundersync_jax.run.state import make_optimizer
from thundersync_jax.types import MOST_ADDENDS

pytestmark = pytest.mark.usefixtures("quick_programs")

ROOT = Path(__file__).parents[1]
STEPS = 3
VERDICTS = [1.0, 0.25, 0.0, 0.5]
CONFIG = echo_task.replace(
    echo_task.SCRIPTED,
    {"steps": STEPS, "checkpoint.every_steps": 1, "checkpoint.keep": STEPS},
)
FLOAT32 = 2e-4  # of a step's gradient, relative to its largest entry


def trained(workdir, **settings):
    config = echo_task.replace(CONFIG, settings)
    train.train(config, workdir, environment=echo_task.scripted(VERDICTS))
    return config


def saved(workdir, config, step):
    """The parameters after a step; before the first, those of the warm start."""
    shapes = jax.eval_shape(
        lambda key: transformer.init(config.model, key), jax.random.key(0)
    )
    if step == 0:
        key = jax.random.key(config.seed)
        return jax.jit(lambda key: transformer.init(config.model, key))(key)
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        return checkpoints.restore(step, {"params": shapes}, part=True)[0]["params"]


@jax.jit
def token_logprobs(params, ids):
    """log pi of every token but the first, from plain logits."""
    hidden, _ = transformer.segment(CONFIG.model, params, ids)
    logits = transformer.logits(CONFIG.model, transformer.head_weights(params), hidden)
    table = jax.nn.log_softmax(logits / CONFIG.rollout.temperature)
    return jnp.take_along_axis(table[:-1], ids[1:, None], axis=1)[:, 0]


def score_gradient(params, trajectory, weight_of):
    """The gradient of - sum_t w_t log pi(a_t), w_t from the ratio at the parameters."""
    mask = np.asarray(trajectory.loss_mask)[1:]
    here = np.asarray(token_logprobs(params, trajectory.ids))
    ratio = np.exp(np.where(mask, here - trajectory.logprobs[1:], 0))
    weights = np.where(mask, weight_of(ratio) / mask.sum(), 0)

    @jax.jit
    def loss(params, ids, weights):
        return -jnp.sum(weights * token_logprobs(params, ids))

    return jax.grad(loss)(params, trajectory.ids, weights)


def gradient_of(workdir, step, params, advantages, weight_of=np.ones_like):
    """The step's gradient in float64; the recorded advantages are looked at too."""
    groups = {}
    for record in read_rollouts(rollouts_path(workdir, step)):
        groups.setdefault(record.trajectory.key.group, []).append(record)
    total, members = jax.tree.map(lambda x: np.zeros(x.shape), params), 0
    for records in groups.values():
        rewards = np.array([record.trajectory.reward for record in records])
        values = advantages(rewards)
        recorded = [record.advantage for record in records]
        np.testing.assert_allclose(recorded, values, atol=1e-6)
        for record, value in zip(records, values, strict=True):
            score = score_gradient(params, record.trajectory, weight_of)
            total = jax.tree.map(
                lambda t, s, a=value: t + a * np.asarray(s, np.float64), total, score
            )
            members += 1
    return jax.tree.map(lambda x: x / members, total)


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))


def assert_same(found, wanted, tolerance=FLOAT32):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * max(np.max(np.abs(b)), 1e-6))


def centred(rewards):
    return rewards - rewards.mean()


def sgd(optim, schedule):
    """Updates from which a gradient can be read."""
    return optax.sgd(schedule)


SGD = {"optim.factory": f"{__name__}:sgd", "optim.clip_norm": None}


def gradients_taken(workdir, config, rates):
    """The gradients of plain descent, from the checkpoints."""
    for step in range(1, STEPS + 1):
        before, after = (saved(workdir, config, at) for at in (step - 1, step))
        moved = jax.tree.map(
            lambda a, b, r=rates[step - 1]: (np.float64(a) - np.float64(b)) / r,
            before,
            after,
        )
        yield step, before, moved


def test_an_own_loss_trains_as_its_equation_says(tmp_path):
    settings = SGD | {"loss.surrogate": "own_losses:cispo", "optim.learning_rate": 8.0}
    # Ratios away from 1: the sampler draws at other probabilities than are recorded.
    config = trained(tmp_path, **settings | {"loss.advantage": "mean_only"})
    cut = lambda ratio: np.minimum(ratio, 1.2)  # noqa: E731
    for step, params, found in gradients_taken(tmp_path, config, [8.0] * STEPS):
        wanted = gradient_of(tmp_path, step, params, centred, cut)
        assert norm(wanted) > 1e-3
        assert_same(found, wanted)
        assert read(tmp_path)[step]["cut"] == 0.0
        assert read(tmp_path)[step]["gradient_norm"] == pytest.approx(
            norm(wanted), rel=FLOAT32
        )


def test_an_own_estimator_from_the_command_line(tmp_path):
    rates = [8.0 * (0.25 + 0.75 * left) for left in (1, 0.75, 0.25)]
    command = [sys.executable, "-m", "thundersync_jax.train", f"--workdir={tmp_path}"]
    command += [f"--config={Path(__file__).with_name('echo_task.py')}"]
    overrides = {
        "loss.advantage": "own_estimators:ranks",
        "optim.factory": "test_hooks:sgd",
        "optim.schedule": "cosine",
        "optim.decay_steps": 3,
        "optim.floor": 0.25,
        "optim.clip_norm": "none",
        "optim.learning_rate": 8,
        "steps": STEPS,
        "env.factory": "test_hooks:verdicts",
        "warm_start.steps": 0,
        "rollout.temperature": CONFIG.rollout.temperature,
        "evaluation.questions": 4,
        "checkpoint.every_steps": 1,
        "checkpoint.keep": STEPS,
    }
    command += [f"--config.{name}={value}" for name, value in overrides.items()]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr

    def ranks(rewards):
        """Of four distinct rewards, from -1 to 1."""
        return (2 * np.argsort(np.argsort(rewards)) - 3) / 3

    rows = read(tmp_path)
    assert [rows[step]["learning_rate"] for step in (1, 2, 3)] == pytest.approx(rates)
    for step, params, moved in gradients_taken(tmp_path, CONFIG, rates):
        assert_same(moved, gradient_of(tmp_path, step, params, ranks))


def verdicts(env, seed):
    return echo_task.scripted(VERDICTS)(env, seed)


def test_an_own_optimizer_with_a_cosine_resumes_with_its_state(tmp_path):
    """Lion, arXiv 2302.06675, written out: momentum is in the state."""
    settings = {
        "optim.factory": f"{__name__}:lion",
        "optim.learning_rate": 0.01,
        "optim.schedule": "cosine",
        "optim.warmup_steps": 1,
        "optim.decay_steps": 4,
        "optim.weight_decay": 0.1,
        "optim.clip_norm": None,
        "loss.advantage": "mean_only",
    }
    trained(tmp_path, **settings | {"steps": 2})
    config = trained(tmp_path, **settings)
    rates = [0.01 * (1 + np.cos(np.pi * p)) / 2 for p in (0, 0, 1 / 3)]
    assert [row["learning_rate"] for row in read(tmp_path)[1:]] == pytest.approx(rates)
    momentum = None
    for step, rate in enumerate(rates, start=1):
        before, after = (saved(tmp_path, config, at) for at in (step - 1, step))
        gradient = gradient_of(tmp_path, step, before, centred)
        momentum = momentum or jax.tree.map(np.zeros_like, gradient)
        mixed = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, momentum, gradient)
        momentum = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g, momentum, gradient)
        for x, y, m in zip(*map(jax.tree.leaves, (before, after, mixed)), strict=True):
            wanted = np.float64(x) - rate * (np.sign(m) + 0.1 * np.float64(x))
            clear = np.abs(m) > FLOAT32 * np.max(np.abs(m))  # of which side of 0
            assert clear.mean() > 0.1
            np.testing.assert_allclose(np.asarray(y)[clear], wanted[clear], atol=1e-6)


def lion(optim, schedule):
    return optax.lion(schedule, weight_decay=optim.weight_decay)


def wandb_records(file):
    """What a `.wandb` file holds: records in blocks, as in LevelDB's log."""
    data, at, record = file.read_bytes(), 7, b""  # behind the header
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:  # no room for another piece in this block
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def test_wandb_in_offline_mode_has_the_numbers_of_the_file(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trained(tmp_path, **{"metrics.sinks": ("wandb",)})
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    logged = {}
    for data in wandb_records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {
            item.key or item.nested_key[0]: json.loads(item.value_json)
            for item in record.history.item
        }
        if "_step" in items:
            logged[items["_step"]] = items
    assert logged.keys() == {0, 1, 2, 3}
    for row in read(tmp_path):
        for name, value in row.items():
            if name != "step" and value is not None:
                assert logged[row["step"]][name] == pytest.approx(value, rel=1e-12)


def test_the_own_loop_trains(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "configs")
    import own_loop
    import own_task

    hooks = {
        "surrogate": own_loop.loss,
        "estimator": own_loop.advantage,
        "optimizer": own_loop.optimizer,
    }
    config = echo_task.replace(
        own_task.get_config("smoke"),
        {"warm_start.steps": 0, "rollout.groups_per_step": 2, "steps": STEPS},
    )
    norms = own_loop.train(config, tmp_path, **hooks)
    assert len(norms) == STEPS and all(np.isfinite(norms))


def test_an_own_loss_with_an_additive_part_counts_among_the_addends(tmp_path):
    most = MOST_ADDENDS // CONFIG.rollout.group_size
    exact = {"accumulator": "exact", "rollout.groups_per_step": most}
    with pytest.raises(ConfigError, match="has a part without advantage, expected"):
        trained(tmp_path, **exact | {"loss.surrogate": "own_losses:with_entropy"})


@pytest.mark.parametrize(
    ("source", "given"),
    [
        ("the argument optimizer", lambda config, schedule: 3),
        ("optim.factory 'test_hooks:no_optimizer'", None),
    ],
)
def test_what_is_no_optimizer_is_refused_by_its_name(source, given):
    factory = None if given else "test_hooks:no_optimizer"
    with pytest.raises(ConfigError, match=f"{source} gives 3; expected an optax"):
        make_optimizer(OptimConfig(factory=factory), given)


def no_optimizer(optim, schedule):
    return 3


@pytest.mark.parametrize("truncated", ["keep", "mask", "zero_reward"])
def test_trajectories_that_were_cut_off_train_as_the_setting_says(tmp_path, truncated):
    """Out of the loss, or with the reward 0 (huggingface/trl#3248)."""
    settings = SGD | {
        "loss.truncated": truncated,
        "optim.learning_rate": 0.5,  # the larger, the less is rounded off
        "loss.advantage": "mean_only",
        "rollout.stop_ids": (33, 65, 66, 97, 98, 99, 100, 101),
        "rollout.groups_per_step": 4,
        "rollout.group_size": 8,
        "steps": 1,
    }
    config = trained(tmp_path, **settings)
    records = read_rollouts(rollouts_path(tmp_path, 1))
    cut = [record.trajectory.stop_reason.truncated for record in records]
    assert 2 < sum(cut) < len(cut) - 2
    (row,) = [row for row in read(tmp_path) if row["step"] == 1]
    assert row["truncated_share"] == pytest.approx(np.mean(cut))
    params = saved(tmp_path, config, 0)
    groups = {}
    for record in records:
        groups.setdefault(record.trajectory.key.group, []).append(record.trajectory)
    total = jax.tree.map(lambda x: np.zeros(x.shape), params)
    for members in groups.values():
        rewards = np.array([t.reward for t in members])
        if truncated == "zero_reward":
            rewards *= [not t.stop_reason.truncated for t in members]
        for trajectory, advantage in zip(members, centred(rewards), strict=True):
            if truncated == "mask" and trajectory.stop_reason.truncated:
                continue
            score = score_gradient(params, trajectory, np.ones_like)
            total = jax.tree.map(
                lambda t, s, a=advantage: t + a * np.asarray(s, np.float64),
                total,
                score,
            )
    wanted = jax.tree.map(lambda x: x / len(records), total)
    rate = config.optim.learning_rate
    moved = jax.tree.map(
        lambda a, b: (np.float64(a) - np.float64(b)) / rate,
        params,
        saved(tmp_path, config, 1),
    )
    assert_same(moved, wanted)


def test_what_cannot_be_cut_off_is_refused():
    with pytest.raises(ConfigError, match="loss.truncated is 'zero_reward' with"):
        LossConfig(
            advantage="none", distill="sampled_reverse_kl", truncated="zero_reward"
        )
