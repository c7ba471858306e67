"""Every step is in the metrics file exactly once, whatever interrupted the run."""

import json
import math
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.config import Config, MetricsConfig
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics import writer
from thundersync_jax.metrics.writer import METRICS, Metrics, named_sinks


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)


def write_steps(workdir, steps, resume_step=None, **scalars):
    with Metrics(workdir, resume_step) as log:
        for step in steps:
            log.write(step, {"loss": float(step)} | scalars)


def steps_of(workdir):
    lines = (workdir / writer.FILE).read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("resume_step", [1, 4, 6, 9])
@pytest.mark.parametrize("torn", ["", '{"step": 6, "lo', '{"step": 6, "loss": 6.0}'])
def test_each_step_is_there_once_after_a_resume(tmp_path, resume_step, torn):
    """AI-Hypercomputer/maxdiffusion#484: steps missing or doubled after a resume."""
    write_steps(tmp_path, range(1, 6))
    with open(tmp_path / writer.FILE, "a") as file:
        file.write(torn)
    write_steps(tmp_path, range(resume_step, 11), resume_step, again=True)
    assert steps_of(tmp_path) == [
        *range(1, min(resume_step, 6)),
        *range(resume_step, 11),
    ]
    lines = writer.read(tmp_path)
    assert all(
        line.get("again", False) == (line["step"] >= resume_step) for line in lines
    )


def test_a_character_cut_in_two_is_a_torn_line(tmp_path):
    write_steps(tmp_path, [1])
    with open(tmp_path / writer.FILE, "ab") as file:
        file.write('{"step": 2, "é'.encode()[:-1])
    assert [line["step"] for line in writer.read(tmp_path)] == [1]
    write_steps(tmp_path, [2])
    assert steps_of(tmp_path) == [1, 2]


@pytest.mark.parametrize("step", ['"3"', "2.5", "null", "true"])
def test_a_step_that_is_no_whole_number_is_named(tmp_path, step):
    write_steps(tmp_path, [1])
    with open(tmp_path / writer.FILE, "a") as file:
        file.write(f'{{"step": {step}}}\n')
    for call in (writer.read, lambda place: Metrics(place, 1)):
        with pytest.raises(ConfigError, match=r"metrics.jsonl:2 has step"):
            call(tmp_path)


def test_without_a_resume_step_nothing_whole_is_dropped(tmp_path):
    write_steps(tmp_path, [1, 2])
    write_steps(tmp_path, [3])
    assert steps_of(tmp_path) == [1, 2, 3]


def test_a_trim_that_is_killed_leaves_the_old_file(tmp_path, monkeypatch):
    write_steps(tmp_path, range(1, 6))
    before = (tmp_path / writer.FILE).read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            Metrics(tmp_path, resume_step=2)
    assert (tmp_path / writer.FILE).read_bytes() == before
    write_steps(tmp_path, [2], resume_step=2)
    assert steps_of(tmp_path) == [1, 2]


def test_a_line_is_in_the_file_when_write_returns(tmp_path):
    log = Metrics(tmp_path)
    log.write(1, {"loss": 0.5})
    assert steps_of(tmp_path) == [1]
    log.close()


def test_a_step_is_refused_a_second_time(tmp_path):
    write_steps(tmp_path, [1, 2])
    with Metrics(tmp_path) as log, pytest.raises(ValueError, match="loss.* of step 2"):
        log.write(2, {"loss": 1.0})
    assert steps_of(tmp_path) == [1, 2]


def test_what_is_not_finite_is_null_in_valid_json(tmp_path):
    values = {"a": math.nan, "b": np.float32("inf"), "c": jnp.float32(-math.inf)}
    with Metrics(tmp_path) as log:
        log.write(1, values)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    text = (tmp_path / writer.FILE).read_text()
    line = json.loads(text, parse_constant=refuse)
    assert line == {"step": 1, "a": None, "b": None, "c": None}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (3, 3),
        (True, True),
        (0.1, 0.1),
        (np.float64(0.1), 0.1),
        (np.float32(0.1), 0.10000000149011612),
        (np.int32(7), 7),
        (np.bool_(True), True),
        (np.array(2.5), 2.5),
        (jnp.float32(0.25), 0.25),
        (jnp.int32(4), 4),
        (jnp.bfloat16(0.5), 0.5),
    ],
)
def test_scalars_of_numpy_and_jax_are_numbers(tmp_path, value, written):
    with Metrics(tmp_path) as log:
        log.write(1, {"x": value})
    (line,) = writer.read(tmp_path)
    assert line["x"] == written and type(line["x"]) is type(written)


