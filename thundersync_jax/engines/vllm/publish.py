"""Publication: new parameters to vLLM servers, at the step boundary and only there.

    write the weights, then on every server:
    pause, reload, drop prefix caches, name the version, resume, probe

All servers have answered before the next request of a trajectory goes out. The probe
is the learner's own judgement: a server must give a fixed prompt, and tokens that it
samples behind it, the learner's log-probabilities.
"""

import dataclasses
import functools
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from thundersync_jax.config import VLLMConfig
from thundersync_jax.config.model import SHAPE, ModelConfig
from thundersync_jax.engines.vllm.engine import Published, Server
from thundersync_jax.errors import ConfigError, ServerError
from thundersync_jax.hf import weights
from thundersync_jax.models import base, transformer

Params = Any  # the tree of `transformer.init`
_PROMPT_TOKENS = 272  # at most: more than two blocks of 128, vLLM's largest, are cached
_SAMPLED_TOKENS = 8
_TEMPERATURE = 0.5  # not 1: log-probabilities before and after it have to differ
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}  # nats, of numbers down to -20


class Probe(NamedTuple):
    """What a server makes of the probe's prompt, of N tokens."""

    ids: np.ndarray  # int32[M], tokens that it sampled behind the prompt
    logprobs: np.ndarray  # float32[M], those of `ids` at the probe's temperature
    scores: np.ndarray  # float32[N - 1], of the prompt's tokens but the first


