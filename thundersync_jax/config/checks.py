"""Checks of single values: each ends in one line with value, expectation, way out."""

import dataclasses
import importlib
import math
import urllib.parse
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from thundersync_jax.errors import ConfigError


def require(condition: bool, received: str, expected: str, way_out: str) -> None:
    """Raises a ConfigError, as "optim.b1 is 1.5, expected ...", unless that holds."""
    if not condition:
        raise ConfigError(f"{received}, expected {expected}. {way_out}")


def installed(package: str, user: str, extra: str) -> ModuleType:
    """Imports a package that `user` needs, or says which extra brings it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{user} need {package}, which is not installed; install the extra: "
            f"pip install 'thundersync_jax[{extra}]'."
        ) from error


def is_number(value: Any) -> bool:
    """Whether a value is a number of JSON: whole or finite, neither true nor false."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def positive(group: Any, prefix: str, names: list[str], way_out: str = "") -> None:
    """Requires fields of a group to be above zero, or none."""
    for name in names:
        value = getattr(group, name)
        above = value is None or value > 0
        instead = way_out or f"Raise {prefix}{name}."
        require(above, f"{prefix}{name} is {value}", "more than 0", instead)


def at_least_zero(group: Any, prefix: str, names: list[str]) -> None:
    """Requires fields of a group to be zero or above, or none."""
    for name in names:
        value = getattr(group, name)
        there = value is None or value >= 0
        way_out = f"Set {prefix}{name} to 0."
        require(there, f"{prefix}{name} is {value}", "at least 0", way_out)


def below(group: Any, prefix: str, names: list[str], limit: float) -> None:
    """Requires fields of a group to be smaller than a limit in magnitude."""
    for name in names:
        value = getattr(group, name)
        expected = f"less than {limit:g} in magnitude: sums are in float32"
        way_out = f"Set {prefix}{name} to what a reward may be."
        require(abs(value) < limit, f"{prefix}{name} is {value}", expected, way_out)


def share(group: Any, prefix: str, names: list[str]) -> None:
    """Requires fields of a group to lie between zero and one."""
    for name in names:
        value = getattr(group, name)
        way_out = f"Set {prefix}{name} to {value / 100 if 1 < value <= 100 else 0.5}."
        expected = "a share between 0 and 1"
        require(0 <= value <= 1, f"{prefix}{name} is {value}", expected, way_out)


def effective(
    group: Any, prefix: str, names: list[str], other: str, choices: tuple = ()
) -> None:
    """Requires fields to keep their defaults where another one makes them idle.

    `choices` are the values of `other` that use the fields; none: any but 0.
    """
    value_of_other = getattr(group, other)
    if value_of_other in choices or (value_of_other and not choices):
        return
    defaults = {field.name: field.default for field in dataclasses.fields(group)}
    users = " and ".join(map(repr, choices)) if choices else f"{prefix}{other} above 0"
    for name in names:
        value, default = getattr(group, name), defaults[name]
        shown = "none" if default is None else repr(default)
        way_out = repr(choices[0]) if choices else "what you mean"
        require(
            value == default,
            f"{prefix}{name} is {value!r} with {prefix}{other} {value_of_other!r}",
            f"{shown}: only {users} {'use' if len(choices) > 1 else 'uses'} it",
            f"Set {prefix}{name} to {shown} or {prefix}{other} to {way_out}.",
        )


def bounds(group: Any, prefix: str, lowest: Mapping[str, int]) -> None:
    """Requires pairs of a fewest, at least the `lowest` of its field, and a most."""
    for name, least in lowest.items():
        pair = getattr(group, name)
        require(
            len(pair) == 2 and least <= pair[0] <= pair[1],
            f"{prefix}{name} is {pair}",
            f"the fewest (at least {least}) and the most",
            f"Write it like ({least}, {least + 2}).",
        )


def check_servers(name: str, servers: tuple[str, ...]) -> None:
    """Requires addresses of HTTP servers, each once."""
    for server in servers:
        require(
            _is_address(server),
            f"{name} has {server!r}",
            "addresses such as 'http://localhost:8000', without a path",
            f"Correct {name}.",
        )
    same = {server.rstrip("/") for server in servers}
    require(
        len(same) == len(servers),
        f"{name} is {servers}",
        "every server once",
        f"Correct {name}.",
    )


def _is_address(server: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(server)
        port = parts.port  # ValueError where it is no number, or too large
    except ValueError:
        return False
    host = parts.hostname or ""
    return (
        parts.scheme in ("http", "https")
        and bool(host)
        and not any(character.isspace() for character in server)
        and port != 0
        and not parts.path.strip("/")
        and not (parts.query or parts.fragment)
    )
