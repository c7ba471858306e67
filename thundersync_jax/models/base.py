"""What a policy is to the rest of the package: parameters, a pass, a decode step.

A `Model` computes one sequence or, the same, piece by piece behind what earlier pieces
left. `whole` and `piece` make numbers of its logits, a chunk of tokens at a time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.config import ModelConfig, dotted
from thundersync_jax.errors import ConfigError
from thundersync_jax.models import layers
from thundersync_jax.ops import logprobs as token_logprobs

Params = Any  # a pytree of floating-point arrays
Kept = Any  # what tokens leave for later ones: a pytree of floating-point arrays
Numbers = Any  # a pytree of float[T]
# (logits float[C, V], operands of these C tokens) -> numbers of them, row by row
Function = Callable[[jax.Array, Any], Numbers]
ModelFactory = Callable[[ModelConfig], "Model"]

DECODER = "thundersync_jax.models.transformer:Transformer"


class Model(Protocol):
    """A policy as pure functions. Hashable: compiled programs are kept by it.

    Letters: T tokens of a piece, V ids, D numbers per token before the logits, R rows
    that are sampled together.
    """

    vocab_size: int  # V
    chunk_tokens: int  # whose logits exist at a time
    token_axis: int  # of `Kept` arrays, along which tokens lie

    def init(self, key: jax.Array) -> Params:
        """Random parameters: float32, or float64 for a float64 model."""

    def axes(self) -> Any:
        """The tree of `init` with a tuple in place of each array.

        It has one entry per axis: a name of `layers.MESH_AXES`, or None for an axis
        that is never cut.
        """

    def empty(self, slots: int) -> tuple[Kept, jax.Array]:
        """The state before the first token: `Kept` with room for `slots` tokens, and
        float[D], which stands for the last hidden vector. Zeros.
        """

    def segment(
        self,
        params: Params,
        tokens: jax.Array,
        kept: Kept | None = None,
        start: jax.Array | None = None,
    ) -> tuple[jax.Array, Kept]:
        """Runs a piece: int32[T] behind the first `start` tokens of `kept`.

        Entries of `kept` from `start` on are not read; None is the first piece.
        Returns hidden float[T, D], row t from tokens up to t alone, and the piece's own
        part of `Kept`, T tokens.
        """

    def projection(self, params: Params) -> Callable[[jax.Array], jax.Array]:
        """Maps hidden float[C, D] to next logits float[C, V], float32 or wider."""

    def cast(self, params: Params) -> Params:
        """The parameters of a frozen copy that `segment` and `projection` read."""

    def decode_params(self, params: Params) -> Params:
        """The parameters as `decode` reads them; made once per policy version."""

    def decode_cache(self, slots: int, tokens: int) -> Any:
        """An empty cache for so many sequences: numpy zeros [slots, A, tokens, ...].

        An entry belongs to one position of one sequence, and is written when its token
        runs; those from a sequence's end on are never read. A is the leaf's own.
        """

    def decode(
        self, params: Params, cache: Any, ids: jax.Array, positions: jax.Array
    ) -> tuple[Any, Any]:
        """Runs ids int32[R, T] at positions int32[R, T], behind cache rows [R, ...].

        Returns the cache with their entries, and what `decode_logits` maps to logits.
        """

    def decode_logits(self, params: Params, hidden: Any) -> jax.Array:
        """Logits float[R * T, V] of what `decode` returns."""


def build(config: ModelConfig, factory: ModelFactory | None = None) -> Model:
    """The model that a config describes, or that `factory` makes in its place.

    ConfigError where a factory cannot be loaded, or makes a model of other ids.
    """
    if factory is None:
        name = config.factory or DECODER
        factory = dotted.load("model.factory", name, ["config.model"])
    model = factory(config)
    if getattr(model, "vocab_size", None) != config.vocab_size:
        raise ConfigError(
            f"the model of model.factory has vocab_size "
            f"{getattr(model, 'vocab_size', None)} with model.vocab_size "
            f"{config.vocab_size}; expected the same ids. Let the factory take "
            "vocab_size from its argument."
        )
    return model


def logprobs(
    model: Model, params: Params, tokens: jax.Array, temperature: jax.Array | float
) -> jax.Array:
    """Log-probability of every token of a sequence given those before it.

        entry t = log pi(tokens[t] | tokens[:t]),  entry 0 = 0

    The result is float32[T], float64 for float64 models.

    Args:
      tokens: int32[T]. What follows a position cannot change its entry, so padding
        belongs at the end.
      temperature: Logits are divided by it.
    """

    def function(logits, targets):
        return token_logprobs.target_logprobs(logits, targets, temperature)

    return whole(model, params, tokens, tokens, function)


def whole(
    model: Model, params: Params, tokens: jax.Array, operands: Any, function: Function
) -> Numbers:
    """Numbers of every token of a whole sequence.

        entry t = function(logits that predict tokens[t], operands[t]),  entry 0 = 0

    Args:
      tokens: int32[T]. What follows a position cannot change its entry, so padding
        belongs at the end.
      operands: Arrays [T, ...] that `function` reads beside the logits.
    """
    hidden, _ = model.segment(params, tokens)
    # The last row runs for nothing: T may be sharded, and T - 1 would not divide.
    following = jax.tree.map(lambda x: jnp.roll(x, -1, axis=0), operands)
    numbers = _numbers(model, params, hidden, following, function)
    return jax.tree.map(
        lambda x: jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]]), numbers
    )


def piece(
    model: Model,
    params: Params,
    state: tuple[Kept, jax.Array],
    tokens: jax.Array,
    start: jax.Array,
    length: jax.Array,
    operands: Any,
    function: Function,
) -> tuple[Numbers, Kept, jax.Array]:
    """Numbers of every token of a piece, and what it leaves.

    Args:
      state: `Kept` of the pieces before, not read from `start` on; and float[D], the
        hidden vector behind the last token before.
      tokens: int32[T], at positions start .. start + T - 1; padding at the end.
      start: int32[], tokens before the piece.
      length: int32[], how many of its tokens are real.
      operands: Arrays [T, ...] that `function` reads beside the logits.

    Returns:
      What `function` returns, [T]; where `start` is 0, entry 0 means nothing.
      The piece's own part of `Kept`, and the hidden vector [D] behind its last real
      token.
    """
    kept, last = state
    hidden, own = model.segment(params, tokens, kept, start)
    hidden = layers.constrain(hidden, "tokens", None)
    predicting = jnp.concatenate([last[None].astype(hidden.dtype), hidden[:-1]])
    numbers = _numbers(model, params, predicting, operands, function)
    last = jax.lax.dynamic_index_in_dim(hidden, length - 1, keepdims=False)
    return numbers, own, last


def _numbers(model, params, hidden, operands, function):
    project = model.projection(params)
    return token_logprobs.chunked(
        function, hidden, operands, project, model.chunk_tokens
    )


@dataclasses.dataclass(frozen=True)
class FromLogits:
    """A `Model` made of two functions, for a family that has no cache of its own.

    Right and slow: every sampled token and every piece runs its whole context again.
    Parameters are replicated over a mesh.

    Attributes:
      vocab_size: V.
      init: Makes random parameters, a pytree of floating-point arrays, from a key.
      logits: Maps (params, tokens int32[T]) to float[T, V]. Row t predicts the token
        behind t, from tokens up to t alone.
    """

    vocab_size: int
    init: Callable[[jax.Array], Params]
    logits: Callable[[Params, jax.Array], jax.Array]

    chunk_tokens: ClassVar[int] = 512  # of the numbers; the logits are there already
    token_axis: ClassVar[int] = 0

    def axes(self) -> Any:
        """No axis is ever cut."""
        params = jax.eval_shape(self.init, jax.random.key(0))
        return jax.tree.map(lambda x: (None,) * x.ndim, params)

    def empty(self, slots: int) -> tuple[jax.Array, jax.Array]:
        """Tokens are kept as float32, which holds ids up to 2^24: states are
        differentiated. D is V.
        """
        params = jax.eval_shape(self.init, jax.random.key(0))
        token = jax.ShapeDtypeStruct((1,), jnp.int32)
        row = jax.eval_shape(self._rows, params, token)
        return jnp.zeros(slots, jnp.float32), jnp.zeros(row.shape[1:], row.dtype)

    def segment(
        self,
        params: Params,
        tokens: jax.Array,
        kept: jax.Array | None = None,
        start: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """All tokens up to the piece's end, of which its own rows are taken."""
        own = tokens.astype(jnp.float32)
        if kept is None:
            return self._rows(params, tokens), own
        start = len(kept) if start is None else start
        known = jnp.where(jnp.arange(len(kept)) < start, kept, 0)
        sequence = jnp.concatenate([known, jnp.zeros_like(own)])
        sequence = jax.lax.dynamic_update_slice_in_dim(sequence, own, start, 0)
        rows = self._rows(params, sequence.astype(jnp.int32))
        return jax.lax.dynamic_slice_in_dim(rows, start, len(tokens)), own

    def projection(self, params: Params) -> Callable[[jax.Array], jax.Array]:
        """Hidden vectors are logits."""
        return lambda logits: logits

    def cast(self, params: Params) -> Params:
        """As they are."""
        return params

    decode_params = cast

    def decode_cache(self, slots: int, tokens: int) -> np.ndarray:
        """The tokens themselves."""
        return np.zeros((slots, 1, tokens), np.int32)

    def decode(
        self, params: Params, cache: jax.Array, ids: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Only notes the tokens."""
        rows = jnp.arange(len(ids))[:, None]
        cache = cache.at[rows, 0, positions].set(ids, mode="drop")
        sequences = jnp.repeat(cache[:, 0], ids.shape[1], axis=0)
        return cache, (sequences, positions.reshape(-1))

    def decode_logits(self, params: Params, hidden: Any) -> jax.Array:
        """One sequence after the other: a row's bits depend on no other row."""

        def last(row):
            tokens, position = row
            tokens = jnp.where(jnp.arange(len(tokens)) <= position, tokens, 0)
            return self._rows(params, tokens)[position]

        return jax.lax.map(last, hidden)

    def _rows(self, params: Params, tokens: jax.Array) -> jax.Array:
        logits = self.logits(params, tokens)
        if logits.shape != (len(tokens), self.vocab_size):
            raise ConfigError(
                f"the model's logits of {len(tokens)} tokens have shape "
                f"{logits.shape}, expected ({len(tokens)}, {self.vocab_size}): one row "
                "per token, one column per id of model.vocab_size."
            )
        return logits.astype(layers.wide(logits.dtype))
