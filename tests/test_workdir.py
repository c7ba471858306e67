"""A work directory belongs to one config, also after an interrupted first write."""

import dataclasses
import datetime
import functools
import json
import subprocess
import sys

import pytest

from thundersync_jax.config import (
    CheckpointConfig,
    Config,
    EvaluationConfig,
    OptimConfig,
    RolloutConfig,
    VLLMConfig,
    workdir,
)
from thundersync_jax.config.workdir import locked, resumed, saved_result
from thundersync_jax.errors import ConfigError

CONFIG = Config(steps=10)
claim = functools.partial(workdir.claim, vocabulary={"a": 0})


def test_the_same_config_is_accepted_again(tmp_path):
    claim(tmp_path / "run", CONFIG)
    written = (tmp_path / "run" / "config.json").read_bytes()
    claim(tmp_path / "run", Config(steps=10))
    assert (tmp_path / "run" / "config.json").read_bytes() == written


def test_another_config_is_refused_in_one_line_that_names_the_settings(tmp_path):
    claim(tmp_path, CONFIG)
    other = dataclasses.replace(CONFIG, seed=3, optim=OptimConfig(learning_rate=0.5))
    with pytest.raises(ConfigError) as caught:
        claim(tmp_path, other)
    text = str(caught.value)
    assert "\n" not in text and str(tmp_path) in text
    assert "seed: 0 -> 3" in text and "optim.learning_rate: 0.001 -> 0.5" in text
    claim(tmp_path, CONFIG)


def test_more_steps_continue_the_run_and_fewer_are_refused(tmp_path):
    claim(tmp_path, CONFIG)
    claim(tmp_path, dataclasses.replace(CONFIG, steps=20))
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 20
    with pytest.raises(ConfigError, match="steps: 20 -> 10"):
        claim(tmp_path, CONFIG)
    with pytest.raises(ConfigError, match="seed: 0 -> 1") as caught:
        claim(tmp_path, dataclasses.replace(CONFIG, steps=30, seed=1))
    assert "steps:" not in str(caught.value)


def test_what_changes_nothing_of_the_run_may_change_and_is_listed(tmp_path):
    claim(tmp_path, CONFIG)
    other = dataclasses.replace(
        CONFIG,
        rollout=RolloutConfig(step_timeout_secs=9.0),
        evaluation=EvaluationConfig(every_steps=3),
        checkpoint=CheckpointConfig(every_steps=5, keep=4),
    )
    assert list(map(str, claim(tmp_path, other))) == [
        "rollout.step_timeout_secs: 300.0 -> 9.0",
        "evaluation.every_steps: 20 -> 3",
        "checkpoint.every_steps: 10 -> 5",
        "checkpoint.keep: 2 -> 4",
    ]
    assert claim(tmp_path, other) == []
    questions = dataclasses.replace(other, evaluation=EvaluationConfig(questions=3))
    with pytest.raises(ConfigError, match=r"\(evaluation.questions: 200 -> 3\)"):
        claim(tmp_path, questions)


def edit(tmp_path, change):
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    change(saved)
    path.write_text(json.dumps(saved))


def test_a_saved_config_of_another_version_is_read_with_the_names_of_today(tmp_path):
    def older(saved):
        del saved["optim"]["b2"], saved["checkpoint"], saved["rollout"]["attempts"]
        saved["was_once"] = saved["optim"]["too"] = 3

    claim(tmp_path, CONFIG)
    edit(tmp_path, older)
    assert claim(tmp_path, CONFIG) == []
    other = dataclasses.replace(CONFIG, optim=OptimConfig(b2=0.5))
    with pytest.raises(ConfigError, match=r"\(optim.b2: 0.95 -> 0.5\)"):
        claim(tmp_path, other)


