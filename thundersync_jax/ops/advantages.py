"""Advantages on the host, in float64: all rewards of one scope in, numbers out.

An estimator is one function of an array of rewards, A_i = phi(r_i; {r_1 ... r_N}).
Equal rewards get equal advantages, so that it is a `table` with one row for each
distinct reward. Those below subtract a reward before they take moments, in two passes:
rewards 1000 and 1001 lose no digits and, but for a fixed baseline, equal rewards give
exactly 0. What a reward loses before is here too: `length_penalty`, `PromptBaseline`.
"""

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

Scope = Literal["member", "group", "batch"]
ROUNDING = 1e-9  # of advantages, relative to the largest
# What a declaration is tried on: few survivors and one, ties, distinct rewards, offset.
_PROBES = (
    [0.5],
    [1.0, 0.0],
    [1.0, 1.0, 1.0],
    [0.0, 1.0, 1.0],
    [2.0, 1.0, 0.0, 0.0],
    [0.25, -1.0, 3.5, 3.5, 0.75],
    [1000.0, 1003.0, 1000.5, 1000.5, 1001.0],
)


@dataclasses.dataclass(frozen=True)
class Estimator:
    """One function of rewards, and what it declares about itself.

    ValueError where on one of some small lists of rewards it does not do as declared.
    """

    name: str  #: shown in reports and errors
    #: Rewards float64[N] of one scope, N >= 1, to advantages float64[N]. It may depend
    #: on a member's own reward and on the set of all rewards, nothing else.
    function: Callable[[np.ndarray], np.ndarray]
    #: Whose rewards it is given: those of one "group", of all kept groups of a step
    #: ("batch"), or the "member"'s own alone.
    scope: Scope = "group"
    #: Whether A_i = scale * r_i + offset with scale and offset of the set. A wrong True
    #: makes wrong gradients; a wrong False costs only waiting.
    affine: bool = False

    def __post_init__(self):
        if self.scope not in get_args(Scope):
            raise ValueError(
                f"estimator {self.name}: scope={self.scope!r} is unknown; choose "
                f"{', '.join(get_args(Scope))}"
            )
        _probe(self)

    def table(self, rewards: Sequence[float]) -> dict[float, float]:
        """Advantage of each distinct reward of one scope.

        `rewards` are finite numbers [N], sorted first: no bit depends on their order.
        ValueError where one is not finite, or the function returned another shape, a
        NaN or an infinity, or unequal advantages for equal rewards.
        """
        # Adding 0 makes -0 the same number, in bits, as the 0 it equals.
        ordered = np.sort(np.asarray(rewards, np.float64)) + 0.0
        if not len(ordered):
            return {}
        if not np.all(np.isfinite(ordered)):
            raise ValueError(
                f"estimator {self.name}: rewards {_shown(ordered)} are not all finite; "
                "a member without a reward is a failed member"
            )
        values = _checked(self, ordered, _called(self, ordered))
        distinct, first = np.unique(ordered, return_index=True)
        return dict(zip(distinct.tolist(), values[first].tolist(), strict=True))

    def advantages(self, rewards: Sequence[float]) -> np.ndarray:
        """Returns float64[N], the advantage of every member, in the order given."""
        table = self.table(rewards)
        return np.array([table[float(r)] for r in rewards], np.float64)


def line(
    table: Mapping[float, float], centre: float, other: float, unit: float = 1.0
) -> tuple[float, float]:
    """Returns `(scale, offset)` of the line through two rows of a table.

        A(r) = scale * (r - centre) / unit + offset,  offset = A(centre)

    It holds for these two rewards, and for every reward where the estimator is affine;
    there, the reward farthest from the centre gives the best scale.

    Args:
      table: Advantages by reward, from `Estimator.table`.
      centre: A reward of the table.
      other: Another; or the centre itself, for the constant through it alone.
      unit: What rewards are measured in: where they differ by 1e-310, the scale per 1
        would not be finite.
    """
    offset = table[centre]
    if other == centre:
        return 0.0, offset
    return (table[other] - offset) * (unit / (other - centre)), offset


def mean_std(ddof: int = 0, eps: float = 1e-6) -> Estimator:
    """Deviation from the group mean over the group's standard deviation.

    A_i = (r_i - mean(r)) / (std(r) + eps), and 0 where std(r) = 0, whatever eps.

    Args:
      ddof: 0 for the population, 1 for the sample standard deviation. A group with no
        more than `ddof` members has standard deviation 0.
      eps: Added to the standard deviation, in units of the reward.

    Raises:
      ValueError: `ddof` is not 0 or 1, or `eps` is negative or not finite.

    Source: GRPO, Shao et al. 2024 (arXiv 2402.03300), equation in section 4.1.2.
    Differs: eps, which the equation does not have.
    """
    name = f"mean_std(ddof={ddof}, eps={eps:g})"
    return Estimator(name, _standardised(ddof, eps), affine=True)


