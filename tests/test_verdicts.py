"""What a verdict says beside its reward: parts, a log, and files."""

import contextlib
import gzip
import io
import json
import math
import os
import threading
from pathlib import Path

import echo_task
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_fakes import FakeEnvironment, key, of_kind, open_pool, roll
from test_agent import play

from thundersync_jax import evaluate, show, train
from thundersync_jax.config import MetricsConfig
from thundersync_jax.config.settings import replace
from thundersync_jax.envs.base import Verdict, judged
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics import read, records
from thundersync_jax.rollout.commands import Stopped
from thundersync_jax.rollout.events import Failed, Rewarded
from thundersync_jax.types import StopReason, Trajectory, TrajectoryKey

pytestmark = pytest.mark.usefixtures("quick_programs")

WRONG = {
    "expected a finite number": [
        Verdict(None),
        Verdict(float("nan")),
        Verdict("1"),
        Verdict(Verdict(1.0)),
        (1.0, {"format": 0.5}),
    ],
    "expected parts and artefacts by name": [
        Verdict(1.0, [0.5]),
        Verdict(1.0, None),
        Verdict(1.0, artefacts=[b""]),
    ],
    "expected a finite number under a name": [
        Verdict(1.0, {"format": None}),
        Verdict(1.0, {"format": math.inf}),
        Verdict(1.0, {"format": "1"}),
        Verdict(1.0, {"": 1.0}),
        Verdict(1.0, {3: 1.0}),
        Verdict(1.0, {"two words": 1.0}),
        Verdict(1.0, {"mean": 1.0}),
    ],
    "expected bytes or a path under a name": [
        Verdict(1.0, artefacts={"a": "text"}),
        Verdict(1.0, artefacts={"a": None}),
        Verdict(1.0, artefacts={"": b""}),
        Verdict(1.0, artefacts={"/etc/passwd": b""}),
        Verdict(1.0, artefacts={"a/../../b": b""}),
        Verdict(1.0, artefacts={"a\0": b""}),
        Verdict(1.0, artefacts={5: b""}),
    ],
    "gave the log": [Verdict(1.0, log=b"bytes"), Verdict(1.0, log=None)],
}


@pytest.mark.parametrize(
    ("text", "verdict"),
    [(text, verdict) for text, verdicts in WRONG.items() for verdict in verdicts],
)
def test_what_is_no_verdict_is_an_invalid_reward(text, verdict):
    with pytest.raises(Stopped, match=text) as stopped:
        play(FakeEnvironment(reward=verdict))
    assert stopped.value.stop_reason is StopReason.INVALID_REWARD
    assert "\n" not in stopped.value.reason


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.binary(),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(st.text(max_size=3), inner, max_size=2)
            | st.builds(Verdict, inner, inner, inner, inner)
        ),
        max_leaves=5,
    )
)
def test_whatever_verify_returns_is_a_verdict_or_one_line(returned):
    verdict = judged(returned)
    if isinstance(verdict, Verdict):
        assert math.isfinite(verdict.reward)
        json.dumps([verdict.parts, verdict.log], allow_nan=False)
    else:
        assert "\n" not in verdict and "expected" in verdict


def test_a_verdict_is_part_of_its_trajectory():
    verdict = Verdict(
        np.float32(2.5), {"tests/unit": np.int64(3), "style": True}, "2 of 3\npassed"
    )
    with open_pool(lambda member: FakeEnvironment(reward=verdict)) as pool:
        for event in of_kind(roll(pool, 3), Rewarded):
            assert event.reward == event.trajectory.reward == 2.5
            assert event.trajectory.parts == {"tests/unit": 3.0, "style": 1.0}
            assert event.trajectory.log == "2 of 3\npassed"


def test_a_long_log_loses_its_middle():
    verdict = judged(Verdict(0.0, log="a" * 200_000 + "b" * 200_000))
    assert len(verdict.log) < 101_000
    assert verdict.log.startswith("aaa") and verdict.log.endswith("bbb")
    assert "300000 characters are left out" in verdict.log


def kept(tmp_path, most_bytes=10**6):
    lines = []
    artefacts = records.Artefacts(tmp_path, most_bytes, lines.append)
    artefacts.begin("step_000003")
    return artefacts, lines


