"""Which gradient runs next, on which replica, and what may be closed.

A state machine of plain data: events in, decisions out. No threads, no clock, no
arrays; whoever drives it executes what it decides. Ready work has two classes, served
in this order:

    final  every reward of its group is in; its advantage is a number, nothing is held
    known  its own reward is in; it needs a place for the sums of its group

Work goes sample by sample, except where a full call of one program is waiting: of
final samples, or of known ones with equal rewards in one group, for then every sum of
that group takes the same share of each of their gradients.

A member is *settled* once it is complete and has its reward, or has failed. Its
samples are released when it is settled (trajectory), when its whole group is (group),
or when the step has no more to come (batch).
"""

import dataclasses
import itertools
import numbers
from collections.abc import Hashable
from typing import Literal, NamedTuple

Release = Literal["batch", "group", "trajectory"]
RELEASES: tuple[str, ...] = ("batch", "group", "trajectory")


class Item(NamedTuple):
    """One sample to differentiate."""

    group: Hashable
    member: int
    sample: int
    bucket: Hashable  # samples of one bucket may share a call


class Call(NamedTuple):
    """Decision: differentiate these samples on this replica.

    `place` is None on the direct path, otherwise where the sums of the group lie; then
    the items are of one group and have one reward.
    `rows` is the size of the compiled call; rows beyond the items count for nothing.
    """

    replica: int
    items: tuple[Item, ...]
    place: int | None
    rows: int


class Close(NamedTuple):
    """Decision: the group's rewards are in; its sums, if it has any, are free.

    `replicas` hold sums of it at `place`; they join the batch sum where `kept`.
    """

    group: Hashable
    kept: bool
    place: int | None
    replicas: tuple[int, ...]


@dataclasses.dataclass
class _Member:
    completed: bool = False
    reward: float | None = None
    failed: bool = False
    settled: bool = False
    items: list[Item] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Group:
    order: int
    members: list[_Member]
    unsettled: int
    pending: list[Item] = dataclasses.field(default_factory=list)  # settled, not taken
    rewards: set[float | None] = dataclasses.field(default_factory=set)
    place: int | None = None
    replicas: set[int] = dataclasses.field(default_factory=set)
    closed: bool = False


