"""`GradientStream`: the gradient of one step, computed while its rewards arrive.

Tell it of groups, samples, completions, rewards and failures in any order; `finish()`
returns the gradient of

    loss(params) = (1 / Z) * [ sum_i A_i * weighted_i + sum_i additive_i ]

over the members that count. The parameters are fixed for the life of a stream, so the
order of events changes nothing but the rounding of sums, and with exact sums not even
that. It knows no model, no environment and no optimizer, and it starts no thread.
"""

from collections.abc import Callable, Hashable
from typing import Any

import jax

from thundersync_jax.ops.advantages import Estimator
from thundersync_jax.stream import padding, refusals
from thundersync_jax.stream.base import Lifetime
from thundersync_jax.stream.coefficients import Coefficients
from thundersync_jax.stream.learner import Learner
from thundersync_jax.stream.ledger import (
    Computed,
    Denominator,
    Ledger,
    PartialGroups,
    Report,
)
from thundersync_jax.stream.ledger import SampleRecord as Record
from thundersync_jax.stream.padding import Padded
from thundersync_jax.stream.refusals import Accumulator, UniformGroups
from thundersync_jax.stream.schedule import BATCH, Call, Close, Release, Rules, Schedule
from thundersync_jax.stream.segments import Segments
from thundersync_jax.stream.surrogate import Surrogate

Tree = Any


