"""JSON schemas of tools, and the arguments that they take.

A part of JSON Schema: types (several, and `nullable`), enumerations, anyOf and oneOf,
required and other properties, and items of lists. What else a schema asks for is not
looked at.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from thundersync_jax.config.checks import is_number
from thundersync_jax.errors import ConfigError

Schema = Mapping[str, Any]
_NONE: Schema = {}  # no schema
_KINDS = {
    "string": lambda value: isinstance(value, str),
    "number": is_number,
    "integer": lambda value: is_number(value) and value == int(value),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


class SchemaError(ValueError):
    """One line about a value that a schema does not take."""


def function(tool: Schema) -> Schema:
    """The description of a tool, which some wrap."""
    return tool.get("function", tool)


def check(tools: Sequence[Any]) -> None:
    """Refuses what is no tool, before a policy calls it."""
    names = []
    for tool in tools:
        described = function(tool) if isinstance(tool, Mapping) else None
        name = described.get("name") if isinstance(described, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ConfigError(
                f"the task has the tool {tool!r:.80}, expected an object with a name, "
                "or one with such an object as its function. Correct its `tools`."
            )
        names.append(name)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"the task has two tools named {twice!r}, expected a name of its own for "
            "each. Correct its `tools`."
        )


def properties(function: Schema) -> Schema:
    """Schemas of a tool's parameters, by name."""
    return _constraints(_parameters(function).get("properties"))


def takes_text(schema: Any) -> bool:
    """Whether a text may be the value."""
    schema = _constraints(schema)
    choices = _list(schema.get("anyOf")) or _list(schema.get("oneOf"))
    if choices:
        return any(map(takes_text, choices))
    return "string" in _kinds(schema)


def arguments(
    function: Schema, given: Mapping[str, Any], word: str = "arguments"
) -> dict[str, Any]:
    """Arguments of a call as the tool takes them: 5.0 is the integer 5.

    `word` is what the family calls them. SchemaError where the tool does not take them.
    """
    name, schema = function["name"], _parameters(function)
    known = properties(function)
    for parameter in _required(schema):
        if parameter not in given:
            raise SchemaError(f"{name} needs {parameter!r} in its {word}")
    # Where no schema lists properties any will do; without a schema there are none.
    free = schema is not _NONE and "properties" not in schema
    others = schema.get("additionalProperties", free)
    taken = {}
    for parameter, value in given.items():
        if parameter not in known and others is False:
            listed = ", ".join(known) or "nothing"
            raise SchemaError(f"{name} takes {listed}, there is no {parameter[:60]!r}")
        constraints = _constraints(known.get(parameter, others))
        taken[parameter] = _fitting(f"{name}: {parameter}", value, constraints)
    return taken


def _parameters(function: Schema) -> Schema:
    """What a tool's arguments must be; some write it under another name."""
    return _constraints(function.get("parameters", function.get("input_schema")))


def _kinds(constraints: Mapping[str, Any]) -> list[str]:
    kinds = constraints.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return _texts(kinds) or list(_KINDS)


def _required(constraints: Mapping[str, Any]) -> list[str]:
    return _texts(constraints.get("required"))  # some write true at the parameter


def _texts(value: Any) -> list[str]:
    """The texts of a list; none where it is another thing."""
    return [text for text in _list(value) if isinstance(text, str)]


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _fitting(where: str, value: Any, constraints: Mapping[str, Any]) -> Any:
    """A value that a schema takes; 5.0 is the integer 5."""
    if value is None and constraints.get("nullable") is True:
        return value
    kinds = _kinds(constraints)
    # A kind that nobody knows allows everything.
    kind = next((k for k in kinds if _KINDS.get(k, lambda value: True)(value)), None)
    if kind is None:
        raise SchemaError(f"{where} must be of type {' or '.join(kinds)}")
    allowed = _list(constraints.get("enum"))
    if allowed and not any(_same(value, other) for other in allowed):
        shown = ", ".join(map(str, allowed))
        raise SchemaError(f"{where} must be one of {shown}")
    for name in ("anyOf", "oneOf"):
        if choices := _list(constraints.get(name)):
            value = _any_of(where, value, choices)
    if isinstance(value, list) and "items" in constraints:
        items = _constraints(constraints["items"])
        return [_fitting(f"{where}[{i}]", x, items) for i, x in enumerate(value)]
    if isinstance(value, dict):
        properties = _constraints(constraints.get("properties"))
        for name in _required(constraints):
            if name not in value:
                raise SchemaError(f"{where} needs {name!r}")
        return {
            name: _fitting(f"{where}.{name}", x, _constraints(properties.get(name)))
            for name, x in value.items()
        }
    # Of a whole number that JSON wrote as 5.0, where no other number is meant.
    return int(value) if kind == "integer" else value


def _any_of(where: str, value: Any, choices: Sequence[Any]) -> Any:
    problem = None
    for choice in choices:
        try:
            return _fitting(where, value, _constraints(choice))
        except SchemaError as error:
            problem = problem or error
    raise problem


def _same(value: Any, other: Any) -> bool:
    """Equal as JSON has it, where true is no number."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _constraints(schema: Any) -> Mapping[str, Any]:
    """What a JSON schema asks for: null and true ask for nothing."""
    return schema if isinstance(schema, Mapping) else _NONE
