"""Several runs side by side: how they ended, what they cost, where they differ.

    python -m thundersync_jax.compare DIR DIR ... --plot=compared.png

Runs that still go on are compared as far as they are.
"""

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from thundersync_jax.config.settings import differences
from thundersync_jax.config.workdir import saved_settings
from thundersync_jax.errors import ConfigError
from thundersync_jax.flags import Flag
from thundersync_jax.flags import run as run_command
from thundersync_jax.metrics.records import known_mean
from thundersync_jax.metrics.writer import read
from thundersync_jax.view import pictures, tables
from thundersync_jax.view.display import Display
from thundersync_jax.view.tables import Column

Rows = Sequence[Mapping[str, Any]]  # of metrics.jsonl
_LATEST_STEPS = 10  # over which the reward of training is averaged
_COLUMNS = (
    Column("run", left=True),
    Column("steps"),
    Column("success\nbefore"),
    Column("success\nat the end"),
    Column("held-out\nreward"),
    Column("training\nreward"),
    Column("secs\nper step"),
    Column("secs\nin all"),
    Column("streamed"),
)


def compare(workdirs: Sequence[str], *, plot: str | None = None) -> dict[str, Any]:
    """Prints a table of runs, and the settings in which they differ.

    Returns the JSON object of `--json`.

    Args:
      workdirs: Work directories of two or more training runs.
      plot: Picture to write, held-out success over time; None writes none.

    Raises:
      ConfigError: Fewer than two directories, one twice, or one that holds no run.
    """
    if len(set(workdirs)) < max(2, len(workdirs)):
        raise ConfigError(
            f"the work directories are {', '.join(workdirs) or 'missing'}, expected "
            "two or more different ones. Write compare DIR DIR."
        )
    if plot is not None and not pictures.available():
        raise ConfigError(
            f"--plot is {plot} and matplotlib is not installed, expected none without "
            "it. pip install 'thundersync_jax[plots]' brings it."
        )
    folders = [Path(workdir).expanduser() for workdir in workdirs]
    settings = [saved_settings(folder) for folder in folders]
    metrics = [read(folder) for folder in folders]
    facts = [
        {"workdir": str(folder), "planned_steps": saved["steps"], **_facts(rows)}
        for folder, saved, rows in zip(folders, settings, metrics, strict=True)
    ]
    changed = _changed(settings)
    names = collections.Counter(folder.name for folder in folders)
    labels = [str(f) if names[f.name] > 1 else f.name for f in folders]
    display = Display()
    display.table(
        _COLUMNS, [_cells(label, run) for label, run in zip(labels, facts, strict=True)]
    )
    display.line(
        f"success: of held-out answers; training reward: over the last {_LATEST_STEPS} "
        "steps"
    )
    if changed:
        display.table(
            [Column("setting", left=True), *map(Column, labels)],
            [[name, *map(str, values)] for name, values in changed.items()],
            "settings that differ",
        )
    if plot is not None:
        _draw(plot, dict(zip(labels, metrics, strict=True)))
        display.line(f"wrote {plot}")
    return {"runs": facts, "settings": changed}


def _facts(rows: Rows) -> dict[str, Any]:
    """The numbers of one run; None where it has none yet."""
    measured = [row for row in rows if "heldout_success" in row]
    steps = [row for row in rows if "step_secs" in row]
    first, last = (measured[0], measured[-1]) if measured else ({}, {})
    latest = steps[-_LATEST_STEPS:]
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "heldout_success": {
            "warm_start": first.get("heldout_success"),
            "end": last.get("heldout_success"),
        },
        "heldout_reward": last.get("heldout_reward"),
        "reward_mean": known_mean(row.get("reward_mean") for row in latest).mean,
        "step_secs": known_mean(row["step_secs"] for row in steps).mean,
        "elapsed_secs": rows[-1].get("elapsed_secs") if rows else None,
        "streamed_share": known_mean(row.get("streamed_share") for row in steps).mean,
    }


def _cells(label: str, run: Mapping[str, Any]) -> list[str]:
    success = run["heldout_success"]
    return [
        label,
        f"{run['steps']}/{run['planned_steps']}",
        tables.percent(success["warm_start"], 1),
        tables.percent(success["end"], 1),
        tables.number(run["heldout_reward"]),
        tables.number(run["reward_mean"]),
        tables.seconds(run["step_secs"]),
        tables.seconds(run["elapsed_secs"]),
        tables.percent(run["streamed_share"]),
    ]


def _changed(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings that differ from those of the first run, with each run's value."""
    first, *others = settings
    changes = [
        {change.name: change for change in differences(first, s)} for s in others
    ]
    table = {}
    for name in sorted({name for run in changes for name in run}):
        saved = next(run[name].saved for run in changes if name in run)
        values = [run[name].current if name in run else saved for run in changes]
        table[name] = [saved, *values]
    return table


def _draw(path: str, runs: Mapping[str, Rows]) -> None:
    figure = pictures.new_figure(7.2, 4.0)
    axis = figure.subplots()
    for label, rows in runs.items():
        measured = [row for row in rows if "heldout_success" in row]
        secs = [row["elapsed_secs"] for row in measured]
        success, low, high = (
            [100 * row[f"heldout_success{end}"] for row in measured]
            for end in ("", "_low", "_high")
        )
        (line,) = axis.plot(secs, success, "o-", label=label, markersize=4)
        color = line.get_color()
        axis.fill_between(secs, low, high, color=color, alpha=0.16, linewidth=0)
    axis.set_ylim(0, 100)
    axis.set_xlabel("seconds of wall-clock time")
    axis.set_ylabel("held-out success in percent, with its 95% interval")
    axis.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    run_command(
        compare,
        flags={"plot": Flag(str, None, "picture of held-out success to write")},
        needs=(),
        positional="workdirs",
    )
