"""Kills the training command at random moments and shows that nothing is lost.

    python tests/kill_and_resume.py --kills=20 --seed=0
    python tests/kill_and_resume.py --kills=10 --release=trajectory

A run that was killed (SIGKILL) and started again, however often and in whatever phase,
ends with the parameters and optimizer state of an uninterrupted one, bit for bit, and
with its metrics and trajectories. Under batch release float32 sums do, for nothing is
added up before the last verdict; under the other rules the order of arrival is never
the same twice, and sums are exact.

Compiled programs are cached between the processes, since compiling takes most of a life
and is no moment of interest; the first run and one resumed run compile their own.
"""

import argparse
import collections
import dataclasses
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import echo_task

from thundersync_jax.config.workdir import RESULT_FILE
from thundersync_jax.stream.schedule import RELEASES

ROOT = Path(__file__).resolve().parents[1]
CONFIG = Path(__file__).with_name("echo_task.py")
UNFINISHED = ".orbax-checkpoint-tmp"  # ends the name of a save that has not ended
SETTINGS = echo_task.get_config()
STEPS, EVALUATED_EVERY = SETTINGS.steps, SETTINGS.evaluation.every_steps
LOOK_SECS = 0.004
LIMIT_SECS = 300.0  # of one process
# A line that says that something was done since the process started.
PROGRESS = re.compile(
    r"^(warm start  step|after the warm start| +\d+/\d+ )", re.MULTILINE
)
SAID = re.compile(r"^.*resumed after step \d+$|^finished already", re.MULTILINE)
MEASURED = "_secs$|^learner_busy_share$|^contention$|^compiles$"  # differ between lives
# Likewise where gradients start as verdicts come: which of them, before which others.
ARRIVED = "^(direct|streamed|streamed_share|waited|waited_for_bucket|skipped|mismatch_)"


