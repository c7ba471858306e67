"""What happened in a step: its groups as a table, any trajectory in colour.

python -m thundersync_jax.show --workdir=DIR --step=12 --group=3 --member=1
"""

import collections
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thundersync_jax import flags
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics.records import Record, known_mean, read_step
from thundersync_jax.view import tables
from thundersync_jax.view.display import Display
from thundersync_jax.view.tables import Column

FLAGS = {
    "step": flags.Flag(int, None, "which step, by default the latest"),
    "group": flags.Flag(int, None, "one group of it"),
    "member": flags.Flag(int, None, "one trajectory of the group"),
}
_REWARDS_WIDTH, _ADVANTAGES_WIDTH, _STOP_WIDTH = 16, 13, 21

_GROUP_COLUMNS = (
    Column("group"),
    Column("prompt", left=True),
    Column("mean\nreward"),
    Column("members'\nrewards", left=True),
    Column("advantages", left=True),
    Column("turns"),
    Column("tokens"),
    Column("stop reasons", left=True),
)
_MEMBER_COLUMNS = (
    Column("member"),
    Column("reward"),
    Column("advantage"),
    Column("turns"),
    Column("tokens"),
    Column("trained\ntokens"),
    Column("secs"),
    Column("policy\nversion"),
    Column("stop reason", left=True),
)


def show(
    workdir: Path,
    step: int | None = None,
    group: int | None = None,
    member: int | None = None,
) -> dict[str, Any]:
    """Prints a recorded step, one of its groups, or one trajectory.

    Without a step the latest one, without a group all of them as a table, without a
    member the members of the group as a table and the text of each.
    """
    if group is None and member is not None:
        raise ConfigError(
            f"--member is {member} without a group, expected both. Write "
            f"--group=0 --member={member}."
        )
    step, records = read_step(workdir, step)
    groups = _by_group(records)
    display = Display()
    result: dict[str, Any] = {"step": step}
    if group is None:
        rows = _group_rows(groups, display.width)
        rewards = known_mean(r.trajectory.reward for r in records)
        display.table(_GROUP_COLUMNS, rows, f"step {step}")
        mean = tables.number(rewards.mean)
        display.line(f"mean reward {mean} over {rewards.known} of {rewards.total}")
        result["reward"] = rewards._asdict()
        result["groups"] = [_group_facts(n, members) for n, members in groups.items()]
        return result
    members = _pick(groups, group, f"group of step {step}")
    if member is None:
        title = f"step {step} group {group}: {tables.cut(members[0].prompt_text, 70)}"
        rows = [_member_cells(record) for record in members]
        display.table(_MEMBER_COLUMNS, rows, title)
        result["groups"] = [_group_facts(group, members)]
    else:
        by_member = {record.trajectory.key.member: record for record in members}
        members = [_pick(by_member, member, f"member of group {group}")]
        result["trajectory"] = _facts(members[0])
    for record in members:
        given = record.trajectory, record.advantage
        display.sample(*given, lines=None, pieces=record.pieces)
    return result


def _by_group(records: Sequence[Record]) -> dict[int, list[Record]]:
    groups: dict[int, list[Record]] = {}
    for record in records:
        groups.setdefault(record.trajectory.key.group, []).append(record)
    return groups


def _pick(there: dict[int, Any], wanted: int, kind: str) -> Any:
    if wanted not in there:
        known = sorted(there)
        raise ConfigError(
            f"{wanted} is no {kind}, expected one of {len(known)} from {known[0]} to "
            f"{known[-1]}. The nearest is "
            f"{min(known, key=lambda number: abs(number - wanted))}."
        )
    return there[wanted]


def _group_rows(groups: dict[int, list[Record]], width: int) -> list[list[str]]:
    """The cells of all groups, the prompts cut to what the others leave."""
    rows = [_group_cells(group, members) for group, members in groups.items()]
    bare = tables.fit(_GROUP_COLUMNS, [[row[0], "", *row[2:]] for row in rows])
    left = bare[1].extent + max(0, width - tables.extent(bare))
    return [[row[0], tables.cut(row[1], left), *row[2:]] for row in rows]


def _group_cells(group: int, members: Sequence[Record]) -> list[str]:
    trajectories = [record.trajectory for record in members]
    rewards = [trajectory.reward for trajectory in trajectories]
    reasons = collections.Counter(t.stop_reason.value for t in trajectories)
    stops = ", ".join(f"{count} {name}" for name, count in reasons.most_common())
    return [
        str(group),
        members[0].prompt_text,
        tables.number(known_mean(rewards).mean),
        _list(rewards, _REWARDS_WIDTH, 3),
        _list([record.advantage for record in members], _ADVANTAGES_WIDTH, 2),
        f"{known_mean(t.turns for t in trajectories).mean:.1f}",
        str(sum(len(t.ids) for t in trajectories)),
        tables.cut(stops.replace("_", " "), _STOP_WIDTH),
    ]


def _member_cells(record: Record) -> list[str]:
    trajectory = record.trajectory
    return [
        str(trajectory.key.member),
        tables.number(trajectory.reward),
        tables.signed(record.advantage),
        str(trajectory.turns),
        str(len(trajectory.ids)),
        str(trajectory.action_tokens),
        tables.seconds(_secs(record)),
        str(trajectory.policy_version),
        trajectory.stop_reason.value.replace("_", " "),
    ]


def _group_facts(group: int, members: Sequence[Record]) -> dict[str, Any]:
    rewards = known_mean(record.trajectory.reward for record in members)
    return {
        "group": group,
        "prompt": members[0].prompt_text,
        "reward": rewards._asdict(),
        "members": [_facts(record) for record in members],
    }


def _facts(record: Record) -> dict[str, Any]:
    trajectory = record.trajectory
    return {
        "group": trajectory.key.group,
        "member": trajectory.key.member,
        "attempt": trajectory.key.attempt,
        "policy_version": trajectory.policy_version,
        "reward": trajectory.reward,
        "advantage": record.advantage,
        "turns": trajectory.turns,
        "tokens": len(trajectory.ids),
        "trained_tokens": trajectory.action_tokens,
        "secs": _secs(record),
        "stop_reason": trajectory.stop_reason.value,
        "reason": trajectory.reason,
        "text": record.text,
    }


def _secs(record: Record) -> float:
    """From the start to the verdict, or to the end of the tokens where none came."""
    times = record.trajectory.times
    end = times.get("verified", times.get("completed", math.nan))
    return round(end - times.get("started", math.nan), 6)


def _list(values: Sequence[float | None], width: int, digits: int) -> str:
    """All values where they fit, else how many there are of each, else the range."""
    known = [value for value in values if value is not None]
    if not known:
        return tables.MISSING
    texts = [tables.short(value, digits) for value in values]
    counts = collections.Counter(texts).most_common()
    for fitting in (
        " ".join(texts),
        ", ".join(f"{count} of {text}" for text, count in counts),
    ):
        if len(fitting) <= width:
            return fitting
    low, high = (tables.short(side(known), digits) for side in (min, max))
    return f"{low} to {high}"


if __name__ == "__main__":
    flags.run(show, flags=FLAGS, needs=("workdir",))
