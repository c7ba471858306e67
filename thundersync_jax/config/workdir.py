"""The work directory: whose run it holds, and files that are whole or not there."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from thundersync_jax.config import Config
from thundersync_jax.config.settings import check_same_config, config_dict
from thundersync_jax.errors import ConfigError

RESULT_FILE = "result.json"  # there once the run has ended
VOCABULARY_FILE = "vocabulary.json"  # ids by token, of what its policy speaks
_LOCK_FILE = ".lock"


@contextlib.contextmanager
def locked(workdir: str | os.PathLike) -> Iterator[None]:
    """Keeps other processes out of a work directory, which is made where it is missing.

    The operating system drops the lock with the process, so a killed one leaves none.
    Where the file system or the platform has no locks, nothing is locked.

    Raises:
      ConfigError: Another process is using it, or it cannot be a directory.
    """
    path = _made(workdir) / _LOCK_FILE
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            try:
                file = stack.enter_context(open(path, "a"))
            except OSError as error:
                raise _unusable(workdir, error) from error
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{workdir}: another process is using it; wait or use another "
                    "--workdir."
                ) from error
            except OSError:  # a network file system without locks
                pass
        yield


def claim(
    workdir: str | os.PathLike, config: Config, vocabulary: Mapping[str, int]
) -> None:
    """Makes a work directory the config's own: config.json is written on first use,
    and the vocabulary beside it.

    A later run may raise `steps`, since the steps before it stay the same, and have its
    servers elsewhere; every other setting must be the saved one.

    Raises:
      ConfigError: The directory belongs to a run with other settings, or it cannot be
        a directory or be written to.
    """
    if not check_claim(workdir, config):
        return
    folder = Path(workdir)
    files = {VOCABULARY_FILE: dict(vocabulary), "config.json": config_dict(config)}
    try:
        for name, content in files.items():
            replace_text(folder / name, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise _unusable(workdir, error) from error


def check_claim(workdir: str | os.PathLike, config: Config) -> bool:
    """Raises what `claim` would; returns whether it has something to write."""
    path = _made(workdir) / "config.json"
    if not path.exists():
        return True
    saved = _read(path, "config", "Use another --workdir.")
    more_steps = saved["steps"] < config.steps
    compared = saved | {"steps": config.steps} if more_steps else saved
    given = _elsewhere(compared), _elsewhere(config_dict(config))
    check_same_config(*given, str(workdir))
    return more_steps


def save_result(workdir: str | os.PathLike, result: Mapping[str, Any]) -> None:
    """Marks a run as finished; `result` holds its "steps"."""
    replace_text(Path(workdir) / RESULT_FILE, json.dumps(result, indent=2) + "\n")


def saved_result(workdir: str | os.PathLike, steps: int) -> dict[str, Any] | None:
    """What a run of so many steps ended with, None where it has not ended.

    Raises:
      ConfigError: The file is there and no result.
    """
    path = Path(workdir) / RESULT_FILE
    if not path.exists():
        return None
    way_out = f"Delete it and {path.parent} continues from its newest checkpoint."
    result = _read(path, "result", way_out)
    return result if result["steps"] == steps else None


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole: whoever is killed on the way leaves the old one."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _elsewhere(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that say where the samplers are and how long to wait.

    Weights reach samplers from here. A teacher's are its own, and must stay the same.
    """
    free = {"servers", "weights_dir", "attempts"}
    free |= {"request_timeout_secs", "publish_timeout_secs"}
    given = settings.get("vllm", {})
    kept = {name: value for name, value in given.items() if name not in free}
    return {**settings, "vllm": kept}


def _made(workdir: str | os.PathLike) -> Path:
    try:
        Path(workdir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(workdir, error) from error
    return Path(workdir)


def _unusable(workdir: str | os.PathLike, error: OSError) -> ConfigError:
    return ConfigError(
        f"--workdir is {workdir}, expected a directory to write to, but "
        f"{error.filename or workdir}: {error.strerror}. Use another --workdir."
    )


def _read(path: Path, kind: str, way_out: str) -> dict:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(saved["steps"], int):
            return saved
    except (ValueError, TypeError, KeyError):
        pass
    raise ConfigError(
        f"{path} is no saved {kind}, expected one that this program wrote. {way_out}"
    )
