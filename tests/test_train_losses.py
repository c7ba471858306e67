"""Training with every part of the loss: what reaches the metrics and the parameters."""

import collections

import echo_task
import numpy as np
import pytest

from thundersync_jax import train
from thundersync_jax.chat import byte_level
from thundersync_jax.envs.base import Observation
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics.records import read_rollouts, rollouts_path
from thundersync_jax.metrics.writer import METRICS, read

pytestmark = pytest.mark.usefixtures("quick_programs")

STEPS = 2
VERDICTS = [1.0, 0.0, 0.0, 1.0]
ROUNDING = 1e-5  # float32 gradients of one program against another


def trained(workdir, environment=None, warm_start_steps=0, **settings):
    """(result, rows of the steps) of a short run."""
    config = echo_task.replace(
        echo_task.SCRIPTED,
        {"steps": STEPS, "warm_start.steps": warm_start_steps} | settings,
    )
    environment = environment or echo_task.scripted(VERDICTS)
    result = train.train(config, workdir, environment=environment)
    return result, read(workdir)[1:]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"))


def test_kl_is_zero_at_the_reference_and_pulls_back_from_elsewhere(plain, tmp_path):
    """The penalty was computed without gradient, and a coefficient of 1 did what one of
    0 did (NovaSky-AI/SkyRL#1353)."""
    result, rows = trained(tmp_path, **{"loss.kl_coef": 1.0, "loss.entropy_coef": 0.01})
    assert rows[0]["kl"] == 0.0
    assert rows[1]["kl"] > 1e-4
    # A uniform policy over 264 ids has 5.6 nats.
    assert all(1.0 < row["entropy"] < 5.6 for row in rows)
    assert {"kl", "entropy"} < set(METRICS)
    assert result["sha256"] != plain[0]["sha256"]
    assert "kl" not in plain[1][0] and "entropy" not in plain[1][0]


def test_importance_weights_are_cut_at_their_cap(plain, tmp_path):
    """Sampler and learner agree here: every weight is 1, or the cap below it."""
    _, rows = trained(tmp_path, **{"loss.importance_cap": 0.5})
    whole = plain[1][0]
    assert rows[0]["gradient_norm"] == pytest.approx(
        whole["gradient_norm"] / 2, rel=ROUNDING
    )


def test_mismatch_of_sampler_and_learner_is_measured_without_being_asked(plain):
    for row in plain[1]:
        assert 0 < row["mismatch_mean"] < row["mismatch_max"] < 1e-3
        assert 0 <= row["mismatch_kl"] < 1e-6
        assert row["mismatch_mean"] < row["mismatch_p99"] <= row["mismatch_max"]
        assert row["mismatch_truncated_share"] == 0


def test_a_large_mismatch_is_said_once(tmp_path, capsys):
    trained(tmp_path, **{"rollout.mismatch_warning": 1e-12})
    said = capsys.readouterr().out.count("sampler and learner disagree")
    assert said == 1


def test_tracked_baseline_follows_the_shaped_rewards_of_its_prompt(tmp_path):
    words, most = echo_task.tasks().train[:4], echo_task.SCRIPTED.rollout
    scripts = {words[0]: [1.0, 1.0, 0.0, 1.0], words[1]: [0.0, 0.0, 0.0, 1.0]}
    trained(
        tmp_path,
        echo_task.scripted(scripts, words),
        **{
            "loss.advantage": "tracked_baseline",
            "loss.baseline": 0.25,
            "loss.length_penalty": 0.2,
        },
    )
    steps = []
    for step in (1, 2):
        found = collections.defaultdict(list)
        for record in read_rollouts(rollouts_path(tmp_path, step)):
            one, prompt = record.trajectory, byte_level.decode(record.prompt_ids[1:-1])
            shaped = one.reward - 0.2 * one.action_tokens / most.most_action_tokens
            found[prompt].append((shaped, record.advantage))
        steps.append(found)
    for word in words:
        before = [shaped for shaped, _ in steps[0][word]]
        assert [a for _, a in steps[0][word]] == pytest.approx(
            [shaped - 0.25 for shaped in before]
        )
        assert [a for _, a in steps[1][word]] == pytest.approx(
            [shaped - np.mean(before) for shaped, _ in steps[1][word]]
        )