def files(folder):
    return {
        str(path.relative_to(folder)): gzip.decompress(path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_artefacts_are_files_of_their_trajectory(tmp_path):
    artefacts, lines = kept(tmp_path)
    source = tmp_path / "out.log"
    source.write_bytes(b"x" * 3_000_000)
    artefacts.keep(key(1, 0, 3), {"patch.diff": b"+1", "logs/test.log": source})
    artefacts.keep(key(0, 2, 3), {"patch.diff": b"+2"})
    folder = tmp_path / "artefacts" / "step_000003"
    assert files(folder) == {
        "g0m1/patch.diff.gz": b"+1",
        "g0m1/logs/test.log.gz": source.read_bytes(),
        "g2m0/patch.diff.gz": b"+2",
    }
    assert lines == []
    with pytest.raises(FileNotFoundError):
        artefacts.keep(key(0, 3, 3), {"gone": tmp_path / "nowhere"})
    artefacts.begin("step_000003")  # again, after a kill
    assert not folder.exists()


def test_a_budget_bounds_the_bytes_of_a_step(tmp_path):
    artefacts, lines = kept(tmp_path, 10_000)
    noise = np.random.default_rng(0).bytes(3_000)
    for member in range(6):
        artefacts.keep(key(member, 0, 3), {"noise": noise, "text": b"a" * 10**5})
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in stored) <= 10_000
    assert all(path.name.endswith(".gz") for path in stored) and len(stored) >= 6
    assert "metrics.artefact_bytes 10000" in lines[0] and "noise of train" in lines[0]
    artefacts.begin("step_000004")
    artefacts.keep(key(0, 0, 4), {"noise": noise})
    assert (tmp_path / "artefacts/step_000004/g0m0/noise.gz").exists()
    none, _ = kept(tmp_path, 0)
    none.keep(key(0, 0, 3), {"a": b""})
    assert not [
        p for p in (tmp_path / "artefacts/step_000003").rglob("*") if p.is_file()
    ]


def test_a_disk_that_takes_no_artefact_fails_nobody(tmp_path):
    (tmp_path / "artefacts").write_text("no folder")
    artefacts, lines = kept(tmp_path)
    artefacts.keep(key(0, 0, 3), {"a": b"1"})
    assert lines[0].startswith("artefacts cannot be written")


def test_artefacts_are_taken_before_the_environment_is_closed(tmp_path):
    """Off the event loop, and under the deadline of the verdict."""
    artefacts, _ = kept(tmp_path)
    threads = set()

    def keep(*arguments):
        threads.add(threading.current_thread())
        artefacts.keep(*arguments)

    class Closing(FakeEnvironment):
        def __init__(self, member):
            super().__init__()
            self.path = tmp_path / f"{member}.txt"

        async def verify(self):
            self.path.write_bytes(b"found")
            missing = {"b": tmp_path / "missing"} if self.path.name == "2.txt" else {}
            return Verdict(1.0, artefacts={"a": self.path} | missing)

        async def close(self):
            self.path.unlink()

    with open_pool(Closing, keep=keep) as pool:
        events = roll(pool, 4, step=3)
    assert len(of_kind(events, Rewarded)) == 3
    (failed,) = of_kind(events, Failed)
    assert failed.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert "verify() raised FileNotFoundError" in failed.reason
    found = files(tmp_path / "artefacts" / "step_000003")
    assert found == {f"g0m{member}/a.gz": b"found" for member in range(4)}
    assert not any(thread.name == "rollouts" for thread in threads)


def trajectory(member=0, step=1, **changes):
    ids = np.arange(200, dtype=np.int32)
    mask = ids > 20
    reason = StopReason.FINISHED
    logprobs = np.where(mask, np.float32(-0.5), np.float32(0))
    where = TrajectoryKey(step, 0, member)
    return Trajectory(where, ids, mask, logprobs, 1, reason, 0, 1.0, **changes)


def test_records_keep_parts_and_logs_and_do_without(tmp_path):
    full = trajectory(parts={"a": 0.5}, log="é\nline \ud800")
    path = records.write_rollouts(tmp_path, 1, [full, trajectory(1)], {})
    first, second = (record.trajectory for record in records.read_rollouts(path))
    assert first.parts == full.parts and first.log == full.log
    assert second.parts == {} and second.log == ""
    older = [json.loads(line) for line in path.read_text().splitlines()]
    for line in older:
        del line["parts"], line["log"]
    path.write_text("".join(json.dumps(line) + "\n" for line in older))
    assert all(record.trajectory.parts == {} for record in records.read_rollouts(path))
    for wrong in ({"parts": {"a": "x"}}, {"parts": 5}, {"log": 5}):
        path.write_text(json.dumps(older[0] | wrong) + "\n")
        with pytest.raises(ConfigError, match="is no trajectory"):
            records.read_rollouts(path)


def test_compressed_rollouts_are_the_same_and_take_less(tmp_path):
    made = [trajectory(member) for member in range(8)]
    plain = records.write_rollouts(tmp_path, 1, made, {})
    text = plain.read_bytes()
    packed = records.write_rollouts(tmp_path, 1, made, {}, compressed=True)
    assert packed.name == "step_000001.jsonl.gz" and not plain.exists()
    assert gzip.decompress(packed.read_bytes()) == text
    assert packed.stat().st_size < len(text) / 3
    before = packed.read_bytes()
    records.write_rollouts(tmp_path, 1, made, {}, compressed=True)
    assert (
        packed.read_bytes() == before == records.rollouts_path(tmp_path, 1).read_bytes()
    )
    assert records.recorded_steps(tmp_path) == [1]
    step, found = records.read_step(tmp_path)
    assert step == 1 and len(found) == 8
    packed.write_bytes(before[: len(before) // 2])
    with pytest.raises(ConfigError, match="cannot be read to its end"):
        records.read_step(tmp_path)
    packed.write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot be read to its end"):
        records.read_step(tmp_path)
    records.write_rollouts(tmp_path, 1, made, {})
    assert plain.read_bytes() == text and not packed.exists()


@pytest.mark.parametrize("compressed", [False, True])
def test_the_oldest_rollouts_make_room(compressed, tmp_path):
    def write(step, most_bytes=None):
        made = [trajectory(step=step)]
        path = records.write_rollouts(
            tmp_path, step, made, {}, compressed=compressed, most_bytes=most_bytes
        )
        return path.stat().st_size

    size = max(write(step) for step in range(1, 6))
    write(6, 3 * size + 100)
    assert records.recorded_steps(tmp_path) == [4, 5, 6]
    write(7, 1)  # the newest stays
    assert records.recorded_steps(tmp_path) == [7]


@pytest.mark.parametrize(
    "wrong", [{"rollouts": "zip"}, {"rollout_bytes": 0}, {"artefact_bytes": -1}]
)
def test_wrong_settings_of_what_is_kept_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"metrics.{next(iter(wrong))} is"):
        MetricsConfig(**wrong)


def judging():
    class Judged(echo_task.Echo):
        async def verify(self):
            right = await super().verify()
            return Verdict(
                6 * right,
                {"letters": right, "short": float(len(self.answer) < 3)},
                f"wanted {self.word[::-1]}",
                {"answer.txt": self.answer.encode(errors="replace")},
            )

    return lambda env, seed: echo_task.tasks(Judged)


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    changes = {"steps": 2, "metrics.rollouts": "gzip", "evaluation.every_steps": 1}
    config = replace(echo_task.SCRIPTED, changes)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train.train(config, workdir, environment=judging())
    return config, workdir, out.getvalue()


def test_means_of_parts_are_metrics_of_each_phase(run):
    """PrimeIntellect-ai/prime-rl#741, #884: rewards that are neither 0 nor 1."""
    _, workdir, said = run
    rows = read(workdir)
    for row in rows[1:]:
        _, found = records.read_step(workdir, row["step"])
        for part in ("letters", "short"):
            values = [record.trajectory.parts[part] for record in found]
            assert row[f"reward_{part}"] == pytest.approx(np.mean(values))
        assert row["reward_mean"] == pytest.approx(6 * row["reward_letters"])
    for row in rows:
        expected = 6 * row["heldout_reward_letters"]
        assert row["heldout_reward"] == pytest.approx(expected)
        assert 0 <= row["heldout_reward_short"] <= 1
    assert said.count("mean reward") == 3
    assert said.count("(letters 0.") + said.count("(letters 1.") >= 3


def test_a_run_keeps_artefacts_by_step_and_trajectory(run):
    config, workdir, _ = run
    folder = workdir / "artefacts"
    names = ["heldout_000000", "heldout_000001", "heldout_000002"]
    assert sorted(os.listdir(folder)) == [*names, "step_000001", "step_000002"]
    for step in (1, 2):
        found = files(folder / f"step_{step:06d}")
        expected = {f"g{g}m{m}/answer.txt.gz" for g in range(4) for m in range(4)}
        assert found.keys() == expected
    assert len(files(folder / names[0])) == config.evaluation.questions
    assert sorted(p.name for p in (workdir / "rollouts").iterdir()) == [
        "step_000001.jsonl.gz",
        "step_000002.jsonl.gz",
    ]


def test_show_and_evaluate_tell_parts_and_logs(run, capsys):
    config, workdir, _ = run
    shown = show.show(workdir, step=1, group=0, member=2)["trajectory"]
    out = capsys.readouterr().out
    assert shown["parts"].keys() == {"letters", "short"}
    assert shown["log"].startswith("wanted ") and shown["log"] in out
    assert "(letters " in out
    result = evaluate.evaluate(config, workdir, samples=1, environment=judging())
    assert result["reward"] == pytest.approx(6 * result["parts"]["letters"])
    assert "(letters " in capsys.readouterr().out
    assert (workdir / "artefacts" / "evaluated_000002").is_dir()


def test_rollout_files_can_be_left_out(tmp_path):
    config = replace(echo_task.SCRIPTED, {"metrics.rollouts": "off"})
    train.train(config, tmp_path, environment=echo_task.make)
    assert not Path(tmp_path, "rollouts").exists()
    assert not Path(tmp_path, "artefacts").exists()
