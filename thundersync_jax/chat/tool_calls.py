"""Tool calls in a family's own format: read from what was sampled, checked, written.

    tags    <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Qwen, Hermes
    xml     <tool_call><function=NAME><parameter=P>...                   Qwen3-Coder
    json    {"name": ..., "parameters": {...}}, the whole turn           Llama 3.x

A call ends where its JSON ends, whatever its texts hold. What is wrong with one becomes
a line for the policy, and is never an exception.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from thundersync_jax.chat import schemas
from thundersync_jax.types import Action, Call

Style = Literal["tags", "xml", "json"]
PYTHON_TAG = "<|python_tag|>"  # what Llama may open a call with
THINK, THOUGHT = "<think>", "</think>"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# Behind a thought whose beginning nobody saw stands another line, or what it led to.
_THOUGHT_END = re.compile(re.escape(THOUGHT) + r"(?=\s*\n|\s*$|[\w{<])")
_TRIED = re.compile(r"^[ \t]*</?tool_call>|</?tool_call>[ \t]*$", re.MULTILINE)
_FIRST = re.compile(r"\s*(.?)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>)",
    re.DOTALL,
)
_FUNCTION_END = re.compile(r"</function>\s*")
_SHOWN = 60  # characters of the policy's text in a line about it


class _MalformedError(ValueError):
    """One line about what is wrong with a call."""


def style_of(template: str) -> Style | None:
    """The format that a chat template asks for; None where it knows no tools."""
    if "tools" not in template:
        return None
    if _OPEN in template:
        return "xml" if "<function=" in template else "tags"
    return "json" if '"parameters"' in template else None


def read(
    text: str,
    style: Style | None,
    tools: Sequence[Mapping[str, Any]],
    thinking: bool = False,
) -> Action:
    """Reads the text of one finished turn, without its end token.

    Args:
      text: What was sampled, as text.
      style: Format of the calls; without one, for no tools, everything is an answer.
      tools: JSON schemas of the tools.
      thinking: Whether the turn begins in the middle of a thought, which the template
        has opened.

    Returns:
      An answer or a call, with its thought apart; "malformed" with its `problem` where
      it tries calls and none is right. Of several calls each has its own.
    """
    thought, speech = _apart(text, style, thinking)
    said = {"thought": thought, "raw": text}
    try:
        found, beside = _calls(speech, style, tools)
    except _MalformedError as problem:
        return Action("malformed", text, problem=str(problem), **said)
    if not found:
        return Action("answer", speech, **said)
    said |= {"speech": beside, "calls": tuple(_made(found, style, tools))}
    good = next((call for call in said["calls"] if not call.problem), None)
    if good is None:
        return Action("malformed", text, problem=said["calls"][0].problem, **said)
    return Action("call", good.text, **said).one(good)


def thinks(text: str, thinking: bool) -> bool:
    """Whether the beginning of a turn ends in the middle of its thought."""
    return (thinking or text.lstrip().startswith(THINK)) and THOUGHT not in text


def write(name: str, arguments: Mapping[str, Any], style: Style) -> str:
    """Returns the call as a policy would sample it."""
    if style == "xml":
        parameters = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n"
            "</parameter>\n"
            for key, value in arguments.items()
        )
        return f"{_OPEN}\n<function={name}>\n{parameters}</function>\n{_CLOSE}"
    key = "arguments" if style == "tags" else "parameters"
    call = f'{{"name": {json.dumps(name)}, "{key}": {_json(dict(arguments))}}}'
    return f"{_OPEN}\n{call}\n{_CLOSE}" if style == "tags" else call


def written(action: Action, style: Style, tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns all calls of an action, as a policy would sample them."""
    calls = action.calls or (named(action, tools),)
    between = "; " if style == "json" else "\n"
    texts = [write(call.name, call.arguments, style) for call in calls]
    return between.join(filter(None, [action.speech, *texts]))


