"""A `rollout.teacher.Teacher` on vLLM servers.

It scores through prompt log-probabilities. vLLM takes those before temperature, which
must be 1, and computes them anew for the whole sequence: a turn costs all tokens so
far. Numbers are normalised over all rows of the served model, its padding included.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from thundersync_jax.engines.base import Scored
from thundersync_jax.engines.vllm import wire
from thundersync_jax.engines.vllm.engine import Server, check
from thundersync_jax.engines.vllm.servers import Servers
from thundersync_jax.errors import ConfigError


@dataclasses.dataclass(eq=False)
class VLLMTeacher:
    """What a remote teacher is asked for; ConfigError where a server cannot do it."""

    addresses: Sequence[str]  # of the servers, each as http://localhost:8000
    _: dataclasses.KW_ONLY
    # Scores of a position: the log-probability of the token itself, or the likeliest
    # ids with theirs.
    kind: Literal["sampled", "top_k", "full"]
    top_k: int  # number of likeliest ids, below `width`; unused by other kinds
    width: int  # number of ids that policy and teacher share, padding left out
    temperature: float  # of the rollout
    context_tokens: int  # longest sequence of a session
    timeout_secs: float  # deadline of one try
    attempts: int = 2  # most tries of a turn
    on_line: Callable[[str], None] = print  # a line about every server taken out

    def __post_init__(self):
        if self.kind == "full":
            raise ConfigError(
                "teacher.servers is given with a loss of full distributions, expected "
                "the likeliest ids: servers send those alone. Set loss.distill_top_k."
            )
        if self.temperature != 1.0:
            raise ConfigError(
                "teacher.servers is given with rollout.temperature "
                f"{self.temperature:g}, expected 1: vLLM scores prompts before "
                "temperature. Set it to 1, or give teacher.workdir in place of servers."
            )
        if self.kind == "top_k" and not 1 <= self.top_k < self.width:
            raise ConfigError(
                f"top_k={self.top_k} of {self.width} ids; expected at least 1 and "
                "fewer than all"
            )
        self.tokens_run = 0  # tokens that were sent to be scored so far
        if self.kind != "top_k":
            self.top_k = 0
        servers = [Server(address, self.timeout_secs) for address in self.addresses]
        # One token is sampled behind those that are scored.
        models = check(servers, self.context_tokens + 1, development=False)
        self._models = {server.address: model.name for server, model in models.items()}
        for server in servers:
            try:
                server.score(np.zeros(2, np.int32), self.top_k)
            except (ConnectionError, ValueError) as error:
                raise ConfigError(
                    f"{error}; expected the scores of a prompt. Start that server with "
                    f"--max-logprobs {self.top_k or 1} or more."
                ) from error

    def connect(
        self, loop: asyncio.AbstractEventLoop, on_error: Callable[[BaseException], None]
    ) -> "VLLMTeacherConnection":
        """As `rollout.teacher.MakeTeacher` says."""
        servers = Servers(
            self._models,
            timeout_secs=self.timeout_secs,
            attempts=self.attempts,
            loop=loop,
            on_error=on_error,
            on_line=self.on_line,
        )
        return VLLMTeacherConnection(self, servers)


@dataclasses.dataclass(eq=False)
class VLLMTeacherConnection:
    """A `Teacher` for one event loop."""

    _teacher: VLLMTeacher
    _servers: Servers

    async def logprobs(
        self, session: Hashable, tokens: np.ndarray, positions: np.ndarray
    ) -> Scored:
        """As `Teacher` says, tried on other servers where one fails."""
        tokens, positions = np.asarray(tokens, np.int32), np.asarray(positions)
        outside = tokens[(tokens < 0) | (tokens >= self._teacher.width)]
        if len(outside):
            raise ValueError(
                f"session {session!r} has token {outside[0]}; policy and teacher share "
                f"ids 0 .. {self._teacher.width - 1}"
            )
        top_k = self._teacher.top_k
        body = partial(wire.scoring_request, prompt=tokens, top_k=top_k)
        read = partial(self._read, tokens=tokens, positions=positions)
        name = f"{session} scoring to {len(tokens)}"
        scored = await self._servers.ask(session, name, body, read)
        self._teacher.tokens_run += len(tokens)
        return scored

    def release(self, session: Hashable) -> None:
        """Ends a session; no server is told, nothing there waits for it."""
        self._servers.release(session)

    def close(self, timeout_secs: float) -> bool:
        """Waits until the ending event loop has closed all connections."""
        return self._servers.close(timeout_secs)

    def _read(self, answer: Any, tokens: np.ndarray, positions: np.ndarray) -> Scored:
        logprobs, tables = wire.read_scores(answer, tokens, positions)
        if not self._teacher.top_k:
            return Scored(logprobs[:, None], None)
        top_k, width = self._teacher.top_k, self._teacher.width
        best = np.asarray([wire.best_ids(table, top_k, width) for table in tables])
        return Scored(best[..., 1].astype(np.float32), best[..., 0].astype(np.int32))
