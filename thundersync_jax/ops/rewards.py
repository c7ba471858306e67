"""What is subtracted from a verdict before advantages see it, on the host."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


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


State = dict[str, Any]


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
    """

    def __init__(self, decay: float, prior: float = 0.0):
        """A baseline that has seen nothing.

        Args:
          decay: What a visit's weight is multiplied by at the next one, from 0 (the
            last visit alone) to 1 (all count alike).
          prior: The baseline before any step, in units of the reward.

        Raises:
          ValueError: `decay` is not within 0 and 1, or `prior` is not finite.
        """
        if not 0 <= decay <= 1:
            raise ValueError(f"decay is {decay!r}; expected a number from 0 to 1")
        if not math.isfinite(prior):
            raise ValueError(f"prior is {prior!r}; expected a finite number")
        self.decay, self.prior = float(decay), float(prior)
        self._all = Track()
        self._prompts: dict[str, Track] = {}

    def value(self, key: str) -> float:
        """The baseline of a prompt.

        Args:
          key: Names the prompt. One that is new takes the running mean over all
            prompts, and the prior before any step.
        """
        track = self._prompts.get(key, self._all)
        return track.value if track.weight else self.prior

    def update(self, rewards: Mapping[str, Sequence[float]]) -> None:
        """Takes in a whole step at once, in whatever order: the bits are the same.

        Args:
          rewards: The surviving members' rewards by prompt; those of two groups of one
            prompt belong together. A prompt without any stays as it is.

        Raises:
          ValueError: A reward is not finite; nothing is taken in.
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

    def state(self) -> State:
        """What `restored` needs, for JSON; its floats come back from there exactly."""
        prompts = {key: list(self._prompts[key]) for key in sorted(self._prompts)}
        return {"all": list(self._all), "prompts": prompts}

    @classmethod
    def restored(cls, decay: float, prior: float, state: State) -> "PromptBaseline":
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
