"""Recorded trajectories: nothing is lost in the file, and `show` reads it."""

import dataclasses
import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest

from thundersync_jax import flags, show
from thundersync_jax.chat import byte_level
from thundersync_jax.envs.base import Action
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics import records
from thundersync_jax.types import StopReason, Trajectory, TrajectoryKey


def trajectory(
    group=0, member=0, reward=1.0, step=12, prompt="12+7", stop=StopReason.FINISHED
):
    parts = [
        (byte_level.render_prompt(prompt), False),
        (byte_level.render_action(Action("call", prompt)), True),
        (byte_level.render_observation("19"), False),
        (byte_level.render_action(Action("answer", "19")), True),
    ]
    ids = np.concatenate([part for part, _ in parts])
    mask = np.concatenate([np.full(len(part), trained) for part, trained in parts])
    rng = np.random.default_rng([group, member])
    logprobs = np.where(mask, -rng.exponential(size=len(ids)), 0).astype(np.float32)
    times = {"queued": 1.0, "started": 1.5, "completed": 2.25, "verified": 2.75}
    key = TrajectoryKey(step, group, member)
    reason = "verify() timed out" if reward is None else ""
    return Trajectory(key, ids, mask, logprobs, 2, stop, 7, reward, reason, times)


def with_credit(one):
    u, v = np.random.default_rng(0).normal(size=(2, len(one.ids))).astype(np.float32)
    return dataclasses.replace(one, turn_weights=u, turn_credits=v)


def assert_same(one, other):
    for field, value in vars(one).items():
        restored = getattr(other, field)
        if isinstance(value, np.ndarray):
            assert restored.dtype == value.dtype
            assert restored.tobytes() == value.tobytes()
        else:
            assert restored == value


def test_everything_about_a_trajectory_is_restored(tmp_path):
    written = [
        trajectory(1, 0),
        trajectory(0, 1, reward=None, stop=StopReason.TIMEOUT),
        with_credit(trajectory(0, 0, reward=0.1)),
    ]
    path = records.write_rollouts(tmp_path, 12, written, {(0, 0): 0.1 + 0.2})
    assert path == tmp_path / "rollouts" / "step_000012.jsonl"
    assert list(path.parent.iterdir()) == [path]
    read = records.read_rollouts(path)
    for before, after in zip(reversed(written), read, strict=True):
        assert_same(before, after.trajectory)
    assert [record.advantage for record in read] == [0.1 + 0.2, None, None]
    text = "<user>12+7<assistant><call>12+7<end><tool>19<assistant>19<end>"
    assert read[0].text == text
    assert byte_level.decode(read[0].prompt_ids) == "<user>12+7<assistant>"
    assert read[0].prompt_text == "12+7"
    assert [piece.tokens for piece in read[0].pieces] == [
        1,
        4,
        1,
        1,
        4,
        1,
        1,
        2,
        1,
        2,
        1,
    ]


def test_log_probabilities_are_restored_to_the_bit(tmp_path):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    values = values[~np.isnan(values)]
    values[:4] = [-0.0, np.inf, -np.inf, np.finfo(np.float32).smallest_subnormal]
    count = len(values)
    odd = Trajectory(
        TrajectoryKey(3, 0, 0),
        np.zeros(count, np.int32),
        np.ones(count, bool),
        values,
        1,
        StopReason.FINISHED,
        0,
    )
    path = records.write_rollouts(tmp_path, 3, [odd], {})
    (record,) = records.read_rollouts(path)
    assert record.trajectory.logprobs.tobytes() == values.tobytes()


def test_the_file_is_plain_json_without_nan(tmp_path):
    odd = trajectory(reward=math.nan)
    path = records.write_rollouts(tmp_path, 12, [odd], {(0, 0): math.inf})

    def refuse(name):
        raise AssertionError(name)

    (line,) = path.read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    assert record["reward"] is None
    assert record["advantage"] is None


def test_a_member_without_tokens_is_recorded(tmp_path):
    nothing = np.zeros(0, np.int32)
    failed = Trajectory(
        key=TrajectoryKey(12, 0, 0),
        ids=nothing,
        loss_mask=nothing.astype(bool),
        logprobs=nothing.astype(np.float32),
        turns=0,
        stop_reason=StopReason.ENVIRONMENT_ERROR,
        policy_version=7,
        reason="start() raised OSError",
    )
    records.write_rollouts(tmp_path, 12, [failed], {})
    _, (record,) = records.read_step(tmp_path)
    assert_same(failed, record.trajectory)
    show.show(tmp_path, group=0)


