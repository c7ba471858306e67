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

from thundersync_jax.metrics.writer import read

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


def within(secs, condition):
    end = time.monotonic() + secs
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def gone(port):
    return within(15, lambda: not (listening(port) or listening(port + 1)))


def ended(pid):
    """Whether a process runs no more; nobody may have asked yet how it ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


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


@contextlib.contextmanager
def running(command, environment, line=None):
    """The script, from the line on that holds this; killed at the end."""
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as script:
        try:
            while line and line not in script.stdout.readline():
                assert script.poll() is None
            yield script
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)


def test_an_interrupt_leaves_nothing_running(launch):
    command, environment, _, port = launch
    command.append("--config.steps=100000")
    with running(command, environment, "2 servers hold the policy") as script:
        # The terminal's Ctrl-C: to the foreground group, which is the script's own.
        os.killpg(script.pid, signal.SIGINT)
        rest = script.stdout.read()
        assert script.wait(30) == 130, rest[-2000:]
    assert gone(port)


def test_a_second_signal_waits_for_a_server_that_does_not_end(launch, tmp_path):
    """vLLM does not end on SIGTERM while its engine starts."""
    command, environment, _, _ = launch
    stubborn = "#!/bin/sh\ntrap '' TERM\necho $$ >{0}.$$\nmv {0}.$$ {0}\n"
    stubborn += "while :; do sleep 1; done\n"
    (tmp_path / "vllm").write_text(stubborn.format(tmp_path / "pid"))
    environment["SERVERS"] = "1"
    with running(command, environment) as script:
        assert within(LIMIT_SECS, (tmp_path / "pid").exists)
        for _ in range(3):
            script.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        assert script.wait(30) == 143
    pid = int((tmp_path / "pid").read_text())
    assert within(5, lambda: ended(pid))


def test_a_killed_trainer_is_said_and_its_servers_end(launch):
    command, environment, _, port = launch
    command.append("--config.steps=100000")
    with running(command, environment, "2 servers hold the policy") as script:
        children = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text()
        for child in children.split():
            if "thundersync_jax.train" in Path(f"/proc/{child}/cmdline").read_text():
                os.kill(int(child), signal.SIGKILL)
        rest = script.stdout.read()
        assert script.wait(30) == 137
    assert rest.endswith("goes on from its last checkpoint\n")
    assert "Killed" not in rest and "Terminated" not in rest
    assert gone(port)


def test_a_port_in_use_is_refused_before_anything_is_done(launch):
    """The health of somebody else's server would be taken for that of our own."""
    command, environment, workdir, port = launch
    with socket.create_server(("127.0.0.1", port + 1)):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECS
        )
    assert done.returncode == 1
    assert f"port {port + 1} is in use, expected free ports from PORT={port} on" in (
        done.stderr
    )
    assert not list(workdir.iterdir()) and not done.stdout


@pytest.mark.parametrize(
    ("given", "cache"),
    [
        ({}, "1"),
        ({"VLLM_CPU_KVCACHE_SPACE": "7"}, "7"),
        ({"SERVER_GPUS": "0 1"}, "none"),
    ],
    ids=str,
)
def test_a_server_that_does_not_start_is_said_with_its_last_words(
    given, cache, launch, tmp_path
):
    """And a CPU server is told how large its cache is."""
    command, environment, _, port = launch
    words = "no memory left, cache ${VLLM_CPU_KVCACHE_SPACE:-none}"
    (tmp_path / "vllm").write_text(f"#!/bin/sh\necho {words}\nexit 3\n")
    done = subprocess.run(
        command,
        env=environment | given,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECS,
    )
    assert done.returncode == 1
    assert "is not healthy" in done.stderr
    assert f"no memory left, cache {cache}\n" in done.stderr
    assert gone(port)
