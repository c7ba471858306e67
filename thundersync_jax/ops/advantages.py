"""Group advantages on the host, in float64: rewards of one group in, numbers out.

An estimator is one function of a group's rewards that returns a scale and a baseline:

    A_i = scale * (r_i - baseline)

Every advantage of this form is affine in the member's own reward, so the sums of score
gradients, plain and times the reward, are all that streaming has to keep (module
`accumulator`). Rewards arrive here as deviations from a centre, which is subtracted
first, so that rewards 1000 and 1001 lose no digits and equal rewards give exactly zero.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Estimator:
    """A group advantage, affine in the member's own reward.

    Attributes:
      name: Shown in reports and configs.
      affine: Maps deviations float64[G] (rewards minus any constant) to
        `(scale, baseline)`, the baseline relative to the same constant. It sees the
        surviving members only, at least one.
    """

    name: str
    affine: Callable[[np.ndarray], tuple[float, float]]

    def coefficients(
        self, rewards: Sequence[float], centre: float
    ) -> tuple[float, float]:
        """Returns `(scale, offset)` with A_i = scale * (r_i - centre) + offset.

        Args:
          rewards: Finite numbers [G], the group's surviving members.
          centre: What was subtracted from rewards while streaming; one of them.
        """
        deviations = np.asarray(rewards, np.float64) - centre
        scale, baseline = self.affine(deviations)
        return float(scale), float(-scale * baseline)

    def advantages(self, rewards: Sequence[float]) -> np.ndarray:
        """Returns float64[G], the advantage of every member.

        Args:
          rewards: Finite numbers [G], G >= 1.
        """
        rewards = np.asarray(rewards, np.float64)
        scale, baseline = self.affine(rewards - rewards[0])
        return scale * ((rewards - rewards[0]) - baseline)


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
    """
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof!r}; expected 0 (population) or 1 (sample)")
    if not (np.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps is {eps!r}; expected a finite number >= 0")

    def affine(deviations):
        mean = np.mean(deviations)
        count = len(deviations) - ddof
        std = np.sqrt(np.sum((deviations - mean) ** 2) / count) if count > 0 else 0.0
        return (1.0 / (std + eps) if std > 0 else 0.0), mean

    return Estimator(f"mean_std(ddof={ddof}, eps={eps:g})", affine)


def mean_only() -> Estimator:
    """Deviation from the group mean: A_i = r_i - mean(r).

    Source: Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783).
    """
    return Estimator("mean_only()", lambda deviations: (1.0, np.mean(deviations)))


def leave_one_out() -> Estimator:
    """Deviation from the mean of the others: A_i = r_i - mean(r_j, j != i).

    Written as G / (G - 1) * (r_i - mean(r)); a group of one has advantage 0.

    Source: RLOO, Ahmadian et al. 2024 (arXiv 2402.14740), equation 6.
    """

    def affine(deviations):
        members = len(deviations)
        return (members / (members - 1) if members > 1 else 0.0), np.mean(deviations)

    return Estimator("leave_one_out()", affine)
