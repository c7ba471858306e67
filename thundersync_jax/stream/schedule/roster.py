"""The members of one step: who has completed, been judged, or failed.

A member is *settled* once it is complete and has its reward, or has failed. What cannot
have happened is refused and changes nothing. The data of decisions is here too.
"""

import dataclasses
import numbers
from collections.abc import Hashable
from typing import Literal, NamedTuple, get_args

Release = Literal["batch", "group", "trajectory"]
RELEASES: tuple[str, ...] = get_args(Release)
BATCH = "the whole batch"  # the name of the unit of all groups
Verdict = Literal["kept", "dropped", "filtered"]


class Item(NamedTuple):
    """One sample to differentiate."""

    group: Hashable
    member: int
    sample: int
    bucket: Hashable  # samples of one bucket may share a call


class Close(NamedTuple):
    """No outcome of the group is missing, or none matters any more."""

    group: Hashable
    verdict: Verdict


class Call(NamedTuple):
    """Decision: differentiate these samples on this replica.

    `place` is None on the direct path, otherwise where the sums of the unit lie; then
    the items are of one unit and have one reward. `rows` is the size of the compiled
    call; rows beyond the items count for nothing.
    """

    replica: int
    items: tuple[Item, ...]
    place: int | None
    rows: int


class Fold(NamedTuple):
    """Decision: nothing joins these sums any more; they join the batch where `kept`.

    `reward` names one of the sums in exact mode; None stands for those that do not
    depend on the reward and, otherwise, for all sums of the place.
    """

    unit: Hashable
    place: int
    reward: float | None
    replicas: tuple[int, ...]  # where they are
    kept: bool


class Prompt(NamedTuple):
    """Decision: no more comes of a group; its prompt is differentiated where `kept`."""

    group: Hashable
    replicas: tuple[int, ...]
    kept: bool


@dataclasses.dataclass(frozen=True)
class Rules:
    """When a gradient may start."""

    release: Release  #: "batch", "group" or "trajectory"
    places: int = 0  #: how many units that miss rewards may hold sums at a time
    #: Whose rewards an advantage depends on: the "member", "group" or "batch".
    scope: Literal["member", "group", "batch"] = "group"
    rewards: bool = True  #: false where a completed member is settled without a reward
    drop_partial: bool = True  #: whether a failed member drops its whole group
    drop_uniform: bool = False  #: whether equal raw rewards drop a group
    #: Of how many distinct rewards a unit may sum gradients before it is complete; None
    #: for any number.
    most_rewards: int | None = None
    exact: bool = False  #: whether every gradient goes into a sum of its reward
    rows_per_call: int = 1  #: how many samples share a call once that many are waiting
    #: Under batch release, whether the last call of a bucket is always padded to that
    #: many, or only where samples fill more than half of it.
    pad_last: bool = True


@dataclasses.dataclass
class Member:
    """One trajectory: what is known of it, and its samples."""

    completed: bool = False
    reward: float | None = None  # its advantage follows from it; baseline subtracted
    raw: float | None = None  # the unshaped verdict
    failed: bool = False
    replaced_by: int | None = None  # the index of the member in its place
    settled: bool = False
    items: list[Item] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Group:
    """The trajectories of one prompt."""

    order: int
    members: list[Member]
    unsettled: int
    baseline: float  # subtracted from rewards
    spares: int = 0  # members that may still come in place of failed ones
    closed: bool = False

    @property
    def survivors(self) -> dict[int, Member]:
        """Settled members that did not fail, by index."""
        settled = ((i, m) for i, m in enumerate(self.members) if m.settled)
        return {i: member for i, member in settled if not member.failed}


