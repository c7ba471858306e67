"""What is subtracted from a verdict before advantages see it, on the host."""

import math


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

    Returns:
      A number to be subtracted from the reward.

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
