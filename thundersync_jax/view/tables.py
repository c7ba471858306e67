"""Aligned columns of plain text, and how numbers look in them."""

import dataclasses
import math
from collections.abc import Sequence

MISSING = "-"
_GAP = "  "


@dataclasses.dataclass(frozen=True)
class Column:
    """One column: a heading of one or two lines, a least width, a side."""

    heading: str  # "gradient\nnorm"; one line stands at the bottom
    width: int = 0
    left: bool = False

    @property
    def extent(self) -> int:
        """How wide it is with its heading."""
        return max(self.width, *map(len, self.lines))

    @property
    def lines(self) -> tuple[str, str]:
        """The heading's upper and lower line."""
        above, _, below = self.heading.rpartition("\n")
        return above, below


def heading(columns: Sequence[Column]) -> list[str]:
    """Returns one or two lines."""
    above, below = zip(*(column.lines for column in columns), strict=True)
    return [line(part, columns) for part in (above, below) if any(part)]


def line(cells: Sequence[str], columns: Sequence[Column]) -> str:
    """Returns the cells side by side. One that is too wide pushes, it is never cut."""
    parts = [
        (cell.ljust if column.left else cell.rjust)(column.extent)
        for cell, column in zip(cells, columns, strict=True)
    ]
    return _GAP.join(parts).rstrip()


def extent(columns: Sequence[Column]) -> int:
    """Returns how many characters a line takes."""
    return sum(column.extent for column in columns) + len(_GAP) * (len(columns) - 1)


def fit(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[Column]:
    """Returns the columns, wide enough for all rows."""
    return [
        dataclasses.replace(
            column, width=max([column.width, *(len(r[i]) for r in rows)])
        )
        for i, column in enumerate(columns)
    ]


def number(value: float | None, decimals: int = 3) -> str:
    """Fixed decimals for ordinary sizes, powers of ten for the rest."""
    if _missing(value):
        return MISSING
    size = abs(value)
    if size and (size < 10**-decimals or size >= 10_000):
        return f"{value:.1e}"
    return f"{value:.{decimals if size < 100 else 1}f}"


def scientific(value: float | None) -> str:
    """Two digits and a power of ten; a true zero is just 0."""
    if _missing(value):
        return MISSING
    return f"{value:.1e}" if value else "0"


def seconds(value: float | None) -> str:
    """Hundredths below a hundred seconds, tenths above."""
    if _missing(value):
        return MISSING
    return f"{value:.{2 if abs(value) < 100 else 1}f}"


def percent(value: float | None, decimals: int = 0) -> str:
    """A share in percent."""
    return MISSING if _missing(value) else f"{100 * value:.{decimals}f}%"


def signed(value: float | None, decimals: int = 2) -> str:
    """As `number`, with a plus sign; zero has none."""
    if _missing(value) or value == 0:
        return number(value, decimals)
    text = number(value, decimals)
    return text if value < 0 else f"+{text}"


def short(value: float | None, digits: int = 3) -> str:
    """Up to so many digits without filling zeros: 1, 0.5, 0.333."""
    return MISSING if _missing(value) else f"{value:.{digits}g}"


def cut(text: str, width: int) -> str:
    """At most `width` characters on one line."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def _missing(value: float | None) -> bool:
    return value is None or math.isnan(value)