def mean_only() -> Estimator:
    """Deviation from the group mean: A_i = r_i - mean(r).

    Source: Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783).
    """
    return Estimator("mean_only()", _from_mean, affine=True)


def leave_one_out() -> Estimator:
    """Deviation from the mean of the others: A_i = r_i - mean(r_j, j != i).

    Written as N / (N - 1) * (r_i - mean(r)); a group of one has advantage 0.

    Source: RLOO, Ahmadian et al. 2024 (arXiv 2402.14740), equation 6.
    """

    def function(rewards):
        others = max(len(rewards) - 1, 1)
        return len(rewards) / others * _from_mean(rewards)

    return Estimator("leave_one_out()", function, affine=True)


def leave_one_out_std(ddof: int = 1, eps: float = 1e-6) -> Estimator:
    """Deviation from the mean of the others over their standard deviation.

    A_i = (r_i - mean(r_j)) / (std(r_j) + eps) over j != i, and 0 where the others are
    all equal, or no more than `ddof`. It has no bound: where the others differ little,
    A_i is large. Not affine, as each distinct reward is left out of other moments.

    `ddof` and `eps` are those of `mean_std`, which refuses the same.

    Source: the mean is that of RLOO, Ahmadian et al. 2024 (arXiv 2402.14740).
    Differs: the division, which makes scores of prompts of unequal spread comparable.
    """
    _refuse_moments(ddof, eps)

    def one(rewards, i):
        others = np.delete(rewards, i)
        deviations = others - others[0]
        mean = np.mean(deviations)
        std = _std(deviations - mean, ddof)
        return ((rewards[i] - others[0]) - mean) / (std + eps) if std > 0 else 0.0

    def function(rewards):
        members = range(len(rewards))
        return np.array([one(rewards, i) if i or members[1:] else 0.0 for i in members])

    return Estimator(f"leave_one_out_std(ddof={ddof}, eps={eps:g})", function)


def batch_mean_std(ddof: int = 0, eps: float = 1e-6) -> Estimator:
    """`mean_std` with the moments of the rewards of all kept groups of a step.

    `ddof` and `eps` are those of `mean_std`, which refuses the same.

    Source: REINFORCE++, Hu et al. 2025 (arXiv 2501.03262), its global normalisation.
    Differs: rewards of whole trajectories, without a KL per token inside.
    """
    name = f"batch_mean_std(ddof={ddof}, eps={eps:g})"
    return Estimator(name, _standardised(ddof, eps), scope="batch", affine=True)


def pass_at_k(k: int) -> Estimator:
    """What a member adds to the best of k, on average over its companions.

    A_i = k * mean over J of max(0, r_i - max(r_J)), J the sets of k - 1 other members

    The mean of A_i grad log pi over a group estimates the gradient of E[max of k
    rewards], without bias; for verdicts 0 and 1 that is pass@k. Sorted, with r_(j) the
    j-th smallest of N rewards, it is a sum of terms >= 0:

        A_i = k / C(N-1, k-1) * sum_j C(j-1, k-2) * max(0, r_i - r_(j))

    Fewer than k survivors count as the best of their number; one alone has advantage 0.

    `k` is a whole number of at least 2, or a ValueError: the best of one is the mean,
    and `leave_one_out` its estimator.

    Source: PKPO, Walder and Karkhanis 2025 (arXiv 2505.15201), the estimator with the
      baseline of k - 1 companions.
    Differs: times N, as the divisor of a loss is applied elsewhere; groups below k.
    """
    if not isinstance(k, numbers.Integral) or k < 2:
        raise ValueError(
            f"k is {k!r}; expected a whole number >= 2 (leave_one_out serves k = 1)"
        )

    def function(rewards):
        members = len(rewards)
        best_of = min(int(k), members)
        if best_of < 2:
            return np.zeros(members)
        sets = math.comb(members - 1, best_of - 1)
        # Whole numbers beyond float64 divide exactly; each share is at most 1.
        share_j = [math.comb(j, best_of - 2) / sets for j in range(members)]
        gain_ij = np.maximum(rewards[:, None] - np.sort(rewards), 0.0)
        return best_of * np.sum(gain_ij * share_j, axis=1)

    return Estimator(f"pass_at_k({int(k)})", function)


