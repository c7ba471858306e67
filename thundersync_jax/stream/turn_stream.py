"""`TurnStream`: the gradient of one step, computed while its trajectories go on.

Every turn's gradient starts once it is known what its tokens are trained towards, as a
teacher's log-probabilities, while the tool call behind it runs. There are no rewards
here: the loss is

    loss(params) = (1 / Z) * sum_i weight_i * additive_i

over the trajectories that count, `additive_i` summed over their turns. It is the update
that `GradientStream` makes of whole trajectories; module `segments` says what it costs.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from thundersync_jax.stream import padding, refusals
from thundersync_jax.stream import segments as seg
from thundersync_jax.stream.base import Lifetime
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
from thundersync_jax.stream.refusals import Context
from thundersync_jax.stream.schedule import (
    Call,
    Close,
    Fold,
    Prompt,
    TurnCall,
    TurnFold,
    Turns,
)
from thundersync_jax.stream.surrogate import Surrogate

Tree = Any


@dataclasses.dataclass
class _Open:
    """An open trajectory on its replica; lists have one entry per turn."""

    state: seg.State
    pulled: Tree
    trees: list[Tree] = dataclasses.field(default_factory=list)
    lasts: list[Tree] = dataclasses.field(default_factory=list)  # before the turn
    of_lasts: list[Tree] = dataclasses.field(default_factory=list)  # their cotangents


class TurnStream:
    """Collects one step turn by turn. One thread owns a stream.

    What it refuses changes nothing and the stream goes on. An error half-way through a
    decision ends it.

    Args:
      surrogate: A `Segments` whose surrogate is `additive` alone; for context "turn" a
        function of (params, sample), or (params, frozen, sample).
      params: As of `GradientStream`.
      context: What a turn was sampled in. "trajectory": all turns before it, through
        which it has a gradient. "turn": a prompt of its own, which the sample holds,
        for harnesses that rewrite the history; nothing is replayed. It is another
        objective: what a turn does to the prompts of later ones has no gradient.
      denominator: Z: "none" (1), "groups" or "trajectories" kept, their "tokens", or a
        number.
      open_trajectories: How many may hold sums and states at a time.
      partial_groups: What a group with failed members does: "drop" leaves nothing of
        it, and then a trajectory holds its sums until its group is complete; "keep"
        leaves the others, "fail" ends the step with an error.
      policy_version: Of `params`; turns of another one are refused. Where it is None
        the first version seen is the one.
      frozen: Further arrays for the surrogate. No gradient.
      on_call: Called with each `TurnCall` or `Prompt` and an array that is ready when
        it has ended.
      on_compile: Called with one line before a gradient program compiles.

    Raises:
      ValueError: A setting is not one of the above.
    """

    def __init__(
        self,
        surrogate: seg.Segments | Callable[..., Surrogate],
        params: Tree,
        *,
        context: Context = "trajectory",
        denominator: Denominator = "trajectories",
        open_trajectories: int = 8,
        partial_groups: PartialGroups = "drop",
        policy_version: int | None = None,
        frozen: Tree = None,
        on_call: Callable[[TurnCall | Prompt, jax.Array], None] | None = None,
        on_compile: Callable[[str], None] | None = None,
    ):
        refusals.check_functions(surrogate, None)
        kinds = {"partial_groups": partial_groups, "context": context}
        refusals.check_choices(denominator, **kinds)
        in_pieces = isinstance(surrogate, seg.Segments)
        refusals.check_context(context, in_pieces)
        refusals.check_count(
            "open_trajectories", open_trajectories, "give at least 1, as turns need it"
        )
        self._learner = Learner(surrogate, params, frozen, "plain", on_compile)
        self._segments = surrogate if in_pieces else None
        self._turns = Turns(
            open_trajectories,
            drop_partial=partial_groups == "drop",
            replay=self._segments is not None,
        )
        self._ledger = Ledger()
        self._denominator = denominator
        self._partial = partial_groups
        self._version = policy_version
        self._on_call = on_call
        self._places: dict[int, _Open] = {}
        self._tokens: dict[tuple[Hashable, int], float] = {}  # so far, NaN: unknown
        self._open_max = 0
        self._life = Lifetime()

    def open_group(self, group: Hashable, members: int, prompt: Tree = None) -> None:
        """Announces a group: the `members` trajectories of one prompt.

        Args:
          group: Its name.
          members: How many.
          prompt: What its turns continue, a sample or a `Padded` one; None where their
            first turns hold it.
        """
        self._life.check()
        if prompt is not None:
            refusals.check_prompt(group, prompt, self._segments is not None)
            padded = Padded.of(prompt)
            refusals.check_some(group, padded.real_tokens)
            tree = jax.tree.map(padding.sample_leaf, padded.tree)
        self._turns.roster.open_group(group, members)
        if prompt is not None:
            self._ledger.prompts[group] = padded.real_tokens, padded.padded_tokens
            known = isinstance(prompt, Padded)
            end = prompt.real_tokens if known else math.nan
            self._tokens.update({(group, member): end for member in range(members)})
            self._learner.prompts.open(group, tree)

    def turn(
        self,
        group: Hashable,
        member: int,
        tree: Tree,
        *,
        tokens: int | None = None,
        policy_version: int | None = None,
    ) -> None:
        """Adds a turn, and starts its gradient.

        Args:
          group: As in `open_group`.
          member: Index from 0.
          tree: What is new: the observation of the turn before (in a first turn, the
            prompt, where the group shares none) and then the action. A sample for the
            surrogate, or a `Padded` one.
          tokens: Its trained tokens. Where it is 0 the turn waits for the next one that
            has some; at the end of a trajectory it is never run.
          policy_version: The version that sampled it.

        Raises:
          ValueError: It cannot be used; nothing has changed.
        """
        self._life.check()
        refusals.check_version(group, member, policy_version, self._version)
        needed = self._denominator == "tokens"
        count = refusals.tokens(group, member, tokens, needed)
        padded = Padded.of(tree)
        sample = jax.tree.map(padding.sample_leaf, padded.tree)
        self._turns.roster.incomplete(group, member, "a turn")
        bucket = self._learner.bucket(group, sample)
        parts = self._learner.examine(sample, bucket, None)
        end = self._place(group, member, tree)
        item = self._turns.turn(group, member, bucket, trained=tokens != 0)
        self._tokens[group, member] = end
        self._ledger.samples[item[:3]] = Record(
            self._learner.put(sample), count, padded.real_tokens, padded.padded_tokens
        )
        self._learner.structure = parts
        self._version = policy_version if self._version is None else self._version
        self.advance()

    def complete(
        self,
        group: Hashable,
        member: int,
        weight: float = 1.0,
        *,
        policy_version: int | None = None,
    ) -> None:
        """All turns of a member are in: earlier turns can be replayed.

        Args:
          group: As in `open_group`.
          member: Index from 0.
          weight: What its gradient is multiplied by, known only now: one over its
            tokens, where a trajectory counts with the mean of its tokens.
          policy_version: The version that sampled it.
        """
        self._life.check()
        refusals.check_version(group, member, policy_version, self._version)
        scale = refusals.weight(group, member, weight)
        close = self._turns.complete(group, member)
        self._ledger.scales[group, member] = scale
        self._version = policy_version if self._version is None else self._version
        self._settle(close)

    def fail(self, group: Hashable, member: int, reason: str) -> None:
        """Withdraws a member that is not complete, with all its turns.

        Raises:
          StreamError: `partial_groups` is "fail".
        """
        self._life.check()
        close = self._turns.fail(group, member)
        self._ledger.failures[group, member] = reason
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
                free = self._learner.free_replicas
                call = self._turns.next_call(free) if free else None
                if call is None:
                    return self._turns.ready
                self._start(call)

    def finish(self) -> tuple[Tree, Report]:
        """Ends the step. Returns and raises as `GradientStream.finish` does."""
        self._life.check()
        refusals.check_settled(self._turns.roster.outstanding())
        while self.advance():
            self._learner.wait(self._turns.waits_for)
        assert not self._turns.unfinished
        self._life.ended = "is finished"
        ledger, parts = self._ledger, self._learner.structure
        denominator = ledger.denominator(self._denominator)
        values = jax.device_get([computed.evaluated for computed in ledger.calls])
        ledger.check_finite(values, additive=True)
        ledger.check_prompts(jax.device_get(ledger.prompt_finite))
        gradient, norm = self._learner.finish(denominator)
        ledger.check_norm(norm)
        report = ledger.report(
            values,
            denominator,
            columns=parts.columns if parts else (),
            waited=0,
            waited_for_bucket=0,
            compiles=self._learner.compiles,
            open_groups_max=self._open_max,
            group_sum_bytes=self._open_max * self._learner.unit_bytes("member", True),
            gradient_norm=float(norm),
        )
        return gradient, report

    @property
    def advantages(self) -> dict[tuple[Hashable, int], float]:
        """0 by (group, member), of the members that count for certain."""
        return self._ledger.by_member

    @property
    def lost_groups(self) -> list[Hashable]:
        """Groups that do not count, in order of closing."""
        return list(self._ledger.lost)

    def _place(self, group: Hashable, member: int, tree: Tree) -> float:
        """Tokens up to the end of a turn, NaN once one of unknown length came."""
        tokens = self._tokens.get((group, member), 0)
        if self._segments is None or not isinstance(tree, Padded):
            return math.nan
        start = int(tree.tree["start"])
        expected = start if math.isnan(tokens) else tokens
        end, slots = start + tree.real_tokens, self._segments.slots
        refusals.check_place(group, member, start, expected, end, slots)
        return end if tokens == expected else math.nan

    def _settle(self, close: Close | None) -> None:
        if close is not None and close.verdict != "kept":
            self._ledger.lost[close.group] = close.verdict
        elif close is not None:
            survivors = self._turns.roster.groups[close.group].survivors
            self._ledger.advantages[close.group] = dict.fromkeys(survivors, 0.0)
        self.advance()

    def _fold(self) -> None:
        for fold in self._turns.folds():
            self._close(fold, self._places.pop(fold.place, None))
        for prompt in self._turns.prompts() if self._segments else ():
            self._learner.close(prompt, self._ledger.record_prompt, self._on_call)

    def _close(self, fold: TurnFold, one: _Open | None) -> None:
        """The sum of a trajectory joins the batch, or is forgotten."""
        unit, weight = fold[:2], self._ledger.scales.get(fold[:2], 1.0)
        where = Fold(unit, fold.place, None, (fold.replica,), fold.kept)
        self._learner.sums.fold(where, None, weight)
        if not fold.kept or one is None:
            return
        prompts = self._learner.prompts
        if prompts is not None and prompts.tree(fold.group) is not None:
            shared = prompts.of(fold.group, fold.replica)
            given = shared.state, one.pulled, one.of_lasts[0], np.float64(weight)
            replica = self._learner.replicas[fold.replica]
            found = replica.run(seg.of_prompt, self._segments, *given)
            shared.sums.direct(0, found)

    def _start(self, call: TurnCall) -> None:
        item, replica = call.item, self._learner.replicas[call.replica]
        if self._segments is None:
            gradient, evaluated = self._alone(call, replica)
        elif call.replay:
            gradient, evaluated = self._replay(call, replica)
        else:
            gradient, evaluated = self._turn(call, replica)
        as_call = Call(call.replica, (item,), call.place, 1)
        self._learner.sums.hold(as_call, item[:2], None, None, gradient)
        early = self._turns.roster.unsettled > 0
        self._ledger.record_call(Computed(as_call, (early,), None, evaluated))
        if self._on_call:
            self._on_call(call, evaluated.finite)

    def _turn(self, call, replica):
        item, one = call.item, self._places.get(call.place)
        if one is None:
            one = self._places[call.place] = self._opened(call, replica)
            self._open_max = max(self._open_max, len(self._places))
        tree = replica.put(self._ledger.samples[item[:3]].tree)
        self._learner.announce("turn", call.replica, item.bucket)
        given = replica.params, replica.frozen, one.state, one.pulled, tree
        found = replica.start(seg.turn, self._segments, *given)
        one.trees.append(tree)
        one.lasts.append(one.state.last)
        one.of_lasts.append(found.of_last)
        one.state, one.pulled = found.state, found.pulled
        return found.gradient, found.evaluated

    def _opened(self, call, replica):
        prompts, group, prompt = self._learner.prompts, call.item.group, None
        if prompts.tree(group) is not None:
            prompt = prompts.of(group, call.replica).state
        return _Open(*replica.run(seg.opened, self._segments, prompt))

    def _replay(self, call, replica):
        one, index = self._places[call.place], call.item.sample
        self._learner.announce("replay", call.replica, call.item.bucket)
        found = replica.start(
            seg.replay,
            self._segments,
            replica.params,
            replica.frozen,
            seg.State(one.state.kept, one.lasts[index]),
            one.pulled,
            one.of_lasts[index + 1],
            one.of_lasts[index],
            one.trees[index],
        )
        one.pulled, one.of_lasts[index] = found.pulled, found.of_last
        return found.gradient, found.evaluated

    def _alone(self, call, replica):
        self._learner.announce("gradient", call.replica, call.item.bucket)
        tree = self._ledger.samples[call.item[:3]].tree
        return replica.gradient([tree], np.array([[0.0, 1.0]]))
