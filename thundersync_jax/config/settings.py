"""Settings: the fields of nested frozen dataclasses, by dotted name and annotation."""

import ast
import dataclasses
import difflib
import functools
import inspect
import io
import json
import math
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from thundersync_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of a nested configuration."""

    name: str  # dotted, as typed on the command line
    value: Any
    annotation: Any
    default: Any  # dataclasses.MISSING where there is none
    comment: str  # the comment beside the field in the source
    changeable: bool  # whether a run may be resumed with another value


class Automatic(tuple):
    """A tuple that nobody gave: it follows from other settings whenever they change."""


def changeable(default: Any) -> Any:
    """A field that changes nothing of what a run computes: a resume may change it."""
    return dataclasses.field(default=default, metadata={"changeable": True})


def settings(group: Any, prefix: str = "") -> Iterator[Setting]:
    """Every setting of a configuration, in the order of its source."""
    hints = _hints(type(group))
    comments = _comments(type(group))
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, f"{prefix}{field.name}.")
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield Setting(
            name=prefix + field.name,
            value=value,
            annotation=hints[field.name],
            default=value if isinstance(value, Automatic) else default,
            comment=comments.get(field.name, ""),
            changeable="changeable" in field.metadata,
        )


def check_types(group: Any, prefix: str) -> None:
    """Checks every field against its annotation; whole numbers become floats.

    Refused are other types and choices, NaN and infinity.
    """
    hints = _hints(type(group))
    for field in dataclasses.fields(group):
        name, annotation = field.name, hints[field.name]
        value = getattr(group, name)
        if not _fits(value, annotation):
            raise ConfigError(
                f"{prefix}{name} is {value!r}, expected {describe(annotation)}. "
                f"Write {prefix}{name}={_example(value, annotation, field)}."
            )
        if type(value) is int and not _fits(value, annotation, strict=True):
            # 1 and 1.0 are one setting and must be one text in config.json.
            object.__setattr__(group, name, float(value))


def describe(annotation: Any) -> str:
    """The values an annotation allows, in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(describe(option) for option in arguments)
    if origin is tuple:
        return f"a tuple whose elements are each {describe(arguments[0])}"
    words = {
        int: "a whole number",
        float: "a finite number",
        str: "a text",
        bool: "true or false",
        types.NoneType: "none",
    }
    return words.get(annotation) or getattr(annotation, "__name__", str(annotation))


def parse(text: str, setting: Setting) -> Any:
    """Reads a setting's value from the command line."""
    matched, value = _parse(text, setting.annotation)
    if not matched:
        raise ConfigError(
            f"{setting.name} is {text!r}, expected {describe(setting.annotation)}. "
            f"Write --config.{setting.name}={to_text(setting.value)} or the like."
        )
    return value


def to_text(value: Any) -> str:
    """A value as it is typed on the command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        text = ",".join(to_text(element) for element in value)
        texts = any(isinstance(element, str) for element in value)
        if texts and _parse(text, tuple[str, ...])[1] != value:
            return json.dumps(value, ensure_ascii=False)
        return text
    return str(value)


def replace(group: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """The configuration with other values by dotted name, all of them set at once."""
    changes = {}
    for field in dataclasses.fields(group):
        name, value = prefix + field.name, getattr(group, field.name)
        if name in values:
            changes[field.name] = values[name]
        elif any(other.startswith(f"{name}.") for other in values):
            changes[field.name] = replace(value, values, f"{name}.")
    return dataclasses.replace(group, **changes) if changes else group


def config_dict(group: Any) -> dict[str, Any]:
    """The settings as plain values; writing them as JSON and reading back is exact."""
    hints = _hints(type(group))
    plain = {}
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if dataclasses.is_dataclass(value):
            plain[field.name] = config_dict(value)
            if hints[field.name] is not type(value):
                # Any class may stand here, and equal fields can mean other tasks.
                name = {"class": type(value).__qualname__}
                plain[field.name] = name | plain[field.name]
        else:
            plain[field.name] = _plain(value)
    return plain


class Change(NamedTuple):
    """A setting whose values in two configurations differ."""

    name: str  # dotted
    saved: Any  # "absent" where the first has no such setting
    current: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.saved} -> {self.current}"


def differences(
    saved: Mapping[str, Any], current: Mapping[str, Any], prefix: str = ""
) -> list[Change]:
    """What differs between two `config_dict`s."""
    changes = []
    for name in dict.fromkeys([*saved, *current]):
        old, new = saved.get(name, "absent"), current.get(name, "absent")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += differences(old, new, f"{prefix}{name}.")
        elif old != new:
            changes.append(Change(prefix + name, old, new))
    return changes


def is_frozen_dataclass(value: Any) -> bool:
    """Whether a value is an instance of a frozen dataclass."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def nearest(name: str, names: Iterable[str]) -> str:
    """The sentence that points from an unknown name to the known ones like it."""
    names = list(names)
    ends = {known: known.rpartition(".")[2] for known in names}
    end = name.rpartition(".")[2]
    close = [known for known in names if ends[known] == end]
    close = close or difflib.get_close_matches(name, names, 3, 0.6)
    if not close:
        similar = difflib.get_close_matches(end, ends.values(), 3, 0.6)
        close = [
            known
            for known in names
            if ends[known] in similar
            or end == "".join(word[0] for word in ends[known].split("_"))  # lr
        ]
    if close:
        return f"Did you mean {' or '.join(close[:3])}?"
    few = len(names) <= 12
    return f"Known: {', '.join(names)}." if few else "--print_config lists them all."