class SpeaksOnce(byte_level.ByteLevel):
    """Fails at its second trajectory."""

    def __init__(self):
        self._calls = iter([None])

    def special(self, ids):
        next(self._calls)
        return super().special(ids)


def test_a_write_that_is_cut_off_leaves_the_last_complete_file(tmp_path):
    path = records.write_rollouts(tmp_path, 12, [trajectory()], {})
    before = path.read_bytes()
    with pytest.raises(StopIteration):
        pair = [trajectory(), trajectory(0, 1)]
        records.write_rollouts(tmp_path, 12, pair, {}, chat=SpeaksOnce())
    assert path.read_bytes() == before
    with pytest.raises(StopIteration):
        pair = [trajectory(step=13), trajectory(0, 1, step=13)]
        records.write_rollouts(tmp_path, 13, pair, {}, chat=SpeaksOnce())
    assert records.recorded_steps(tmp_path) == [12]


def test_a_trajectory_of_another_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"train step 12 .* records of step 11"):
        records.write_rollouts(tmp_path, 11, [trajectory()], {})


def test_a_missing_step_names_its_neighbours(tmp_path):
    with pytest.raises(ConfigError, match=r"no trajectories in .*rollouts"):
        records.read_step(tmp_path, 5)
    for step in (2, 4, 9):
        records.write_rollouts(tmp_path, step, [trajectory(step=step)], {})
    with pytest.raises(ConfigError, match=r"step 5 has .* from 2 to 9.* 4 and 9"):
        records.read_step(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"nearest there: 9"):
        records.read_step(tmp_path, 100)
    assert records.read_step(tmp_path)[0] == 9


def test_a_damaged_line_is_named(tmp_path):
    pair = [trajectory(), trajectory(0, 1)]
    path = records.write_rollouts(tmp_path, 12, pair, {})
    path.write_text(path.read_text()[:-200])
    with pytest.raises(ConfigError, match=r"step_000012.jsonl:2 is no trajectory"):
        records.read_rollouts(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward", "high"),
        ("advantage", [1]),
        ("turns", None),
        ("times", {"a": "b"}),
        ("pieces", None),
        ("text", None),
    ],
)
def test_a_value_of_another_type_is_named(capsys, tmp_path, name, value):
    path = records.write_rollouts(tmp_path, 12, [trajectory()], {})
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    status, _, errors = run_show(capsys, tmp_path)
    assert status == 2 and errors.count("\n") == 1
    assert "step_000012.jsonl:1 is no trajectory (TypeError:" in errors


def test_text_and_ids_are_cut_alike_or_the_line_is_named(tmp_path):
    path = records.write_rollouts(tmp_path, 12, [trajectory()], {})
    content = json.loads(path.read_text())
    tokens, letters = len(content["ids"]), len(content["text"])
    path.write_text(json.dumps(content | {"pieces": [[tokens, letters, 0]]}))
    assert records.read_rollouts(path)[0].text == content["text"]
    for cut in ([tokens, letters - 1, 0], [tokens + 1, letters, 0]):
        path.write_text(json.dumps(content | {"pieces": [cut]}))
        with pytest.raises(ConfigError, match="do not cover text and ids"):
            records.read_rollouts(path)


def run_show(capsys, workdir, *arguments):
    with pytest.raises(SystemExit) as status:
        flags.run(
            show.show,
            flags=show.FLAGS,
            needs=("workdir",),
            argv=["show", f"--workdir={workdir}", *arguments],
        )
    output = capsys.readouterr()
    return status.value.code, output.out.splitlines(), output.err


def test_mean_reward_is_over_the_rewards_that_came(capsys, tmp_path):
    """A reward metric with missing values is a plain mean, NaN (huggingface/trl#4501).

    .5, NaN, NaN, .8, .6, .7: mean .65 over 4 of 6.
    """
    rewards = [0.5, None, math.nan, 0.8, 0.6, 0.7]
    members = [trajectory(0, m, reward) for m, reward in enumerate(rewards)]
    records.write_rollouts(tmp_path, 12, members, {})
    mean = records.known_mean(rewards)
    assert mean == (pytest.approx(0.65, abs=1e-12), 4, 6)
    status, lines, _ = run_show(capsys, tmp_path, "--json")
    assert status == 0
    assert json.loads(lines[-1])["reward"] == mean._asdict()
    assert "mean reward 0.650 over 4 of 6" in lines


