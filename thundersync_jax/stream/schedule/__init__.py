"""Who has completed or failed (`roster`), and what is computed next.

`order` decides on whole samples, `turns` on the turns of open trajectories.
"""

from .order import Schedule
from .roster import Close, Item, Verdict
from .rules import BATCH, RELEASES, Call, Fold, Prompt, Release, Rules
from .turns import TurnCall, TurnFold, Turns

__all__ = [
    "BATCH",
    "RELEASES",
    "Call",
    "Close",
    "Fold",
    "Item",
    "Prompt",
    "Release",
    "Rules",
    "Schedule",
    "TurnCall",
    "TurnFold",
    "Turns",
    "Verdict",
]
