"""Engines: who answers for all trajectories at once, and how coroutines ask them.

A sampler answers "what comes next?", a teacher's engine "how likely was this?". In this
process both are passive: `EngineDriver` is the one thread that calls them. A remote
engine brings a connection of its own; `connect` makes both kinds look alike. Ids go in,
ids and numbers come out.
"""

import asyncio
import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol

import numpy as np

from thundersync_jax.chat.base import StopTexts

OnError = Callable[[BaseException], None]  # called with what an engine died of
_LIVENESS_SECS = 0.25  # the thread may die with a call still in its inbox


@dataclasses.dataclass(frozen=True)
class Request:
    """One turn to sample.

    The first request of a session brings the prompt, later ones the observation alone:
    the engine keeps what it sampled. Seed and position decide about the ids.
    """

    session: Hashable  # name of the trajectory
    new_ids: np.ndarray  # int32[N], N >= 1 for a first request; before what is sampled
    max_new_tokens: int  # token limit of this turn
    stop_ids: tuple[int, ...]  # sampling ends after one of these, part of the answer
    temperature: float  # logits are divided by it; 0 takes the largest
    seed: tuple[int, ...]  # run seed, phase, step, group, member and turn
    stop_texts: StopTexts | None = None  # sampling ends with one of these, too


@dataclasses.dataclass(frozen=True)
class Response:
    """The answer to one request."""

    session: Hashable  # the request's session
    ids: np.ndarray  # int32[N], the sampled tokens, a stop token included
    logprobs: np.ndarray  # float32[N], at the request's temperature
    stopped: bool  # True where a stop id or text ended it, False at the token limit
    policy_version: int  # version that sampled every one of these tokens


@dataclasses.dataclass(frozen=True)
class ScoreRequest:
    """Positions of one trajectory to score.

    Positions are ascending, each at or behind the end of the last request's tokens (at
    least 1: nothing predicts position 0) and below N.
    """

    session: Hashable  # name of the trajectory, whose tokens later requests continue
    tokens: np.ndarray  # int32[N], all tokens of the trajectory so far
    positions: np.ndarray  # int32[M], M >= 1


@dataclasses.dataclass(frozen=True)
class Scored:
    """A teacher's log-probabilities of M positions: what stands, or could, at each.

        entry = log q(. | tokens[:position])

    K is 1 for the token itself, the number of the likeliest ids, or that of all ids.
    """

    logprobs: np.ndarray  # float32[M, K]
    ids: np.ndarray | None  # int32[M, K], the likeliest, best first; None: other cases
    session: Hashable = None  # the request's session, where an engine answers


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

    A request that cannot fit the context is refused. Where it has a `compile`, that is
    called before any deadline runs.
    """

    context_tokens: int  # the longest sequence a session may hold

    def update(self, params: object, policy_version: int) -> None:
        """Takes new parameters. Every session must have been released."""


class Connection(Protocol):
    """An engine as the coroutines of one event loop see it."""

    async def sample(self, request: Request) -> Response:
        """Waits for a session's only turn; ValueError where it is refused or fails."""

    def release(self, session: Hashable) -> None:
        """Ends a session, wherever it stands; unknown sessions are ignored."""

    def update(self, params: object, policy_version: int, limit_secs: float) -> None:
        """Takes new parameters; from the pool's caller, with all sessions released.

        RuntimeError where it did not end in time and the engine has no own deadline.
        """

    def close(self, timeout_secs: float) -> bool:
        """Ends whatever it runs; False where that takes longer. From any thread."""


class RemoteEngine(Protocol):
    """A sampler elsewhere, which brings its own connection."""

    context_tokens: int  # the longest sequence a session may hold

    def connect(self, loop: asyncio.AbstractEventLoop, on_error: OnError) -> Connection:
        """For a loop not yet running; `on_error` gets what leaves nobody to ask."""


def connect(
    engine: Engine | RemoteEngine, loop: asyncio.AbstractEventLoop, on_error: OnError
) -> Connection:
    """The connection of a remote engine, or a driver for a passive one."""
    if hasattr(engine, "connect"):
        return engine.connect(loop, on_error)
    return EngineDriver(engine, loop, on_error)


class EngineDriver:
    """Calls every engine method from its own thread.

    `ask`, `sample` and `release` belong to the event loop, `call`, `update` and `close`
    to any thread but the driver's.
    """

    name = "engine"  # of the thread

    def __init__(
        self, engine: PassiveEngine, loop: asyncio.AbstractEventLoop, on_error: OnError
    ):
        """Starts the thread, which calls `on_error` with what the engine died of."""
        self._engine = engine
        self._loop = loop
        self._on_error = on_error
        self._waiting: dict[Hashable, asyncio.Future[Any]] = {}
        # What the thread shall do next, as functions; None ends it.
        self._inbox: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=self.name)
        self._thread.start()

    async def ask(self, request: Any) -> Any:
        """Waits for an answer, one at a time per session; ValueError if refused."""
        session = request.session
        assert session not in self._waiting, f"{session} already waits for an answer"
        future = self._loop.create_future()
        self._waiting[session] = future
        self._inbox.put(partial(self._submit, request))
        try:
            return await future
        finally:
            # From here on an answer for this session is late and finds nobody.
            del self._waiting[session]

    sample = ask  # as `Connection` says

    def release(self, session: Hashable) -> None:
        """Ends a session, in order with the requests before and after it."""
        self._inbox.put(partial(self._engine.release, session))

    def update(self, params: object, policy_version: int, limit_secs: float) -> None:
        """Gives the engine new parameters, as `call` does."""
        self.call(partial(self._engine.update, params, policy_version), limit_secs)

    def compile(self) -> None:
        """Lets the engine compile what it needs, however long that takes."""
        if compiles := getattr(self._engine, "compile", None):
            self.call(compiles, math.inf)

    def call(self, function: Callable[[], Any], limit_secs: float) -> Any:
        """Runs a function in the engine's thread; RuntimeError where none answers."""
        answer: Future = Future()
        self._inbox.put(partial(_call, function, answer))
        deadline = time.monotonic() + limit_secs
        while not wait((answer,), timeout=_LIVENESS_SECS).done:
            if not self._thread.is_alive():
                raise RuntimeError("the engine's thread has ended; make a new pool.")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the engine did not return from a call within {limit_secs:g} s; "
                    "it hangs, or rollout.step_timeout_secs is too short for it."
                )
        return answer.result()

    def close(self, timeout_secs: float) -> bool:
        """Ends the thread after the running engine call; False if that takes longer."""
        self._inbox.put(None)
        self._thread.join(timeout_secs)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._do_inbox(block=not self._engine.busy):
                if self._engine.busy and (responses := self._engine.step()):
                    self._post([(r.session, r) for r in responses])
        except BaseException as error:
            self._on_error(error)

    def _do_inbox(self, block: bool) -> bool:
        """Does what was asked; returns False where that was to end."""
        try:
            while (task := self._inbox.get(block=block)) is not None:
                task()
                block = False
            return False
        except queue.Empty:
            return True

    def _submit(self, request: Any) -> None:
        try:
            self._engine.submit(request)
        except ValueError as error:
            self._post([(request.session, error)])

    def _post(self, answers: list[tuple[Hashable, Any]]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, answers)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _deliver(self, answers: list[tuple[Hashable, Any]]) -> None:
        for session, answer in answers:
            future = self._waiting.get(session)
            if future is None or future.done():
                continue
            if isinstance(answer, ValueError):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def _call(function: Callable[[], Any], answer: Future) -> None:
    try:
        answer.set_result(function())
    except Exception as error:
        answer.set_exception(error)