def write_step(workdir, groups=3, members=16, prompt="12+7"):
    rng = np.random.default_rng(0)
    stops = list(StopReason)
    written, advantages = [], {}
    for group in range(groups):
        for member in range(members):
            stop = stops[rng.integers(len(stops))]
            reward = None if stop.failed else -rng.random() / 3
            written.append(
                trajectory(group, member, reward, prompt=f"{prompt}+{group}", stop=stop)
            )
            if reward is not None:
                advantages[group, member] = reward - 1 / 3
    records.write_rollouts(workdir, 12, written, advantages)


def test_tables_fit_a_hundred_columns(capsys, tmp_path):
    write_step(tmp_path, prompt="a question of some length, " * 10)
    for arguments in (["--step=12"], ["--group=2"]):
        _, lines, _ = run_show(capsys, tmp_path, *arguments)
        assert max(map(len, lines)) <= 100


def test_a_group_lists_its_members_and_a_member_stands_alone(capsys, tmp_path):
    write_step(tmp_path, members=4)
    _, table, _ = run_show(capsys, tmp_path)
    assert [line.split()[:2] for line in table[-4:-1]] == [
        [str(group), f"12+7+{group}"] for group in range(3)
    ]
    _, group, _ = run_show(capsys, tmp_path, "--group=1")
    assert sum(line.startswith("train step 12 group 1") for line in group) == 4
    _, lines, _ = run_show(capsys, tmp_path, "--group=1", "--member=2", "--json")
    assert lines[0] == "train step 12 group 1 member 2"
    assert lines[-5:-1] == [
        "  observed  <user>12+7+1<assistant>",
        "  trained   <call>12+7+1<end>",
        "  observed  <tool>19<assistant>",
        "  trained   19<end>",
    ]
    facts = json.loads(lines[-1])["trajectory"]
    assert (facts["group"], facts["member"], facts["trained_tokens"]) == (1, 2, 11)


def test_the_worst_and_the_failed_are_shown_whole(capsys, tmp_path):
    write_step(tmp_path)
    _, lines, _ = run_show(capsys, tmp_path, "--worst=3", "--json")
    _, everything, _ = run_show(capsys, tmp_path, "--json")
    members = [
        member
        for group in json.loads(everything[-1])["groups"]
        for member in group["members"]
    ]
    judged = [member for member in members if member["reward"] is not None]
    worst = sorted(judged, key=lambda member: member["reward"])[:3]
    assert json.loads(lines[-1])["trajectories"] == worst
    first = [line.split()[:2] for line in lines[3:6]]
    assert first == [[str(m["group"]), str(m["member"])] for m in worst]
    texts = [line for line in lines if line.startswith("train step 12 group")]
    assert len(texts) == 3
    _, lines, _ = run_show(capsys, tmp_path, "--failed", "--json")
    failed = [member for member in members if member["reward"] is None]
    assert json.loads(lines[-1])["trajectories"] == failed != []
    assert lines[0] == f"step 12: {len(failed)} failed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worst=2", "--failed"], "--worst and --failed were given, expected one"),
        (["--group=1", "--worst=2"], "--group and --worst were given, expected one"),
        (["--worst=0"], "--worst is 0, expected at least 1"),
        (["--step=13"], "step 13 has no trajectories .* nearest there: 12"),
        (["--group=7"], "7 is no group of step 12, .* 0 to 2. The nearest is 2"),
        (["--group=1", "--member=9"], "9 is no member of group 1"),
        (["--member=1"], "--group=0 --member=1"),
    ],
)
def test_what_is_not_there_is_refused_in_one_line(arguments, message, capsys, tmp_path):
    write_step(tmp_path, members=4)
    status, lines, errors = run_show(capsys, tmp_path, *arguments)
    assert status == 2
    assert not lines
    assert errors.count("\n") == 1
    assert re.search(message, errors)


def test_looking_at_a_run_never_waits_for_jax():
    code = (
        "import sys, thundersync_jax.show, thundersync_jax.metrics.timing, "
        "thundersync_jax.view.pictures, thundersync_jax.compare; "
        "sys.exit('jax' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
