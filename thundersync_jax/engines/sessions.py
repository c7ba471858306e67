"""Sessions of an engine in this process: who holds a slot, and who waits for one."""

import bisect
import collections
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from thundersync_jax.errors import ConfigError


@dataclasses.dataclass(eq=False)
class Session:
    """One trajectory: its place, and its request while one is being answered."""

    slot: int | None = None
    request: Any = None


class SlotEngine:
    """What sampler and teacher share: a session keeps its slot until it is released.

    First come, first served. A subclass checks requests in `_check_request`, begins
    them in `_accept` and answers them in `step`.
    """

    context_tokens: int  # longest sequence of a session

    def __init__(
        self,
        session: Callable[[], Session],
        slots: int,
        context_tokens: int,
        buckets: Sequence[int],
        device_or_sharding: Any,
    ):
        """Begins without sessions, which `session` makes; ConfigError: wrong sizes.

        Pieces are padded to `buckets`, ascending lengths. Arrays lie where
        `device_or_sharding` says; None is jax's default device.
        """
        if slots < 1 or context_tokens < 2:
            raise ConfigError(
                f"slots={slots} and context_tokens={context_tokens}; expected at least "
                "one slot and 2 tokens. Raise rollout.slots or rollout.context_tokens."
            )
        buckets = tuple(buckets)
        if not buckets or buckets[0] < 1 or sorted(set(buckets)) != list(buckets):
            raise ConfigError(
                f"buckets={buckets}; expected ascending positive lengths. Change "
                "rollout.prefill_buckets or teacher.buckets."
            )
        self.context_tokens = context_tokens
        self._buckets = buckets
        self._place = device_or_sharding or jax.devices()[0]
        self._new_session = session
        self._sessions: dict[Hashable, Session] = {}
        self._free = list(range(slots))[::-1]
        self._queue: collections.deque[Session] = collections.deque()  # no slot yet
        self._ready: list[Session] = []  # slot held, request not answered

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._ready or (self._queue and self._free))

    def submit(self, request: Any) -> None:
        """Queues a request; ValueError where its session waits, or it does not fit."""
        session = self._sessions.get(request.session) or self._new_session()
        if session.request is not None:
            raise ValueError(
                f"session {request.session!r} was given a turn while one is being "
                "answered; wait for its answer or release it"
            )
        self._check_request(session, request)
        self._sessions[request.session] = session
        session.request = request
        self._accept(session, request)
        (self._queue if session.slot is None else self._ready).append(session)

    def release(self, session: Hashable) -> None:
        """Ends a session, wherever it stands; unknown sessions are ignored."""
        held = self._sessions.pop(session, None)
        if held is None:
            return
        if held.slot is None:
            self._queue.remove(held)
            return
        if held in self._ready:
            self._ready.remove(held)
        self._free.append(held.slot)

    def _check_request(self, session: Session, request: Any) -> None:
        raise NotImplementedError

    def _accept(self, session: Session, request: Any) -> None:
        """Notes a request that has passed the check."""

    def _fill_slots(self) -> None:
        """Gives free slots to the sessions that wait longest."""
        while self._queue and self._free:
            session = self._queue.popleft()
            session.slot = self._free.pop()
            self._ready.append(session)

    def _bucket(self, tokens: int) -> int:
        """The shortest length that holds so many tokens, or the longest there is."""
        index = bisect.bisect_left(self._buckets, tokens)
        return self._buckets[min(index, len(self._buckets) - 1)]

    def _copied(self, tree: Any) -> Any:
        """Arrays at the engine's place, none an alias: each can be donated once."""
        return jax.tree.map(
            lambda x: jax.device_put(x, self._place, may_alias=False), tree
        )
