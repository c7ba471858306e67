"""How sure a measured share is. Plain numbers in and out."""

import math

_NORMAL_95 = 1.959963984540054  # two-sided 95 % quantile of the normal distribution


def wilson_interval(successes: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a success probability, of use near 0 and 1 as well.

    With p = successes / total, n = total and z = 1.96:

        (p + z^2/2n -+ z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n)

    Returns:
      (low, high) in [0, 1]; (0, 1) where nothing was tried.

    Raises:
      ValueError: Fewer than 0 or more successes than tries.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical
    inference", JASA 22.
    """
    if not 0 <= successes <= total:
        raise ValueError(
            f"{successes} successes of {total} tries; expected a number between 0 and "
            "the number of tries. Count every try once."
        )
    if total == 0:
        return 0.0, 1.0
    p, z2 = successes / total, _NORMAL_95**2
    centre = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = math.sqrt(p * (1 - p) / total + z2 / (4 * total**2))
    half *= _NORMAL_95 / (1 + z2 / total)
    # At the ends the exact bounds are 0 and 1; rounding must not miss them.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == total else centre + half
    return low, high
