"""Random batches, and random ways to tell a stream of them, for hypothesis to draw.

An example is plain data, so that a failing one shrinks and prints: rewards are drawn
member by member, samples and the interleaving of events come from a seed.
"""

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import oracle
import stories
from hypothesis import strategies as st

from thundersync_jax import advantages

ESTIMATORS = {
    "mean_std_0": advantages.mean_std(ddof=0, eps=1e-6),
    "mean_std_1": advantages.mean_std(ddof=1, eps=1e-6),
    "mean_std_no_eps": advantages.mean_std(ddof=0, eps=0.0),
    "mean_only": advantages.mean_only(),
    "leave_one_out": advantages.leave_one_out(),
    "leave_one_out_std": advantages.leave_one_out_std(ddof=1, eps=1e-6),
    "batch_mean_std_0": advantages.batch_mean_std(ddof=0, eps=1e-6),
    "pass_at_2": advantages.pass_at_k(2),
    "pass_at_4": advantages.pass_at_k(4),
    "fixed_baseline": advantages.fixed_baseline(oracle.FIXED_BASELINE),
    "tracked": advantages.fixed_baseline(0.0),
}
SURROGATES = {
    "weighted": oracle.weighted_only,
    "both": oracle.both_parts,
    "additive": oracle.additive_only,
}
_NORMAL = [random.Random(1).gauss(0, 1) for _ in range(16)]
_MIXED = [0.0, 1.0, 1e-9, -1e3, 1e6, 0.7, 1e9, -0.0]
REWARDS: dict[str, Callable[[int], float]] = {
    "binary": lambda level: float(level % 2),
    "three": lambda level: level % 3 / 2,
    "continuous": lambda level: _NORMAL[level % 16],
    "offset 1e6": lambda level: 1e6 + level % 2,
    "offset 1e9": lambda level: 1e9 + _NORMAL[level % 16],
    "nearly equal": lambda level: 0.7 + 1e-9 * (level % 4),
    "equal": lambda level: 0.7,
    "mixed": lambda level: _MIXED[level % 8],
}
SIZES = (2, 3, 1, 4, 2, 3, *range(1, 17), 13, 14, 15, 16)  # large ones seldom find room
COUNTS = (1, 2, 3, 4, 1, 2, 3, 5, 6, 7, 8)
MEMBERS = 16  # of one batch: what is beyond them makes examples slow, not different


@dataclasses.dataclass(frozen=True)
class Group:
    """Rewards of one group: a kind, and a level for each member."""

    rewards: str
    levels: bytes
    failed: int = 0  # a bit for each member


@dataclasses.dataclass(frozen=True)
class Batch:
    """A step and its settings."""

    groups: tuple[Group, ...]
    estimator: str | None
    denominator: str | float
    partial: str
    uniform: str
    parts: str
    shaped: bool  # whether rewards differ from verdicts
    baselines: bool  # whether groups have baselines
    several: bool  # whether members may have no sample, or several
    seed: int

    def members(self) -> dict[int, list[stories.Member]]:
        """The groups with their samples."""
        rng = np.random.default_rng(self.seed)
        groups = {}
        for name, group in enumerate(self.groups):
            count = len(group.levels)
            counts = rng.choice([0, 1, 1, 2], count) if self.several else [1] * count
            penalties = rng.choice([0.0, 0.125, 1.0], count)
            groups[name] = [
                _member(
                    rng,
                    REWARDS[group.rewards](level),
                    penalty if self.shaped else None,
                    int(samples),
                    bool(group.failed >> index & 1),
                )
                for index, (level, samples, penalty) in enumerate(
                    zip(group.levels, counts, penalties, strict=True)
                )
            ]
        return groups

    def baseline_of(self) -> dict[int, float]:
        """Baselines by group."""
        rng = random.Random(self.seed)
        values = [rng.choice([0.0, 0.25, -3.0, 1e6]) for _ in self.groups]
        return dict(enumerate(values)) if self.baselines else {}

    def reference(self, groups: dict[int, list[stories.Member]]) -> oracle.Reference:
        """What the step must come to."""
        return oracle.whole_batch(
            groups,
            self.estimator,
            self.denominator,
            self.partial,
            self.parts,
            self.uniform,
            self.baseline_of(),
        )


@dataclasses.dataclass(frozen=True)
class Way:
    """How a step comes about: nothing of it may change the result."""

    release: str
    open_groups: int
    rows_per_call: int
    order: str
    busy: bool  # whether the learner is, most of the time
    seed: int


def _member(rng, verdict, penalty, samples, failed):
    drawn = list(rng.standard_normal((samples, 8), np.float32))
    tokens = [int(n) for n in rng.integers(0, 9, samples)]
    if penalty is None:
        return stories.Member(drawn, tokens, verdict, failed)
    return stories.Member(drawn, tokens, verdict - penalty, failed, raw=verdict)


@st.composite
def groups_of(draw, kinds: tuple[str, ...] = tuple(REWARDS)) -> tuple[Group, ...]:
    """Up to 8 groups of 1 to 16 members, `MEMBERS` in all."""
    count, left, groups = draw(st.sampled_from(COUNTS)), MEMBERS, []
    alike = min(draw(st.sampled_from(SIZES)), left // count)
    mixed = draw(st.booleans())
    for after in reversed(range(count)):
        share = 2 * left // (after + 1)  # at most twice what the others can have
        size = alike
        if mixed:
            size = min(draw(st.sampled_from(SIZES)), share, left - after)
        left -= size
        failing = draw(st.sampled_from((False, False, True)))
        groups.append(
            Group(
                draw(st.sampled_from(kinds)),
                draw(st.binary(min_size=size, max_size=size)),
                draw(st.integers(0, 2**size - 1)) if failing else 0,
            )
        )
    return tuple(groups)


@st.composite
def batches(
    draw,
    estimator: str | None,
    parts: tuple[str, ...] = tuple(SURROGATES),
    kinds: tuple[str, ...] = tuple(REWARDS),
) -> Batch:
    """Any step of an estimator; without one there is nothing weighted."""
    judged = estimator is not None
    tracked = estimator == "tracked"
    return Batch(
        groups=draw(groups_of(kinds)),
        estimator=estimator,
        denominator=draw(
            st.sampled_from(("none", "groups", "trajectories", "tokens", 2.5))
        ),
        partial=draw(st.sampled_from(("drop", "drop", "keep", "keep", "fail"))),
        uniform=draw(st.sampled_from(("keep", "drop"))) if judged else "keep",
        parts=draw(st.sampled_from(parts)) if judged else "additive",
        shaped=judged and draw(st.booleans()),
        baselines=tracked or (judged and draw(st.sampled_from((False, False, True)))),
        several=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


def ways(
    releases: tuple[str, ...] = ("trajectory", "trajectory", "group", "batch"),
    open_groups: tuple[int, ...] = tuple(range(1, 9)),
    busy: tuple[bool, ...] = (False, True),
) -> st.SearchStrategy[Way]:
    """Any way."""
    return st.builds(
        Way,
        release=st.sampled_from(releases),
        open_groups=st.sampled_from(open_groups),
        rows_per_call=st.integers(1, 4),
        order=st.sampled_from((*stories.ORDERS, "shuffled")),
        busy=st.sampled_from(busy),
        seed=st.integers(0, 2**16),
    )
