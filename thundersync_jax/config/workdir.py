"""The work directory: whose run it holds, and files that are whole or not there."""

import contextlib
import datetime
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

from thundersync_jax.config import Config
from thundersync_jax.config.settings import (
    Automatic,
    Change,
    config_dict,
    differences,
    replace,
    settings,
)
from thundersync_jax.errors import ConfigError

_CONFIG_FILE = "config.json"
RESULT_FILE = "result.json"  # there once the run has ended
VOCABULARY_FILE = "vocabulary.json"  # ids by token, of what its policy speaks
_DAY_FILE = "day.json"  # when its run began
_TASKS_FILE = "tasks.json"  # what its tasks are, as a hash
_LOCK_FILE = ".lock"


@contextlib.contextmanager
def locked(workdir: str | os.PathLike) -> Iterator[None]:
    """Keeps other processes out of a work directory, which is made where it is missing.

    ConfigError where another process is using it or it cannot be a directory. The
    operating system drops the lock with the process, so a killed one leaves none. Where
    the file system or the platform has no locks, nothing is locked.
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
) -> list[Change]:
    """Makes a work directory the config's own; returns settings that a resume changes.

    config.json is written on first use, and the vocabulary beside it. A later run may
    raise `steps`, since the steps before it stay the same, and change what is declared
    `changeable`; every other setting must be the saved one. ConfigError where it is
    not, or the directory cannot be one or be written to.
    """
    changes = check_claim(workdir, config)
    if changes or not (Path(workdir) / _CONFIG_FILE).exists():
        _write(workdir, VOCABULARY_FILE, dict(vocabulary))
        _write(workdir, _CONFIG_FILE, config_dict(config))
    return changes


def check_claim(workdir: str | os.PathLike, config: Config) -> list[Change]:
    """Raises what `claim` would; returns the settings that it would change."""
    path = _made(workdir) / _CONFIG_FILE
    if not path.exists():
        _check_unused(path)
        return []
    saved = saved_settings(workdir)
    current = config_dict(resumed(workdir, config))
    changes = differences(saved, current)
    may_change = {setting.name for setting in settings(config) if setting.changeable}
    if config.steps < saved["steps"]:
        may_change.remove("steps")
    refused = [change for change in changes if change.name not in may_change]
    if refused:
        raise ConfigError(
            f"{workdir} holds a run with other settings "
            f"({'; '.join(map(str, refused))}), expected the same ones. Use another "
            "--workdir or the saved settings."
        )
    return changes


def check_tasks(
    workdir: str | os.PathLike, tasks: Mapping[str, Any], accepted: str | None
) -> list[str]:
    """Refuses other tasks than those that a work directory was claimed for.

    `tasks` describes them ("sha256", "prompts_sha256", numbers "train" and "heldout").
    `accepted` is the beginning of the sha256 of those that may be others, or "any";
    returns a line on it where they are. A directory without a hash takes all.
    """
    path = Path(workdir) / _TASKS_FILE
    if not path.exists():
        return []
    way_out = "Delete it and the run goes on with the tasks of now."
    needs = ("sha256", "prompts_sha256", "train", "heldout")
    saved = _read(path, "fingerprint of tasks", way_out, needs, number="train")
    if saved["sha256"] == tasks["sha256"]:
        return []
    before, now = saved["sha256"][:12], tasks["sha256"][:12]
    if accepted == "any" or (accepted and tasks["sha256"].startswith(accepted)):
        return [f"tasks: {before} -> {now}"]
    counted = "{train} for training and {heldout} held out".format
    alike = saved["prompts_sha256"] == tasks["prompts_sha256"]
    remark = ", their prompts are the same" * alike
    raise ConfigError(
        f"{workdir} holds a run with other tasks: it had {counted(**saved)} (sha256 "
        f"{before}) and env.factory gives {counted(**tasks)} ({now}){remark}; expected "
        "the same ones in the same order. Use another --workdir, or set "
        f"env.accept_tasks={now} to go on with these."
    )


def claim_tasks(workdir: str | os.PathLike, tasks: Mapping[str, Any]) -> None:
    """Notes what `check_tasks` compares with."""
    _write(workdir, _TASKS_FILE, dict(tasks))


def first_day(workdir: str | os.PathLike) -> datetime.datetime:
    """When a work directory's run began, which prompts may show; now for a new one."""
    path = Path(workdir) / _DAY_FILE
    if not path.exists():
        return datetime.datetime.now()
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return datetime.datetime.fromisoformat(saved["first_start"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} has no date, expected one that this program wrote. Delete it and "
            "prompts show today."
        ) from error


