"""What happened in one step, on the host: tokens, verdicts, losses, and the report."""

import collections
import dataclasses
import math
from collections.abc import Hashable
from typing import Any, Literal

import numpy as np

from thundersync_jax.errors import StreamError
from thundersync_jax.schedule import Call, Item

Denominator = Literal["none", "groups", "trajectories", "tokens"] | float
PartialGroups = Literal["drop", "keep", "fail"]


@dataclasses.dataclass(frozen=True)
class Report:
    """One step of gradient streaming in numbers.

    Attributes:
      kept_groups: Groups that count.
      dropped_groups: Groups that left nothing, because a member failed or all did.
      short_groups: Kept groups with failed members.
      uniform_groups: Kept groups whose rewards are all equal (advantage 0).
      kept_members: Members that count.
      failed_members: Members that failed, in kept and in dropped groups.
      invalid_rewards: Those of them that failed with reason "invalid_reward".
      rewards: Rewards of members that did not fail, whatever became of their groups.
      reward_mean: Their mean; NaN where there is none.
      tokens: Tokens of the kept members, as the caller counted them.
      denominator: Z, what the sums were divided by.
      direct: Samples whose advantage was known when their gradient started.
      streamed: Samples that went through group sums and count.
      waited: Samples that were ready before their group and yet went directly: no
        place for its sums was free, or the learner was busy.
      skipped: Samples with advantage 0 and nothing additive, which cost no compute.
      discarded: Samples computed for a group that was dropped later.
      calls: Gradient calls.
      compiles: Gradient programs compiled in this step.
      open_groups_max: The most groups that held sums at a time.
      group_sum_bytes: Bytes per device of the group sums that were needed.
      gradient_norm: L2 norm of the gradient, before any clipping.
      padded_over_real_tokens: Computed tokens, empty rows included, over real ones;
        1 where the caller pads nothing, NaN where nothing was computed.
      streamed_share: Share of the computed samples with an advantage other than 0 that
        went through group sums; NaN where there is none.
      loss: The loss this is the gradient of.
      metrics: The surrogate's metrics over kept members.
    """

    kept_groups: int
    dropped_groups: int
    short_groups: int
    uniform_groups: int
    kept_members: int
    failed_members: int
    invalid_rewards: int
    rewards: int
    reward_mean: float
    tokens: int
    denominator: float
    direct: int
    streamed: int
    waited: int
    skipped: int
    discarded: int
    calls: int
    compiles: int
    open_groups_max: int
    group_sum_bytes: int
    gradient_norm: float
    padded_over_real_tokens: float
    streamed_share: float
    loss: float
    metrics: dict[str, float]


@dataclasses.dataclass
class SampleRecord:
    """One sample: its arrays until they are dispatched, and its lengths."""

    tree: Any
    tokens: int
    real_tokens: int
    padded_tokens: int


