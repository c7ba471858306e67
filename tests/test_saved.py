"""What a run's steps would have taken under rules that release later."""

import math

import echo_task
import pytest

from thundersync_jax import train
from thundersync_jax.config.settings import replace
from thundersync_jax.measure.steps import LaterReleases, saved
from thundersync_jax.metrics.learner_clock import Ran
from thundersync_jax.metrics.writer import read
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import Step
from thundersync_jax.stream.schedule import Call, Item, Prompt

pytestmark = pytest.mark.usefixtures("quick_programs")

CONFIG = replace(echo_task.SCRIPTED, {"release": "trajectory"})
START, END = 100.0, 120.0
# Two groups; every gradient starts at its verdict and takes 2 seconds.
VERDICTS = {(0, 0): 101.0, (0, 1): 104.0, (1, 0): 102.5, (1, 1): 110.0}


def ran(start, end, *places, rows=1, place=0):
    items = tuple(Item(*at, 0, "bucket") for at in places)
    return Ran(Call(0, items, place, rows), start, start, end)


def step(advantages, calls=None, verdicts=VERDICTS, last=110.0):
    secs = sorted((secs, at) for at, secs in verdicts.items())
    return Step(
        gradient=None,
        report=None,
        trajectories=[],
        failures=[],
        advantages=advantages,
        rewarded_secs=verdicts,
        completed_secs=verdicts,
        turn_secs={},
        teacher_tokens=0,
        calls=calls or [ran(at, at + 2.0, place) for at, place in secs],
        start_secs=START,
        last_reward_secs=last,
    )


def predicted(done, end=112.5, config=CONFIG, later=None):
    row = (later or LaterReleases(config, True, config.loss.has_additive)).step(
        done, end
    )
    return row.get("predicted_batch_secs"), row.get("predicted_group_secs")


MIXED = {(0, 0): 0.5, (0, 1): -0.5, (1, 0): 0.5, (1, 1): -0.5}


def test_other_rules_wait_for_their_verdicts_and_then_do_the_same_work():
    """By hand: the last verdict after 10 s, 4 x 2 s of work, a boundary of 0.5 s; the
    first group is complete after 4 s, so that only the second group's work is left."""
    assert predicted(step(MIXED)) == pytest.approx((18.5, 14.5))


def test_members_of_advantage_0_cost_the_other_rules_nothing():
    done = step(MIXED | {(1, 0): 0.0, (1, 1): 0.0})
    assert predicted(done) == pytest.approx((14.5, 10.5))
    # A part of the loss without advantage is computed under every rule.
    config = replace(CONFIG, {"loss.kl_coef": 0.1})
    assert predicted(done, config=config) == pytest.approx((18.5, 14.5))


def test_members_of_dropped_groups_cost_the_other_rules_nothing():
    kept = {place: a for place, a in MIXED.items() if place[0] == 0}
    assert predicted(step(kept)) == pytest.approx((14.5, 10.5))


def test_other_rules_compute_as_fast_as_beside_no_rollouts():
    """The call after the last verdict takes 0.5 s a sample, the others 2 s."""
    places = list(VERDICTS)
    calls = [ran(102.0, 104.0, places[0]), ran(104.0, 106.0, places[1])]
    calls += [ran(111.0, 112.0, *places[2:], rows=2, place=None)]
    later = LaterReleases(CONFIG, True, False)
    row = later.step(step(MIXED, calls), 112.5)
    assert row["predicted_batch_secs"] == pytest.approx(10 + 4 * 0.5 + 0.5)
    assert row["predicted_group_secs"] == pytest.approx(10 + 2 * 0.5 + 0.5)
    assert math.isnan(row["contention"])  # single calls never ran alone
    calls[2] = ran(111.0, 112.0, places[2], place=None)
    row = later.step(step(MIXED, calls), 112.5)
    assert row["contention"] == pytest.approx(2.0)


def test_prompt_of_a_group_is_work_once_it_is_released():
    calls = [ran(at, at + 2.0, place) for place, at in VERDICTS.items()]
    calls += [Ran(Prompt(group, (0,), True), 112.0, 112.0, 113.0) for group in (0, 1)]
    assert predicted(step(MIXED, calls), 113.5) == pytest.approx((20.5, 15.5))
    kept = {place: a for place, a in MIXED.items() if place[0] == 0}
    assert predicted(step(kept, calls), 113.5) == pytest.approx((15.5, 10.5))


def test_replicas_share_the_work():
    config = replace(CONFIG, {"mesh.replica": 2})
    assert predicted(step(MIXED), config=config) == pytest.approx((14.5, 12.5))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"release": "group"}, {"predicted_batch_secs", "contention"}),
        ({"release": "batch"}, set()),
    ],
)
def test_only_rules_that_release_later_are_predicted(changes, names):
    config = replace(CONFIG, changes)
    assert LaterReleases(config, True, False).step(step(MIXED), 112.5).keys() == names


def test_totals_are_over_the_steps_that_have_predictions():
    """A run that began before there were any, or was resumed."""
    row = {"predicted_batch_secs": 3.0, "predicted_group_secs": 2.5, "step_secs": 2.0}
    rows = [{"step": 0}, {"step_secs": 9.0}, row | {"contention": None}]
    assert saved(rows, "trajectory") == {
        "steps": 1,
        "secs": {"batch": 3.0, "group": 2.5, "trajectory": 2.0},
        "batch_over_measured": 1.5,
        "contention": None,
    }
    rows += [row | {"contention": 1.25}] * 2
    figures = saved(rows, "trajectory")
    assert figures["steps"] == 3 and figures["contention"] == 1.25
    assert figures["secs"] == {"batch": 9.0, "group": 7.5, "trajectory": 6.0}
    assert saved(rows[:2], "trajectory") is None


@pytest.mark.parametrize("closing", [False, True])
def test_a_run_ends_with_what_its_own_steps_saved(
    closing, tmp_path, capsys, monkeypatch
):
    """Only where it is asked for is another step rolled out after the last one."""
    rolled, jobs = [], Run.train_jobs

    def watched(self, step):
        rolled.append(step)
        return jobs(self, step)

    monkeypatch.setattr(Run, "train_jobs", watched)
    config = replace(CONFIG, {"steps": 2, "closing_comparison": closing})
    make = echo_task.scripted([1.0, 0.0, 0.0, 1.0])
    result = train.train(config, tmp_path, environment=make)
    assert set(rolled) == ({1, 2, 3} if closing else {1, 2})
    printed = capsys.readouterr().out
    assert ("under every release rule" in printed) == closing
    if closing:
        _, table = printed.split("under every release rule\n")
        rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()[2:5]}
        assert rows["batch"][1] == "1.00x" and rows["batch"][5] == "0"
        assert float(rows["trajectory"][5]) < 1e-5
        assert max(map(len, table.splitlines()[:5])) <= 100
    rows = read(tmp_path)[1:]
    found = result["saved"]
    assert found["steps"] == 2
    for release in ("batch", "group"):
        name = f"predicted_{release}_secs"
        assert all(row[name] > row["rollout_secs"] for row in rows)
        total = sum(row[name] for row in rows)
        assert found["secs"][release] == pytest.approx(total)
        assert f"{release} " in printed and "predicted" in printed
    measured = sum(row["step_secs"] for row in rows)
    assert found["secs"]["trajectory"] == pytest.approx(measured)
    assert found["batch_over_measured"] == pytest.approx(
        found["secs"]["batch"] / measured
    )
    assert {"timeline.png", "success.png", "saved.png", "timeline.json"} <= {
        path.name for path in tmp_path.iterdir()
    }
