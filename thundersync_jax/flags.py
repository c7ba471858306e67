"""The command line: absl flags, a config file and overrides of single settings.

`run(command)` is all that a command has under `__main__`. Flags reach the command as
arguments; nothing else reads them.
"""

import dataclasses
import importlib.util
import inspect
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from absl import flags as absl_flags

from thundersync_jax import combinations
from thundersync_jax.config import Config
from thundersync_jax.errors import ConfigError, ServerError, StreamError
from thundersync_jax.interrupts import Interrupts
from thundersync_jax.model_config import is_shape
from thundersync_jax.settings import (
    config_dict,
    describe,
    nearest,
    parse,
    replace,
    settings,
    to_text,
)

_PREFIX = "--config."
_REFUSED, _FAILED, _INTERRUPTED = 2, 1, 130


class Flag(NamedTuple):
    """A flag of one command; it becomes a keyword argument of the same name."""

    kind: type  # int, float, str, bool, or tuple for texts separated by commas
    default: Any  # None where the command has to cope without
    help: str


_COMMON = {
    "config": Flag(str, None, "settings, as FILE.py or FILE.py:variant"),
    "workdir": Flag(str, None, "directory of the run's files"),
    "json": Flag(bool, False, "print one JSON object as the last line"),
    "print_config": Flag(bool, False, "print every setting and stop"),
    "help": Flag(bool, False, "print this text and stop"),
}


def run(
    command: Callable[..., Mapping[str, Any] | None],
    *,
    flags: Mapping[str, Flag] | None = None,
    needs: Sequence[str] = ("config", "workdir"),
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Parses the command line, calls the command and exits.

    Ctrl-C ends it with status 130 and SIGTERM with 143, a few seconds later at most.

    Args:
      command: Called as command(config, workdir, **own flags), without the config
        where `needs` has none. What it returns is the JSON object of `--json`; a false
        "passed" in it makes the exit status 1.
      flags: The command's own flags.
      needs: Which of "config" and "workdir" must be given. A command that does not
        need a config takes none; a work directory that is not given is None.
      argv: The command line, by default the process's own.
    """
    argv = list(sys.argv if argv is None else argv)
    try:
        with Interrupts():
            status = _run(command, dict(flags or {}), needs, argv)
    except (ConfigError, ServerError, StreamError) as error:
        print(f"{type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        status = _REFUSED
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = _FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = _INTERRUPTED
    sys.stdout.flush()
    sys.exit(status)


def load_config(spec: str) -> Config:
    """Reads `FILE.py` or `FILE.py:variant`.

    The file's folder is put at the end of the import path, so that a config can import
    its neighbours and `env.factory` can name one.
    """
    path, variant = os.path.expanduser(spec), None
    if ".py:" in path:
        path, _, variant = path.rpartition(":")
    if not Path(path).is_file():
        there = [str(known) for known in Path(path).parent.glob("*.py")]
        hint = nearest(path, there) if there else "Write --config=FILE.py."
        raise ConfigError(f"--config is {spec!r}, expected a Python file. {hint}")
    if Path(path).suffix != ".py":
        raise ConfigError(
            f"--config is {spec!r}, expected a Python file with get_config. Write "
            "--config=FILE.py or --config=FILE.py:variant."
        )
    try:
        config = _call_get_config(_import_file(Path(path)), path, variant)
    except Exception as error:  # whatever a config file does wrong is one line
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
                f"{_PREFIX}{name} names a group, expected one of its settings. "
                f"Write {_PREFIX}{fields[0]}={to_text(known[fields[0]].value)}."
            )
        if name not in known:
            if reason := combinations.why_absent(name):
                raise ConfigError(f"{_PREFIX}{name} is no setting, {reason}")
            raise ConfigError(f"{_PREFIX}{name} is no setting. {nearest(name, known)}")
        values[name] = parse(text, known[name])
    path = values.get("model.path", config.model.path)
    for name in filter(is_shape, values if path is not None else ()):
        raise ConfigError(
            f"{_PREFIX}{name} was given with model.path {path}, expected one of them: "
            "the folder's config.json decides the shape. "
            f"Leave out {_PREFIX}{name}, or set model.path to none."
        )
    try:
        return replace(config, values)
    except ValueError as error:  # also from the class of somebody's env.options
        raise ConfigError(str(error)) from error


def _run(
    command: Callable[..., Mapping[str, Any] | None],
    own: dict[str, Flag],
    needs: Sequence[str],
    argv: list[str],
) -> int:
    plain, texts = _split(argv)
    accepted = _COMMON | own
    if "config" not in needs:
        accepted = {
            name: flag
            for name, flag in accepted.items()
            if name not in ("config", "print_config")
        }
    values = _parse_flags(plain, accepted)
    if values["help"]:
        print(_help(command, accepted))
        return 0
    arguments: list[Any] = []
    if "config" in needs:
        _need(
            "config", values["config"], "FILE.py, e.g. --config=configs/quickstart.py"
        )
        from_file = load_config(values["config"])
        config = override(from_file, texts)
        if values["print_config"]:
            _print_config(config, values["config"], texts, values["json"])
            return 0
        arguments.append(config)
    elif texts:
        raise ConfigError(
            f"{_PREFIX}{next(iter(texts))} was given, expected no settings: this "
            "command reads none. Leave it out."
        )
    if "workdir" in needs:
        _need("workdir", values["workdir"], "DIR, e.g. --workdir=runs/quickstart")
    workdir = values["workdir"]
    arguments.append(Path(workdir).expanduser() if workdir else None)
    result = command(*arguments, **{name: values[name] for name in own})
    if values["json"]:
        print(json.dumps(_finite(result or {})), flush=True)
    return _FAILED if result and result.get("passed") is False else 0


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Takes the overrides out: absl knows no dotted flags."""
    plain, texts = [], {}
    rest = iter(argv)
    for argument in rest:
        if not argument.startswith((_PREFIX, _PREFIX[1:])):
            plain.append(argument)
            continue
        name, equals, text = argument.lstrip("-").partition("=")
        name = name.removeprefix("config.")
        if not equals:
            text = next(rest, "--")
            if text.startswith("--"):
                raise ConfigError(
                    f"{_PREFIX}{name} has no value, expected one after '=' or a space. "
                    f"Write {_PREFIX}{name}=VALUE (true or false for a switch)."
                )
        texts[name] = text
    return plain, texts


def _parse_flags(argv: Sequence[str], accepted: Mapping[str, Flag]) -> dict[str, Any]:
    values = absl_flags.FlagValues()
    define = {
        int: absl_flags.DEFINE_integer,
        float: absl_flags.DEFINE_float,
        str: absl_flags.DEFINE_string,
        bool: absl_flags.DEFINE_boolean,
        tuple: absl_flags.DEFINE_list,
    }
    for name, flag in accepted.items():
        default = flag.default
        default = list(default) if isinstance(default, tuple) else default
        define[flag.kind](name, default, flag.help, flag_values=values)
    try:
        positional = values(list(argv))[1:]
    except absl_flags.UnrecognizedFlagError as error:
        name = f"--{error.flagname}"
        hint = nearest(name, [f"--{known}" for known in accepted])
        raise ConfigError(f"{name} is no flag. {hint}") from error
    except absl_flags.IllegalFlagValueError as error:
        name, text = re.match(r"flag --(\w+)=(.*?): ", str(error), re.S).groups()
        expected = describe(accepted[name].kind)
        raise ConfigError(f"--{name} is {text!r}, expected {expected}.") from error
    except absl_flags.Error as error:
        raise ConfigError(_one_line(error)) from error
    if positional:
        raise ConfigError(
            f"{positional[0]!r} stands alone, expected --flag=value. See --help."
        )
    return {
        name: tuple(value) if isinstance(value := values[name].value, list) else value
        for name, flag in accepted.items()
    }


def _need(name: str, value: str | None, expected: str) -> None:
    if not value:
        raise ConfigError(f"--{name} is missing, expected --{name}={expected}.")


def _import_file(path: Path) -> ModuleType:
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    # Under its own name where that means this file: `env.factory` may import it too.
    found = importlib.util.find_spec(path.stem)
    same = found is not None and found.origin == str(path.resolve())
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
    if takes:
        config = module.get_config(variant)
        if variant is None or not _ignores_variant(config, module.get_config):
            return config
        raise ConfigError(
            f"--config names variant {variant!r}, but get_config of {path} returns the "
            f"same for it as for none, expected a variant. Write --config={path}."
        )
    if variant is not None:
        raise ConfigError(
            f"--config names variant {variant!r}, but get_config of {path} takes none, "
            f"expected no variant. Write --config={path}."
        )
    return module.get_config()


def _ignores_variant(config: Any, get_config: Callable[[str | None], Any]) -> bool:
    """Whether this is what the file returns for none, and for any name whatever.

    A default variant may have a name too; a name that nobody gave is refused then.
    """
    try:
        others = (get_config(None), get_config("a name that nobody gave"))
    except Exception:  # it insists on a variant, or knows which there are
        return False
    return isinstance(config, Config) and all(config == other for other in others)


def _explain(error: Exception, path: str) -> str:
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


def _print_config(
    config: Config, spec: str, texts: Mapping[str, str], as_json: bool
) -> None:
    rows = []
    for setting in settings(config):
        source = "default" if setting.value == setting.default else spec
        source = "command line" if setting.name in texts else source
        if config.model.path is not None and is_shape(setting.name):
            source = "model.path"
        rows.append((setting.name, to_text(setting.value), source, setting.comment))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[3]]).rstrip())
    if as_json:
        print(json.dumps(config_dict(config)))