class GradientStream:
    """Collects one step and returns its gradient. One thread owns a stream.

    What it refuses changes nothing and the stream goes on. An error half-way through a
    decision, as a compilation that fails, ends it: no gradient misses a sample quietly.

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
        takes one sample, and of a group that misses rewards those with the first two
        distinct rewards only; a sum takes 8,191 addends, which are the distinct rewards
        of each group, or all samples where no group is needed or something is additive.
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

    Raises:
      ValueError: A setting is not one of the above, or settings contradict each other.
    """

    def __init__(
        self,
        surrogate: Callable[..., Surrogate] | Segments,
        params: Tree,
        *,
        estimator: Estimator | None,
        denominator: Denominator = "trajectories",
        release: Release = "trajectory",
        open_groups: int = 4,
        partial_groups: PartialGroups = "drop",
        uniform_groups: UniformGroups = "keep",
        accumulator: Accumulator = "plain",
        policy_version: int | None = None,
        frozen: Tree = None,
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
        refusals.check_uniform(uniform_groups, estimator)
        refusals.check_count("rows_per_call", rows_per_call, "give at least 1")
        self._learner = Learner(surrogate, params, frozen, accumulator, on_compile)
        self._estimator = estimator
        self._coefficients = Coefficients(estimator)
        self._scope = self._coefficients.scope
        self._lossy = "drop" in (partial_groups, uniform_groups)
        self._exact = accumulator == "exact"
        few = self._scope != "member" and (self._exact or not estimator.affine)
        self._schedule = Schedule(
            Rules(
                release,
                places=refusals.places(release, self._scope, self._lossy, open_groups),
                scope=self._scope,
                rewards=estimator is not None,
                drop_partial=partial_groups == "drop",
                drop_uniform=uniform_groups == "drop",
                most_rewards=2 if few else None,
                exact=self._exact,
                rows_per_call=1 if self._exact else rows_per_call,
                pad_last=pad_last,
            )
        )
        self._ledger = Ledger()
        self._denominator = denominator
        self._partial = partial_groups
        self._version = policy_version
        self._on_call = on_call
        self._open: set[int] = set()
        self._open_max = 0
        self._life = Lifetime()

    def open_group(
        self,
        group: Hashable,
        members: int,
        baseline: float = 0.0,
        prompt: Tree = None,
    ) -> None:
        """Announces a group: the `members` trajectories of one prompt.

        Args:
          group: Its name.
          members: How many.
          baseline: Known beforehand, as one tracked per prompt; subtracted from the
            group's rewards before the estimator sees them.
          prompt: What its members continue, a sample or a `Padded` one, where the
            surrogate is a `Segments`.
        """
        self._life.check()
        refusals.check_prompt(group, prompt, self._learner.prompts is not None)
        if prompt is not None:
            padded = Padded.of(prompt)
            refusals.check_some(group, padded.real_tokens)
            tree = jax.tree.map(padding.sample_leaf, padded.tree)
        self._schedule.open_group(group, members, refusals.baseline(group, baseline))
        if prompt is not None:
            self._ledger.prompts[group] = padded.real_tokens, padded.padded_tokens
            self._learner.prompts.open(group, tree)

    def sample(
        self,
        group: Hashable,
        member: int,
        sample: Tree,
        *,
        tokens: int | None = None,
        policy_version: int | None = None,
    ) -> None:
        """Adds a sample to a member; `complete` says that it was the last.

        Args:
          group: As in `open_group`.
          member: Index from 0.
          sample: A pytree of arrays for the surrogate, or a `Padded` one.
          tokens: Its trained tokens, for the denominator "tokens" and the report.
          policy_version: The version that sampled it.

        Raises:
          ValueError: It cannot be used; nothing has changed.
        """
        self._life.check()
        refusals.check_version(group, member, policy_version, self._version)
        needed = self._denominator == "tokens"
        tokens = refusals.tokens(group, member, tokens, needed)
        padded = Padded.of(sample)
        tree = jax.tree.map(padding.sample_leaf, padded.tree)
        self._schedule.check_incomplete(group, member)
        bucket = self._learner.bucket(group, tree)
        refusals.check_behind(group, member, sample, self._ledger.prompts.get(group))
        parts = self._learner.examine(tree, bucket, self._estimator)
        if self._exact:
            alone = parts.additive or self._scope == "member"
            refusals.check_addends(group, member, len(self._ledger.samples) * alone)
        item = self._schedule.sample(group, member, bucket)
        self._ledger.samples[item[:3]] = Record(
            self._learner.put(tree), tokens, padded.real_tokens, padded.padded_tokens
        )
        self._learner.structure = parts
        self._schedule.weighted = parts.weighted
        self._version = policy_version if self._version is None else self._version

    def complete(
        self,
        group: Hashable,
        member: int,
        sample: Tree = None,
        *,
        tokens: int | None = None,
        policy_version: int | None = None,
    ) -> None:
        """All tokens of a member are final; `sample` adds its last or only sample."""
        if sample is not None:
            self.sample(
                group, member, sample, tokens=tokens, policy_version=policy_version
            )
        else:
            self._life.check()
            refusals.check_no_tokens(group, member, tokens)
            refusals.check_version(group, member, policy_version, self._version)
        close = self._schedule.complete(group, member)
        self._version = policy_version if self._version is None else self._version
        self._settle(close)

    def reward(
        self, group: Hashable, member: int, reward: float, raw: float | None = None
    ) -> None:
        """The verdict on a member is in, before or after `complete`.

        Args:
          group: As in `open_group`.
          member: Index from 0.
          reward: What its advantage follows from.
          raw: The verdict before penalties and the like, by which `uniform_groups`
            goes; None where it is the same.

        Raises:
          ValueError: It is not a finite number (call `fail` for such a member), or the
            stream has no estimator and takes none.
        """
        self._life.check()
        value = refusals.reward(group, member, reward, self._estimator)
        if raw is not None:
            raw = refusals.reward(group, member, raw, self._estimator)
        close = self._schedule.reward(group, member, value, raw)
        self._ledger.rewards[group, member] = value
        self._settle(close)

    def fail(self, group: Hashable, member: int, reason: str) -> None:
        """Withdraws a member that is not settled, with whatever it left.

        Raises:
          StreamError: `partial_groups` is "fail".
        """
        self._life.check()
        close = self._schedule.fail(group, member)
        self._ledger.failures[group, member] = reason
        self._ledger.rewards.pop((group, member), None)
        if self._partial == "fail":
            self._life.ended = "ended with a failed member"
            raise refusals.failed(group, member, reason)
        self._settle(close)

    def advance(self) -> bool:
        """Starts ready work on free replicas. Returns whether any is left waiting."""
        self._life.check()
        while True:
            with self._life.or_end():
                self._fold()
                replica = self._learner.free
                if replica is None:
                    return self._schedule.ready
                call = self._schedule.next_call(replica)
                if call is None:
                    return False
                self._start(call)

    def finish(self) -> tuple[Tree, Report]:
        """Ends the step.

        Returns:
          The gradient, with the structure, shapes and layout of `params`, in float32
          (float64 for float64 parameters), and the report.

        Raises:
          ValueError: Members are neither settled nor failed; the stream goes on.
          StreamError: A gradient is not finite; names the trajectories where one of
            them is at fault.
        """
        self._life.check()
        refusals.check_settled(self._schedule.outstanding())
        with self._life.or_end():
            self._schedule.flush()
            if self._scope == "batch":
                self._close_batch()
        while self.advance():
            self._learner.wait()
        self._life.ended = "is finished"
        ledger, parts = self._ledger, self._learner.structure
        denominator = ledger.denominator(self._denominator)
        values = jax.device_get([computed.evaluated for computed in ledger.calls])
        ledger.check_finite(values, bool(parts and parts.additive))
        ledger.check_prompts(jax.device_get(ledger.prompt_finite))
        gradient, norm = self._learner.finish(denominator)
        ledger.check_norm(norm)
        report = ledger.report(
            values,
            denominator,
            columns=parts.columns if parts else (),
            waited=self._schedule.waited,
            waited_for_bucket=self._schedule.waited_for_sum,
            compiles=self._learner.compiles,
            open_groups_max=self._open_max,
            group_sum_bytes=self._open_max
            * self._learner.unit_bytes(self._scope, self._lossy),
            gradient_norm=float(norm),
        )
        return gradient, report

    @property
    def advantages(self) -> dict[tuple[Hashable, int], float]:
        """Advantages by (group, member), of kept groups whose rewards are in."""
        return self._ledger.by_member

    @property
    def lost_groups(self) -> list[Hashable]:
        """Groups that do not count, dropped or filtered, in order of closing."""
        return list(self._ledger.lost)

    def _settle(self, close: Close | None) -> None:
        if close is not None:
            with self._life.or_end():
                self._close(close)
        self.advance()

    def _close(self, close: Close) -> None:
        group, ledger = close.group, self._ledger
        if close.verdict != "kept":
            ledger.lost[group] = close.verdict
            return
        survivors = self._schedule.survivors(group)
        rewards = [reward for reward in survivors.values() if reward is not None]
        if len(set(rewards)) == 1:
            ledger.uniform.add(group)
        ledger.advantages[group] = dict.fromkeys(survivors, 0.0)
        if self._scope != "batch":
            self._coefficients.close(group, rewards)
            self._weigh(group, survivors)

    def _close_batch(self) -> None:
        """All rewards of the step are in, which the advantages of each group need."""
        groups = {g: self._schedule.survivors(g) for g in self._ledger.advantages}
        rewards = [r for group in groups.values() for r in group.values()]
        self._coefficients.close(BATCH, rewards)
        for group, survivors in groups.items():
            self._weigh(group, survivors)

    def _weigh(self, group: Hashable, survivors: dict[int, float | None]) -> None:
        """Advantages of a kept group, now that they are known."""
        of = self._coefficients.advantage
        advantages = {member: of(group, r) for member, r in survivors.items()}
        self._ledger.advantages[group] = advantages
        parts = self._learner.structure
        if parts and not (parts.additive or parts.sums or parts.maxima):
            zero = {m for m, a in advantages.items() if a == 0}
            self._ledger.counts["skipped"] += self._schedule.discard(group, zero)

    def _fold(self) -> None:
        for fold in self._schedule.folds():
            self._open.discard(fold.place)
            self._learner.fold(fold, self._coefficients.table(fold.unit))
        for prompt in self._schedule.prompts() if self._learner.prompts else ():
            self._learner.close(prompt, self._ledger.record_prompt, self._on_call)

    def _start(self, call: Call) -> None:
        ledger, first = self._ledger, call.items[0]
        trees = [ledger.samples[item[:3]].tree for item in call.items]
        early = tuple(self._schedule.early(item.group) for item in call.items)
        if early[0] and call.place is not None:
            self._open.add(call.place)
            self._open_max = max(self._open_max, len(self._open))
        unit, linear = self._coefficients.unit(first.group), None
        if call.place is not None and self._schedule.by_baseline:
            linear = None if self._exact else unit
            reward = self._schedule.reward_of(first)
            certain = not self._lossy or first.group in ledger.advantages
            evaluated = self._learner.unweighed(call, trees, unit, reward, certain)
        else:
            trees += trees[:1] * (call.rows - len(trees))
            rewards = [self._schedule.reward_of(item) for item in call.items]
            parts = self._learner.structure[:2]
            weights = self._coefficients.weights(call, rewards, *parts)
            evaluated = self._learner.weighed(call, trees, weights, unit)
        ledger.record_call(Computed(call, early, linear, evaluated))
        if self._on_call:
            self._on_call(call, evaluated.finite)
