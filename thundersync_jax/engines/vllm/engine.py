"""Sampling by vLLM servers: one server for calls that wait, and an engine of several.

Every request sends all ids of its session, so that any server can go on. Answers count
if they came from the weights that were published last.
"""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from thundersync_jax.config import VLLMConfig
from thundersync_jax.engines.base import Request, Response
from thundersync_jax.engines.vllm import wire
from thundersync_jax.engines.vllm.servers import HEALTH_SECS, Servers
from thundersync_jax.errors import ConfigError


class Published(NamedTuple):
    """What a publication came to."""

    weight_version: str  # the name that servers now give for their weights
    lost: Mapping["Server", str]  # servers that are gone, and why


# (parameters, policy version, the servers that are left)
Publish = Callable[[Any, int, Sequence["Server"]], Published]


@dataclasses.dataclass(eq=False)
class Server:
    """One server, and calls that wait for its answer.

    All but `health` and `models` want its development mode. All raise `ConnectionError`
    where no answer comes in time, and `ValueError` where it refuses or answers wrongly.
    """

    address: str  # as http://localhost:8000
    timeout_secs: float  # deadline of a call

    def __post_init__(self):
        self.address = self.address.rstrip("/")

    def health(self) -> None:
        """Returns where the server is well."""
        self._call("GET", "/health", timeout_secs=HEALTH_SECS)

    def models(self) -> wire.ServedModel:
        """What it serves."""
        answer = self._call("GET", "/v1/models", timeout_secs=HEALTH_SECS)
        return wire.read_model(answer)

    def weight_version(self) -> str:
        """What `set_weight_version` was given last; "default" before."""
        answer = self._call("GET", "/weight_info", timeout_secs=HEALTH_SECS)
        return wire.read_weight_version(answer)

    def set_weight_version(self, version: str) -> None:
        """Names the weights."""
        self._call("POST", "/update_weight_version", {"new_version": version})

    def pause(self) -> None:
        """Lets running requests end; later ones wait for `resume`."""
        self._call("POST", "/pause?mode=wait")

    def resume(self) -> None:
        """Ends a pause."""
        self._call("POST", "/resume")

    def reload(self) -> None:
        """Reads the weights of its folder again, in place."""
        self._call("POST", "/collective_rpc", {"method": "reload_weights"})

    def reset_prefix_cache(self) -> None:
        """Forgets keys and values of earlier prompts, which other weights made."""
        self._call("POST", "/reset_prefix_cache")

    def complete(
        self,
        prompt: np.ndarray,
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        stop_ids: Sequence[int] = (),
    ) -> wire.Completion:
        """Samples one turn of at most `max_tokens`; exactly so many without `stop_ids`.

        The temperature (0 takes the largest) is that of the log-probabilities too where
        the server runs with --logprobs-mode processed_logprobs. Seeds are below 2^63.
        """
        body = wire.completion_request(
            self.models().name,
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            stop_ids=stop_ids,
        )
        answer = self._call("POST", "/v1/completions", body)
        return wire.read_completion(answer, prompt, max_tokens, stop_ids)

    def score(self, prompt: np.ndarray, top_k: int = 0) -> np.ndarray:
        """Scores int[N] tokens but the first, before temperature: float32[N - 1]."""
        body = wire.scoring_request(self.models().name, prompt, top_k)
        answer = self._call("POST", "/v1/completions", body)
        positions = np.arange(1, len(prompt))
        return wire.read_scores(answer, prompt, positions)[0]

    def _call(
        self, method: str, path: str, body: Any = None, timeout_secs: float = 0.0
    ) -> Any:
        """JSON value of an answer; a deadline of 0 is the server's own."""
        try:
            with wire.client(timeout_secs or self.timeout_secs) as http:
                response = http.request(method, self.address + path, json=body)
        except wire.connection_errors() as error:
            raise ConnectionError(
                f"{self.address}{path}: {wire.describe(error)}"
            ) from error
        try:
            return wire.read_json(response.status_code, response.text)
        except (ValueError, ConnectionError) as error:
            raise type(error)(f"{self.address}{path}: {error}") from error


def check(
    servers: Sequence[Server], context_tokens: int, development: bool
) -> dict[Server, wire.ServedModel]:
    """Asks every server what it serves, and for its development mode where needed.

    `context_tokens` is the longest sequence of a request, its answer included.
    ConfigError where a server does not answer, or cannot do what is needed.
    """
    models = {}
    for server in servers:
        try:
            server.health()
            models[server] = model = server.models()
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"{error}; expected a vLLM server there. Start it and wait for its "
                "/health."
            ) from error
        if model.max_model_len < context_tokens:
            raise ConfigError(
                f"{server.address} has --max-model-len {model.max_model_len}, expected "
                f"at least {context_tokens}. Raise it or lower rollout.context_tokens."
            )
        if development:
            _check_development(server)
    return models


