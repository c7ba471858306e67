"""The settings of the loss and of the update."""

import dataclasses
from typing import Literal, get_args

from thundersync_jax.config import dotted
from thundersync_jax.config.checks import (
    at_least_zero,
    below,
    effective,
    positive,
    require,
    share,
)
from thundersync_jax.config.settings import check_types
from thundersync_jax.types import LARGEST_REWARD

Aggregation = Literal["sequence_mean", "token_mean", "constant"]
REWARDED = (
    *("mean_std", "mean_only", "leave_one_out", "leave_one_out_std"),
    *("batch_mean_std", "pass_at_k", "fixed_baseline", "tracked_baseline"),
)
RateSchedule = Literal["constant", "linear", "cosine"]
KLEstimator = Literal["k1", "k2", "k3"]
TurnCredit = Literal["none", "environment"]
Truncated = Literal["keep", "mask", "zero_reward"]
Distill = Literal[
    *("none", "sampled_reverse_kl", "reverse_kl", "forward_kl", "jensen_shannon")
]
DISTILL: tuple[str, ...] = get_args(Distill)[1:]


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW or your own, once per step."""

    learning_rate: float = 1e-3  # after the warm-up; 0 leaves the policy as it is
    warmup_steps: int = 0  # updates of linear warm-up from 0
    weight_decay: float = 0.0  # per unit of learning rate; not of norms and biases
    b1: float = 0.9  # decay of the first moment
    b2: float = 0.95  # decay of the second moment
    clip_norm: float | None = 1.0  # largest global gradient norm; none: no clipping
    schedule: RateSchedule = "constant"  # of the rate after the warm-up
    decay_steps: int | None = None  # updates until the floor, the warm-up's included
    floor: float = 0.0  # share of learning_rate that linear and cosine end at
    factory: str | None = None  # module:function of optax's kind; none: AdamW

    def __post_init__(self):
        check_types(self, "optim.")
        names = ["learning_rate", "warmup_steps", "weight_decay"]
        at_least_zero(self, "optim.", names)
        share(self, "optim.", ["floor"])
        falling = ("linear", "cosine")
        effective(self, "optim.", ["decay_steps", "floor"], "schedule", falling)
        decay_steps = self.decay_steps or 0
        require(
            self.schedule == "constant" or decay_steps > self.warmup_steps,
            f"optim.decay_steps is {self.decay_steps} with optim.schedule "
            f"{self.schedule!r} and optim.warmup_steps {self.warmup_steps}",
            "more updates than the warm-up has: a resume may raise `steps`, and the "
            "rates of steps before must not change",
            "Set optim.decay_steps, usually to steps.",
        )
        if self.factory is not None:
            dotted.check("optim.factory", self.factory)
        for name in ("b1", "b2"):
            value = getattr(self, name)
            require(
                0 <= value < 1,
                f"optim.{name} is {value}",
                "at least 0 and below 1",
                f"Set optim.{name} to 0.9 or the like.",
            )
        positive(self, "optim.", ["clip_norm"], "Turn clipping off with none.")


def _check_named(setting: str, name: str, built_in: tuple[str, ...]) -> None:
    """Requires the name of something built in, or of a function of the user's."""
    if ":" in name:
        dotted.check(setting, name)
        return
    require(
        name in built_in,
        f"{setting} is {name!r}",
        f"one of {', '.join(map(repr, built_in))}, or 'module:name' of your own",
        f"Write {setting}={built_in[0]}.",
    )


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """How tokens, trajectories and rewards are weighed: docs/losses.md."""

    aggregation: Aggregation = "sequence_mean"  # over tokens; docs/losses.md: numbers
    constant: float | None = None  # the divisor of aggregation "constant", in tokens
    advantage: str = "mean_std"  # of rewards, or module:estimator; none: no rewards
    distill: Distill = "none"  # divergence to a teacher per sampled token
    distill_coef: float = 1.0  # its weight beside the advantages
    distill_top_k: int | None = None  # teacher's ids, the rest as one; none: all ids
    std_ddof: int = 0  # of the std estimators: 0 population, 1 sample deviation
    std_eps: float = 1e-6  # of the std estimators: added to the deviation, in rewards
    pass_k: int = 4  # of pass_at_k: attempts of which one has to succeed
    baseline: float = 0.0  # reward of fixed_baseline; tracked_baseline begins with it
    baseline_decay: float = 0.9  # of tracked_baseline: weight of the past per step
    kl_coef: float = 0.0  # weight of the KL to the policy after the warm start
    kl_estimator: KLEstimator = "k3"  # of that KL's value; its gradient is always right
    entropy_coef: float = 0.0  # weight of the entropy bonus, per nat
    length_penalty: float = 0.0  # reward that the longest possible trajectory loses
    length_free_tokens: int = 0  # sampled tokens up to which a trajectory loses none
    importance_cap: float | None = None  # of learner over sampler per token; none: off
    truncated: Truncated = "keep"  # trajectories cut off: as others, out, or reward 0
    turn_credit: TurnCredit = "none"  # a turn's own credit: refused, or as it is given
    surrogate: str = "policy_gradient"  # or module:factory of your own, from LossConfig

    def __post_init__(self):
        check_types(self, "loss.")
        _check_named("loss.surrogate", self.surrogate, ("policy_gradient",))
        _check_named("loss.advantage", self.advantage, (*REWARDED, "none"))
        require(
            self.aggregation != "constant" or self.constant is not None,
            "loss.constant is none with loss.aggregation 'constant'",
            "the number of tokens to divide by",
            "Set loss.constant, usually to rollout.context_tokens.",
        )
        require(
            self.std_ddof in (0, 1),
            f"loss.std_ddof is {self.std_ddof}",
            "0 (population) or 1 (sample)",
            "Set loss.std_ddof to 0.",
        )
        share(self, "loss.", ["baseline_decay"])
        at_least_zero(self, "loss.", ["std_eps", "kl_coef", "entropy_coef"])
        at_least_zero(self, "loss.", ["length_penalty", "length_free_tokens"])
        sizes = ["baseline", "kl_coef", "entropy_coef", "length_penalty"]
        sizes += ["distill_coef"]
        below(self, "loss.", sizes, LARGEST_REWARD)
        positive(self, "loss.", ["constant", "distill_top_k"])
        positive(self, "loss.", ["importance_cap"], "Turn it off with none.")
        positive(self, "loss.", ["distill_coef"], "Turn it off with distill='none'.")
        require(
            self.advantage != "none" or self.distill != "none",
            f"loss.advantage is 'none' with loss.distill {self.distill!r}",
            "something to learn from: rewards, or a teacher",
            "Set loss.distill to 'sampled_reverse_kl' or loss.advantage to 'mean_std'.",
        )
        require(
            self.truncated != "zero_reward" or self.advantage != "none",
            "loss.truncated is 'zero_reward' with loss.advantage 'none'",
            "rewards in the loss",
            "Set loss.truncated to 'mask' or 'keep'.",
        )
        std = ("mean_std", "leave_one_out_std", "batch_mean_std")
        effective(self, "loss.", ["constant"], "aggregation", ("constant",))
        effective(self, "loss.", ["std_ddof", "std_eps"], "advantage", std)
        effective(self, "loss.", ["pass_k"], "advantage", ("pass_at_k",))
        prior = ("fixed_baseline", "tracked_baseline")
        effective(self, "loss.", ["baseline"], "advantage", prior)
        effective(self, "loss.", ["baseline_decay"], "advantage", prior[1:])
        effective(self, "loss.", ["kl_estimator"], "kl_coef")
        effective(self, "loss.", ["length_free_tokens"], "length_penalty")
        whole = ("reverse_kl", "forward_kl", "jensen_shannon")
        effective(self, "loss.", ["distill_coef"], "distill", (*DISTILL[:1], *whole))
        effective(self, "loss.", ["distill_top_k"], "distill", whole)
        if self.advantage == "none":
            names = ["length_penalty", "turn_credit", "importance_cap", "distill_coef"]
            effective(self, "loss.", names, "advantage", REWARDED)

    @property
    def has_additive(self) -> bool:
        """Whether the loss has a part that no advantage multiplies."""
        credit = self.turn_credit == "environment"
        distills = self.distill != "none"
        return bool(self.kl_coef or self.entropy_coef or credit or distills)

    @property
    def teacher_kind(self) -> Literal["none", "sampled", "top_k", "full"]:
        """What the loss asks of a teacher, about every token."""
        if self.distill == "none":
            return "none"
        if self.distill == "sampled_reverse_kl":
            return "sampled"
        return "full" if self.distill_top_k is None else "top_k"
