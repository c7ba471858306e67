"""The chat template of a Hugging Face folder, as a `chat.Chat`.

Only the first prompt is rendered as a whole, equal to what `transformers` renders.
What follows an action is found by rendering a conversation with a stand-in for it and
taking the text behind: the tool's message and the next generation prompt. So nothing is
done to earlier turns; a trajectory keeps the tokens that were sampled (docs/agents.md).
Only thoughts may be taken out of a history, where the template does it (thoughts.py).
A template without a role for tools gives their answers the role of the user. Marks such
as <|im_end|> in a prompt or a tool's answer are text here, never the token, so neither
can forge a role; that is the one difference from `transformers`.
"""

import copy
import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from thundersync_jax.chat import schemas, tokenizer_files, tool_calls
from thundersync_jax.chat.base import Chat
from thundersync_jax.chat.byte_level import ByteLevel
from thundersync_jax.chat.thoughts import Thoughts, Turns
from thundersync_jax.chat.tokenizer import Tokenizer
from thundersync_jax.errors import ConfigError
from thundersync_jax.types import Action, Message

Format = Literal["auto", "bytes", "template"]
Thinking = Literal["default", "on", "off"]
_STAND_IN = "thestandinforanaction"  # neither trimmed nor escaped by any template
_ANSWER = "theanswerofatool"
# What a conversation is rendered with anyway, or another setting says.
_OWN_VARIABLES = {"messages", "tools", "add_generation_prompt", "enable_thinking"}
_END_CHARACTERS = 1000  # of a message, by which a template may tell what it is


def open_chat(
    folder: str | Path | None,
    format: Format = "auto",
    tools: Sequence[Mapping[str, Any]] = (),
    system: str | None = None,
    thinking: Thinking = "default",
    arguments: Sequence[str] = (),
    day: datetime.datetime | None = None,
    drop_thoughts: bool = False,
) -> Chat:
    """The chat of a model: its folder's template, or bytes.

    Args:
      folder: Folder of the model; None for a model without one.
      format: "auto" takes the template where there is one, and bytes where the folder
        has no tokenizer, or the byte-level one.
      tools: JSON schemas of the tools; byte-level text has no room for them.
      system: Text of the first message, if any; byte-level text has no room for it.
      thinking: Value of the template's enable_thinking; "default" leaves it out.
      arguments: Other variables of the template, as "name=value"; a value is JSON, or a
        text as it is.
      day: What the template takes for today; None for the day of this call.
      drop_thoughts: Whether thoughts leave the history where the template drops them.

    Raises:
      ConfigError: The folder has no template where one is needed, or a template that
        cannot hold the conversation.
    """
    template = folder is not None and tokenizer_files.template_of(
        Path(folder), bool(tools)
    )
    if format == "template" and not template:
        raise ConfigError(
            f"chat.format is 'template', but {folder or 'model.path none'} has no chat "
            "template. Put a chat_template.jinja there or set chat.format to 'bytes'."
        )
    if format != "bytes" and template:
        return TemplateChat(
            folder, tools, system, thinking, arguments, day, drop_thoughts
        )
    bare = format == "auto" and folder is not None
    if bare and not tokenizer_files.speaks_bytes(Path(folder)):
        raise ConfigError(
            f"{folder} has a tokenizer and no chat template; expected both, or neither "
            "for byte-level tokens. Put a chat_template.jinja there, or set "
            "chat.format to 'bytes' to train it on bytes."
        )
    unused = [("thinking", thinking, "default"), ("arguments", tuple(arguments), ())]
    unused += [("drop_thoughts", drop_thoughts, False)]
    for name, value, default in unused:
        if value != default:
            reason = f", as {folder} has no chat template" if bare else ""
            other = ", or put the model's tokenizer and template there" if bare else ""
            raise ConfigError(
                f"chat.{name} is {value!r} with byte-level tokens{reason}; only "
                f"templates know it. Set chat.{name} to {default!r}{other}."
            )
    return ByteLevel()


