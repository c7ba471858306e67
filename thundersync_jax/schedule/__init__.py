"""Who has completed or failed (`roster`), and what is computed next (`order`)."""

from .order import BATCH, RELEASES, Call, Fold, Release, Rules, Schedule
from .roster import Close, Item, Verdict

__all__ = [
    "BATCH",
    "RELEASES",
    "Call",
    "Close",
    "Fold",
    "Item",
    "Release",
    "Rules",
    "Schedule",
    "Verdict",
]