class Schedule:
    """Decides the order of gradient calls of one step.

    Args:
      release: When a gradient may start: "batch", "group" or "trajectory".
      open_groups: How many incomplete groups may hold sums at a time.
      drop_partial: Whether a failed member drops its whole group.
      rewards: False where a completed member is settled without a reward.
      held: False where a settled member needs no baseline and is certain to count: its
        samples are final at once.
      rows_per_call: How many samples share a call once that many are waiting whose
        gradients are needed as one sum only.
      pad_last: Under batch release, whether the last call of a bucket is always padded
        to that many, or only where samples fill more than half of it.
    """

    def __init__(
        self,
        release: Release,
        open_groups: int,
        drop_partial: bool,
        rewards: bool = True,
        held: bool = True,
        rows_per_call: int = 1,
        pad_last: bool = True,
    ):
        self._release = release
        self._drop_partial = drop_partial
        self._needs_reward = rewards
        self.held = held
        self._rows = rows_per_call
        self._pad_last = pad_last
        self._free = list(range(open_groups))[::-1]
        self._groups: dict[Hashable, _Group] = {}
        self._final: list[Item] = []
        self._known: dict[Hashable, _Group] = {}  # incomplete groups with ready work
        self.waited = 0  # samples that were ready before their group, and not streamed

    def open_group(self, group: Hashable, members: int) -> None:
        """Announces a group of so many members."""
        _check_name(group)
        if group in self._groups:
            raise ValueError(f"group {group!r} is open already; name every group once")
        if not isinstance(members, numbers.Integral) or members < 1:
            raise ValueError(
                f"group {group!r} has members={members!r}; expected a whole number >= 1"
            )
        fresh = [_Member() for _ in range(members)]
        self._groups[group] = _Group(len(self._groups), fresh, members)

    def sample(self, group: Hashable, member: int, bucket: Hashable) -> Item:
        """Adds a sample to a member that is not complete yet."""
        items = self._incomplete(group, member, "a sample").items
        items.append(Item(group, member, len(items), bucket))
        return items[-1]

    def complete(self, group: Hashable, member: int) -> Close | None:
        """All tokens of a member are final. Returns what this closes."""
        self._incomplete(group, member, "complete").completed = True
        return self._settle(group, member)

    def reward(self, group: Hashable, member: int, reward: float) -> Close | None:
        """The verdict on a member is in. Returns what this closes."""
        state = self._unsettled(group, member, "a reward")
        if state.reward is not None:
            raise ValueError(
                f"group {group!r} member {member} has reward {state.reward} and got "
                f"{reward}; a member has one reward"
            )
        state.reward = reward
        return self._settle(group, member)

    def fail(self, group: Hashable, member: int) -> Close | None:
        """Withdraws an unsettled member. Returns what this closes."""
        self._unsettled(group, member, "fail").failed = True
        return self._settle(group, member)

    def survivors(self, group: Hashable) -> dict[int, float | None]:
        """Settled members that did not fail, with their rewards, by index."""
        members = self._groups[group].members
        return {
            index: member.reward
            for index, member in enumerate(members)
            if member.settled and not member.failed
        }

    def outstanding(self) -> list[tuple[Hashable, int]]:
        """The members that are not settled."""
        return [
            (name, index)
            for name, state in self._groups.items()
            for index, member in enumerate(state.members)
            if not member.settled
        ]

    def discard(self, group: Hashable, members: set[int]) -> int:
        """Forgets waiting samples of a closed group. Returns how many they were."""
        before = len(self._final) + len(self._groups[group].pending)
        pending = self._groups[group].pending
        pending[:] = [x for x in pending if x.member not in members]
        self._final = [
            x for x in self._final if x.group != group or x.member not in members
        ]
        return before - len(self._final) - len(pending)

    def flush(self) -> None:
        """No event will follow: under batch release everything becomes ready now."""
        if self._release != "batch":
            return
        for state in self._groups.values():
            self._finalize(state)
        # One program after another, so that calls are full; then in the step's order.
        first: dict[Hashable, int] = {}
        for item in self._final:
            first.setdefault(item.bucket, len(first))
        self._final.sort(key=lambda item: first[item.bucket])

    @property
    def ready(self) -> bool:
        """Whether a call could start now if a replica were free."""
        return bool(self._final) or any(map(self._may_start, self._known.values()))

    def next_call(self, replica: int) -> Call | None:
        """Takes the work that a free replica should do next, or None."""
        if self._final:
            return self._take_final(replica)
        ready = [entry for entry in self._known.items() if self._may_start(entry[1])]
        if not ready:
            return None
        name, state = min(ready, key=lambda entry: _preference(entry[1]))
        if state.place is None:
            state.place = self._free.pop()
        state.replicas.add(replica)
        items = self._take(
            state.pending,
            lambda x: (state.members[x.member].reward, x.bucket),
            self._rows,
        )
        if not state.pending:
            del self._known[name]
        return Call(replica, items, state.place, len(items))

    def _unsettled(self, group, member, event):
        """Finds the member an event is about, or says what is wrong with the event."""
        _check_name(group)
        if group not in self._groups:
            raise ValueError(
                f"{event} for group {group!r}, which is not open; call open_group first"
            )
        members = self._groups[group].members
        if not isinstance(member, numbers.Integral) or not 0 <= member < len(members):
            raise ValueError(
                f"{event} for member {member!r} of group {group!r}; expected an index "
                f"from 0 to {len(members) - 1}"
            )
        if members[member].settled:
            how = "has failed" if members[member].failed else "has all it needs"
            raise ValueError(
                f"{event} for group {group!r} member {member}, which is settled: it "
                f"{how} and does not change any more"
            )
        return members[member]

    def _incomplete(self, group, member, event):
        state = self._unsettled(group, member, event)
        if state.completed:
            raise ValueError(
                f"{event} for group {group!r} member {member}, which is complete; its "
                "tokens are final, complete it once"
            )
        return state

    def _take_final(self, replica):
        # Under batch release nothing will join the last call of a bucket. A lone
        # streamed trajectory goes alone.
        least = self._rows
        if self._release == "batch":
            least = 1 if self._pad_last else self._rows // 2 + 1
        items = self._take(self._final, lambda item: item.bucket, least)
        padded = len(items) >= least
        return Call(replica, items, None, self._rows if padded else 1)

    def _take(self, waiting, kind, least):
        """Removes the first sample, and with it others of its kind if they are enough.

        At most a full call, and with fewer than `least` the first one alone.
        """
        first = kind(waiting[0])
        alike = (i for i, item in enumerate(waiting) if kind(item) == first)
        found = list(itertools.islice(alike, self._rows))
        if len(found) < least:
            found = found[:1]
        items = tuple(waiting[i] for i in found)
        for i in reversed(found):
            del waiting[i]
        return items

    def _may_start(self, state):
        return state.place is not None or bool(self._free)

    def _settle(self, name, index):
        state = self._groups[name]
        member = state.members[index]
        judged = member.reward is not None or not self._needs_reward
        if not member.failed and not (member.completed and judged):
            return None
        member.settled = True
        state.unsettled -= 1
        if state.closed:  # dropped before; nothing it does matters any more
            return None
        if member.failed and self._drop_partial:
            state.pending.clear()
            return self._close(name, state, kept=False)
        if state.unsettled == 0 and self._release == "trajectory":
            self.waited += len(state.pending)
        if not member.failed:
            state.rewards.add(member.reward)
            state.pending.extend(member.items)
        if state.unsettled == 0:
            return self._close(name, state, not all(m.failed for m in state.members))
        if self._release == "trajectory" and state.pending:
            if self.held:
                self._known[name] = state
            else:
                self._finalize(state)
        return None

    def _close(self, name, state, kept):
        close = Close(name, kept, state.place, tuple(sorted(state.replicas)))
        state.closed = True
        self._known.pop(name, None)
        if state.place is not None:
            self._free.append(state.place)
        if self._release != "batch":
            self._finalize(state)
        return close

    def _finalize(self, state):
        """Moves what a group has not computed yet to the direct path."""
        self._final.extend(sorted(state.pending, key=lambda x: (x.member, x.sample)))
        state.pending.clear()


def _check_name(group):
    try:
        hash(group)
    except TypeError:
        raise ValueError(
            f"{group!r:.60} cannot name a group, for it has no hash; use a number, a "
            "string or a tuple of them"
        ) from None


def _preference(state: _Group):
    """Smaller is sooner: promising, then already holding sums, then most ready."""
    uniform = len(state.rewards) < 2
    return uniform, state.place is None, -len(state.pending), state.order
