"""Turns alone, under random events: right order, no place twice, nothing left over."""

import dataclasses
import random

import pytest

from thundersync_jax.stream.schedule import Turns


@dataclasses.dataclass
class Lane:
    """What a trajectory went through, as events and calls tell."""

    order: int = 0  # of its first turn
    trained: list = dataclasses.field(default_factory=list)
    complete: bool = False
    failed: bool = False
    place: int | None = None
    replica: int | None = None
    calls: list = dataclasses.field(default_factory=list)  # (turn, replay)
    folded: bool | None = None  # kept or not

    @property
    def wanted(self):
        return max((i + 1 for i, t in enumerate(self.trained) if t), default=0)

    def expected(self, replay):
        """All calls of a complete trajectory."""
        forward = [(i, False) for i in range(self.wanted)]
        back = [(i, True) for i in range(self.wanted - 1)][::-1]
        return forward + back * replay

    def next(self, replay):
        """The call that should come next, None for none now."""
        done = len(self.calls)
        if done < self.wanted:
            return done, False
        left = self.expected(replay)[done:] if self.complete else []
        return left[0] if left else None


class Witness:
    """Tells `Turns` random events, takes calls at random moments, and watches."""

    def __init__(self, rng, drop, replay):
        self.rng, self.drop, self.replay = rng, drop, replay
        self.places, self.replicas = rng.choice([1, 2, 9]), rng.choice([1, 3])
        self.turns = Turns(self.places, drop, replay)
        self.groups = {g: rng.randint(1, 4) for g in range(rng.randint(1, 4))}
        self.lanes = {(g, m): Lane() for g, n in self.groups.items() for m in range(n)}
        self.lost, self.prompts, self.seen = set(), {}, 0

    def events(self):
        lanes = []
        for name in self.lanes:
            lane = [
                (name, "turn", self.rng.random() < 0.7)
                for _ in range(self.rng.randint(0, 4))
            ]
            lane.append((name, "complete"))
            if self.rng.random() < 0.15:
                lane[self.rng.randrange(len(lane)) :] = [(name, "fail")]
            lanes.append(lane)
        while lanes:
            lane = self.rng.choice(lanes)
            yield lane.pop(0)
            lanes = [lane for lane in lanes if lane]

    def step(self):
        for group, size in self.groups.items():
            self.turns.roster.open_group(group, size)
        for name, kind, *rest in self.events():
            self.tell(name, kind, *rest)
            self.work(self.rng.choice([0, 1, 2, 9]))
        self.work(1_000)

    def tell(self, name, kind, trained=None):
        lane, alive = self.lanes[name], name[0] not in self.lost
        if kind == "turn":
            item = self.turns.turn(*name, bucket=8, trained=trained)
            assert item[:2] == name
            if alive:
                self.seen += not lane.trained
                lane.order = lane.order or self.seen
                lane.trained.append(trained)
            return
        close = getattr(self.turns, kind)(*name)
        lane.complete, lane.failed = kind == "complete", kind == "fail"
        members = [x for n, x in self.lanes.items() if n[0] == name[0]]
        settled = all(x.complete or x.failed for x in members)
        lost = (lane.failed and self.drop) or all(x.failed for x in members)
        assert (close is not None) == (alive and (lost or settled))
        if alive and lost:
            self.lost.add(name[0])
        if close is not None:
            assert close == (name[0], "dropped" if lost else "kept")

    def dead(self, name):
        return name[0] in self.lost or self.lanes[name].failed

    def work(self, limit):
        for _ in range(limit):
            self.fold()
            every = set(range(self.replicas))
            free = {r for r in every if self.rng.random() < 0.6} or every
            choices = {c: self.ready(c) for c in (frozenset(free), frozenset(every))}
            assert self.turns.ready == bool(choices[frozenset(every)])
            call = self.turns.next_call(free)
            assert (call is None) == (not choices[frozenset(free)])
            if not choices[frozenset(every)]:
                break
            if call is not None:
                assert call.item[:2] == min(choices[frozenset(free)])[-1]
                self.note(call, free)
        self.fold()

    def ready(self, free):
        """Names of trajectories that may go on, with what decides who does."""
        held = sum(x.place is not None for x in self.lanes.values())
        found = []
        for name, lane in self.lanes.items():
            placed = lane.place is not None
            may = lane.replica in free if placed else held < self.places
            if not self.dead(name) and may and lane.next(self.replay):
                closing = placed and lane.complete
                rank = 0 if closing else 1 if placed else 2 if lane.complete else 3
                found.append((rank, lane.order, name))
        return found

    def note(self, call, free):
        lane = self.lanes[call.item[:2]]
        assert (call.item.sample, call.replay) == lane.next(self.replay)
        lane.calls.append((call.item.sample, call.replay))
        if lane.place is None:
            assert call.replica in free
            assert call.place in range(self.places)
            assert call.place not in [x.place for x in self.lanes.values()]
            lane.place, lane.replica = call.place, call.replica
        assert (lane.place, lane.replica) == (call.place, call.replica)

    def fold(self):
        for fold in self.turns.folds():
            name = fold.group, fold.member
            lane = self.lanes[name]
            assert (fold.place, fold.replica) == (lane.place, lane.replica)
            assert lane.folded is None
            assert fold.kept == (not self.dead(name))
            if fold.kept:
                self.check_certain(fold.group)
                assert lane.complete
                assert lane.calls == lane.expected(self.replay)
            lane.folded, lane.place = fold.kept, None
        for prompt in self.turns.prompts():
            members = [x for n, x in self.lanes.items() if n[0] == prompt.group]
            assert all(x.place is None for x in members)
            assert prompt.replicas == tuple(
                sorted({x.replica for x in members} - {None})
            )
            assert prompt.kept == (prompt.group not in self.lost)
            assert prompt.group not in self.prompts
            self.prompts[prompt.group] = prompt.kept

    def check_certain(self, group):
        members = [x for n, x in self.lanes.items() if n[0] == group]
        assert not self.drop or all(x.complete for x in members)


