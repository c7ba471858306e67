"""What holds of every stream, on random batches told in random ways.

    python tests/properties.py --examples=100000

runs every property on fresh examples, that many in all, and counts what they were made
of. `test_properties.py` runs the same on 2,400 from fixed seeds.
"""

import argparse
import collections
import dataclasses
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import numpy as np
import oracle
import pytest
import stories
from examples import ESTIMATORS, SURROGATES, Batch, Way, batches, ways
from hypothesis import strategies as st

from thundersync_jax import GradientStream
from thundersync_jax.errors import StreamError
from thundersync_jax.stream.mesh import IN_FLIGHT, Replica

PARAMS = oracle.params()
ADVANTAGES = 1e-9  # float64, relative to the largest of the scope
LOUD = 1e12  # times a rounding error of 1e-16 it would be seen
NOT_AFFINE = tuple(name for name, made in ESTIMATORS.items() if not made.affine)
BY_GROUP = tuple(name for name, made in ESTIMATORS.items() if name not in oracle.SCOPES)
TOGETHER = 10  # examples
Counts = dict[str, collections.Counter]
SEEN: Counts = collections.defaultdict(collections.Counter)


class Outcome(NamedTuple):
    """What a stream gave."""

    gradient: dict[str, np.ndarray]
    report: Any
    advantages: dict[Any, dict[int, float]]
    lost: set[Any]


def streamed_is_the_batch(batch: Batch, way: Way) -> None:
    """A streamed gradient is that of the whole batch, and so are all its numbers."""
    groups = batch.members()
    if _ends(batch, groups, way, "plain"):
        return
    _compare(batch.reference(groups), play(batch, groups, way, "plain"), exact=False)


def exact_is_the_same_bits(batch: Batch, way: Way, other: Way) -> None:
    """Exact sums: the same bits in another order, under another rule; and the right."""
    groups = batch.members()
    if _ends(batch, groups, way, "exact"):
        return
    reference = batch.reference(groups)
    found, again = (play(batch, groups, w, "exact") for w in (way, other))
    for outcome in (found, again):
        _compare(reference, outcome, exact=True)
    assert _bits(found) == _bits(again)
    numbers = ["gradient_norm", "loss", *["metrics"] * bool(reference.samples)]
    for number in numbers:  # without a sample nobody knows which metrics there are
        assert getattr(found.report, number) == getattr(again.report, number)
    assert found.advantages == again.advantages


def uniform_groups_leave_nothing(batch: Batch, way: Way, accumulator: str) -> None:
    """Whatever the samples of a group with equal rewards, not a bit depends on them."""
    groups = batch.members()
    if _ends(batch, groups, way, accumulator):
        return
    reference = batch.reference(groups)
    loud = {
        name: [_louder(m) for m in members] if name in reference.uniform else members
        for name, members in groups.items()
    }
    quiet, shouted = (play(batch, g, way, accumulator) for g in (groups, loud))
    _compare(reference, quiet, exact=accumulator == "exact")
    assert _bits(quiet) == _bits(shouted)
    SEEN["uniform groups"].update([len(reference.uniform)])
    if batch.parts == "weighted" and len(reference.uniform) == len(reference.kept):
        assert not any(np.any(g) for g in quiet.gradient.values())
        SEEN["all groups"].update(["uniform"])


def third_reward_waits(batch: Batch, way: Way) -> None:
    """Two distinct rewards stream under any estimator; a third one waits, counted.

    Any number streams where sums are plain and the estimator is affine, or where
    members do not need each other.
    """
    groups = batch.members()
    if _ends(batch, groups, way, "plain"):
        return
    reference = batch.reference(groups)
    estimator = ESTIMATORS[batch.estimator]
    for accumulator in ("plain", "exact"):
        outcome = play(batch, groups, way, accumulator)
        _compare(reference, outcome, exact=accumulator == "exact")
        report = outcome.report
        free = estimator.scope == "member"
        free = free or (estimator.affine and accumulator == "plain")
        streamed, waits = oracle.streaming(
            groups,
            _events(batch, groups, way),
            reference,
            batch.baseline_of(),
            batch=estimator.scope == "batch",
            most=math.inf if free else 2,
            lossy="drop" in (batch.partial, batch.uniform),
        )
        assert (report.streamed, report.waited_for_bucket) == (streamed, waits)
        SEEN["third rewards"].update({f"{accumulator} {batch.estimator}": waits})


