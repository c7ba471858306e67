"""A fake server whose model is the policy of a folder, read when it is told to."""

import functools

import jax
import numpy as np
from vllm_fake import FakeServer

from thundersync_jax import export
from thundersync_jax.config.model import ModelConfig
from thundersync_jax.hf import weights
from thundersync_jax.models import transformer


@functools.cache
def program(model, tokens):
    """The logits behind every prefix of so many tokens."""

    def logits(params, ids):
        hidden, _ = transformer.segment(model, params, ids)
        return transformer.logits(model, transformer.head_weights(params), hidden)

    return jax.jit(logits)


class PolicyServer(FakeServer):
    """Serves a folder as vLLM does, its prefix cache included.

    Attributes:
      forgets: Whether /reset_prefix_cache does anything.
      reloads: Whether a reload does.
      at_temperature: Whether log-probabilities are taken after temperature.
    """

    def __init__(self, folder, context_tokens):
        super().__init__(max_model_len=context_tokens, logits=self.logits_of)
        self.folder = folder
        self.forgets = self.reloads = self.at_temperature = True
        self._context_tokens = context_tokens
        self._cache, self._resets = {}, 0
        self.on_reload = self.reload
        self._load()

    def reload(self):
        """Reads the folder again, with the cache as it is."""
        if self.reloads:
            self._load()

    def logits_of(self, prefix):
        """Of what comes after a prefix, from the cache where it was seen before."""
        key = tuple(prefix)
        resets = self.calls.count("/reset_prefix_cache")
        if self.forgets and resets != self._resets:
            self._cache.clear()
        self._resets = resets
        if key not in self._cache:
            ids = np.zeros(self._context_tokens, np.int32)
            ids[: len(prefix)] = prefix
            found = program(self._model, self._context_tokens)(self._params, ids)
            self._cache[key] = np.asarray(found[len(prefix) - 1])
        return self._cache[key]

    def _table(self, prefix, token, top_k):
        # Scores of a prompt are computed anew, as in vLLM.
        kept, self._cache = self._cache, {}
        try:
            return super()._table(prefix, token, top_k)
        finally:
            self._cache = kept

    def _sampled(self, body):
        ids, tables = super()._sampled(body)
        if not self.at_temperature:
            start = len(body["prompt"])
            prefix = [*body["prompt"], *ids]
            for i, chosen in enumerate(ids):
                table = self._table(prefix[: start + i], chosen, 0)
                tables[i] = {f"token_id:{chosen}": table[str(chosen)]["logprob"]}
        return ids, tables

    def _load(self):
        self._model = ModelConfig(path=self.folder)
        init = functools.partial(transformer.init, self._model)
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = jax.eval_shape(init, jax.random.key(0))
        shardings = jax.tree.map(lambda _: place, shapes)
        self._params = weights.load(self.folder, self._model, shardings)


def written(config, folder, **given):
    """A folder with what a run of this config begins with."""
    export.export(config, folder=str(folder), initial=True, **given)
    return str(folder)
