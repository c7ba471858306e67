"""The bench: what it measures is what happened, and a comparison must be one."""

import collections
import dataclasses
import json
import math
import sys

import echo_task
import numpy as np
import pytest

from thundersync_jax import train
from thundersync_jax.bench import bench
from thundersync_jax.config import EnvConfig, LatencyConfig
from thundersync_jax.config.settings import replace
from thundersync_jax.envs import letters
from thundersync_jax.envs.letters import LettersOptions
from thundersync_jax.errors import ConfigError, StreamError
from thundersync_jax.measure import bench_report, steps
from thundersync_jax.measure import live as live_module
from thundersync_jax.metrics.learner_clock import Ran
from thundersync_jax.metrics.timing import StepTiming
from thundersync_jax.rollout.events import Failed
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import Step
from thundersync_jax.stream.schedule import RELEASES, Call, Item
from thundersync_jax.types import StopReason, Trajectory, TrajectoryKey

pytestmark = pytest.mark.usefixtures("quick_programs")

WAITS = LatencyConfig("lognormal", median_secs=0.05, sigma=1.2)
CONFIG = replace(
    echo_task.small(warm_start_steps=0),
    {
        "env": EnvConfig(
            factory="thundersync_jax.envs.letters:make",
            options=LettersOptions(
                prompt_tokens=8, calls=(0, 1), observation_tokens=(3, 4), train_tasks=16
            ),
            tool_latency=WAITS,
            verify_latency=WAITS,
        ),
        "rollout.turn_tokens": 4,
        "rollout.cut_actions": "run",
        "rollout.slots": 16,
        "open_groups": 4,
        "optim.learning_rate": 1e-2,
    },
)
PER_RELEASE = {
    *("step_secs", "step_secs_median", "rollout_secs", "learner_secs"),
    *("first_release_secs", "last_work_secs", "boundary_secs", "tail_secs"),
    *("dispatch_ms_median", "predicted_secs", "measured_over_predicted"),
    *("learner_idle_fraction", "contention", "streamed_share"),
    "padded_over_real_tokens",
}
OVERALL = {
    *("releases", "speedup", "finish_time_icc", "open_groups_max", "group_sum_bytes"),
    *("compiles_after_warmup", "uniform_groups", "latency_scale", "rows_per_call"),
    *("failed_members", "identical_trajectories"),
}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Two steps of a tiny model under every rule."""
    folder = tmp_path_factory.mktemp("bench")
    return bench(CONFIG, folder, steps=2, plot=True), folder


def test_every_figure_is_there_and_the_rules_did_the_same_work(result):
    found, _ = result
    assert found.keys() == OVERALL
    assert json.loads(json.dumps(found)) == found
    assert found["identical_trajectories"]
    assert found["compiles_after_warmup"] == 0
    assert found["open_groups_max"] >= 1 and found["group_sum_bytes"] > 0
    assert tuple(found["releases"]) == RELEASES
    for release in found["releases"].values():
        assert release.keys() == PER_RELEASE
        assert len(release["step_secs"]) == 2
    shares = {r: found["releases"][r]["streamed_share"] for r in RELEASES}
    assert shares["batch"] == shares["group"] == 0.0 < shares["trajectory"]


def test_exact_sums_run_beside_plain_ones(tmp_path, capsys, monkeypatch):
    made, ran = [], collections.Counter()
    new_stream, run_step = Run.new_stream, live_module.run_step

    def watched_stream(self, params, version, release, rows, accumulator=None):
        made.append((release, rows, accumulator))
        return new_stream(self, params, version, release, rows, accumulator)

    def watched_step(*arguments):
        ran[made[-1]] += 1
        return run_step(*arguments)

    monkeypatch.setattr(Run, "new_stream", watched_stream)
    monkeypatch.setattr(live_module, "run_step", watched_step)
    options = dataclasses.replace(CONFIG.env.options, verdict="any")
    env = dataclasses.replace(CONFIG.env, options=options)
    config = replace(CONFIG, {"accumulator": "exact", "env": env})
    found = bench(config, tmp_path, steps=2, plot=True)
    # A warm-up and two steps each.
    rules = {(release, 1, None): 3 for release in RELEASES}
    assert ran == rules | {("trajectory", 1, "plain"): 3}
    assert found.keys() == OVERALL | {"exact"}
    assert json.loads(json.dumps(found)) == found
    assert tuple(found["releases"]) == (*RELEASES, bench_report.PLAIN)
    assert found["identical_trajectories"]
    assert found["compiles_after_warmup"] == 0 and found["rows_per_call"] == 1
    for name in ("trajectory", bench_report.PLAIN):
        release = found["releases"][name]
        assert release.keys() == PER_RELEASE
        assert release["streamed_share"] > 0
        assert release["measured_over_predicted"] >= 1 - 1e-9
    exact = found["exact"]
    assert exact["learner_secs"] == found["releases"]["trajectory"]["learner_secs"]
    assert (
        exact["plain_learner_secs"]
        == found["releases"][bench_report.PLAIN]["learner_secs"]
    )
    said = capsys.readouterr().out
    assert f"{exact['learner_ratio']:.2f} times" in said
    assert f"{exact['speedup_kept']:.0%} of plain sums' speed-up kept" in said


def test_the_price_of_exact_sums_is_taken_step_by_step():
    """A machine that slows down half-way slows both down."""

    def live(step_secs, learner_secs):
        timing = StepTiming(step_secs, 0.0, learner_secs, 0.0, 0.0, 0.0)
        return live_module.Live(None, timing, 0.0, 0.0, 0.0, 0.0, [], [])

    figures = [(4.0, 2.4, 3.8, 2.0), (9.0, 6.0, 8.1, 4.0), (5.0, 3.0, 4.9, 2.5)]
    rounds = [
        bench_report.Round(
            {"trajectory": live(*one[:2]), bench_report.PLAIN: live(*one[2:])}, {}
        )
        for one in figures
    ]
    assert bench_report.exactness(rounds) == pytest.approx(
        {
            "learner_secs": 3.0,
            "plain_learner_secs": 2.5,
            "learner_ratio": 1.2,  # of 1.2, 1.5, 1.2
            "speedup_kept": 0.95,  # of 0.95, 0.9, 0.98
        }
    )


def test_no_rule_beats_its_own_formula_and_its_parts_add_up(result):
    found, _ = result
    for release in found["releases"].values():
        # Rounding alone: the formula is a lower bound on these arrivals and this work.
        assert release["measured_over_predicted"] >= 1 - 1e-9
        assert release["contention"] > 0
        assert release["tail_secs"] >= release["boundary_secs"] > 0
        assert min(release["step_secs"]) > release["rollout_secs"] / 3
    batch = found["releases"]["batch"]
    assert batch["first_release_secs"] == pytest.approx(batch["rollout_secs"], abs=0.05)
    for name in ("group", "trajectory"):
        release = found["releases"][name]
        assert release["first_release_secs"] < release["rollout_secs"]


def test_speedup_is_the_median_of_the_single_steps():
    """One slow step, or a machine that slows down half-way, decides nothing."""
    releases = {
        "batch": {"step_secs": [4.0, 8.0, 30.0]},
        "trajectory": {"step_secs": [2.0, 5.0, 15.0]},
    }
    assert bench_report.speedups(releases, "trajectory") == [2.0, 1.6, 2.0]


LONG = {"rollout.context_tokens": 48, "rollout.prefill_buckets": (48,)}
LONG |= {"rollout.gradient_buckets": (48,)}


def uniform(env, seed):
    """Every verdict is 1."""
    tasks = letters.make(dataclasses.replace(env, options=None), seed)
    return dataclasses.replace(tasks, environment=Uniform)


class Uniform(letters.LettersEnvironment):
    def __init__(self):
        super().__init__(LettersOptions())

    async def verify(self):
        return 1.0


def test_a_bench_with_nothing_to_learn_ends_in_one_line(tmp_path):
    config = replace(CONFIG, {"env": dataclasses.replace(CONFIG.env, options=None)})
    with pytest.raises(StreamError, match="the learner has nothing to do"):
        bench(replace(config, LONG), tmp_path, steps=1, environment=uniform)


def test_a_scale_that_cannot_help_is_given_up():
    class Decoding:
        latency_scale = 1.0

        def publish(self, params, version):
            self.published = True

    run, rolled = Decoding(), []

    def roll_out(run, step, version):
        rolled.append(run.latency_scale)
        return [], 5.0 + run.latency_scale

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_module, "roll_out", roll_out)
        tried = live_module.scale_latencies(run, None, 0, [1], wanted_secs=1.0)
    assert run.published
    assert len(tried) < 5 and run.latency_scale == min(rolled)


def test_pictures_are_drawn(result):
    _, workdir = result
    for name in ("bench_timeline.png", "bench.png"):
        assert (workdir / name).read_bytes()[:4] == b"\x89PNG"


def test_steps_and_pictures_are_checked_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="--steps is 0"):
        bench(CONFIG, tmp_path, steps=0)
    with pytest.raises(ConfigError, match="a work directory for pictures"):
        bench(CONFIG, plot=True)
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_a_run_ends_well_and_a_plot_is_refused_at_once(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"thundersync_jax\[plots\]"):
        bench(CONFIG, tmp_path / "bench", plot=True)
    assert not (tmp_path / "bench").exists()
    config = replace(CONFIG, {"steps": 1, "evaluation.every_steps": 0})
    assert train.train(config, tmp_path / "train")["steps"] == 1
    assert "no pictures" in capsys.readouterr().out
    assert not list((tmp_path / "train").glob("*.png"))


def call(member, group=0, replica=0, rows=1, place=None):
    return Call(replica, (Item(group, member, 0, "bucket"),), place, rows)


def ran(member, dispatched, start, end, **rest):
    return Ran(call(member, **rest), dispatched, start, end)


def step(calls, rewarded, last, failures=()):
    return Step(
        gradient=None,
        report=None,
        trajectories=[],
        failures=list(failures),
        advantages={},
        rewarded_secs=rewarded,
        completed_secs=rewarded,
        turn_secs={},
        teacher_tokens=0,
        calls=calls,
        start_secs=10.0,
        last_reward_secs=last,
    )


def test_formula_takes_each_calls_own_arrival_and_work():
    """By hand: work 1 and 3 from 11 and 12, the last reward at 13, boundary 0.5."""
    calls = [ran(0, 11.0, 11.0, 12.0), ran(1, 12.0, 12.5, 15.5)]
    done = step(calls, {(0, 0): 11.0, (0, 1): 12.0}, last=13.0)
    assert live_module.predicted_secs(done, [11.0, 12.0], 0.5, 1) == pytest.approx(5.5)
    # All of it after the last reward, as under batch release.
    assert live_module.predicted_secs(done, [13.0, 13.0], 0.5, 1) == pytest.approx(7.5)
    # Two replicas count as a learner twice as fast, and nothing ends before R.
    assert live_module.predicted_secs(done, [11.0, 12.0], 0.5, 2) == pytest.approx(4.0)
    assert live_module.predicted_secs(step([], {}, 13.0), [], 0.5, 1) == 3.5


@pytest.mark.parametrize(
    ("release", "arrivals"), [("trajectory", 11.0), ("group", 14.0), ("batch", 15.0)]
)
def test_a_call_may_begin_when_its_rule_lets_it(release, arrivals):
    """A failed member settles its group and the batch as a rewarded one does."""
    rewarded = {(0, 0): 11.0, (0, 1): 12.0, (1, 0): 15.0}
    key = TrajectoryKey(1, 0, 2)
    failed = Failed(key, StopReason.TIMEOUT, "late", secs=14.0)
    done = step([ran(0, 11.1, 11.1, 12.0)], rewarded, 15.0, [failed])
    assert live_module._arrivals(done, release, True) == [arrivals]


def test_a_shared_call_waits_for_its_last_sample():
    items = (Item(0, 0, 0, "bucket"), Item(0, 1, 0, "bucket"))
    shared = Ran(Call(0, items, 0, 2), 13.0, 13.0, 14.0)
    done = step([shared], {(0, 0): 11.0, (0, 1): 12.0}, last=15.0)
    assert live_module._arrivals(done, "trajectory", True) == [12.0]


def test_dispatch_counts_only_calls_that_found_their_learner_idle():
    calls = [
        ran(0, 11.002, 11.002, 12.0),
        ran(1, 11.5, 12.0, 13.0),  # came while the first one ran
        ran(2, 14.003, 14.003, 15.0),
        ran(3, 14.004, 14.004, 16.0, replica=1),  # another learner, idle so far
    ]
    waits = live_module._dispatch_secs(calls, [11.0, 11.5, 14.0, 14.0])
    assert waits == pytest.approx([0.002, 0.003, 0.004])


def test_contention_compares_with_the_same_shapes_alone():
    idle = steps.IdleWork()
    for secs in (1.0, 1.0, 9.0):
        idle.add(ran(0, 0.0, 0.0, secs))
    idle.add(ran(0, 0.0, 0.0, 2.0, place=0))
    idle.add(ran(0, 0.0, 0.0, 4.0, rows=4))
    calls = [ran(0, 0, 0, 1.5), ran(1, 0, 0, 3.0, place=0), ran(2, 0, 0, 4.0, rows=4)]
    assert idle.contention(calls) == pytest.approx(8.5 / 7.0)
    # A shared streamed call was not measured apart: the direct one stands for it.
    assert idle.contention([ran(3, 0, 0, 5.0, rows=4, place=1)]) == pytest.approx(1.25)
    assert math.isnan(idle.contention([]))


@pytest.mark.parametrize(
    ("count", "secs"), [(8, 6.0), (9, 7.0), (10, 8.0), (11, 9.0), (3, 3.0)]
)
def test_work_of_a_batch_is_known_from_its_calls(count, secs):
    """Full calls of four take 3, single ones 1; three fill a padded call."""
    idle = steps.IdleWork()
    idle.add(ran(0, 0.0, 0.0, 1.0))
    idle.add(ran(0, 0.0, 0.0, 3.0, rows=4))
    assert idle.batch_secs(["bucket"] * count, rows=4) == secs
    assert idle.batch_secs(["bucket"] * count, rows=1) == count


@pytest.mark.parametrize("base", [0.0, 0.3, 2.0])
def test_scale_is_found_for_rollouts_that_grow_with_it(base):
    """R = base + 2.7 scale, to be 3.1 seconds."""
    tried = [(1.0, base + 2.7)]
    while abs(tried[-1][1] / 3.1 - 1) > 0.03:
        scale = live_module.next_scale(tried, 3.1)
        tried.append((scale, base + 2.7 * scale))
    assert len(tried) <= 3
    assert live_module.next_scale([(1.0, 2.0), (2.0, 1.9)], 4.0) > 2.0  # noise


def trajectory(member=0, reward=1.0, ids=(1, 2, 3)):
    ids = np.array(ids, np.int32)
    return Trajectory(
        key=TrajectoryKey(1, 0, member),
        ids=ids,
        loss_mask=ids > 1,
        logprobs=np.zeros(len(ids), np.float32),
        turns=1,
        stop_reason=StopReason.FINISHED,
        policy_version=0,
        reward=reward,
    )


@pytest.mark.parametrize(
    "other",
    [[], [trajectory(1)], [trajectory(reward=0.5)], [trajectory(ids=(1, 2, 4))]],
)
def test_rules_that_sampled_otherwise_are_not_called_identical(other):
    def found(trajectories):
        done = dataclasses.replace(step([], {}, 11.0), trajectories=trajectories)
        return live_module.Live(done, None, 0.0, 0.0, 0.0, 0.0, [], [])

    same = dict.fromkeys(RELEASES, found([trajectory()]))
    assert bench_report.identical(bench_report.Round(same, {}))
    for release in RELEASES:
        differs = same | {release: found(other)}
        assert not bench_report.identical(bench_report.Round(differs, {}))
