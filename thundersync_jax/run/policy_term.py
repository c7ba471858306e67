"""The term of a loss that rewards act on: the built-in one, or a function of one's own.

`loss.surrogate` names a factory, which is called with the `LossConfig` and returns the
term of one sample, in one of two forms:

    term(tokens) -> Surrogate           its parts, as scalars
    term(advantage, tokens) -> scalar   a loss as papers write it: A * (...) + (...)

The second form is split by its derivative in the advantage, which is `weighted`; what
is left at advantage 0 is `additive`. docs/losses.md says what is refused, and why.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax.config import LossConfig, dotted
from thundersync_jax.config.checks import require
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics.writer import METRICS
from thundersync_jax.ops import losses
from thundersync_jax.stream import surrogate as parts
from thundersync_jax.stream.surrogate import Surrogate

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
    """

    logprobs: jax.Array  #: float[T], log pi(a_t | h_t), differentiated
    weights: jax.Array  #: float[T], w_t of `loss.aggregation`; 0 at untrained tokens
    mask: jax.Array  #: bool[T], True at trained tokens
    sampler_logprobs: jax.Array  #: float[T], as recorded when the tokens were drawn
    turn_weights: jax.Array | None = None  #: float[T], u_t under `loss.turn_credit`
    turn_credits: jax.Array | None = None  #: float[T], v_t under `loss.turn_credit`
    #: float[T], of the distributions that the tokens were drawn from, in nats,
    #: differentiated. Computed for terms that read them.
    entropies: jax.Array | None = None
    #: float[T], under the policy after the warm start. Computed for terms that read
    #: them; one more copy of the parameters.
    reference_logprobs: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class PolicyTerm:
    """A term, and what a run has to know of it."""

    function: Callable[[Tokens], Surrogate]
    additive: bool  # whether it has a part that no advantage multiplies
    reads: frozenset[str] = frozenset()  # optional fields of `Tokens` that it reads
    of_turns: bool = True  # whether its value is the sum over turns, each by its own

    def check_turns(self) -> None:
        """Refuses release by turn where turns do not add up to a trajectory."""
        if not self.of_turns:
            raise ConfigError(
                "release is 'turn' with a loss.surrogate whose value for a trajectory "
                "is not the sum over its turns, expected one that is: turns are "
                "computed before their trajectory ends. Set release to 'trajectory'."
            )

    def check_samples(self, most: int) -> None:
        """Refuses several samples where these do not add up to a trajectory."""
        if most > 1 and not self.of_turns:
            raise ConfigError(
                f"rollout.samples is {most} with a loss.surrogate whose value for a "
                "trajectory is not the sum over its turns, expected one that is: it "
                "sees one sample at a time. Set rollout.samples to 1."
            )


def built_in(loss: LossConfig) -> PolicyTerm:
    """The policy gradient, with importance weights and turn credit as configured.

    weighted = - sum_t w_t rho_t u_t log pi(a_t | h_t), additive likewise with v_t;
    rho_t from `loss.importance_cap`, else 1, u_t and v_t from `loss.turn_credit`, else
    1 and 0.
    """

    def term(tokens):
        if loss.advantage == "none":
            return Surrogate(None)
        logprobs, weights = tokens.logprobs, tokens.weights
        if loss.importance_cap is not None:
            weights = weights * losses.importance_weights(
                logprobs, tokens.sampler_logprobs, tokens.mask, loss.importance_cap
            )
        if loss.turn_credit == "none":
            return Surrogate(losses.policy_gradient(logprobs, weights))
        weighted, additive = losses.turn_credit(
            logprobs, weights, tokens.turn_weights, tokens.turn_credits
        )
        return Surrogate(weighted, additive)

    return PolicyTerm(term, additive=loss.turn_credit == "environment")


