"""Samplers on several devices as one: each holds its own sessions.

A turn's ids do not depend on which of them holds it, since all run the same programs.
On CPU they read the same copy of the parameters, for a copy each would leave less room
in the processor's cache.
"""

import functools
from collections.abc import Hashable, Sequence
from typing import Any

from thundersync_jax.engines.base import Request, Response
from thundersync_jax.engines.in_process import InProcessEngine


class EngineGroup:
    """In-process engines behind the engine interface, working at the same time.

    A new session goes where the fewest are.
    """

    def __init__(self, engines: Sequence[InProcessEngine]):
        """Takes engines of one model, with as many slots each."""
        self.context_tokens = engines[0].context_tokens
        self._engines = list(engines)
        self._places: dict[Hashable, int] = {}
        self._sessions = [0] * len(self._engines)

    @property
    def policy_version(self) -> int:
        """Of the parameters."""
        return self._engines[0].policy_version

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return any(engine.busy for engine in self._engines)

    def update(self, params: Any, policy_version: int) -> None:
        """Gives every device new parameters. Raises as each engine does."""
        first, *others = self._engines
        first.update(params, policy_version)
        for engine in others:
            engine.update(params, policy_version, twin=first)

    def submit(self, request: Request) -> None:
        """Queues a turn where its session is. Raises as each engine does."""
        place = self._places.get(request.session)
        if place is None:
            place = self._sessions.index(min(self._sessions))
        self._engines[place].submit(request)
        if request.session not in self._places:
            self._places[request.session] = place
            self._sessions[place] += 1

    def release(self, session: Hashable) -> None:
        """Ends a session, wherever it stands; unknown sessions are ignored."""
        place = self._places.pop(session, None)
        if place is not None:
            self._sessions[place] -= 1
            self._engines[place].release(session)

    def step(self) -> list[Response]:
        """A step of every engine: all are dispatched before one is waited for."""
        for engine in self._engines:
            engine.dispatch()
        return [answer for engine in self._engines for answer in engine.collect()]


def make(
    places: Sequence[Any], config: Any, params: Any, slots: int, **settings: Any
) -> InProcessEngine | EngineGroup:
    """The sampler of some devices, with so many slots in all.

    Args:
      places: Devices or shardings, one for each engine.
      config, params: As for `InProcessEngine`.
      slots: A multiple of the number of places.
      **settings: The others of `InProcessEngine`.
    """
    engine = functools.partial(
        InProcessEngine, config, params, slots // len(places), **settings
    )
    first = engine(device_or_sharding=places[0])
    others = [engine(device_or_sharding=place, twin=first) for place in places[1:]]
    return EngineGroup([first, *others]) if others else first
