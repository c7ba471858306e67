"""The trainer in one process: what it trains on, what it does with failures."""

import asyncio
import collections
import dataclasses
import math
import time
import traceback

import echo_task
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from thundersync_jax import train
from thundersync_jax.chat import byte_level
from thundersync_jax.config import OptimConfig
from thundersync_jax.engines.in_process import InProcessEngine
from thundersync_jax.errors import ConfigError, StreamError
from thundersync_jax.metrics.records import read_rollouts, rollouts_path
from thundersync_jax.metrics.writer import METRICS, read
from thundersync_jax.ops import advantages
from thundersync_jax.run import run, state
from thundersync_jax.run.checkpoint import Checkpoints, sha256
from thundersync_jax.run.step import run_step
from thundersync_jax.stream.mesh import make_mesh

pytestmark = pytest.mark.usefixtures("quick_programs")

LOGPROB_TOLERANCE = 1e-4  # float32: cached decoding against one forward pass
NORM_TOLERANCE = 1e-4  # relative, of float32 gradients added up in another order
TEMPERATURE = echo_task.small().rollout.temperature


def rollouts_of(workdir, step):
    return read_rollouts(rollouts_path(workdir, step))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A few steps of streaming, at a temperature."""
    workdir = tmp_path_factory.mktemp("trained")
    config = echo_task.small(
        **{
            "steps": 3,
            "release": "trajectory",
            "checkpoint.every_steps": 1,
            "checkpoint.keep": 3,
        }
    )
    return config, workdir, train.train(config, workdir, environment=echo_task.make)


@pytest.fixture(scope="module")
def sampler(trained):
    """The state that sampled the second step, and its trajectories."""
    config, workdir, _ = trained
    with run.Run(config, workdir, echo_task.make) as built:
        like = state.init(built.optimizer, built.initial_params())
        with Checkpoints(workdir / "checkpoints") as checkpoints:
            now, _ = checkpoints.restore(1, like)
    return config, now.params, rollouts_of(workdir, 2)


def trainer_logprobs(config, params, trajectories, temperature):
    """float32[N, T] of whole sequences, and which of the entries were sampled."""
    ids = np.zeros((len(trajectories), config.rollout.context_tokens), np.int32)
    sampled = np.zeros(ids.shape, bool)
    for row, t in enumerate(trajectories):
        ids[row, : len(t.ids)] = t.ids
        sampled[row, : len(t.ids)] = t.loss_mask

    def one(params, ids):
        return tiny_models.logprobs(config.model, params, ids, temperature)

    return jax.jit(jax.vmap(one, (None, 0)))(params, ids), sampled


def test_sampler_and_trainer_agree_at_a_temperature(sampler):
    """The trainer's log-probabilities ignored it (huggingface/trl#4159, #3029,
    NVIDIA-NeMo/RL#935)."""
    config, params, records = sampler
    trajectories = [record.trajectory for record in records]
    recorded = np.concatenate([t.logprobs[t.loss_mask] for t in trajectories])
    gaps = {}
    for temperature in (TEMPERATURE, 1.0):
        found, sampled = trainer_logprobs(config, params, trajectories, temperature)
        gaps[temperature] = np.max(np.abs(np.asarray(found)[sampled] - recorded))
    assert gaps[TEMPERATURE] < LOGPROB_TOLERANCE
    assert gaps[1.0] > 0.1


