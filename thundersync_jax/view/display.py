"""What a person sees while a run goes on: one row per step, and little else.

On a terminal a progress line is alive while a step runs and trained tokens have a
colour; anywhere else the same rows come as plain text. Runs of trained and observed
tokens are named too, so that the difference does not depend on colour. Numbers are
computed elsewhere; this only lays them out, in at most 100 columns.
"""

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from thundersync_jax.chat import base
from thundersync_jax.chat.base import Piece
from thundersync_jax.chat.byte_level import ByteLevel
from thundersync_jax.metrics.timing import Progress
from thundersync_jax.types import Trajectory
from thundersync_jax.view import tables
from thundersync_jax.view.tables import Column

if TYPE_CHECKING:  # it imports jax, and looking at a run must not wait for that
    from thundersync_jax.run.step import Evaluation

WIDTH = 100
_ROWS_PER_HEADING = 20
_BAR_CELLS = 18
_PATIENCE_SECS = 4.0  # of silence, while a run starts
_REFRESHES_PER_SEC = 8
_QUIET, _STRONG = "dim", "bold"
_TRAINED = {True: "bold green", False: "dim"}  # readable on dark and on light grounds
_INDENT = 2
_LABEL = len("observed") + 2

_STEP_COLUMNS = (
    Column("step", 7),
    Column("reward", 7),
    Column("success", 6),
    Column("gradient\nnorm", 8),
    Column("groups\nkept", 7),
    Column("uniform", 7),
    Column("teacher\nKL", 7),
    Column("streamed", 8),
    Column("rollout\nsecs", 7),
    Column("step\nsecs", 6),
    Column("learner\nbusy", 7),
    Column("staleness", 9),
)
_OF_TEACHER, _OF_REWARDS = "teacher\nKL", "uniform"  # one of them is shown
_DISPENSABLE = ("staleness", "uniform", "rollout\nsecs")  # on a narrow terminal


@dataclasses.dataclass(frozen=True)
class StepRow:
    """One step in numbers; None or NaN where there is nothing to say."""

    step: int
    steps: int
    reward: float | None  # mean over the rewards that came
    success: float | None  # share
    gradient_norm: float | None  # before clipping
    kept_groups: int
    groups: int
    uniform_groups: int
    streamed_share: float | None  # of gradient-carrying samples
    rollout_secs: float
    step_secs: float
    learner_busy: float | None  # share of the step
    staleness: int  # policy versions
    teacher_kl: float | None = None  # per token; shown in place of uniform groups


