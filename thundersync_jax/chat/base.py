"""How text becomes token ids, and sampled ids become actions: the interface.

A trajectory is appended to and never rendered again: the prompt as a whole once, then
per turn the ids that were sampled and the ids of what follows them. Where the template
takes thoughts out of earlier turns, `history` does (chat.drop_thoughts). The byte-level
vocabulary is `byte_level.ByteLevel`, that of a model folder `templates.TemplateChat`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from thundersync_jax.types import Action, Message, Trajectory

ROLES = ("system", "user", "assistant", "tool")
_FIELDS = {"role", "content", "call_id"}
_CHARACTERS_PER_TOKEN = 8  # more than of most texts
_MARGIN_TOKENS = 2


class Chat(Protocol):
    """What the host needs of a tokenizer and the format around it."""

    stop_ids: tuple[int, ...]  # the end tokens, any of which ends an action
    longest_token: int  # most characters of a text that one token stands for

    def prompt(self, messages: str | Sequence[Message]) -> np.ndarray:
        """Returns int32[N], the prompt and what the policy acts after.

        A text is what the user says.
        """

    def observation(
        self, messages: str | Sequence[Message], ended: bool = True
    ) -> np.ndarray:
        """Returns int32[N], what follows an action: the answer, then the next turn.

        Args:
          messages: The answer, one message or more; a text is that of a tool.
          ended: Whether the action ended in one of `stop_ids`. Otherwise the end token
            is supplied here where the format needs it: observed, so never trained.
        """

    def history(
        self,
        messages: Sequence[Message],
        turns: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> np.ndarray | None:
        """Returns int32[N], earlier turns as they stand before messages that follow.

        None where they stay as they were sampled.

        Args:
          messages: What follows the last of them.
          turns: Ids that were shown before an action, and those of the action.
        """

    def action(self, action: Action) -> np.ndarray:
        """Returns int32[N], what a policy would sample for it, end token included.

        Raises:
          ValueError: A malformed action, which has no rendering.
        """

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "Chat":
        """The same chat for a task that has tools of its own."""

    def parse(
        self, ids: np.ndarray, stop_ids: Sequence[int], whole: bool = False
    ) -> Action:
        """Reads one sampled turn, int[N] up to and with its end token.

        A `whole` one was ended by a text of its own and has none.
        """

    def closing(self, ids: np.ndarray) -> np.ndarray:
        """Returns int32[N], what closes the thought in which sampled ids end, if any.

        Empty where they end in none.
        """

    def decode(self, ids: np.ndarray) -> str:
        """Returns text to look at."""

    def special(self, ids: np.ndarray) -> np.ndarray:
        """Returns bool[N], True at marks that no text becomes."""

    def vocabulary(self) -> dict[str, int]:
        """Every token by its name."""


def conversation(said: Any) -> str | tuple[Message, ...]:
    """A prompt as chats take it: a text, or messages, which may come as mappings.

    Raises:
      ValueError: It is neither, or a message without a role that there is.
    """
    if isinstance(said, str):
        return str.__str__(said)  # a subclass may do as it likes where it is encoded
    messages = []
    for message in said if isinstance(said, Sequence) and len(said) else [said]:
        if (
            isinstance(message, Mapping)
            and {"role", "content"} <= message.keys() <= _FIELDS
        ):
            message = Message(**message)
        known = isinstance(message, Message) and message.role in ROLES
        if not (known and isinstance(message.content, str)):
            raise ValueError(
                f"{message!r:.80}, expected the prompt's text, or messages with a role "
                f"({', '.join(ROLES)}) and a content"
            )
        content = str.__str__(message.content)
        messages.append(Message(message.role, content, message.call_id))
    return tuple(messages)


def reply(action: Action, observation: str) -> Sequence[Message]:
    """What an environment's text is to an action, as a conversation has it."""
    return [Message("tool" if action.kind == "call" else "user", observation)]


def cut(text: str, most: int, tokens: Callable[[str], int]) -> str:
    """A text of at most `most` tokens: itself, or its head and its tail.

    Between them stands how much is left out. `tokens` counts those of a text, and is
    never asked about much more than fits. Empty where not even that line fits.
    """
    kept = min(len(text), _CHARACTERS_PER_TOKEN * most)
    while kept > 0:
        head, tail = text[: kept - kept // 2], text[len(text) - kept // 2 :]
        gone = len(text) - kept
        shown = f"{head}\n[{gone} characters left out]\n{tail}" if gone else text
        if tokens(shown) <= most:
            return shown
        kept = kept * 4 // 5
    return ""


@dataclasses.dataclass(frozen=True)
class StopTexts:
    """Texts that end an action as soon as one of them has been sampled."""

    texts: tuple[str, ...]
    decode: Callable[[np.ndarray], str]  # of ids, as `Chat.decode`
    # Of the same action, sampled before and without any of the texts.
    before: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(0, np.int32), compare=False
    )

    def end(self, ids: np.ndarray, seen: int = 0) -> int | None:
        """How many of int[N] ids it takes to have one of the texts; None where none is.

        The first `seen` ids are known to have none. A token is never cut: the last one
        may hold more than the end of a text.
        """
        # A token has a byte of the text at least; decoders drop a space at a beginning.
        reach = max(len(text.encode()) for text in self.texts) + _MARGIN_TOKENS
        before = len(self.before)
        ids, seen = np.concatenate([self.before, ids]), before + seen
        start = max(0, seen - reach)

        def has(end: int) -> bool:
            shown = self.decode(ids[start:end])
            return any(text in shown for text in self.texts)

        if not has(len(ids)):
            return None
        end = next(end for end in range(seen + 1, len(ids) + 1) if has(end))
        return end - before


class Piece(NamedTuple):
    """A run of tokens alike in being trained and in being special."""

    tokens: int
    special: bool
    text: str


def pieces(chat: Chat, trajectory: Trajectory) -> list[Piece]:
    """Cuts a trajectory where its loss mask changes and where special tokens stand.

    And where another sample begins.
    """
    ids = np.asarray(trajectory.ids)
    if not len(ids):
        return []
    mask = np.asarray(trajectory.loss_mask, bool)
    special = np.asarray(chat.special(ids), bool)
    edges = (mask[1:] != mask[:-1]) | (special[1:] != special[:-1])
    edges[np.asarray(trajectory.starts[1:], int) - 1] = True
    edges = np.flatnonzero(edges) + 1
    return [
        Piece(len(part), bool(special[part[0]]), chat.decode(ids[part]))
        for part in np.split(np.arange(len(ids)), edges)
    ]