@pytest.mark.parametrize("value", [np.ones(2), "high", None, [1.0], np.array("x"), 1j])
def test_what_is_no_number_is_refused_by_name(tmp_path, value):
    with Metrics(tmp_path) as log:
        with pytest.raises(ValueError, match="metric 'odd'") as caught:
            log.write(1, {"loss": 1.0, "odd": value})
        log.write(1, {"loss": 1.0})
    assert "\n" not in str(caught.value)
    assert writer.read(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_the_name_step_is_refused(tmp_path):
    with Metrics(tmp_path) as log, pytest.raises(ValueError, match="'step'"):
        log.write(1, {"step": 2})


def test_another_logger_hears_the_same_numbers(tmp_path):
    heard = []
    with Metrics(tmp_path, sinks=[lambda *line: heard.append(line)]) as log:
        log.write(1, {"loss": np.float32(0.5), "mine": 2})
    assert heard == [(1, {"loss": 0.5, "mine": 2})]


def test_tensorboard_gets_the_same_numbers_and_forgets_what_comes_again(
    tmp_path, monkeypatch
):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, *scalar):
            calls.append(scalar)

        def flush(self):
            calls.append("flush")

        def close(self):
            calls.append("close")

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    sinks = named_sinks(Config(), tmp_path, 3)
    with Metrics(tmp_path, resume_step=3, sinks=sinks) as log:
        log.write(3, {"loss": 0.5, "reward_mean": math.nan})
    folder = str(tmp_path / writer.TENSORBOARD_FOLDER)
    assert calls == [(folder, 3), ("loss", 0.5, 3), "flush", "close"]


def test_the_installed_tensorboard_writer_writes_files(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorboardX")
    pytest.importorskip("tensorboardX")
    with Metrics(tmp_path, sinks=named_sinks(Config(), tmp_path)) as log:
        log.write(1, {"loss": 0.5})
    (file,) = (tmp_path / writer.TENSORBOARD_FOLDER).iterdir()
    assert b"loss" in file.read_bytes()


def with_sinks(*names):
    return Config(metrics=MetricsConfig(sinks=names))


def test_without_the_extra_there_is_no_tensorboard(tmp_path):
    assert named_sinks(Config(), tmp_path) == []
    assert not list(tmp_path.iterdir())


HEARD = []


def listen(step, scalars):
    HEARD.append((step, scalars))


def test_a_sink_of_ones_own_is_found_by_name(tmp_path):
    sinks = named_sinks(with_sinks("tensorboard", f"{__name__}:listen"), tmp_path)
    assert sinks == [listen]
    with Metrics(tmp_path, sinks=sinks) as log:
        log.write(1, {"loss": 0.5})
    assert HEARD == [(1, {"loss": 0.5})]


def test_names_of_sinks_that_nothing_has_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="metrics.sinks is 'tensorbored', expected"):
        with_sinks("tensorbored")
    with pytest.raises(ConfigError, match="expected every sink once"):
        with_sinks("wandb", "wandb")
    with pytest.raises(ConfigError, match="has no function 'no_such_sink'"):
        named_sinks(with_sinks(f"{__name__}:no_such_sink"), tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"metrics\.sinks .*thundersync_jax\[wandb\]"):
        named_sinks(with_sinks("wandb"), tmp_path)


def test_a_sink_that_raises_is_reported_once_and_nothing_else_stops(tmp_path):
    class Broken:
        def __call__(self, step, scalars):
            raise ConnectionError("no route\nto host")

        def close(self):
            raise OSError("still none")

    lines, heard = [], []
    sinks = [Broken(), lambda *line: heard.append(line)]
    with Metrics(tmp_path, sinks=sinks, on_line=lines.append) as log:
        for step in (1, 2):
            log.write(step, {"loss": 0.5})
    assert heard == [(1, {"loss": 0.5}), (2, {"loss": 0.5})]
    assert steps_of(tmp_path) == [1, 2]
    (line,) = lines
    assert "Broken failed with ConnectionError: no route to host" in line


def test_every_metric_is_documented_with_its_unit():
    for name, text in METRICS.items():
        unit, _, meaning = text.partition("; ")
        assert unit and meaning, f"{name} has no unit or no meaning"
        assert name.endswith("_secs") == (unit == "seconds"), name


def test_the_norm_before_and_after_clipping_have_two_names():
    """verl-project/verl#2282: nobody could tell which of the two was logged."""
    assert "before clipping" in METRICS["gradient_norm"]
    assert "after clipping" in METRICS["gradient_norm_clipped"]


def test_numbers_that_come_after_their_step_are_in_the_file(tmp_path):
    """A tracker dropped what came after a later step (NVIDIA-NeMo/RL#4044)."""
    with Metrics(tmp_path) as log:
        log.write(1, {"a": 1})
        log.write(2, {"a": 2})
        log.write(1, {"b": 2})
        with pytest.raises(ValueError, match="'b' of step 1 is written already"):
            log.write(1, {"b": 3})
    expected = [{"step": 1, "a": 1, "b": 2}, {"step": 2, "a": 2}]
    assert writer.read(tmp_path) == expected
    with Metrics(tmp_path, resume_step=2) as log:
        log.write(2, {"a": 3})
    assert writer.read(tmp_path) == [expected[0], {"step": 2, "a": 3}]