def test_gradient_is_that_of_every_turn_of_every_trajectory(trained, sampler):
    """Only the last turn was trained (NovaSky-AI/SkyRL#1507). Written out from the
    recorded trajectories, from their rewards on."""
    config, params, records = sampler
    groups = collections.defaultdict(list)
    recorded = {}
    for record in records:
        groups[record.trajectory.key.group].append(record.trajectory)
        recorded[record.trajectory.key] = record.advantage
    estimator = advantages.mean_std(ddof=0, eps=1e-6)
    terms, turns = [], 0
    for members in groups.values():
        weights = estimator.advantages([t.reward for t in members])
        for t, advantage in zip(members, weights, strict=True):
            terms.append((t, float(advantage) / t.action_tokens / len(records)))
            assert recorded[t.key] == pytest.approx(float(advantage))
            # Turns are apart by what was observed between them.
            starts = np.flatnonzero(np.diff(t.loss_mask.astype(int)) == 1)
            assert len(starts) == t.turns
            turns = max(turns, t.turns)
    assert turns == 2

    def loss(params):
        trajectories, weights = zip(*terms, strict=True)
        logprobs, sampled = trainer_logprobs(config, params, trajectories, TEMPERATURE)
        return -jnp.sum(jnp.asarray(weights)[:, None] * logprobs * sampled)

    value, gradient = jax.value_and_grad(loss)(params)
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(gradient)))
    row = read(trained[1])[2]
    assert row["gradient_norm"] > 0.01
    assert row["gradient_norm"] == pytest.approx(norm, rel=NORM_TOLERANCE)
    assert row["loss"] == pytest.approx(float(value), rel=NORM_TOLERANCE, abs=1e-6)


def test_no_trajectory_is_stale(trained):
    """Two policy versions met in one group after a late sync."""
    _, workdir, _ = trained
    updates = 0
    for step, row in enumerate(read(workdir)[1:], start=1):
        assert row["staleness_max"] == 0
        versions = {r.trajectory.policy_version for r in rollouts_of(workdir, step)}
        assert versions == {updates} == {row["policy_version"]}
        updates += row["gradient_norm"] > 0
    assert updates == 3


def test_every_metric_of_the_trainer_is_documented(trained):
    written = {name for row in read(trained[1]) for name in row} - {"step"}
    elsewhere = {"kl", "entropy"}  # those have runs of their own
    elsewhere |= {"teacher_kl", "teacher_tokens_over_trajectory_tokens"}
    elsewhere |= {"probe_difference", "retried_requests"}
    assert written | elsewhere == set(METRICS)
    assert not written & elsewhere


def test_progress_counts_steps_and_trajectories_apart(trained, monkeypatch, tmp_path):
    """The bar counted micro-batches (google/tunix#390)."""
    config, _, _ = trained
    seen = []

    class Counted(train.RunProgress):
        def end(self, progress):
            super().end(progress)
            seen.append((str(self), progress.total, progress.verified))

    monkeypatch.setattr(train, "RunProgress", Counted)
    make = echo_task.scripted([1.0, 0.0, 0.0, 1.0])
    config = echo_task.replace(
        echo_task.SCRIPTED, {"steps": 3, "release": "trajectory"}
    )
    train.train(config, tmp_path, environment=make)
    assert seen == [
        (f"{step}/3 steps, {16 * step}/{16 * step} trajectories", 16, 16)
        for step in (1, 2, 3)
    ]
    calls = [row["direct"] + row["streamed"] for row in read(tmp_path)[1:]]
    assert calls == [16, 16, 16]


def test_release_rules_sample_the_same_ids(trained, tmp_path):
    """From the same parameters, whatever else the learner and the sampler do."""
    config, _, _ = trained
    found = {}
    with run.Run(config, tmp_path, echo_task.make) as built:
        params = built.initial_params()
        for release in ("batch", "group", "trajectory"):
            stream = built.new_stream(params, 0, release)
            done = run_step(built, stream, built.train_jobs(1), 0)
            found[release] = {t.key: t.ids.tolist() for t in done.trajectories}
    assert found["batch"] == found["group"] == found["trajectory"]
    ids = [tuple(ids) for ids in found["batch"].values()]
    assert len(set(ids)) == len(ids) == 16


WORDS = echo_task.tasks().train[:4]
BROKEN = ConnectionError("the grader is away")
MIXED = {
    WORDS[0]: [1.0, 0.0, 1.0, BROKEN],
    WORDS[1]: [1.0, None, 0.0, 1.0],
    WORDS[2]: [math.inf, 0.0, 0.0, 0.0],
    WORDS[3]: [1.0, 0.0, 1.0, 0.0],
}


