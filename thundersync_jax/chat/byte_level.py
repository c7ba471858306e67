"""The byte-level vocabulary: 256 bytes and six special tokens.

Fixed, so that a checkpoint means the same everywhere:

    0..255  bytes of UTF-8 text        259  <tool>       an observation follows
    256     <pad>                      260  <call>       the action is a tool call
    257     <user>      prompt follows 261  <end>        ends an action
    258     <assistant> action follows 262, 263  unused (the size is a multiple of 8)

Encoding text yields bytes only: the text "<end>" is five bytes, never the token, so
neither a prompt nor a tool can forge a role. `decode` is for eyes; what was sampled
stays ids.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from thundersync_jax.types import Action, Message

BYTES = 256
PAD, USER, ASSISTANT, TOOL, CALL, END = range(BYTES, BYTES + 6)
VOCAB_SIZE = 264
MARKS = {
    token: f"<{name}>"
    for token, name in enumerate(
        ["pad", "user", "assistant", "tool", "call", "end"], PAD
    )
}


def encode(text: str | bytes) -> np.ndarray:
    """Returns int32[N], the bytes of the text; what UTF-8 cannot hold becomes "?"."""
    if isinstance(text, str):
        text = text.encode("utf-8", errors="replace")
    return np.frombuffer(text, np.uint8).astype(np.int32)


def decode(ids: Iterable[int]) -> str:
    """Returns text to look at: bytes as UTF-8 (invalid ones replaced), tokens as marks.

    Raises:
      ValueError: A negative id. Ids beyond the vocabulary, which a model with more
        rows may sample, are shown by number.
    """
    parts = bytearray()
    for token in np.asarray(ids, np.int64).tolist():
        if token < 0:
            raise ValueError(
                f"token {token} is no id; expected 0 or more. Check what produced it."
            )
        if token < BYTES:
            parts.append(token)
        else:
            parts += MARKS.get(token, f"<{token}>").encode()
    return parts.decode("utf-8", errors="replace")


def vocabulary() -> dict[str, int]:
    """Every token by a name of its own: `<0x41>` for byte 65, marks as they are."""
    return {f"<0x{byte:02X}>": byte for byte in range(BYTES)} | {
        mark: token for token, mark in MARKS.items()
    }


def tokenizer_json() -> dict[str, Any]:
    """This vocabulary as tokenizer.json of the `tokenizers` library, id for id.

    It lets other programs serve a model of ours. There the text "<end>" is the token;
    here it is five bytes, so send ids, never text. The two unused ids have names too.
    """
    added = MARKS | {token: f"<{token}>" for token in range(END + 1, VOCAB_SIZE)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    no_words = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": mark, **flags, "special": True}
            for token, mark in added.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **no_words},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **no_words},
        "model": {
            "type": "BPE",
            "vocab": {letter: byte for byte, letter in enumerate(_byte_letters())},
            "merges": [],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """Returns tokenizer_config.json, which goes with it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": MARKS[END],
        "pad_token": MARKS[PAD],
        "clean_up_tokenization_spaces": False,
    }


def _byte_letters() -> str:
    """Letters of bytes in that library: visible Latin-1, U+0100 on for the others."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(b if b in seen else next(others)) for b in range(BYTES))


def render_prompt(text: str) -> np.ndarray:
    """Returns int32[N], the prompt and the token after which the policy acts."""
    return _join(USER, text, ASSISTANT)


def render_observation(text: str) -> np.ndarray:
    """Returns int32[N], the tool's answer and the token after which the policy acts."""
    return _join(TOOL, text, ASSISTANT)


def render_action(action: Action) -> np.ndarray:
    """As `Chat.action` says."""
    if action.kind == "answer":
        return _join(None, action.text, END)
    if action.kind == "call":
        return _join(CALL, action.text, END)
    raise ValueError(
        f"an action of kind {action.kind!r} cannot be rendered; expected 'answer' or "
        "'call'. Keep the sampled ids of malformed actions."
    )


def parse_action(
    ids: Sequence[int] | np.ndarray,
    stop_ids: Sequence[int] = (END,),
    whole: bool = False,
) -> Action:
    """Reads one sampled turn, int[N] up to and with its end token, any of `stop_ids`.

    A `whole` one was ended by a text of its own and has none.

    Returns:
      The action with its ids: a "call" where `<call>` is the first token, an "answer"
      where there is none, and "malformed" where the end token is missing (the length
      limit came first) or any other special token stands inside.
    """
    ids = np.asarray(ids, np.int32)
    sampled, kind = tuple(ids.tolist()), "answer"
    ended = len(ids) > 0 and ids[-1] in stop_ids
    body = ids[:-1] if ended else ids
    raw = decode(body)
    if len(body) and body[0] == CALL:
        kind, body = "call", body[1:]
    if not (ended or whole) or np.any(body >= BYTES):
        return Action("malformed", decode(ids), sampled, raw=raw)
    return Action(kind, decode(body), sampled, raw=raw)


def _join(first: int | None, text: str, last: int) -> np.ndarray:
    start = [] if first is None else [first]
    return np.concatenate([start, encode(text), [last]]).astype(np.int32)


def _lines(messages: str | Sequence[Message]) -> str:
    if isinstance(messages, str):
        return messages
    return "\n".join(message.content for message in messages)


class ByteLevel:
    """A `Chat` of bytes and a few marks; it knows one tool, without a name."""

    stop_ids = (END,)
    longest_token = 1
    action = staticmethod(render_action)
    parse = staticmethod(parse_action)
    decode = staticmethod(decode)
    vocabulary = staticmethod(vocabulary)

    def prompt(self, messages: str | Sequence[Message]) -> np.ndarray:
        """Messages are lines of one prompt, whoever speaks."""
        return render_prompt(_lines(messages))

    def observation(
        self, messages: str | Sequence[Message], ended: bool = True
    ) -> np.ndarray:
        """Messages are lines of one answer, whoever speaks.

        A cut action needs no end token: <tool> cannot be taken for text.
        """
        return render_observation(_lines(messages))

    def history(
        self,
        messages: Sequence[Message],
        turns: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """None: it knows no thoughts."""

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "ByteLevel":
        """Itself: its one tool has no name and no schema."""
        return self

    def closing(self, ids: np.ndarray) -> np.ndarray:
        """Nothing: it knows no thoughts."""
        return np.zeros(0, np.int32)

    def special(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(ids) >= BYTES
