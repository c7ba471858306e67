"""Distillation as a run: a teacher, a student, and the order in which things happen."""

import asyncio
import dataclasses
import json

import echo_task
import numpy as np
import pytest

from thundersync_jax import train
from thundersync_jax.chat import byte_level
from thundersync_jax.envs.base import Observation
from thundersync_jax.errors import ConfigError, StreamError
from thundersync_jax.measure import replay
from thundersync_jax.metrics.writer import METRICS, read
from thundersync_jax.run import samples, teaching
from thundersync_jax.run.run import Run
from thundersync_jax.run.step import roll_out, run_step
from thundersync_jax.types import StopReason
from thundersync_jax.verify import verify
from thundersync_jax.view.display import Display

RELEASES = ("batch", "trajectory", "turn")
SAME = {"loss.advantage": "none", "loss.distill": "sampled_reverse_kl"}
SAME |= {"partial_groups": "keep", "warm_start.steps": 0}
pytestmark = pytest.mark.usefixtures("quick_programs")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The work directory of a run that has learnt its turns."""
    workdir = tmp_path_factory.mktemp("teacher")
    config = echo_task.replace(
        echo_task.small(), {"steps": 1, "seed": 5, "optim.learning_rate": 0.0}
    )
    train.train(config, workdir)
    return workdir


def student(teacher, **changes):
    given = SAME | {"teacher.workdir": str(teacher), "steps": 2}
    return echo_task.replace(echo_task.small(), given | changes)


def rolled_out(run, release="trajectory", step=1):
    """One step live, from the initial parameters."""
    params = run.initial_params()
    run.publish(params, 0)
    stream = run.new_stream(params, 0, release)
    return run_step(run, stream, run.train_jobs(step), 0)


def test_a_student_nears_its_teacher_under_every_rule(teacher, tmp_path):
    found = {}
    for release in RELEASES:
        config = student(teacher, release=release, steps=6)
        train.train(config, tmp_path / release)
        rows = found[release] = read(tmp_path / release)[1:]
        assert rows[-1]["teacher_kl"] < 0.95 * rows[0]["teacher_kl"]
        ratio = "teacher_tokens_over_trajectory_tokens"
        assert all(0 < row[ratio] <= 1.0 for row in rows)
        assert {"teacher_kl", ratio} < set(METRICS)
        spans = json.loads((tmp_path / release / "timeline.json").read_text())
        assert any(one.get("cat") == "teacher" for one in spans["traceEvents"])
    for release in RELEASES:
        kl = [row["teacher_kl"] for row in found[release]]
        # Each from its own parameters: rounding becomes another token some day.
        assert kl[:2] == pytest.approx([r["teacher_kl"] for r in found["batch"][:2]])


def test_scores_and_gradients_are_done_while_the_tool_runs(teacher, tmp_path):
    """A turn that calls a tool of 1 s is scored, and differentiated, before it ends."""

    class Slow(echo_task.Echo):
        async def step(self, action):
            await asyncio.sleep(1.0)
            return Observation("done")

    def make(env, seed):
        return echo_task.tasks(Slow)

    places = {"open_trajectories": 16, "rollout.slots": 16}
    config = student(teacher, **places, **{"rollout.cut_actions": "run"})
    with Run(config, tmp_path, make, on_line=lambda line: None) as run:
        rolled_out(run, release="turn")  # compiles
        done = rolled_out(run, release="turn", step=2)
        spans = run.timeline.spans(since=done.start_secs)
    tools = {s.lane: s for s in reversed(spans) if s.name == "tool"}  # of turn 0
    assert len(tools) == 16
    for lane, tool in tools.items():
        (score,) = [s for s in spans if s.lane == lane and s.name == "score t0"]
        (gradient,) = [s for s in spans if s.name == f"turn 0 {lane}"]
        assert tool.start_secs <= score.end_secs <= gradient.end_secs < tool.end_secs
    assert done.report.streamed_share > 0.5


def test_no_reward_is_needed(teacher, tmp_path):
    """A failing reward stopped a run that needs none (Tencent-Hunyuan/UniRL#232)."""
    lines = []

    class Printed(Display):
        def line(self, text):
            lines.append(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "Display", Printed)
        result = train.train(
            student(teacher, steps=3),
            tmp_path,
            environment=echo_task.scripted([RuntimeError("no such verifier")]),
        )
    assert result["updates"] == 3
    for row in read(tmp_path)[1:]:
        assert "reward_mean" not in row and "success_share" not in row
        assert row["failed_members"] == 0 and row["kept_members"] == 16
    told = [line for line in lines if "verdicts fail" in line]
    assert len(told) == 1
    assert "no such verifier" in told[0]


def test_missing_scores_are_refused(teacher, tmp_path):
    """Teacher fields were lost on the way and distillation was silently off
    (NousResearch/atropos#456): 4 trajectories, one without; and none at all."""
    config = student(teacher)
    with Run(config, tmp_path, on_line=lambda line: None) as run:
        given = rolled_out(run).trajectories[:4]
        made = samples.Samples(config, run.samples.width, lambda step, group: None)
        for one in given:
            made.whole(one)
        lost = dataclasses.replace(given[2], teacher=None)
        with pytest.raises(StreamError, match=r"member 2: the teacher's scores of"):
            made.whole(lost)
        known = given[3].teacher.known.copy()
        known[np.flatnonzero(known)[-1]] = False
        partly = dataclasses.replace(given[3].teacher, known=known)
        with pytest.raises(StreamError, match="scores of 1 of 6 trained tokens are"):
            made.whole(dataclasses.replace(given[3], teacher=partly))


def test_turns_of_a_failed_trajectory_are_replayed_as_far_as_scored(teacher, tmp_path):
    config = student(teacher, **{"rollout.cut_actions": "run"})
    with Run(config, tmp_path, on_line=lambda line: None) as run:
        first, *others = rolled_out(run).trajectories
        scores = dataclasses.replace(first.teacher, known=first.teacher.known & False)
        failed = StopReason.TEACHER_ERROR
        lost = dataclasses.replace(first, teacher=scores, stop_reason=failed)
        events = replay.with_turns(
            replay.in_order([lost, *others]), np.random.default_rng(0)
        )
        assert {e.kind for e in events if e.trajectory is lost} == {"fail"}
        found = replay.replay(run, run.initial_params(), events, "turn")
    assert found.report.failed_members == 1


def test_a_teacher_of_other_words_is_refused(teacher, tmp_path):
    """Ids were compared across vocabularies of one size (huggingface/trl#4562)."""
    other = tmp_path / "other"
    other.mkdir()
    for path in teacher.iterdir():
        if path.name != "vocabulary.json":
            (other / path.name).symlink_to(path)
    words = json.loads((teacher / "vocabulary.json").read_text())
    first, second = list(words)[65:67]
    words[first], words[second] = words[second], words[first]
    (other / "vocabulary.json").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match=first):
        teaching.load(student(other), byte_level.vocabulary(), print)


