"""What happened in a step: its groups as a table, any trajectory in colour.

python -m thundersync_jax.show --workdir=DIR --step=12 --group=3 --member=1
python -m thundersync_jax.show --workdir=DIR --worst=5
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
    "worst": flags.Flag(int, None, "so many trajectories of the lowest rewards"),
    "failed": flags.Flag(bool, False, "the trajectories without a verdict, and why"),
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
_SELECTED_COLUMNS = (Column("group"), *_MEMBER_COLUMNS)


def show(
    workdir: Path,
    step: int | None = None,
    group: int | None = None,
    member: int | None = None,
    worst: int | None = None,
    failed: bool = False,
) -> dict[str, Any]:
    """Prints a recorded step, some of its trajectories, or one.

    Returns the JSON object of `--json`.

    Args:
      workdir: Directory of a training run.
      step: Number of the step; None takes the latest.
      group: Number of the group whose members are shown; None shows a table of all.
      member: Number of the only member of the group to show.
      worst: How many trajectories of the lowest rewards to show, in place of a group.
      failed: Whether to show those without a verdict, in place of a group.

    Raises:
      ConfigError: There is no such step, group or member, or flags exclude each other.
    """
    _check_choice(group, worst, failed)
    if group is None and member is not None:
        raise ConfigError(
            f"--member is {member} without a group, expected both. Write "
            f"--group=0 --member={member}."
        )
    step, records = read_step(workdir, step)
    groups: dict[int, list[Record]] = {}
    for record in records:
        groups.setdefault(record.trajectory.key.group, []).append(record)
    display = Display()
    result: dict[str, Any] = {"step": step}
    if worst is not None or failed:
        without = [r for r in records if r.trajectory.reward is None]
        records = without if failed else _worst(records, worst)
        kind = "failed" if failed else "of the lowest rewards"
        title = f"step {step}: {len(records)} {kind}"
        _show_members(display, records, title, _SELECTED_COLUMNS)
        result["trajectories"] = [_facts(record) for record in records]
        return result
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
        _show_members(display, members, title, _MEMBER_COLUMNS)
        result["groups"] = [_group_facts(group, members)]
    else:
        by_member = {record.trajectory.key.member: record for record in members}
        record = _pick(by_member, member, f"member of group {group}")
        result["trajectory"] = _facts(record)
        _show_text(display, record)
    return result


def _check_choice(group: int | None, worst: int | None, failed: bool) -> None:
    chosen = {"--group": group, "--worst": worst, "--failed": failed or None}
    chosen = [name for name, value in chosen.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigError(
            f"{' and '.join(chosen)} were given, expected one of them. Leave out "
            f"{chosen[-1]}."
        )
    if worst is not None and worst < 1:
        raise ConfigError(f"--worst is {worst}, expected at least 1. Write --worst=5.")


def _worst(records: Sequence[Record], count: int) -> list[Record]:
    """The trajectories of the lowest rewards, the lowest first."""
    judged = [r for r in records if r.trajectory.reward is not None]
    return sorted(judged, key=lambda r: (r.trajectory.reward, r.trajectory.key))[:count]


def _show_members(
    display: Display, records: Sequence[Record], title: str, columns: Sequence[Column]
) -> None:
    """A table of trajectories, and the text of each."""
    rows = [_member_cells(record)[-len(columns) :] for record in records]
    display.table(columns, rows, title)
    for record in records:
        _show_text(display, record)


def _show_text(display: Display, record: Record) -> None:
    display.sample(
        record.trajectory, record.advantage, lines=None, pieces=record.pieces
    )
    if record.trajectory.log:
        display.log(record.trajectory.log)


def _pick(numbered: dict[int, Any], wanted: int, kind: str) -> Any:
    if wanted not in numbered:
        known = sorted(numbered)
        raise ConfigError(
            f"{wanted} is no {kind}, expected one of {len(known)} from {known[0]} to "
            f"{known[-1]}. The nearest is "
            f"{min(known, key=lambda number: abs(number - wanted))}."
        )
    return numbered[wanted]


def _group_rows(groups: dict[int, list[Record]], width: int) -> list[list[str]]:
    """The cells of all groups, the prompts cut to what the others leave."""
    rows = [_group_cells(n, members) for n, members in groups.items()]
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
        str(trajectory.key.group),
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
        "parts": trajectory.parts,
        "log": trajectory.log,
        "advantage": record.advantage,
        "turns": trajectory.turns,
        "samples": len(trajectory.starts),
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
