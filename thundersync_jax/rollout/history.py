"""What the policy has seen when it acts: turns that go on, or are rewritten.

The recorder keeps the tokens of all samples; here is which of them the engine sees, and
that what follows an action fits.
"""

from collections.abc import Sequence

import numpy as np

from thundersync_jax.chat.base import Chat
from thundersync_jax.config import RolloutConfig
from thundersync_jax.errors import one_line
from thundersync_jax.rollout import observations
from thundersync_jax.rollout.commands import Stopped
from thundersync_jax.rollout.recorder import Recorder
from thundersync_jax.types import Message, Observation, StopReason


class History:
    """The turns of the sample that grows, of one attempt.

    Methods return int32[N], the ids that the engine has not seen, recorded: of another
    sample all. None where they do not fit.
    """

    def __init__(self, chat: Chat, limits: RolloutConfig, recorder: Recorder):
        self._chat, self._limits, self._recorder = chat, limits, recorder
        self._turns: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def left_tokens(self) -> int:
        """Of the context, for what comes."""
        return self._limits.context_tokens - self._recorder.length

    def acted(self, shown: np.ndarray, ids: np.ndarray) -> None:
        """Takes a whole turn: what was shown, and then sampled."""
        self._turns.append((shown, ids))

    async def follow(self, observation: Observation, doing: str) -> np.ndarray | None:
        """Goes on with what an environment says; `doing` is what it was asked.

        Stopped where it begins more samples than there may be.
        """
        if observation.rewrite:
            return await self._rewritten(observation.messages, doing)
        return await self._appended(observation.messages, doing)

    async def _appended(self, said: Sequence[Message], doing: str) -> np.ndarray | None:
        chat, limits = self._chat, self._limits
        history = await observations.rendered(chat.history, said, doing, self._turns)
        used = self._recorder.length if history is None else len(history)
        room = limits.context_tokens - used
        ended = self._turns[-1][1][-1] in chat.stop_ids
        cut = limits.long_observations == "cut"
        most = (room - limits.turn_tokens) * cut
        ids = await observations.fitting(chat, said, ended, room, most, doing)
        if history is None or ids is None:
            if ids is not None:
                self._recorder.observation(ids)
            return ids
        try:
            return self._continued(np.concatenate([history, ids]))
        except ValueError:  # it would be one sample too many
            return None

    async def _rewritten(
        self, said: Sequence[Message], doing: str
    ) -> np.ndarray | None:
        room, chat = self._limits.context_tokens, self._chat
        ids = await observations.ids(chat, chat.prompt, said, room, doing)
        if ids is None or len(ids) >= room:
            return None
        try:
            return self._continued(ids)
        except ValueError as error:
            reason = f"{doing} rewrote the history: {one_line(error)}"
            raise Stopped(StopReason.ENVIRONMENT_ERROR, reason) from error

    def _continued(self, context: np.ndarray) -> np.ndarray:
        """ValueError where it would be one sample too many."""
        before, known = self._recorder.sample, self._recorder.context(context)
        if self._recorder.sample == before:
            return context[known:]
        self._turns = []
        return context
