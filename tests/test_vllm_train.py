"""The quickstart's task with a tiny Qwen3 on real vLLM servers.

    THUNDERSYNC_VLLM=/path/to/vllm pytest -s tests/test_vllm_train.py

prints what every step found.
"""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from served_policy import written
from vllm_process import MARKS, Process

from thundersync_jax import train
from thundersync_jax.config import TeacherConfig
from thundersync_jax.config.settings import replace
from thundersync_jax.flags import load_config
from thundersync_jax.metrics.writer import read

pytestmark = MARKS
CONFIGS = Path(__file__).parent.parent / "configs"
TOLERANCE = 1e-4  # nats, of float32 on both sides
STEPS = 3
# Heads of less than 32 have no kernel in vLLM on CPU.
QWEN3 = {"model.qk_norm": True, "model.head_dim": 32, "model.rope_theta": 1e6}
SHORT = {
    "steps": STEPS,
    "rollout.groups_per_step": 16,
    "rollout.slots": 64,
    "warm_start.check_every_steps": 45,
    "warm_start.check_questions": 32,
    "evaluation.questions": 32,
    "evaluation.every_steps": 0,
    "checkpoint.every_steps": STEPS,
}


def grpo(**changes):
    compact = load_config(f"{CONFIGS / 'quickstart.py'}:compact")
    return replace(compact, QWEN3 | SHORT | changes)


@pytest.fixture(scope="module")
def students(tmp_path_factory):
    """Two servers of one folder."""
    folder = written(
        grpo(), tmp_path_factory.mktemp("student") / "weights", untied=True
    )
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(Process(folder, 64)) for _ in range(2)]
        for one in found:
            one.wait()
        yield found


def served_by(*processes):
    return {
        "vllm.servers": tuple(process.address for process in processes),
        "vllm.weights_dir": processes[0].folder,
    }


def check(workdir, *processes):
    rows = read(workdir)[1:]
    assert len(rows) == STEPS
    for row in rows:
        print(
            f"step {row['step']}  policy {row['policy_version']}  gradient "
            f"{row['gradient_norm']:.3f}  publication within "
            f"{row['probe_difference']:.1e}  |log-ratio| mean "
            f"{row['mismatch_mean']:.1e}, largest {row['mismatch_max']:.1e}"
        )
        assert row["probe_difference"] < TOLERANCE
        assert row["mismatch_mean"] < TOLERANCE
        assert row["staleness_max"] == 0 and row["failed_members"] == 0
    assert all(process.alive for process in processes)
    return rows


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_policy_gradient_steps(students, tmp_path, temperature):
    one, other = students
    config = grpo(
        **served_by(one, other),
        **{"rollout.temperature": temperature, "warm_start.steps": 90},
    )
    train.train(config, tmp_path)
    rows = check(tmp_path, one, other)
    assert [row["policy_version"] for row in rows] == list(range(STEPS))
    assert all(row["gradient_norm"] > 0 for row in rows)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A server of a policy after a longer warm start."""
    path = tmp_path_factory.mktemp("teacher")
    config = grpo(**{"steps": 1, "warm_start.steps": 150, "checkpoint.every_steps": 1})
    train.train(config, path / "run")
    from thundersync_jax.export import export

    export(config, path / "run", folder=str(path / "weights"))
    with Process(path / "weights", 64) as process:
        process.wait()
        yield process, path / "run"


@pytest.mark.parametrize("release", ["trajectory", "turn"])
def test_distillation_steps(students, teacher, tmp_path, release):
    """From a teacher on a server, and from the same one in this process."""
    served, workdir = teacher
    student = replace(load_config(str(CONFIGS / "quickstart_opd.py")), QWEN3 | SHORT)
    student = replace(
        student, {"warm_start.steps": 90, "release": release, **served_by(students[0])}
    )
    here = {"workdir": str(workdir)}
    there = {"servers": (served.address,)}
    kl = {}
    for name, given in (("here", here), ("there", there)):
        config = replace(student, {"teacher": TeacherConfig(**given)})
        train.train(config, tmp_path / name)
        rows = check(tmp_path / name, students[0], served)
        kl[name] = [row["teacher_kl"] for row in rows]
    print(kl)
    assert kl["there"] == pytest.approx(kl["here"], rel=1e-3)


def test_killing_servers_in_the_middle_of_a_step(students, tmp_path):
    """One: the run goes on. Both: it ends with the reason, soon after the deadline."""
    config = served_by(*students) | {
        "steps": 1000,
        "warm_start.steps": 1,
        "warm_start.check_every_steps": 1,
        "vllm.request_timeout_secs": 5,
    }
    settings = QWEN3 | SHORT | config
    flags = [f"--config.{name}={_text(value)}" for name, value in settings.items()]
    command = [sys.executable, "-m", "thundersync_jax.train", *flags]
    command += [
        f"--config={CONFIGS / 'quickstart.py'}:compact",
        f"--workdir={tmp_path}",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            _until(lambda: len(_rows(tmp_path)) >= 3, run)
            students[0].kill()
            killed = len(_rows(tmp_path))
            _until(lambda: len(_rows(tmp_path)) >= killed + 3, run)
            start = time.monotonic()
            students[1].kill()
            text, _ = run.communicate(timeout=60)
            secs = time.monotonic() - start
        finally:
            run.kill()
    failed = [row["failed_members"] for row in _rows(tmp_path)]
    retried = [row["retried_requests"] for row in _rows(tmp_path)]
    print(f"both gone: ended after {secs:.1f} s with {run.returncode}")
    print(f"by step: failed members {failed}, tried again {retried}")
    assert sum(retried) > 0
    print(text.splitlines()[-1])
    assert run.returncode not in (0, None) and secs < 15
    assert "no vLLM server is left" in text and "is taken out, 1 left" in text


def _rows(workdir):
    return [row for row in read(workdir) if "failed_members" in row]


def _until(condition, run, limit_secs=180):
    end = time.monotonic() + limit_secs
    while not condition():
        assert run.poll() is None, run.stdout.read()[-2000:]
        assert time.monotonic() < end
        time.sleep(0.05)


def _text(value):
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, bool) else str(value)
