"""Decisions of the scheduler, as plain data: what runs next, where, and what closes."""

import random

import pytest

from thundersync_jax.stream.schedule import BATCH, Close, Fold, Rules, Schedule


def plan(release="trajectory", places=2, **settings):
    return Schedule(Rules(release, places, **settings))


def settle(schedule, group, member, reward=0.0, bucket=8, samples=1):
    """Everything about one member, at once."""
    for _ in range(samples):
        schedule.sample(group, member, bucket)
    first = schedule.complete(group, member)
    return schedule.reward(group, member, reward) or first


def taken(schedule, replica=0):
    """The (group, member) pairs of the next call, and its place."""
    schedule.folds()
    call = schedule.next_call(replica)
    return call and ([(item.group, item.member) for item in call.items], call.place)


def drain(schedule):
    order = []
    while (call := schedule.next_call(0)) is not None:
        order += [(item.group, item.member) for item in call.items]
    return order


def test_final_work_comes_before_any_other():
    schedule = plan()
    schedule.open_group("open", 3)
    schedule.open_group("whole", 2)
    settle(schedule, "open", 0, 1.0)
    settle(schedule, "open", 1, 0.0)
    settle(schedule, "whole", 0, 1.0)
    assert settle(schedule, "whole", 1, 0.0) == Close("whole", "kept")
    assert taken(schedule) == ([("whole", 0)], None)
    assert taken(schedule) == ([("whole", 1)], None)
    assert taken(schedule) == ([("open", 0)], 0)


def test_group_that_holds_sums_comes_before_one_with_more_ready():
    schedule = plan()
    for name, ready in (("few", 2), ("many", 5)):
        schedule.open_group(name, 9)
        if name == "few":
            settle(schedule, name, 0, 1.0)
            settle(schedule, name, 1, 0.0)
            assert taken(schedule) == ([("few", 0)], 0)
        else:
            for member in range(ready):
                settle(schedule, name, member, float(member))
    assert taken(schedule) == ([("few", 1)], 0)
    assert taken(schedule)[0] == [("many", 0)]


def test_group_with_most_ready_members_is_opened_first():
    schedule = plan(places=1)
    for name, ready in (("two", 2), ("four", 4), ("three", 3)):
        schedule.open_group(name, 9)
        for member in range(ready):
            settle(schedule, name, member, float(member))
    assert taken(schedule)[0] == [("four", 0)]


def test_group_that_looks_uniform_comes_last_but_not_never():
    schedule = plan()
    for name, rewards in (("equal", (1, 1, 1, 1)), ("mixed", (0, 1))):
        schedule.open_group(name, 9)
        for member, reward in enumerate(rewards):
            settle(schedule, name, member, float(reward))
    assert taken(schedule)[0] == [("mixed", 0)]
    assert taken(schedule)[0] == [("mixed", 1)]
    assert taken(schedule)[0] == [("equal", 0)]  # rather than idling
    settle(schedule, "mixed", 2, 0.5)
    assert taken(schedule)[0] == [("mixed", 2)]


def test_group_that_looks_uniform_comes_last_even_where_it_holds_sums():
    schedule = plan()
    for name, rewards in (("equal", (1, 1, 1)), ("mixed", (0, 1))):
        schedule.open_group(name, 9)
        if name == "mixed":
            assert taken(schedule) == ([("equal", 0)], 0)
        for member, reward in enumerate(rewards):
            settle(schedule, name, member, float(reward))
    assert taken(schedule) == ([("mixed", 0)], 1)


def test_no_more_groups_hold_sums_than_there_are_places():
    schedule = plan(places=2)
    for name in "abc":
        schedule.open_group(name, 3)
        settle(schedule, name, 0, 1.0)
    places = {taken(schedule)[1] for _ in range(2)}
    assert places == {0, 1}
    assert not schedule.ready
    assert schedule.next_call(0) is None


