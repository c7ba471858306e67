"""Policy terms as a user would write them: some that can be streamed, some that cannot.

Factories for `loss.surrogate`, as "own_losses:cispo".
"""

import jax
import jax.numpy as jnp

from thundersync_jax import Max, Surrogate


def cispo(loss):
    """MiniMax-M1, arXiv 2506.13585, equation 4: clipped ratios as detached weights."""

    def term(tokens):
        ratio = jnp.exp(tokens.logprobs - tokens.sampler_logprobs)
        weight = jax.lax.stop_gradient(jnp.minimum(ratio, 1.2)) * tokens.weights
        cut = jnp.sum(tokens.mask & (ratio > 1.2))
        return Surrogate(-jnp.sum(weight * tokens.logprobs), metrics={"cut": cut})

    return term


def reinforce(loss):
    """As papers write it."""

    def term(advantage, tokens):
        return -advantage * jnp.sum(tokens.weights * tokens.logprobs)

    return term


def with_entropy(loss):
    """An advantage part, and one without."""

    def term(advantage, tokens):
        return jnp.sum(
            tokens.weights * (-advantage * tokens.logprobs - 0.25 * tokens.entropies)
        )

    return term


def sequence_ratio(loss):
    """GSPO, arXiv 2507.18071, equation 7, detached and not clipped."""

    def term(tokens):
        gap = jnp.where(tokens.mask, tokens.logprobs - tokens.sampler_logprobs, 0)
        ratio = jnp.exp(jnp.sum(gap) / jnp.maximum(1, jnp.sum(tokens.mask)))
        weights = jax.lax.stop_gradient(ratio) * tokens.weights
        return Surrogate(-jnp.sum(weights * tokens.logprobs))

    return term


def near_reference(loss):
    """Trains the tokens that the reference policy finds likely."""

    def term(tokens):
        likely = jnp.where(tokens.reference_logprobs > -40.0, tokens.weights, 0)
        return Surrogate(-jnp.sum(likely * tokens.logprobs))

    return term


def credited(loss):
    """Turn credit, of the second form."""

    def term(advantage, tokens):
        credit = advantage * tokens.turn_weights + tokens.turn_credits
        return -jnp.sum(tokens.weights * credit * tokens.logprobs)

    return term


def _of(advantage, tokens, slope, clip=(0.8, 1.2)):
    ratio = jnp.exp(
        jnp.where(tokens.mask, tokens.logprobs - tokens.sampler_logprobs, 0)
    )
    clipped = jnp.clip(ratio, *clip)
    return jnp.sum(tokens.weights * slope(advantage, ratio, clipped))


def ppo(loss):
    """min(A r, A clip(r)): no line in A."""

    def slope(a, ratio, clipped):
        return -jnp.minimum(a * ratio, a * clipped)

    return lambda advantage, tokens: _of(advantage, tokens, slope)


def ppo_gradient(loss):
    """The value of A r, the gradient of the clipped ratio: no line in A either."""

    def slope(a, ratio, clipped):
        held = jnp.where(a > 0, clipped, ratio)
        return -a * (jax.lax.stop_gradient(ratio - held) + held)

    return lambda advantage, tokens: _of(advantage, tokens, slope)


def squared(loss):
    return lambda advantage, tokens: (
        advantage**2 * jnp.sum(tokens.weights * tokens.logprobs)
    )


def mean_of_all(loss):
    return lambda tokens: Surrogate(-jnp.mean(tokens.weights * tokens.logprobs))


def unmasked(loss):
    return lambda tokens: Surrogate(-jnp.sum(tokens.logprobs))


def by_position(loss):
    def term(tokens):
        discount = 0.99 ** jnp.arange(len(tokens.mask))
        return Surrogate(-jnp.sum(discount * tokens.weights * tokens.logprobs))

    return term


def nothing_to_divide_by(loss):
    def term(tokens):
        total = jnp.sum(tokens.weights * tokens.logprobs)
        return Surrogate(-total / jnp.sum(tokens.mask))

    return term


def per_token(loss):
    return lambda tokens: Surrogate(-tokens.weights * tokens.logprobs)


def number(loss):
    return lambda tokens: -jnp.sum(tokens.weights * tokens.logprobs)


def three_arguments(loss):
    return lambda advantage, tokens, reward: 0.0


def named_loss(loss):
    def term(tokens):
        total = -jnp.sum(tokens.weights * tokens.logprobs)
        return Surrogate(total, metrics={"loss": total})

    return term


def largest(loss):
    def term(tokens):
        total = -jnp.sum(tokens.weights * tokens.logprobs)
        return Surrogate(total, metrics={"worst": Max(total)})

    return term


def no_function(loss):
    return 0.5
