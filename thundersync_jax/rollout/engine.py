"""The engine interface: who answers "what comes next?" for all trajectories.

An engine is passive. Somebody submits requests and calls `step` until their answers
come back; it owns no thread and knows no environment. Ids go in, ids come out.
"""

import dataclasses
from collections.abc import Hashable
from typing import Protocol

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


class Engine(Protocol):
    """What the rollout pool needs of a sampler. One thread at a time calls it."""

    context_tokens: int  # the longest sequence a session may hold

    def submit(self, request: Request) -> None:
        """Queues a turn. Raises ValueError where it cannot fit the context."""

    def step(self) -> list[Response]:
        """Advances all sessions a little and returns the turns that ended."""

    def release(self, session: Hashable) -> None:
        """Ends a session, wherever it stands; unknown sessions are ignored."""

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""

    def update(self, params: object, policy_version: int) -> None:
        """Takes new parameters. Every session must have been released."""