def _hints(cls: type) -> dict[str, Any]:
    try:
        hints = typing.get_type_hints(cls)
    except NameError:  # somebody's options whose annotations name local classes
        hints = {}
    return {field.name: hints.get(field.name, Any) for field in dataclasses.fields(cls)}


def _fits(value: Any, annotation: Any, strict: bool = False) -> bool:
    """Whether a value is one of an annotation; `strict`: a whole number is no float."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return any(type(value) is type(c) and value == c for c in arguments)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option, strict) for option in arguments)
    if origin is tuple and arguments[1:] == (...,):
        return isinstance(value, tuple) and all(_fits(v, arguments[0]) for v in value)
    if annotation in (int, float) and isinstance(value, bool):
        return False
    if annotation is float:
        kinds = float if strict else int | float
        return isinstance(value, kinds) and math.isfinite(value)
    if annotation is not Any and isinstance(annotation, type):
        return isinstance(value, annotation)
    return True  # some other annotation of somebody's options: theirs to check


def _example(value: Any, annotation: Any, field: dataclasses.Field) -> str:
    """Something that would have been accepted, as near as can be to what was meant."""
    if isinstance(value, list) and _fits(tuple(value), annotation):
        return repr(tuple(value))
    if isinstance(value, str) and _parse(value, annotation)[0]:
        return repr(_parse(value, annotation)[1])
    if isinstance(value, float) and _fits(value, float) and _fits(0, annotation):
        return repr(round(value))
    if field.default is not dataclasses.MISSING:
        return repr(field.default)
    return f"{getattr(annotation, '__name__', annotation)}(...)"


def _plain(value: Any) -> Any:
    """A value of JSON's own types."""
    if isinstance(value, list | tuple):
        return [_plain(element) for element in value]
    if isinstance(value, dict):
        return {str(key): _plain(element) for key, element in value.items()}
    known = value is None or isinstance(value, bool | int | float | str)
    return value if known else repr(value)


def _parse(text: str, annotation: Any) -> tuple[bool, Any]:
    """Whether a text is a value of this annotation, and which."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        values = [choice for choice in arguments if str(choice) == text]
        return bool(values), values[0] if values else None
    if origin in (types.UnionType, typing.Union):
        # "none" is tried first, since every text is also a str.
        for option in sorted(arguments, key=lambda o: o is not types.NoneType):
            matched, value = _parse(text, option)
            if matched:
                return True, value
        return False, None
    if origin is tuple:
        if arguments[0] is str and (listed := _listed(text)) is not None:
            return True, listed
        parts = [part.strip() for part in text.strip("()[] ").split(",")]
        parsed = [_parse(part, arguments[0]) for part in parts if part]
        return all(ok for ok, _ in parsed), tuple(value for _, value in parsed)
    if annotation is types.NoneType:
        return text.lower() == "none", None
    if annotation is bool:
        return text.lower() in ("true", "false"), text.lower() == "true"
    if annotation in (int, float):
        try:
            return True, annotation(text)
        except ValueError:
            return False, None
    return annotation is str, text


def _listed(text: str) -> tuple[str, ...] | None:
    """Texts with commas or spaces of their own, as a list in JSON."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    texts = isinstance(values, list) and all(isinstance(v, str) for v in values)
    return tuple(values) if texts else None


@functools.cache
def _comments(cls: type) -> dict[str, str]:
    """The comment beside each field of a dataclass, read from its source."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        node.target.id: " ".join(
            by_line[line]
            for line in range(node.lineno, node.end_lineno + 1)
            if line in by_line
        )
        for node in ast.parse(source).body[0].body
        if isinstance(node, ast.AnnAssign)
    }
