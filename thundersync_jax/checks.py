"""Checks of single values: each ends in one line with value, expectation, way out."""

from typing import Any

from thundersync_jax.errors import ConfigError


def require(condition: bool, received: str, expected: str, way_out: str) -> None:
    """Raises a ConfigError unless the condition holds.

    Args:
      condition: What must be true.
      received: The setting and its value, as `optim.b1 is 1.5`.
      expected: What would have been right.
      way_out: A sentence that says what to do.
    """
    if not condition:
        raise ConfigError(f"{received}, expected {expected}. {way_out}")


def positive(group: Any, prefix: str, names: list[str], way_out: str = "") -> None:
    """Requires fields of a group to be above zero."""
    for name in names:
        value = getattr(group, name)
        instead = way_out or f"Raise {prefix}{name}."
        require(value > 0, f"{prefix}{name} is {value}", "more than 0", instead)


def at_least_zero(group: Any, prefix: str, names: list[str]) -> None:
    """Requires fields of a group to be zero or above."""
    for name in names:
        value = getattr(group, name)
        way_out = f"Set {prefix}{name} to 0."
        require(value >= 0, f"{prefix}{name} is {value}", "at least 0", way_out)


def share(group: Any, prefix: str, names: list[str]) -> None:
    """Requires fields of a group to lie between zero and one."""
    for name in names:
        value = getattr(group, name)
        way_out = f"Set {prefix}{name} to {value / 100 if 1 < value <= 100 else 0.5}."
        expected = "a share between 0 and 1"
        require(0 <= value <= 1, f"{prefix}{name} is {value}", expected, way_out)