@pytest.mark.parametrize("how", ["complete", "dropped"])
def test_place_of_a_closed_group_serves_another(how):
    schedule = plan(places=1)
    for name in "ab":
        schedule.open_group(name, 2)
        settle(schedule, name, 0, 1.0)
    assert taken(schedule) == ([("a", 0)], 0)
    assert schedule.next_call(0) is None
    if how == "complete":
        assert settle(schedule, "a", 1, 0.0) == Close("a", "kept")
        assert schedule.folds() == [Fold("a", 0, None, (0,), True)]
        assert taken(schedule) == ([("a", 1)], None)
    else:
        assert schedule.fail("a", 1) == Close("a", "dropped")
        assert schedule.folds() == [Fold("a", 0, None, (0,), False)]
    assert schedule.ready
    assert taken(schedule) == ([("b", 0)], 0)


def test_fold_names_every_replica_that_holds_sums():
    schedule = plan()
    schedule.open_group("a", 5)
    for member in range(4):
        settle(schedule, "a", member, float(member))
    for replica in (2, 0, 2):
        assert taken(schedule, replica)[1] == 0
    assert schedule.folds() == []
    settle(schedule, "a", 4, 1.0)
    assert schedule.folds() == [Fold("a", 0, None, (0, 2), True)]
    assert schedule.folds() == []


def test_dropped_group_is_never_taken_again():
    schedule = plan()
    schedule.open_group("a", 4)
    for member in (0, 1):
        settle(schedule, "a", member, float(member))
    assert taken(schedule)[0] == [("a", 0)]
    assert schedule.fail("a", 2) == Close("a", "dropped")
    assert settle(schedule, "a", 3, 1.0) is None
    assert not schedule.ready
    assert schedule.next_call(0) is None


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_group_is_kept_while_anyone_survives(failed):
    schedule = plan(drop_partial=False)
    schedule.open_group("a", 2)
    closes = [
        schedule.fail("a", member) if member < failed else settle(schedule, "a", member)
        for member in range(2)
    ]
    assert closes == [None, Close("a", "kept" if failed < 2 else "dropped")]
    assert list(schedule.roster.survivors("a")) == list(range(failed, 2))
    assert drain(schedule) == [("a", m) for m in range(failed, 2)]


@pytest.mark.parametrize(
    ("release", "after_member", "after_group", "after_flush"),
    [("trajectory", 1, 2, 2), ("group", 0, 2, 2), ("batch", 0, 0, 2)],
)
def test_release_rule_says_when_work_may_start(
    release, after_member, after_group, after_flush
):
    schedule = plan(release)
    schedule.open_group("a", 2)
    seen = []
    settle(schedule, "a", 0, 1.0)
    seen += drain(schedule)
    assert len(seen) == after_member
    settle(schedule, "a", 1, 0.0)
    seen += drain(schedule)
    assert len(seen) == after_group
    schedule.flush()
    seen += drain(schedule)
    assert len(seen) == after_flush


def test_work_without_baseline_or_drop_needs_no_place():
    schedule = plan(places=0, drop_partial=False, rewards=False)
    schedule.weighted = False
    schedule.open_group("a", 2)
    schedule.sample("a", 1, 8)
    assert schedule.complete("a", 1) is None
    assert taken(schedule) == ([("a", 1)], None)


@pytest.mark.parametrize(
    ("pad_last", "rows"),
    [(True, [4, 4, 4]), (False, [4, 4, 1, 1])],
)
def test_last_call_of_a_batch_is_padded_or_its_samples_go_alone(pad_last, rows):
    schedule = plan("batch", rows_per_call=4, pad_last=pad_last)
    schedule.open_group("a", 10)
    for member in range(10):
        settle(schedule, "a", member, 1.0)
    schedule.flush()
    calls = []
    while (call := schedule.next_call(0)) is not None:
        calls.append(call)
    assert [call.rows for call in calls] == rows
    members = [item.member for call in calls for item in call.items]
    assert members == list(range(10))


