"""The bench of distillation: what turn release costs, and what the teacher ran."""

import gc
import json
import math
import pathlib
import sys
import threading
import time

import echo_task
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from thundersync_jax import bench as bench_module
from thundersync_jax import train
from thundersync_jax.bench import bench, contestants
from thundersync_jax.config import EnvConfig, LatencyConfig, LossConfig, TeacherConfig
from thundersync_jax.config.settings import replace
from thundersync_jax.envs.letters import LettersOptions
from thundersync_jax.flags import load_config
from thundersync_jax.measure import bench_report, steps
from thundersync_jax.measure import live as peak_bytes
from thundersync_jax.measure.live import PeakBytes, alive_bytes
from thundersync_jax.metrics.learner_clock import Ran
from thundersync_jax.models import transformer
from thundersync_jax.stream import mesh
from thundersync_jax.stream.schedule import Call, Item, Prompt, TurnCall

pytestmark = pytest.mark.usefixtures("quick_programs")

ROOT = pathlib.Path(__file__).parents[1]
RELEASES = ("batch", "trajectory", "turn")
ASKED = {"step_secs_median", "learner_secs", "tail_secs", "peak_bytes"}
ASKED |= {"teacher_tokens_over_trajectory_tokens"}
PROMPT, ACTION, ANSWER = 8, 4, 4
TEACHER = replace(
    echo_task.small(warm_start_steps=0),
    {
        "seed": 1000,
        "steps": 1,
        "env": EnvConfig(
            factory="thundersync_jax.envs.letters:make",
            options=LettersOptions(
                prompt_tokens=PROMPT,
                calls=(1, 2),
                observation_tokens=(ANSWER, ANSWER),
                train_tasks=16,
            ),
        ),
        "loss": LossConfig(advantage="mean_only"),
        "rollout.context_tokens": 28,
        "rollout.prefill_buckets": (28,),
        "rollout.gradient_buckets": (28,),
        "rollout.turn_tokens": ACTION,
        "rollout.turns": 3,
        "rollout.cut_actions": "run",
        "rollout.slots": 16,
        "rollout.groups_per_step": 2,
        "mesh.rows_per_call": 1,
        "evaluation.every_steps": 0,
    },
)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A student, and the teacher it needs."""
    workdir = tmp_path_factory.mktemp("teacher")
    train.train(TEACHER, workdir)
    return replace(
        TEACHER,
        {
            "seed": 0,
            "loss": LossConfig(advantage="none", distill="sampled_reverse_kl"),
            "partial_groups": "keep",
            "teacher": TeacherConfig(workdir=str(workdir)),
            "env.tool_latency": LatencyConfig("constant", median_secs=0.03),
        },
    )


def watched(config, workdir, **options):
    """The figures of a bench, and the rounds behind them."""
    seen = []

    def figures(rounds, facts):
        seen.extend(rounds)
        return report_figures(rounds, facts)

    report_figures = bench_report.figures
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_module.bench_report, "figures", figures)
        return bench(config, workdir, **options), seen


@pytest.fixture(scope="module")
def result(config, tmp_path_factory):
    return watched(config, tmp_path_factory.mktemp("bench"), steps=2)


def test_the_rules_without_rewards_are_measured(result):
    found, _ = result
    assert json.loads(json.dumps(found)) == found
    assert tuple(found["releases"]) == RELEASES
    assert found["identical_trajectories"]
    assert found["compiles_after_warmup"] == 0
    assert found["failed_members"] == 0
    for release in found["releases"].values():
        assert release.keys() > ASKED
        assert release["contention"] > 0
        assert release["measured_over_predicted"] >= 1 - 1e-9
        assert release["tail_secs"] >= release["boundary_secs"] > 0


def test_every_token_goes_through_the_teacher_once(result):
    """All but the last sampled one, which predicts nothing that anybody asks for."""
    found, rounds = result
    for name in RELEASES:
        for one in rounds:
            trajectories, cost = one.lives[name].step.trajectories, one.costs[name]
            last = [np.flatnonzero(t.loss_mask)[-1] for t in trajectories]
            assert cost.teacher_tokens == sum(last)
            assert cost.trajectory_tokens == sum(len(t.ids) for t in trajectories)
        ratio = found["releases"][name]["teacher_tokens_over_trajectory_tokens"]
        assert 0.9 < ratio < 1


def test_turns_are_computed_once_and_all_but_the_last_replayed(result):
    _, rounds = result
    for one in rounds:
        trajectories = one.lives["turn"].step.trajectories
        turns = sum(t.turns for t in trajectories)
        calls = [ran.call for ran in one.lives["turn"].step.calls]
        assert sum(not call.replay for call in calls) == turns
        assert sum(call.replay for call in calls) == turns - len(trajectories)
        assert len(one.lives["trajectory"].step.calls) <= len(trajectories)


def test_open_trajectories_take_room(result):
    """At least a sum, keys and values and their cotangents, beside the batch's sum."""
    found, rounds = result
    peaks = {name: found["releases"][name]["peak_bytes"] for name in RELEASES}
    model = TEACHER.model
    shapes = jax.eval_shape(lambda: transformer.init(model, jax.random.key(0)))
    params = sum(4 * x.size for x in jax.tree.leaves(shapes))
    state = 2 * model.layers * model.kv_heads * model.head_dim * 28 * (4 + 4)
    assert peaks["turn"] - peaks["trajectory"] >= params + state
    assert all(peak >= 6 * params for peak in peaks.values())  # two optimizer states
    assert all(r.lives[n].step.gradient is None for r in rounds for n in RELEASES)


