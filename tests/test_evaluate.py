"""Held-out evaluation: what it counts, and what two of them have in common."""

import itertools

import echo_task
import numpy as np
import pytest

from thundersync_jax import train
from thundersync_jax.errors import ConfigError
from thundersync_jax.evaluate import evaluate
from thundersync_jax.metrics.writer import read
from thundersync_jax.run.heldout import Evaluation

pytestmark = pytest.mark.usefixtures("quick_programs")


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with echo_task.kept_programs(tmp_path_factory.getbasetemp() / "programs"):
        yield


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
