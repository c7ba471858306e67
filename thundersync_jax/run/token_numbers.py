"""What a loss needs to know of every token: numbers that come from its logits.

Log-probabilities always; entropies and divergences to a teacher where a term uses them,
from the same logits. Which terms a loss has, and their weights, `objective` knows.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from thundersync_jax.config import LossConfig, ModelConfig
from thundersync_jax.ops import distill, logprobs

Tree = Any
_OPERANDS = ("tokens", "teacher_logprobs", "teacher_ids")


def of(
    model: ModelConfig, temperature: float, loss: LossConfig, width: int | None = None
) -> Callable[[jax.Array, Tree], Tree]:
    """The function that a model's `continuation` applies to logits.

    Args:
      model: Of the policy.
      temperature: Of sampling; a teacher's numbers are at the same.
      loss: Its terms.
      width: Ids that student and teacher have; None for the model's.

    Returns:
      A function of (logits float[C, V], `operands` [C, ...]) that returns a dict of
      float[C]: "logprobs" and, where the loss uses them, "entropies", "shared" (those
      log-probabilities over the first `width` ids) and "divergences".
    """
    narrow = width is not None and width < model.vocab_size
    width = width or model.vocab_size
    kind = teacher_kind(loss)

    def divergence(logits_v, row):
        teacher = row["teacher_logprobs"]
        if kind == "top_k":
            given = row["teacher_ids"], width, temperature
            student = distill.top_k_logprobs(logits_v, *given)
            teacher = distill.with_tail(teacher.astype(student.dtype))
        else:
            student = distill.logprobs(logits_v, width, temperature)
        return distill.DIVERGENCES[loss.distill](student, teacher)

    def numbers(logits, operands):
        tokens = operands["tokens"]
        given = logits, tokens, temperature
        if loss.entropy_coef:
            both = logprobs.logprobs_and_entropies(*given)
            found = dict(zip(("logprobs", "entropies"), both, strict=True))
        else:
            found = {"logprobs": logprobs.target_logprobs(*given)}
        if narrow and kind == "sampled":
            inside = jnp.minimum(tokens, width - 1)
            given = logits[:, :width], inside, temperature
            found["shared"] = logprobs.target_logprobs(*given)
        if kind in ("top_k", "full"):
            found["divergences"] = jax.vmap(divergence)(logits, operands)
        return found

    return numbers


def operands(sample: Tree) -> Tree:
    """What of a sample the function sees beside the logits."""
    return {name: sample[name] for name in _OPERANDS if name in sample}


def distilled(
    loss: LossConfig, sample: Tree, found: Tree, weights: jax.Array
) -> jax.Array:
    """The divergence to the teacher, summed over a sample's tokens.

    Args:
      loss: Which divergence.
      sample: With the teacher's numbers.
      found: What the function of `of` returned of it.
      weights: [T], 0 where it does not count.
    """
    if loss.distill != "sampled_reverse_kl":
        return distill.weighted(found["divergences"], weights)
    given = found.get("shared", found["logprobs"]), sample["teacher_logprobs"][:, 0]
    return distill.sampled_reverse_kl(*given, weights)


def teacher_kind(loss: LossConfig) -> Literal["none", "sampled", "top_k", "full"]:
    """What a loss asks of a teacher, about every token."""
    if loss.distill == "none":
        return "none"
    if loss.distill == "sampled_reverse_kl":
        return "sampled"
    return "full" if loss.distill_top_k is None else "top_k"


def teacher_columns(loss: LossConfig, width: int) -> int:
    """How many numbers that is per token."""
    counts = {"sampled": 1, "top_k": loss.distill_top_k, "full": width}
    return counts[teacher_kind(loss)]
