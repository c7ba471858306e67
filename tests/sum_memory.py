"""How much memory the sums of open groups take, beside what a run says at start-up.

As a script it prints, for plain and for exact sums and per number of open groups, what
a run says and by how much a step raises resident memory, lastingly and at its peak
(Linux):

    python tests/sum_memory.py

The lasting part is the sums. At the peak one gradient and its intermediate values come
on top, the same whatever the number of groups.
"""

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import echo_task
import jax
import numpy as np

from thundersync_jax.config import Config
from thundersync_jax.config.settings import replace
from thundersync_jax.run.run import Run

OPEN_GROUPS = (1, 2, 4, 8)
ACCUMULATORS = ("plain", "exact")
MIB = 2**20
_LENGTH = 24  # tokens of a sample
_FREED_SECS = 0.01  # until the runtime's threads have let go of a call's gradient


class Growth(NamedTuple):
    """Bytes of one run with so many open groups."""

    open_groups: int
    said: float  # at start-up
    lasting: float  # that a step adds to resident memory
    peak: float  # likewise to its peak


def config(open_groups: int | None, width: int = 128, **changes) -> Config:
    """echo_task's under trajectory release, its sums much larger than its samples."""
    model = {"width": width, "mlp_width": 4 * width, "heads": 4, "kv_heads": 4}
    changes = {f"model.{name}": size for name, size in model.items()} | changes
    changes = {"release": "trajectory", "open_groups": open_groups} | changes
    return replace(echo_task.small(0, **{"mesh.rows_per_call": 1}), changes)


def said(lines: Sequence[str]) -> tuple[float, int]:
    """Bytes of gradient sums per device, and open groups, as printed at start-up."""
    mib, groups = _only(
        r"([\d,.]+) MiB of gradient sums per device: .* up to (\d+) ", lines
    )
    return float(mib.replace(",", "")) * MIB, int(groups)


def parameter_count(lines: Sequence[str]) -> int:
    """Likewise, how many parameters there are."""
    (count,) = _only(r"([\d,]+) parameters", lines)
    return int(count.replace(",", ""))


def drive(
    run: Run,
    params,
    groups: int = 12,
    members: int = 3,
    on_event: Callable[[], None] = lambda: None,
):
    """A step of made-up members: every group's last one comes when all others are in.

    So as many groups as may hold sums do, while there are that many. The last ones come
    in random order, groups without sums among them, and the first to end is one.

    Returns:
      The gradient and the report.
    """
    rng = np.random.default_rng(0)
    stream = run.new_stream(params, version=0)
    empty = run.samples.whole(run.samples.untrained(_LENGTH))
    for group in range(groups):
        stream.open_group(group, members)
    ending = [groups - 1, *rng.permutation(groups - 1)]  # sums go to the first ones
    for member in range(members):
        for group in ending if member == members - 1 else range(groups):
            sample = empty.tree | {
                "tokens": rng.integers(0, 256, _LENGTH, dtype=np.int32),
                "weights": np.full(_LENGTH, 1 / _LENGTH, np.float32),
            }
            stream.complete(group, member, sample, tokens=_LENGTH)
            stream.reward(group, member, float(member**2))  # no advantage is 0
            stream.drain()
            on_event()
    return stream.finish()


def settle(*_) -> None:
    """Waits for all that was dispatched: one call's gradient at a time lives."""
    jax.block_until_ready(jax.live_arrays())
    time.sleep(_FREED_SECS)


def growth(open_groups: int, folder: str, width: int, accumulator: str) -> Growth:
    """Measures one run, with everything compiled before."""
    lines: list[str] = []
    sizes = {"model.layers": 2, "accumulator": accumulator}
    settings = config(open_groups, width, **sizes)
    with Run(settings, folder, echo_task.make, lines.append) as run:
        params = run.initial_params()
        run.clock.on_call = settle
        drive(run, params, groups=2)
        settle()
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = _status_bytes("VmRSS")
        readings = []

        def read():
            settle()
            readings.append((_status_bytes("VmRSS"), _status_bytes("VmHWM")))

        groups = max(OPEN_GROUPS) + 1
        drive(run, params, groups, on_event=read)
    resident, peak = np.array(readings)[-groups:].T  # the last members come
    lasting = float(np.median(resident)) - before
    return Growth(open_groups, said(lines)[0], lasting, float(max(peak)) - before)


def measure(width: int = 384, accumulator: str = "plain") -> list[Growth]:
    """Rows of `Growth`, measured in a process of its own."""
    fixed = {
        "MALLOC_MMAP_THRESHOLD_": "65536",  # glibc: freed blocks go back to the system
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "PYTHONPATH": os.pathsep.join(sys.path),  # finds what this process finds
    }
    done = subprocess.run(
        [sys.executable, __file__, "--here", str(width), accumulator],
        env=os.environ | fixed,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [Growth(*row) for row in json.loads(done.stdout.splitlines()[-1])]


def slope(rows: Sequence[Growth], name: str) -> float:
    """Bytes grown per byte said, by least squares."""
    grown = [getattr(row, name) for row in rows]
    return float(np.polyfit([row.said for row in rows], grown, 1)[0])


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        width, accumulator = int(sys.argv[2]), sys.argv[3]
        with tempfile.TemporaryDirectory() as folder:
            # What the first run of all loads stays.
            numbers = (1, *OPEN_GROUPS)
            rows = [growth(n, folder, width, accumulator) for n in numbers]
            print(json.dumps(rows[1:]))
        return
    for accumulator in ACCUMULATORS:
        rows = measure(accumulator=accumulator)
        print("sums    open groups   said (MiB)   lasting (MiB)   peak (MiB)")
        for number, *sizes in rows:
            mib, lasting, peak = (size / MIB for size in sizes)
            print(
                f"{accumulator}   {number:11}   {mib:10,.1f}   {lasting:13,.1f}   "
                f"{peak:10,.1f}"
            )
        for name in ("lasting", "peak"):
            print(f"{name}: {slope(rows, name):.3f} bytes per byte said")


def _only(pattern: str, lines: Sequence[str]) -> tuple[str, ...]:
    """The groups of the one line that matches."""
    (found,) = [match for line in lines if (match := re.match(pattern, line))]
    return found.groups()


def _status_bytes(name: str) -> int:
    """A line of /proc/self/status."""
    (kib,) = _only(
        rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text().splitlines()
    )
    return 1024 * int(kib)


if __name__ == "__main__":
    main()
