"""What a sandbox by bubblewrap has: of the host, of its own, its users and its limits.

And what of the kernel it needs.
"""

import os
import resource
import secrets
import shutil
from pathlib import Path

from thundersync_jax.errors import ConfigError
from thundersync_jax.sandbox import cgroups
from thundersync_jax.sandbox.base import MEBIBYTE, Limits, Spec

AGENT = 1000  # uid and gid inside
HOME = "/home/agent"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# Of the host: two users for each sandbox that root makes, far from those of others.
_FIRST_USER, _USERS = 1_000_000_000, 200_000_000

_MOST_OPEN_FILES = 4096

OLDEST_LINUX = [5, 9]  # setns of a process, openat2, close_range
_HOST_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
# Of a root file system: what every sandbox has of its own.
_OWN = {"dev", "proc", "sys", "tmp", "home", "root", "run", "mnt", "media", "boot"}
FILES = {
    "/etc/passwd": (
        "root:x:0:0:root:/root:/bin/bash\n"
        f"agent:x:{AGENT}:{AGENT}:agent:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "/etc/group": f"root:x:0:\nagent:x:{AGENT}:\nnogroup:x:65534:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
_HOST_FILES = ("/etc/ld.so.cache", "/etc/alternatives")
_NETWORK_FILES = ("/etc/resolv.conf", "/etc/ssl", "/etc/ca-certificates")

_SETTINGS = {
    "/proc/sys/kernel/unprivileged_userns_clone": "0",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
    "/proc/sys/user/max_user_namespaces": "0",
}


def words_of(spec: Spec, folders: list[str], mapped: bool) -> list[str]:
    """What bubblewrap is told: all but its scratch and, if they are mapped, users."""
    words = ["--unshare-user", "--unshare-all", "--as-pid-1", "--new-session"]
    words += ["--clearenv", "--setenv", "PATH", PATH, "--hostname", "sandbox"]
    words += ["--share-net"] if spec.network else []
    words += [] if mapped else ["--uid", str(AGENT), "--gid", str(AGENT)]
    # One capability, of no use in a namespace, that the agent lacks: without it the
    # holder could be traced by whoever has its user.
    words += ["--cap-drop", "ALL", "--cap-add", "CAP_WAKE_ALARM"]
    words += ["--proc", "/proc", "--dev", "/dev"]
    root = Path("/") if spec.root is None else Path(spec.root)
    if spec.root is None:
        names = _HOST_FOLDERS
        extra = _HOST_FILES + (_NETWORK_FILES if spec.network else ())
        words += [word for at in extra for word in ("--ro-bind-try", at, at)]
    else:
        names = sorted({path.name for path in root.iterdir()} - _OWN)
    for name in names:
        path = root / name
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), f"/{name}"]
        elif path.exists():
            words += ["--ro-bind", str(path), f"/{name}"]
    for folder in folders:
        if spec.root is None or not (root / folder[1:]).is_dir():
            words += ["--dir", folder]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/", "--"]
    # Where it ignores them, ended processes that nobody waits for do not stay.
    return [*words, "bash", "-c", "trap '' CHLD; exec cat"]


def rlimits(limits: Limits, groups: list[Path]) -> list[tuple[int, int]]:
    most = [
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_FSIZE, limits.file_mb * MEBIBYTE),
        (resource.RLIMIT_CPU, limits.cpu_secs),
        (resource.RLIMIT_NOFILE, _MOST_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ]
    if not cgroups.covers(groups, "memory"):
        most.append((resource.RLIMIT_AS, limits.memory_mb * MEBIBYTE))
    return most


def program() -> str:
    """Where bubblewrap is. Raises ConfigError."""
    if (bwrap := shutil.which("bwrap")) is None:
        raise ConfigError(
            "sandboxes by bubblewrap need the program bwrap; install the package "
            "bubblewrap. Commands never run without a sandbox."
        )
    return bwrap


def users() -> tuple[int, str] | None:
    """The first of two host users for a sandbox, and their map; None if not by root."""
    if os.geteuid() != 0:
        return None
    for line in text_of("/proc/self/uid_map").splitlines():
        first, _, count = map(int, line.split())
        if first <= _FIRST_USER and first + count >= _FIRST_USER + _USERS:
            user = _FIRST_USER + 2 * secrets.randbelow(_USERS // 2)
            return user, f"0 {user} 1\n{AGENT} {user + 1} 1\n"
    return None


def start_time(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty where there is none."""
    return " ".join(text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()[19:20])


def text_of(path: str | Path) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def forbidden() -> str:
    """Which settings of the kernel stand in the way."""
    bad = [
        path.removeprefix("/proc/sys/").replace("/", ".") + f" is {value}"
        for path, value in _SETTINGS.items()
        if text_of(path).strip() == value
    ]
    names = ", ".join(
        path.removeprefix("/proc/sys/").replace("/", ".") for path in _SETTINGS
    )
    return (
        f"The kernel forbids user namespaces: {', '.join(bad)}."
        if bad
        else f"Where user namespaces are forbidden, the settings are {names}."
    )
