"""Random steps turn by turn, against the gradient of whole trajectories by jax.grad."""

import dataclasses
import random

import jax
import numpy as np
import pytest
import toy_segments as toy
from jax.sharding import NamedSharding, PartitionSpec
from toy_stream import additive

from thundersync_jax.errors import StreamError
from thundersync_jax.stream import mesh, segments
from thundersync_jax.stream.mesh import IN_FLIGHT, Replica
from thundersync_jax.stream.turn_stream import TurnStream

pytestmark = pytest.mark.usefixtures("quick_programs")
EXACT = 1e-10  # rounding of float64 sums of some dozen terms


@pytest.fixture(scope="module", autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def params(wide):
    return toy.params()


@dataclasses.dataclass
class Member:
    """One trajectory, and what becomes of it."""

    name: tuple
    ends: list  # of its turns, the prompt in front
    trained: list
    arrays: dict
    weight: float
    fails_after: int | None  # turns

    @property
    def wanted(self):
        return max((i + 1 for i, t in enumerate(self.trained) if t), default=0)

    @property
    def tokens(self):
        spans = zip(self.ends, self.ends[1:], self.trained, strict=False)
        return sum(end - start for start, end, trained in spans if trained)


def member(rng, group, index, prompt, fails):
    count = rng.randint(0, 4)
    lengths = [rng.randint(1, toy.PIECE) for _ in range(count)]
    trained = [rng.random() < 0.7 for _ in lengths]
    ends = [prompt] + [prompt + sum(lengths[: i + 1]) for i in range(count)]
    mask = np.repeat([False, *trained], [prompt, *lengths])
    arrays = toy.trajectory((group, index), ends[-1], mask, prompt)
    weight, fails_after = rng.uniform(0.1, 2.0), None
    if rng.random() < fails:
        fails_after = rng.randint(0, count)
    return Member((group, index), ends, trained, arrays, weight, fails_after)


def lane(one):
    """What a stream is told of a member, in order."""
    for start, end, trained in zip(one.ends, one.ends[1:], one.trained, strict=False):
        if one.fails_after == one.ends.index(start):
            break
        piece, tokens = toy.cut(one.arrays, start, end), (end - start) * trained
        yield lambda s, p=piece, n=tokens: s.turn(*one.name, p, tokens=n)
    if one.fails_after is None:
        yield lambda s: s.complete(*one.name, one.weight)
    else:
        yield lambda s: s.fail(*one.name, "lost")


def tell(rng, stream, groups, prompts):
    for group, members in groups.items():
        shared = prompts[group] and toy.cut(members[0].arrays, 0, prompts[group])
        stream.open_group(group, len(members), prompt=shared or None)
    lanes = [list(lane(one)) for members in groups.values() for one in members]
    while lanes := [events for events in lanes if events]:
        rng.choice(lanes).pop(0)(stream)
        if rng.random() < 0.3:
            stream.advance()


def counted(groups, partial):
    """Members that count."""
    found = []
    for members in groups.values():
        kept = [one for one in members if one.fails_after is None]
        whole = len(kept) == len(members)
        found += kept if whole or (partial == "keep" and kept) else []
    return found


def story(rng, fails=0.2, shared=True):
    groups, prompts = {}, {}
    for group in range(rng.randint(1, 4)):
        prompts[group] = rng.choice([0, 1, 2]) if shared else 0
        of = range(rng.randint(1, 3))
        members = [member(rng, group, i, prompts[group], fails) for i in of]
        # A group's prompt is a sample with as many tokens in each.
        groups[group] = members
    return groups, prompts


def check(found, report, groups, partial, params, denominator):
    kept = counted(groups, partial)
    expected, gradient = toy.oracle(
        params,
        [one.arrays for one in kept if one.tokens],
        [[one.weight for one in kept if one.tokens]],
        report.denominator,
    )
    counts = {"trajectories": len(kept), "tokens": sum(one.tokens for one in kept)}
    assert report.denominator == (counts[denominator] or 1)
    assert (report.kept_members, report.tokens) == (len(kept), counts["tokens"])
    assert report.loss == pytest.approx(expected, rel=EXACT, abs=EXACT)
    assert toy.gap(found, gradient) < EXACT
    return kept


def check_calls(calls, kept):
    """Trained turns and those before them once; all but the last once more."""
    for one in kept:
        of = [call for call in calls if hasattr(call, "item")]
        of = [call for call in of if call.item[:2] == one.name]
        order = [(call.item.sample, call.replay) for call in of]
        again = [(i, True) for i in range(one.wanted - 1)][::-1]
        assert order == [(i, False) for i in range(one.wanted)] + again
        assert len({(call.place, call.replica) for call in of}) <= 1


@pytest.mark.parametrize("denominator", ["trajectories", "tokens"])
@pytest.mark.parametrize("partial", ["drop", "keep"])
@pytest.mark.parametrize("places", [1, 2, 30])
def test_any_order_of_events_is_the_gradient_of_what_is_kept(
    params, places, partial, denominator
):
    rng = random.Random(f"{places} {partial} {denominator}")
    lost = 0
    for _ in range(12):
        groups, prompts = story(rng)
        calls = []
        stream = TurnStream(
            toy.segments(),
            params,
            open_trajectories=places,
            partial_groups=partial,
            denominator=denominator,
            on_call=lambda call, ended, calls=calls: calls.append(call),
        )
        tell(rng, stream, groups, prompts)
        kept = check(*stream.finish(), groups, partial, params, denominator)
        check_calls(calls, kept)
        assert sorted(stream._schedule._free) == list(range(places))
        assert not stream._learner._trajectories
        lost += sum(map(len, groups.values())) - len(kept)
    assert lost > 2


@pytest.fixture
def busy(monkeypatch):
    """Replicas are busy at random: toy calls end before the next event comes."""
    rng = random.Random(1)
    load = property(lambda self: rng.choice([0, IN_FLIGHT]))
    monkeypatch.setattr(Replica, "load", load)


@pytest.mark.parametrize("places", [2, 5])
def test_trajectories_on_several_replicas_are_one_gradient(params, places, busy):
    layout = NamedSharding(mesh.make_mesh(replica=2), PartitionSpec())
    spread = jax.device_put(params, layout)
    rng, used = random.Random(places), set()
    for _ in range(6):
        groups, prompts = story(rng)
        calls = []
        stream = TurnStream(
            toy.segments(),
            spread,
            open_trajectories=places,
            on_call=lambda call, ended, calls=calls: calls.append(call),
        )
        tell(rng, stream, groups, prompts)
        found, report = stream.finish()
        assert all(x.sharding == layout for x in jax.tree.leaves(found))
        kept = check(found, report, groups, "drop", params, "trajectories")
        check_calls(calls, kept)
        used |= {call.replica for call in calls if hasattr(call, "item")}
    assert used == {0, 1}


def test_each_turn_a_sample_of_its_own_has_no_gradient_through_the_past(params):
    rng = random.Random(0)
    groups, prompts = story(rng, fails=0, shared=False)
    calls = []
    stream = TurnStream(
        toy.whole(),
        params,
        context="turn",
        on_call=lambda call, ended: calls.append(call),
    )
    pieces, weights = [], []
    tell(rng, stream, groups, prompts)
    for members in groups.values():
        for one in members:
            for start, end in zip(one.ends, one.ends[1:], strict=False):
                pieces.append({k: x[start:end] for k, x in one.arrays.items()})
                weights.append(one.weight)
    found, report = stream.finish()
    _, expected = toy.oracle(params, pieces, [weights], report.denominator, most=32)
    assert toy.gap(found, expected) < EXACT
    assert not any(call.replay for call in calls)


def test_a_failed_member_ends_a_step_that_takes_none(params):
    stream = TurnStream(toy.segments(), params, partial_groups="fail")
    stream.open_group("a", 2)
    stream.turn("a", 0, toy.cut(toy.trajectory((0, 0), 3, True), 0, 3))
    with pytest.raises(StreamError, match="'a' member 0 failed .lost."):
        stream.fail("a", 0, "lost")
    with pytest.raises(ValueError, match="ended with a failed member"):
        stream.complete("a", 1)


def test_prompts_run_once_forward_and_once_backward(params, monkeypatch):
    counts = dict.fromkeys(("prompt_state", "prompt_gradient"), 0)
    for name in counts:
        original = getattr(segments, name)

        def counting(*given, name=name, original=original):
            counts[name] += 1
            return original(*given)

        monkeypatch.setattr(segments, name, counting)
    rng = random.Random(3)
    groups = {g: [member(rng, g, i, 2, 0) for i in range(3)] for g in range(4)}
    kept = [g for g, members in groups.items() if any(m.wanted for m in members)]
    groups[9] = [member(rng, 9, i, 2, 0) for i in range(2)]
    groups[9][0].fails_after, groups[9][1].fails_after = 0, None
    stream = TurnStream(toy.segments(), params)
    tell(rng, stream, groups, dict.fromkeys(groups, 2))
    check(*stream.finish(), groups, "drop", params, "trajectories")
    assert counts["prompt_gradient"] == len(kept)
    assert counts["prompt_state"] - len(kept) in (0, 1)  # one of the lost group


def test_turns_with_prompts_of_their_own_report_the_sums_they_hold():
    start = {"x": np.zeros(3, np.float32)}
    stream = TurnStream(additive, start, context="turn", open_trajectories=3)
    stream.open_group("a", 4)
    for member in range(4):
        stream.turn("a", member, {"s": np.ones(3)})
    for member in range(4):
        stream.complete("a", member)
    gradient, report = stream.finish()
    assert gradient["x"].tolist() == [1.0, 1.0, 1.0]
    assert report.open_groups_max == 3
    assert report.group_sum_bytes == 3 * 3 * 4  # trajectories, entries, float32
