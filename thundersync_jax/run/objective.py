"""What a step optimises: settings turned into the arguments of a `GradientStream`.

    loss = (1 / Z) sum_i [ A_i weighted_i + additive_i ]

    weighted, additive = the parts of the policy term (module `policy_term`)
    additive = additive + distill_coef * sum_t w_t D_t(student, teacher)
               + kl_coef * sum_t w_t KL_t - entropy_coef * sum_t w_t H_t

w_t and Z come from the aggregation. A term that is not configured is not there.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from thundersync_jax.config import LossConfig, dotted
from thundersync_jax.errors import ConfigError
from thundersync_jax.models import base
from thundersync_jax.models.base import Model
from thundersync_jax.ops import advantages, distill, logprobs, losses
from thundersync_jax.ops.advantages import PromptBaseline
from thundersync_jax.run import policy_term
from thundersync_jax.run.policy_term import PolicyTerm, Tokens
from thundersync_jax.stream.segments import Segments, State
from thundersync_jax.stream.surrogate import Max, Surrogate

Sample = dict[str, jax.Array]  # as module `samples` makes it, [T, ...] but for scalars
_BESIDE_LOGITS = ("tokens", "teacher_logprobs", "teacher_ids")


def policy_surrogate(
    model: Model,
    temperature: float,
    loss: LossConfig,
    width: int | None = None,
    term: PolicyTerm | None = None,
) -> Callable[..., Surrogate]:
    """The surrogate of a model's whole trajectories, at the sampling temperature.

    It is a function of (params, sample), or where the loss compares with a reference
    policy of (params, reference, sample). Samples are what `samples.sample` makes of
    trajectories.

    Metrics are "kl", "entropy" and "teacher_kl" where their terms are, sums over
    trained tokens (not weighted: divide by their number), and those of the policy
    term. Diagnostics are those of `losses.mismatch`, under names that begin with
    "mismatch_". `width` ids are those of student and teacher, None for the model's;
    `term` is the policy term, None for the built-in one.
    """
    term = term or policy_term.built_in(loss)
    compared = with_reference(loss, term)
    numbers = numbers_of_logits(model, temperature, loss, width, term)

    def surrogate(params, sample, reference=None):
        entries = base.whole(
            model, params, sample["tokens"], _beside_logits(sample), numbers
        )
        reference_logprobs = None
        if compared:
            reference_logprobs = base.logprobs(
                model, reference, sample["tokens"], temperature
            )
        return _terms(loss, term, sample, entries, reference_logprobs)

    if compared:
        return lambda params, reference, sample: surrogate(params, sample, reference)
    return surrogate


def policy_segments(
    model: Model,
    temperature: float,
    loss: LossConfig,
    slots: int,
    width: int | None = None,
    term: PolicyTerm | None = None,
) -> Segments:
    """As `policy_surrogate`, of `samples.segment_sample`s up to `slots` tokens."""
    term = term or policy_term.built_in(loss)
    compared = with_reference(loss, term)
    numbers = numbers_of_logits(model, temperature, loss, width, term)

    def target_logprobs(logits, operands):
        return logprobs.target_logprobs(logits, operands["tokens"], temperature)

    def empty(slots):
        kept, last = model.empty(slots)
        policies = 1 + compared
        return State([kept] * policies, [last] * policies)

    def piece(params, kept, last, sample, function):
        return base.piece(
            model,
            params,
            (kept, last),
            sample["tokens"],
            sample["start"],
            sample["length"],
            _beside_logits(sample),
            function,
        )

    def segment(params, state, sample, reference=None):
        entries, kept, last = piece(
            params, state.kept[0], state.last[0], sample, numbers
        )
        after = State([kept], [last])
        reference_logprobs = None
        if compared:
            before = jax.lax.stop_gradient((state.kept[1], state.last[1]))
            reference_logprobs, kept, last = piece(
                reference, *before, sample, target_logprobs
            )
            after = State([*after.kept, kept], [*after.last, last])
        return _terms(loss, term, sample, entries, reference_logprobs), after

    def compared_segment(params, reference, state, sample):
        return segment(params, state, sample, reference)

    function = compared_segment if compared else segment
    return Segments(function, empty, slots, model.token_axis)


def with_reference(loss: LossConfig, term: PolicyTerm) -> bool:
    """Whether the loss compares with the policy after the warm start."""
    return bool(loss.kl_coef) or "reference_logprobs" in term.reads


def numbers_of_logits(
    model: Model,
    temperature: float,
    loss: LossConfig,
    width: int | None = None,
    term: PolicyTerm | None = None,
) -> Callable[[jax.Array, Sample], Sample]:
    """The function that `base.whole` and `base.piece` apply to logits.

    It maps (logits float[C, V], entries [C, ...] of a sample) to a dict of float[C]:
    "logprobs" and, where the loss uses them, "entropies", "shared" (log-probabilities
    over the first `width` ids) and "divergences".
    """
    narrow = width is not None and width < model.vocab_size
    width = width or model.vocab_size
    kind = loss.teacher_kind
    entropies = loss.entropy_coef or (term and "entropies" in term.reads)

    def divergence(logits_v, row):
        teacher = row["teacher_logprobs"]
        if kind == "top_k":
            student = distill.top_k_logprobs(
                logits_v, row["teacher_ids"], width, temperature
            )
            teacher = distill.with_tail(teacher.astype(student.dtype))
        else:
            student = distill.logprobs(logits_v, width, temperature)
        return distill.DIVERGENCES[loss.distill](student, teacher)

    def numbers(logits, operands):
        tokens = operands["tokens"]
        values = {}
        if entropies:
            values["logprobs"], values["entropies"] = logprobs.logprobs_and_entropies(
                logits, tokens, temperature
            )
        else:
            values["logprobs"] = logprobs.target_logprobs(logits, tokens, temperature)
        if narrow and kind == "sampled":
            inside = jnp.minimum(tokens, width - 1)
            values["shared"] = logprobs.target_logprobs(
                logits[:, :width], inside, temperature
            )
        if kind in ("top_k", "full"):
            values["divergences"] = jax.vmap(divergence)(logits, operands)
        return values

    return numbers


def estimator(
    loss: LossConfig, own: advantages.Estimator | Callable | None = None
) -> advantages.Estimator | None:
    """The advantage that a config names; None where no reward is in the loss.

    `own` is an estimator, or a function of `loss` that returns one, in its place;
    ConfigError where it is none. A tracked baseline is subtracted where groups are
    opened; what is left is the reward itself.
    """
    moments = {"ddof": loss.std_ddof, "eps": loss.std_eps}
    made = {
        "mean_std": lambda: advantages.mean_std(**moments),
        "mean_only": advantages.mean_only,
        "leave_one_out": advantages.leave_one_out,
        "leave_one_out_std": lambda: advantages.leave_one_out_std(**moments),
        "batch_mean_std": lambda: advantages.batch_mean_std(**moments),
        "pass_at_k": lambda: advantages.pass_at_k(loss.pass_k),
        "fixed_baseline": lambda: advantages.fixed_baseline(loss.baseline),
        "tracked_baseline": lambda: advantages.fixed_baseline(0.0),
        "none": lambda: None,
    }
    if own is None and loss.advantage in made:
        return made[loss.advantage]()
    if own is None:
        own = dotted.find("loss.advantage", loss.advantage)
    elif loss.advantage in ("none", "tracked_baseline"):
        raise ConfigError(
            f"an estimator is given with loss.advantage {loss.advantage!r}, expected "
            "one whose place it can take. Set loss.advantage to 'mean_only'."
        )
    chosen = own(loss) if callable(own) else own
    if not isinstance(chosen, advantages.Estimator):
        raise ConfigError(
            f"loss.advantage is {loss.advantage!r}, which gives {chosen!r:.60}; "
            "expected an ops.advantages.Estimator, or a function of the LossConfig "
            "that returns one. Return it."
        )
    return chosen


def baselines(loss: LossConfig, state: dict[str, Any] | None = None) -> PromptBaseline:
    """The baselines of "tracked_baseline", new or from where `state` was taken."""
    if state is None:
        return PromptBaseline(loss.baseline_decay, loss.baseline)
    return PromptBaseline.restored(loss.baseline_decay, loss.baseline, state)


def denominator(loss: LossConfig) -> str:
    """Z of an aggregation; docs/losses.md has the table."""
    return "tokens" if loss.aggregation == "token_mean" else "trajectories"


def _beside_logits(sample: Sample) -> Sample:
    """What of a sample `numbers_of_logits` sees beside the logits."""
    return {name: sample[name] for name in _BESIDE_LOGITS if name in sample}


def _terms(
    loss: LossConfig,
    term: PolicyTerm,
    sample: Sample,
    numbers: dict[str, jax.Array],
    reference_logprobs: jax.Array | None,
) -> Surrogate:
    """The loss of a sample with arrays [T, ...], by numbers float[T] of its tokens."""
    logprobs, weights, mask = numbers["logprobs"], sample["weights"], sample["mask"]
    policy = term.function(
        Tokens(
            logprobs=logprobs,
            weights=weights,
            mask=mask,
            sampler_logprobs=sample["logprobs"],
            turn_weights=sample.get("turn_weights"),
            turn_credits=sample.get("turn_credits"),
            entropies=numbers.get("entropies"),
            reference_logprobs=reference_logprobs,
        )
    )
    additive = [] if policy.additive is None else [policy.additive]
    trained = mask.astype(weights.dtype)  # weights of metrics
    metrics = dict(policy.metrics or {})
    if loss.distill != "none":
        divergence = functools.partial(_divergence, loss, sample, numbers)
        additive.append(loss.distill_coef * divergence(weights))
        metrics["teacher_kl"] = divergence(trained)
    if loss.kl_coef:
        kl = functools.partial(
            losses.kl_penalty, logprobs, reference_logprobs, estimator=loss.kl_estimator
        )
        additive.append(loss.kl_coef * kl(weights))
        metrics["kl"] = kl(trained)
    if loss.entropy_coef:
        bonus = losses.entropy_bonus(numbers["entropies"], weights)
        additive.append(loss.entropy_coef * bonus)
        metrics["entropy"] = -losses.entropy_bonus(numbers["entropies"], trained)
    return Surrogate(
        policy.weighted,
        sum(additive) if additive else None,
        metrics,
        _mismatch(loss, logprobs, sample["logprobs"], mask),
    )


def _divergence(
    loss: LossConfig, sample: Sample, numbers: Sample, weights: jax.Array
) -> jax.Array:
    """The divergence to the teacher, summed over a sample's tokens with weights [T]."""
    if loss.distill != "sampled_reverse_kl":
        return losses.weighted_sum(numbers["divergences"], weights)
    logprobs = numbers.get("shared", numbers["logprobs"])
    teacher_logprobs = sample["teacher_logprobs"][:, 0]
    return distill.sampled_reverse_kl(logprobs, teacher_logprobs, weights)


def _mismatch(loss, logprobs, sampler_logprobs, mask) -> dict[str, Any]:
    cap = loss.importance_cap or losses.USUAL_CAP
    sizes = losses.mismatch(logprobs, sampler_logprobs, mask, cap)
    sizes["max_abs_log_ratio"] = Max(sizes["max_abs_log_ratio"])
    return {f"mismatch_{name}": size for name, size in sizes.items()}
