"""Limits of a whole sandbox, by control groups of version 1 or 2, where we may."""

import contextlib
import os
from pathlib import Path

from thundersync_jax.sandbox.base import MEBIBYTE, Limits

_ROOT = Path("/sys/fs/cgroup")
_CPU_PERIOD_USECS = 100_000
_FILES = {  # of each version
    "memory": ("memory.max", "memory.limit_in_bytes"),
    "pids": ("pids.max",),
    "cpu": ("cpu.max", "cpu.cfs_quota_us"),
}


def create(name: str, limits: Limits) -> list[Path]:
    """Makes the groups of one sandbox.

    Returns their folders; none where this process may not make any. Those of one
    controller may be missing: a limit that is missing is kept by rlimits as far as they
    go.
    """
    # A sandbox's files lie in memory too, and are no reason to kill its processes.
    memory = (limits.memory_mb + limits.disk_mb) * MEBIBYTE
    quota = int(limits.cpus * _CPU_PERIOD_USECS)
    if (_ROOT / "cgroup.controllers").exists():
        settings = {
            "memory.max": memory,
            "memory.swap.max": 0,
            "memory.oom.group": 0,
            "pids.max": limits.processes,
            "cpu.max": f"{quota} {_CPU_PERIOD_USECS}",
        }
        kinds = {"": settings}
    else:
        kinds = {
            "memory": {"memory.limit_in_bytes": memory},
            "pids": {"pids.max": limits.processes},
            "cpu": {
                "cpu.cfs_period_us": _CPU_PERIOD_USECS,
                "cpu.cfs_quota_us": quota,
            },
        }
    made = []
    for kind, settings in kinds.items():
        for place in _places(kind):
            if (folder := _make(place / name, settings)) is not None:
                made.append(folder)
                break
    return made


def covers(folders: list[Path], controller: str) -> bool:
    """Whether one of the groups limits a controller: memory, pids or cpu."""
    return any((at / file).exists() for at in folders for file in _FILES[controller])


def members(folders: list[Path]) -> list[str]:
    """The files into which a process writes itself."""
    return [str(folder / "cgroup.procs") for folder in folders]


def remove(folders: list[Path]) -> list[Path]:
    """Removes groups; returns those that have processes left, which may be ending."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
    return [folder for folder in folders if folder.exists()]


def left(prefix: str) -> list[Path]:
    """All groups whose name starts so, wherever they are."""
    found = []
    for place, folders, _ in os.walk(_ROOT):
        found += [Path(place, name) for name in folders if name.startswith(prefix)]
    return found


def _places(kind: str) -> list[Path]:
    """Where a group may be made: beside this process's own, or above."""
    with open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if kind in controllers.split(","):
                own = _ROOT / kind / path.strip("/")
                return [
                    place
                    for place in (own, *own.parents)
                    if place.is_relative_to(_ROOT / kind) and place.is_dir()
                ]
    return []


def _make(folder: Path, settings: dict[str, int | str]) -> Path | None:
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        for file, value in settings.items():
            # A new file is no setting: it is not ours to make one.
            if (folder / file).exists():
                (folder / file).write_text(str(value))
            elif file.endswith(".max") and "swap" not in file:
                raise FileNotFoundError(file)
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    return folder
