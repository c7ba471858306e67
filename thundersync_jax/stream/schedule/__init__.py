"""Who has completed or failed, and which samples or turns are computed next."""

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