def test_three_of_four_are_worth_a_padded_call():
    schedule = plan("batch", rows_per_call=4, pad_last=False)
    schedule.open_group("a", 3)
    for member in range(3):
        settle(schedule, "a", member, 1.0)
    schedule.flush()
    call = schedule.next_call(0)
    assert (len(call.items), call.rows) == (3, 4)


def test_batch_release_does_not_depend_on_arrival():
    """In (group, member) order, one bucket after another, the last call padded."""
    rng = random.Random(4)
    sizes = {("a", 0): 8, ("a", 1): 16, ("b", 0): 8, ("b", 1): 8, ("b", 2): 16}
    orders = set()
    for _ in range(10):
        schedule = plan("batch", rows_per_call=2)
        for name, members in (("a", 2), ("b", 3)):
            schedule.open_group(name, members)
        for group, member in rng.sample(list(sizes), len(sizes)):
            settle(schedule, group, member, 1.0, bucket=sizes[group, member])
        schedule.flush()
        calls = []
        while (call := schedule.next_call(0)) is not None:
            assert call.rows == 2
            calls.append(tuple((item.group, item.member) for item in call.items))
        orders.add(tuple(calls))
    expected = ((("a", 0), ("b", 0)), (("b", 1),), (("a", 1), ("b", 2)))
    assert orders == {expected}


def test_final_work_is_packed_when_a_call_is_full_and_only_with_its_like():
    schedule = plan("group", rows_per_call=3)
    schedule.open_group("a", 5)
    for member, bucket in enumerate((8, 16, 8, 16, 8)):
        settle(schedule, "a", member, bucket=bucket)
    calls = [schedule.next_call(0) for _ in range(3)]
    found = [([item.member for item in c.items], c.rows) for c in calls]
    assert found == [([0, 2, 4], 3), ([1], 1), ([3], 1)]


def known_calls(schedule, replica=0):
    """The (group, members) of the calls into sums that can start."""
    calls = iter(lambda: schedule.next_call(replica), None)
    found = [(c.items[0].group, [x.member for x in c.items], c.rows) for c in calls]
    assert all(rows == len(members) for _, members, rows in found)
    return [(group, members) for group, members, _ in found]


def test_equal_rewards_of_one_group_share_a_call_once_it_is_full():
    schedule = plan(rows_per_call=3)
    schedule.open_group("a", 9)
    for member, reward in enumerate((1.0, 0.0, 1.0, 1.0, 0.0)):
        settle(schedule, "a", member, reward)
    assert known_calls(schedule) == [("a", [0, 2, 3]), ("a", [1]), ("a", [4])]


def test_first_sample_goes_first_though_others_could_fill_a_call():
    schedule = plan(rows_per_call=2)
    schedule.open_group("a", 9)
    for member, reward in enumerate((0.0, 1.0, 0.5, 1.0)):
        settle(schedule, "a", member, reward)
    assert known_calls(schedule) == [("a", [0]), ("a", [1, 3]), ("a", [2])]


def test_known_work_shares_no_call_with_other_lengths_or_groups():
    schedule = plan(rows_per_call=2)
    for name in "ab":
        schedule.open_group(name, 9)
        settle(schedule, name, 0, 1.0, bucket=8)
        settle(schedule, name, 1, 1.0, bucket=16)
    assert known_calls(schedule) == [("a", [0]), ("a", [1]), ("b", [0]), ("b", [1])]


def test_known_work_without_rewards_is_alike():
    schedule = plan(rewards=False, rows_per_call=2)
    schedule.open_group("a", 4)
    for member in range(3):
        schedule.sample("a", member, 8)
        schedule.complete("a", member)
    assert known_calls(schedule) == [("a", [0, 1]), ("a", [2])]


def test_waiting_samples_can_be_discarded_by_member():
    for release in ("group", "batch"):
        schedule = plan(release)
        schedule.open_group("a", 3)
        for member in range(3):
            settle(schedule, "a", member, samples=2)
        assert schedule.discard("a", {0, 2}) == 4
        schedule.flush()
        assert drain(schedule) == [("a", 1), ("a", 1)]