def named(action: Action, tools: Sequence[Mapping[str, Any]]) -> Action:
    """A call with name and arguments, where it has only the text for the one tool.

    Raises:
      ValueError: There are several tools, or the one takes more than a text.
    """
    if action.name:
        return action
    functions = [schemas.function(tool) for tool in tools]
    names = [name for f in functions for name in schemas.properties(f)]
    if len(functions) != 1 or len(names) != 1:
        raise ValueError(
            f"a call of {action.text[:_SHOWN]!r} names no tool, and there are "
            f"{len(functions)} with {len(names)} parameters; give it both."
        )
    arguments = {names[0]: action.text}
    return Action("call", action.text, name=functions[0]["name"], arguments=arguments)


def _apart(text: str, style: Style | None, thinking: bool) -> tuple[str, str]:
    """The thought and the speech of a turn; a thought may hold calls."""
    # Looking for them takes long where a turn repeats a tag without end.
    inside = [*_spans(text, style)] if style and THOUGHT in text else []
    opened = text.lstrip().startswith(THINK)
    end = re.compile(re.escape(THOUGHT)) if opened or thinking else _THOUGHT_END
    for match in end.finditer(text):
        if not any(start <= match.start() < stop for start, stop in inside):
            thought = text[: match.start()].strip().removeprefix(THINK)
            return thought.strip(), text[match.end() :].strip()
    if opened:  # and never closed
        return text.strip().removeprefix(THINK).strip(), ""
    return "", text.strip()


def _spans(text: str, style: Style) -> Iterator[tuple[int, int]]:
    """Where calls stand whose texts may look like anything."""
    if style == "json":
        start = len(text) - len(text.lstrip().removeprefix(PYTHON_TAG).lstrip())
        if text.startswith("{", start):
            yield start, len(text)
        return
    end = 0
    while (start := text.find(_OPEN, end)) >= 0:
        end = start + len(_OPEN)
        try:
            _, end = _value_at(text, end, style)
        except _MalformedError:
            continue
        yield start, end


def _value_at(text: str, start: int, style: Style) -> tuple[Any, int]:
    """The call that begins behind an opening tag, and where it ends."""
    if style == "xml":
        return _function_at(text, start)
    while text[start : start + 1].isspace():
        start += 1
    return _decoded(text, start)


def _function_at(text: str, start: int) -> tuple[Any, int]:
    if not (function := _FUNCTION.match(text, start)):
        raise _MalformedError("a call is <function=NAME> with <parameter=NAME> inside")
    arguments, end = {}, function.end()
    while parameter := _PARAMETER.match(text, end):
        arguments[parameter[1].strip()] = parameter[2]
        end = parameter.end()
    if not (ended := _FUNCTION_END.match(text, end)):
        raise _MalformedError("a call ends with </parameter> and </function>")
    return {"name": function[1].strip(), "arguments": arguments}, ended.end()


def _calls(
    speech: str, style: Style | None, tools: Sequence[Mapping[str, Any]]
) -> tuple[list[Any], str]:
    """All calls of a turn, as they were written, and the text beside them."""
    if style is None:
        return [], ""
    if style == "json":
        return _whole_turn(
            speech, {schemas.function(tool)["name"] for tool in tools}
        ), ""
    found, beside, end, start = [], [], 0, -1
    # At the beginning or end of a line a tag was meant as one.
    meant = {m.start() + m[0].index("<") for m in _TRIED.finditer(speech)}
    while (start := speech.find(_OPEN, max(end, start + 1))) >= 0:
        begins = _FIRST.match(speech, start + len(_OPEN))[1]
        if begins != {"tags": "{", "xml": "<"}[style] and start not in meant:
            continue  # a word of the text
        call, stop = _value_at(speech, start + len(_OPEN), style)
        rest = speech[stop:].lstrip()
        if not rest.startswith(_CLOSE):
            what, closed, _ = rest.partition(_CLOSE)
            problem = f"a call stands between {_OPEN} and {_CLOSE}"
            if closed:
                problem = f"the call is no JSON: {_short(what)} follows it"
            raise _MalformedError(problem)
        beside.append(speech[end:start])
        found += call if _several(call) else [call]
        end = len(speech) - len(rest) + len(_CLOSE)
    beside.append(speech[end:])
    if any(map(_TRIED.search, beside)):
        raise _MalformedError(f"a call stands between {_OPEN} and {_CLOSE}")
    return found, "".join(beside).strip()