def _help(command: Callable[..., Any], accepted: Mapping[str, Flag]) -> str:
    spec = sys.modules["__main__"].__spec__
    program = f"-m {spec.name}" if spec else sys.argv[0]
    about = (inspect.getdoc(command) or "").partition("\n\n")[0]
    lines = [about, "", f"usage: python {program} --flag=value ...", "", "flags:"]
    values = {"config": "=FILE.py", "workdir": "=DIR"}
    kinds = {int: "=N", float: "=X", str: "=TEXT", bool: "", tuple: "=A,B"}
    for name, flag in accepted.items():
        typed = name + values.get(name, kinds[flag.kind])
        default = "" if flag.default in (None, False) else f" ({to_text(flag.default)})"
        lines.append(f"  --{typed:<20} {flag.help}{default}")
    if "config" in accepted:
        lines += [
            "",
            "settings, after the file and in order, with '=' or a space:",
            "  --config.optim.learning_rate=3e-6    a number",
            "  --config.open_groups none            nothing, where that is allowed",
            "  --config.model.qk_norm true          a switch, true or false",
            "  --config.rollout.prefill_buckets=32,96",
            "  --print_config lists every setting and what set it",
        ]
    return "\n".join(lines)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _finite(value: Any) -> Any:
    """JSON has neither NaN nor infinity nor numpy's scalars."""
    if isinstance(value, Mapping):
        return {str(key): _finite(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(element) for element in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