class Crediting(echo_task.Echo):
    """Every verdict is the same; turns that go on are worth something."""

    async def step(self, action):
        answer = await super().step(action)
        return Observation(answer.text, answer.done, credit=0.5, weight=2.0)

    async def verify(self):
        return 1.0


def crediting(env, seed):
    return echo_task.tasks(Crediting)


def test_credit_of_turns_trains_where_no_advantage_does(tmp_path):
    settings = {"loss.turn_credit": "environment", "rollout.cut_actions": "run"}
    result, rows = trained(tmp_path / "used", crediting, **settings)
    assert result["updates"] == STEPS
    assert [row["uniform_groups"] for row in rows] == [4, 4]
    assert all(row["gradient_norm"] > 0.01 for row in rows)
    with pytest.raises(ConfigError, match=r"loss\.turn_credit is 'none'") as refused:
        trained(tmp_path / "refused", crediting, **{"rollout.cut_actions": "run"})
    assert "\n" not in str(refused.value)


class Wrong(echo_task.Echo):
    async def verify(self):
        return 0.0


@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_filter_looks_at_rewards_without_their_length_penalty(policy, tmp_path):
    """Groups that were all wrong came through the filter, unequal by their lengths
    alone (NVIDIA-NeMo/RL#2431)."""
    result, rows = trained(
        tmp_path,
        lambda env, seed: echo_task.tasks(Wrong),
        warm_start_steps=40,
        **{"uniform_groups": policy, "loss.length_penalty": 0.5, "steps": 1},
    )
    (row,) = rows
    assert row["reward_mean"] == 0.0
    if policy == "drop":
        assert (row["filtered_groups"], row["kept_groups"]) == (4, 0)
        assert row["gradient_norm"] == 0 and result["updates"] == 0
    else:
        assert (row["filtered_groups"], row["kept_groups"]) == (0, 4)
        assert row["gradient_norm"] > 0.001
        # Shorter answers are preferred.
        records = read_rollouts(rollouts_path(tmp_path, 1))
        lengths = [r.trajectory.action_tokens for r in records]
        assert np.corrcoef(lengths, [r.advantage for r in records])[0, 1] < -0.5


EVERYTHING = {
    "accumulator": "exact",
    "uniform_groups": "replace",
    "rollout.replacement_groups": 2,
    "loss.advantage": "tracked_baseline",
    "loss.kl_coef": 0.1,
    "loss.entropy_coef": 0.01,
    "loss.importance_cap": 2.0,
    "loss.length_penalty": 0.1,
    "checkpoint.every_steps": 1,
}


def mixed(env, seed):
    """Few words, which come again soon; one of them is always right."""
    words = echo_task.tasks().train[:6]
    verdicts = {
        word: [1.0, 0.0, 0.5, 0.0][i:] + [0.0] * i for i, word in enumerate(words[:4])
    }
    verdicts[words[4]] = [1.0]
    return echo_task.scripted(verdicts, words)(env, seed)


def test_resumed_run_ends_with_the_bits_of_a_whole_one(tmp_path):
    """Baselines and the reference policy were not in what a run goes on with; under
    trajectory release and another order of arrival too."""
    whole, rows = trained(
        tmp_path / "whole", mixed, **EVERYTHING | {"steps": 4, "release": "trajectory"}
    )
    settings = EVERYTHING | {"release": "batch"}
    trained(tmp_path / "cut", mixed, **settings | {"steps": 2})
    resumed, again = trained(tmp_path / "cut", mixed, **settings | {"steps": 4})
    assert resumed["sha256"] == whole["sha256"]
    assert whole["updates"] == 4
    for one, other in zip(rows, again, strict=True):
        for name in ("kl", "entropy", "loss", "gradient_norm", "filtered_groups"):
            assert one[name] == other[name], name
    assert sum(row["filtered_groups"] for row in rows) > 0
    assert rows[-1]["kl"] > 0
