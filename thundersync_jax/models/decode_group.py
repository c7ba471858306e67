"""Samplers on several devices as one: each holds its own sessions.

A turn's ids do not depend on which of them holds it, since all run the same programs.
"""

from collections.abc import Hashable, Sequence
from typing import Any

from thundersync_jax.models.decode import InProcessEngine
from thundersync_jax.rollout.engine import Request, Response


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
        """Gives every device its copy of new parameters. Raises as each engine does."""
        for engine in self._engines:
            engine.update(params, policy_version)

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
    share = slots // len(places)
    engines = [
        InProcessEngine(config, params, share, device_or_sharding=place, **settings)
        for place in places
    ]
    return EngineGroup(engines) if len(engines) > 1 else engines[0]
