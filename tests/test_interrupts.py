"""Signals: never lost, patient with what closes, and at once where there are two."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import echo_task
import pytest
from rollout_fakes import FakeEnvironment, drain, jobs, never, open_pool

from thundersync_jax import train
from thundersync_jax.metrics.writer import read
from thundersync_jax.rollout import interrupts
from thundersync_jax.run.checkpoint import Checkpoints
from thundersync_jax.run.step import rollouts

ROOT = Path(__file__).parents[1]
PATIENCE_SECS = 60.0

# Says `started`, runs the body of a command and has an environment that says so when
# it is closed.
PROGRAM = """
import asyncio, ctypes, gc, os, sys, threading, time
from rollout_fakes import FakeEnvironment, jobs, never, open_pool
from thundersync_jax import flags
from thundersync_jax.rollout import interrupts

interrupts._GRACE_SECS = 0.3

class Closing(FakeEnvironment):
    secs = 0.0

    async def close(self):
        await asyncio.sleep(self.secs)
        os.write(1, b"closed\\n")

def command(workdir):
    with open_pool(lambda m: Closing(step=never)) as pool:
        pool.start(jobs(1), 0)
        time.sleep(0.2)
        print("started", flush=True)
{body}

flags.run(command, needs=(), argv=["program"])
"""
WAITS = "while True: pool.next_event(0.05)"
LOST = """
class Lost:
    def __del__(self):
        while interrupts._Ending.number is None:
            time.sleep(0.01)
Lost()
while True:
    interrupts.check()
    pool.next_event(0.05)
"""
# A lock that is taken twice; no signal ends that call, as it does a sleep.
IN_C = """
lock, library = ctypes.create_string_buffer(256), ctypes.CDLL(None)
library.pthread_mutex_lock(lock)
library.pthread_mutex_lock(lock)
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="takes its libc's lock")
SLOW = f"Closing.secs = 1.0\n{WAITS}"
NEVER = f"Closing.secs = 60.0\n{WAITS}"


def ended(body, *signals, between_secs=0.2):
    """Status, output, errors and seconds of a command that gets signals."""
    lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=lines)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
    ) as process:
        assert process.stdout.readline() == "started\n", process.stderr.read()
        time.sleep(0.1)
        start = time.monotonic()
        for number in signals:
            process.send_signal(number)
            time.sleep(between_secs)
        output, errors = process.communicate(timeout=PATIENCE_SECS)
    return process.returncode, output, errors, time.monotonic() - start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("body", [WAITS, SLOW, LOST], ids=["waits", "slow", "lost"])
def test_a_signal_ends_a_command_once_its_environments_are_closed(body, number):
    """Also where they take longer than the grace, and where the exception is lost."""
    status, output, errors, secs = ended(body, number)
    assert (status, output, errors) == (128 + number, "closed\n", "interrupted\n")
    assert secs < 5.0


@linux
@pytest.mark.parametrize("body", [NEVER, IN_C], ids=["closing", "in C"])
def test_a_second_signal_ends_it_at_once(body):
    status, output, errors, secs = ended(body, signal.SIGINT, signal.SIGINT)
    assert (status, output, errors) == (130, "", "interrupted\n")
    assert secs < 1.5


@linux
def test_a_main_thread_that_does_not_come_back_is_not_waited_for():
    status, _, errors, secs = ended(IN_C, signal.SIGTERM)
    assert (status, errors) == (143, "interrupted\n")
    assert secs < 2.0


def test_a_lost_interrupt_is_raised_between_events(monkeypatch):
    closed = []

    class Run:
        compile_sampler = staticmethod(lambda: None)

    with open_pool(lambda m: FakeEnvironment(step=never)) as Run.pool:
        events = rollouts(Run, jobs(2), 0)
        monkeypatch.setattr(interrupts._Ending, "number", signal.SIGINT)
        monkeypatch.setattr(Run.pool, "close", lambda: closed.append(True))
        with pytest.raises(KeyboardInterrupt):
            next(events)
        monkeypatch.undo()
        Run.pool.cancel()
        drain(Run.pool)
    assert closed == [True]


def test_a_loop_that_an_environment_blocks_is_not_waited_for():
    blocks = "pool._loop.call_soon_threadsafe(time.sleep, 60)"
    status, output, errors, secs = ended(f"{blocks}\n{WAITS}", signal.SIGINT)
    assert (status, output, errors) == (130, "", "interrupted\n")
    assert secs < 2.0


@pytest.mark.usefixtures("quick_programs")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_sigterm_saves_the_step_that_has_ended(number, tmp_path, monkeypatch):
    """In the middle of the next one; the run goes on from there, to the same bits."""
    config = echo_task.small(
        0,
        **{"steps": 4, "checkpoint.every_steps": 4, "evaluation.every_steps": 0},
    )
    whole = train.train(config, tmp_path / "whole")
    step = train._Loop.step

    def interrupted(self, number_of_step):
        if number_of_step == 3:
            interrupts._Ending.number = number
        return step(self, number_of_step)

    with monkeypatch.context() as patched:
        patched.setattr(train._Loop, "step", interrupted)
        patched.setattr(interrupts._Ending, "number", None)
        with pytest.raises(KeyboardInterrupt):
            train.train(config, tmp_path / "run")
    saved = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert saved == (2 if number == signal.SIGTERM else None)
    again = train.train(config, tmp_path / "run")
    assert again["sha256"] == whole["sha256"]
    assert [row["step"] for row in read(tmp_path / "run")] == [0, 1, 2, 3, 4]
    json.dumps(again)


@pytest.mark.usefixtures("quick_programs")
@pytest.mark.parametrize("where", ["conclude", "evaluate"])
def test_sigterm_saves_no_step_without_its_row(where, tmp_path, monkeypatch):
    """In an update, whose state was donated, and in an evaluation behind it."""
    config = echo_task.small(
        0,
        **{"steps": 3, "checkpoint.every_steps": 3, "evaluation.every_steps": 2},
    )

    def interrupted(*arguments):
        if where == "conclude" or arguments[1] == 2:
            interrupts._Ending.number = signal.SIGTERM
            raise KeyboardInterrupt
        return {}

    with monkeypatch.context() as patched:
        target = train if where == "conclude" else train._Loop
        patched.setattr(target, where, interrupted)
        patched.setattr(interrupts._Ending, "number", None)
        with pytest.raises(KeyboardInterrupt):
            train.train(config, tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").latest() is None
    assert train.train(config, tmp_path)["steps"] == 3
