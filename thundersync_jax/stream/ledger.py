"""What happened in one step, on the host: tokens, verdicts, losses, and the report."""

import collections
import dataclasses
import math
from collections.abc import Collection, Hashable
from typing import Any, NamedTuple

import numpy as np

from thundersync_jax.errors import StreamError
from thundersync_jax.stream.refusals import Denominator
from thundersync_jax.stream.schedule import BATCH, Call, Item


@dataclasses.dataclass(frozen=True)
class Report:
    """One step of gradient streaming in numbers."""

    kept_groups: int  #: groups that count
    dropped_groups: int  #: groups that left nothing, because a member failed or all did
    #: Groups that left nothing, because their raw rewards were equal.
    filtered_groups: int
    short_groups: int  #: kept groups with failed members that nobody replaced
    uniform_groups: int  #: kept groups whose rewards are all equal
    kept_members: int  #: members that count
    failed_members: int  #: members that failed, in kept and in dropped groups
    replaced_members: int  #: failed members in whose place spare ones came
    invalid_rewards: int  #: failed members with reason "invalid_reward"
    #: Rewards of members that did not fail, whatever became of their groups.
    rewards: int
    reward_mean: float  #: mean of these rewards; NaN where there is none
    tokens: int  #: tokens of the kept members, as the caller counted them
    denominator: float  #: Z, what the sums were divided by
    direct: int  #: computed samples that count and were not streamed
    #: Samples that count whose gradient started while rewards that their advantage
    #: depends on, or that decide whether they count, were missing. Where there are no
    #: rewards: while members of the step were not settled.
    streamed: int
    #: Samples that were ready before all rewards they depend on were in and yet were
    #: not streamed: no place for sums was free, or the learner was busy.
    waited: int
    #: Members that waited as their reward was the third of their group: two sums serve
    #: two rewards, unless the estimator is affine and sums are plain.
    waited_for_bucket: int
    #: Samples with advantage 0 and nothing additive, which cost no compute.
    skipped: int
    discarded: int  #: samples computed for a group that was dropped or filtered later
    calls: int  #: gradient calls
    compiles: int  #: gradient programs compiled in this step
    open_groups_max: int  #: the most groups that held sums at a time, rewards missing
    group_sum_bytes: int  #: bytes per device of the group sums that were needed
    gradient_norm: float  #: L2 norm of the gradient, before any clipping
    #: Computed tokens, empty rows included, over real ones; 1 where the caller pads
    #: nothing, NaN where nothing was computed.
    padded_over_real_tokens: float
    #: Share of the computed samples with an advantage other than 0 that were streamed,
    #: of all computed ones where there are no rewards; NaN where there is none.
    streamed_share: float
    loss: float  #: the loss this is the gradient of
    metrics: dict[str, float]  #: the surrogate's metrics over kept members
    #: The surrogate's diagnostics over those kept members that were computed.
    diagnostics: dict[str, float]


@dataclasses.dataclass
class Entry:
    """One sample: its arrays until they are dispatched, and its lengths in tokens."""

    tree: Any
    tokens: int  # trained
    real_tokens: int
    padded_tokens: int


class Computed(NamedTuple):
    """One gradient call."""

    call: Call
    streamed: tuple[bool, ...]  # by item, whether rewards of its unit were missing
    # The unit whose linear sums the gradient joined. None elsewhere: there it counts
    # with its own advantage alone.
    linear: Hashable | None
    evaluated: Any  # beside the gradient, on the device


