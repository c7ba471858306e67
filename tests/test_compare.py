"""Runs side by side: what a row says, and the settings in which they differ."""

import dataclasses
import json

import pytest

from thundersync_jax.compare import compare
from thundersync_jax.config import Config, OptimConfig, workdir
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics.writer import Metrics

CONFIG = Config(steps=4)
OTHER = dataclasses.replace(CONFIG, seed=1, optim=OptimConfig(learning_rate=0.5))


def recorded(folder, config, successes, streamed=0.5):
    """A run with these evaluations, the first before training; 2 s a step."""
    workdir.claim(folder, config, vocabulary={})
    with Metrics(folder) as metrics:
        for step, success in enumerate(successes):
            row = {
                "heldout_success": success,
                "heldout_success_low": success - 0.1,
                "heldout_success_high": success + 0.1,
                "heldout_reward": 2 * success,
                "elapsed_secs": 10.0 * step,
            }
            if step:
                row |= {"step_secs": 2.0, "reward_mean": 0.1 * step}
                row |= {"streamed_share": streamed}
            metrics.write(step, row)
    return str(folder)


@pytest.fixture(name="runs")
def _runs(tmp_path):
    one = recorded(tmp_path / "one", CONFIG, [0.25, 0.5, 0.75])
    return one, recorded(tmp_path / "other", OTHER, [0.25, 1.0], float("nan"))


def test_a_row_says_how_a_run_ended_and_what_it_cost(runs, capsys):
    found = compare(runs)["runs"]
    assert found[0] == {
        "workdir": runs[0],
        "planned_steps": 4,
        "steps": 2,
        "heldout_success": {"warm_start": 0.25, "end": 0.75},
        "heldout_reward": 1.5,
        "reward_mean": pytest.approx(0.15),
        "step_secs": 2.0,
        "elapsed_secs": 20.0,
        "streamed_share": 0.5,
    }
    shown = capsys.readouterr().out.splitlines()
    cells = "one 2/4 25.0% 75.0% 1.500 0.150 2.00 20.00 50%"
    assert shown[2].split() == cells.split()
    assert shown[3].split()[-1] == "-"  # nothing is known of what it streamed


def test_settings_that_differ_are_listed_with_every_value(runs, capsys, tmp_path):
    third = recorded(tmp_path / "more" / "one", dataclasses.replace(CONFIG, seed=2), [])
    found = compare([*runs, third])
    assert found["settings"] == {
        "optim.learning_rate": [0.001, 0.5, 0.001],
        "seed": [0, 1, 2],
    }
    shown = capsys.readouterr().out
    assert "settings that differ" in shown
    assert runs[0] in shown and third in shown  # the same name
    assert f" {runs[1]} " not in shown  # a name of its own
    assert json.loads((tmp_path / "one" / "config.json").read_text())["seed"] == 0


def test_a_picture_is_written(runs, tmp_path):
    compare(runs, plot=str(tmp_path / "compared.png"))
    assert (tmp_path / "compared.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_compared_is_one_line(runs, tmp_path):
    for given in ([], runs[:1], [runs[0], runs[0]]):
        with pytest.raises(ConfigError, match="expected two or more different ones"):
            compare(given)
    with pytest.raises(ConfigError, match="nothing holds no run"):
        compare([*runs, str(tmp_path / "nothing")])
