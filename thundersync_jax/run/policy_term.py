"""The term of a loss that rewards act on: the built-in one, or a function of one's own.

`loss.surrogate` names a factory, which is called with the `LossConfig` and returns the
term of one sample, in one of two forms:

    term(tokens) -> Surrogate           its parts, as scalars
    term(advantage, tokens) -> scalar   a loss as papers write it: A * (...) + (...)

The second form is split by its derivative in the advantage, which is `weighted`; what
is left at advantage 0 is `additive`. Both are tried on made-up tokens before a run
begins: the advantage is multiplied in after the gradient, buckets pad, and groups share
prompts, so that a term may be

- no function of the advantage but an affine one: min(A r, A clip(r)) is refused, a
  ratio that is clipped without regard to A and detached (CISPO) is not;
- no function of untrained tokens, of their number or of absolute positions.

A term whose value for a trajectory is not the sum of those of its turns (sequence-level
ratios) is refused under release "turn" alone. KL, entropy bonus and distillation are
terms of their own (`objective`), which are added to any policy term.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.config import LossConfig, dotted
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics.writer import METRICS
from thundersync_jax.ops import losses
from thundersync_jax.stream import surrogate as parts
from thundersync_jax.stream.surrogate import Max, Surrogate

Factory = Callable[[LossConfig], Callable[..., Surrogate | jax.Array]]
_TOLERANCE = 1e-4  # relative to the largest: float32, functions that cancel
_ADVANTAGES = (-2.0, -1.0, 0.0, 0.5, 3.0)  # on which a loss must lie on one line
_PROBE_TOKENS = 24


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """What a policy term sees of a sample: numbers of its T tokens.

    Observations and padding are among the T, with weight 0. Only `logprobs` and
    `entropies` depend on the parameters; the rest are constants.

    Attributes:
      logprobs: float[T], log pi(a_t | h_t) under the parameters, differentiated.
      weights: float[T], w_t of `loss.aggregation`; 0 at untrained tokens.
      mask: bool[T], True at trained tokens.
      sampler_logprobs: float[T], as recorded when the tokens were drawn.
      turn_weights: float[T], u_t of the environment under `loss.turn_credit`.
      turn_credits: float[T], v_t of the environment under `loss.turn_credit`.
      entropies: float[T], of the distributions that the tokens were drawn from, in
        nats, differentiated. Computed for terms that read them.
      reference_logprobs: float[T], log-probabilities under the policy after the warm
        start. Computed for terms that read them; one more copy of the parameters.
    """

    logprobs: jax.Array
    weights: jax.Array
    mask: jax.Array
    sampler_logprobs: jax.Array
    turn_weights: jax.Array | None = None
    turn_credits: jax.Array | None = None
    entropies: jax.Array | None = None
    reference_logprobs: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class PolicyTerm:
    """A term, and what a run has to know of it.

    Attributes:
      function: Maps `Tokens` to a `Surrogate`.
      additive: Whether it has a part that no advantage multiplies.
      reads: Optional fields of `Tokens` that it reads.
      of_turns: Whether its value is the sum over turns, each by its own.
    """

    function: Callable[[Tokens], Surrogate]
    additive: bool
    reads: frozenset[str] = frozenset()
    of_turns: bool = True

    def check_turns(self) -> None:
        """Refuses release by turn where turns do not add up to a trajectory."""
        if not self.of_turns:
            raise ConfigError(
                "release is 'turn' with a loss.surrogate whose value for a trajectory "
                "is not the sum over its turns, expected one that is: turns are "
                "computed before their trajectory ends. Set release to 'trajectory'."
            )


def built_in(loss: LossConfig) -> PolicyTerm:
    """The policy gradient, with importance weights and turn credit as configured.

    weighted = - sum_t w_t rho_t u_t log pi(a_t | h_t), additive likewise with v_t.
    """
    credited = loss.turn_credit == "environment"
    return PolicyTerm(_policy_gradient(loss), additive=credited)


def _policy_gradient(loss: LossConfig) -> Callable[[Tokens], Surrogate]:
    def term(tokens):
        if loss.advantage == "none":
            return Surrogate(None)
        weights = tokens.weights
        if loss.importance_cap is not None:
            weights = weights * losses.importance_weights(
                tokens.logprobs,
                tokens.sampler_logprobs,
                tokens.mask,
                loss.importance_cap,
            )
        if loss.turn_credit == "environment":
            return Surrogate(
                *losses.turn_credit(
                    tokens.logprobs, weights, tokens.turn_weights, tokens.turn_credits
                )
            )
        return Surrogate(losses.policy_gradient(tokens.logprobs, weights))

    return term


def load(loss: LossConfig, factory: Factory | None = None) -> PolicyTerm:
    """The term that a config names, tried where it is not the built-in one.

    Args:
      loss: The settings of the loss.
      factory: Makes the term, in place of `loss.surrogate`.

    Raises:
      ConfigError: There is no such factory, or its term cannot be streamed.
    """
    if factory is None and loss.surrogate == "policy_gradient":
        return built_in(loss)
    name = repr(loss.surrogate) if factory is None else _name(factory)
    factory = factory or dotted.load("loss.surrogate", loss.surrogate, ["loss"])
    if loss.importance_cap is not None:
        raise ConfigError(
            f"loss.importance_cap is {loss.importance_cap} with loss.surrogate {name}, "
            "expected none: a term of one's own weighs its tokens itself, "
            "`Tokens.sampler_logprobs` is there for it. Leave loss.importance_cap out."
        )
    return _Trial(name, loss, factory(loss)).term()


class _Trial:
    """A term of a user's on made-up tokens.

    Args:
      name: Shown in errors.
      loss: The settings of the loss.
      function: As the factory returned it.
    """

    def __init__(self, name: str, loss: LossConfig, function: Callable):
        self._name, self._loss, self._function = name, loss, function
        self._takes_advantage = self._number_of_arguments() == 2

    def term(self) -> PolicyTerm:
        """The term, once it has passed."""
        samples = [_made_up(self._loss, seed) for seed in range(3)]
        reads = self._reads(samples[0])
        if self._takes_advantage:
            for tokens in samples:
                self._check_affine(tokens)
            split = functools.partial(_split, self._function)
            left = [self._values(split, tokens)[:, 1] for tokens in samples]
            additive = bool(np.any(left))
            function = split if additive else _without_additive(split)
        else:
            function = self._function
            structure = self._structure(function, samples[0])
            additive = structure.additive
            self._check_names(function, samples[0])
            if structure.weighted and self._loss.advantage == "none":
                self._refuse(
                    "has a part for the advantage while loss.advantage is 'none'",
                    "weighted=None",
                    "Leave that part out, or set loss.advantage.",
                )
        for tokens in samples:
            self._check_untrained(function, tokens)
        of_turns = all(self._sums_over_turns(function, tokens) for tokens in samples)
        return PolicyTerm(function, additive, reads, of_turns)

    def _number_of_arguments(self) -> int:
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except (TypeError, ValueError):
            parameters = ()
        required = [
            parameter
            for parameter in parameters
            if parameter.default is parameter.empty
            and parameter.kind
            in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if len(required) not in (1, 2):
            self._refuse(
                f"made {self._function!r:.80}",
                "a function term(tokens) or term(advantage, tokens)",
                "Return such a function from the factory.",
            )
        if len(required) == 2 and self._loss.advantage == "none":
            self._refuse(
                "takes an advantage while loss.advantage is 'none'",
                "a function term(tokens)",
                "Set loss.advantage, or take tokens alone.",
            )
        return len(required)

    def _reads(self, tokens: Tokens) -> frozenset[str]:
        """Which optional fields it reads; missing ones by name."""
        watched = _Watched(**{f.name: getattr(tokens, f.name) for f in _FIELDS})
        arguments = [jnp.float32(1), watched] if self._takes_advantage else [watched]
        try:
            self._function(*arguments)
        except Exception as error:  # whatever somebody's function does
            credit = watched.seen & {"turn_weights", "turn_credits"}
            if credit and self._loss.turn_credit == "none":
                self._refuse(
                    f"reads {min(credit)} while loss.turn_credit is 'none'",
                    "a run with credit",
                    "Set loss.turn_credit to 'environment'.",
                )
            self._refuse_error(error)
        credited = self._loss.turn_credit == "environment"
        if credited and not watched.seen & {"turn_weights", "turn_credits"}:
            self._refuse(
                "reads no credit while loss.turn_credit is 'environment'",
                "one that uses Tokens.turn_weights or Tokens.turn_credits",
                "Use them, or set loss.turn_credit to 'none'.",
            )
        return frozenset(watched.seen)

    def _structure(self, function: Callable, *arguments) -> parts.Structure:
        def surrogate(_, arguments):
            return function(*arguments)

        try:
            return parts.structure(surrogate, {}, None, arguments)
        except Exception as error:
            self._refuse_error(error)

    def _check_names(self, function: Callable, tokens: Tokens) -> None:
        returned = function(tokens)
        taken = sorted(METRICS.keys() & (returned.metrics or {}).keys())
        largest = [k for k, x in (returned.metrics or {}).items() if isinstance(x, Max)]
        if taken or largest or returned.diagnostics:
            self._refuse(
                f"returns {'diagnostics' if returned.diagnostics else 'metrics'} named "
                f"{', '.join([*taken, *largest, *(returned.diagnostics or {})])}",
                "metrics with names of their own that are sums over trained tokens",
                "Rename them; metrics.jsonl has their means per token.",
            )

    def _values(self, function: Callable, *arguments) -> np.ndarray:
        """float[1 + 2T, 2]: both parts, and their derivatives in what is learnt."""
        try:
            values = np.asarray(_values(function, *arguments), np.float64)
        except Exception as error:  # whatever somebody's function does
            self._refuse_error(error)
        if not np.all(np.isfinite(values)):
            self._refuse(
                "gives NaN or infinity on made-up tokens, in its value or its gradient",
                "finite numbers wherever log-probabilities are",
                "Select with jnp.where before dividing, exponentiating or taking logs.",
            )
        return values

    def _check_affine(self, tokens: Tokens) -> None:
        loss = functools.partial(_at, self._function)
        self._structure(loss, jnp.float32(1), tokens)
        rows = [self._values(loss, a, tokens)[:, 0] for a in _ADVANTAGES]
        zero, half = rows[2], rows[3]
        for advantage, row in zip(_ADVANTAGES, rows, strict=True):
            if not _close(row, zero + 2 * advantage * (half - zero), rows):
                values = ", ".join(f"{row[0]:.4g}" for row in rows)
                self._refuse(
                    f"gives {values} at the advantages {_ADVANTAGES}, or gradients, "
                    "that lie on no line",
                    "a loss A * (...) + (...): the advantage is multiplied in after "
                    "the gradient, when it is known",
                    "Detach ratios and clip them without regard to the advantage.",
                )

    def _check_untrained(self, function: Callable, tokens: Tokens) -> None:
        """Padding, observations and what comes before change nothing."""
        plain = self._values(function, tokens)
        count, more = len(tokens.mask), (3, 5)
        longer = self._values(function, _surrounded(tokens, *more))
        total = count + sum(more)
        trained = np.flatnonzero(np.asarray(tokens.mask))
        same = [0, *(1 + trained), *(1 + count + trained)]
        place = [0, *(1 + more[0] + trained), *(1 + total + more[0] + trained)]
        rest = np.delete(longer, place, axis=0)
        nothing = dataclasses.replace(
            tokens, weights=0 * tokens.weights, mask=tokens.mask & False
        )
        if (
            not _close(longer[place], plain[same], plain)
            or rest.any()
            or self._values(function, nothing).any()
        ):
            self._refuse(
                "depends on tokens that are not trained, on how many there are or on "
                "absolute positions",
                "sums over trained tokens: buckets pad, and prompts may be shared",
                "Multiply by Tokens.weights or select with Tokens.mask; divide by "
                "jnp.maximum(1, mask.sum()).",
            )

    def _sums_over_turns(self, function: Callable, tokens: Tokens) -> bool:
        """Whether cutting in two, and weighing anew, changes the value as it should."""
        early = np.arange(len(tokens.mask)) < len(tokens.mask) // 2
        turns = [
            dataclasses.replace(
                tokens, weights=tokens.weights * own, mask=tokens.mask & own
            )
            for own in (early, ~early)
        ]
        whole = self._values(function, tokens)
        by_turn = [self._values(function, turn)[0] for turn in turns]
        doubled = dataclasses.replace(tokens, weights=2 * tokens.weights)
        return _close(sum(by_turn), whole[0], whole) and _close(
            self._values(function, doubled), 2 * whole, whole
        )

    def _refuse_error(self, error: Exception) -> None:
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"loss.surrogate {self._name} ended with {type(error).__name__} on made-up "
            f"tokens: {text}. Correct it."
        ) from error

    def _refuse(self, received: str, expected: str, way_out: str) -> None:
        raise ConfigError(
            f"loss.surrogate {self._name} {received}, expected {expected}. {way_out}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Watched(Tokens):
    """Tokens that note which optional fields are read."""

    @functools.cached_property
    def seen(self) -> set[str]:
        return set()

    def __getattribute__(self, name: str):
        if name in _OPTIONAL:
            self.seen.add(name)
        return super().__getattribute__(name)


_FIELDS = dataclasses.fields(Tokens)
_OPTIONAL = {field.name for field in _FIELDS if field.default is None}


def _split(function: Callable, tokens: Tokens) -> Surrogate:
    zero = jnp.zeros((), tokens.logprobs.dtype)
    additive, weighted = jax.jvp(
        lambda advantage: function(advantage, tokens), (zero,), (jnp.ones_like(zero),)
    )
    return Surrogate(weighted, additive)


def _without_additive(split: Callable[[Tokens], Surrogate]) -> Callable:
    return lambda tokens: Surrogate(split(tokens).weighted)


def _at(function: Callable, advantage: jax.Array, tokens: Tokens) -> Surrogate:
    """The whole loss at an advantage, in place of a part."""
    return Surrogate(function(jnp.asarray(advantage, jnp.float32), tokens))


@functools.partial(jax.jit, static_argnums=0)
def _values(function: Callable, *arguments) -> jax.Array:
    """float[1 + 2T, 2] of (tokens,) or (advantage, tokens), as `_Trial._values`."""
    *advantage, tokens = arguments

    def both(logprobs, entropies):
        changed = dataclasses.replace(tokens, logprobs=logprobs, entropies=entropies)
        return parts.parts(function(*advantage, changed))[:2]

    values, pull = jax.vjp(both, tokens.logprobs, tokens.entropies)
    gradients = [jnp.concatenate(pull(part)) for part in jnp.eye(2, dtype=values.dtype)]
    return jnp.concatenate([values[None], jnp.stack(gradients, axis=1)])


def _made_up(loss: LossConfig, seed: int) -> Tokens:
    """Tokens of which some are not trained, with ratios from 0.05 to 20."""
    rng = np.random.default_rng(seed)
    mask = rng.random(_PROBE_TOKENS) < 0.7
    mask[[0, -1]] = False
    logprobs = -rng.exponential(2.0, _PROBE_TOKENS)

    def spread(size):
        return np.where(mask, logprobs + rng.uniform(-size, size, len(mask)), 0)

    weights = losses.token_weights(mask, loss.aggregation, loss.constant)
    values = {
        "logprobs": logprobs,
        "weights": weights,
        "sampler_logprobs": spread(3.0),
        "entropies": rng.uniform(0, 6, len(mask)),
        "reference_logprobs": spread(1.0),
    }
    if loss.turn_credit == "environment":
        values["turn_weights"] = rng.normal(size=len(mask))
        values["turn_credits"] = rng.normal(size=len(mask))
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in values.items()}
    return Tokens(mask=jnp.asarray(mask), **arrays)


def _surrounded(tokens: Tokens, before: int, behind: int) -> Tokens:
    """The same with further untrained tokens, and other numbers at all of those."""

    def longer(x):
        return jnp.pad(x, (before, behind))

    mask = longer(tokens.mask)
    other = {
        field.name: jnp.where(mask, longer(x), -0.5)
        for field in _FIELDS
        if (x := getattr(tokens, field.name)) is not None
    }
    weights = longer(tokens.weights)
    return Tokens(**other | {"mask": mask, "weights": weights})


def _close(row: np.ndarray, expected: np.ndarray, scale: list | np.ndarray) -> bool:
    largest = max(np.max(np.abs(scale)), 1e-30)
    return bool(np.all(np.abs(row - expected) <= _TOLERANCE * largest))


def _name(factory: Factory) -> str:
    return getattr(factory, "__qualname__", type(factory).__name__)