class Mismatch(Exception):
    """A run that was killed and resumed is not the uninterrupted one."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """When to kill: a time after the start or first progress, or in the n-th save."""

    kind: str  # "start", "time" or "save"
    secs: float = 0.0
    save: int = 0


@dataclasses.dataclass(frozen=True)
class Life:
    """One process."""

    killed: bool
    status: int
    output: str
    errors: str
    started_secs: float  # until the first progress
    trained_secs: float  # until the last step
    secs: float

    @property
    def result(self) -> dict:
        return json.loads(self.output.splitlines()[-1])


class Runs:
    """Starts the training command in work directories of one temporary folder."""

    def __init__(self, folder: Path, release: str = "batch"):
        self.folder = folder
        self.cache = folder / "programs"
        self.settings, self.differing = (), MEASURED
        if release != "batch":
            self.settings = (
                f"--config.release={release}",
                "--config.accumulator=exact",
            )
            self.differing += f"|{ARRIVED}"

    def live(
        self, workdir: Path, moment: Moment | None = None, cached=True, flags=()
    ) -> Life:
        """Runs the command to its end, or kills it."""
        command = [sys.executable, "-m", "thundersync_jax.train", "--json"]
        command += [f"--config={CONFIG}", f"--workdir={workdir}"]
        command += [*self.settings, *flags]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        environment["JAX_ENABLE_COMPILATION_CACHE"] = str(cached).lower()
        if cached:
            environment["JAX_COMPILATION_CACHE_DIR"] = str(self.cache)
        output, errors = self.folder / "output", self.folder / "errors"
        with open(output, "w") as out, open(errors, "w") as err:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
            try:
                times = _watch(process, workdir, output, moment)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if _group_exists(process.pid):
            raise Mismatch("the command left processes behind")
        texts = output.read_text(), errors.read_text()
        killed = process.returncode == -signal.SIGKILL
        return Life(killed, process.returncode, *texts, *times)


def _watch(process, workdir, output, moment):
    """Waits for the end or the moment; returns the times of a `Life`."""
    start, now = time.monotonic(), 0.0
    started, trained, read, saves = None, None, 0, set()
    last = workdir / "checkpoints" / str(STEPS)
    while process.poll() is None:
        time.sleep(LOOK_SECS)
        now = time.monotonic() - start
        if now > LIMIT_SECS:
            raise Mismatch(f"the command did not end within {LIMIT_SECS:g} s")
        if started is None and output.stat().st_size > read:
            read = output.stat().st_size
            started = now if PROGRESS.search(output.read_text()) else None
        if trained is None and last.exists():
            trained = now
        if moment is None:
            continue
        saves |= set(_unfinished(workdir))
        due = {
            "start": now >= moment.secs,
            "time": started is not None and now - started >= moment.secs,
            "save": len(saves) >= moment.save > 0,
        }
        if due[moment.kind]:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return started or now, trained or now, now


def _saves(workdir: Path) -> list[Path]:
    folders = [workdir / "warm_start", workdir / "checkpoints"]
    return [path for f in folders if f.is_dir() for path in f.iterdir()]


def _unfinished(workdir: Path) -> list[str]:
    """The saves that are being written, or were when the process died."""
    return [
        f"{path.parent.name}/{path.name.partition(UNFINISHED)[0]}"
        for path in _saves(workdir)
        if UNFINISHED in path.name
    ]


def _newest(workdir: Path) -> str:
    """The newest whole checkpoint, as the command must say that it resumes."""
    if (workdir / RESULT_FILE).exists():  # killed on its way out
        return "finished already"
    steps = {
        folder: [
            int(path.name)
            for path in _saves(workdir)
            if path.parent.name == folder and path.name.isdigit()
        ]
        for folder in ("warm_start", "checkpoints")
    }
    if steps["checkpoints"]:
        return f"resumed after step {max(steps['checkpoints'])}"
    if steps["warm_start"]:
        return f"warm start resumed after step {max(steps['warm_start'])}"
    return ""


def _phase(life: Life, workdir: Path) -> str:
    """What a killed process was busy with, from what it left."""
    if _unfinished(workdir):
        return "saving"
    if (workdir / "checkpoints" / str(STEPS)).exists():
        return "closing"
    if not PROGRESS.search(life.output):
        return "start-up"
    rows = re.findall(r"^ +(\d+)/\d+ |^(after|held)", life.output, re.MULTILINE)
    if not rows:
        return "warm start"
    step, evaluated = rows[-1]
    due = not evaluated and int(step) % EVALUATED_EVERY == 0
    return "evaluation" if due else "step"


def _check_resumed(life: Life, expected: str) -> None:
    """The newest whole checkpoint was taken, no cut-off one."""
    if expected == f"warm start resumed after step {SETTINGS.warm_start.steps}":
        expected = ""  # the warm start is done, nothing is resumed in it
    said = SAID.findall(life.output)
    if said != ([expected] if expected else []) and not (life.killed and not said):
        raise Mismatch(f"expected {expected!r}, the command said {said}")


def _facts(workdir: Path, differing: str) -> dict:
    """Everything a finished run left that does not depend on the clock.

    Metrics whose names match `differing` do.
    """
    metrics = [
        {n: x for n, x in json.loads(line).items() if not re.search(differing, n)}
        for line in (workdir / "metrics.jsonl").read_text().splitlines()
    ]
    rollouts = [
        {name: x for name, x in json.loads(line).items() if name != "times"}
        for path in sorted((workdir / "rollouts").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return {"metrics": metrics, "rollouts": rollouts}


def _check_finished(
    runs: Runs, life: Life, workdir: Path, sha256: str, facts: dict
) -> None:
    if life.status != 0:
        raise Mismatch(f"exit status {life.status}: {life.errors[-2000:]}")
    if life.result["sha256"] != sha256:
        raise Mismatch(f"sha256 {life.result['sha256']}, expected {sha256}")
    found_facts = _facts(workdir, runs.differing)
    steps = [row["step"] for row in found_facts["metrics"]]
    if steps != list(range(life.result["steps"] + 1)):
        raise Mismatch(f"metrics.jsonl has steps {steps}")
    for kind, expected in facts.items():
        for found, line in zip(found_facts[kind], expected, strict=True):
            names = [name for name in line if found.get(name) != line[name]]
            if names:
                raise Mismatch(
                    f"{kind} differ in {names}: {[found.get(n) for n in names]}, "
                    f"uninterrupted {[line[n] for n in names]}"
                )


def _choose(rng: random.Random, whole: Life) -> Moment:
    """Mostly moments of training, spread evenly, and many inside a save."""
    kinds = {"start": 1, "training": 11, "closing": 1, "save": 7}
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    training_secs = whole.trained_secs - whole.started_secs
    if kind == "start":
        return Moment("start", rng.uniform(0, whole.started_secs))
    if kind == "training":
        return Moment("time", rng.uniform(0, training_secs))
    if kind == "closing":
        return Moment("time", rng.uniform(training_secs, whole.secs))
    return Moment("save", save=rng.randint(1, 6))


def _check_refused(runs: Runs, workdir: Path) -> str:
    life = runs.live(workdir, flags=("--config.optim.learning_rate=0.5",))
    line = life.errors.strip()
    if life.status != 2 or "\n" in line or "learning_rate" not in line:
        raise Mismatch(f"another config: status {life.status}, {line[-2000:]}")
    return line


def _uninterrupted(runs: Runs) -> tuple[Life, dict]:
    """Two whole runs, the second with cached programs: their times are the measure."""
    lives, facts = [], {}
    for name in ("compiling", "cached"):
        workdir = runs.folder / name
        life = runs.live(workdir)
        if life.status != 0:
            raise Mismatch(f"exit status {life.status}: {life.errors[-2000:]}")
        lives.append(life)
        facts = facts or _facts(workdir, runs.differing)
        _check_finished(runs, life, workdir, lives[0].result["sha256"], facts)
        print(
            f"uninterrupted, {name:<9} {life.secs:6.1f} s  sha256 "
            f"{life.result['sha256']}",
            flush=True,
        )
    return lives[-1], facts


def kill_and_resume(kills: int, seed: int, release: str, folder: Path) -> None:
    """Prints what happened; raises Mismatch where a run ends otherwise."""
    runs, rng = Runs(folder, release), random.Random(seed)
    whole, facts = _uninterrupted(runs)
    sha256 = whole.result["sha256"]
    phases, cut, killed, run, compiled = collections.Counter(), 0, 0, 0, False
    print("kill  run  moment       secs  saves cut off           then")
    while killed < kills:
        run += 1
        workdir, expected = folder / f"run_{run}", ""
        while True:
            moment = None
            if killed < kills:
                moment = _choose(rng, whole)
            anew = killed > 0 and not compiled and moment is None
            compiled |= anew
            life = runs.live(workdir, moment, cached=not anew)
            _check_resumed(life, expected)
            if not life.killed:
                break
            killed += 1
            unfinished, phase = _unfinished(workdir), _phase(life, workdir)
            expected = _newest(workdir)
            phases[phase] += 1
            cut += bool(unfinished)
            print(
                f"{killed:4d}  {run:3d}  {phase:<10}  {life.secs:5.1f}  "
                f"{', '.join(unfinished):<22}  {expected or 'from the start'}",
                flush=True,
            )
        _check_finished(runs, life, workdir, sha256, facts)
        how = "same sha256, all compiled anew" if anew else "same sha256"
        print(f"      {run:3d}  finished    {life.secs:5.1f}  {how}", flush=True)
    again = runs.live(workdir)
    if again.result != life.result:
        raise Mismatch(f"a finished run, run again, said {again.result}")
    print(f"finished run, run again: {again.secs:.1f} s, same result")
    print(f"another config: {_check_refused(runs, workdir)}")
    counts = ", ".join(f"{phase} {n}" for phase, n in sorted(phases.items()))
    print(f"kills {killed} ({counts}); saves cut off {cut}, none resumed from")
    print(f"resumes {killed}, runs {run}, each step once, sha256 {sha256}")


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--release", default="batch", choices=RELEASES)
    arguments = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            kill_and_resume(
                arguments.kills, arguments.seed, arguments.release, Path(folder)
            )
        except Mismatch as mismatch:
            print(f"FAILED: {mismatch}", file=sys.stderr)
            return 1
    print(f"passed in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