class Ledger:
    """Collects the facts of a step as they happen."""

    def __init__(self):
        self.samples: dict[tuple[Hashable, int, int], SampleRecord] = {}
        self.advantages: dict[Hashable, dict[int, float]] = {}  # of kept, closed groups
        self.uniform: set[Hashable] = set()
        self.dropped: set[Hashable] = set()
        self.failures: dict[tuple[Hashable, int], str] = {}
        self.rewards: dict[tuple[Hashable, int], float] = {}
        self.calls: list[tuple[Call, Any]] = []  # with what the device evaluated
        self.counts: collections.Counter[str] = collections.Counter()

    def record_call(self, call: Call, evaluated: Any) -> None:
        """A gradient call has been started; its samples' arrays are let go."""
        self.calls.append((call, evaluated))
        records = [self.samples[item[:3]] for item in call.items]
        padding = (call.rows - len(records)) * records[0].padded_tokens
        self.counts["computed"] += sum(r.padded_tokens for r in records) + padding
        self.counts["real"] += sum(r.real_tokens for r in records)
        for record in records:
            record.tree = None

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

    def check_finite(self, values: list[Any], norm: float, additive: bool) -> None:
        """Looks for numbers that would ruin the parameters.

        Args:
          values: What the device evaluated, fetched, one per call.
          norm: Of the whole gradient.
          additive: Whether every sample has an additive part.

        Raises:
          StreamError: There are some; names the trajectories where they are at fault.
        """
        bad = []
        for (call, _), evaluated in zip(self.calls, values, strict=True):
            if bool(evaluated.finite) or not (additive or self._weighs(call)):
                continue
            rows = [
                item
                for item, row in zip(call.items, evaluated.values, strict=False)
                if not np.all(np.isfinite(row[:2]))
            ]
            bad += [item for item in rows or call.items if self.kept(item)]
        if bad:
            names = ", ".join(f"{x.group!r}/{x.member}" for x in bad[:8])
            raise StreamError(
                f"the gradient of group/member {names} is not finite; look at its "
                "tokens, weights and reward, nothing was updated"
            )
        if not np.isfinite(norm):
            raise StreamError(
                f"the gradient's norm is {norm} though each trajectory's gradient is "
                "finite: the sums left float32; scale rewards or losses down"
            )

    def report(
        self, values: list[Any], denominator: float, metrics: tuple, **rest: Any
    ) -> Report:
        """Adds everything up.

        Args:
          values: As in `check_finite`.
          denominator: Z.
          metrics: Names of the summed metrics and of the maxima.
          **rest: The fields of `Report` that only the stream knows.
        """
        sums, maxima = metrics
        numerator, rows = 0.0, []
        how = collections.Counter()
        carrying = collections.Counter()
        for (call, _), evaluated in zip(self.calls, values, strict=True):
            for item, row in zip(call.items, evaluated.values, strict=False):
                if not self.kept(item):
                    how["discarded"] += 1
                    continue
                how["direct" if call.place is None else "streamed"] += 1
                row = np.asarray(row, np.float64)
                advantage = self.advantages[item.group][item.member]
                carrying[call.place is not None] += advantage != 0
                # A sample of advantage 0 counts for nothing, whatever its value.
                numerator += (advantage * row[0] if advantage else 0.0) + row[1]
                rows.append(row[2:])
        columns = np.array(rows).reshape(len(rows), len(sums) + len(maxima)).T
        totals = [float(np.sum(c)) for c in columns[: len(sums)]]
        largest = [float(np.max(c, initial=-np.inf)) for c in columns[len(sums) :]]
        failed = {group for group, _ in self.failures}
        reasons = collections.Counter(self.failures.values())
        return Report(
            kept_groups=len(self.advantages),
            dropped_groups=len(self.dropped),
            short_groups=len(failed & self.advantages.keys()),
            uniform_groups=len(self.uniform),
            kept_members=sum(map(len, self.advantages.values())),
            failed_members=len(self.failures),
            invalid_rewards=reasons["invalid_reward"],
            rewards=len(self.rewards),
            # The exact sum: rewards come in any order.
            reward_mean=math.fsum(self.rewards.values())
            / (len(self.rewards) or math.nan),
            tokens=self._tokens(),
            denominator=denominator,
            direct=how["direct"],
            streamed=how["streamed"],
            discarded=how["discarded"],
            skipped=self.counts["skipped"],
            calls=len(self.calls),
            padded_over_real_tokens=self.counts["computed"]
            / (self.counts["real"] or math.nan),
            streamed_share=carrying[True] / (carrying.total() or math.nan),
            loss=float(numerator / denominator),
            metrics=dict(zip((*sums, *maxima), (*totals, *largest), strict=True)),
            **rest,
        )

    def _weighs(self, call: Call) -> bool:
        """Whether any advantage that the call was summed for is not 0.

        On the direct path those of its samples; in the sums of a group those of the
        whole group, for its sums are added or left out together.
        """
        groups = [self.advantages.get(item.group, {}) for item in call.items]
        if call.place is not None:
            return any(groups[0].values())
        return any(
            group.get(item.member)
            for group, item in zip(groups, call.items, strict=True)
        )

    def _tokens(self) -> int:
        return sum(
            record.tokens
            for (group, member, _), record in self.samples.items()
            if member in self.advantages.get(group, ())
        )