class Display:
    """Writes to one stream, by default the standard output."""

    def __init__(self, stream: IO[str] | None = None):
        stream = sys.stdout if stream is None else stream
        if hasattr(stream, "reconfigure"):
            # A sampled letter that the terminal cannot write must not end the run.
            stream.reconfigure(errors="replace")
        self._console = Console(file=stream, highlight=False, emoji=False)
        # Colour may be forced where nobody can see a line being redrawn.
        self._lively = self._console.is_interactive and stream.isatty()
        self._progress: Progress | None = None
        self._rows = 0  # since the last heading
        self._latest = (time.monotonic(), "starting")  # when what was written
        self._fresh = True  # nothing written yet

    @property
    def width(self) -> int:
        """Characters of a line; off a terminal a fixed number."""
        return self._console.width if self._lively else WIDTH

    @contextlib.contextmanager
    def live(
        self, title: str, clock: Callable[[], float] = time.monotonic
    ) -> Iterator[None]:
        """Keeps a progress line on a terminal until the block ends."""
        self._progress = None
        if not self._lively:
            yield
            return
        with Live(
            console=self._console,
            refresh_per_second=_REFRESHES_PER_SEC,
            transient=True,
            get_renderable=lambda: progress_line(
                title, self._progress, clock(), bar=self.width >= WIDTH
            ),
        ):
            yield

    @contextlib.contextmanager
    def patience(self) -> Iterator[Callable[[], None]]:
        """Repeats the latest line in every long silence, until the block ends.

        It ends before where what the block is given is called.
        """
        ended = threading.Event()

        def watch() -> None:
            repeated_secs = 0.0
            while not ended.wait(_PATIENCE_SECS / 4):
                (written_secs, text), now = self._latest, time.monotonic()
                if now - max(written_secs, repeated_secs) >= _PATIENCE_SECS:
                    repeated_secs = now
                    still = f"  {now - written_secs:.0f} s since: {text}"
                    self._console.print(Text(still, _QUIET), soft_wrap=True)

        watching = threading.Thread(target=watch, daemon=True, name="patience")
        watching.start()
        try:
            yield ended.set
        finally:
            ended.set()
            watching.join()

    def update(self, progress: Progress) -> None:
        """Shows this step's counts; they are read again at every refresh."""
        self._progress = progress

    def line(self, text: str) -> None:
        """A message between the rows."""
        self._print(Text(_printable(text), _QUIET))

    def row(self, row: StepRow) -> None:
        """One finished step, below a heading every so many rows."""
        idle = _OF_TEACHER if row.teacher_kl is None else _OF_REWARDS
        used = [column for column in _STEP_COLUMNS if column.heading != idle]
        columns = self._fitting(used)
        cells = dict(zip(_STEP_COLUMNS, _step_cells(row), strict=True))
        if self._rows % _ROWS_PER_HEADING == 0:
            self._heading(columns)
        self._rows += 1
        self._print(Text(tables.line([cells[column] for column in columns], columns)))

    def evaluation(self, label: str, evaluation: "Evaluation") -> None:
        """A success rate with its 95 % interval, and the mean reward with its parts."""
        low, high = (tables.percent(share, 1) for share in evaluation.interval)
        successes = int(evaluation.successes.sum())
        text = Text(f"{label} ").append(tables.percent(evaluation.success, 1), _STRONG)
        text.append(
            f"  {successes} of {evaluation.answers}, 95% interval {low} to {high}"
        )
        text.append(f"; mean reward {tables.number(evaluation.reward)}")
        text.append(_parts(evaluation.parts))
        self._print(text)

    def sample(
        self,
        trajectory: Trajectory,
        advantage: float | None = None,
        lines: int | None = 12,
        pieces: Sequence[Piece] | None = None,
    ) -> None:
        """A trajectory, trained and observed tokens apart, each run cut to `lines`.

        `pieces` is the trajectory's text, None where its tokens are byte-level.
        """
        if pieces is None:
            pieces = base.pieces(ByteLevel(), trajectory)
        self._rows = 0
        self._gap()
        self._print(_title(trajectory, advantage))
        count = len(trajectory.starts)
        for first, trained, text in _runs(trajectory, pieces):
            if count > 1 and first in trajectory.starts:
                number = trajectory.starts.index(first) + 1
                self._print(Text(f"  sample {number} of {count}", _STRONG))
            style = _TRAINED[trained]
            width = self.width - _INDENT - _LABEL
            wrapped = text.wrap(self._console, width, overflow="fold")
            label = "trained" if trained else "observed"
            for part in _middle_out(list(wrapped), lines):
                part.rstrip()
                start = Text(" " * _INDENT + label.ljust(_LABEL), style)
                self._print(start.append_text(part))
                label = ""

    def log(self, text: str) -> None:
        """What a verdict says to people, below its trajectory."""
        label = "log"
        for line in text.splitlines():
            start = Text(" " * _INDENT + label.ljust(_LABEL), _QUIET)
            self._print(start.append(_printable(line)))
            label = ""

    def table(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str]], title: str = ""
    ) -> None:
        """Any table, its columns as wide as they must be."""
        self._rows = 0
        if title:
            self._gap()
            self._print(Text(title, _STRONG))
            self._fresh = True  # no gap between a title and its heading
        columns = tables.fit(columns, rows)
        self._heading(columns)
        for row in rows:
            self._print(Text(tables.line(row, columns)))

    def _fitting(self, columns: Sequence[Column]) -> list[Column]:
        columns = list(columns)
        for heading in _DISPENSABLE:
            if tables.extent(columns) > self.width:
                columns = [column for column in columns if column.heading != heading]
        return columns

    def _heading(self, columns: Sequence[Column]) -> None:
        self._gap()
        for text in tables.heading(columns):
            self._print(Text(text, _QUIET))

    def _gap(self) -> None:
        if not self._fresh:
            self._print(Text())

    def _print(self, text: Text) -> None:
        self._fresh = False
        if text:
            self._latest = time.monotonic(), text.plain
        # Off a terminal rich would fold at 80 columns.
        self._console.print(text, soft_wrap=True)


