"""Held-out evaluation: what it counts, and what two of them have in common."""

import itertools
import json
import shutil

import echo_task
import numpy as np
import pytest

from thundersync_jax import train
from thundersync_jax.errors import ConfigError
from thundersync_jax.evaluate import evaluate
from thundersync_jax.metrics.writer import read
from thundersync_jax.run.step import Evaluation

pytestmark = pytest.mark.usefixtures("quick_programs")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    """A run whose learning rate is 0."""
    config = echo_task.small(
        **{
            "steps": 2,
            "optim.learning_rate": 0.0,
            "evaluation.questions": 32,
            "evaluation.every_steps": 1,
        }
    )
    workdir = tmp_path_factory.mktemp("untouched")
    train.train(config, workdir)
    return config, workdir


def test_a_policy_that_does_not_change_is_evaluated_alike(untouched):
    found = [row["heldout_success"] for row in read(untouched[1])]
    assert len(found) == 3
    assert len(set(found)) == 1
    assert 0 < found[0] < 1


def test_command_reads_the_newest_policy(untouched):
    config, workdir = untouched
    result = evaluate(config, workdir, samples=4)
    again = evaluate(config, workdir, samples=1)
    assert list(evaluate(config, workdir, samples=3)["pass_at"]) == ["1", "2", "3"]
    assert result["step"] == 2
    assert again["success"] == read(workdir)[-1]["heldout_success"]
    passes = list(result["pass_at"].values())
    assert list(result["pass_at"]) == ["1", "2", "4"]
    assert passes[0] == pytest.approx(result["success"])
    assert passes == sorted(passes)
    assert sum(result["stop_reasons"].values()) == 32 * 4
    low, high = result["interval"]
    assert low < result["success"] < high


def test_greedy_answers_are_the_same_in_every_sample(untouched):
    """Against argmax by hand would be the sampler's own test; here it arrives."""
    config, workdir = untouched
    greedy = evaluate(config, workdir, temperature=0.0)
    assert (greedy["samples"], greedy["temperature"]) == (1, 0.0)
    assert list(greedy["pass_at"]) == ["1"]
    twice = evaluate(config, workdir, temperature=0.0, samples=2)
    assert twice["pass_at"]["1"] == twice["pass_at"]["2"] == greedy["success"]
    assert greedy["success"] != evaluate(config, workdir, samples=1)["success"]
    other = echo_task.replace(config, {"rollout.temperature": 0.3})
    cool = evaluate(config, workdir, temperature=0.3)
    assert cool == evaluate(other, workdir)
    with pytest.raises(ConfigError, match="--temperature is -1"):
        evaluate(config, workdir, temperature=-1.0)


def test_a_step_names_a_checkpoint_and_others_are_listed(untouched):
    config, workdir = untouched
    newest = evaluate(config, workdir, samples=1)
    for step in (0, 2):
        found = evaluate(config, workdir, samples=1, step=step)
        assert found == newest | {"step": step}  # the learning rate is 0
    with pytest.raises(ConfigError, match=r"of step 1, expected one of \[0, 2\]"):
        evaluate(config, workdir, step=1)


def test_rewards_that_are_not_0_or_1_have_a_mean(untouched):
    """With verdicts from 0 to 6 the held-out line said 0 %."""
    config, workdir = untouched
    verdicts = echo_task.scripted([0.0, 6.0, 3.0, ConnectionError("no verdict")])
    found = evaluate(config, workdir, samples=4, environment=verdicts)
    assert (found["success"], found["reward"]) == (0.0, 3.0)
    assert found["stop_reasons"]["environment_error"] == 32
    assert 0.0 <= found["truncated_share"] <= 0.75


def test_metrics_and_result_have_rewards_and_stop_reasons(untouched):
    config, workdir = untouched
    rows = read(workdir)
    reward = evaluate(config, workdir, samples=1)["reward"]
    assert [row["heldout_reward"] for row in rows] == [reward] * 3
    members = config.rollout.groups_per_step * config.rollout.group_size
    for row in rows[1:]:
        stops = {k: v for k, v in row.items() if k.startswith("stop_")}
        assert sum(stops.values()) == members
        cut = ("length", "turn_limit", "context_overflow")
        expected = sum(stops[f"stop_{name}"] for name in cut) / members
        assert row["truncated_share"] == expected
    result = json.loads((workdir / "result.json").read_text())
    assert result["heldout_reward"]["end"] == rows[-1]["heldout_reward"]


def test_a_run_that_lost_its_metrics_can_still_end(untouched, tmp_path):
    config, workdir = untouched
    copy = shutil.copytree(workdir, tmp_path / "copy")
    (copy / "metrics.jsonl").unlink()
    (copy / "result.json").unlink()
    result = train.train(config, copy)
    assert result["heldout_success"] == {"warm_start": None, "end": None}
    assert (
        result["sha256"] == json.loads((workdir / "result.json").read_text())["sha256"]
    )


def test_another_tool_may_be_evaluated_but_not_another_model(untouched):
    config, workdir = untouched
    other = echo_task.replace(config, {"rollout.turns": 1})
    assert evaluate(other, workdir, samples=1)["turns_mean"] == 1
    wider = echo_task.replace(config, {"model.width": 24})
    with pytest.raises(ConfigError, match="embed"):
        evaluate(wider, workdir, samples=1)


def test_nothing_to_evaluate_is_said(tmp_path):
    config = echo_task.small()
    with pytest.raises(ConfigError, match="no policy"):
        evaluate(config, tmp_path / "empty")
    for options in ({"questions": 33}, {"samples": 0}, {"questions": 0}):
        with pytest.raises(ConfigError, match="held-out questions"):
            evaluate(config, tmp_path / "empty", **options)


def test_pass_at_k_is_the_share_of_draws_with_a_success():
    """Against drawing every k of n answers without replacement."""
    successes, n = np.array([0, 1, 3, 5]), 5
    found = Evaluation(successes, n, [], {})
    for k in range(1, n + 1):
        shares = []
        for c in successes:
            answers = [True] * c + [False] * (n - c)
            draws = list(itertools.combinations(answers, k))
            shares.append(sum(map(any, draws)) / len(draws))
        assert found.pass_at(k) == pytest.approx(np.mean(shares))