def _check_development(server: Server) -> None:
    try:
        server.weight_version()
    except (ConnectionError, ValueError) as error:
        hint = "Restart that server."
        if isinstance(error, wire.RefusedRequest):
            hint = "Start that server with VLLM_SERVER_DEV_MODE=1 in its environment."
        raise ConfigError(
            f"{error}; expected the version of its weights. {hint}"
        ) from error


@dataclasses.dataclass(eq=False)
class VLLMEngine:
    """A `RemoteEngine` of vLLM servers; ConfigError where one cannot do its part."""

    settings: VLLMConfig  # addresses of the servers, and how long to wait for them
    context_tokens: int  # longest sequence of a session
    vocab_size: int  # number of ids of the model; others are refused
    # Called by the pool's `update`, with no request outstanding. An exception is the
    # pool's.
    publish: Publish
    on_line: Callable[[str], None] = print  # a line about every server taken out

    def __post_init__(self):
        timeout_secs = self.settings.publish_timeout_secs
        self.servers = [Server(a, timeout_secs) for a in self.settings.servers]
        self._models = check(self.servers, self.context_tokens, development=True)
        self._connected: Servers | None = None

    @property
    def retries(self) -> int:
        """Turns so far that were asked for again because a server failed."""
        return self._connected.retries if self._connected else 0

    def connect(
        self, loop: asyncio.AbstractEventLoop, on_error: Callable[[BaseException], None]
    ) -> "VLLMConnection":
        """As `RemoteEngine` says."""
        self._connected = Servers(
            {server.address: model.name for server, model in self._models.items()},
            timeout_secs=self.settings.request_timeout_secs,
            attempts=self.settings.attempts,
            loop=loop,
            on_error=on_error,
            on_line=self.on_line,
        )
        return VLLMConnection(self, self._connected)


@dataclasses.dataclass(eq=False)
class _Session:
    ids: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    turns: int = 0  # sampled so far


@dataclasses.dataclass(eq=False)
class VLLMConnection:
    """A `Connection` to vLLM servers; `update` and `close` wait, nothing else."""

    _engine: VLLMEngine
    _servers: Servers
    _policy_version: int | None = None  # of the last publication
    _sessions: dict[Hashable, _Session] = dataclasses.field(default_factory=dict)

    async def sample(self, request: Request) -> Response:
        """As `Connection` says, tried on other servers where one fails."""
        session = self._sessions.setdefault(request.session, _Session())
        prompt = np.concatenate([session.ids, np.asarray(request.new_ids, np.int32)])
        version = self._policy_version
        self._check_request(request, prompt, version)
        asked = {
            "prompt": prompt,
            "max_tokens": request.max_new_tokens,
            "stop_ids": request.stop_ids,
            "stop_texts": request.stop_texts,
        }
        body = functools.partial(
            wire.completion_request,
            temperature=request.temperature,
            seed=wire.seed_number(request.seed),
            **asked,
        )
        read = functools.partial(
            wire.read_completion, vocab_size=self._engine.vocab_size, **asked
        )
        name = f"{request.session} turn {session.turns}"
        turn = await self._servers.ask(request.session, name, body, read)
        session.ids = np.concatenate([prompt, turn.ids])
        session.turns += 1
        return Response(request.session, *turn, policy_version=version)

    def release(self, session: Hashable) -> None:
        """Ends a session; no server is told, nothing there waits for it."""
        self._sessions.pop(session, None)
        self._servers.release(session)

    def update(self, params: object, policy_version: int, limit_secs: float) -> None:
        """Publishes; calls have deadlines of their own. ServerError: none is left."""
        by_address = {server.address: server for server in self._engine.servers}
        left = [member for member in self._servers.members if member.out is None]
        members = {by_address[member.address]: member for member in left}
        published = self._engine.publish(params, policy_version, tuple(members))
        for server, reason in published.lost.items():
            self._servers.take_out(members[server], reason)
        self._servers.check_left()
        self._policy_version = policy_version
        self._servers.weight_version = published.weight_version

    def close(self, timeout_secs: float) -> bool:
        """Waits until the ending event loop has closed all connections."""
        return self._servers.close(timeout_secs)

    def _check_request(
        self, request: Request, prompt: np.ndarray, version: int | None
    ) -> None:
        if version is None:
            raise ValueError("no weights were published yet: call update() before")
        lowest, highest = wire.TEMPERATURES
        if request.temperature and not lowest <= request.temperature <= highest:
            raise ValueError(
                f"temperature {request.temperature:g}, expected 0 or {lowest:g} to "
                f"{highest:g}: vLLM knows no other"
            )
        most = self._engine.context_tokens
        if not len(prompt) or len(prompt) + request.max_new_tokens > most:
            raise ValueError(
                f"session {request.session!r} has {len(prompt)} tokens and may sample "
                f"{request.max_new_tokens}; expected at least one and at most {most} "
                "together, the engine's context"
            )
