"""Tool calls in a family's own format: read from what was sampled, checked, written.

    tags    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Qwen, Hermes
    json    {"name": ..., "parameters": {...}}, the whole turn           Llama 3.x

A turn makes one call. What is wrong with another one becomes a line for the policy, and
is never an exception.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from thundersync_jax.config.checks import is_number
from thundersync_jax.types import Action

Style = Literal["tags", "json"]
PYTHON_TAG = "<|python_tag|>"  # what Llama may open a call with
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"
_SHOWN = 60  # characters of the policy's text in a line about it
_KINDS = {
    "string": lambda value: isinstance(value, str),
    "number": is_number,
    "integer": lambda value: is_number(value) and value == int(value),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


class _MalformedError(ValueError):
    """One line about what is wrong with a call."""


def style_of(template: str) -> Style | None:
    """The format that a chat template asks for; None where it knows no tools."""
    if "tools" not in template:
        return None
    if _OPEN in template:
        return "tags"
    return "json" if '"parameters"' in template else None


def read(text: str, style: Style | None, tools: Sequence[Mapping[str, Any]]) -> Action:
    """Reads the text of one finished turn, without its end token.

    Returns:
      An answer or a call, thinking left out; "malformed" with its `problem` where it
      tries a call and fails. Without a style, for no tools, everything is an answer.
    """
    speech = text.rpartition(_THOUGHT)[2].partition(_THINK)[0].strip()
    find = {None: lambda speech: None, "tags": _in_tags, "json": _whole_turn}[style]
    try:
        if (call := find(speech)) is None:
            return Action("answer", speech)
        name, arguments = _checked(call, style, tools)
    except _MalformedError as problem:
        return Action("malformed", text, problem=str(problem))
    return Action("call", _text(arguments), name=name, arguments=arguments)


def write(name: str, arguments: Mapping[str, Any], style: Style) -> str:
    """Returns the call as a policy would sample it."""
    key = "arguments" if style == "tags" else "parameters"
    shown = json.dumps(dict(arguments), ensure_ascii=False)
    call = f'{{"name": {json.dumps(name)}, "{key}": {shown}}}'
    return f"{_OPEN}\n{call}\n{_CLOSE}" if style == "tags" else call


def named(action: Action, tools: Sequence[Mapping[str, Any]]) -> Action:
    """A call with name and arguments, where it has only the text for the one tool.

    Raises:
      ValueError: There are several tools, or the one takes more than a text.
    """
    if action.name:
        return action
    functions = [_function(tool) for tool in tools]
    names = [name for f in functions for name in _properties(f)]
    if len(functions) != 1 or len(names) != 1:
        raise ValueError(
            f"a call of {action.text[:_SHOWN]!r} names no tool, and there are "
            f"{len(functions)} with {len(names)} parameters; give it both."
        )
    arguments = {names[0]: action.text}
    return Action("call", action.text, name=functions[0]["name"], arguments=arguments)


def _in_tags(speech: str) -> Any:
    """The call between the tags; text around them is not part of it."""
    opened, closed = speech.count(_OPEN), speech.count(_CLOSE)
    if not opened and not closed:
        return None
    if opened > 1:
        raise _MalformedError(f"{opened} calls in one turn; make one at a time")
    inside, end, _ = speech.partition(_OPEN)[2].partition(_CLOSE)
    if closed != 1 or not opened or not end:
        raise _MalformedError(f"a call stands between {_OPEN} and {_CLOSE}")
    return _loads(inside)


def _whole_turn(speech: str) -> Any:
    """The call that the whole turn is; other JSON and other text are answers."""
    tagged = speech.startswith(PYTHON_TAG)
    speech = speech.removeprefix(PYTHON_TAG).strip()
    if not tagged and not (speech.startswith("{") and '"name"' in speech):
        return None
    try:
        call, end = _DECODER.raw_decode(speech)
    except (ValueError, RecursionError):
        return _loads(speech)
    if speech[end:].lstrip("; \n").startswith("{"):
        raise _MalformedError("several calls in one turn; make one at a time")
    if speech[end:].strip("; \n"):
        raise _MalformedError(f"{_short(speech[end:])} follows the call")
    return call


def _loads(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise _MalformedError(f"the call is no JSON: {error}") from error
    except (ValueError, RecursionError) as error:  # too large a number, too deep
        raise _MalformedError("the call is no JSON that can be read") from error


def _finite(text: str) -> float:
    """A number of JSON, which has neither NaN nor infinity."""
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _checked(
    call: Any, style: Style, tools: Sequence[Mapping[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """Its name and arguments, if a tool takes them."""
    expected = "parameters" if style == "json" else "arguments"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise _MalformedError(f'a call is {{"name": ..., "{expected}": {{...}}}}')
    # Llama's models use both words.
    key = expected if expected in call or style == "tags" else "arguments"
    functions = {_function(tool)["name"]: _function(tool) for tool in tools}
    name, arguments = call["name"], call.get(key, {})
    if name not in functions:
        known = ", ".join(functions) or "none"
        raise _MalformedError(f"there is no tool {_short(name)}; there is: {known}")
    if not isinstance(arguments, dict):
        raise _MalformedError(f"{expected} of {name} must be a JSON object")
    schema = _constraints(functions[name].get("parameters"))
    properties = _properties(functions[name])
    for parameter in schema.get("required") or ():
        if parameter not in arguments:
            raise _MalformedError(f"{name} needs {parameter!r} in its {expected}")
    for parameter, value in arguments.items():
        if parameter in properties:
            constraints = _constraints(properties[parameter])
            arguments[parameter] = _value(name, parameter, value, constraints)
        elif not schema.get("additionalProperties", False):
            known = ", ".join(properties) or "nothing"
            raise _MalformedError(
                f"{name} takes {known}, there is no {_short(parameter)}"
            )
    return name, arguments


def _value(
    name: str, parameter: str, value: Any, constraints: Mapping[str, Any]
) -> Any:
    """A value that a parameter takes; 5.0 is the integer 5."""
    kinds = constraints.get("type") or list(_KINDS)
    kinds = [kinds] if isinstance(kinds, str) else kinds
    # A kind that nobody knows allows everything.
    kind = next((k for k in kinds if _KINDS.get(k, lambda value: True)(value)), None)
    if kind is None and not (value is None and constraints.get("nullable") is True):
        expected = " or ".join(kinds)
        raise _MalformedError(f"{name}: {parameter} must be of type {expected}")
    allowed = constraints.get("enum")
    if allowed is not None and value not in allowed:
        shown = ", ".join(map(str, allowed))
        raise _MalformedError(f"{name}: {parameter} must be one of {shown}")
    return int(value) if kind == "integer" else value


def _text(arguments: Mapping[str, Any]) -> str:
    values = list(arguments.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(arguments, ensure_ascii=False)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool.get("function", tool)


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return _constraints(_constraints(function.get("parameters")).get("properties"))


def _constraints(schema: Any) -> Mapping[str, Any]:
    """What a JSON schema asks for: null and true ask for nothing."""
    return schema if isinstance(schema, Mapping) else {}


def _short(text: str) -> str:
    return repr(text.strip()[:_SHOWN])