def _several(call: Any) -> bool:
    return isinstance(call, list) and bool(call) and all(map(_is_call, call))


def _is_call(value: Any) -> bool:
    keys = isinstance(value, dict) and value.keys()
    return bool(keys) and "name" in keys and bool(keys & {"parameters", "arguments"})


def _whole_turn(speech: str, names: set[str]) -> list[Any]:
    """The calls that the whole turn is; other JSON and other text are answers."""
    tagged = speech.startswith(PYTHON_TAG)
    speech = speech.removeprefix(PYTHON_TAG).strip()
    if not tagged and not (speech[:1] in ("{", "[") and '"name"' in speech):
        return []
    try:
        call, end = _decoded(speech, 0)
    except _MalformedError:
        if tagged or speech[0] == "{":
            raise
        return []
    known = isinstance(call, dict) and str(call.get("name")) in names
    if not (tagged or known or _is_call(call) or _several(call)):
        return []
    found = call if _several(call) else [call]
    while rest := speech[end:].strip("; \n"):
        if not rest.startswith("{"):
            raise _MalformedError(f"{_short(rest)} follows the call")
        start = len(speech) - len(speech[end:].lstrip("; \n"))
        call, end = _decoded(speech, start)
        found.append(call)
    return found


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins there, and where it ends."""
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        read = text[start : error.pos]
        shown = json.JSONDecodeError(error.msg, read, len(read))
        raise _MalformedError(f"the call is no JSON: {shown}") from error
    except (ValueError, RecursionError) as error:  # too large a number, too deep
        raise _MalformedError("the call is no JSON that can be read") from error


def _finite(text: str) -> float:
    """A number of JSON, which has neither NaN nor infinity."""
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def _made(
    found: Sequence[Any], style: Style, tools: Sequence[Mapping[str, Any]]
) -> Iterator[Call]:
    for number, call in enumerate(found):
        name = f"call_{number}"
        try:
            tool, arguments = _checked(call, style, tools)
            yield Call(name, tool, arguments, _text(arguments))
        except _MalformedError as problem:
            yield Call(name, "", {}, _json(call), str(problem))


def _checked(
    call: Any, style: Style, tools: Sequence[Mapping[str, Any]]
) -> tuple[str, dict[str, Any]]:
    """Its name and arguments, if a tool takes them."""
    expected = "parameters" if style == "json" else "arguments"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise _MalformedError(f'a call is {{"name": ..., "{expected}": {{...}}}}')
    # Llama's models use both words.
    key = expected if expected in call or style != "json" else "arguments"
    functions = {
        schemas.function(tool)["name"]: schemas.function(tool) for tool in tools
    }
    name, arguments = call["name"], call.get(key, {})
    if name not in functions:
        known = ", ".join(functions) or "none"
        raise _MalformedError(f"there is no tool {_short(name)}; there is: {known}")
    properties = schemas.properties(functions[name])
    if arguments is None and not properties:
        arguments = {}
    if not isinstance(arguments, dict):
        raise _MalformedError(f"{expected} of {name} must be a JSON object")
    if style == "xml":
        arguments = {k: _of_text(v, properties.get(k)) for k, v in arguments.items()}
    try:
        return name, schemas.arguments(functions[name], arguments, expected)
    except schemas.SchemaError as error:
        raise _MalformedError(str(error)) from error


def _of_text(text: str, schema: Any) -> Any:
    """A value that was written without quotes: a text where its schema takes one."""
    if schemas.takes_text(schema):
        return text
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text


def _text(arguments: Mapping[str, Any]) -> str:
    values = list(arguments.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return _json(arguments)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _short(text: str) -> str:
    return repr(text.strip()[:_SHOWN])
