"""Tool calls in a family's format: one is read, anything else is told to the policy."""

import json
import time

import hypothesis
import pytest
from chat_folders import CALCULATOR
from hypothesis import strategies as st

from thundersync_jax.chat import schemas, tool_calls
from thundersync_jax.envs.base import Action
from thundersync_jax.errors import ConfigError

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
    assert action.call_id == action.calls[0].id


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


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"enum": [1, 2]}, "true", "f: x must be one of 1, 2"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": [True]}, "1", "f: x must be one of True"),
        ({"type": "array", "items": {"type": "integer"}}, "[1, 2.0]", [1, 2]),
        (
            {"type": "array", "items": {"type": "integer"}},
            '[1, "a"]',
            "f: x[1] must be of type integer",
        ),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5.0", 5),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        (
            {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            '"a"',
            "f: x must be of type integer",
        ),
        (
            {"properties": {"y": {"type": "integer"}}, "required": ["y"]},
            "{}",
            "f: x needs 'y'",
        ),
        ({"properties": {"y": {"type": "integer"}}}, '{"y": 1.0, "z": 2}', None),
    ],
)
def test_schemas_are_followed_into_lists_and_objects(schema, value, expected):
    found = read_value(schema, value)
    expected = {"y": 1, "z": 2} if "properties" in schema and "z" in value else expected
    assert (type(found), found) == (type(expected), expected)


LITERALS = [
    "echo </tool_call> test",
    "echo '<tool_call>'",
    "echo '<tool_call>{\"a\": 1}</tool_call>'",
    "grep '</think>' a.py",
    "grep '<think>' a.py",
    "grep '<think>x</think>' a.py\n</think>\nls",
    "<function=bash></function></tool_call>\n</parameter>x",
    '"{}\\"',
]
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {
            "type": "object",
            "properties": {"cmd": {"type": "string"}, "secs": {"type": "number"}},
            "required": ["cmd"],
        },
    },
}
THOUGHTS = ["", "<think>\nI'll use <tool_call>.\n</think>\n\n", "thought\n</think>\n"]


@pytest.mark.parametrize("command", LITERALS)
@pytest.mark.parametrize("thought", THOUGHTS)
@pytest.mark.parametrize("style", ["tags", "xml", "json"])
def test_a_call_may_hold_any_text(style, thought, command):
    text = thought + tool_calls.write("bash", {"cmd": command, "secs": 2.5}, style)
    for thinking in (False, True) if "</think>" in thought else (False,):
        action = tool_calls.read(text, style, [BASH], thinking)
        assert (action.kind, action.problem) == ("call", "")
        assert action.arguments == {"cmd": command, "secs": 2.5}
        assert ("use <tool_call>" in action.thought) == ("use" in thought)


@pytest.mark.parametrize(
    "text",
    [
        "Use the <think> tag, then answer.",
        "Close it with </think> and go on.",
        "Write `<tool_call>` before the JSON.",
        "It ends with `</tool_call>`, as XML does.",
        "The tags <tool_call> and </tool_call> hold a call.",
    ],
)
@pytest.mark.parametrize("style", [None, "tags", "xml", "json"])
def test_an_answer_may_speak_of_tags(style, text):
    assert tool_calls.read(text, style, TOOLS) == Action("answer", text)


