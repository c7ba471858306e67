"""A trajectory as text to look at, the trained tokens apart from the observed ones.

Every run of one kind starts a line of its own with its name beside it, so that the
difference does not depend on colour.
"""

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from thundersync_jax.chat.base import Piece
from thundersync_jax.types import Trajectory
from thundersync_jax.view import tables

_INDENT = 2
_LABEL = len("observed") + 2
# Readable on dark and on light backgrounds, and by weight alone.
_STYLES = {True: "bold green", False: "dim"}


def title(trajectory: Trajectory, advantage: float | None) -> Text:
    """Returns its key, then what became of it."""
    facts = [f"reward {tables.number(trajectory.reward)}"]
    if advantage is not None:
        facts.append(f"advantage {tables.signed(advantage)}")
        if trajectory.turn_credits is not None:
            turns = " ".join(map(tables.signed, _of_turns(trajectory, advantage)))
            facts.append(f"of its turns {turns}")
    turns = f"{trajectory.turns} turn" + ("" if trajectory.turns == 1 else "s")
    tokens = f"{len(trajectory.ids)} tokens, {trajectory.action_tokens} trained"
    facts += [trajectory.stop_reason.value.replace("_", " "), turns, tokens]
    text = Text().append(str(trajectory.key), "bold")
    text.append("\n  " + "  ".join(facts))
    if trajectory.reason:
        text.append(f"\n  {printable(trajectory.reason)}", "yellow")
    return text


def body(
    trajectory: Trajectory,
    pieces: Sequence[Piece],
    console: Console,
    width: int,
    most: int | None,
) -> list[Text]:
    """Returns its lines, broken as rich does to `width` characters.

    `pieces` is its text as `chat.pieces` cuts it. At most `most` lines of each run are
    left, without the middle; None leaves all.
    """
    lines = []
    for trained, text in segments(trajectory, pieces):
        style = _STYLES[trained]
        wrapped = text.wrap(console, width - _INDENT - _LABEL, overflow="fold")
        label = "trained" if trained else "observed"
        for part in _middle_out(list(wrapped), most):
            part.rstrip()
            start = Text(" " * _INDENT + label.ljust(_LABEL), style)
            lines.append(start.append_text(part))
            label = ""
    return lines


def segments(
    trajectory: Trajectory, pieces: Sequence[Piece]
) -> list[tuple[bool, Text]]:
    """Returns runs of equal loss mask, (trained, text), special tokens set apart."""
    mask = np.asarray(trajectory.loss_mask, bool)
    runs: list[tuple[bool, Text]] = []
    start = 0
    for piece in pieces:
        trained = bool(mask[start])
        start += piece.tokens
        if not runs or runs[-1][0] != trained:
            runs.append((trained, Text()))
        style = _STYLES[trained]
        text = printable(piece.text)
        runs[-1][1].append(text, f"{style} italic" if piece.special else style)
    return runs


def printable(text: str) -> str:
    """Spells out what would move the cursor or hide text; line ends stay."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else _spell(letter)
        for letter in text
    )


def _spell(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


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