def claim_day(workdir: str | os.PathLike, day: datetime.datetime) -> None:
    """Notes what `first_day` reads, once."""
    if not (Path(workdir) / _DAY_FILE).exists():
        _write(workdir, _DAY_FILE, {"first_start": day.isoformat(timespec="seconds")})


def saved_settings(workdir: str | os.PathLike) -> dict[str, Any]:
    """A work directory's settings, under today's names; ConfigError without a run."""
    path = Path(workdir) / _CONFIG_FILE
    if not path.exists():
        raise ConfigError(
            f"{workdir} holds no run, expected the work directory of one. Train first "
            "with that --workdir."
        )
    saved = _read(path, "config", "Name the work directory of a run.")
    return _as_today(saved, config_dict(Config()))


def resumed(workdir: str | os.PathLike, config: Config) -> Config:
    """The config, with what follows from other settings as the saved run had it.

    How such values follow may change between versions; the bits of a run may not.
    """
    path = Path(workdir) / _CONFIG_FILE
    if not path.exists():
        return config
    saved = _read(path, "config", "Use another --workdir.")
    values = {}
    for setting in settings(config):
        if isinstance(setting.value, Automatic):
            group, _, name = setting.name.rpartition(".")
            value = saved.get(group, {}).get(name)
            values[setting.name] = tuple(value or ())
    try:
        return replace(config, values)
    except ConfigError:  # saved for another context, which is refused by its own name
        return config


def save_result(workdir: str | os.PathLike, result: Mapping[str, Any]) -> None:
    """Marks a run as finished; `result` holds its "steps"."""
    replace_json(Path(workdir) / RESULT_FILE, dict(result))


def saved_result(workdir: str | os.PathLike, steps: int) -> dict[str, Any] | None:
    """What a run of so many steps ended with; None where it has not ended."""
    path = Path(workdir) / RESULT_FILE
    if not path.exists():
        return None
    way_out = f"Delete it and {path.parent} continues from its newest checkpoint."
    result = _read(path, "result", way_out, needs=("steps", "sha256"))
    return result if result["steps"] == steps else None


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is whole."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except Exception:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


def replace_text(path: Path, text: str) -> None:
    """Writes a whole text file in UTF-8, as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode())


def replace_json(path: Path, value: Any) -> None:
    """Writes a value as an indented JSON file, as `replacing` does."""
    replace_text(path, json.dumps(value, indent=2) + "\n")


def _as_today(saved: Any, defaults: Mapping[str, Any]) -> Any:
    """Saved settings under today's names; `env.options`, the user's own, as saved."""
    if not isinstance(saved, Mapping):
        return saved
    return {
        name: _as_today(saved.get(name, {}), default)
        if isinstance(default, Mapping)
        else saved.get(name, default)
        for name, default in defaults.items()
    }


def _check_unused(config_file: Path) -> None:
    """Refuses checkpoints whose settings nobody knows any more."""
    for name in ("warm_start", "checkpoints"):
        folder = config_file.parent / name
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} holds checkpoints and {config_file} is missing, expected "
                "the settings that they were made with. Restore that file or use "
                "another --workdir."
            )


def _made(workdir: str | os.PathLike) -> Path:
    try:
        Path(workdir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(workdir, error) from error
    return Path(workdir)


def _write(workdir: str | os.PathLike, name: str, content: Any) -> None:
    try:
        replace_json(Path(workdir) / name, content)
    except OSError as error:
        raise _unusable(workdir, error) from error


def _unusable(workdir: str | os.PathLike, error: OSError) -> ConfigError:
    return ConfigError(
        f"--workdir is {workdir}, expected a directory to write to, but "
        f"{error.filename or workdir}: {error.strerror}. Use another --workdir."
    )


def _read(
    path: Path,
    kind: str,
    way_out: str,
    needs: Sequence[str] = ("steps",),
    number: str = "steps",
) -> dict:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(saved[number], int) and all(name in saved for name in needs):
            return saved
    except (ValueError, TypeError, KeyError):
        pass
    raise ConfigError(
        f"{path} is no saved {kind}, expected one that this program wrote. {way_out}"
    )
