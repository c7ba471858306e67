"""Thoughts of earlier turns, where a chat template takes them out of the history.

The template itself says what it leaves of a turn. What was sampled for that stays as
ids; only what the template puts before it is tokenised. Which turns a history has, and
that another one is another sample, is the business of whoever drives a conversation.
"""

import bisect
from collections.abc import Callable, Sequence

import numpy as np

from thundersync_jax.chat.tool_calls import THINK, THOUGHT

Turns = Sequence[tuple[np.ndarray, np.ndarray]]  # ids: shown, and then sampled
_THOUGHT, _SPEECH = "thethoughtofanaction", "thespeechofanaction"
_BYTES = 4  # of a character, at most: a token has one byte or more


class Thoughts:
    """Takes the thoughts out of turns, as a template does it."""

    def __init__(
        self,
        render: Callable[[Sequence[dict[str, str]]], str],
        encode: Callable[[str], np.ndarray],
        decode: Callable[[np.ndarray], str],
        stop_ids: Sequence[int],
    ):
        """Asks the template whether it does.

        Args:
          render: Text of messages behind a question, up to where the policy acts.
          encode: Ids of a rendered text.
          decode: Text of ids, as a message has it.
          stop_ids: End tokens of a turn.

        Raises:
          ValueError: It leaves thoughts where they are.
        """
        self._render, self._encode, self._decode = render, encode, decode
        self._stop_ids = stop_ids
        asked = [_said("user", "?")]
        begun, (head, _) = render([]), self._around(asked)
        self._head = begun[: _alike(begun, head)]
        # With what the template begins a turn that no history has.
        self._opened = begun[len(self._head) :]
        apart = [encode(self._head), encode(self._opened)]
        self._opened_tokens = len(apart[1])
        if self._stay(asked) or encode(begun).tolist() != np.hstack(apart).tolist():
            raise ValueError("leaves the thoughts of earlier turns in the history")

    def history(
        self, turns: Turns, said: Sequence[dict[str, str]]
    ) -> np.ndarray | None:
        """Returns int32[N], the turns once messages follow; None if they stay the same.

        ValueError where the template writes something else around a thought.
        """
        if self._stay(said):
            return None
        parts, changed = [], False
        for shown, ids in turns:
            body = ids[: len(ids) - (ids[-1] in self._stop_ids)]
            text = self._opened + self._decode(body)
            if THOUGHT in text:
                changed = True
                parts += [shown[: len(shown) - self._opened_tokens]]
                parts += [self._left(text, body, said), ids[len(body) :]]
            else:
                parts += [shown, ids]
        return np.concatenate(parts).astype(np.int32) if changed else None

    def _stay(self, said: Sequence[dict[str, str]]) -> bool:
        thought = f"{THINK}\n{_THOUGHT}\n{THOUGHT}\n\n{_SPEECH}"
        return _THOUGHT in self._render([_said("assistant", thought), *said])

    def _around(self, said: Sequence[dict[str, str]]) -> tuple[str, str]:
        """What stands before and behind a turn that messages follow."""
        shown = self._render([_said("assistant", _SPEECH), *said])
        before, _, behind = shown.partition(_SPEECH)
        return before, behind

    def _left(
        self, text: str, ids: np.ndarray, said: Sequence[dict[str, str]]
    ) -> np.ndarray:
        """Ids of what the template leaves of a text whose end these ids are."""
        shown = self._render([_said("assistant", text), *said])
        _, behind = self._around(said)
        if not (shown.startswith(self._head) and shown.endswith(behind)):
            raise ValueError("the chat template writes something else around a thought")
        left = shown[len(self._head) : len(shown) - len(behind)]
        same = _alike(left[::-1], text[::-1])
        first = bisect.bisect_left(
            range(len(ids) + 1),
            -same,
            lo=max(0, len(ids) - _BYTES * same),
            key=lambda place: -len(self._decode(ids[place:])),
        )
        # Within a character its last bytes read as something else.
        while not left.endswith(end := self._decode(ids[first:])):
            first += 1
        before = left[: len(left) - len(end)]
        return np.concatenate([self._encode(before), ids[first:]])


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
