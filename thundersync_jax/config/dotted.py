"""Functions that settings name as "package.module:function".

The folder of the config file is on the import path, so "own_task:make" names a
neighbour and f"{__name__}:make" the config file itself.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from thundersync_jax.errors import ConfigError


def check(setting: str, name: str) -> None:
    """Requires the form "package.module:function", and imports nothing."""
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise ConfigError(
            f"{setting} is {name!r}, expected an import path such as "
            "'package.module:function'. Write module and function with a colon "
            "between them."
        )


def load(setting: str, name: str, parameters: Sequence[str] = ()) -> Callable[..., Any]:
    """Imports the function that a setting names.

    It must take `parameters` by position, in words; where none are listed, any will do.
    ConfigError where there is no such module or function, or it takes other arguments.
    """
    function = find(setting, name)
    if not callable(function):
        raise ConfigError(
            f"{setting} is {name!r}, expected a function, not {function!r:.60}; "
            "name another."
        )
    if parameters:
        _check_call(setting, name, function, parameters)
    return function


def find(setting: str, name: str) -> Any:
    """Imports whatever a setting names; ConfigError where there is none."""
    check(setting, name)
    path, _, attribute = name.partition(":")
    module = _import(setting, name, path)
    if not hasattr(module, attribute):
        raise ConfigError(
            f"{setting} is {name!r}, but {path} has no function {attribute!r}; "
            "define it or name another."
        )
    return getattr(module, attribute)


def _import(setting: str, name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        # A missing import inside the module is the module's own error.
        if path != missing and not path.startswith(f"{missing}."):
            raise
        raise ConfigError(
            f"{setting} is {name!r}, but there is no module {missing!r}; install it "
            "or put it beside the config file."
        ) from error


def _check_call(
    setting: str, name: str, function: Callable[..., Any], parameters: Sequence[str]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin that does not tell
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        call = f"{name.partition(':')[2]}({', '.join(parameters)})"
        raise ConfigError(
            f"{setting} is {name!r}, a function of {signature}; expected one that can "
            f"be called as {call}. Change its parameters or name another."
        ) from None
