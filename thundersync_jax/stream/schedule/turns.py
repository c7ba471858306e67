"""Which turn's gradient runs next, and which trajectory may be closed.

A state machine of plain data, as module `order` is for whole samples. An open
trajectory holds a *place* on one replica from its first gradient on: the sum of its
turns' gradients and what later turns need. Its turns run in their order; once it is
complete the earlier ones are replayed, last to first, and its sum joins the batch when
its group is kept. Ready work, served in this order:

    closing   of a complete trajectory that has a place: that place is free soon
    open      the next turn of one that has a place
    new       a first turn, where a place is free; of complete trajectories first
"""

import collections
import dataclasses
from collections.abc import Hashable
from typing import NamedTuple

from .roster import Call, Close, Item, Prompt, Roster


class TurnCall(NamedTuple):
    """Decision: differentiate a turn, or push what later ones pulled through it."""

    replica: int
    item: Item  # `sample` counts the turns of a member
    place: int
    replay: bool

    @property
    def as_call(self) -> Call:
        """The same as a call of one sample."""
        return Call(self.replica, (self.item,), self.place, rows=1)


class TurnFold(NamedTuple):
    """Decision: nothing joins this sum any more; it joins the batch where `kept`."""

    group: Hashable
    member: int
    place: int
    replica: int
    kept: bool


@dataclasses.dataclass(eq=False)
class _Trajectory:
    order: int
    name: tuple[Hashable, int]
    items: list[Item] = dataclasses.field(default_factory=list)
    wanted: int = 0  # turns, up to the last one that is trained
    complete: bool = False
    place: int | None = None
    replica: int = 0
    started: int = 0  # turns
    to_replay: int | None = None  # turns, once all have been started

    @property
    def placed(self) -> bool:
        """Whether it holds a sum, on its replica."""
        return self.place is not None

    @property
    def next_turn(self) -> Item | None:
        """The turn that its replica should differentiate or replay next."""
        if self.started < self.wanted:
            return self.items[self.started]
        if not self.complete or not self.started:
            return None
        left = self.started - 1 if self.to_replay is None else self.to_replay
        return self.items[left - 1] if left else None

    @property
    def done(self) -> bool:
        """Whether nothing more is computed of it."""
        return self.complete and self.next_turn is None


