"""The byte-level format: prompts, actions and observations as ids, and actions back.

    prompt       <user> bytes <assistant>
    action       bytes <end>      or      <call> bytes <end>
    observation  <tool> bytes <assistant>

A trajectory is these in order, appended and never rendered again: the ids that were
sampled are the ids that are trained.
"""

from collections.abc import Sequence

import numpy as np

from thundersync_jax.envs.base import Action
from thundersync_jax.rollout import tokenizer
from thundersync_jax.rollout.tokenizer import ASSISTANT, BYTES, CALL, END, TOOL, USER


class ByteLevel:
    """A `chat.Chat` of bytes and a few marks; it knows one tool, without a name."""

    stop_ids = (END,)

    def prompt(self, text: str) -> np.ndarray:
        return render_prompt(text)

    def observation(self, text: str, ended: bool = True) -> np.ndarray:
        """A cut action needs no end token: <tool> cannot be taken for text."""
        return render_observation(text)

    def action(self, action: Action) -> np.ndarray:
        return render_action(action)

    def parse(self, ids: np.ndarray, stop_ids: Sequence[int] = (END,)) -> Action:
        return parse_action(ids, stop_ids)

    def decode(self, ids: np.ndarray) -> str:
        return tokenizer.decode(ids)

    def special(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(ids) >= BYTES

    def vocabulary(self) -> dict[str, int]:
        return tokenizer.vocabulary()


def render_prompt(text: str) -> np.ndarray:
    """Returns int32[N], the prompt and the token after which the policy acts."""
    return _join(USER, text, ASSISTANT)


def render_observation(text: str) -> np.ndarray:
    """Returns int32[N], the tool's answer and the token after which the policy acts."""
    return _join(TOOL, text, ASSISTANT)


def render_action(action: Action) -> np.ndarray:
    """Returns int32[N], the tokens a policy would sample for this action.

    Raises:
      ValueError: A malformed action, which has no rendering.
    """
    if action.kind == "answer":
        return _join(None, action.text, END)
    if action.kind == "call":
        return _join(CALL, action.text, END)
    raise ValueError(
        f"an action of kind {action.kind!r} cannot be rendered; expected 'answer' or "
        "'call'. Keep the sampled ids of malformed actions."
    )


def parse_action(
    ids: Sequence[int] | np.ndarray, stop_ids: Sequence[int] = (END,)
) -> Action:
    """Reads one sampled turn.

    Args:
      ids: int[N], the turn's tokens up to and with its end token.
      stop_ids: The end tokens, any of which ends a turn.

    Returns:
      The action with its ids: a "call" where `<call>` is the first token, an "answer"
      where there is none, and "malformed" where the end token is missing (the length
      limit came first) or any other special token stands inside.
    """
    ids = np.asarray(ids, np.int32)
    body, sampled = ids[:-1], tuple(ids.tolist())
    kind = "answer"
    if len(body) and body[0] == CALL:
        kind, body = "call", body[1:]
    if not len(ids) or ids[-1] not in stop_ids or np.any(body >= BYTES):
        return Action("malformed", tokenizer.decode(ids), sampled)
    return Action(kind, tokenizer.decode(body), sampled)


def _join(first: int | None, text: str, last: int) -> np.ndarray:
    start = [] if first is None else [first]
    return np.concatenate([start, tokenizer.encode(text), [last]]).astype(np.int32)
