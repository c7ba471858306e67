"""The engine interfaces: who answers for all trajectories at once.

A sampler answers "what comes next?", a teacher's engine "how likely was this?". In this
process both are passive. Somebody submits requests and calls `step` until their answers
come back; such an engine owns no thread. A remote engine is asked through a connection.
None knows an environment. Ids go in, ids and numbers come out.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import numpy as np


@dataclasses.dataclass(frozen=True)
class Request:
    """One turn to sample.

    Attributes:
      session: The trajectory it continues. The first request of a session brings the
        prompt; later ones bring only what is new (the observation), since the engine
        keeps the ids it sampled and their keys and values.
      new_ids: int32[N], N >= 1 for a first request, appended before sampling.
      max_new_tokens: Token limit of this turn.
      stop_ids: Sampling ends after one of these; it is part of the answer.
      temperature: Logits are divided by it; 0 takes the largest.
      seed: Integers that name the turn (run seed, phase, step, group, member, turn).
        The engine folds the position in, so nothing else can change the ids.
    """

    session: Hashable
    new_ids: np.ndarray
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float
    seed: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Response:
    """The answer to one request.

    Attributes:
      session: As in the request.
      ids: int32[N], the sampled tokens, a stop token included.
      logprobs: float32[N], log-probabilities at the request's temperature.
      stopped: True where a stop id ended it, False at the token limit.
      policy_version: The version that sampled every one of these tokens.
    """

    session: Hashable
    ids: np.ndarray
    logprobs: np.ndarray
    stopped: bool
    policy_version: int


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """Positions of one trajectory to score.

    Attributes:
      session: The trajectory. Later requests of a session continue its tokens.
      tokens: int32[N], all of them so far.
      positions: int32[M], M >= 1, ascending, each at or behind the end of the last
        request's tokens (at least 1: nothing predicts position 0) and below N.
    """

    session: Hashable
    tokens: np.ndarray
    positions: np.ndarray


@dataclasses.dataclass(frozen=True)
class Scored:
    """A teacher's log-probabilities of M positions: what stands, or could, at each.

        entry = log q(. | tokens[:position])

    Attributes:
      logprobs: float32[M, K]; of the token itself (K is 1), of the K likeliest ids, or
        of all K ids.
      ids: int32[M, K], the likeliest ids, best first; None in the other two cases.
      session: As in the request, where an engine answers.
    """

    logprobs: np.ndarray
    ids: np.ndarray | None
    session: Hashable = None


class PassiveEngine(Protocol):
    """Answers the requests of many sessions. One thread at a time calls it."""

    def submit(self, request: Any) -> None:
        """Queues a request of a session. Raises ValueError where it is refused."""

    def step(self) -> list[Any]:
        """Advances all sessions a little; returns the answers that are done."""

    def release(self, session: Hashable) -> None:
        """Ends a session, wherever it stands; unknown sessions are ignored."""

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""


class Engine(PassiveEngine, Protocol):
    """What the rollout pool needs of a sampler: `Request` in, `Response` out.

    A request that cannot fit the context is refused.
    """

    context_tokens: int  # the longest sequence a session may hold

    def update(self, params: object, policy_version: int) -> None:
        """Takes new parameters. Every session must have been released."""


class Connection(Protocol):
    """An engine as the coroutines of one event loop see it."""

    async def sample(self, request: Request) -> Response:
        """Waits for one turn. A session has one at a time.

        Raises:
          ValueError: It was refused, or has failed; so has the trajectory.
        """

    def release(self, session: Hashable) -> None:
        """Ends a session, wherever it stands; unknown sessions are ignored."""

    def update(self, params: object, policy_version: int, limit_secs: float) -> None:
        """Takes new parameters; from the pool's caller, with all sessions released.

        Raises:
          RuntimeError: It did not end in time, where the engine has no own deadline.
        """

    def close(self, timeout_secs: float) -> bool:
        """Ends whatever it runs; False where that takes longer. From any thread."""


class RemoteEngine(Protocol):
    """A sampler elsewhere, which brings its own connection."""

    context_tokens: int  # the longest sequence a session may hold

    def connect(
        self, loop: asyncio.AbstractEventLoop, on_error: Callable[[BaseException], None]
    ) -> Connection:
        """A connection for an event loop that does not run yet.

        `on_error` is told of what leaves nobody to ask.
        """
