"""What the order of gradient calls follows from, and the decisions it consists of."""

import dataclasses
from collections.abc import Hashable
from typing import Literal, NamedTuple

from .roster import Item

Release = Literal["batch", "group", "trajectory"]
RELEASES: tuple[str, ...] = ("batch", "group", "trajectory")
BATCH = "the whole batch"  # the name of the unit of all groups


class Call(NamedTuple):
    """Decision: differentiate these samples on this replica.

    `place` is None on the direct path, otherwise where the sums of the unit lie; then
    the items are of one unit and have one reward.
    `rows` is the size of the compiled call; rows beyond the items count for nothing.
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
    """Decision: nothing more comes of a group that shares a prompt.

    Where it is `kept`, the cotangents of the prompt are complete on these replicas.
    """

    group: Hashable
    replicas: tuple[int, ...]
    kept: bool


@dataclasses.dataclass(frozen=True)
class Rules:
    """When a gradient may start.

    Attributes:
      release: "batch", "group" or "trajectory".
      places: How many units that miss rewards may hold sums at a time.
      scope: Whose rewards an advantage depends on: the "member", "group" or "batch".
      rewards: False where a completed member is settled without a reward.
      drop_partial: Whether a failed member drops its whole group.
      drop_uniform: Whether equal raw rewards drop a group.
      most_rewards: Of how many distinct rewards a unit may sum gradients before it is
        complete; None for any number.
      exact: Whether every gradient goes into a sum of its reward.
      rows_per_call: How many samples share a call once that many are waiting.
      pad_last: Under batch release, whether the last call of a bucket is always padded
        to that many, or only where samples fill more than half of it.
    """

    release: Release
    places: int = 0
    scope: Literal["member", "group", "batch"] = "group"
    rewards: bool = True
    drop_partial: bool = True
    drop_uniform: bool = False
    most_rewards: int | None = None
    exact: bool = False
    rows_per_call: int = 1
    pad_last: bool = True