@dataclasses.dataclass(eq=False)
class Publisher:
    """Brings parameters to servers; ConfigError: their folder holds no such model."""

    settings: VLLMConfig  # folder and dtype of the servers, and the tolerance
    model: ModelConfig  # shape of the policy
    context_tokens: int  # longest sequence that the servers take
    on_line: Callable[[str], None] = print  # a line about the first probe

    def __post_init__(self):
        settings, vocab_size = self.settings, self.model.vocab_size
        self._folder, self._dtype = settings.weights_dir, settings.dtype
        self._tolerance = settings.probe_tolerance or _TOLERANCE[settings.dtype]
        self._served = _served(self._folder, self.model)
        self._run = uuid.uuid4().hex[:8]  # another trainer's weights have other names
        self._count = 0
        # Nats: the last probe's largest, of any server's numbers from the learner's.
        self.difference = float("nan")
        prompt = max(1, min(_PROMPT_TOKENS, self.context_tokens - _SAMPLED_TOKENS))
        ids = np.random.default_rng(0).integers(0, vocab_size, prompt)
        self._prompt = ids.astype(np.int32)
        self._sampled_tokens = min(_SAMPLED_TOKENS, self.context_tokens - prompt)
        learner = transformer.Transformer(self.model)
        self._learner = jax.jit(functools.partial(base.logprobs, learner))

    def publish(
        self, params: Params, version: int, servers: Sequence[Server]
    ) -> Published:
        """Gives servers the policy's parameters, while none answers a trajectory.

        Raises:
          ServerError: A server refused the weights, or answers by others.
        """
        if self._count or not servers:
            return self._deliver(params, version, servers)
        # Servers start with these very parameters, which proves no reload: they have to
        # follow others first, whose log-probabilities nobody takes for theirs.
        names = {"embed", "unembed"} & params.keys()
        others = params | {name: params[name][::-1] for name in names}
        lost = self._deliver(others, version, servers).lost
        servers = [server for server in servers if server not in lost]
        published = self._deliver(params, version, servers)
        self.on_line(
            f"{len(servers)} servers hold the policy: log-probabilities within "
            f"{self.difference:.1e} nats of the learner's, at most {self._tolerance:g} "
            "is allowed"
        )
        return published._replace(lost={**lost, **published.lost})

    def _deliver(
        self, params: Params, version: int, servers: Sequence[Server]
    ) -> Published:
        self._count += 1
        name = f"policy {version}, publication {self._count} of run {self._run}"
        written = params
        if not self._served.tied_embeddings:
            written = params | {"unembed": transformer.head_weights(params)}
        try:
            weights.write_tensors(
                self._folder,
                self._served,
                written,
                self._dtype,
                {"weight_version": name},
            )
        except OSError as error:
            raise ServerError(
                f"the weights cannot be written to vllm.weights_dir {self._folder}: "
                f"{error.strerror or error}; expected a folder to write to, with room "
                "for them. Make room or write it again with thundersync_jax.export."
            ) from error
        answers: dict[Server, Probe | str] = {}
        if servers:
            bring = functools.partial(self._bring, name=name)
            with ThreadPoolExecutor(len(servers)) as threads:
                answers = dict(zip(servers, threads.map(bring, servers), strict=True))
        lost = {s: reason for s, reason in answers.items() if isinstance(reason, str)}
        probes = {s: probe for s, probe in answers.items() if s not in lost}
        gaps = [self._gap(server, params, probe) for server, probe in probes.items()]
        self.difference = max(gaps, default=float("nan"))
        return Published(name, lost)

    def _bring(self, server: Server, name: str) -> Probe | str:
        """What a server then samples and scores, or one line where it is gone."""
        try:
            _update(server, name)
            # Sampled first: it reads the prefix cache, where scores of a prompt do not.
            sampled = server.complete(
                self._prompt,
                max_tokens=self._sampled_tokens,
                temperature=_TEMPERATURE,
                seed=self._count,
            )
            return Probe(sampled.ids, sampled.logprobs, server.score(self._prompt))
        except ConnectionError as error:
            return f"publishing {name}: {error}"
        except ValueError as error:
            raise ServerError(
                f"publishing {name}: {error}; expected a server "
                "that reloads and scores. Start it as launch/local_vllm.sh does."
            ) from error

    def _gap(self, server: Server, params: Params, probe: Probe) -> float:
        """The largest difference of a server's numbers from the learner's."""
        prompt = len(self._prompt)
        tokens = np.concatenate([self._prompt, probe.ids])
        scored, sampled = slice(1, prompt), slice(prompt, None)
        parts = (
            ("its prompt's tokens", 1.0, scored, probe.scores),
            ("tokens that it sampled", _TEMPERATURE, sampled, probe.logprobs),
        )
        largest = 0.0
        for name, temperature, place, served in parts:
            learner = self._learner(params, tokens, np.float32(temperature))
            learner = np.asarray(learner)[place]
            gaps = np.abs(learner - served)
            gap, at = float(np.max(gaps)), int(np.argmax(gaps))  # they keep a NaN
            if not gap <= self._tolerance:
                raise ServerError(
                    f"{server.address} does not sample from the learner's policy: "
                    f"log-probabilities of {name} differ by up to {gap:.2g} nats "
                    f"({served[at]:.4f} there, {learner[at]:.4f} here), expected at "
                    f"most {self._tolerance:g}. Check that it serves {self._folder} "
                    f"with --dtype {self._dtype} and --logprobs-mode "
                    "processed_logprobs (and, on CPU, without a tied head: "
                    "thundersync_jax.export --untied), or raise vllm.probe_tolerance."
                )
            largest = max(largest, gap)
        return largest


def _update(server: Server, name: str) -> None:
    server.health()  # a hung one would take the whole deadline of a publication
    server.pause()
    server.reload()
    server.reset_prefix_cache()
    server.set_weight_version(name)
    server.resume()
    version = server.weight_version()
    if version != name:
        raise ServerError(
            f"{server.address} has weights {version!r} right after an update to "
            f"{name!r}; does another trainer use it? Give each its own servers."
        )


def _served(folder: str, model: ModelConfig) -> ModelConfig:
    """What servers read from a folder: the policy, its head tied or not."""
    try:
        served = ModelConfig(path=folder)
    except ConfigError as error:
        raise ConfigError(
            f"vllm.weights_dir is {folder!r}, expected the folder that the servers "
            f"serve, but {error} Write it with thundersync_jax.export --initial."
        ) from error
    for name in SHAPE:
        own, other = getattr(model, name), getattr(served, name)
        if own != other and not (name == "tied_embeddings" and own):
            raise ConfigError(
                f"vllm.weights_dir {folder} has model.{name} {other}, the policy has "
                f"{own}; expected the same model. Write it there with "
                "thundersync_jax.export --initial and restart the servers."
            )
    return served