@pytest.mark.parametrize(
    ("text", "thinking", "thought", "answer"),
    [
        ("<think>\na\n</think>\n\n19", False, "a", "19"),
        ("a </think> b", False, "", "a </think> b"),
        ("a </think> b", True, "a", "b"),
        ("a</think>b</think>c", True, "a", "b</think>c"),
        ("no end", True, "", "no end"),
        ("<think>no end", False, "no end", ""),
        ("<think>a<think>b</think>c", False, "a<think>b", "c"),
    ],
)
def test_a_thought_ends_at_the_first_closing_tag(text, thinking, thought, answer):
    action = tool_calls.read(text, None, (), thinking)
    assert (action.kind, action.thought, action.text) == ("answer", thought, answer)
    assert action.raw == text


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("tags", tags(ONE) + "\n" + tags(ask("search", {"query": "a"}))),
        ("tags", tags(f"[{ONE}, {ask('search', {'query': 'a'})}]")),
        ("json", f"{LLAMA}; " + ask("search", {"query": "a"}, "parameters")),
        ("json", f"{LLAMA}\n" + ask("search", {"query": "a"}, "parameters")),
        ("json", f"[{LLAMA}, {ask('search', {'query': 'a'})}]"),
    ],
)
def test_several_calls_come_in_order_each_by_itself(style, text):
    action = tool_calls.read(text, style, TOOLS)
    assert action.kind == "call" and action.name == "calculator"
    assert [(c.id, c.name, c.text) for c in action.calls] == [
        ("call_0", "calculator", "1+2"),
        ("call_1", "search", "a"),
    ]
    one = action.one(action.calls[1])
    assert (one.name, one.text, one.call_id) == ("search", "a", "call_1")
    again = tool_calls.read(tool_calls.written(action, style, TOOLS), style, TOOLS)
    assert again.calls == action.calls


def test_one_malformed_call_among_others_has_its_own_reason():
    text = f"Both:\n{tags(ask('bash', {}))}\n{tags(ONE)}\nnow"
    action = tool_calls.read(text, "tags", TOOLS)
    assert (action.kind, action.name) == ("call", "calculator")
    assert action.speech.split() == ["Both:", "now"]
    assert [bool(call.problem) for call in action.calls] == [True, False]
    bad = action.one(action.calls[0])
    assert bad.kind == "malformed" and "no tool 'bash'" in bad.problem


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        '[{"answer": 3}]',
        '{"name": "Bob", "age": 3}',
        '[{"name": "Bob"}]',
        '[{"name":',
    ],
)
def test_json_that_is_no_call_is_an_answer(text):
    assert tool_calls.read(text, "json", TOOLS) == Action("answer", text)


@pytest.mark.parametrize(
    ("parameters", "arguments", "problem"),
    [
        ({"type": "object"}, {"x": 1}, ""),
        ({}, {"x": 1}, ""),
        ({"properties": {}}, {"x": 1}, "f takes nothing, there is no 'x'"),
        ({"properties": {}, "additionalProperties": True}, {"x": 1}, ""),
        ({"additionalProperties": False}, {"x": 1}, "f takes nothing, there is no 'x'"),
        ({"properties": {}}, None, ""),
        (None, None, ""),
        ({"properties": {"x": {}}}, None, "arguments of f must be a JSON object"),
        ({"properties": {"x": {}}}, '{"x": 1}', "arguments of f must be a JSON object"),
    ],
)
@pytest.mark.parametrize("key", ["parameters", "input_schema"])
def test_a_schema_without_properties_takes_any(key, parameters, arguments, problem):
    tool = {"name": "f", key: parameters}
    assert tool_calls.read(tags(ask("f", arguments)), "tags", [tool]).problem == problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>\n<function=bash>\n</function>\n</tool_call>", "needs 'cmd'"),
        ("<tool_call>\n<function=bash>\n<parameter=cmd>ls", "ends with </parameter>"),
        ("<tool_call>\nbash ls\n</tool_call>", "a call is <function=NAME>"),
        (
            "<tool_call>\n<function=bash>\n<parameter=cmd>\nls\n</parameter>\n"
            "<parameter=secs>\nsoon\n</parameter>\n</function>\n</tool_call>",
            "secs must be of type number",
        ),
    ],
)
def test_a_call_in_xml_that_fails_says_why(text, problem):
    action = tool_calls.read(text, "xml", [BASH])
    assert action.kind == "malformed" and problem in action.problem


def test_the_style_is_that_of_the_template():
    shown = "{% if tools %}<tool_call>{{ tools }}"
    assert tool_calls.style_of(shown) == "tags"
    assert tool_calls.style_of(shown + "<function=example>") == "xml"
    assert tool_calls.style_of('{{ tools }} {"name", "parameters"}') == "json"
    assert tool_calls.style_of("{{ messages }}") is None


