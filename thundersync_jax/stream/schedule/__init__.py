"""Who has completed or failed (`roster`), and what is computed next.

`order` decides on whole samples, `turns` on the turns of open trajectories.
"""

# ruff: noqa: F401
from .order import Schedule
from .roster import (
    BATCH,
    RELEASES,
    Call,
    Close,
    Fold,
    Item,
    Prompt,
    Release,
    Roster,
    Rules,
    Verdict,
)
from .turns import TurnCall, TurnFold, Turns
