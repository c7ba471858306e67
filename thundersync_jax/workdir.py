"""The work directory: whose run it holds, and files that are whole or not there."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thundersync_jax.config import Config
from thundersync_jax.errors import ConfigError
from thundersync_jax.settings import check_same_config, config_dict

RESULT_FILE = "result.json"  # there once the run has ended


def claim(workdir: str | os.PathLike, config: Config) -> None:
    """Makes a work directory the config's own: config.json is written on first use.

    A later run may raise `steps`, since the steps before it stay the same; every other
    setting must be the saved one.

    Raises:
      ConfigError: The directory belongs to a run with other settings.
    """
    path = Path(workdir) / "config.json"
    if path.exists():
        saved = _read(path)
        more_steps = saved["steps"] < config.steps
        compared = saved | {"steps": config.steps} if more_steps else saved
        check_same_config(compared, config, str(workdir))
        if not more_steps:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(config_dict(config), indent=2) + "\n")


def save_result(workdir: str | os.PathLike, result: Mapping[str, Any]) -> None:
    """Marks a run as finished; `result` holds its "steps"."""
    replace_text(Path(workdir) / RESULT_FILE, json.dumps(result, indent=2) + "\n")


def saved_result(workdir: str | os.PathLike, steps: int) -> dict[str, Any] | None:
    """What a run of so many steps ended with, None where it has not ended."""
    path = Path(workdir) / RESULT_FILE
    if not path.exists():
        return None
    result = json.loads(path.read_text(encoding="utf-8"))
    return result if result["steps"] == steps else None


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole: whoever is killed on the way leaves the old one."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _read(path: Path) -> dict:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(saved["steps"], int):
            return saved
    except (ValueError, TypeError, KeyError):
        pass
    raise ConfigError(
        f"{path} is no saved config, expected one that this program wrote. Use another "
        "--workdir."
    )
