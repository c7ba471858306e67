"""The training command as a process: how it ends, and configs from outside."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thundersync_jax import train
from thundersync_jax.config.settings import replace
from thundersync_jax.flags import load_config
from thundersync_jax.metrics.records import recorded_steps
from thundersync_jax.metrics.writer import read

ROOT = Path(__file__).parents[1]
PATIENCE_SECS = 120.0  # for what takes seconds on an idle machine

# A task in which something happens at the second verdict of training, and a file that
# says when. `happens` is the body of a coroutine.
CONFIG = """
import asyncio, dataclasses, time
from pathlib import Path
import echo_task
from thundersync_jax.engines.in_process import InProcessEngine

marker = Path(__file__).with_name("happened")

async def happens():
    marker.write_text(str(time.time()))
    {happens}

def broken_step(engine):
    raise RuntimeError("the sampler was killed")

class Faulty(echo_task.Echo):
    verdicts = []

    async def verify(self):
        if self.word in echo_task.tasks().train:
            self.verdicts.append(self.word)
            if len(self.verdicts) == 2:
                await happens()
        return float(len(self.verdicts) % 2)

def make(env, seed):
    return echo_task.tasks(Faulty)

def get_config(variant=None):
    return echo_task.small(0, **{{
        "steps": 1000,
        "partial_groups": "fail",
        "evaluation.every_steps": 0,
        "env.factory": f"{{__name__}}:make",
    }})
"""


@pytest.fixture(scope="module")
def environment():
    folders = [str(ROOT), str(ROOT / "tests")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)}


def command(config, workdir):
    program = [sys.executable, "-m", "thundersync_jax.train"]
    return [*program, f"--config={config}", f"--workdir={workdir}", "--json"]


def run_faulty(folder, environment, happens, send=None):
    """Runs the command; returns status, stderr and seconds since it happened."""
    (folder / "faulty_task.py").write_text(CONFIG.format(happens=happens))
    marker = folder / "happened"
    process = subprocess.Popen(
        command("faulty_task.py", "run"),
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE_SECS
        while not (marker.exists() and marker.read_text()):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if send is not None:
            process.send_signal(send)
        _, errors = process.communicate(timeout=PATIENCE_SECS)
        secs = time.time() - float(marker.read_text())
    finally:
        process.kill()
        process.communicate()
    with pytest.raises(ProcessLookupError):  # nor has it left another process
        os.killpg(process.pid, 0)
    return process.returncode, errors, secs


def test_policy_fail_ends_the_process_with_the_cause(tmp_path, environment):
    """One failed rollout hung the run (NovaSky-AI/SkyRL#1613, #1691)."""
    status, errors, secs = run_faulty(
        tmp_path, environment, 'raise ConnectionError("the grader is away")'
    )
    assert status == 2
    assert errors.count("\n") == 1
    assert "member" in errors and "ConnectionError: the grader is away" in errors
    assert secs < 5.0


def test_dead_sampler_ends_the_process_with_its_traceback(tmp_path, environment):
    """The engine's death was swallowed and the run hung (NovaSky-AI/SkyRL#1613,
    #1691)."""
    status, errors, secs = run_faulty(
        tmp_path, environment, "InProcessEngine.step = broken_step; return"
    )
    assert status == 1
    assert errors.rstrip().endswith("RuntimeError: the sampler was killed")
    assert "in broken_step" in errors
    assert secs < 10.0


def test_ctrl_c_in_a_step_ends_the_process_at_once(tmp_path, environment):
    status, errors, secs = run_faulty(
        tmp_path, environment, "await asyncio.sleep(3600)", send=signal.SIGINT
    )
    assert (status, errors) == (130, "interrupted\n")
    assert secs < 5.0


@pytest.mark.smoke
def test_own_task_trains_from_outside_the_package(tmp_path, environment):
    shutil.copy(ROOT / "configs" / "own_task.py", tmp_path / "somebodys_task.py")
    ended = subprocess.run(
        command("somebodys_task.py:smoke", "run"),
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["steps"] == 2 and 0 <= result["heldout_success"]["end"] <= 1
    assert [row["step"] for row in read(tmp_path / "run")] == [0, 1, 2]
    assert recorded_steps(tmp_path / "run") == [1, 2]
    made = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"timeline.json", "timeline.png", "success.png", "result.json"} <= made


SMALLER = {"bench_gpu": ":smoke", "bench_opd": ":teacher"}  # what a CPU can hold
# Above, or in test_qwen3_config.py, test_conversations.py and test_terminal.py.
ELSEWHERE = ["own_task", "qwen3_0_6b", "terminal_cpu"]
ELSEWHERE += ["guess", "simulated_user", "three_tools", "compaction"]
OTHERS = [p for p in sorted(ROOT.glob("configs/*.py")) if p.stem not in ELSEWHERE]


@pytest.mark.usefixtures("quick_programs")
@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_shipped_config_trains(path, tmp_path, monkeypatch):
    """Two steps each; its own model, task and loss, and few trajectories."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    variant = SMALLER.get(path.stem, "")
    config = load_config(f"{path}{variant}")
    changes = {}
    if config.teacher.config:  # one that has learnt as little
        teacher = load_config(f"{ROOT / config.teacher.config}")
        train.train(short(teacher), tmp_path / "teacher")
        changes = {"teacher.workdir": str(tmp_path / "teacher")}
    result = train.train(replace(short(config), changes), tmp_path)
    assert result["steps"] == 2
    assert [row["step"] for row in read(tmp_path)] == [0, 1, 2]


def short(config):
    changes = {
        "steps": 2,
        "warm_start.steps": min(config.warm_start.steps, 2),
        "warm_start.batch_size": 8,
        "warm_start.check_questions": 4,
        "evaluation.questions": 4,
        "rollout.groups_per_step": 2,
        "rollout.group_size": 4,
        "rollout.slots": 8,
        "rollout.gradient_buckets": config.rollout.gradient_buckets[-1:],
        "rollout.segment_buckets": config.rollout.segment_buckets[-1:],
        "mesh.rows_per_call": 1,
        "env.tool_latency.kind": "none",
        "env.verify_latency.kind": "none",
    }
    return replace(config, changes)