def test_a_shared_prompt_is_benched_too(config, tmp_path, capsys):
    config = replace(config, {"share_prompt": "group", "mesh.rows_per_call": 2})
    found, rounds = watched(config, tmp_path, steps=1)
    assert all(found["releases"][name]["contention"] > 0 for name in RELEASES)
    for live in rounds[0].lives.values():
        prompts = [ran for ran in live.step.calls if isinstance(ran.call, Prompt)]
        assert len(prompts) == config.rollout.groups_per_step
    said = capsys.readouterr().out
    assert "Work, memory and the teacher" in said


def test_with_exact_sums_plain_ones_take_part_and_turns_do_not(config):
    names = [one.name for one in contestants(replace(config, {"accumulator": "exact"}))]
    assert names == ["batch", "trajectory", bench_report.PLAIN]


def test_tokens_are_added_up_and_the_largest_peak_counts():
    costs = [
        bench_report.Cost(10, 5, 10),
        bench_report.Cost(30, 1, 30),
        bench_report.Cost(20, 3, 20),
    ]
    assert bench_report._teaching(costs) == {
        "peak_bytes": 30,
        "teacher_tokens_over_trajectory_tokens": 0.15,
    }
    assert bench_report._teaching([]) == {}


def test_contention_tells_turns_from_replays_and_leaves_prompts_out():
    def ran(call, secs):
        return Ran(call, 0.0, 0.0, secs)

    def turn(replay, group=0):
        item = Item(group, 0, 0, ("tree", "shapes", "prompt", group))
        return TurnCall(0, item, 0, replay)

    idle = steps.IdleWork()
    idle.add(ran(turn(False, "made up"), 1.0))
    idle.add(ran(turn(True, "made up"), 3.0))
    idle.add(ran(Prompt("made up", (0,), True), 9.0))
    calls = [ran(turn(False), 2.0), ran(turn(False), 2.0), ran(turn(True), 3.0)]
    calls += [ran(Prompt(0, (0,), True), 100.0)]
    assert idle.contention(calls) == pytest.approx(7 / 5)
    assert math.isnan(idle.contention(calls[3:]))
    # Whole samples that continue a prompt, of whatever group.
    item = Item("made up", 0, 0, ("tree", "shapes", "prompt", "made up"))
    idle.add(ran(Call(0, (item,), None, 1), 5.0))
    assert idle.batch_secs([("tree", "shapes", "prompt")] * 2, rows=1) == 10.0


