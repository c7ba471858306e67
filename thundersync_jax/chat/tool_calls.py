"""Tool calls in a family's own format: read from what was sampled, checked, written.

    tags    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Qwen, Hermes
    json    {"name": ..., "parameters": {...}}, the whole turn           Llama 3.x

A turn makes one call. What is wrong with another one is said in a line for the policy,
and is never an exception.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from thundersync_jax.types import Action

Style = Literal["tags", "json"]
PYTHON_TAG = "<|python_tag|>"  # what Llama may open a call with
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _THOUGHT = "<think>", "</think>"
_SHOWN = 60  # characters of what the policy said, when it is told of it
_KINDS = {
    "string": str,
    "number": int | float,
    "integer": int,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class _MalformedError(ValueError):
    """Says in one line what is wrong with a call."""


def style_of(template: str) -> Style | None:
    """The format that a chat template asks for; None where it knows no tools."""
    if "tools" not in template:
        return None
    if _OPEN in template:
        return "tags"
    return "json" if '"parameters"' in template else None


def read(text: str, style: Style | None, tools: Sequence[Mapping[str, Any]]) -> Action:
    """Reads the text of one finished turn, without its end token.

    Args:
      text: What was sampled.
      style: None where there are no tools: everything is an answer.
      tools: Their JSON schemas.

    Returns:
      An answer or a call, thinking left out; "malformed" with its `problem` where it
      tries a call and fails.
    """
    said = _without_thinking(text)
    try:
        call = {None: _no_call, "tags": _in_tags, "json": _bare}[style](said)
        if call is None:
            return Action("answer", said)
        name, arguments = _checked(call, style, tools)
    except _MalformedError as problem:
        return Action("malformed", text, problem=str(problem))
    return Action("call", _asked(arguments), name=name, arguments=arguments)


def write(name: str, arguments: Mapping[str, Any], style: Style) -> str:
    """Returns the call as a policy would sample it."""
    given = json.dumps(dict(arguments), ensure_ascii=False)
    if style == "tags":
        call = f'{{"name": {json.dumps(name)}, "arguments": {given}}}'
        return f"{_OPEN}\n{call}\n{_CLOSE}"
    return f'{{"name": {json.dumps(name)}, "parameters": {given}}}'


def named(action: Action, tools: Sequence[Mapping[str, Any]]) -> Action:
    """A call with name and arguments, where it says only what the one tool is asked.

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


def _without_thinking(text: str) -> str:
    """What is said after the last thought; nothing of one that goes on."""
    return text.rpartition(_THOUGHT)[2].partition(_THINK)[0].strip()


def _no_call(said: str) -> None:
    return None


def _in_tags(said: str) -> Any:
    """The call between the tags; text around them is not part of it."""
    opened, closed = said.count(_OPEN), said.count(_CLOSE)
    if not opened and not closed:
        return None
    if opened > 1:
        raise _MalformedError(f"{opened} calls in one turn; make one at a time")
    inside, end, _ = said.partition(_OPEN)[2].partition(_CLOSE)
    if closed != 1 or not opened or not end:
        raise _MalformedError(f"a call stands between {_OPEN} and {_CLOSE}")
    return _loads(inside)


def _bare(said: str) -> Any:
    """The call that the whole turn is; other JSON and other text are answers."""
    tagged = said.startswith(PYTHON_TAG)
    said = said.removeprefix(PYTHON_TAG).strip()
    if not tagged and not (said.startswith("{") and '"name"' in said):
        return None
    try:
        call, end = json.JSONDecoder().raw_decode(said)
    except (ValueError, RecursionError):
        return _loads(said)
    if said[end:].lstrip("; \n").startswith("{"):
        raise _MalformedError("several calls in one turn; make one at a time")
    if said[end:].strip("; \n"):
        raise _MalformedError(f"{_short(said[end:])} follows the call")
    return call


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _MalformedError(f"the call is no JSON: {error}") from error
    except (ValueError, RecursionError) as error:  # too long a number, too deep
        raise _MalformedError("the call is no JSON that can be read") from error


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
    schema = functions[name].get("parameters", {})
    properties = _properties(functions[name])
    for parameter in schema.get("required", ()):
        if parameter not in arguments:
            raise _MalformedError(f"{name} needs {parameter!r} in its {expected}")
    for parameter, value in arguments.items():
        if parameter in properties:
            _check_value(name, parameter, value, properties[parameter])
        elif not schema.get("additionalProperties", False):
            known = ", ".join(properties) or "nothing"
            raise _MalformedError(
                f"{name} takes {known}, there is no {_short(parameter)}"
            )
    return name, arguments


def _check_value(name: str, parameter: str, value: Any, schema: Any) -> None:
    kinds = schema.get("type", list(_KINDS))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is(value, kind) for kind in kinds):
        expected = " or ".join(kinds)
        raise _MalformedError(f"{name}: {parameter} must be of type {expected}")
    if value not in schema.get("enum", [value]):
        allowed = ", ".join(map(str, schema["enum"]))
        raise _MalformedError(f"{name}: {parameter} must be one of {allowed}")


def _is(value: Any, kind: str) -> bool:
    # Of Python's numbers true and false are two; of JSON's they are none.
    if isinstance(value, bool) and kind != "boolean":
        return False
    return isinstance(value, _KINDS.get(kind, object))


def _asked(arguments: Mapping[str, Any]) -> str:
    values = list(arguments.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(arguments, ensure_ascii=False)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool.get("function", tool)


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters", {}).get("properties", {})


def _short(said: str) -> str:
    return repr(said.strip()[:_SHOWN])
