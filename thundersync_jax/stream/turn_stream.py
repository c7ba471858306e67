"""`TurnStream`: the gradient of one step, computed while its trajectories go on.

Every turn's gradient starts once it is known what its tokens are trained towards, as a
teacher's log-probabilities, while the tool call behind it runs. There are no rewards
here: the loss is

    loss(params) = (1 / Z) * sum_i weight_i * additive_i

over the trajectories that count, `additive_i` summed over their turns. It is the update
that `GradientStream` makes of whole trajectories; `docs/method.md` says what it costs.
"""

import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from thundersync_jax.stream import refusals
from thundersync_jax.stream.base import Stream
from thundersync_jax.stream.learner import Learner
from thundersync_jax.stream.ledger import Computed
from thundersync_jax.stream.padding import Padded
from thundersync_jax.stream.schedule import Prompt, TurnCall, Turns
from thundersync_jax.stream.segments import Segments
from thundersync_jax.stream.surrogate import Params, Sample, Surrogate


class TurnStream(Stream):
    """Collects one step turn by turn. One thread owns a stream.

    What it refuses changes nothing and the stream goes on. An error half-way through a
    decision ends it. ValueError where a setting is unknown. `params`, `denominator`,
    `policy_version`, `frozen` and `on_compile` are those of `GradientStream`.

    Args:
      surrogate: A `Segments` whose surrogate is `additive` alone; for context "turn" a
        function of (params, sample), or (params, frozen, sample).
      context: What a turn was sampled in. "trajectory": all turns before it, through
        which it has a gradient. "turn": a prompt of its own, which the sample holds,
        for harnesses that rewrite the history; nothing is replayed. It is another
        objective: what a turn does to the prompts of later ones has no gradient.
      open_trajectories: How many may hold sums and states at a time.
      partial_groups: What a group with failed members does: "drop" leaves nothing of
        it, and then a trajectory holds its sums until its group is complete; "keep"
        leaves the others, "fail" ends the step with an error.
      on_call: Called with each `TurnCall` or `Prompt` and an array that is ready when
        it has ended.
    """

    def __init__(
        self,
        surrogate: Segments | Callable[..., Surrogate],
        params: Params,
        *,
        context: refusals.Context = "trajectory",
        denominator: refusals.Denominator = "trajectories",
        open_trajectories: int = 8,
        partial_groups: refusals.PartialGroups = "drop",
        policy_version: int | None = None,
        frozen: Any = None,
        on_call: Callable[[TurnCall | Prompt, jax.Array], None] | None = None,
        on_compile: Callable[[str], None] | None = None,
    ):
        refusals.check_functions(surrogate, None)
        refusals.check_choices(
            denominator, partial_groups=partial_groups, context=context
        )
        in_pieces = isinstance(surrogate, Segments)
        refusals.check_context(context, in_pieces)
        refusals.check_count(
            "open_trajectories", open_trajectories, "give at least 1, as turns need it"
        )
        super().__init__(
            Turns(
                open_trajectories,
                drop_partial=partial_groups == "drop",
                replay=in_pieces,
            ),
            Learner(surrogate, params, frozen, "plain", on_compile),
            scope="member",
            lossy=True,
            denominator=denominator,
            partial_groups=partial_groups,
            policy_version=policy_version,
            on_call=on_call,
        )
        self._slots = surrogate.slots if in_pieces else None
        self._ends: dict[tuple[Hashable, int], float] = {}  # in tokens, NaN: unknown
        self._prompt_ends: dict[Hashable, float] = {}  # of those that groups share

    def open_group(
        self, group: Hashable, members: int, prompt: Sample = None, spares: int = 0
    ) -> None:
        """Announces a group: the `members` trajectories of one prompt.

        Args:
          members: At least 1; other events name one by its index, from 0.
          prompt: What its turns continue, a sample or a `Padded` one; None where their
            first turns hold it.
          spares: How many failed members are replaced, by members of the next indices.
        """
        self._check_alive()
        end = prompt.real_tokens if isinstance(prompt, Padded) else math.nan
        if prompt is not None:
            refusals.check_prompt(group, True, self._learner.in_pieces)
        prompt = self._prompt(group, prompt)
        self._schedule.roster.open_group(group, members, spares=spares)
        if prompt is not None:
            self._prompt_ends[group] = end
        self._share(group, prompt)

    def turn(
        self,
        group: Hashable,
        member: int,
        sample: Sample,
        *,
        tokens: int | None = None,
        policy_version: int | None = None,
    ) -> None:
        """Adds a turn, and starts its gradient.

        Args:
          sample: What is new: the observation of the turn before (in a first turn, the
            prompt, where the group shares none) and then the action. A pytree for the
            surrogate, or a `Padded` one.
          tokens: Trained tokens. Where there are 0 the turn waits for the next one that
            has some; at the end of a trajectory it is never run.
        """
        entry, bucket = self._entry(
            group, member, sample, tokens, policy_version, "a turn"
        )
        parts = self._learner.examine(entry.tree, bucket, None)
        end = self._end(group, member, sample)
        item = self._schedule.turn(group, member, bucket, trained=tokens != 0)
        self._ends[group, member] = end
        self._learner.structure = parts
        self._enter(item, entry, policy_version)
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

        Its gradient is multiplied by `weight`: one over its tokens, where a trajectory
        counts with the mean of its tokens.
        """
        self._check_alive()
        refusals.check_version(group, member, policy_version, self._version)
        scale = refusals.weight(group, member, weight)
        close = self._schedule.complete(group, member)
        self._ledger.scales[group, member] = scale
        self._see(policy_version)
        self._settle(close)

    def _end(self, group: Hashable, member: int, sample: Sample) -> float:
        """Tokens up to the end of a turn, NaN once one of unknown length came."""
        tokens = self._ends.get((group, member), self._prompt_ends.get(group, 0))
        if self._slots is None or not isinstance(sample, Padded):
            return math.nan
        start = int(sample.tree["start"])
        expected = start if math.isnan(tokens) else tokens
        end = start + sample.real_tokens
        refusals.check_place(group, member, start, expected, end, self._slots)
        return end if tokens == expected else math.nan

    def _fold(self) -> None:
        for fold in self._schedule.folds():
            self._open.discard(fold.place)
            weight = self._ledger.scales.get((fold.group, fold.member), 1.0)
            self._learner.close_trajectory(fold, weight)
        self._close_prompts()

    def _next_call(self) -> TurnCall | None:
        free = self._learner.free_replicas
        return self._schedule.next_call(free) if free else None

    def _start(self, call: TurnCall) -> Computed:
        item, as_call = call.item, call.as_call
        self._hold(call.place)
        sample = self._ledger.samples[item[:3]].tree
        if self._learner.in_pieces:
            evaluated = self._learner.turn(call, sample)
        else:
            weights = np.array([[0.0, 1.0]])
            evaluated = self._learner.weighed(as_call, [sample], weights, item[:2])
        early = self._schedule.roster.unsettled > 0
        return Computed(as_call, (early,), None, evaluated)
