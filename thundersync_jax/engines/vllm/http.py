"""HTTP as it is used with vLLM: clients, and what statuses and exceptions mean.

httpx is imported where a client is made, so that nobody else needs it.
"""

import functools
import json
from types import ModuleType
from typing import Any

from thundersync_jax.engines.vllm.wire import WrongAnswer, read_error
from thundersync_jax.errors import ConfigError, one_line

# How long a connection without a request is kept. vLLM ends its own after 5 s, and a
# request that is sent at that moment is lost.
KEEP_SECS = 2.0
_LATER = (408, 429)  # statuses below 500 that another try may not meet


class RefusedRequest(ValueError):
    """A server says that a request cannot be: the next would be refused as well."""


def client(timeout_secs: float) -> Any:
    """An httpx.Client, for calls that wait; a context that closes it."""
    return _httpx().Client(timeout=timeout_secs, **_common())


def async_client() -> Any:
    """An httpx.AsyncClient, without deadlines and limits of its own."""
    return _httpx().AsyncClient(timeout=None, **_common())


def connection_errors() -> type[Exception]:
    """What a client raises where a server is not to be reached, or leaves."""
    return _httpx().HTTPError


def read_json(status: int, text: str) -> Any:
    """The JSON value of a response; None where it has no text.

    Raises:
      RefusedRequest: The server refuses.
      ConnectionError: It could not, this time.
      WrongAnswer: It is no JSON.
    """
    if status >= 500 or status in _LATER:
        raise ConnectionError(f"status {status}: {read_error(text)}")
    if status != 200:
        raise RefusedRequest(f"status {status}: {read_error(text)}")
    try:
        return json.loads(text) if text else None
    except ValueError as error:
        raise WrongAnswer(f"no JSON but {text[:80]!r}") from error


def describe(error: BaseException) -> str:
    """One line about a connection that failed: httpx often says nothing but a type."""
    return one_line(error).rstrip(": ").removeprefix("httpx.")


def _httpx() -> ModuleType:
    try:
        import httpx
    except ImportError as error:
        raise ConfigError(
            "vLLM servers need httpx: pip install 'thundersync_jax[vllm]'."
        ) from error
    return httpx


def _common() -> dict[str, Any]:
    limits = _httpx().Limits(
        max_connections=None,
        max_keepalive_connections=None,
        keepalive_expiry=KEEP_SECS,
    )
    # No proxy of the environment: servers stand beside the learner.
    return {"trust_env": False, "verify": _tls(), "limits": limits}


@functools.cache
def _tls() -> Any:
    # Reading the certificates takes longer than a request.
    return _httpx().create_ssl_context(trust_env=False)