def test_each_buffer_is_counted_once_on_the_fullest_device():
    devices = first, second = jax.devices()[:2]
    gc.collect()  # what other tests have left and nobody holds
    before = alive_bytes([first]), alive_bytes([second])
    # More than whatever other tests have left there.
    zeros = np.zeros((2, max(before) // 8 + 1000), np.float32)
    size = zeros.nbytes

    def put(place):
        # Aligned by chance, numpy's memory itself would be the buffer of all three.
        return jax.jit(lambda: jnp.zeros(zeros.shape), out_shardings=place)()

    one = put(SingleDeviceSharding(first))
    assert alive_bytes(devices) == alive_bytes([first]) == before[0] + size
    assert alive_bytes([second]) == before[1]
    both = mesh.make_mesh(replica=2, devices=devices)
    halves, copies = (
        put(NamedSharding(both, spec))
        for spec in (PartitionSpec("replica"), PartitionSpec())
    )
    jax.block_until_ready((halves, copies))
    views = mesh.split({"x": copies}, None)[0]  # of the same buffers
    assert len(views) == 2 and halves.sharding.device_set == set(devices)
    assert alive_bytes([second]) == before[1] + size // 2 + size
    assert alive_bytes(devices) == before[0] + size + size // 2 + size
    del one, halves, copies, views
    assert (alive_bytes([first]), alive_bytes([second])) == before


def test_counting_waits_for_no_program():
    """A program that is queued has no room for its result yet."""

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 100, lambda _, y: y @ x * 1e-3 + y, x)

    x = jax.device_put(np.ones((500, 500), np.float32))
    jax.block_until_ready(slow(x))
    before = alive_bytes(x.devices())
    running, queued = slow(x), slow(x)
    assert alive_bytes(x.devices()) == before + 2 * x.nbytes
    assert not running.is_ready()
    jax.block_until_ready(queued)


def test_the_peak_is_the_most_that_was_seen(monkeypatch):
    seen = iter([5, 9, 7])
    monkeypatch.setattr(peak_bytes, "alive_bytes", lambda devices: next(seen))
    with PeakBytes(jax.devices()[:1]) as peak:
        for _ in range(3):
            peak.look()
    assert peak.bytes == 9
    with PeakBytes(()) as nothing:
        nothing.look()
    assert nothing.bytes == 0


def test_a_device_that_tells_is_asked_meanwhile():
    class Device:
        in_use = 100

        def memory_stats(self):
            return {"bytes_in_use": self.in_use, "peak_bytes_in_use": 10**9}

    small, large = Device(), Device()
    with PeakBytes((small, large)) as peak:
        large.in_use = 500
        deadline = time.monotonic() + 10
        while peak.bytes < 500 and time.monotonic() < deadline:
            time.sleep(0.001)
        large.in_use = 200
    assert peak.bytes == 500
    assert all(thread.name != "peak-bytes" for thread in threading.enumerate())


@pytest.mark.parametrize("turns", [2, 4, 8])
def test_variants_have_trajectories_of_one_length(turns, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = load_config(f"{ROOT}/configs/bench_opd.py:turns{turns}")
    options, rollout = found.env.options, found.rollout
    (answer,) = set(options.observation_tokens)
    assert options.calls == (turns - 1, turns - 1) and rollout.turns == turns
    length = options.prompt_tokens + turns * rollout.turn_tokens + (turns - 1) * answer
    assert 250 <= length <= rollout.context_tokens == 256
    # Turns are not padded, or turn release would look worse than it is.
    assert {
        options.prompt_tokens + rollout.turn_tokens,
        answer + rollout.turn_tokens,
    } < set(rollout.segment_lengths)