def test_buckets_that_nobody_gave_stay_those_of_the_saved_run(tmp_path):
    def older(saved):
        saved["rollout"]["prefill_buckets"] = [16, 32, 96]

    assert resumed(tmp_path, CONFIG) == CONFIG
    claim(tmp_path, CONFIG)
    edit(tmp_path, older)
    assert claim(tmp_path, CONFIG) == []
    rollout = resumed(tmp_path, CONFIG).rollout
    assert rollout.prefill_buckets == (16, 32, 96)
    assert rollout.gradient_buckets == CONFIG.rollout.gradient_buckets
    longer = dataclasses.replace(CONFIG, rollout=RolloutConfig(context_tokens=128))
    with pytest.raises(ConfigError, match="rollout.context_tokens: 96 -> 128"):
        claim(tmp_path, longer)
    given = dataclasses.replace(CONFIG, rollout=RolloutConfig(prefill_buckets=(96,)))
    with pytest.raises(ConfigError, match=r"prefill_buckets: \[16, 32, 96\] -> \[96"):
        claim(tmp_path, given)


def test_checkpoints_without_their_settings_are_refused(tmp_path):
    claim(tmp_path, CONFIG)
    (tmp_path / "config.json").unlink()
    assert claim(tmp_path, CONFIG) == []
    (tmp_path / "config.json").unlink()
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"config.json is missing"):
        claim(tmp_path, CONFIG)


def test_an_interrupted_first_write_does_not_block_a_later_run(tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            claim(tmp_path, dataclasses.replace(CONFIG, seed=7))
    assert not (tmp_path / "config.json").exists()
    claim(tmp_path, CONFIG)
    claim(tmp_path, CONFIG)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "vocabulary.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"steps"', '{"steps": "ten"}', "{}"])
def test_a_file_that_is_no_config_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="is no saved config"):
        claim(tmp_path, CONFIG)
    assert (tmp_path / "config.json").read_text() == text


@pytest.mark.parametrize(
    "text", ["{bad", "[]", "{}", '{"steps": "ten"}', '{"steps": 10}']
)
def test_a_file_that_is_no_result_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ConfigError, match=r"result.json is no saved result.* Delete"):
        saved_result(tmp_path, 10)


def test_what_cannot_be_a_directory_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="expected a directory to write to"):
            claim(place, CONFIG)
        with pytest.raises(ConfigError, match="directory"), locked(place):
            pass


def test_one_process_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path):
    code = (
        "import sys, thundersync_jax.config.workdir as workdir\n"
        "with workdir.locked(sys.argv[1]):\n"
        "    print('locked', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    place = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", code, place],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"locked\n"
        with (
            pytest.raises(ConfigError, match=r"run: another process is using it; wait"),
            locked(place),
        ):
            pass
        other.kill()
    for _ in range(2):
        with locked(place):
            pass


def test_servers_may_be_elsewhere_when_a_run_goes_on(tmp_path):
    def served(address, folder="weights"):
        servers = VLLMConfig(servers=(address,), weights_dir=folder)
        return dataclasses.replace(CONFIG, vllm=servers)

    claim(tmp_path, served("http://a:8000"))
    claim(tmp_path, served("http://b:8000", "elsewhere"))
    with pytest.raises(ConfigError, match="seed: 0 -> 7"):
        claim(tmp_path, dataclasses.replace(served("http://b:8000"), seed=7))
    halved = dataclasses.replace(served("http://b:8000").vllm, dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"vllm\.dtype: float32 -> bfloat16"):
        claim(tmp_path, dataclasses.replace(CONFIG, vllm=halved))


def test_the_day_of_prompts_is_that_of_the_first_start(tmp_path):
    first = datetime.datetime(2026, 5, 1, 23, 59)
    before = datetime.datetime.now()
    assert before <= workdir.first_day(tmp_path) <= datetime.datetime.now()
    workdir.claim_day(tmp_path, first)
    assert workdir.first_day(tmp_path) == first
    workdir.claim_day(tmp_path, first + datetime.timedelta(1))
    assert workdir.first_day(tmp_path) == first
    for content in ("", "[]", "{}", '{"first_start": 3}', '{"first_start": "today"}'):
        (tmp_path / "day.json").write_text(content)
        with pytest.raises(ConfigError, match=r"day.json has no date, .* Delete it"):
            workdir.first_day(tmp_path)