@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_groups_with_failed_members_follow_the_policy(policy, tmp_path, capsys):
    """Partial groups were trained as full ones (verl-project/verl#6437,
    areal-project/AReaL#1416, #1559); a missing reward spoiled the batch
    (modelscope/ms-swift#8123) or became 0; one failed rollout ended the step
    (NovaSky-AI/SkyRL#1613)."""
    config = echo_task.replace(echo_task.SCRIPTED, {"partial_groups": policy})
    result = train.train(config, tmp_path, environment=echo_task.scripted(MIXED, WORDS))
    row = read(tmp_path)[1]
    found = collections.defaultdict(dict)
    for record in rollouts_of(tmp_path, 1):
        word = byte_level.decode(record.prompt_ids[1:-1])
        found[word][record.trajectory.key.member] = record.advantage
    assert found[WORDS[3]] == {0: 0.5, 1: -0.5, 2: 0.5, 3: -0.5}
    third = 1 / 3
    kept = [
        {0: third, 1: -2 * third, 2: third, 3: None},
        {0: third, 1: None, 2: -2 * third, 3: third},
        {0: None, 1: 0.0, 2: 0.0, 3: 0.0},
    ]
    for word, expected in zip(WORDS, kept, strict=False):
        if policy == "drop":
            expected = dict.fromkeys(expected)
        for member, advantage in expected.items():
            if advantage is None:
                assert found[word][member] is None
            else:
                assert found[word][member] == pytest.approx(advantage)
    assert row["failed_members"] == 3
    assert row["invalid_rewards"] == 2
    counts = [row[f"{kind}_groups"] for kind in ("kept", "dropped", "short", "uniform")]
    assert counts == ([4, 0, 3, 1] if policy == "keep" else [1, 3, 0, 0])
    assert row["kept_members"] == (13 if policy == "keep" else 4)
    assert row["gradient_norm"] > 0 and result["updates"] == 1
    assert (
        "environment_error: verify() raised ConnectionError" in capsys.readouterr().out
    )


def test_policy_fail_ends_the_run_with_the_cause(tmp_path):
    """One failed rollout was swallowed, or hung the step (NovaSky-AI/SkyRL#1613,
    #1691)."""
    config = echo_task.replace(echo_task.SCRIPTED, {"partial_groups": "fail"})
    before = echo_task.threads()
    with pytest.raises(StreamError, match="member 3 failed.*the grader is away"):
        train.train(config, tmp_path, environment=echo_task.scripted(MIXED, WORDS[:1]))
    assert echo_task.threads() <= before


async def never():
    await asyncio.sleep(3600)


def test_straggler_costs_one_member_and_its_deadline(tmp_path, capsys):
    """One rollout held the step for hours (NVIDIA-NeMo/RL#3238)."""
    config = echo_task.replace(
        echo_task.SCRIPTED,
        {
            "partial_groups": "keep",
            "rollout.groups_per_step": 1,
            "rollout.group_size": 8,
            "rollout.verify_timeout_secs": 0.5,
        },
    )
    rewards = [1.0, 0.0, 1.0, never, 0.0, 1.0, 0.0, 1.0]
    train.train(
        config, tmp_path, environment=echo_task.scripted({WORDS[0]: rewards}, WORDS[:1])
    )
    row = read(tmp_path)[1]
    assert row["step_secs"] < 3.0
    assert (row["kept_members"], row["failed_members"]) == (7, 1)
    said = capsys.readouterr().out
    assert "train step 1 group 0 member 3: timeout: verify() was stopped at its" in said