def progress_line(
    title: str, progress: Progress | None, now_secs: float, bar: bool = True
) -> Text:
    """The line that is alive while a step runs."""
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(title, _STRONG)
    if progress is None:
        return line
    if bar:
        line.append("  ").append_text(_bar(progress))
    line.append("  done ").append(f"{progress.completed}/{progress.total}", "cyan")
    for label in ("verified", "streamed", "failed"):
        count = getattr(progress, label)
        if count or label != "failed":
            line.append(f" {label} ").append(str(count), "cyan")
    elapsed = max(now_secs - progress.started_secs, 1e-9)
    busy = min(progress.learner_secs / elapsed, 1.0)
    if progress.paused():
        line.append("  paused, no environment starts", "yellow")
    line.append(f"  {progress.tokens / elapsed:,.0f} tokens/s")
    return line.append(f"  learner {busy:.0%}")


def _bar(progress: Progress) -> Text:
    """Streamed, verified and done, each behind the other, of all trajectories."""
    bar, drawn = Text(), 0
    for count, style in (
        (progress.streamed, "green"),
        (progress.verified, "cyan"),
        (progress.completed, "blue"),
        (progress.total, "bright_black"),
    ):
        cells = round(_BAR_CELLS * min(count / max(progress.total, 1), 1.0))
        bar.append("━" * max(0, cells - drawn), style)
        drawn = max(drawn, cells)
    return bar


def _step_cells(row: StepRow) -> list[str]:
    return [
        f"{row.step}/{row.steps}",
        tables.number(row.reward),
        tables.percent(row.success, 1),
        tables.number(row.gradient_norm),
        f"{row.kept_groups}/{row.groups}",
        str(row.uniform_groups),
        tables.number(row.teacher_kl),
        tables.percent(row.streamed_share),
        tables.seconds(row.rollout_secs),
        tables.seconds(row.step_secs),
        tables.percent(row.learner_busy),
        str(row.staleness),
    ]


def _parts(parts: Mapping[str, float]) -> str:
    """The parts of a reward, in brackets behind it; nothing where it has none."""
    shown = [f"{name} {tables.number(value)}" for name, value in parts.items()]
    return f" ({', '.join(shown)})" if shown else ""


def _title(trajectory: Trajectory, advantage: float | None) -> Text:
    """A trajectory's key, then what became of it."""
    facts = [f"reward {tables.number(trajectory.reward)}{_parts(trajectory.parts)}"]
    if advantage is not None:
        facts.append(f"advantage {tables.signed(advantage)}")
        if trajectory.turn_credits is not None:
            turns = " ".join(map(tables.signed, _of_turns(trajectory, advantage)))
            facts.append(f"of its turns {turns}")
    turns = f"{trajectory.turns} turn" + ("" if trajectory.turns == 1 else "s")
    tokens = f"{len(trajectory.ids)} tokens, {trajectory.action_tokens} trained"
    facts += [trajectory.stop_reason.value.replace("_", " "), turns, tokens]
    if (samples := len(trajectory.starts)) > 1:
        facts.append(f"{samples} samples")
    text = Text().append(str(trajectory.key), "bold")
    text.append("\n  " + "  ".join(facts))
    if trajectory.reason:
        text.append(f"\n  {_printable(trajectory.reason)}", "yellow")
    return text


def _runs(
    trajectory: Trajectory, pieces: Sequence[Piece]
) -> list[tuple[int, bool, Text]]:
    """Runs of equal loss mask in a sample: where they start, trained, text.

    Special tokens are set apart.
    """
    mask = np.asarray(trajectory.loss_mask, bool)
    runs: list[tuple[int, bool, Text]] = []
    start = 0
    for piece in pieces:
        trained = bool(mask[start])
        if not runs or runs[-1][1] != trained or start in trajectory.starts:
            runs.append((start, trained, Text()))
        start += piece.tokens
        style = _TRAINED[trained]
        text = _printable(piece.text)
        runs[-1][2].append(text, f"{style} italic" if piece.special else style)
    return runs


def _printable(text: str) -> str:
    """Spells out what would move the cursor or hide text; line ends stay."""
    return "".join(
        letter
        if letter.isprintable() or letter == "\n"
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _of_turns(trajectory: Trajectory, advantage: float) -> list[float]:
    """A u + v of each action, at its first token."""
    mask = np.asarray(trajectory.loss_mask, int)
    first = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    weights, credits = trajectory.turn_weights, trajectory.turn_credits
    return [float(v) for v in advantage * weights[first] + credits[first]]


def _middle_out(lines: list[Text], most: int | None) -> list[Text]:
    if most is None or len(lines) <= most:
        return lines
    first = most // 2
    last = len(lines) - (most - first - 1)
    gap = Text(f"... {last - first} lines left out ...", "dim")
    return [*lines[:first], gap, *lines[last:]]