class Turns:
    """Decides the order of gradient calls of one step, turn by turn.

    At most `places` trajectories are open, with a sum and a state, at a time. With
    `replay` turns read what earlier ones left, otherwise each is by itself.
    """

    waited = waited_for_bucket = 0  # as there are no rewards

    def __init__(self, places: int, drop_partial: bool, replay: bool = True):
        self.roster = Roster(rewards=False, drop_partial=drop_partial)
        self._replay = replay
        self._free = list(range(places))[::-1]
        self._trajectories: dict[tuple[Hashable, int], _Trajectory] = {}
        self._folds: list[TurnFold] = []
        self._replicas: dict[Hashable, set[int]] = {}  # of groups, where they ran
        self._seen = 0

    def turn(
        self, group: Hashable, member: int, bucket: Hashable, trained: bool = True
    ) -> Item:
        """Adds a turn; one that is not `trained` waits for the next that is."""
        item = self.roster.sample(group, member, bucket)
        if self.roster.groups[group].closed:  # dropped; nothing matters any more
            return item
        self._seen += 1
        fresh = _Trajectory(self._seen, (group, member))
        trajectory = self._trajectories.setdefault((group, member), fresh)
        trajectory.items.append(item)
        if trained:
            trajectory.wanted = len(trajectory.items)
        return item

    def complete(self, group: Hashable, member: int) -> Close | None:
        """All turns of a member are in. Returns what this closes."""
        self.roster.complete(group, member)
        trajectory = self._trajectories.get((group, member))
        if trajectory is not None:
            trajectory.complete = True
            if not self._replay:
                trajectory.to_replay = 0
        return self._settle(group)

    def fail(self, group: Hashable, member: int, replace: bool = True) -> Close | None:
        """Withdraws an incomplete member. Returns what this closes."""
        self.roster.fail(group, member, replace)
        self._forget(group, member)
        return self._settle(group)

    @property
    def unfinished(self) -> bool:
        """Whether anything is still to be computed or to join the batch."""
        return bool(self._trajectories)

    @property
    def ready(self) -> bool:
        """Whether a call could start now if its replica were free."""
        return any(t.placed or self._free for t in self._with_work())

    def next_call(self, free: set[int]) -> TurnCall | None:
        """Takes the work that one of these free replicas should do next, or None.

        What `folds` returns has to be carried out before. A trajectory stays where its
        first turn ran; a new one goes where the fewest are open.
        """
        ready = [
            trajectory
            for trajectory in self._with_work()
            if (trajectory.replica in free if trajectory.placed else self._free)
        ]
        if not ready:
            return None
        trajectory = min(ready, key=_preference)
        if not trajectory.placed:
            trajectory.replica = self._emptiest(free)
            trajectory.place = self._free.pop()
        item = trajectory.next_turn
        replay = trajectory.started == trajectory.wanted
        self._replicas.setdefault(item.group, set()).add(trajectory.replica)
        if replay:
            trajectory.to_replay = item.sample
        else:
            trajectory.started += 1
            trajectory.to_replay = None if self._replay else 0
        return TurnCall(trajectory.replica, item, trajectory.place, replay)

    def folds(self) -> list[TurnFold]:
        """Takes the sums that nothing joins any more; their places are free then."""
        for name, trajectory in list(self._trajectories.items()):
            if not trajectory.done:
                continue
            verdict = self.roster.verdict(name[0])
            if verdict == "kept" or (verdict is None and not self.roster.lossy):
                self._forget(*name, kept=True)
        folds, self._folds = self._folds, []
        self._free.extend(fold.place for fold in folds)
        return folds

    def prompts(self) -> list[Prompt]:
        """Takes the groups of which nothing more comes, once their sums are folded."""
        open_groups = {group for group, _ in self._trajectories}
        done = []
        for group, replicas in list(self._replicas.items()):
            if self.roster.groups[group].closed and group not in open_groups:
                del self._replicas[group]
                kept = self.roster.verdict(group) == "kept"
                done.append(Prompt(group, tuple(sorted(replicas)), kept))
        return done

    @property
    def waits_for(self) -> set[int] | None:
        """Replicas that ready work belongs to; None where any would do."""
        ready = self._with_work()
        if self._free and not all(trajectory.placed for trajectory in ready):
            return None
        return {trajectory.replica for trajectory in ready if trajectory.placed}

    def _with_work(self) -> list[_Trajectory]:
        """Trajectories of which a turn waits to be differentiated or replayed."""
        return [t for t in self._trajectories.values() if t.next_turn is not None]

    def _emptiest(self, free: set[int]) -> int:
        held = [t.replica for t in self._trajectories.values() if t.placed]
        count = collections.Counter(held)
        return min(free, key=lambda replica: (count[replica], replica))

    def _settle(self, group: Hashable) -> Close | None:
        state = self.roster.groups[group]
        verdict = self.roster.verdict(group)
        if state.closed or verdict is None:
            return None
        state.closed = True
        if verdict == "dropped":
            for member in range(len(state.members)):
                self._forget(group, member)
        return Close(group, verdict)

    def _forget(self, group: Hashable, member: int, kept: bool = False) -> None:
        trajectory = self._trajectories.pop((group, member), None)
        if trajectory is not None and trajectory.placed:
            place, replica = trajectory.place, trajectory.replica
            self._folds.append(TurnFold(group, member, place, replica, kept))


def _preference(trajectory: _Trajectory):
    """Smaller is sooner."""
    return not trajectory.placed, not trajectory.complete, trajectory.order
