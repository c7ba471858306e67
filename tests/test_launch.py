"""The script that starts servers and trainer, and stops what it started."""

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thundersync_jax.metrics import read

TESTS = Path(__file__).parent
SCRIPT = TESTS.parent / "launch" / "local_vllm.sh"
LIMIT_SECS = 240


@pytest.fixture
def launch(tmp_path):
    """The command and environment of the script, with two fake servers."""
    executable = tmp_path / "vllm"
    command = f'exec "{sys.executable}" "{TESTS}/vllm_executable.py" "$@"\n'
    executable.write_text(f"#!/bin/sh\n{command}")
    executable.chmod(executable.stat().st_mode | stat.S_IEXEC)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {
        "PYTHON": sys.executable,
        "VLLM": str(executable),
        "SERVERS": "2",
        "PORT": str(port),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}",
    }
    workdir = tmp_path / "run"
    flags = [
        "--config.steps=1",
        "--config.warm_start.steps=5",
        "--config.env.tool_latency.kind=none",
        "--config.evaluation.questions=4",
        "--config.warm_start.check_questions=4",
    ]
    command = [str(SCRIPT), str(TESTS / "echo_task.py"), str(workdir), *flags]
    return command, {**os.environ, **given}, workdir, port


def listening(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def gone(port):
    end = time.monotonic() + 15
    while listening(port) or listening(port + 1):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def test_it_trains_on_servers_and_stops_them(launch):
    command, environment, workdir, port = launch
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECS,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert "2 servers hold the policy" in done.stdout
    assert read(workdir)[-1]["probe_difference"] < 1e-4
    assert gone(port)


def test_an_interrupt_leaves_nothing_running(launch):
    command, environment, _, port = launch
    with subprocess.Popen(
        [*command, "--config.steps=100000"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            for line in running.stdout:
                if "2 servers hold the policy" in line:
                    break
            # The terminal's Ctrl-C: to the foreground group, which is the script's own.
            os.killpg(running.pid, signal.SIGINT)
            rest = running.stdout.read()
            status = running.wait(30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert status == 130, rest[-2000:]
    assert gone(port)


def test_a_server_that_does_not_start_is_said_with_its_last_words(launch, tmp_path):
    command, environment, _, port = launch
    (tmp_path / "vllm").write_text("#!/bin/sh\necho no memory left\nexit 3\n")
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECS
    )
    assert done.returncode == 1
    assert "is not healthy" in done.stderr and "no memory left" in done.stderr
    assert gone(port)