class Ledger:
    """Collects the facts of a step as they happen."""

    def __init__(self):
        self.samples: dict[tuple[Hashable, int, int], Entry] = {}
        self.advantages: dict[Hashable, dict[int, float]] = {}  # of kept, closed groups
        self.uniform: set[Hashable] = set()
        self.lost: dict[Hashable, str] = {}  # dropped or filtered, in order of closing
        self.failures: dict[tuple[Hashable, int], str] = {}
        self.replaced: set[tuple[Hashable, int]] = set()  # of these
        self.rewards: dict[tuple[Hashable, int], float] = {}
        self.calls: list[Computed] = []
        self.scales: dict[tuple[Hashable, int], float] = {}  # of additive parts, else 1
        self.prompts: dict[Hashable, tuple[int, int]] = {}  # real and padded tokens
        # Of each gradient of a prompt the group, and bool[], whether it is finite.
        self.prompt_calls: list[tuple[Hashable, Any]] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def record_call(self, computed: Computed) -> None:
        """A gradient call has been started; its samples' arrays are let go."""
        self.calls.append(computed)
        call = computed.call
        entries = [self.samples[item[:3]] for item in call.items]
        empty_rows = call.rows - len(entries)
        self.counts["computed"] += empty_rows * entries[0].padded_tokens
        for entry in entries:
            self.counts["computed"] += entry.padded_tokens
            self.counts["real"] += entry.real_tokens
            entry.tree = None

    def record_prompt(self, group: Hashable, evaluated: Any) -> None:
        """The gradient of a group's shared prompt has been started."""
        self.prompt_calls.append((group, evaluated.finite))
        real, padded = self.prompts[group]
        self.counts["real"] += real
        self.counts["computed"] += padded

    def kept(self, item: Item) -> bool:
        """Whether a sample's member counts."""
        return item.member in self.advantages.get(item.group, ())

    def denominator(self, kind: Denominator) -> float:
        """Z, counted over what was kept; 1 where nothing was."""
        if not isinstance(kind, str):
            return float(kind)
        count = {
            "none": 1,
            "groups": len(self.advantages),
            "trajectories": sum(map(len, self.advantages.values())),
            "tokens": self._tokens(),
        }[kind]
        return float(count or 1)

    def check_finite(
        self, values: list[Any], prompts: list[Any], additive: bool
    ) -> None:
        """Refuses gradients that would ruin the parameters, and names trajectories.

        `values` are what the device evaluated, one per call, `prompts` whether each
        gradient of `prompt_calls` is finite, whose group is named then. `additive` says
        whether every sample has an additive part.
        """
        bad = []
        for computed, evaluated in zip(self.calls, values, strict=True):
            if bool(evaluated.finite) or not (additive or self._weighs(computed)):
                continue
            items = computed.call.items
            rows = [
                item
                for item, row in zip(items, evaluated.values, strict=False)
                if not np.all(np.isfinite(row[:2]))
            ]
            bad += [item for item in rows or items if self.kept(item)]
        if bad:
            members = dict.fromkeys(f"{x.group!r}/{x.member}" for x in bad)
            names = ", ".join(list(members)[:8])
            raise StreamError(
                f"the gradient of group/member {names} is not finite; look at its "
                "tokens, weights and reward, nothing was updated"
            )
        fetched = zip(self.prompt_calls, prompts, strict=True)
        groups = [repr(group) for (group, _), finite in fetched if not finite]
        if groups:
            raise StreamError(
                f"the gradient of the prompt of group {', '.join(groups[:8])} is not "
                "finite; look at its members' weights and rewards, nothing was updated"
            )

    def check_norm(self, norm: float) -> None:
        """Refuses a sum of finite gradients that is not finite."""
        if not np.isfinite(norm):
            raise StreamError(
                f"the gradient's norm is {norm} though each trajectory's gradient is "
                "finite: the sums left float32; scale rewards or losses down"
            )

    def report(
        self, values: list[Any], denominator: float, columns: tuple, **rest: Any
    ) -> Report:
        """Adds everything up, exactly: calls come in any order.

        `values` are what the device evaluated, one per call, with `Structure.columns`;
        `rest` the fields of `Report` that only the stream knows.
        """
        losses, rows = [], []
        how = collections.Counter()
        carrying = collections.Counter()
        for computed, evaluated in zip(self.calls, values, strict=True):
            items = zip(
                computed.call.items, computed.streamed, evaluated.values, strict=False
            )
            for item, streamed, row in items:
                if not self.kept(item):
                    how["discarded"] += 1
                    continue
                how["streamed" if streamed else "direct"] += 1
                row = np.asarray(row, np.float64)
                advantage = self.advantages[item.group][item.member]
                carrying[streamed] += advantage != 0 or not self.rewards
                # A sample of advantage 0 counts for nothing, whatever its value.
                scale = self.scales.get(item[:2], 1.0)
                losses += [advantage * row[0] if advantage else 0.0, scale * row[1]]
                rows.append(row[2:])
        extras: tuple[dict[str, float], ...] = {}, {}
        for index, (name, largest, diagnostic) in enumerate(columns):
            column = [row[index] for row in rows]
            # numpy's maximum keeps a NaN, Python's may lose it.
            total = np.max(column, initial=-np.inf) if largest else _sum(column)
            extras[diagnostic][name] = float(total) + 0.0  # -0 and 0 are one largest
        failed = {group for group, _ in self.failures.keys() - self.replaced}
        reasons = collections.Counter(self.failures.values())
        padded = self.counts["computed"] / (self.counts["real"] or math.nan)
        return Report(
            kept_groups=len(self.advantages),
            dropped_groups=sum(v == "dropped" for v in self.lost.values()),
            filtered_groups=sum(v == "filtered" for v in self.lost.values()),
            short_groups=len(failed & self.advantages.keys()),
            uniform_groups=len(self.uniform),
            kept_members=sum(map(len, self.advantages.values())),
            failed_members=len(self.failures),
            replaced_members=len(self.replaced),
            invalid_rewards=reasons["invalid_reward"],
            rewards=len(self.rewards),
            reward_mean=_sum(self.rewards.values()) / (len(self.rewards) or math.nan),
            tokens=self._tokens(),
            denominator=denominator,
            direct=how["direct"],
            streamed=how["streamed"],
            discarded=how["discarded"],
            skipped=self.counts["skipped"],
            calls=len(self.calls),
            padded_over_real_tokens=padded,
            streamed_share=carrying[True] / (carrying.total() or math.nan),
            loss=_sum(losses) / denominator,
            metrics=extras[False],
            diagnostics=extras[True],
            **rest,
        )

    def _weighs(self, computed: Computed) -> bool:
        """Whether any advantage that the call was summed for is not 0.

        Linear sums of groups are added or left out together.
        """
        if computed.linear == BATCH:
            return any(any(group.values()) for group in self.advantages.values())
        if computed.linear is not None:
            return any(self.advantages.get(computed.linear, {}).values())
        return any(
            self.advantages.get(item.group, {}).get(item.member)
            for item in computed.call.items
        )

    def _tokens(self) -> int:
        return sum(
            entry.tokens
            for (group, member, _), entry in self.samples.items()
            if member in self.advantages.get(group, ())
        )


def _sum(values: Collection[float]) -> float:
    """Correctly rounded, whatever the order; NaN where infinities cancel."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return float(np.sum(list(values)))
