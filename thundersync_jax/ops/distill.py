"""Divergences of a student's next-token distribution from a teacher's.

On-policy distillation: the contexts were sampled by the student, and their distribution
is held fixed, as is the teacher. A divergence is of one position. `losses.select` comes
before it where a teacher has not scored every position, `losses.weighted_sum` behind
it. All log-probabilities are at the temperature of the rollout and over one set of ids.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from . import losses
from .logprobs import inverse_temperature


def sampled_reverse_kl(
    logprob_t: jax.Array, teacher_logprob_t: jax.Array, weight_t: jax.Array
) -> jax.Array:
    """Reverse KL, a scalar, from the probabilities of the student's own tokens alone.

        sum_t w_t exp(log p_t - sg log p_t) sg(log p_t - log q_t)

    The value is sum_t w_t (log p_t - log q_t), the gradient

        sum_t w_t (log p_t - log q_t) grad log p_t

    and in expectation over the tokens both are those of KL(p || q), contexts held
    fixed. It is the penalty k1 of `losses.kl_penalty`, whose reference teaches here.

    Args:
      logprob_t: float[T], log p of the tokens that the student sampled.
      teacher_logprob_t: float[T], log q of the same tokens, at the same temperature;
        detached.
      weight_t: float[T], 0 at positions that are not trained or not scored.

    Source: MiniLLM (arXiv 2306.08543), the one-step part of its gradient.
    Differs: no credit for later tokens; that part is the contexts' dependence.
    """
    return losses.kl_penalty(logprob_t, teacher_logprob_t, weight_t, "k1")


def reverse_kl(logprob_v: jax.Array, teacher_logprob_v: jax.Array) -> jax.Array:
    """KL divergence, in nats, from student to teacher: seeks a mode of the teacher.

        KL(p || q) = sum_v p[v] (log p[v] - log q[v])

    Args:
      logprob_v: float[V], log p, normalised. An entry whose probability is 0 or
        underflows to it adds nothing, 0 log 0 = 0, and has no gradient.
      teacher_logprob_v: float[V], log q over the same V outcomes; detached. -inf where
        p > 0 makes the divergence infinite.

    Source: MiniLLM (arXiv 2306.08543).
    """
    return _kl(logprob_v, _teacher(teacher_logprob_v, logprob_v))


def forward_kl(logprob_v: jax.Array, teacher_logprob_v: jax.Array) -> jax.Array:
    """KL divergence, in nats, from teacher to student: covers what the teacher does.

        KL(q || p) = sum_v q[v] (log q[v] - log p[v])

    Args:
      logprob_v: float[V], log p, normalised. -inf where q > 0 makes the divergence
        infinite.
      teacher_logprob_v: float[V], log q over the same V outcomes; detached. An entry
        whose probability is 0 or underflows to it adds nothing.

    Source: Hinton et al. 2015 (arXiv 1503.02531); on the student's own tokens GKD
      (arXiv 2306.13649).
    """
    return _kl(_teacher(teacher_logprob_v, logprob_v), logprob_v)


def jensen_shannon(logprob_v: jax.Array, teacher_logprob_v: jax.Array) -> jax.Array:
    """Jensen-Shannon divergence, in nats: finite, and never above log 2.

        KL(p || m) / 2 + KL(q || m) / 2,  m = (p + q) / 2

    Args:
      logprob_v: float[V], log p, normalised; -inf is probability 0.
      teacher_logprob_v: float[V], log q over the same V outcomes; detached.

    Source: GKD (arXiv 2306.13649), its generalised divergence at beta = 1/2.
    """
    teacher_logprob_v = _teacher(teacher_logprob_v, logprob_v)
    # Two entries of -inf have a NaN for the derivative of their sum's logarithm.
    lowest = jnp.finfo(logprob_v.dtype).min
    mixture_v = jnp.logaddexp(jnp.maximum(logprob_v, lowest), teacher_logprob_v)
    mixture_v = mixture_v - math.log(2)
    return 0.5 * (_kl(logprob_v, mixture_v) + _kl(teacher_logprob_v, mixture_v))


DIVERGENCES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "jensen_shannon": jensen_shannon,
}


def logprobs(
    logits_v: jax.Array, width: int, temperature: jax.Array | float
) -> jax.Array:
    """Log-probabilities at a temperature, renormalised over the first `width` ids.

        x[v] - logsumexp(x[:width]),  x = logits / temperature

    Rows that pad a vocabulary to a round number are no tokens: student and teacher are
    compared over the ids that both have.

    Args:
      logits_v: float[V], float32 or better; the result, float[width], has its dtype.
      width: Ids that count, at most V; more are a ValueError.
      temperature: Scalar; 0, greedy decoding, counts as 1.
    """
    return jax.nn.log_softmax(_scaled(logits_v, width, temperature))


def top_k_logprobs(
    logits_v: jax.Array, ids_k: jax.Array, width: int, temperature: jax.Array | float
) -> jax.Array:
    """Log-probabilities of K ids, and of all others of the first `width` together.

        entry k = log p[ids_k],  entry K = log sum_{v not in ids} p[v]

    A divergence of two such distributions is that of the coarser outcomes: it is never
    above the one over all ids, and equal to it where the others' probabilities have one
    ratio. Without the tail the K entries would be no distribution. The tail comes from
    the others' logits, as 1 - sum_k p[ids_k] would cancel; gradients are exact.

    Args:
      logits_v: float[V], float32 or better.
      ids_k: int32[K], distinct and in [0, width); K below `width`. With an id beyond,
        all entries are NaN.
      width: Ids that count, at most V.
      temperature: Scalar; 0, greedy decoding, counts as 1.

    Returns:
      float[K + 1], the dtype of `logits_v`; -inf for a tail that has no probability.

    Raises:
      ValueError: A width that the logits do not have, or a K that leaves no tail.
    """
    if len(ids_k) >= width:
        raise ValueError(
            f"{len(ids_k)} ids of a vocabulary of {width} leave no tail; take fewer, "
            "or the whole distribution by `logprobs`"
        )
    scaled_v = _scaled(logits_v, width, temperature)
    chosen_k = scaled_v.at[ids_k].get(mode="fill", fill_value=jnp.nan)
    others_v = jnp.ones(width, bool).at[ids_k].set(False)
    # Without any other of some probability the tail is -inf; left in, such entries
    # would then have NaN for a gradient.
    others_v &= scaled_v != -jnp.inf
    tail = jax.nn.logsumexp(scaled_v, where=others_v)
    return jax.nn.log_softmax(jnp.append(chosen_k, tail))


def with_tail(logprob_k: jax.Array) -> jax.Array:
    """K log-probabilities, and what they leave, where no others are known.

        entry K = log(1 - sum_k exp(logprob_k))

    Args:
      logprob_k: float[K], of distinct ids, over the ids that count and at the
        temperature that counts: neither can be mended here.

    Returns:
      float[K + 1]. A tail below the rounding of the sum is not known, and stands at
      that rounding, log eps (1.2e-7 in float32): 0 would make a reverse KL infinite.
    """
    eps = jnp.finfo(logprob_k.dtype).eps
    mass = jnp.minimum(jnp.sum(jnp.exp(logprob_k)), 1 - eps)
    return jnp.append(logprob_k, jnp.log1p(-mass))


def _teacher(teacher_logprob_v, logprob_v):
    return jax.lax.stop_gradient(teacher_logprob_v).astype(logprob_v.dtype)


def _kl(logprob_v, other_logprob_v):
    probability_v = jnp.exp(logprob_v)
    difference_v = logprob_v - other_logprob_v
    # Before the product: 0 times an infinity is NaN.
    possible_v = probability_v != 0
    return jnp.sum(probability_v * jnp.where(possible_v, difference_v, 0))


def _scaled(logits_v, width, temperature):
    if not 0 < width <= len(logits_v):
        raise ValueError(
            f"width={width} of {len(logits_v)} logits; it is the smaller of the "
            "student's and the teacher's rows"
        )
    return logits_v[:width] * inverse_temperature(temperature, logits_v.dtype)
