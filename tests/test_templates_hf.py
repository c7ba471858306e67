"""The first prompt is what `transformers` renders; folders mean the same there."""

import json

import chat_folders
import pytest
from chat_folders import CALCULATOR

from thundersync_jax.chat import byte_level
from thundersync_jax.chat.templates import TemplateChat
from thundersync_jax.envs.base import Action
from thundersync_jax.types import Message

transformers = pytest.importorskip(
    "transformers", reason="needs the extra test-hf: torch and transformers"
)

QUESTIONS = ["What is 12+7?", "  a\n\n <b>é 日本語 🙂</b>  "]


@pytest.mark.parametrize("thinking", ["default", "on", "off"])
@pytest.mark.parametrize("system", [None, "Be short; <think> first."])
@pytest.mark.parametrize("tools", [(), (CALCULATOR,)])
@pytest.mark.parametrize("family", chat_folders.FAMILIES)
def test_first_prompt_is_that_of_transformers(
    tmp_path, family, tools, system, thinking
):
    if thinking != "default" and family != "qwen3":
        return
    if tools and family == "no_tools":
        return
    folder = chat_folders.write(tmp_path / family, family)
    chat = TemplateChat(folder, tools, system, thinking)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    switch = {} if thinking == "default" else {"enable_thinking": thinking == "on"}
    settings = {"tools": list(tools) or None, "add_generation_prompt": True, **switch}
    first = [{"role": "system", "content": system}] if system else []
    for question in QUESTIONS:
        messages = [*first, {"role": "user", "content": question}]
        text = theirs.apply_chat_template(messages, tokenize=False, **settings)
        ids = theirs.apply_chat_template(messages, return_dict=False, **settings)
        assert chat.prompt(question).tolist() == ids
        assert chat.decode(ids) == text


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama3"])
def test_turns_without_thoughts_are_those_of_a_conversation_rendered_again(
    tmp_path, family
):
    """Where a template changes nothing of earlier turns, appending is the same."""
    folder = chat_folders.write(tmp_path, family)
    chat = TemplateChat(folder, (CALCULATOR,))
    call = {"name": "calculator", "arguments": {"expression": "12+7"}}
    turns = [
        {"role": "user", "content": "12+7?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "19"},
    ]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    whole = theirs.apply_chat_template(
        turns, tools=[CALCULATOR], add_generation_prompt=True, return_dict=False
    )
    action = chat.parse(chat.action(Action("call", "12+7")), chat.stop_ids)
    assert (action.kind, action.text, action.name) == ("call", "12+7", "calculator")
    pieces = chat.prompt("12+7?"), action.ids, chat.observation("19")
    assert [token for piece in pieces for token in piece] == whole


@pytest.mark.parametrize("form", ["sampled", "opened", "off"])
def test_a_history_without_thoughts_is_that_of_a_conversation_rendered_again(
    tmp_path, form
):
    """The thought is sampled as a whole, begun in the prompt, or empty there."""
    folder = chat_folders.write(tmp_path, "qwen3")
    if form == "opened":
        chat_folders.open_thoughts(folder)
    thinking = "off" if form == "off" else "default"
    chat = TemplateChat(folder, (CALCULATOR,), thinking=thinking, drop_thoughts=True)
    opened = {"sampled": "", "opened": "<think>\n", "off": "<think>\n\n</think>\n\n"}
    thought = "" if form == "off" else "<think>\nI add.\n</think>\n\n"
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}'
    texts = [f"{thought}{text}" for text in (f"{call}\n</tool_call>", " 1, é 🙂.\n")]
    sampled = [
        chat.action(Action("answer", text.removeprefix(opened[form]))) for text in texts
    ]
    answer, question = Message("tool", "1"), Message("user", "And 2?")
    turns = [
        (chat.prompt("1?"), sampled[0]),
        (chat.observation([answer]), sampled[1]),
    ]
    assert form == "off" or chat.history([answer], turns[:1]) is None
    history = chat.history([question], turns)
    messages = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": texts[0]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": texts[1]},
        {"role": "user", "content": "And 2?"},
    ]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    whole = theirs.apply_chat_template(
        messages,
        tools=[CALCULATOR],
        add_generation_prompt=True,
        return_dict=False,
        **({"enable_thinking": False} if form == "off" else {}),
    )
    assert [*history, *chat.observation([question])] == whole
    assert "I add" not in chat.decode(whole) and "é 🙂" in chat.decode(whole)


def test_byte_level_vocabulary_is_served_id_for_id(tmp_path):
    """Other programs load our tokenizer.json and mean the same ids."""
    for name, content in (
        ("tokenizer.json", byte_level.tokenizer_json()),
        ("tokenizer_config.json", byte_level.tokenizer_config()),
    ):
        (tmp_path / name).write_text(json.dumps(content))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ["12+7-3", "a\nb\x00c", "日本語 🙂 é", "  two  spaces "]:
        ids = theirs(text, add_special_tokens=False).input_ids
        assert ids == byte_level.encode(text).tolist()
        assert theirs.decode(ids) == text
    assert len(theirs) == byte_level.VOCAB_SIZE
    every = range(byte_level.VOCAB_SIZE)
    assert theirs.decode(every) == byte_level.decode(every)
    assert theirs.eos_token_id == byte_level.END
