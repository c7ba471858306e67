"""Signals at random moments of a training command: none is lost, nothing stays alive.

    python tests/signal_and_resume.py --signals=300 --seed=0

Ctrl-C, SIGTERM, or Ctrl-C twice; at a start, in a step, in an evaluation. Every attempt
owns a process. Every life ends within 5 s of its signal, with the status of that, its
environments closed; after a second Ctrl-C, which ends at once, the next life reaps what
is left. Every run comes to its end, with one hash.

Also a config file, whose `OWNED` folder has the process ids of environments.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import echo_task

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "Ctrl-C": (signal.SIGINT,),
    "SIGTERM": (signal.SIGTERM,),
    "two Ctrl-C": (signal.SIGINT, signal.SIGINT),
}
WITHIN_SECS = 5.0
PATIENCE_SECS = 300.0
STEPS = 8


class Owning(echo_task.Echo):
    """Owns a process from `start` to `close`."""

    async def start(self, task):
        self.process = await asyncio.create_subprocess_exec("sleep", "1000")
        self.note = Path(os.environ["OWNED"]) / str(self.process.pid)
        self.note.touch()
        return await super().start(task)

    async def close(self):
        if hasattr(self, "process"):
            self.process.kill()
            await self.process.wait()
            self.note.unlink()


def reap():
    """Kills what an earlier life has left."""
    for note in Path(os.environ["OWNED"]).iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(note.name), signal.SIGKILL)
        note.unlink()


def make(env, seed):
    return dataclasses.replace(echo_task.tasks(Owning), reap=reap)


def get_config(variant=None):
    changes = {"steps": STEPS, "env.factory": f"{__name__}:make"}
    return echo_task.small(20, **changes)


def alive(owned):
    return [
        note.name for note in owned.iterdir() if Path(f"/proc/{note.name}").exists()
    ]


def newest(workdir):
    """The newest checkpoint; of an odd step it is none of the config's."""
    names = [path.name for path in workdir.glob("checkpoints/*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


class Runs:
    """Lives of runs in one temporary folder."""

    def __init__(self, folder):
        self.folder, self.owned = folder, folder / "owned"
        self.owned.mkdir()
        self.longest_secs = 0.0

    def live(self, workdir, after_secs=None, kind=None):
        """One process; returns its status and output, and how long it lived."""
        command = [sys.executable, "-m", "thundersync_jax.train"]
        command += [f"--config={__file__}", f"--workdir={workdir}", "--json"]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            "OWNED": str(self.owned),
            "JAX_COMPILATION_CACHE_DIR": str(self.folder / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        start = time.monotonic()
        process = subprocess.Popen(
            command, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.folder,
        )  # fmt: skip
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(after_secs or PATIENCE_SECS)
            sent = time.monotonic()
            for number in KINDS.get(kind, ()):
                process.send_signal(number)
                time.sleep(0.05)
            output, _ = process.communicate(timeout=PATIENCE_SECS)
            if kind is not None and after_secs < sent - start:
                took = time.monotonic() - sent
                self.longest_secs = max(self.longest_secs, took)
                assert took < WITHIN_SECS, f"{kind} took {took:.1f} s: {output}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return process.returncode, output, time.monotonic() - start


def signal_and_resume(signals, seed, folder):
    runs, rng = Runs(folder), random.Random(seed)
    runs.live(folder / "compiling")
    status, output, whole_secs = runs.live(folder / "whole")
    assert status == 0, output
    sha256 = output[output.rindex('"sha256"') :][:80]
    print(f"uninterrupted {whole_secs:.1f} s  {sha256}", flush=True)
    counts, run, sent, left, saved = collections.Counter(), 0, 0, 0, 0
    while sent < signals:
        run += 1
        while True:
            kind = rng.choice(list(KINDS)) if sent < signals else None
            moment = rng.uniform(0.0, whole_secs) if kind else None
            status, output, _ = runs.live(folder / f"run_{run}", moment, kind)
            if status == 0:  # finished before, or as the last of its runs
                assert not alive(runs.owned), "a finished run left processes"
                break
            sent, first = sent + 1, KINDS[kind][0]
            # While python starts and jax is imported the signal itself ends it.
            handled = status == 128 + first
            assert handled or status == -first, (status, output)
            assert not handled or "Traceback" not in output, output
            there = alive(runs.owned)
            assert not there or kind == "two Ctrl-C", f"{kind} left {there}: {output}"
            left += bool(there)
            saved += kind == "SIGTERM" and newest(folder / f"run_{run}") % 2
            counts[kind, "handled" if handled else "at start"] += 1
            print(
                f"{sent:4d}  run {run:3d}  {kind:<11} after {moment:5.1f} s", flush=True
            )
        assert output[output.rindex('"sha256"') :][:80] == sha256, output
    assert not alive(runs.owned)
    listed = ", ".join(f"{kind} {how} {n}" for (kind, how), n in sorted(counts.items()))
    print(f"{sent} signals ({listed}), {run} runs, each with the same hash")
    print(
        f"ended after at most {runs.longest_secs:.1f} s; {left} ends at once left "
        f"processes, all reaped; SIGTERM saved a step {saved} times"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--signals", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # A shell's background jobs ignore Ctrl-C, and so would what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        signal_and_resume(arguments.signals, arguments.seed, Path(folder))
    print(f"passed in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
