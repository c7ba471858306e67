"""How many tokens a second engines sample: the in-process one beside servers.

All requests of a round are asked at once and sample the same number of tokens. Engines
have their rounds in turns, so that what else the machine does meets all of them.
"""

import asyncio
import dataclasses
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence

import numpy as np

from thundersync_jax.engines.base import (
    Connection,
    Engine,
    RemoteEngine,
    Request,
    connect,
)
from thundersync_jax.view import tables

CLOSE_SECS = 10.0
PUBLISH_SECS = 300.0
REST_SECS = 2.0  # before a round: threads of a server spin for a while after its last


@dataclasses.dataclass(frozen=True)
class Load:
    """What one round asks. Prompts are drawn at random: no two begin alike."""

    requests: int  # at once
    prompt_tokens: int  # of each
    tokens: int  # sampled for each
    vocab_size: int  # bound on the ids of prompts
    temperature: float = 1.0


@dataclasses.dataclass(frozen=True)
class Speed:
    """Sampled tokens per second of one engine under one load."""

    engine: str
    requests: int
    tokens: int  # of each request
    tokens_per_sec: float  # the median round's
    slowest: float
    fastest: float


def measure(
    engines: Mapping[str, Engine | RemoteEngine],
    loads: Sequence[Load],
    repeats: int,
    params: object = None,
    policy_version: int = 0,
) -> list[Speed]:
    """Times rounds of requests, after one round of each engine and load that compiles.

    Engines hold no session; those elsewhere get `params` as `policy_version` before
    they answer. Every load has `repeats` timed rounds on each engine, one load after
    the other.

    Raises ValueError where a request was refused or sampled another number of tokens,
    and whatever an engine died of.
    """
    connections: dict[str, Connection] = {}
    runner = asyncio.Runner()
    loop = runner.get_loop()
    died: asyncio.Future[None] = loop.create_future()

    def on_error(error: BaseException) -> None:
        loop.call_soon_threadsafe(_fail, died, error)

    try:
        for name, engine in engines.items():
            connections[name] = connect(engine, loop, on_error)
            if hasattr(engine, "connect"):
                connections[name].update(params, policy_version, PUBLISH_SECS)
        numbers = itertools.count()
        return [
            speed
            for load in loads
            for speed in _rounds(runner, connections, died, load, repeats, numbers)
        ]
    finally:
        # First the loop, whose tasks hold the connections of engines elsewhere.
        runner.close()
        for connection in connections.values():
            connection.close(CLOSE_SECS)


def table(speeds: Sequence[Speed], reference: str | None = None) -> list[str]:
    """Lines for people; every speed also as a multiple of the engine `reference`'s."""
    columns = (
        tables.Column("requests"),
        tables.Column("tokens\nof each"),
        tables.Column("engine", left=True),
        tables.Column("tokens/s", width=8),
        tables.Column("slowest", width=8),
        tables.Column("fastest", width=8),
        tables.Column(f"times\n{reference}" if reference else "times"),
    )
    base = {s.requests: s.tokens_per_sec for s in speeds if s.engine == reference}
    lines = tables.heading(columns)
    for s in speeds:
        times = tables.MISSING
        if s.requests in base:
            times = f"{s.tokens_per_sec / base[s.requests]:.2f}"
        numbers = [f"{x:,.0f}" for x in (s.tokens_per_sec, s.slowest, s.fastest)]
        cells = [str(s.requests), str(s.tokens), s.engine, *numbers, times]
        lines.append(tables.line(cells, columns))
    return lines


def record(speeds: Sequence[Speed]) -> list[dict[str, str | int | float]]:
    """The same for JSON."""
    return [dataclasses.asdict(speed) for speed in speeds]


def _fail(died, error):
    if not died.done():
        died.set_exception(error)


def _rounds(runner, connections, died, load, repeats, numbers):
    """One round of every engine to warm up, then `repeats` of each, in turns."""
    rates = {name: [] for name in connections}
    for repeat in range(1 + repeats):
        for name, connection in connections.items():
            requests = _requests(load, next(numbers))
            if len(connections) > 1:
                time.sleep(REST_SECS)
            start = time.perf_counter()
            runner.run(_ask_all(connection, died, requests))
            secs = time.perf_counter() - start
            if repeat:
                rates[name].append(load.requests * load.tokens / secs)
    return [
        Speed(
            engine=name,
            requests=load.requests,
            tokens=load.tokens,
            tokens_per_sec=statistics.median(rate),
            slowest=min(rate),
            fastest=max(rate),
        )
        for name, rate in rates.items()
    ]


def _requests(load, number):
    """Requests without stop ids; prompts that no earlier round has cached."""
    rng = np.random.default_rng(number)
    shape = load.requests, load.prompt_tokens
    prompts = rng.integers(load.vocab_size, size=shape, dtype=np.int32)
    return [
        Request(
            session=(number, i),
            new_ids=prompt,
            max_new_tokens=load.tokens,
            stop_ids=(),
            temperature=load.temperature,
            seed=(number, i),
        )
        for i, prompt in enumerate(prompts)
    ]


async def _ask_all(connection, died, requests):
    answers = {asyncio.ensure_future(_ask(connection, r)) for r in requests}
    left = answers
    while left and not died.done():
        done, left = await asyncio.wait(
            {*left, died}, return_when=asyncio.FIRST_COMPLETED
        )
        left = left - {died}
        if any(answer.exception() for answer in done - {died}):
            break
    for answer in left:
        answer.cancel()
    if left:
        await asyncio.wait(left)
    if died.done():
        died.result()
    for answer in answers - left:
        answer.result()


async def _ask(connection, request):
    try:
        response = await connection.sample(request)
    finally:
        connection.release(request.session)
    if len(response.ids) != request.max_new_tokens:
        raise ValueError(
            f"session {request.session} sampled {len(response.ids)} tokens without a "
            f"stop id, expected {request.max_new_tokens}; an engine that ends turns by "
            "itself cannot be compared."
        )
