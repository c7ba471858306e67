"""vLLM's wire format: HTTP clients, requests, and what an answer must hold.

Ids go out and ids come back, never text. All that a folder's generation_config.json
could change about sampling is sent explicitly, so that a log-probability is that of the
whole distribution. httpx is imported where a client is made: nobody else needs it.
"""

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from thundersync_jax.chat.base import StopTexts
from thundersync_jax.config.checks import installed, is_number
from thundersync_jax.errors import one_line

# Of idle connections. vLLM ends them after 5 s, losing what is sent just then.
KEEP_SECS = 2.0
_MODEL_KEYS = ("id", "root", "max_model_len")
_LATER = (408, 429)  # statuses below 500 that another try may not meet

_EXCLUDED = -9999.0  # vLLM's -inf, which JSON lacks
# Beside 0. vLLM refuses those above, and takes the lower end in place of those below.
TEMPERATURES = 0.01, 2.0
_WHOLE_DISTRIBUTION = {
    "top_p": 1.0,
    "top_k": 0,  # vLLM's word for all
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,  # the request's stop ids count, not the folder's
    "add_special_tokens": False,
}


class WrongAnswer(ValueError):
    """An answer that does not hold what was asked for."""


class RefusedRequest(ValueError):
    """A server says that a request cannot be: the next would be refused as well."""


class Completion(NamedTuple):
    """A sampled turn, as `engines.base.Response` has it."""

    ids: np.ndarray  # int32[N], the sampled tokens
    logprobs: np.ndarray  # float32[N], at the request's temperature; at 1 where it is 0
    stopped: bool  # whether one of the request's stop ids or texts ended it


class ServedModel(NamedTuple):
    """What a server says it serves."""

    name: str  # by which requests ask for it
    root: str  # the folder, as the server was told
    max_model_len: int  # longest sequence, in tokens


def client(timeout_secs: float) -> Any:
    """An httpx.Client, for calls that wait; a context that closes it."""
    return _httpx().Client(timeout=timeout_secs, **_client_settings())


def async_client() -> Any:
    """An httpx.AsyncClient, without deadlines and limits of its own."""
    return _httpx().AsyncClient(timeout=None, **_client_settings())


def connection_errors() -> type[Exception]:
    """What a client raises where a server is not to be reached, or leaves."""
    return _httpx().HTTPError


def describe(error: BaseException) -> str:
    """One line about a connection that failed: httpx often says nothing but a type."""
    return one_line(error).rstrip(": ").removeprefix("httpx.")


def read_json(status: int, text: str) -> Any:
    """The JSON value of a response of this HTTP status; None where it has no text.

    Raises:
      RefusedRequest: The server refuses.
      ConnectionError: It could not answer this time.
      WrongAnswer: The text is no JSON.
    """
    if status >= 500 or status in _LATER:
        raise ConnectionError(f"status {status}: {read_error(text)}")
    if status != 200:
        raise RefusedRequest(f"status {status}: {read_error(text)}")
    try:
        return json.loads(text) if text else None
    except ValueError as error:
        raise WrongAnswer(f"no JSON but {text[:80]!r}") from error


def completion_request(
    model: str,
    prompt: np.ndarray,
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
    stop_ids: Sequence[int],
    stop_texts: StopTexts | None = None,
) -> dict[str, Any]:
    """The body of POST /v1/completions that samples one turn."""
    texts = {}
    if stop_texts is not None:
        texts = {"stop": list(stop_texts.texts), "skip_special_tokens": False}
    return {
        **texts,
        **_WHOLE_DISTRIBUTION,
        "model": model,
        "prompt": np.asarray(prompt).tolist(),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stop_token_ids": list(stop_ids),
        "logprobs": 0,  # the sampled token's alone
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # names that say which id a number is of
    }


def scoring_request(model: str, prompt: np.ndarray, top_k: int) -> dict[str, Any]:
    """The body of POST /v1/completions that scores int[N], a prompt.

    Per position `top_k` likeliest ids come beside the one that stands there.
    """
    return {
        **_WHOLE_DISTRIBUTION,
        "model": model,
        "prompt": np.asarray(prompt).tolist(),
        "max_tokens": 1,  # at least
        "temperature": 0.0,
        "prompt_logprobs": top_k,
        "return_token_ids": True,
    }


def seed_number(words: Sequence[int]) -> int:
    """A seed in 0 .. 2^63 - 1 that depends on these integers alone."""
    text = ",".join(str(int(word)) for word in words)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def read_completion(
    answer: Any,
    prompt: np.ndarray,
    max_tokens: int,
    stop_ids: Sequence[int],
    vocab_size: int | None = None,
    stop_texts: StopTexts | None = None,
) -> Completion:
    """Reads an answer to a `completion_request` of these arguments.

    `vocab_size` is the number of ids of the model; None where nobody knows.

    Raises:
      WrongAnswer: It is no answer to this request: other tokens, ids out of the
        vocabulary, numbers that are missing or not finite, an end before its time.
    """
    choice = _choice(answer, prompt)
    ids = _ids(_value(choice, "token_ids"))
    most = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    outside = ids[(ids < 0) | (ids >= most)]
    if len(outside):
        raise WrongAnswer(f"sampled id {outside[0]}, expected ids below {most}")
    if not 1 <= len(ids) <= max_tokens:
        raise WrongAnswer(f"{len(ids)} tokens, expected 1 to {max_tokens}")
    stops = np.flatnonzero(np.isin(ids, stop_ids))
    if len(stops) and stops[0] < len(ids) - 1:
        raise WrongAnswer(
            f"{len(ids)} tokens, of which number {stops[0]} is the stop id "
            f"{ids[stops[0]]}: expected nothing behind it"
        )
    end = None if stop_texts is None else stop_texts.end(ids)
    if not len(stops) and end is None and len(ids) < max_tokens:
        raise WrongAnswer(
            f"{len(ids)} of {max_tokens} tokens, ended by "
            f"{choice.get('finish_reason')!r} without a stop id or text; is the "
            "server's --max-model-len long enough, and no max_new_tokens set?"
        )
    tables = _value(_value(choice, "logprobs"), "top_logprobs")
    if not isinstance(tables, list) or len(tables) != len(ids):
        raise WrongAnswer(f"{_count(tables)} log-probabilities of {len(ids)} tokens")
    logprobs = [_logprob(t, f"token_id:{i}") for t, i in zip(tables, ids, strict=True)]
    stopped = bool(len(stops)) or end is not None
    # A server may see a text some tokens late; what was sampled until then holds.
    return Completion(ids[:end], np.asarray(logprobs, np.float32)[:end], stopped)


