"""Tool calls in a family's format: one is read, anything else is told to the policy."""

import json

import pytest
from chat_folders import CALCULATOR

from thundersync_jax.chat import tool_calls
from thundersync_jax.envs.base import Action

SEARCH = {
    "name": "search",
    "parameters": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "results": {"type": "integer"},
            "order": {"type": "string", "enum": ["date", "rank"]},
        },
        "required": ["query"],
    },
}
TOOLS = (CALCULATOR, SEARCH)


def tags(call):
    return f"<tool_call>\n{call}\n</tool_call>"


def ask(name, arguments, key="arguments"):
    return json.dumps({"name": name, key: arguments})


ONE = ask("calculator", {"expression": "1+2"})
LLAMA = ask("calculator", {"expression": "1+2"}, "parameters")


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("tags", tags(ONE)),
        ("tags", f"I compute.\n{tags(ONE)}\n"),
        ("tags", f"<tool_call>{ONE}</tool_call>"),
        ("tags", f"<think>{tags(ONE)} or</think>\n\n{tags(ONE)}"),
        ("json", LLAMA),
        ("json", f"  {LLAMA};\n"),
        ("json", f"<|python_tag|>{LLAMA}"),
        ("json", ONE),
    ],
)
def test_one_call_is_read(style, text):
    action = tool_calls.read(text, style, TOOLS)
    assert (action.kind, action.text, action.name) == ("call", "1+2", "calculator")
    assert action.arguments == {"expression": "1+2"}


def test_several_arguments_are_their_json():
    arguments = {"query": "é", "results": 3, "order": "rank"}
    action = tool_calls.read(tags(ask("search", arguments)), "tags", TOOLS)
    assert action.arguments == json.loads(action.text) == arguments


@pytest.mark.parametrize("style", ["tags", "json"])
def test_what_is_written_is_read(style):
    text = tool_calls.write("search", {"query": 'a "b"\n</é>'}, style)
    assert tool_calls.read(text, style, TOOLS).text == 'a "b"\n</é>'


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (None, tags(ONE)),
        (None, LLAMA),
        ("tags", LLAMA),
        ("json", "The answer is 3."),
        ("json", f"First {LLAMA}"),
        ("json", '{"answer": 3}'),
        ("json", "{3}"),
        ("json", ""),
    ],
)
def test_anything_else_is_an_answer(style, text):
    assert tool_calls.read(text, style, TOOLS) == Action("answer", text)


DEEP = 100_000


@pytest.mark.parametrize(
    ("style", "text", "problem"),
    [
        ("tags", tags(ONE) * 2, "2 calls in one turn"),
        ("tags", f"<tool_call>{ONE}", "between <tool_call> and </tool_call>"),
        ("tags", f"{ONE}</tool_call>", "between <tool_call> and </tool_call>"),
        ("tags", f"</tool_call>{tags(ONE)}", "between <tool_call> and </tool_call>"),
        ("tags", tags("calculator(1+2)"), "no JSON"),
        ("tags", tags("[" * DEEP), "no JSON"),
        ("tags", tags('{"name": "calculator", "n": ' + "9" * DEEP + "}"), "no JSON"),
        ("tags", tags("[1]"), 'a call is {"name": ..., "arguments": {...}}'),
        ("tags", tags('"a"'), 'a call is {"name": ..., "arguments": {...}}'),
        ("tags", tags('{"name": 3}'), "a call is"),
        ("tags", tags(ask("bash", {})), "no tool 'bash'; there is: calculator, search"),
        ("tags", tags(ask("bash" * 99, {})), "no tool 'bashbash"),
        ("tags", tags(ask("calculator", "1+2")), "arguments of calculator must be"),
        ("tags", tags(ask("calculator", {})), "needs 'expression'"),
        ("tags", tags('{"name": "calculator"}'), "needs 'expression'"),
        (
            "tags",
            tags(ask("calculator", {"expression": 3})),
            "expression must be of type string",
        ),
        (
            "tags",
            tags(ask("calculator", {"expression": "1", "base": 2})),
            "takes expression, there is no 'base'",
        ),
        ("tags", tags(ask("search", {"query": "a", "results": True})), "type integer"),
        ("tags", tags(ask("search", {"query": "a", "results": 1.5})), "type integer"),
        ("tags", tags(ask("search", {"query": "a", "order": "x"})), "of date, rank"),
        ("json", f"{LLAMA}; {LLAMA}", "several calls in one turn"),
        ("json", f"{LLAMA}\n{LLAMA}", "several calls in one turn"),
        ("json", f"{LLAMA} and so on", "'and so on' follows the call"),
        ("json", LLAMA[:-1], "no JSON"),
        ("json", '<|python_tag|>calculator.call("1+2")', "no JSON"),
        ("json", "<|python_tag|>3", 'a call is {"name": ..., "parameters": {...}}'),
        ("json", '{"name": ' + "[" * DEEP, "no JSON"),
    ],
)
def test_a_call_that_fails_says_why(style, text, problem):
    action = tool_calls.read(text, style, TOOLS)
    assert (action.kind, action.text) == ("malformed", text)
    assert problem in action.problem
    assert len(action.problem) < 160 and "\n" not in action.problem


def test_a_text_is_a_call_of_the_one_tool_that_takes_one():
    action = tool_calls.named(Action("call", "1+2"), (CALCULATOR,))
    assert (action.name, action.arguments) == ("calculator", {"expression": "1+2"})
    given = Action("call", "", name="search", arguments={"query": "a"})
    assert tool_calls.named(given, TOOLS) == given
    for tools in (TOOLS, (SEARCH,), ()):
        with pytest.raises(ValueError, match="give it both"):
            tool_calls.named(Action("call", "1+2"), tools)


def read_value(schema, value):
    """What a tool gets whose one parameter has this schema, or the refusal."""
    parameters = {"type": "object", "properties": {"x": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = tags(f'{{"name": "f", "arguments": {{"x": {value}}}}}')
    action = tool_calls.read(text, "tags", [tool])
    return action.problem or action.arguments["x"]


@pytest.mark.parametrize(
    "function",
    [
        {"parameters": None},
        {"parameters": {"properties": None}},
        {"parameters": {"properties": {"x": True}, "required": None}},
        {"parameters": {"properties": {"x": None}}},
    ],
)
def test_an_empty_schema_asks_for_nothing_and_raises_nothing(function):
    tool = {"type": "function", "function": {"name": "f"} | function}
    assert tool_calls.read(tags(ask("f", {})), "tags", [tool]).kind == "call"
    action = tool_calls.read(tags(ask("f", {"x": "a"})), "tags", [tool])
    takes_x = "x" in ((function["parameters"] or {}).get("properties") or {})
    assert action.problem == ("" if takes_x else "f takes nothing, there is no 'x'")


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (True, '"a"', "a"),
        ({"type": None}, '"a"', "a"),
        ({"type": "string", "enum": None}, '"a"', "a"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": False}, "null", "f: x must be of type string"),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "1e3", 1000),
        ({"type": "integer"}, "5.5", "f: x must be of type integer"),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "number"}, "NaN", "the call is no JSON that can be read"),
        ({"type": "number"}, "-Infinity", "the call is no JSON that can be read"),
        ({"type": "number"}, "1e999", "the call is no JSON that can be read"),
        ({}, '{"y": [NaN]}', "the call is no JSON that can be read"),
    ],
)
def test_values_are_those_of_json_and_its_schemas(schema, value, expected):
    found = read_value(schema, value)
    assert (type(found), found) == (type(expected), expected)