def load(loss: LossConfig, factory: Factory | None = None) -> PolicyTerm:
    """The term that `factory` or the config names; ConfigError if it cannot be used."""
    if factory is None and loss.surrogate == "policy_gradient":
        return built_in(loss)
    name = loss.surrogate if factory is None else getattr(factory, "__qualname__", "")
    factory = factory or dotted.load("loss.surrogate", loss.surrogate, ["loss"])
    require(
        loss.importance_cap is None,
        f"loss.importance_cap is {loss.importance_cap} with loss.surrogate {name!r}",
        "none: a term of one's own weighs its tokens itself, by their sampler_logprobs",
        "Leave loss.importance_cap out.",
    )
    try:
        return _tried(loss, factory(loss))
    except Exception as error:  # whatever somebody's function does
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        text = " ".join(str(error).split())
        raise ConfigError(
            f"loss.surrogate {name!r}, tried on made-up tokens: {kind}{text}"
        ) from error


def _tried(loss: LossConfig, function: Callable) -> PolicyTerm:
    count = len(inspect.signature(function).parameters)
    require(
        count in (1, 2),
        f"its function takes {count} arguments",
        "term(tokens) or term(advantage, tokens)",
        "Return such a function from the factory.",
    )
    samples = [_made_up(loss, seed) for seed in range(3)]
    reads = _reads(loss, function, samples[0], count == 2)
    if count == 2:
        for tokens in samples:
            _check_affine(function, tokens)
        left = [_values(functools.partial(_split, function), x)[:, 1] for x in samples]
        function = functools.partial(_split, function, additive=bool(np.any(left)))
    structure = _structure(function, samples[0])
    require(
        not structure.weighted or loss.advantage != "none",
        "it has a part for the advantage while loss.advantage is 'none'",
        "an additive part alone",
        "Leave that part out, or set loss.advantage.",
    )
    wrong = METRICS.keys() & {*structure.sums}
    wrong |= {*structure.maxima, *structure.diagnostic_sums}
    wrong |= {*structure.diagnostic_maxima}
    require(
        not wrong,
        f"it returns metrics named {', '.join(sorted(wrong))}",
        "`metrics` with names of their own that are sums over trained tokens",
        "Rename them; metrics.jsonl has their means per token.",
    )
    for tokens in samples:
        _check_untrained(function, tokens)
    of_turns = all(_sums_over_turns(function, tokens) for tokens in samples)
    return PolicyTerm(function, structure.additive, reads, of_turns)


def _reads(
    loss: LossConfig, function: Callable, tokens: Tokens, takes_advantage: bool
) -> frozenset[str]:
    """Which optional fields it reads; credit that is missing or unused is refused."""
    watched = _Watched(**vars(tokens))
    try:
        function(*[jnp.float32(1)] * takes_advantage, watched)
    finally:
        credited = loss.turn_credit == "environment"
        require(
            credited == bool(watched.seen & {"turn_weights", "turn_credits"}),
            f"it reads {'no' if credited else 'the'} credit of turns while "
            f"loss.turn_credit is {loss.turn_credit!r}",
            "both or neither",
            "Set loss.turn_credit to 'environment' where the term reads "
            "Tokens.turn_weights or Tokens.turn_credits, else to 'none'.",
        )
    return frozenset(watched.seen)


def _structure(function: Callable, *arguments) -> parts.Structure:
    return parts.structure(lambda _, rest: function(*rest), {}, None, arguments)


def _values(function: Callable, *arguments) -> np.ndarray:
    """float[1 + 2T, 2]: both parts, and their derivatives in what is learnt."""
    values = np.asarray(_evaluated(function, *arguments), np.float64)
    require(
        bool(np.all(np.isfinite(values))),
        "it gives NaN or infinity, in its value or its gradient",
        "finite numbers wherever log-probabilities are",
        "Select with jnp.where before dividing, exponentiating or taking logs.",
    )
    return values