def read_scores(
    answer: Any, prompt: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, list[Mapping[str, Any]]]:
    """Reads an answer to `scoring_request` of int[N] at int[M] positions, 1 to N - 1.

    Returns:
      float32[M], log q(prompt[p] | prompt[:p]), and the whole table of every position:
      by an id as text, its "logprob" and its "rank" from 1.

    Raises:
      WrongAnswer: A position is missing, or what its table says of the token there.
    """
    tables = _value(_choice(answer, prompt), "prompt_logprobs")
    if not isinstance(tables, list) or len(tables) != len(prompt):
        raise WrongAnswer(f"{_count(tables)} scores of {len(prompt)} tokens")
    tables = [tables[position] for position in positions]
    logprobs = [
        _logprob(_value(table, str(prompt[position])), "logprob")
        for table, position in zip(tables, positions, strict=True)
    ]
    return np.asarray(logprobs, np.float32), tables


def best_ids(
    table: Mapping[str, Any], top_k: int, width: int
) -> list[tuple[int, float]]:
    """The likeliest ids of a position, best first, of equal ones the lowest first.

    A table of `read_scores` holds one entry more than the request's `top_k` where the
    token that stands there is none of the likeliest. Ids from `width` on are padding.
    WrongAnswer where too few of them are left.
    """
    entries = [
        (-_logprob(entry, "logprob", excluded=True), int(name))
        for name, entry in table.items()
        if _value(entry, "rank") <= top_k
    ]
    best = [(i, -negative) for negative, i in sorted(entries)][:top_k]
    if len(best) < top_k or any(i >= width for i, _ in best):
        raise WrongAnswer(
            f"likeliest ids {[i for i, _ in best]}, expected {top_k} below {width}: "
            "others are padding of the teacher's vocabulary"
        )
    return best


def read_model(answer: Any) -> ServedModel:
    """Reads GET /v1/models, the first, the folder's own; WrongAnswer without any."""
    models = _value(answer, "data")
    if not isinstance(models, list) or not models:
        raise WrongAnswer(f"models {_short(models)}, expected at least one")
    name, root, longest = (_value(models[0], key) for key in _MODEL_KEYS)
    return ServedModel(str(name), str(root), int(longest))


def read_weight_version(answer: Any) -> str:
    """Reads GET /weight_info. Raises WrongAnswer where it names no version."""
    return str(_value(answer, "weight_version"))


def read_error(text: str) -> str:
    """One line of what a server says in a refusal."""
    try:
        value = json.loads(text)
    except ValueError:
        return _short(text)
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    return _short(value)


def _choice(answer: Any, prompt: np.ndarray) -> Mapping[str, Any]:
    choices = _value(answer, "choices")
    if not isinstance(choices, list) or len(choices) != 1:
        raise WrongAnswer(f"{_count(choices)} choices, expected one")
    (choice,) = choices
    # A server that adds a token of its own, or cuts some, answers another question.
    seen = _ids(_value(choice, "prompt_token_ids"))
    if not np.array_equal(seen, prompt):
        raise WrongAnswer(
            f"a prompt of {len(seen)} tokens, expected the {len(prompt)} that were sent"
        )
    return choice


def _ids(value: Any) -> np.ndarray:
    array = np.asarray(value if isinstance(value, list) else None)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise WrongAnswer(f"ids {_short(value)}, expected a list of integers")
    return array.astype(np.int32).reshape(-1) if array.size else np.zeros(0, np.int32)


def _logprob(table: Any, name: str, excluded: bool = False) -> float:
    number = _value(table, name)
    if not is_number(number) or (number <= _EXCLUDED and not excluded):
        raise WrongAnswer(f"{name} {_short(number)}, expected a finite number")
    return float(number) if number > _EXCLUDED else -np.inf


def _value(table: Any, name: str) -> Any:
    if not isinstance(table, dict) or table.get(name) is None:
        raise WrongAnswer(f"no {name!r} in {_short(table)}")
    return table[name]


def _count(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else "no"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return " ".join(text.split())[:120]


def _httpx() -> ModuleType:
    return installed("httpx", "vLLM servers", "vllm")


def _client_settings() -> dict[str, Any]:
    limits = _httpx().Limits(keepalive_expiry=KEEP_SECS)
    # No proxy of the environment: servers stand beside the learner.
    return {"trust_env": False, "verify": _tls(), "limits": limits}


@functools.cache
def _tls() -> Any:
    # Reading the certificates takes longer than a request.
    return _httpx().create_ssl_context(trust_env=False)
