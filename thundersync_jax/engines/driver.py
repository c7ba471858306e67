"""The one thread that owns a passive engine and answers coroutines.

Coroutines of an event loop await answers; the thread submits their requests, steps the
engine while it is busy and sleeps otherwise. It knows sessions, no environment. Remote
engines need no thread: `connect` makes both kinds look alike.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from thundersync_jax.engines.base import (
    Connection,
    Engine,
    PassiveEngine,
    RemoteEngine,
    Request,
    Response,
)

# The thread may die with a call still in its inbox: look now and then.
_LIVENESS_SECS = 0.25


def connect(
    engine: Engine | RemoteEngine,
    loop: asyncio.AbstractEventLoop,
    on_error: Callable[[BaseException], None],
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

    def __init__(
        self,
        engine: PassiveEngine,
        loop: asyncio.AbstractEventLoop,
        on_error: Callable[[BaseException], None],
        name: str = "engine",
    ):
        """Starts a thread of that name.

        `on_error` is told, in it, what the engine died of.
        """
        self._engine = engine
        self._loop = loop
        self._on_error = on_error
        self._waiting: dict[Hashable, asyncio.Future[Any]] = {}
        # What the thread shall do next, as functions; None ends it.
        self._inbox: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name=name)
        self._thread.start()

    async def sample(self, request: Request) -> Response:
        """Waits for one turn, as `ask` does."""
        return await self.ask(request)

    async def ask(self, request: Any) -> Any:
        """Waits for the answer to a request. A session has one at a time.

        Raises:
          ValueError: The engine refused the request.
        """
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

    def release(self, session: Hashable) -> None:
        """Ends a session, in order with the requests before and after it."""
        self._inbox.put(partial(self._engine.release, session))

    def update(self, params: object, policy_version: int, limit_secs: float) -> None:
        """Gives the engine new parameters, as `call` does."""
        self.call(partial(self._engine.update, params, policy_version), limit_secs)

    def call(self, function: Callable[[], Any], limit_secs: float) -> Any:
        """Runs a function in the engine's thread, after all it was told before.

        Raises:
          RuntimeError: The thread is dead or did not answer in time.
        """
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