def fixed_baseline(baseline: float = 0.0) -> Estimator:
    """Deviation from a number known beforehand: A_i = r_i - baseline.

    Members do not need each other. With baseline 0, on rewards from which a tracked
    baseline of their prompt was subtracted, it is the estimator of that baseline.
    `baseline` is in units of the reward; ValueError where it is not finite.

    Source: REINFORCE, Williams 1992, with its reinforcement baseline.
    """
    if not np.isfinite(baseline):
        raise ValueError(f"baseline is {baseline!r}; expected a finite number")
    name = f"fixed_baseline({baseline:g})"
    return Estimator(name, lambda rewards: rewards - baseline, "member", affine=True)


def length_penalty(
    tokens: int, free_tokens: int, limit_tokens: int, penalty: float
) -> float:
    """What a long trajectory loses of its reward.

        penalty * clip((tokens - free_tokens) / (limit_tokens - free_tokens), 0, 1)

    Args:
      tokens: Sampled tokens of the trajectory.
      free_tokens: Up to here nothing is lost.
      limit_tokens: From here on all of `penalty` is.
      penalty: In units of the reward, >= 0.

    Raises:
      ValueError: The limit is not above the free tokens, the free tokens are negative,
        or the penalty is negative or not finite.

    Source: soft overlong punishment of DAPO, Yu et al. 2025 (arXiv 2503.14476),
      equation 13: its L_max is `limit_tokens`, its L_cache what lies between.
    Differs: its penalty is 1, and it is added as a negative reward.
    """
    if not (math.isfinite(penalty) and penalty >= 0):
        raise ValueError(f"penalty is {penalty!r}; expected a finite number >= 0")
    if not 0 <= free_tokens < limit_tokens:
        raise ValueError(
            f"free_tokens={free_tokens}, limit_tokens={limit_tokens}; the penalty "
            "grows between them, expected 0 <= free_tokens < limit_tokens"
        )
    share = (tokens - free_tokens) / (limit_tokens - free_tokens)
    return penalty * min(max(share, 0.0), 1.0)


class Track(NamedTuple):
    """An exponentially weighted mean."""

    value: float = 0.0
    weight: float = 0.0  # sum of the weights so far, the newest weighing 1