ODD = [None, True, 5, -1.5, "a", [], {}, [1], [None], [{}], [[1]], {"x": True}]
WORDS = ["type", "enum", "anyOf", "oneOf", "items", "required", "properties"]
WORDS += ["nullable", "additionalProperties", "x"]
SCHEMAS = st.recursive(
    st.sampled_from([*ODD, "string", ["string", "null"], {"type": "string"}]),
    lambda inner: st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=8,
)
VALUES = st.sampled_from([None, "a", 1, 2.0, True, [1], {"a": 1}, {"x": "a"}, [], {}])


@hypothesis.given(SCHEMAS, VALUES, st.sampled_from(["parameters", "input_schema"]))
def test_no_schema_is_an_exception(schema, value, word):
    """It ended all agents of a step (huggingface/smolagents#1538)."""
    for parameters in (schema, {"type": "object", "properties": {"x": schema}}):
        tool = {"name": "f", word: parameters}
        for arguments in (value, {"x": value}):
            action = tool_calls.read(tags(ask("f", arguments)), "tags", [tool])
            assert action.kind in ("call", "malformed")
        xml = f"<tool_call><function=f><parameter=x>{value}</parameter></function>"
        assert tool_calls.read(f"{xml}</tool_call>", "xml", [tool]).kind != "answer"


@pytest.mark.parametrize("word", ["parameters", "input_schema"])
def test_what_draft_3_says_at_a_parameter_asks_for_nothing(word):
    schema = {"properties": {"x": {"type": "object", "required": True}}}
    tool = {"name": "f", word: schema}
    action = tool_calls.read(tags(ask("f", {"x": {}})), "tags", [tool])
    assert action.arguments == {"x": {}}


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "\n",
    "{",
    "}",
    '"name"',
]
PIECES += [
    ": ",
    '"bash"',
    ", ",
    '{"cmd": "a"}',
    "[",
    "]",
    '"arguments"',
    "x",
    ";",
    "\\",
]
PIECES += [
    '{"name": "calculator", "arguments": {"expression": "</think>"}}',
    '"',
    "NaN",
]
PIECES += ["<function=calculator>", "<parameter=expression>", "</parameter>", "\ud800"]
PIECES += ["</function>", "<|python_tag|>", "1e999", "é", " "]


@hypothesis.given(
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.sampled_from([None, "tags", "xml", "json"]),
    st.booleans(),
)
def test_every_text_is_an_answer_or_calls_or_told(text, style, thinking):
    action = tool_calls.read(text, style, TOOLS, thinking)
    assert action.raw == text
    assert (action.kind == "malformed") == bool(action.problem)
    assert len(action.problem) < 200 and "\n" not in action.problem
    if action.kind == "call" and not any(call.problem for call in action.calls):
        again = tool_calls.read(tool_calls.written(action, style, TOOLS), style, TOOLS)
        assert [(call.name, call.arguments) for call in again.calls] == [
            (call.name, call.arguments) for call in action.calls
        ]


@pytest.mark.parametrize("style", ["tags", "xml", "json"])
@pytest.mark.parametrize(
    "piece", ["<tool_call>", "<tool_call>\n", "<tool_call>{", "</think>", "<function="]
)
def test_a_turn_that_repeats_itself_is_read_at_once(style, piece):
    """All agents wait for it; with time in the square of the text, for minutes."""

    def secs(times):
        start = time.perf_counter()
        tool_calls.read(piece * times, style, TOOLS)
        return time.perf_counter() - start

    assert min(secs(20_000) for _ in range(3)) < 0.5


def test_what_is_no_tool_is_refused():
    for wrong in (5, {}, {"function": 5}, {"name": ""}, {"function": {"name": [1]}}):
        with pytest.raises(ConfigError, match="expected an object with a name"):
            schemas.check([CALCULATOR, wrong])
    with pytest.raises(ConfigError, match="two tools named 'calculator'"):
        schemas.check([CALCULATOR, SEARCH, CALCULATOR])
    schemas.check(TOOLS)