def test_a_missing_teacher_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no finished run.*teacher.config"):
        teaching.load(student(tmp_path), byte_level.vocabulary(), print)


def test_a_wider_teacher_is_cut_to_the_ids_of_its_student(teacher, tmp_path):
    """Padded vocabularies of unequal width failed (huggingface/trl#2215)."""
    wide = echo_task.replace(
        echo_task.small(warm_start_steps=0),
        {"steps": 1, "optim.learning_rate": 0.0, "model.vocab_size": 300},
    )
    train.train(wide, tmp_path / "wide")
    config = student(tmp_path / "wide", **{"loss.distill": "reverse_kl"})
    with Run(config, tmp_path, on_line=lambda line: None) as run:
        done = rolled_out(run)
    for one in done.trajectories:
        scores = one.teacher.logprobs[one.teacher.known]
        assert scores.shape[1] == 264
        np.testing.assert_allclose(np.exp(scores).sum(axis=1), 1.0, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss.distill": "forward_kl", "loss.distill_top_k": 8},
        {"loss.distill": "jensen_shannon", "share_prompt": "group"},
        {"loss.kl_coef": 0.1, "loss.entropy_coef": 0.01, "share_prompt": "group"},
    ],
    ids=["top-k", "full", "with a reference"],
)
def test_every_rule_makes_the_same_update(teacher, tmp_path, settings):
    config = student(teacher, **settings)
    found = verify(config, tmp_path, steps=1)
    assert found["passed"], found
    assert found["streamed_share"] > 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss.distill": "forward_kl", "loss.distill_top_k": 8},
        {"loss.advantage": "mean_only"},
    ],
    ids=["sampled", "top-k", "mixed"],
)
def test_a_shared_prompt_changes_no_update(teacher, tmp_path, settings):
    """The same trajectories, their prompts in every sample and once per group."""
    alone = student(teacher, **settings)
    together = echo_task.replace(alone, {"share_prompt": "group"})
    make = echo_task.scripted([1.0, 0.0, 0.0, 1.0])
    found = []
    for name, config in (("alone", alone), ("together", together)):
        with Run(config, tmp_path / name, make, on_line=lambda line: None) as run:
            params = run.initial_params()
            if not found:
                run.publish(params, 0)
                given = replay.in_order(roll_out(run, 1, 0)[0])
                events = replay.with_turns(given, np.random.default_rng(0))
            for release in config.releases:
                found.append(replay.replay(run, params, events, release))
    for other in found[1:]:
        gap = replay.relative_difference(other.gradient, found[0].gradient)
        assert gap < 1e-5
        assert other.report.loss == pytest.approx(found[0].report.loss, rel=1e-5)


def test_rewards_and_a_teacher_in_one_loss(teacher, tmp_path):
    settings = {"loss.advantage": "mean_only", "loss.distill_coef": 0.5}
    config = student(teacher, **settings, share_prompt="group")
    found = verify(
        config, tmp_path, steps=1, environment=echo_task.scripted([1.0, 0.0, 0.0, 1.0])
    )
    assert found["passed"], found


def test_another_prompt_than_the_tasks_is_refused(teacher, tmp_path):
    class Polite(echo_task.Echo):
        async def start(self, task):
            return "please " + await super().start(task)

    config = student(teacher, share_prompt="group")
    refused = pytest.raises(ConfigError, match="begins with another prompt than")

    def make(env, seed):
        return echo_task.tasks(Polite)

    with Run(config, tmp_path, make, on_line=lambda line: None) as run, refused:
        rolled_out(run)