class Trial(NamedTuple):
    """How a property is tried."""

    share: float  # of all examples
    strategies: Callable[[str | None], dict[str, st.SearchStrategy]]  # by estimator
    estimators: tuple[str | None, ...] = tuple(ESTIMATORS)


PROPERTIES: dict[Callable, Trial] = {
    streamed_is_the_batch: Trial(
        0.5,
        lambda estimator: {"batch": batches(estimator), "way": ways()},
        (*ESTIMATORS, None),
    ),
    exact_is_the_same_bits: Trial(
        0.3,
        lambda estimator: {
            "batch": batches(estimator),
            "way": ways(),
            "other": ways(),
        },
        (*ESTIMATORS, None),
    ),
    uniform_groups_leave_nothing: Trial(
        0.1,
        lambda estimator: {
            "batch": batches(
                estimator,
                parts=("weighted", "both"),
                kinds=("equal", "equal", "offset 1e6", "offset 1e9", "nearly equal"),
            ),
            "way": ways(),
            "accumulator": st.sampled_from(("plain", "exact")),
        },
        BY_GROUP,
    ),
    third_reward_waits: Trial(
        0.1,
        lambda estimator: {
            "batch": batches(
                estimator,
                parts=("weighted", "both"),
                kinds=("three", "continuous", "mixed", "offset 1e9", "binary"),
            ),
            "way": ways(releases=("trajectory",), open_groups=(8,), busy=(False,)),
        },
        # Those that make rewards wait in plain sums too: half of all examples.
        (*ESTIMATORS, *NOT_AFFINE * (len(ESTIMATORS) // len(NOT_AFFINE))),
    ),
}


def play(batch: Batch, groups: dict, way: Way, accumulator: str) -> Outcome:
    """Tells a stream of a batch, on a learner that is idle or mostly busy."""
    rng = random.Random(way.seed)
    busy = IN_FLIGHT if way.busy else 0
    load = property(lambda _: busy if rng.random() < 0.8 else 0)
    with mock.patch.object(Replica, "load", load):
        stream = GradientStream(
            SURROGATES[batch.parts],
            PARAMS,
            estimator=ESTIMATORS.get(batch.estimator),
            denominator=batch.denominator,
            release=way.release,
            open_groups=way.open_groups,
            partial_groups=batch.partial,
            uniform_groups=batch.uniform,
            accumulator=accumulator,
            rows_per_call=way.rows_per_call,
        )
        events = _events(batch, groups, way)
        stories.tell(stream, groups, events, batch.baseline_of())
        busy = 0
        gradient, report = stream.finish()
    _note(batch, way, accumulator, report)
    by_group: dict[Any, dict[int, float]] = {}
    for (group, index), advantage in stream.advantages.items():
        by_group.setdefault(group, {})[index] = advantage
    arrays = {name: np.asarray(x) for name, x in gradient.items()}
    return Outcome(arrays, report, by_group, set(stream.lost_groups))


def run(property_: Callable, examples: int, seed: int = 0) -> Counts:
    """Tries a property on so many examples.

    The same ones for the same seed and the same modules loaded: hypothesis now and then
    draws a number that it found in one of them.

    Returns:
      What they were made of, and what became of them.
    """
    trial = PROPERTIES[property_]
    SEEN.clear()
    settings = hypothesis.settings(
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    # A few of one estimator: left to itself, hypothesis repeats what it drew.
    parts = math.ceil(examples / TOGETHER)
    for number in range(seed * parts, (seed + 1) * parts):
        estimator = trial.estimators[number % len(trial.estimators)]
        few = min(TOGETHER, examples)
        test = hypothesis.given(**trial.strategies(estimator))(property_)
        test = hypothesis.seed(number)(test)
        hypothesis.settings(settings, max_examples=few)(test)()
        examples -= few
    return dict(SEEN)


def _events(batch, groups, way) -> list[tuple]:
    judged = batch.estimator is not None
    return stories.story(groups, random.Random(way.seed), judged, way.order)


def _ends(batch, groups, way, accumulator) -> bool:
    """Whether a failed member ends the step, as one should under `fail`."""
    failed = any(m.failed for members in groups.values() for m in members)
    if batch.partial != "fail" or not failed:
        return False
    with pytest.raises(StreamError, match="partial_groups"):
        play(batch, groups, way, accumulator)
    SEEN["outcome"].update(["failed step"])
    return True


def _compare(reference: oracle.Reference, outcome: Outcome, exact: bool) -> None:
    gradient, report, advantages, lost = outcome
    allowed = oracle.tolerances(reference, exact)
    for name, expected in reference.gradient.items():
        gap = np.abs(gradient[name].astype(np.float64) - expected)
        assert np.all(gap <= allowed[name]), (name, gap, allowed[name])
    assert abs(report.loss - reference.loss) <= allowed["loss"]
    assert lost == reference.dropped | reference.filtered
    assert advantages.keys() == reference.kept.keys()
    for group, members in reference.kept.items():
        assert advantages[group].keys() == members.keys()
    found, expected = (
        np.array([a for g in reference.kept for a in kept[g].values()])
        for kept in (advantages, reference.kept)
    )
    largest = np.array(
        [reference.largest[g, m] for g, k in reference.kept.items() for m in k]
    )
    assert np.all(np.abs(found - expected) <= ADVANTAGES * largest)
    counts = {
        "kept_groups": len(reference.kept),
        "dropped_groups": len(reference.dropped),
        "filtered_groups": len(reference.filtered),
        "uniform_groups": len(reference.uniform),
        "kept_members": len(found),
        "tokens": reference.tokens,
        "denominator": reference.denominator,
    }
    assert counts == {name: getattr(report, name) for name in counts}


def _bits(outcome: Outcome) -> dict[str, bytes]:
    return {name: x.tobytes() for name, x in outcome.gradient.items()}


def _louder(member: stories.Member) -> stories.Member:
    factors = np.array([LOUD] * 5 + [1] * 3, np.float32)  # not the additive part
    return dataclasses.replace(member, samples=[x * factors for x in member.samples])


def _note(batch: Batch, way: Way, accumulator: str, report: Any) -> None:
    for name in ("estimator", "denominator", "partial", "uniform", "parts"):
        SEEN[name].update([getattr(batch, name)])
    for name in ("shaped", "baselines", "several"):
        SEEN["members"].update([name] if getattr(batch, name) else [])
    for name in ("release", "open_groups", "rows_per_call", "order"):
        SEEN[name].update([getattr(way, name)])
    SEEN["accumulator"].update([accumulator])
    SEEN["learner"].update(["busy" if way.busy else "idle"])
    for group in batch.groups:
        SEEN["rewards"].update([group.rewards])
        SEEN["group size"].update([len(group.levels)])
        SEEN["members"].update({"failed": group.failed.bit_count()})
    SEEN["groups"].update([len(batch.groups)])
    SEEN["groups at once"].update([report.open_groups_max])
    for how in ("direct", "streamed", "skipped", "discarded", "waited_for_bucket"):
        SEEN["samples"].update({how: getattr(report, how)})
    for what in ("kept_groups", "short_groups", "dropped_groups", "filtered_groups"):
        SEEN["outcome"].update({what: getattr(report, what)})


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first thousand")
    args = parser.parse_args(arguments)
    total: Counts = collections.defaultdict(collections.Counter)
    began = time.perf_counter()
    for first in range(0, args.examples, 1000):  # hypothesis remembers what it tried
        passed = min(first + 1000, args.examples)
        for property_, trial in PROPERTIES.items():
            examples = round(trial.share * passed) - round(trial.share * first)
            seed = args.seed + first // 1000
            for name, counts in run(property_, examples, seed).items():
                total[name] += counts
        secs = time.perf_counter() - began
        print(f"{passed:,} of {args.examples:,} examples, {secs:.0f} s", flush=True)
    for name, counts in total.items():
        listed = sorted(counts.items(), key=lambda item: f"{item[0]!s:>30}")  # 2 < 10
        print(f"{name}: " + ", ".join(f"{what} {count:,}" for what, count in listed))


if __name__ == "__main__":
    main()
