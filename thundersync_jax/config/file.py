"""Config files, and settings typed on top of them."""

import dataclasses
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from thundersync_jax.config.model import is_shape
from thundersync_jax.config.run import Config
from thundersync_jax.config.settings import nearest, parse, replace, settings, to_text
from thundersync_jax.errors import ConfigError

PREFIX = "--config."

# Settings of other systems, by a part of their names, and why there are none.
_ABSENT = (
    (
        ("clip_r", "cliprange", "clip_eps", "epsilon_high", "epsilon_low"),
        "at the only update of a step every ratio is 1, where clipping never acts",
    ),
    (
        ("epoch", "updates_per", "num_iterations", "mini_batch"),
        "there is one update per step, of gradients of the policy that sampled it",
    ),
    (
        ("critic", "value_head", "gae"),
        "a baseline is one number per trajectory, which its gradient need not wait for",
    ),
    (
        ("top_p", "rollout.top_k", "min_p"),
        "a policy that samples from a part of its distribution is another policy than "
        "the one that learns",
    ),
    (
        ("token_reward", "process_reward"),
        "a reward belongs to a trajectory; what turns earn is loss.turn_credit",
    ),
)


def why_absent(name: str) -> str:
    """Why streaming has no setting of such a name; empty where that is no reason."""
    reasons = [r for parts, r in _ABSENT if any(part in name for part in parts)]
    return f"expected none: {reasons[0]}." if reasons else ""


def load_config(spec: str) -> Config:
    """Reads `FILE.py` or `FILE.py:variant`, whose folder ends the import path then."""
    path, variant = os.path.expanduser(spec), None
    if ".py:" in path:
        path, _, variant = path.rpartition(":")
    if not Path(path).is_file():
        if Path(path).is_dir():
            raise ConfigError(
                f"--config is {spec!r}, which is a folder, expected a Python file in "
                "it. Write --config=FILE.py."
            )
        neighbours = [str(known) for known in Path(path).parent.glob("*.py")]
        hint = nearest(path, neighbours) if neighbours else "Write --config=FILE.py."
        raise ConfigError(f"--config is {spec!r}, expected a Python file. {hint}")
    if Path(path).suffix != ".py":
        raise ConfigError(
            f"--config is {spec!r}, expected a Python file with get_config. Write "
            "--config=FILE.py or --config=FILE.py:variant."
        )
    try:
        config = _call_get_config(_import_file(Path(path)), path, variant)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a config file does wrong is one line
        raise ConfigError(_explain(error, path)) from error
    if not isinstance(config, Config):
        raise ConfigError(
            f"get_config of {path} returned {type(config).__name__}, expected Config. "
            "Return thundersync_jax.config.Config(...)."
        )
    return config


def override(config: Config, texts: Mapping[str, str]) -> Config:
    """The configuration with settings typed on the command line, by dotted name."""
    known = {setting.name: setting for setting in settings(config)}
    values = {}
    for name, text in texts.items():
        fields = [other for other in known if other.startswith(f"{name}.")]
        if fields:
            raise ConfigError(
                f"{PREFIX}{name} names a group, expected one of its settings. "
                f"Write {PREFIX}{fields[0]}={to_text(known[fields[0]].value)}."
            )
        if name not in known:
            if reason := why_absent(name):
                raise ConfigError(f"{PREFIX}{name} is no setting, {reason}")
            raise ConfigError(f"{PREFIX}{name} is no setting. {nearest(name, known)}")
        values[name] = parse(text, known[name])
    path = values.get("model.path", config.model.path)
    for name in filter(is_shape, values if path is not None else ()):
        raise ConfigError(
            f"{PREFIX}{name} was given with model.path {path}, expected one of them: "
            "the folder's config.json decides the shape. "
            f"Leave out {PREFIX}{name}, or set model.path to none."
        )
    try:
        return replace(config, values)
    except ValueError as error:  # also from the class of somebody's env.options
        raise ConfigError(str(error)) from error


def _import_file(path: Path) -> ModuleType:
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    # Under its own name where that means this file: `env.factory` may import it too.
    module_spec = importlib.util.find_spec(path.stem)
    same = module_spec is not None and module_spec.origin == str(path.resolve())
    name = path.stem if same else f"config_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _call_get_config(module: ModuleType, path: str, variant: str | None) -> Any:
    if not callable(getattr(module, "get_config", None)):
        raise ConfigError(
            f"{path} has no get_config, expected get_config(variant=None) -> Config. "
            "Define it."
        )
    takes = bool(inspect.signature(module.get_config).parameters)
    config = module.get_config(variant) if takes else module.get_config()
    if variant is None or (takes and not _ignores_variant(config, module.get_config)):
        return config
    does = "returns the same for it as for none" if takes else "takes none"
    raise ConfigError(
        f"--config names variant {variant!r}, but get_config of {path} {does}, "
        f"expected {'a' if takes else 'no'} variant. Write --config={path}."
    )


def _ignores_variant(config: Any, get_config: Callable[[str | None], Any]) -> bool:
    """Whether this is what the file returns for none, and for any name whatever."""
    try:
        others = (get_config(None), get_config("a name that nobody gave"))
    except Exception:  # it insists on a variant, or knows which there are
        return False
    return isinstance(config, Config) and all(config == other for other in others)


def _explain(error: BaseException, path: str) -> str:
    """One line about an exception in a config file, with the line it came from."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if f.filename == str(Path(path).resolve())]
    where = f"{path}:{lines[-1]}: " if lines else ""
    typo = re.search(r"(\w+)\.__init__\(\) got an unexpected.*'(\w+)'", str(error))
    if typo:
        group, name = typo.groups()
        known = _field_names().get(group)
        hint = nearest(name, known) if known else f"See the fields of {group}."
        return f"{where}{group} has no setting {name!r}. {hint}"
    if isinstance(error, KeyError):  # its text is the key alone
        return f"{where}there is no {error} (KeyError). See get_config in that file."
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{where}{kind}{error}"


def _field_names() -> dict[str, list[str]]:
    """Field names of every group of settings, by the name of its class."""
    groups, names = [Config()], {}
    for group in groups:
        names[type(group).__name__] = list(vars(group))
        groups += filter(dataclasses.is_dataclass, vars(group).values())
    return names