def _check_affine(function: Callable, tokens: Tokens) -> None:
    loss = functools.partial(_at, function)
    _structure(loss, jnp.float32(1), tokens)
    rows = [_values(loss, a, tokens)[:, 0] for a in _ADVANTAGES]
    zero, half = rows[2], rows[3]
    require(
        all(
            _close(row, zero + 2 * advantage * (half - zero), rows)
            for advantage, row in zip(_ADVANTAGES, rows, strict=True)
        ),
        f"it gives {', '.join(f'{row[0]:.4g}' for row in rows)} at the advantages "
        f"{_ADVANTAGES}, or gradients, that lie on no line",
        "a loss A * (...) + (...): the advantage is multiplied in after the gradient, "
        "when it is known",
        "Detach ratios and clip them without regard to the advantage.",
    )


def _check_untrained(function: Callable, tokens: Tokens) -> None:
    """Padding, observations and what comes before change nothing."""
    before, behind = 3, 5
    plain = _values(function, tokens)
    longer = _values(function, _surrounded(tokens, before, behind))
    nothing = dataclasses.replace(
        tokens, weights=0 * tokens.weights, mask=tokens.mask & False
    )
    count, trained = len(tokens.mask), np.flatnonzero(np.asarray(tokens.mask))
    total = before + count + behind
    same = [0, *(1 + trained), *(1 + count + trained)]
    place = [0, *(1 + before + trained), *(1 + total + before + trained)]
    require(
        _close(longer[place], plain[same], plain)
        and not np.delete(longer, place, axis=0).any()
        and not _values(function, nothing).any(),
        "it depends on tokens that are not trained, on how many there are or on "
        "absolute positions",
        "sums over trained tokens: buckets pad, and prompts may be shared",
        "Multiply by Tokens.weights or select with Tokens.mask; divide by "
        "jnp.maximum(1, mask.sum()).",
    )


def _sums_over_turns(function: Callable, tokens: Tokens) -> bool:
    """Whether cutting in two, and weighing anew, changes the value as it should."""
    early = np.arange(len(tokens.mask)) < len(tokens.mask) // 2
    turns = [
        dataclasses.replace(
            tokens, weights=tokens.weights * own, mask=tokens.mask & own
        )
        for own in (early, ~early)
    ]
    doubled = dataclasses.replace(tokens, weights=2 * tokens.weights)
    whole = _values(function, tokens)
    by_turn = sum(_values(function, turn)[0] for turn in turns)
    twice = _values(function, doubled)
    return _close(by_turn, whole[0], whole) and _close(twice, 2 * whole, whole)


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


_OPTIONAL = {f.name for f in dataclasses.fields(Tokens) if f.default is None}


def _split(function: Callable, tokens: Tokens, additive: bool = True) -> Surrogate:
    zero = jnp.zeros((), tokens.logprobs.dtype)
    left, weighted = jax.jvp(
        lambda advantage: function(advantage, tokens), (zero,), (jnp.ones_like(zero),)
    )
    return Surrogate(weighted, left if additive else None)


def _at(function: Callable, advantage: jax.Array, tokens: Tokens) -> Surrogate:
    """The whole loss at an advantage, in place of a part."""
    return Surrogate(function(jnp.asarray(advantage, jnp.float32), tokens))


@functools.partial(jax.jit, static_argnums=0)
def _evaluated(function: Callable, *arguments) -> jax.Array:
    """The array of `_values`, of (tokens,) or (advantage, tokens)."""
    *advantage, tokens = arguments

    def values_of(logprobs, entropies):
        changed = dataclasses.replace(tokens, logprobs=logprobs, entropies=entropies)
        return parts.parts(function(*advantage, changed))[:2]

    values, pull = jax.vjp(values_of, tokens.logprobs, tokens.entropies)
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
        name: jnp.where(mask, longer(x), -0.5)
        for name, x in vars(tokens).items()
        if x is not None
    }
    return Tokens(**other | {"mask": mask, "weights": longer(tokens.weights)})


def _close(row: np.ndarray, expected: np.ndarray, scale: list | np.ndarray) -> bool:
    largest = max(np.max(np.abs(scale)), 1e-30)
    return bool(np.all(np.abs(row - expected) <= _TOLERANCE * largest))
