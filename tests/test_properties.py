"""What holds of every stream: 2,400 random examples, from the same seeds every time.

`properties.py` says what an example is, and tries any number of others.
"""

import examples
import oracle
import properties
import stories

COVERED = {
    "estimator": {*examples.ESTIMATORS},
    "denominator": {"none", "groups", "trajectories", "tokens", 2.5},
    "partial": {"drop", "keep", "fail"},
    "uniform": {"keep", "drop"},
    "release": {"batch", "group", "trajectory"},
    "open_groups": {*range(1, 9)},
    "rows_per_call": {1, 2, 3, 4},
    "order": {*stories.ORDERS},
    "learner": {"idle", "busy"},
    "groups": {*range(1, 9)},
}


def covered(counts, **others):
    """Requires examples of every kind."""
    for name, expected in (COVERED | others).items():
        assert expected <= counts[name].keys(), (name, counts[name])


def test_streamed_gradient_is_that_of_the_whole_batch():
    counts = properties.run(properties.streamed_is_the_batch, 1000)
    covered(
        counts,
        estimator={*examples.ESTIMATORS, None},
        parts={*examples.SURROGATES},
        rewards={*examples.REWARDS},
        members={"failed", "shaped", "baselines", "several"},
    )
    assert counts["group size"].keys() >= {*range(1, 17)}
    assert counts["groups at once"].keys() >= {0, 1, 2, 3}
    counts["samples"].pop("waited_for_bucket")  # rare here, on purpose below
    assert min(counts["samples"].values()) > 20
    assert min(counts["outcome"].values()) > 50


def test_exact_gradient_has_the_same_bits_however_it_came_about():
    counts = properties.run(properties.exact_is_the_same_bits, 800)
    covered(
        counts,
        estimator={*examples.ESTIMATORS, None},
        parts={*examples.SURROGATES},
        rewards={*examples.REWARDS},
    )
    assert counts["groups at once"].keys() >= {0, 1, 2, 3}
    assert min(counts["samples"].values()) > 100


def test_uniform_groups_contribute_exactly_nothing():
    counts = properties.run(properties.uniform_groups_leave_nothing, 200)
    covered(counts, estimator={*properties.BY_GROUP}, accumulator={"plain", "exact"})
    assert counts["all groups"]["uniform"] > 20


def test_third_distinct_reward_waits_and_is_counted():
    counts = properties.run(properties.third_reward_waits, 400)
    covered(counts, release={"trajectory"}, open_groups={8}, learner={"idle"})
    waits = counts["third rewards"]
    sums = {"plain": 0, "exact": 0}
    for name, estimator in examples.ESTIMATORS.items():
        sums["exact"] += waits[f"exact {name}"]
        sums["plain"] += 0 if estimator.affine else waits[f"plain {name}"]
    assert min(sums.values()) > 20
    # No other plain sum makes a reward wait, and none at all where members are alone.
    assert waits.total() == sum(sums.values())
    alone = {name for name, scope in oracle.SCOPES.items() if scope == "member"}
    assert not any(waits[f"exact {name}"] for name in alone)


def test_command_counts_what_it_tried(capsys):
    properties.main(["--examples=20", "--seed=5"])
    printed = capsys.readouterr().out
    assert "20 of 20 examples" in printed
    assert "release: " in printed
