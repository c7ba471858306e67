"""Random steps of the scheduler: every sample once, every sum whole, no place twice."""

import collections
import random

import pytest

from thundersync_jax.stream.schedule import BATCH, RELEASES, Rules, Schedule


def events_of(rng, groups):
    """A random order of what happens to the members of groups of given sizes."""
    lanes = []
    for name, size in groups.items():
        for member in range(size):
            lane = [("sample",)] * rng.randint(0, 3) + [("complete",)]
            lane.insert(rng.randint(0, len(lane)), ("reward", rng.choice([0.0, 1.0])))
            if rng.random() < 0.1:
                lane[rng.randint(0, len(lane) - 1) :] = [("fail",)]
            lanes.append([(name, member, *event) for event in lane])
    while lanes:
        lane = rng.choice(lanes)
        yield lane.pop(0)
        lanes = [lane for lane in lanes if lane]


class Witness:
    """Tells a schedule random events, takes calls at random, and watches."""

    def __init__(self, rng, release, **rules):
        self.rng = rng
        self.rows = 1 if rules["exact"] else rng.choice([1, 3])
        self.places = rng.randint(1, 4) if rules["scope"] == "group" else 1
        self.schedule = Schedule(
            Rules(release, self.places, rows_per_call=self.rows, **rules)
        )
        self.rules = rules
        self.groups = {g: rng.randint(1, 5) for g in range(rng.randint(1, 6))}
        self.given, self.closed, self.lost = set(), set(), set()
        self.taken = collections.Counter()
        self.sums = {}  # (place, reward) -> the unit they are of, and their samples
        self.folded = collections.Counter()
        self.early = self.shared = 0

    def step(self):
        for name, size in self.groups.items():
            self.schedule.open_group(name, size)
        for name, member, kind, *rest in events_of(self.rng, self.groups):
            if kind == "sample":
                item = self.schedule.sample(name, member, self.rng.choice([8, 16]))
                self.given.add(item[:3])
            else:
                event = getattr(self.schedule, kind)
                self.note_close(name, event(name, member, *rest))
            self.work(self.rng.choice([0, 0, 1, 9]))
        self.schedule.flush()
        self.work(10_000)

    def note_close(self, name, close):
        if close is None:
            return
        assert close.group == name
        assert name not in self.closed
        self.closed.add(name)
        if close.verdict != "kept":
            self.lost.add(name)

    def fold(self):
        for fold in self.schedule.folds():
            unit, _ = self.sums.pop((fold.place, fold.reward), (fold.unit, []))
            assert unit == fold.unit
            assert fold.kept == (unit not in self.lost)
            assert unit == BATCH or unit in self.closed
            if fold.kept and fold.reward is not None:
                self.folded[unit, fold.reward] += 1
                assert not [x for x in self.waiting(unit) if x[1] == fold.reward]

    def waiting(self, unit):
        """Samples of the unit that were not started, with their rewards."""
        return [
            (key, self.schedule.roster.survivors(key[0]).get(key[1]))
            for key in self.given - self.taken.keys()
            if unit in (BATCH, key[0]) and key[0] not in self.lost
        ]

    def work(self, limit):
        for _ in range(limit):
            self.fold()
            was_ready = self.schedule.ready
            call = self.schedule.next_call(self.rng.randint(0, 2))
            assert was_ready == (call is not None)
            if call is None:
                return
            assert len({item.bucket for item in call.items}) == 1
            assert len(call.items) <= call.rows in (1, self.rows)
            assert call.place is None or len(call.items) == call.rows
            for item in call.items:
                assert item.group not in self.lost
                early = self.schedule.early(item.group)
                assert (call.place is not None) == (early or self.rules["exact"])
                self.taken[item[:3]] += 1
            if call.place is not None:
                self.note_sums(call, early)
        self.fold()

    def note_sums(self, call, early):
        self.early += early
        self.shared += len(call.items) > 1
        unit = BATCH if self.rules["scope"] == "batch" else call.items[0].group
        rewards = {self.schedule.roster.reward_of(item) for item in call.items}
        assert len(rewards) == 1
        key = call.place, rewards.pop() if self.rules["exact"] else None
        owner, items = self.sums.setdefault(key, (unit, []))
        assert owner == unit
        items += call.items
        owners = {}
        for (place, _), (owner, _) in self.sums.items():
            assert owners.setdefault(place, owner) == owner
        most = self.rules["most_rewards"] or 99
        for place in range(self.places):
            assert sum(p == place for p, _ in self.sums) <= most
        assert sum(p == self.places for p, _ in self.sums) <= 1  # the extra place


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scope", ["group", "batch"])
@pytest.mark.parametrize("lossy", ["", "drop_partial", "drop_uniform"])
def test_every_sample_of_a_kept_group_is_taken_exactly_once(
    release, exact, scope, lossy
):
    """Under random events, with calls at random moments; nothing of a lost group.

    In exact mode each reward of a unit is folded once, when it is whole.
    """
    rng = random.Random(f"{release} {exact} {scope} {lossy}")
    rules = {name: name == lossy for name in ("drop_partial", "drop_uniform")}
    most = 2 if exact else rng.choice([None, 2])
    rules |= {"exact": exact, "scope": scope, "most_rewards": most}
    early = shared = lost = 0
    for _ in range(60):
        seen = Witness(rng, release, **rules)
        seen.step()
        assert seen.closed == set(seen.groups)
        assert not seen.schedule.roster.outstanding()
        kept = {
            (group, member): reward
            for group in seen.closed - seen.lost
            for member, reward in seen.schedule.roster.survivors(group).items()
        }
        expected = {key for key in seen.given if key[:2] in kept}
        assert {key for key in seen.taken if key[0] not in seen.lost} == expected
        assert set(seen.taken.values()) <= {1}
        if exact:
            unit = (lambda group: BATCH) if scope == "batch" else (lambda group: group)
            whole = {(unit(key[0]), kept[key[:2]]) for key in expected}
            assert seen.folded == dict.fromkeys(whole, 1)
        assert not seen.sums
        early += seen.early
        shared += seen.shared
        lost += bool(seen.lost)
    assert bool(lost) == bool(lossy) or not lossy  # all may fail without a rule
    streams = release == "trajectory" or (scope, release) == ("batch", "group")
    assert bool(early) == streams
    assert bool(shared) == (streams and not exact)