class TemplateChat:
    """A `chat.Chat` of a folder's tokenizer and chat template.

    Attributes:
      stop_ids: The folder's end-of-sequence ids, one or several, and what its template
        ends an assistant's turn with.
      vocab_size: One more than the largest id.
    """

    def __init__(
        self,
        folder: str | Path,
        tools: Sequence[Mapping[str, Any]] = (),
        system: str | None = None,
        thinking: Thinking = "default",
        arguments: Sequence[str] = (),
        day: datetime.datetime | None = None,
        drop_thoughts: bool = False,
    ):
        """Reads the folder and tries the template once; arguments as of `open_chat`.

        Raises:
          ConfigError: Something is missing, or the template cannot hold a conversation.
        """
        self._folder = Path(folder)
        self._tokens = Tokenizer(self._folder)
        self._first = [{"role": "system", "content": system}] if system else []
        self._thinking, self._given, self._day = thinking, arguments, day
        self._drop_thoughts = drop_thoughts
        self.vocab_size = self._tokens.vocab_size
        self.longest_token = max(map(len, self.vocabulary()))
        self._of_tools: dict[str, TemplateChat] = {}
        self._take(tools)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "TemplateChat":
        """The same chat with other tools; made once for the same ones."""
        name = json.dumps(tools, default=dict)
        if name not in self._of_tools:
            self._of_tools[name] = other = copy.copy(self)
            other._take(tools)
        return self._of_tools[name]

    def _take(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Tries the template with these tools."""
        source = tokenizer_files.template_of(self._folder, bool(tools))
        if source is None:
            raise ConfigError(
                f"{self._folder} has no chat template; add chat_template.jinja."
            )
        schemas.check(tools)
        self._tools = [dict(tool) for tool in tools]
        self._style = tool_calls.style_of(source) if tools else None
        settings = tokenizer_files.special_tokens(self._folder)
        if self._thinking != "default":
            if "enable_thinking" not in source:
                raise self._refusal(
                    f"does not know chat.thinking {self._thinking!r}",
                    "Set it to 'default'",
                )
            settings["enable_thinking"] = self._thinking == "on"
        settings |= self._arguments(self._given, source)
        settings |= {"tools": self._tools or None, "documents": None}
        self._template = functools.partial(
            tokenizer_files.compiled(source, self._folder, self._day), **settings
        )
        # Whether a turn begins in the middle of a thought.
        begins = self._render(self._user("?")).rstrip()
        self._thinks = begins.endswith(tool_calls.THINK)
        self._role = self._tool_role()
        self._end = self._end_mark()
        self.stop_ids = self._stop_ids()
        self._thoughts = self._dropped_thoughts() if self._drop_thoughts else None
        if self._tools and (self._style is None or not self._shows_tools()):
            raise self._refusal(
                "shows no tools, and the task has some",
                "Choose a model whose template knows tools, or a task without",
            )

    def prompt(self, messages: str | Sequence[Message]) -> np.ndarray:
        """Returns int32[N]; equal to what `transformers` gives for the conversation."""
        if isinstance(messages, str):
            messages = [Message("user", messages)]
        shown = [self._message(message) for message in messages]
        first = [] if shown and shown[0]["role"] == "system" else self._first
        return self._tokens.encode(self._render([*first, *shown]))

    def observation(
        self, messages: str | Sequence[Message], ended: bool = True
    ) -> np.ndarray:
        if isinstance(messages, str):
            messages = [Message("tool", messages)]
        tail = self._after_action([self._message(message) for message in messages])
        return self._tokens.encode(tail.removeprefix(self._end) if ended else tail)

    def history(self, messages: Sequence[Message], turns: Turns) -> np.ndarray | None:
        if self._thoughts is None:
            return None
        said = [self._message(_ends(message)) for message in messages]
        return self._thoughts.history(turns, said)

    def action(self, action: Action) -> np.ndarray:
        text = action.text
        if action.kind == "call" and self._style is not None:
            text = tool_calls.written(action, self._style, self._tools)
        elif action.kind != "answer":
            raise ValueError(
                f"an action of kind {action.kind!r} cannot be rendered for "
                f"{len(self._tools)} tools; expected 'answer', or 'call' with tools. "
                "Keep the sampled ids of malformed actions."
            )
        return self._tokens.encode(self._tokens.foreign(text) + self._end)

    def parse(
        self, ids: np.ndarray, stop_ids: Sequence[int], whole: bool = False
    ) -> Action:
        """Reads one sampled turn into an action with its ids.

        Thinking is left out of an answer's text. Without its end token, or with marks
        inside, it is "malformed" without a `problem`, for the environment to judge.
        """
        ids = np.asarray(ids, np.int32)
        sampled, ended = tuple(ids.tolist()), len(ids) > 0 and ids[-1] in stop_ids
        body = ids[:-1] if ended else ids
        tag = self._tokens.marks.get(tool_calls.PYTHON_TAG)
        opened = self._style == "json" and len(body) > 0 and body[0] == tag
        inside = body[1:] if opened else body
        if not (ended or whole) or np.any(self.special(inside)):
            raw = self.decode(body)
            return Action("malformed", self.decode(ids), sampled, raw=raw)
        text, thinking = self.decode(body), self._thinks
        action = tool_calls.read(text, self._style, self._tools, thinking)
        return dataclasses.replace(action, ids=sampled)

    def closing(self, ids: np.ndarray) -> np.ndarray:
        text = self.decode(ids)
        if not tool_calls.thinks(text, self._thinks):
            return np.zeros(0, np.int32)
        line = "" if text.endswith("\n") else "\n"
        return self._tokens.encode(f"{line}{tool_calls.THOUGHT}\n\n")

    def decode(self, ids: np.ndarray) -> str:
        return self._tokens.decode(ids)

    def special(self, ids: np.ndarray) -> np.ndarray:
        return self._tokens.special(ids)

    def vocabulary(self) -> dict[str, int]:
        return self._tokens.vocabulary()

    def _user(self, text: str) -> list[dict[str, str]]:
        return [*self._first, {"role": "user", "content": text}]

    def _render(self, messages: list[dict[str, str]], **settings: Any) -> str:
        return self._template(
            messages=messages, **{"add_generation_prompt": True} | settings
        )

    def _arguments(self, given: Sequence[str], source: str) -> dict[str, Any]:
        """Variables of the template by name, of those that it has."""
        arguments = {}
        for argument in given:
            name, _, value = argument.partition("=")
            if name in _OWN_VARIABLES or name not in source:
                what = "of its own" if name in _OWN_VARIABLES else "no variable"
                raise self._refusal(
                    f"has {what} {name!r}, which chat.arguments names",
                    "Take it out there",
                )
            try:
                arguments[name] = json.loads(value)
            except ValueError:
                arguments[name] = value
        return arguments

    def _message(self, message: Message) -> dict[str, str]:
        role = self._role if message.role == "tool" else message.role
        shown = {"role": role, "content": self._tokens.foreign(message.content)}
        return shown | ({"tool_call_id": message.call_id} if message.call_id else {})

    def _after_action(self, messages: Sequence[dict[str, str]]) -> str:
        """What stands behind an assistant's turn that messages answer."""
        action = {"role": "assistant", "content": _STAND_IN}
        rendered = self._render([*self._user("?"), action, *messages])
        return rendered.partition(_STAND_IN)[2]

    def _tool_role(self) -> str:
        """The role of a tool's answer: its own, or the user's where there is none.

        Some templates let nobody speak after a tool; there, too, it is the user's.
        """
        error = "it leaves the answer of a tool out"
        asked = self._user("?")
        silent = self._render(asked, add_generation_prompt=False)
        begins = self._render(asked).removeprefix(silent)
        for role in ("tool", "user"):
            try:
                tail = self._after_action([{"role": role, "content": _ANSWER}])
                if _ANSWER in tail and tail.endswith(begins):
                    return role
            except ConfigError as refusal:
                error = str(refusal)
        raise self._refusal(f"holds no conversation: {error}", "Mend the template")

    def _end_mark(self) -> str:
        """The special token that ends an assistant's turn."""
        tail = self._after_action([{"role": self._role, "content": _ANSWER}])
        marks = [mark for mark in self._tokens.marks if tail.startswith(mark)]
        if not marks:
            raise self._refusal(
                f"ends an action with {tail[:20]!r}, expected a special token",
                "Mend the template, or mark that token special in tokenizer.json",
            )
        return max(marks, key=len)

    def _stop_ids(self) -> tuple[int, ...]:
        generation = tokenizer_files.read_json(self._folder / "generation_config.json")
        end = generation.get("eos_token_id")
        if end is None:
            tokens = tokenizer_files.special_tokens(self._folder)
            name = tokens.get("eos_token", self._end)
            end = self._tokens.token_to_id(name)
            if end is None:
                raise ConfigError(
                    f"the end token {name!r} of {self._folder} has no id; expected a "
                    "token of its tokenizer.json. Correct tokenizer_config.json."
                )
        ids = end if isinstance(end, list) else [end]
        for token in ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ConfigError(
                    f"the end token {token!r} of {self._folder} is no id, expected 0 "
                    f"to {self.vocab_size - 1}. Correct eos_token_id in "
                    "generation_config.json."
                )
        return tuple(dict.fromkeys([*ids, self._tokens.marks[self._end]]))

    def _dropped_thoughts(self) -> Thoughts:
        try:
            return Thoughts(
                lambda said: self._render([*self._user("?"), *said]),
                self._tokens.encode,
                lambda ids: self._tokens.foreign(self.decode(ids)),
                self.stop_ids,
            )
        except ValueError as error:
            raise self._refusal(
                f"{error}, and chat.drop_thoughts is True", "Set it to False"
            ) from None

    def _shows_tools(self) -> bool:
        messages = self._user("?")
        return self._render(messages) != self._render(messages, tools=None)

    def _refusal(self, problem: str, way_out: str) -> ConfigError:
        return ConfigError(f"the chat template of {self._folder} {problem}. {way_out}.")


def _ends(message: Message) -> Message:
    """A message whose middle, of which no template says anything, may be left out."""
    text = message.content
    if len(text) > 2 * _END_CHARACTERS:
        text = text[:_END_CHARACTERS] + text[-_END_CHARACTERS:]
    return dataclasses.replace(message, content=text)
