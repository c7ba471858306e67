"""What an environment says: checked, and as token ids within the room that is left.

Whatever is wrong with it is a `Stopped` that names the command it comes from.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from thundersync_jax.chat import base
from thundersync_jax.chat.base import Chat
from thundersync_jax.envs import base as envs
from thundersync_jax.errors import one_line
from thundersync_jax.rollout.commands import Stopped
from thundersync_jax.types import Message, Observation, StopReason

_LONG_TEXT = 10_000  # characters, a few milliseconds


def prompt(said: Any, command: str) -> str | Sequence[Message]:
    """The prompt that `start` returned: a text, or messages."""
    try:
        return base.conversation(said)
    except ValueError as error:
        reason = f"{command} returned {error}"
        raise Stopped(StopReason.ENVIRONMENT_ERROR, reason) from error


def checked(observation: Any, command: str) -> Observation:
    """An observation with texts and finite numbers."""
    _expect(observation, Observation, command, "an Observation")
    _expect(observation.text, str, command, "an Observation with text")
    _expect(observation.rewrite, bool, command, "an Observation with rewrite a bool")
    _expect(observation.messages, Sequence, command, "an Observation with messages")
    for message in observation.messages:
        _expect(message, Message, command, "messages that are a Message each")
        _expect(message.content, str, command, "messages with text")
        _expect(message.call_id, str, command, "messages with a text as call_id")
    for role in (observation.role, *(said.role for said in observation.messages)):
        if role not in (*base.ROLES, None):
            _refuse(role, command, f"a role of {', '.join(base.ROLES)}")
    if observation.text and observation.messages:
        _refuse(observation.text, command, "a text or messages, and got both")
    for name in ("weight", "credit"):
        value = getattr(observation, name)
        if envs.finite(value) is None:
            raise Stopped(
                StopReason.ENVIRONMENT_ERROR,
                f"{command} returned an Observation with {name} {envs.short(value)}, "
                "expected a finite number",
            )
    return observation


def messages(observation: Observation, role: str, call_id: str) -> Iterator[Message]:
    """What an observation says; `role` is whose text it is if it does not say so."""
    if not observation.messages:
        said = observation.role or ("user" if observation.rewrite else role)
        answered = call_id if said == "tool" else ""
        yield Message(said, _text(observation.text), answered)
    for message in observation.messages:
        yield dataclasses.replace(message, content=_text(message.content))


async def ids(
    chat: Chat,
    render: Callable[..., np.ndarray],
    said: str | Sequence[Message],
    room: int,
    command: str,
    *given: Any,
) -> np.ndarray | None:
    """Ids of `render(said, *given)`; None of what cannot have room.

    That is not tokenised at all.
    """
    texts = [said] if isinstance(said, str) else [message.content for message in said]
    if sum(map(len, texts)) > room * chat.longest_token:
        return None
    return await rendered(render, said, command, *given)


async def rendered(
    render: Callable[..., Any],
    said: str | Sequence[Message],
    command: str,
    *given: Any,
) -> Any:
    """What `render(said, *given)` returns, a long text beside the event loop."""
    texts = [said] if isinstance(said, str) else [message.content for message in said]
    try:
        if sum(map(len, texts)) > _LONG_TEXT:
            return await asyncio.to_thread(render, said, *given)
        return render(said, *given)
    except Exception as error:  # of the chat, whatever the text does to it
        reason = f"the text of {command} cannot be rendered: {one_line(error)}"
        raise Stopped(StopReason.ENVIRONMENT_ERROR, reason) from error


async def fitting(
    chat: Chat,
    said: Sequence[Message],
    ended: bool,
    room: int,
    most: int,
    command: str,
) -> np.ndarray | None:
    """Ids of an observation that leaves room for an action; None if it does not fit.

    The longest message of one that does not is cut so that all have `most` tokens; 0
    cuts nothing.
    """
    found = await ids(chat, chat.observation, said, room, command, ended)
    if found is not None and len(found) < room:
        return found
    if most < 1:
        return None
    longest = max(range(len(said)), key=lambda i: len(said[i].content))

    def with_text(text: str) -> Sequence[Message]:
        shown = dataclasses.replace(said[longest], content=text)
        return [*said[:longest], shown, *said[longest + 1 :]]

    def tokens(text: str) -> int:
        return len(chat.observation(with_text(text), ended))

    text = await asyncio.to_thread(base.cut, said[longest].content, most, tokens)
    return chat.observation(with_text(text), ended) if text else None


def _expect(value: Any, kind: type, command: str, expected: str) -> None:
    if not isinstance(value, kind):
        _refuse(value, command, expected)


def _refuse(value: Any, command: str, expected: str) -> NoReturn:
    raise Stopped(
        StopReason.ENVIRONMENT_ERROR,
        f"{command} returned {envs.short(value)}, expected {expected}",
    )


def _text(text: str) -> str:
    """The text itself: a subclass may do as it likes where it is encoded."""
    return str.__str__(text)