class Roster:
    """All groups of a step; `Rules` explains the arguments."""

    def __init__(
        self,
        rewards: bool = True,
        drop_partial: bool = True,
        drop_uniform: bool = False,
    ):
        self.groups: dict[Hashable, Group] = {}
        self._rewards = rewards
        self._drop_partial = drop_partial
        self._drop_uniform = drop_uniform

    @property
    def lossy(self) -> bool:
        """Whether a group may still be lost whose members are settled one by one."""
        return self._drop_partial or self._drop_uniform

    @property
    def unsettled(self) -> int:
        """How many members are not settled."""
        return sum(state.unsettled for state in self.groups.values())

    def open_group(
        self, group: Hashable, members: int, baseline: float = 0.0, spares: int = 0
    ) -> Group:
        """Announces a group of so many members, and what is off their rewards."""
        _check_name(group)
        if group in self.groups:
            raise ValueError(f"group {group!r} is open already; name every group once")
        if not isinstance(members, numbers.Integral) or members < 1:
            raise ValueError(
                f"group {group!r} has members={members!r}; expected a whole number >= 1"
            )
        if not isinstance(spares, numbers.Integral) or spares < 0:
            raise ValueError(
                f"group {group!r} has spares={spares!r}; expected a whole number >= 0"
            )
        fresh = [Member() for _ in range(members)]
        self.groups[group] = Group(len(self.groups), fresh, members, baseline, spares)
        return self.groups[group]

    def sample(self, group: Hashable, member: int, bucket: Hashable) -> Item:
        """Adds a sample to a member that is not complete yet."""
        items = self.incomplete(group, member, "a sample").items
        items.append(Item(group, member, len(items), bucket))
        return items[-1]

    def complete(self, group: Hashable, member: int) -> bool:
        """All tokens of a member are final. Returns whether this settles it."""
        self.incomplete(group, member, "complete").completed = True
        return self._settles(group, member)

    def reward(
        self, group: Hashable, member: int, reward: float, raw: float | None
    ) -> bool:
        """The verdict on a member is in. Returns whether this settles it."""
        state = self._unsettled(group, member, "a reward")
        baseline = self.groups[group].baseline
        if state.reward is not None:
            raise ValueError(
                f"group {group!r} member {member} has reward {state.reward + baseline} "
                f"and got {reward}; a member has one reward"
            )
        state.reward = reward - baseline
        state.raw = reward if raw is None else raw
        return self._settles(group, member)

    def fail(self, group: Hashable, member: int, replace: bool = True) -> bool:
        """Withdraws an unsettled member, which settles it.

        A spare one, where there is one and this may `replace`, takes the next index.
        """
        withdrawn = self._unsettled(group, member, "fail")
        withdrawn.failed = True
        state = self.groups[group]
        if state.spares and replace and not state.closed:
            state.spares -= 1
            withdrawn.replaced_by = len(state.members)
            state.members.append(Member())
            state.unsettled += 1
        return self._settles(group, member)

    def replaced_by(self, group: Hashable, member: int) -> int | None:
        """The index of the member in place of a failed one, if there is one."""
        return self.groups[group].members[member].replaced_by

    def verdict(self, group: Hashable) -> Verdict | None:
        """What becomes of a group, None while that is open."""
        state = self.groups[group]
        failed = any(m.failed and m.replaced_by is None for m in state.members)
        if failed and self._drop_partial:
            return "dropped"
        if state.unsettled:
            return None
        raw = [member.raw for member in state.members if not member.failed]
        if not raw:
            return "dropped"
        return "filtered" if self._drop_uniform and len(set(raw)) == 1 else "kept"

    def reward_of(self, item: Item) -> float | None:
        """The reward of a sample's member."""
        return self.groups[item.group].members[item.member].reward

    def survivors(self, group: Hashable) -> dict[int, float | None]:
        """Settled members that did not fail, with their rewards, by index."""
        return {i: m.reward for i, m in self.groups[group].survivors.items()}

    def outstanding(self) -> list[tuple[Hashable, int]]:
        """The members that are not settled."""
        return [
            (name, index)
            for name, state in self.groups.items()
            for index, member in enumerate(state.members)
            if not member.settled
        ]

    def incomplete(self, group: Hashable, member: int, event: str) -> Member:
        """The member that an event is about, if it is not complete yet."""
        state = self._unsettled(group, member, event)
        if state.completed:
            raise ValueError(
                f"{event} for group {group!r} member {member}, which is complete; its "
                "tokens are final, complete it once"
            )
        return state

    def _settles(self, group, member):
        state = self.groups[group].members[member]
        judged = state.reward is not None or not self._rewards
        if not state.failed and not (state.completed and judged):
            return False
        state.settled = True
        self.groups[group].unsettled -= 1
        return True

    def _unsettled(self, group, member, event):
        """Finds the member an event is about, or says what is wrong with the event."""
        _check_name(group)
        if group not in self.groups:
            raise ValueError(
                f"{event} for group {group!r}, which is not open; call open_group first"
            )
        members = self.groups[group].members
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


def _check_name(group):
    try:
        hash(group)
    except TypeError:
        raise ValueError(
            f"{group!r:.60} cannot name a group, for it has no hash; use a number, a "
            "string or a tuple of them"
        ) from None