def test_outstanding_members_are_those_without_verdict_or_tokens():
    schedule = plan()
    schedule.open_group("a", 4)
    settle(schedule, "a", 0)
    schedule.complete("a", 1)
    schedule.reward("a", 2, 1.0)
    assert schedule.roster.outstanding() == [("a", 1), ("a", 2), ("a", 3)]


def rewarded(schedule, group, rewards):
    """Settles members with these rewards and takes what can start."""
    calls = []
    for member, reward in enumerate(rewards):
        settle(schedule, group, member, reward)
        calls += iter(lambda: taken(schedule), None)
    return calls


@pytest.mark.parametrize("exact", [True, False])
def test_third_distinct_reward_waits_until_its_group_is_complete(exact):
    schedule = plan(most_rewards=2, exact=exact)
    schedule.open_group("a", 6)
    calls = rewarded(schedule, "a", (0.0, 2.0, 1.0, 0.0, 3.0))
    assert [members for members, _ in calls] == [[("a", m)] for m in (0, 1, 3)]
    assert not schedule.ready
    settle(schedule, "a", 5, 1.0)
    late = list(iter(lambda: taken(schedule), None))
    extra = 2 if exact else None
    order = (2, 5, 4) if exact else (2, 4, 5)  # reward by reward, or as they are
    assert late == [([("a", member)], extra) for member in order]
    assert (schedule.waited, schedule.waited_for_bucket) == (2, 2)


def test_exact_sums_of_a_complete_group_go_on_where_they_lie():
    """Its own two places of rewards first; then one after another in the extra one."""
    schedule = plan(exact=True, most_rewards=2, places=1)
    schedule.open_group("a", 5)
    assert rewarded(schedule, "a", (1.0,)) == [([("a", 0)], 0)]
    for member, reward in ((1, 1.0), (2, 0.0), (3, 5.0)):
        settle(schedule, "a", member, reward)
    settle(schedule, "a", 4, 1.0)
    done = []
    while True:
        done += schedule.folds()
        if (call := schedule.next_call(0)) is None:
            break
        done.append((call.items[0].member, call.place))
    assert done == [
        Fold("a", 0, None, (0,), True),
        (1, 0),
        (4, 0),
        Fold("a", 0, 1.0, (0,), True),
        (2, 1),
        Fold("a", 1, 0.0, (0,), True),
        (3, 1),
        Fold("a", 1, 5.0, (0,), True),
    ]


def test_batch_wide_advantages_share_one_place_until_the_end():
    schedule = plan(scope="batch", places=1, drop_partial=False)
    for name in "ab":
        schedule.open_group(name, 2)
    assert rewarded(schedule, "a", (1.0, 0.0)) == [([("a", m)], 0) for m in (0, 1)]
    assert rewarded(schedule, "b", (3.0, 4.0)) == [([("b", m)], 0) for m in (0, 1)]
    assert schedule.folds() == []
    schedule.flush()
    assert schedule.folds() == [Fold(BATCH, 0, None, (0,), True)]


def test_batch_wide_sums_take_only_groups_that_are_certain_to_count():
    schedule = plan(scope="batch", places=1, drop_uniform=True)
    for name in "ab":
        schedule.open_group(name, 2)
    settle(schedule, "a", 0, 1.0)
    assert not schedule.ready
    assert settle(schedule, "a", 1, 1.0) == Close("a", "filtered")
    assert not schedule.ready
    assert rewarded(schedule, "b", (1.0, 0.0)) == [([("b", m)], 0) for m in (0, 1)]


def test_sums_that_no_advantage_multiplies_take_any_reward():
    schedule = plan(most_rewards=2, exact=True)
    schedule.weighted = False
    schedule.open_group("a", 4)
    calls = rewarded(schedule, "a", (0.0, 1.0, 2.0))
    assert calls == [([("a", member)], 0) for member in range(3)]
    assert schedule.waited_for_bucket == 0
