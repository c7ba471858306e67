"""Several vLLM servers as one that answers: who is asked, how often, and who is left.

A session stays with the server that answered it, since that holds its prefix; a new one
goes where the fewest are. A server that is gone, hangs or has other weights is taken
out for the rest of the run. All of it belongs to one event loop.
"""

import asyncio
import dataclasses
import re
import threading
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from thundersync_jax.engines.vllm import wire
from thundersync_jax.errors import ServerError

# A server that says nothing for so long is gone. An idle worker of vLLM may miss a
# call, and then looks again after up to 5 s.
HEALTH_SECS = 8.0
Answer = TypeVar("Answer")


@dataclasses.dataclass(eq=False)
class Member:
    """One of the servers."""

    address: str  # as http://localhost:8000
    model: str  # name of what it serves
    out: str | None = None  # why nobody asks it any more
    sessions: int = 0  # how many are with it
    answered_secs: float = 0.0  # of its last answer, on the event loop's clock
    look: asyncio.Task | None = None  # whether it is well, where somebody asks


@dataclasses.dataclass(eq=False)
class Servers:
    """Asks for the sessions of one event loop."""

    models: dataclasses.InitVar[Mapping[str, str]]  # name of the served one, by address
    _: dataclasses.KW_ONLY
    timeout_secs: float  # deadline of one try
    attempts: int  # most tries of a request
    # It does not run yet; its end, which cancels all tasks, closes connections.
    loop: dataclasses.InitVar[asyncio.AbstractEventLoop]
    # Called once where no server is left, with what became of each.
    on_error: Callable[[BaseException], None]
    on_line: Callable[[str], None]  # a line about every server that is taken out

    def __post_init__(self, models: Mapping[str, str], loop: asyncio.AbstractEventLoop):
        self.members = [Member(*pair) for pair in models.items()]  # in the given order
        self.weight_version: str | None = None  # that answers come from; None: any
        self.retries = 0  # tries so far that followed one that failed
        self._places: dict[Hashable, Member] = {}
        self._client = wire.async_client()
        self._closed = threading.Event()
        self._keeper = loop.create_task(self._keep(), name="connections")

    async def ask(
        self,
        session: Hashable,
        name: str,
        body: Callable[[str], dict[str, Any]],
        read: Callable[[Any], Answer],
    ) -> Answer:
        """Waits for the answer to one request, from servers of `weight_version` only.

        `body` makes the request for a served model's name, and `read` reads an answer,
        or raises WrongAnswer. The request's `name` is for logs, where its try is added.

        Raises:
          ValueError: It was refused, or has failed as often as allowed.
          ServerError: No server is left.
        """
        tried: list[Member] = []
        reasons = []
        for attempt in range(self.attempts):
            member = self._choose(session, tried)
            self.retries += attempt > 0
            label = re.sub(r"[^A-Za-z0-9]+", "-", f"{name} try {attempt}").strip("-")
            try:
                return await self._try(member, body(member.model), read, label)
            except (wire.WrongAnswer, _Failed) as error:
                reasons.append(f"{member.address}: {error}")
            tried.append(member)
        self.check_left()
        raise ValueError(f"failed {len(reasons)} times: {'; '.join(reasons)}")

    def release(self, session: Hashable) -> None:
        """Forgets a session; unknown ones are ignored."""
        member = self._places.pop(session, None)
        if member is not None:
            member.sessions -= 1

    def take_out(self, member: Member, reason: str) -> None:
        """Asks a server nothing any more."""
        if member.out is None:
            member.out = reason
            left = sum(m.out is None for m in self.members)
            self.on_line(f"{member.address} is taken out, {left} left: {reason}")
            if not left:
                self.on_error(self._none_left())

    def close(self, timeout_secs: float) -> bool:
        """Waits for the connections' end, once the loop is ending."""
        return self._closed.wait(timeout_secs)

    async def _try(
        self,
        member: Member,
        body: dict[str, Any],
        read: Callable[[Any], Answer],
        label: str,
    ) -> Answer:
        clock = asyncio.get_running_loop().time
        version, start_secs = self.weight_version, clock()
        try:
            async with asyncio.timeout(self.timeout_secs):
                url = f"{member.address}/v1/completions"
                headers = {"X-Request-Id": label}
                answer = await self._json("POST", url, json=body, headers=headers)
                if version is not None:
                    await self._check_version(member, version)
        except OSError as error:
            reason = str(error)
            if isinstance(error, TimeoutError):
                limit = f"{self.timeout_secs:g} s (request_timeout_secs)"
                reason = f"no answer within {limit}"
            task = self._look_after(member, reason, start_secs)
            if task is not None:
                await asyncio.shield(task)  # others may wait for the same
            raise _Failed(reason) from error
        except asyncio.CancelledError:
            # Nobody has the time to wait for it; the next one is to know.
            if (waited_secs := clock() - start_secs) > HEALTH_SECS:
                reason = f"no answer within {waited_secs:.1f} s"
                self._look_after(member, reason, start_secs)
            raise
        member.answered_secs = clock()
        return read(answer)

    async def _check_version(self, member: Member, version: str) -> None:
        try:
            answer = await self._json("GET", f"{member.address}/weight_info")
            served = repr(wire.read_weight_version(answer))
        except wire.RefusedRequest as error:
            served = f"not told ({error})"
        if served != repr(version):
            reason = f"its weights' version is {served}, the policy's {version!r}"
            self.take_out(member, reason)
            raise _Failed(reason)

    async def _json(self, method: str, url: str, **options: Any) -> Any:
        """A JSON value; OSError where the server is not to be reached."""
        try:
            response = await self._client.request(method, url, **options)
        except wire.connection_errors() as error:
            raise ConnectionError(wire.describe(error)) from error
        return wire.read_json(response.status_code, response.text)

    def _look_after(
        self, member: Member, reason: str, start_secs: float
    ) -> asyncio.Task | None:
        """Begins to find out whether a server is well, where nobody does."""
        # Not at the end of the loop, which cancels everything.
        if member.out is not None or self._keeper.cancelling():
            return None
        if member.look is None or member.look.done():
            look = self._look(member, reason, start_secs)
            member.look = asyncio.create_task(look, name=f"health of {member.address}")
        return member.look

    async def _look(self, member: Member, reason: str, start_secs: float) -> None:
        """Takes a server out that is not well."""
        health = self._client.get(f"{member.address}/health")
        problem = await self._problem("/health", health)
        if problem is None and member.answered_secs < start_secs:
            # The front may be well while what it stands for hangs, or all that it was
            # asked for takes long.
            body = wire.completion_request(
                member.model,
                np.zeros(1, np.int32),
                max_tokens=1,
                temperature=0.0,
                seed=0,
                stop_ids=(),
            )
            url = f"{member.address}/v1/completions"
            post = self._client.post(url, json=body)
            problem = await self._problem("one token", post)
        if problem is not None:
            self.take_out(member, f"{reason}; {problem}")

    async def _problem(self, name: str, request: Awaitable[Any]) -> str | None:
        """What is wrong with the answer to a small request; None where it is well."""
        try:
            async with asyncio.timeout(HEALTH_SECS):
                response = await request
        except TimeoutError:
            return f"{name}: no answer within {HEALTH_SECS:g} s"
        except wire.connection_errors() as error:
            return f"{name}: {wire.describe(error)}"
        status = response.status_code
        return None if status == 200 else f"{name}: status {status}"

    def _choose(self, session: Hashable, tried: Sequence[Member]) -> Member:
        """The session's own server, or the one with the fewest; untried ones first."""
        self.check_left()
        place = self._places.get(session)
        if place is not None and place.out is None and place not in tried:
            return place
        self.release(session)
        alive = [m for m in self.members if m.out is None]
        untried = [m for m in alive if m not in tried]
        chosen = min(untried or alive, key=lambda m: m.sessions)
        chosen.sessions += 1
        self._places[session] = chosen
        return chosen

    def check_left(self) -> None:
        """Raises ServerError where all servers are out."""
        if all(member.out is not None for member in self.members):
            raise self._none_left()

    def _none_left(self) -> ServerError:
        ends = "; ".join(f"{m.address}: {m.out}" for m in self.members)
        return ServerError(f"no vLLM server is left: {ends}. Restart them and the run.")

    async def _keep(self) -> None:
        """Owns the connections: cancelled, it closes them."""
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await self._client.aclose()
            finally:
                self._closed.set()


class _Failed(Exception):
    """A try that came to nothing."""
