"""The settings of rollouts: how agents are sampled, and when they are given up."""

import dataclasses
import itertools
from typing import Literal

from thundersync_jax.config.checks import at_least_zero, positive, require, share
from thundersync_jax.config.settings import Automatic, changeable, check_types

CutActions = Literal["end", "run"]
AgentDeadline = Literal["grade", "fail"]
CommandDeadline = Literal["observe", "fail"]
LongObservations = Literal["overflow", "cut"]

MOST_STOP_IDS = 8  # what a turn may name in engines/generation.py
MOST_STOP_TEXTS = 4  # that an OpenAI-compatible server takes
LEAST_SLOTS = 4  # of a device: smaller batches are other programs, with other ids


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How trajectories are sampled, and when they are given up.

    Bucket lengths that are not given are powers of two and the halves between them, up
    to the context. Deadlines and attempts decide only which trajectories fail.
    """

    groups_per_step: int = 16  # prompts per step
    group_size: int = 8  # trajectories per prompt
    slots: int = 32  # decode slots: trajectories alive at a time
    decode_steps_per_call: int = 8  # tokens per slot and decode call
    temperature: float = 1.0  # of sampling and of the trained log-probabilities
    context_tokens: int = 96  # longest trajectory, prompt included
    turn_tokens: int = 24  # longest action
    thinking_tokens: int | None = None  # of an action; its thought is closed then
    turns: int = 3  # most actions of a trajectory
    samples: int = 1  # most sequences of one; above 1 its history may be rewritten
    stop_ids: tuple[int, ...] | None = None  # end an action; none: the tokenizer's
    stop_texts: tuple[str, ...] = ()  # end an action too, which has them
    cut_actions: CutActions = "end"  # at the token limit: end the trajectory, or run it
    long_observations: LongObservations = "overflow"  # that, or their middle left out
    prefill_buckets: tuple[int, ...] = ()  # padded lengths of new tokens
    gradient_buckets: tuple[int, ...] = ()  # padded lengths of trajectories
    segment_buckets: tuple[int, ...] = ()  # of turns and shared prompts; (): gradient's
    command_timeout_secs: float = changeable(10.0)  # deadline of one environment step
    trajectory_timeout_secs: float = changeable(60.0)  # deadline of one trajectory
    start_timeout_secs: float | None = changeable(None)  # none: as of a step
    agent_deadline: AgentDeadline = "grade"  # what is there at a trajectory's, or fail
    command_deadline: CommandDeadline = "observe"  # a line for the policy, or fail
    verify_timeout_secs: float = changeable(10.0)  # deadline of one verification
    step_timeout_secs: float = changeable(300.0)  # deadline of all rollouts of a step
    verify_concurrency: int = changeable(32)  # verifications running at a time
    environments: int | None = changeable(None)  # most at a time; none: no bound
    close_timeout_secs: float = changeable(10.0)  # deadline of an environment's close
    retry_secs: float = changeable(1.0)  # first wait after a fault, then doubled
    start_fault_share: float = changeable(0.5)  # failed starts that pause all others
    outage_secs: float = changeable(300.0)  # longest such pause
    blocked_secs: float = changeable(10.0)  # silence of the event loop to warn of
    attempts: int = changeable(1)  # tries of a trajectory whose environment fails
    failed_share_limit: float = changeable(0.5)  # failed members that stop the run
    mismatch_warning: float = changeable(0.1)  # nats; mean |log-ratio| to warn above
    replacement_groups: int | None = None  # most per step; none: as many as a step has
    spare_members: int = 0  # most of a group, in place of failed ones

    def __post_init__(self):
        check_types(self, "rollout.")
        sizes = ["groups_per_step", "group_size", "slots", "decode_steps_per_call"]
        sizes += ["temperature", "context_tokens", "turn_tokens", "turns", "samples"]
        sizes += ["command_timeout_secs", "trajectory_timeout_secs"]
        sizes += ["verify_timeout_secs", "step_timeout_secs"]
        sizes += ["verify_concurrency", "attempts", "mismatch_warning"]
        sizes += ["close_timeout_secs", "blocked_secs", "retry_secs", "outage_secs"]
        sizes += [
            "thinking_tokens",
            "replacement_groups",
            "environments",
            "start_timeout_secs",
        ]
        positive(self, "rollout.", sizes)
        at_least_zero(self, "rollout.", ["spare_members"])
        share(self, "rollout.", ["failed_share_limit", "start_fault_share"])
        require(
            self.slots >= LEAST_SLOTS,
            f"rollout.slots is {self.slots}",
            f"at least {LEAST_SLOTS}: smaller batches sample other ids",
            f"Set rollout.slots to {LEAST_SLOTS}.",
        )
        require(
            self.turn_tokens < self.context_tokens,
            f"rollout.turn_tokens is {self.turn_tokens} with rollout.context_tokens "
            f"{self.context_tokens}",
            "room for a prompt beside an action",
            "Lower rollout.turn_tokens or raise rollout.context_tokens.",
        )
        require(
            (self.thinking_tokens or 0) < self.turn_tokens,
            f"rollout.thinking_tokens is {self.thinking_tokens} with "
            f"rollout.turn_tokens {self.turn_tokens}",
            "room for an answer behind the thought",
            "Lower rollout.thinking_tokens or raise rollout.turn_tokens.",
        )
        ids = self.stop_ids or ()
        require(
            len(set(ids)) == len(ids) <= MOST_STOP_IDS and min(ids, default=0) >= 0,
            f"rollout.stop_ids is {ids}",
            f"at most {MOST_STOP_IDS} different ids, none below 0",
            "Set rollout.stop_ids to none, for the tokenizer's own end tokens.",
        )
        texts = self.stop_texts
        require(
            all(texts) and len(set(texts)) == len(texts) <= MOST_STOP_TEXTS,
            f"rollout.stop_texts is {texts}",
            f"at most {MOST_STOP_TEXTS} different texts, none empty",
            "Set rollout.stop_texts to () for none.",
        )
        for name in ("prefill_buckets", "gradient_buckets", "segment_buckets"):
            buckets = getattr(self, name)
            if name == "segment_buckets" and not buckets:
                continue
            if not buckets or isinstance(buckets, Automatic):
                buckets = _default_buckets(self.context_tokens)
                object.__setattr__(self, name, buckets)
            _check_buckets(name, buckets, self.context_tokens)

    @property
    def segment_lengths(self) -> tuple[int, ...]:
        """Padded lengths of turns and of shared prompts."""
        return self.segment_buckets or self.gradient_buckets

    @property
    def most_action_tokens(self) -> int:
        """A bound on the sampled tokens of a trajectory."""
        return min(self.turns * self.turn_tokens, self.samples * self.context_tokens)


def _default_buckets(context_tokens: int) -> Automatic:
    """16, 24, 32, 48, 64, 96, ... and the context, rounded up to a multiple of 8."""
    last = max(16, -(-context_tokens // 8) * 8)
    powers = (16 << i for i in range(last.bit_length()))
    lengths = (length for power in powers for length in (power, power * 3 // 2))
    return Automatic((*itertools.takewhile(lambda n: n < last, lengths), last))


def _check_buckets(name: str, buckets: tuple[int, ...], context_tokens: int) -> None:
    require(
        buckets[0] > 0
        and all(a < b for a, b in itertools.pairwise(buckets))
        and buckets[-1] >= context_tokens,
        f"rollout.{name} is {buckets} with rollout.context_tokens {context_tokens}",
        f"ascending lengths, the last at least {context_tokens}",
        f"Let rollout.{name} end in {context_tokens}.",
    )