@pytest.mark.parametrize("replay", [True, False], ids=["replay", "alone"])
@pytest.mark.parametrize("drop", [True, False], ids=["drop", "keep"])
def test_every_turn_runs_once_in_order_and_is_replayed_last_to_first(drop, replay):
    """What closes comes before what is open, and that before what is new."""
    rng = random.Random(f"{drop} {replay}")
    lost = failed = trailing = waited = 0
    for _ in range(300):
        seen = Witness(rng, drop, replay)
        seen.step()
        assert not seen.turns.unfinished
        assert not seen.turns.ready
        for name, lane in seen.lanes.items():
            assert lane.place is None
            if not seen.dead(name):
                assert lane.calls == lane.expected(replay)
            assert (lane.folded is None) == (not lane.calls)
            trailing += lane.wanted < len(lane.trained) and not seen.dead(name)
            waited += not all(lane.trained[: lane.wanted])
        ran = {name[0] for name, lane in seen.lanes.items() if lane.calls}
        assert set(seen.prompts) == ran
        lost += len(seen.lost)
        failed += sum(x.failed for x in seen.lanes.values())
    assert min(lost, failed, trailing, waited) > 20


def test_places_are_all_free_again_in_the_end():
    """A second wave of trajectories finds each of them."""
    turns = Turns(places=2, drop_partial=True)
    for group in range(6):
        turns.roster.open_group(group, 2)
        for member in range(2):
            turns.turn(group, member, 8)
        taken = [turns.next_call({0}), turns.next_call({0})]
        assert {call.place for call in taken} == {0, 1}
        assert turns.next_call({0}) is None
        if group % 2:
            turns.fail(group, 1)
        else:
            turns.complete(group, 0)
            assert turns.folds() == []  # the other one may still fail
            turns.complete(group, 1)
        assert [fold.kept for fold in turns.folds()] == [group % 2 == 0] * 2
        assert turns.folds() == []


def test_work_before_a_member_is_complete_is_its_turns_alone():
    """While a tool runs there is nothing to replay: a longer turn may follow."""
    turns = Turns(places=1, drop_partial=True)
    turns.roster.open_group("a", 1)
    for _ in range(3):
        turns.turn("a", 0, 8)
        assert turns.next_call({0}).replay is False
        assert turns.next_call({0}) is None
        assert not turns.ready
    turns.turn("a", 0, 8, trained=False)
    turns.complete("a", 0)
    found = [turns.next_call({0}) for _ in range(3)]
    assert [(c.item.sample, c.replay) for c in found[:2]] == [(1, True), (0, True)]
    assert found[2] is None
