"""`GradientStream`: the gradient of one step, computed while its rewards arrive.

Tell it of groups, samples, completions, rewards and failures in any order; `finish()`
returns the gradient of

    loss(params) = (1 / Z) * [ sum_i A_i * weighted_i + sum_i additive_i ]

over the members that count. The parameters are fixed for the life of a stream, so the
order of events changes nothing but the rounding of sums, and with exact sums not even
that. It starts no thread.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from thundersync_jax.ops.advantages import Estimator
from thundersync_jax.stream import refusals
from thundersync_jax.stream.base import Stream
from thundersync_jax.stream.learner import Learner
from thundersync_jax.stream.ledger import Computed
from thundersync_jax.stream.padding import Padded
from thundersync_jax.stream.schedule import BATCH, Call, Release, Rules
from thundersync_jax.stream.schedule.order import Schedule
from thundersync_jax.stream.segments import Segments
from thundersync_jax.stream.surrogate import Params, Sample, Surrogate


class GradientStream(Stream):
    """Collects one step and returns its gradient. One thread owns a stream.

    What it refuses changes nothing and the stream goes on. An error half-way through a
    decision, as a compilation that fails, ends it: no gradient misses a sample quietly.
    ValueError where a setting is unknown, or settings contradict each other.

    Args:
      surrogate: Maps (params, sample) to a `Surrogate`, or (params, frozen, sample)
        where `frozen` is given. Pass the same function object in every step: compiled
        programs belong to it. Or a `Segments`: then the members of a group continue a
        prompt, which runs forward and backward once; samples are what follows it.
      params: Parameters to differentiate, floating-point arrays. Where they lie on a
        mesh with an axis named "replica", every index of it works on its own.
      estimator: Group advantage (module `advantages`), or None where there are no
        rewards: then `complete` settles a member and everything is `additive`.
      denominator: Z: "none" (1), "groups" or "trajectories" kept, their "tokens", or a
        number.
      release: When a gradient may start: "batch" once `finish` is called, "group" once
        all rewards of its group are in, "trajectory" once its own reward is in.
      open_groups: How many incomplete groups may hold sums, up to 3 of the parameters'
        size in float32 each. Needed under "trajectory" release only.
      partial_groups: What a group with failed members does: "drop" leaves nothing of
        it, "keep" makes its survivors the group, "fail" ends the step with an error.
      uniform_groups: What a group does whose raw rewards are all equal: "keep" counts
        it (in Z too), "drop" leaves nothing of it.
      accumulator: "plain" sums in float32; "exact" sums, three times as large, whose
        bits depend on no order, release rule or number of open groups. Then every call
        takes one sample, a group that misses rewards two distinct ones, and a sum 8,191
        addends (docs/exactness.md).
      policy_version: Of `params`; samples of another one are refused. None takes the
        first version seen.
      frozen: Further arrays for the surrogate, such as a reference policy. No gradient.
      rows_per_call: How many samples share a gradient call where that many wait whose
        gradients are needed as one sum only: final ones, or those of one open group
        with equal rewards.
      pad_last: Under "batch" release, whether the last call of a bucket is always
        padded to `rows_per_call`: one program per bucket. Otherwise only where samples
        fill more than half of it; fewer go alone, in a second program.
      on_call: Called with each `Call` and an array that is ready when it has ended.
      on_compile: Called with one line before a gradient program compiles.
    """

    def __init__(
        self,
        surrogate: Callable[..., Surrogate] | Segments,
        params: Params,
        *,
        estimator: Estimator | None,
        denominator: refusals.Denominator = "trajectories",
        release: Release = "trajectory",
        open_groups: int = 4,
        partial_groups: refusals.PartialGroups = "drop",
        uniform_groups: refusals.UniformGroups = "keep",
        accumulator: refusals.Accumulator = "plain",
        policy_version: int | None = None,
        frozen: Any = None,
        rows_per_call: int = 1,
        pad_last: bool = True,
        on_call: Callable[[Call, jax.Array], None] | None = None,
        on_compile: Callable[[str], None] | None = None,
    ):
        refusals.check_functions(surrogate, estimator)
        refusals.check_choices(
            denominator, release=release, partial_groups=partial_groups,
            uniform_groups=uniform_groups, accumulator=accumulator,
        )  # fmt: skip
        refusals.check_uniform(uniform_groups, estimator is not None)
        refusals.check_count("rows_per_call", rows_per_call, "give at least 1")
        self._estimator = estimator
        # Advantages by reward, of the units whose rewards are in. An advantage follows
        # from the member's own reward and those of its unit: its group, all groups that
        # count, or nobody else's.
        self._tables: dict[Hashable, dict[float, float]] = {}
        self._exact = accumulator == "exact"
        scope = "member" if estimator is None else estimator.scope
        lossy = "drop" in (partial_groups, uniform_groups)
        few = scope != "member" and (self._exact or not estimator.affine)
        rules = Rules(
            release,
            places=refusals.places(release, scope, lossy, open_groups),
            scope=scope,
            rewards=estimator is not None,
            drop_partial=partial_groups == "drop",
            drop_uniform=uniform_groups == "drop",
            most_rewards=2 if few else None,
            exact=self._exact,
            rows_per_call=1 if self._exact else rows_per_call,
            pad_last=pad_last,
        )
        super().__init__(
            Schedule(rules),
            Learner(surrogate, params, frozen, accumulator, on_compile),
            scope=scope,
            lossy=lossy,
            denominator=denominator,
            partial_groups=partial_groups,
            policy_version=policy_version,
            on_call=on_call,
        )

    def open_group(
        self,
        group: Hashable,
        members: int,
        baseline: float = 0.0,
        prompt: Sample = None,
        spares: int = 0,
    ) -> None:
        """Announces a group: the `members` trajectories of one prompt.

        Args:
          members: At least 1; other events name one by its index, from 0.
          baseline: Known beforehand, as one tracked per prompt; subtracted from the
            group's rewards before the estimator sees them.
          prompt: What its members continue, a sample or a `Padded` one, where the
            surrogate is a `Segments`.
          spares: How many failed members are replaced, by members of the next indices.
        """
        self._check_alive()
        refusals.check_prompt(group, prompt is not None, self._learner.in_pieces)
        prompt = self._prompt(group, prompt)
        baseline = refusals.baseline(group, baseline)
        self._schedule.open_group(group, members, baseline, spares)
        self._share(group, prompt)

    def sample(
        self,
        group: Hashable,
        member: int,
        sample: Sample,
        *,
        tokens: int | None = None,
        policy_version: int | None = None,
    ) -> None:
        """Adds a sample to a member; `complete` says that it was the last.

        Args:
          sample: A pytree of arrays for the surrogate, or a `Padded` one.
          tokens: Trained tokens, for the denominator "tokens" and the report.
        """
        entry, bucket = self._entry(
            group, member, sample, tokens, policy_version, "a sample"
        )
        self._check_start(group, member, sample)
        parts = self._learner.examine(entry.tree, bucket, self._estimator)
        if self._exact and (parts.additive or self._scope == "member"):
            refusals.check_addends(group, member, len(self._ledger.samples))
        item = self._schedule.sample(group, member, bucket)
        self._learner.structure = parts
        self._schedule.weighted = parts.weighted
        self._enter(item, entry, policy_version)

    def complete(
        self,
        group: Hashable,
        member: int,
        sample: Sample = None,
        *,
        tokens: int | None = None,
        policy_version: int | None = None,
    ) -> None:
        """All tokens of a member are final.

        `sample` is its last or only one, with so many trained `tokens`; None where the
        method `sample` has added all.
        """
        if sample is not None:
            self.sample(
                group, member, sample, tokens=tokens, policy_version=policy_version
            )
        else:
            self._check_alive()
            refusals.check_no_tokens(group, member, tokens)
            refusals.check_version(group, member, policy_version, self._version)
        close = self._schedule.complete(group, member)
        self._see(policy_version)
        self._settle(close)

    def reward(
        self, group: Hashable, member: int, reward: float, raw: float | None = None
    ) -> None:
        """The verdict on a member is in, before or after `complete`.

        Args:
          reward: What its advantage follows from.
          raw: The verdict before penalties and the like, by which `uniform_groups`
            goes; None where it is the same.

        Raises:
          ValueError: It is not a finite number (call `fail` for such a member), or the
            stream has no estimator and takes none.
        """
        self._check_alive()
        value = refusals.reward(group, member, reward, self._estimator)
        if raw is not None:
            raw = refusals.reward(group, member, raw, self._estimator)
        close = self._schedule.reward(group, member, value, raw)
        self._ledger.rewards[group, member] = value
        self._settle(close)

    def _flush(self) -> None:
        """No event will follow: all rewards are in that a scope "batch" needs."""
        self._schedule.flush()
        if self._scope != "batch":
            return
        survivors = self._schedule.roster.survivors
        groups = {group: survivors(group) for group in self._ledger.advantages}
        rewards = [r for members in groups.values() for r in members.values()]
        self._tables[BATCH] = self._estimator.table(rewards)
        for group, members in groups.items():
            self._weigh(group, members)

    def _keep(self, group: Hashable) -> None:
        super()._keep(group)
        survivors = self._schedule.roster.survivors(group)
        rewards = [reward for reward in survivors.values() if reward is not None]
        if len(set(rewards)) == 1:
            self._ledger.uniform.add(group)
        if self._scope == "group":
            self._tables[group] = self._estimator.table(rewards)
        if self._scope != "batch":
            self._weigh(group, survivors)

    def _weigh(self, group: Hashable, survivors: dict[int, float | None]) -> None:
        """Advantages of a kept group, now that they are known."""
        advantages = {m: self._advantage(group, r) for m, r in survivors.items()}
        self._ledger.advantages[group] = advantages
        parts = self._learner.structure
        if parts and not (parts.additive or parts.sums or parts.maxima):
            zero = {m for m, a in advantages.items() if a == 0}
            self._ledger.counts["skipped"] += self._schedule.discard(group, zero)

    def _fold(self) -> None:
        for fold in self._schedule.folds():
            self._open.discard(fold.place)
            self._learner.fold(fold, self._tables.get(fold.unit))
        self._close_prompts()

    def _next_call(self) -> Call | None:
        replica = self._learner.free
        return None if replica is None else self._schedule.next_call(replica)

    def _start(self, call: Call) -> Computed:
        ledger, first = self._ledger, call.items[0]
        rewards = [self._schedule.roster.reward_of(item) for item in call.items]
        samples = [ledger.samples[item[:3]].tree for item in call.items]
        early = tuple(self._schedule.early(item.group) for item in call.items)
        if early[0] and call.place is not None:
            self._hold(call.place)
        unit, linear = self._unit(first.group), None
        if call.place is not None and self._schedule.by_baseline:
            linear = None if self._exact else unit
            certain = not self._lossy or first.group in ledger.advantages
            evaluated = self._learner.unweighed(
                call, samples, unit, rewards[0], certain
            )
        else:
            samples += samples[:1] * (call.rows - len(samples))
            weights = self._weights(call, rewards)
            evaluated = self._learner.weighed(call, samples, weights, unit)
        return Computed(call, early, linear, evaluated)

    def _unit(self, group: Hashable) -> Hashable:
        """The name of a group's unit, as the schedule has it."""
        return BATCH if self._scope == "batch" else group

    def _advantage(self, group: Hashable, reward: float | None) -> float:
        """The advantage of a member with this reward; 0 where there are no rewards."""
        if reward is None:
            return 0.0
        if self._scope == "member":
            return self._estimator.table([reward])[reward]
        return self._tables[self._unit(group)][reward]

    def _weights(self, call: Call, rewards: Sequence[float | None]) -> np.ndarray:
        """float64[rows, 2]: advantage, and 1 where there is something additive."""
        weights, parts = np.zeros((call.rows, 2)), self._learner.structure
        for row, item, reward in zip(weights, call.items, rewards, strict=False):
            row[0] = self._advantage(item.group, reward) if parts.weighted else 0.0
            row[1] = parts.additive
        return weights

    def _check_start(self, group: Hashable, member: int, sample: Sample) -> None:
        """Requires a `Padded` sample to begin where the prompt of its group ends."""
        prompt = self._ledger.prompts.get(group)
        if prompt is None or not isinstance(sample, Padded) or prompt[1] == 1:
            return
        start = int(sample.tree["start"])
        end = start + sample.real_tokens
        refusals.check_place(group, member, start, prompt[0], end, slots=end)