class PromptBaseline:
    """Mean reward of each prompt over earlier steps, recent ones weighing more.

        b = sum_n decay^(N-n) m_n / sum_n decay^(N-n)

    m_n is the mean reward of the prompt's members at its n-th of N visits. The division
    by the weights takes the place of a start value, so that the first visit counts in
    full. Every prompt keeps two numbers for as long as the object lives.

    Source: the persistent value tracker of SPO, Xu and Ding 2025 (arXiv 2509.13232).
    Differs: a constant decay where SPO adapts it to the policy's KL, and no Beta prior:
      rewards may be any number, and an unseen prompt takes the mean of all prompts.

    Args:
      decay: What a visit's weight is multiplied by at the next one, from 0 (the last
        visit alone) to 1 (all count alike).
      prior: The baseline before any step, in units of the reward, and finite.
    """

    def __init__(self, decay: float, prior: float = 0.0):
        if not 0 <= decay <= 1:
            raise ValueError(f"decay is {decay!r}; expected a number from 0 to 1")
        if not math.isfinite(prior):
            raise ValueError(f"prior is {prior!r}; expected a finite number")
        self.decay, self.prior = float(decay), float(prior)
        self._all = Track()
        self._prompts: dict[str, Track] = {}

    def value(self, key: str) -> float:
        """The baseline of a prompt; of a new one the mean over all, or the prior."""
        track = self._prompts.get(key, self._all)
        return track.value if track.weight else self.prior

    def update(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Takes in a whole step at once, in whatever order: the bits are the same.

        `rewards` are those of the surviving members by prompt; one without any stays as
        it is. ValueError where a reward is not finite; nothing is taken in.
        """
        kept = {key: [float(r) for r in rs] for key, rs in rewards.items() if len(rs)}
        for key, prompt_rewards in kept.items():
            if not all(map(math.isfinite, prompt_rewards)):
                raise ValueError(
                    f"prompt {key!r}: rewards {prompt_rewards} are not all finite; a "
                    "member without a reward is a failed member"
                )
        for key, prompt_rewards in kept.items():
            track = self._prompts.get(key, Track())
            self._prompts[key] = self._moved(track, prompt_rewards)
        if kept:
            together = [r for prompt_rewards in kept.values() for r in prompt_rewards]
            self._all = self._moved(self._all, together)

    def state(self) -> dict[str, Any]:
        """What `restored` needs, for JSON; its floats come back from there exactly."""
        prompts = {key: list(self._prompts[key]) for key in sorted(self._prompts)}
        return {"all": list(self._all), "prompts": prompts}

    @classmethod
    def restored(
        cls, decay: float, prior: float, state: Mapping[str, Any]
    ) -> "PromptBaseline":
        """A baseline that goes on where `state` was taken."""
        baseline = cls(decay, prior)
        baseline._all = Track(*state["all"])
        baseline._prompts = {k: Track(*track) for k, track in state["prompts"].items()}
        return baseline

    def _moved(self, track, rewards):
        # As a deviation from the smallest, and exactly rounded: no order, and equal
        # rewards have themselves as their mean.
        lowest = min(rewards)
        mean = lowest + math.fsum(r - lowest for r in rewards) / len(rewards)
        weight = self.decay * track.weight + 1.0
        return Track(track.value + (mean - track.value) / weight, weight)


def _from_mean(rewards):
    deviations = rewards - rewards[0]
    return deviations - np.mean(deviations)


def _standardised(ddof, eps):
    _refuse_moments(ddof, eps)

    def function(rewards):
        deviations = _from_mean(rewards)
        std = _std(deviations, ddof)
        return deviations / (std + eps) if std > 0 else np.zeros_like(deviations)

    return function


def _std(deviations, ddof):
    """Of deviations from their mean; 0 where no more than `ddof` are left."""
    count = len(deviations) - ddof
    # The hypotenuse neither overflows nor underflows where the result does not.
    return math.hypot(*deviations) / math.sqrt(count) if count > 0 else 0.0


def _refuse_moments(ddof, eps):
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof!r}; expected 0 (population) or 1 (sample)")
    if not (np.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps is {eps!r}; expected a finite number >= 0")


def _called(estimator, rewards):
    try:  # a copy, so that a function that works in place harms nothing
        with np.errstate(all="ignore"):
            values = np.asarray(estimator.function(rewards.copy()))
        return values.astype(np.float64, casting="same_kind")
    except Exception as error:  # whatever somebody's function does
        raise ValueError(
            f"estimator {estimator.name}: its function ended with "
            f"{type(error).__name__}: {error}, for rewards {_shown(rewards)}"
        ) from error


def _checked(estimator, rewards, values):
    """The advantages float64[N] of a function, refused where they cannot be right."""
    if values.shape != rewards.shape:
        raise ValueError(
            f"estimator {estimator.name}: {len(rewards)} rewards gave advantages of "
            f"shape {values.shape}; return one number for each reward"
        )
    if not np.all(np.isfinite(values)):
        raise ValueError(
            f"estimator {estimator.name}: rewards {_shown(rewards)} gave advantages "
            f"{_shown(values)}; return 0 where there is nothing to divide by"
        )
    _, first, same = np.unique(rewards, return_index=True, return_inverse=True)
    if not _equal(values, values[first][same]):
        raise ValueError(
            f"estimator {estimator.name}: equal rewards {_shown(rewards)} gave unequal "
            f"advantages {_shown(values)}; ties may not be broken by position"
        )
    return values


def _probe(estimator):
    """Tries the declarations on lists that the function does not refuse itself."""
    refusals = []
    for rewards in map(np.array, _PROBES):
        try:
            values = _called(estimator, rewards)
        except ValueError as refusal:
            refusals.append(refusal)
        else:
            values = _checked(estimator, rewards, values)
            _refuse_declarations(estimator, rewards, values)
    if len(refusals) == len(_PROBES):
        raise ValueError(f"{refusals[-1]}; so did every list it was tried on")


def _refuse_declarations(estimator, rewards, values):
    for order in (np.argsort(rewards), np.arange(len(rewards))[::-1]):
        permuted = _called(estimator, rewards[order])
        if not _equal(permuted, values[order]):
            raise ValueError(
                f"estimator {estimator.name}: rewards {_shown(rewards)} in another "
                "order gave other advantages; an advantage may depend on the member's "
                "own reward and on the set of all rewards only"
            )
    if estimator.scope == "member":
        alone = np.concatenate([_called(estimator, r[None]) for r in rewards])
        if not _equal(alone, values):
            raise ValueError(
                f'estimator {estimator.name}: scope="member", but rewards '
                f"{_shown(rewards)} gave other advantages together than one by one; "
                'declare scope="group"'
            )
    if estimator.affine:
        table = dict(zip(rewards.tolist(), values.tolist(), strict=True))
        scale, offset = line(table, min(table), max(table))
        if not _equal(scale * (rewards - min(table)) + offset, values):
            raise ValueError(
                f"estimator {estimator.name}: affine=True, but the advantages "
                f"{_shown(values)} of rewards {_shown(rewards)} lie on no line; "
                "declare affine=False"
            )


def _equal(left, right):
    return np.max(np.abs(left - right)) <= ROUNDING * max(1e-300, np.max(np.abs(right)))


def _shown(values):
    listed = ", ".join(f"{value:g}" for value in values[:8])
    return f"[{listed}{', ...' if len(values) > 8 else ''}]"