@pytest.mark.parametrize("case", ["all right", "all failed"])
def test_step_without_a_gradient_updates_nothing_and_counts(case, tmp_path):
    """An empty step crashed or made NaN (THUDM/slime#1860,
    thinking-machines-lab/tinker-cookbook#507)."""
    rewards = [1.0] if case == "all right" else [None]
    config = echo_task.replace(
        echo_task.SCRIPTED, {"steps": 2, "rollout.failed_share_limit": 1.0}
    )
    result = train.train(config, tmp_path, environment=echo_task.scripted(rewards))
    with run.Run(config, tmp_path, echo_task.make) as built:
        fresh = state.init(built.optimizer, built.initial_params())
    assert result["sha256"] == sha256(fresh)
    assert result["updates"] == 0
    rows = read(tmp_path)[1:]
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["policy_version"] for row in rows] == [0, 0]
    assert [row["gradient_norm"] for row in rows] == [0.0, 0.0]
    assert [row["loss"] for row in rows] == [0.0, 0.0]


def test_environment_that_never_works_stops_the_run(tmp_path):
    """A failing rollout was tried ten thousand times (invergent-ai/surogate#177)."""
    starts = collections.Counter()

    class Dead(echo_task.Echo):
        async def start(self, task):
            starts[task] += 1
            if task in WORDS:
                raise OSError("no sandbox")
            return await super().start(task)

    config = echo_task.replace(
        echo_task.SCRIPTED, {"rollout.attempts": 3, "rollout.groups_per_step": 2}
    )

    def make(env, seed):
        return echo_task.tasks(Dead, train=2)

    with pytest.raises(StreamError, match=r"8 of 8 .*failed_share_limit .* no sandbox"):
        train.train(config, tmp_path, environment=make)
    assert {starts[word] for word in WORDS[:2]} == {4 * 3}


def test_dead_sampler_ends_the_run_with_its_own_traceback(tmp_path, monkeypatch):
    """The producer died and the trainer waited for ever (NVIDIA-NeMo/RL#3488,
    huggingface/trl#5751)."""
    times = []

    def broken_step(self):
        times.append(time.monotonic())
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(InProcessEngine, "step", broken_step)
    before = echo_task.threads()
    with pytest.raises(RuntimeError, match="the device is gone") as caught:
        train.train(echo_task.SCRIPTED, tmp_path, environment=echo_task.scripted([1.0]))
    assert time.monotonic() - times[0] < 5.0
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert "broken_step" in {frame.name for frame in frames}
    assert echo_task.threads() <= before


def test_held_out_prompt_in_training_is_refused(tmp_path):
    def leaking(env, seed):
        tasks = echo_task.tasks()
        return dataclasses.replace(tasks, train=[*tasks.train, tasks.heldout[3]])

    with pytest.raises(ConfigError, match=echo_task.tasks().heldout[3]):
        train.train(echo_task.SCRIPTED, tmp_path, environment=leaking)


@pytest.mark.parametrize(("clip", "clipped"), [(1.0, 1.0), (None, 5.0), (9.0, 5.0)])
def test_gradient_norm_before_and_after_clipping(clip, clipped):
    """Which of the two was logged was unclear (verl-project/verl#2282)."""
    whole = jax.sharding.NamedSharding(
        make_mesh(1, 1, 1, jax.devices()), jax.sharding.PartitionSpec()
    )
    params = jax.device_put({"w": jnp.zeros(2)}, whole)
    gradient = jax.device_put({"w": jnp.array([3.0, 4.0])}, whole)
    optimizer = state.make_optimizer(OptimConfig(learning_rate=0.0, clip_norm=clip))
    now = state.init(optimizer, params)
    now, norm = state.Update(optimizer, clip, now)(now, gradient)
    assert float(norm) == pytest.approx(clipped)
    moments = [x for x in jax.tree.leaves(now.opt_state) if x.shape == (2,)]
    first = np.asarray(moments[0]) / (1 - OptimConfig().b1)
    np.testing.assert_allclose(first, np.array([0.6, 0.8]) * clipped, rtol=1e-6)
