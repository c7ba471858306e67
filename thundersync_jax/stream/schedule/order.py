"""Which gradient runs next, on which replica, and what may be closed.

A state machine of plain data: events in, decisions out. Ready work is *final*, every
reward its advantage depends on being in, or else *known*: its own reward is in, and it
needs a place for sums. Final work goes first.

Groups that share sums are a *unit*: one group, or all of a step where the estimator
looks at the whole batch. A place holds the sums of one unit that still misses rewards;
in exact mode, where these are one per distinct reward, final work goes into sums too,
in one extra place, one unit after the other.

Work goes sample by sample, except where a full call of one program is waiting whose
gradients all sums weigh alike: final samples, or known ones of one unit and reward.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable

from .roster import BATCH, Call, Close, Fold, Group, Item, Member, Prompt, Roster, Rules


@dataclasses.dataclass
class _Unit:
    name: Hashable
    order: int
    rewards: set[float | None] = dataclasses.field(default_factory=set)
    streamed: set[float | None] = dataclasses.field(default_factory=set)
    pending: list[Item] = dataclasses.field(default_factory=list)  # released, not taken
    # Samples that were not started, by reward.
    left: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    place: int | None = None
    # Place and replicas of sums that hold something, by reward.
    sums: dict[float | None, tuple] = dataclasses.field(default_factory=dict)
    complete: bool = False
    kept: bool = True


class Schedule:
    """Decides the order of gradient calls of one step."""

    waits_for = None  # any replica will do for any sample

    def __init__(self, rules: Rules):
        self.weighted = True  # whether samples have a part that an advantage multiplies
        self.waited = 0  # samples ready before their unit and yet not streamed
        self.waited_for_bucket = 0  # members among them with one reward too many
        self._rules = rules
        self.roster = Roster(rules.rewards, rules.drop_partial, rules.drop_uniform)
        self._lossy = self.roster.lossy
        self._batch = _Unit(BATCH, 0) if rules.scope == "batch" else None
        self._units: dict[Hashable, _Unit] = {}  # by group
        self._free = list(range(rules.places))[::-1]
        self._final: list[Item] = []
        self._known: dict[Hashable, _Unit] = {}  # with ready work
        self._closing: dict[Hashable, _Unit] = {}  # complete, with sums
        self._unstarted: collections.Counter = collections.Counter()  # by group
        # Groups of which gradients were started, and where.
        self._replicas: dict[Hashable, set[int]] = {}

    @property
    def by_baseline(self) -> bool:
        """Whether gradients start before what multiplies them is known."""
        return self.weighted and self._rules.scope != "member"

    @property
    def held(self) -> bool:
        """Whether a settled member of a unit that misses rewards needs a place."""
        return self.by_baseline or (self._lossy and self._batch is None)

    def open_group(
        self, group: Hashable, members: int, baseline: float = 0.0, spares: int = 0
    ) -> None:
        """Announces a group of so many members, and what is off their rewards."""
        order = self.roster.open_group(group, members, baseline, spares).order
        self._units[group] = self._batch or _Unit(group, order)

    def sample(self, group: Hashable, member: int, bucket: Hashable) -> Item:
        """Adds a sample to a member that is not complete yet."""
        item = self.roster.sample(group, member, bucket)
        self._unstarted[group] += 1
        return item

    def complete(self, group: Hashable, member: int) -> Close | None:
        """All tokens of a member are final. Returns what this closes."""
        settled = self.roster.complete(group, member)
        return self._settle(group, member) if settled else None

    def reward(
        self, group: Hashable, member: int, reward: float, raw: float | None = None
    ) -> Close | None:
        """The verdict is in; filters look at `raw`. Returns what this closes."""
        settled = self.roster.reward(group, member, reward, raw)
        return self._settle(group, member) if settled else None

    def fail(self, group: Hashable, member: int, replace: bool = True) -> Close | None:
        """Withdraws an unsettled member. Returns what this closes."""
        self.roster.fail(group, member, replace)
        self._unstarted[group] -= len(self.roster.groups[group].members[member].items)
        return self._settle(group, member)

    def early(self, group: Hashable) -> bool:
        """Whether rewards are missing, or members of the step where there are none."""
        if not self._rules.rewards:
            return self.roster.unsettled > 0
        return not self._units[group].complete

    def discard(self, group: Hashable, members: set[int]) -> int:
        """Forgets waiting samples of a closed group. Returns how many they were."""
        unit, gone = self._units[group], 0
        for waiting in (self._final, unit.pending):
            out = {x for x in waiting if x.group == group and x.member in members}
            unit.left.subtract(map(self.roster.reward_of, out))
            gone += len(out)
            if out:
                waiting[:] = [x for x in waiting if x not in out]
        self._unstarted[group] -= gone
        return gone

    def flush(self) -> None:
        """No event will follow: what waited for the end of the step is ready now."""
        if self._batch is not None:
            self._count_waiting(self._batch)
            self._complete(self._batch, kept=True)
        if self._rules.release != "batch":
            return
        for unit in self._units.values():
            self._finalize(unit)
        if not self._by_reward:
            # One program after another, so that calls are full.
            first: dict[Hashable, int] = {}
            for item in self._final:
                first.setdefault(item.bucket, len(first))
            self._final.sort(key=lambda item: first[item.bucket])

    @property
    def unfinished(self) -> bool:
        """Whether anything is still to be computed or to join the batch."""
        return bool(self._final or self._known or self._closing)

    @property
    def ready(self) -> bool:
        """Whether a call could start now if a replica were free."""
        return bool(self._final) or any(map(self._may_start, self._known.values()))

    def next_call(self, replica: int) -> Call | None:
        """Takes what a free replica should do next; what `folds` has comes before."""
        if self._final:
            return self._final_call(replica)
        ready = [unit for unit in self._known.values() if self._may_start(unit)]
        if not ready:
            return None
        unit = min(ready, key=_preference)
        if unit.place is None:
            unit.place = self._free.pop()
        rows = self._rules.rows_per_call
        first = next(i for i, x in enumerate(unit.pending) if self._fits(unit, x))

        def kind(item: Item):
            return self.roster.reward_of(item), item.bucket

        items = _take(unit.pending, kind, rows, rows, first)
        if not unit.pending:
            del self._known[unit.name]
        self._start(unit, items, unit.place, replica)
        return Call(replica, items, unit.place, len(items))

    def folds(self) -> list[Fold]:
        """Takes the sums that nothing joins any more; their places are free then."""
        done = []
        for unit in list(self._closing.values()):
            for reward, (place, replicas) in list(unit.sums.items()):
                if unit.kept and reward is not None and unit.left[reward]:
                    continue
                del unit.sums[reward]
                where = tuple(sorted(replicas))
                done.append(Fold(unit.name, place, reward, where, unit.kept))
            held = any(place == unit.place for place, _ in unit.sums.values())
            if unit.place is not None and not held:
                self._free.append(unit.place)
                unit.place = None
            if not unit.sums:
                del self._closing[unit.name]
        return done

    def prompts(self) -> list[Prompt]:
        """Takes the groups of which nothing more comes, once their sums are folded."""
        done = []
        for group, replicas in list(self._replicas.items()):
            unit, closed = self._units[group], self.roster.groups[group].closed
            kept = closed and self.roster.verdict(group) == "kept"
            waits = not unit.complete or unit.sums or self._unstarted[group]
            if closed and not (kept and waits):
                del self._replicas[group]
                done.append(Prompt(group, tuple(sorted(replicas)), kept))
        return done

    @property
    def _by_reward(self) -> bool:
        return self._rules.exact and self.by_baseline

    def _settle(self, name: Hashable, index: int) -> Close | None:
        group, unit = self.roster.groups[name], self._units[name]
        if group.closed:  # dropped before; nothing it does matters any more
            return None
        verdict = self.roster.verdict(name)
        if verdict == "kept" and self._batch is None:
            self._count_waiting(unit)
        if verdict != "dropped" and not self._joins_late:
            self._join(unit, group.members[index])
        if verdict:
            return self._close(name, group, verdict)
        if self._rules.release == "trajectory":
            self._offer(unit)
        return None

    @property
    def _joins_late(self) -> bool:
        """Whether members join the batch's unit only when their group is kept."""
        early = self._rules.release == "trajectory" and not self._lossy
        return self._batch is not None and not early

    def _close(self, name: Hashable, group: Group, verdict: str) -> Close:
        group.closed = True
        if self._batch is None:
            self._complete(self._units[name], verdict == "kept")
        elif verdict == "kept":
            if self._joins_late:
                for member in group.survivors.values():
                    self._join(self._batch, member)
            if self._rules.release != "batch":
                self._offer(self._batch)
        return Close(name, verdict)

    def _join(self, unit: _Unit, member: Member) -> None:
        if not member.failed:
            unit.rewards.add(member.reward)
            unit.pending.extend(member.items)
            unit.left[member.reward] += len(member.items)

    def _offer(self, unit: _Unit) -> None:
        if not self.held:
            self._finalize(unit)
        elif unit.pending:
            self._known[unit.name] = unit

    def _count_waiting(self, unit: _Unit) -> None:
        if self._rules.release == "trajectory":
            self.waited += len(unit.pending)
            late = [x for x in unit.pending if not self._fits(unit, x)]
            self.waited_for_bucket += len({item[:2] for item in late})

    def _complete(self, unit: _Unit, kept: bool) -> None:
        unit.complete, unit.kept = True, kept
        self._known.pop(unit.name, None)
        if not kept:
            unit.pending.clear()
        if unit.place is not None:
            self._closing[unit.name] = unit
        if self._rules.release != "batch":
            self._finalize(unit)

    def _finalize(self, unit: _Unit) -> None:
        """What a unit has not started yet needs no place of its own any more."""

        def order(item: Item):
            where = self.roster.groups[item.group].order, item.member, item.sample
            if not self._by_reward:
                return where
            reward = self.roster.reward_of(item)
            return reward not in unit.sums, reward, *where

        self._final.extend(sorted(unit.pending, key=order))
        unit.pending.clear()

    def _fits(self, unit: _Unit, item: Item) -> bool:
        """Whether a sample's reward is among those that a unit may sum already."""
        most, there = self._rules.most_rewards, unit.streamed
        few = most is None or len(there) < most or not self.by_baseline
        return few or self.roster.reward_of(item) in there

    def _may_start(self, unit: _Unit) -> bool:
        placed = unit.place is not None or bool(self._free)
        return placed and any(self._fits(unit, x) for x in unit.pending)

    def _final_call(self, replica: int) -> Call:
        # Under batch release nothing will join the last call of a bucket. A lone
        # streamed trajectory goes alone.
        rows = least = self._rules.rows_per_call
        if self._rules.release == "batch":
            least = 1 if self._rules.pad_last else rows // 2 + 1
        items = _take(self._final, lambda item: item.bucket, least, rows)
        if not self._by_reward:
            self._note(items, replica)
            return Call(replica, items, None, rows if len(items) >= least else 1)
        unit = self._units[items[0].group]
        place, _ = unit.sums.get(
            self.roster.reward_of(items[0]), (self._rules.places, None)
        )
        self._start(unit, items, place, replica)
        return Call(replica, items, place, len(items))

    def _start(self, unit: _Unit, items: tuple, place: int, replica: int) -> None:
        """Notes down which sums a call adds to."""
        self._note(items, replica)
        reward = self.roster.reward_of(items[0])
        unit.left[reward] -= len(items)
        if unit.complete:
            self._closing[unit.name] = unit
        else:
            unit.streamed.add(reward)
            unit.sums.setdefault(None, (place, set()))[1].add(replica)
        if self._by_reward:
            unit.sums.setdefault(reward, (place, set()))[1].add(replica)

    def _note(self, items: tuple, replica: int) -> None:
        for item in items:
            self._unstarted[item.group] -= 1
            self._replicas.setdefault(item.group, set()).add(replica)


def _take(
    waiting: list[Item], kind: Callable, least: int, most: int, first: int = 0
) -> tuple[Item, ...]:
    """Removes a sample and up to `most` of its kind; it alone if not `least`."""
    wanted = kind(waiting[first])
    alike = (i for i, item in enumerate(waiting) if kind(item) == wanted)
    indices = list(itertools.islice(alike, most))
    if len(indices) < least:
        indices = [first]
    items = tuple(waiting[i] for i in indices)
    for i in reversed(indices):
        del waiting[i]
    return items


def _preference(unit: _Unit):
    """Smaller is sooner: promising, then already holding sums, then most ready."""
    uniform = len(unit.rewards) < 2
    return uniform, unit.place is None, -len(unit.pending), unit.order
