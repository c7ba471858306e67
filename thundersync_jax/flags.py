"""The command line: absl flags, a config file and overrides of single settings.

`run(command)` is all that a command has under `__main__`. Flags reach the command as
arguments; nothing else reads them.
"""

import inspect
import json
import math
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from absl import flags as absl_flags

from thundersync_jax.config import Config
from thundersync_jax.config.file import PREFIX, load_config, override
from thundersync_jax.config.model import is_shape
from thundersync_jax.config.settings import (
    config_dict,
    describe,
    nearest,
    settings,
    to_text,
)
from thundersync_jax.errors import ConfigError, ServerError, StreamError, full
from thundersync_jax.rollout import interrupts

_REFUSED, _FAILED, _INTERRUPTED = 2, 1, 130
_POOL_THREADS = ("engine", "teacher", "rollouts")


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
    positional: str | None = None,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Parses the command line, calls the command and exits.

    Ctrl-C ends it with status 130 and SIGTERM with 143 (`rollout.interrupts`).
    With `--json` the last line is one JSON object in every ending; that of a failure
    has "error" and "kind", the name of the exception.

    Args:
      command: Called as command(config, workdir, **own flags), without the config
        where `needs` has none. What it returns is the JSON object of `--json`; a false
        "passed" in it makes the exit status 1.
      flags: The command's own flags.
      needs: Which of "config" and "workdir" must be given. A command that does not
        need a config takes none; a work directory that is not given is None.
      positional: Keyword argument of the command for a tuple of what stands alone on
        the command line; None where nothing may.
      argv: The command line, by default the process's own.
    """
    argv = list(sys.argv if argv is None else argv)
    as_json = any(re.fullmatch("--?json(=true)?", argument, re.I) for argument in argv)
    result: Mapping[str, Any] = {}
    try:
        with interrupts.Interrupts(as_json):
            result = _run(command, dict(flags or {}), needs, positional, argv)
        status = _FAILED if result.get("passed") is False else 0
    except (ConfigError, ServerError, StreamError) as error:
        print(f"{type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        result, status = _failure(error), _REFUSED
    except SystemExit as error:  # of code that the command calls
        message = f"the command's own code called sys.exit({error.code!r})"
        print(message, file=sys.stderr)
        result = {"error": message, "kind": "SystemExit"}
        status = error.code if isinstance(error.code, int) and error.code else _FAILED
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = _FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        result, status = interrupts.RESULT, _INTERRUPTED
    except Exception as error:
        if full(error) is None:
            if as_json:
                print(json.dumps(_failure(error)), flush=True)
            if _in_c():
                traceback.print_exc()
                _leave(_FAILED)
            raise
        way_out = "expected room on that disk. Free some and run the same command again"
        message = f"{type(error).__name__}: {_one_line(error)}, {way_out}."
        print(message, file=sys.stderr)
        result, status = _failure(error), _REFUSED
    if as_json:
        print(json.dumps(_finite(result)))
    _leave(status)


def _in_c() -> bool:
    """Whether a thread of a closed pool hangs or compiles."""
    return any(thread.name in _POOL_THREADS for thread in threading.enumerate())


def _leave(status: int) -> NoReturn:
    """Ends the process; by the interpreter's own end a thread in C would abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _in_c():
        os._exit(status)
    sys.exit(status)


def _run(
    command: Callable[..., Mapping[str, Any] | None],
    own: dict[str, Flag],
    needs: Sequence[str],
    positional: str | None,
    argv: list[str],
) -> Mapping[str, Any]:
    """Runs the command, or what a common flag asks for; returns the JSON object."""
    plain, texts = _split(argv)
    accepted = _COMMON | own
    idle = () if "config" in needs else ("config", "print_config")
    idle += ("workdir",) if positional else ()
    accepted = {name: flag for name, flag in accepted.items() if name not in idle}
    values, alone = _parse_flags(plain, accepted)
    if alone and positional is None:
        raise ConfigError(
            f"{alone[0]!r} stands alone, expected --flag=value. See --help."
        )
    if values["help"]:
        print(_help(command, accepted, positional))
        return {}
    arguments: list[Any] = []
    if "config" in needs:
        example = "FILE.py, e.g. --config=configs/quickstart.py"
        _need("config", values["config"], example)
        config = override(load_config(values["config"]), texts)
        if values["print_config"]:
            _print_config(config, values["config"], texts)
            return config_dict(config)
        arguments.append(config)
    elif texts:
        raise ConfigError(
            f"{PREFIX}{next(iter(texts))} was given, expected no settings: this "
            "command reads none. Leave it out."
        )
    if "workdir" in needs:
        _need("workdir", values["workdir"], "DIR, e.g. --workdir=runs/quickstart")
    keywords = {name: values[name] for name in own}
    if positional is None:
        workdir = values["workdir"]
        arguments.append(Path(workdir).expanduser() if workdir else None)
    else:
        keywords[positional] = alone
    return command(*arguments, **keywords) or {}


def _split(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Takes the overrides out: absl knows no dotted flags."""
    plain, texts = [], {}
    rest = iter(argv)
    for argument in rest:
        if not argument.startswith((PREFIX, PREFIX[1:])):
            plain.append(argument)
            continue
        name, equals, text = argument.lstrip("-").partition("=")
        name = name.removeprefix("config.")
        if not equals:
            text = next(rest, "--")
            if text.startswith("--"):
                raise ConfigError(
                    f"{PREFIX}{name} has no value, expected one after '=' or a space. "
                    f"Write {PREFIX}{name}=VALUE (true or false for a switch)."
                )
        texts[name] = text
    return plain, texts


def _parse_flags(
    argv: Sequence[str], accepted: Mapping[str, Flag]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the flags' values by name, and what stands alone."""
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
        alone = tuple(values(list(argv))[1:])
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
    plain = {name: values[name].value for name in accepted}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}, alone


def _need(name: str, value: str | None, expected: str) -> None:
    if not value:
        raise ConfigError(f"--{name} is missing, expected --{name}={expected}.")


def _print_config(config: Config, spec: str, texts: Mapping[str, str]) -> None:
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


def _help(
    command: Callable[..., Any], accepted: Mapping[str, Flag], positional: str | None
) -> str:
    spec = sys.modules["__main__"].__spec__
    program = f"-m {spec.name}" if spec else sys.argv[0]
    about = (inspect.getdoc(command) or "").partition("\n\n")[0]
    alone = f"{positional.upper()} ... " if positional else ""
    usage = f"usage: python {program} {alone}--flag=value ..."
    lines = [about, "", usage, "", "flags:"]
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


def _failure(error: BaseException) -> dict[str, str]:
    return {"error": _one_line(error), "kind": type(error).__name__}


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
