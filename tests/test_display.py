"""What a person sees: rows that line up, samples that are plain, honest counts."""

import dataclasses
import io
import re
import threading
import time

import numpy as np
import pytest

from thundersync_jax.chat import byte_level
from thundersync_jax.envs.base import Action
from thundersync_jax.metrics.timing import Progress, RunProgress
from thundersync_jax.run.step import Evaluation, wilson_interval
from thundersync_jax.types import StopReason, Trajectory, TrajectoryKey
from thundersync_jax.view import display
from thundersync_jax.view.display import Display, StepRow, progress_line

ESCAPE = "\x1b"


class Terminal(io.StringIO):
    """A screen that remembers everything it was sent."""

    def isatty(self):
        return True


@pytest.fixture(params=[80, 120])
def terminal(request, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(request.param))
    monkeypatch.setenv("LINES", "40")
    return Terminal(), request.param


def evaluation(successes, answers, reward=None):
    trajectories = [trajectory(reward=reward)] * answers
    return Evaluation(np.array([successes] + [0] * (answers - 1)), 1, trajectories, {})


def visible(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def step_row(step=12, **changes):
    values = {
        "step": step,
        "steps": 200,
        "reward": 0.6423,
        "success": 0.625,
        "gradient_norm": 1.234,
        "kept_groups": 15,
        "groups": 16,
        "uniform_groups": 4,
        "streamed_share": 0.62,
        "rollout_secs": 1.234,
        "step_secs": 1.5,
        "learner_busy": 0.43,
        "staleness": 0,
    }
    return StepRow(**values | changes)


ODD_ROWS = [
    step_row(1, reward=None, success=None, streamed_share=None, learner_busy=None),
    step_row(200, reward=-12.5, gradient_norm=float("nan"), success=1.0),
    step_row(7, gradient_norm=1.2e-9, rollout_secs=2345.6, step_secs=9999.9),
    step_row(7, reward=123456.0, gradient_norm=0.0, groups=128, kept_groups=128),
]


def test_rows_line_up_under_their_heading_within_a_hundred_columns():
    stream = io.StringIO()
    display = Display(stream)
    for row in [step_row(), *ODD_ROWS]:
        display.row(row)
    above, below, *rows = stream.getvalue().splitlines()
    assert above.split() == ["gradient", "groups", "rollout", "step", "learner"]
    ends = {match.end() for match in re.finditer(r"\S+", below)}
    assert len(ends) == 11
    for row in rows:
        assert {match.end() for match in re.finditer(r"\S+", row)} == ends
        assert len(row) <= 100


def test_the_heading_comes_back_after_many_rows_and_after_a_sample():
    stream = io.StringIO()
    display = Display(stream)
    for step in range(45):
        display.row(step_row(step))
        if step == 2:
            display.evaluation("held-out success", evaluation(1, 2))
            display.sample(trajectory(), 0.5)
    lines = stream.getvalue().splitlines()
    headings = [i for i, line in enumerate(lines) if "staleness" in line]
    rows = [sum("/200" in line for line in lines[:i]) for i in headings]
    assert rows == [0, 3, 23, 43]


def test_off_a_terminal_there_is_nothing_but_text():
    stream = io.StringIO()
    display = Display(stream)
    with display.live("step 1/3"):
        display.update(Progress(total=4, completed=2))
        display.line("compiling gradient of 1 x (48,)")
    display.row(step_row())
    text = stream.getvalue()
    assert ESCAPE not in text and "\r" not in text
    assert "done" not in text
    assert text.startswith("compiling gradient of 1 x (48,)\n")


def test_forced_colour_in_a_file_brings_no_redrawn_line(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    display = Display(stream)
    with display.live("step 1/3"):
        display.update(Progress(total=4))
    assert stream.getvalue() == ""
    display.line("compiling")
    assert ESCAPE in stream.getvalue()


def test_on_a_terminal_a_progress_line_lives_and_goes(terminal):
    stream, width = terminal
    display = Display(stream)
    progress = Progress(total=128, started_secs=time.monotonic())
    with display.live("step 12/200"):
        progress.completed, progress.verified, progress.streamed = 96, 80, 41
        display.update(progress)
        deadline = time.monotonic() + 5
        while "streamed 41" not in visible(stream.getvalue()):
            assert time.monotonic() < deadline, stream.getvalue()
            time.sleep(0.02)
        display.line("compiling")
    before = len(stream.getvalue())
    assert stream.getvalue().rstrip("\r").endswith("\x1b[2K")  # erased
    display.row(step_row())
    text = visible(stream.getvalue())
    assert "done 96/128 verified 80 streamed 41" in text
    assert "compiling\n" in text.replace("\r", "")
    row = visible(stream.getvalue()[before:]).splitlines()[-1]
    assert row.split()[0] == "12/200"
    assert "done" not in row
    assert len(row) <= width
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count("\x1b[?25h")


def test_a_step_that_raises_gives_the_cursor_back(terminal):
    stream, _ = terminal
    with pytest.raises(RuntimeError), Display(stream).live("step 1/1"):
        raise RuntimeError
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_progress_counts_steps_and_trajectories_apart():
    """The progress bar counted micro-batches as steps (google/tunix#390).

    3 steps of 4 micro-batches: the total is 3, it ends at 3/3, trajectories 12/12.
    """
    run = RunProgress(steps=3)
    titles = []
    for _ in range(3):
        progress = run.begin(total=4)
        titles.append(run.title)
        for _ in range(4):  # micro-batches of one trajectory
            progress.completed += 1
            progress.verified += 1
            progress.streamed += 1
            line = progress_line(run.title, progress, 1.0).plain
            assert line.startswith(titles[-1])
        assert " done 4/4 verified 4 streamed 4 " in line
        run.end(progress)
    assert titles == ["step 1/3", "step 2/3", "step 3/3"]
    assert run.steps == 3
    assert str(run) == "3/3 steps, 12/12 trajectories"


def test_a_resumed_run_goes_on_counting_and_failures_settle_a_trajectory():
    run = RunProgress(steps=10, steps_done=7)
    assert run.title == "step 8/10"
    progress = run.begin(total=4)
    progress.verified, progress.failed = 3, 1
    assert " failed 1 " in progress_line(run.title, progress, 1.0).plain
    run.end(progress)
    assert str(run) == "8/10 steps, 4/4 trajectories"


def test_rate_and_busy_share_are_of_the_time_since_the_step_began():
    progress = Progress(8, tokens=30_000, learner_secs=0.5, started_secs=100.0)
    line = progress_line("step 1/1", progress, now_secs=102.0).plain
    assert line.endswith("15,000 tokens/s  learner 25%")
    progress.paused = lambda: True
    line = progress_line("step 1/1", progress, now_secs=102.0).plain
    assert "  paused, no environment starts  15,000 tokens/s" in line


def trajectory(observation="19", reward=1.0, reason=""):
    parts = [
        (byte_level.render_prompt("12+7"), False),
        (byte_level.render_action(Action("call", "12+7")), True),
        (byte_level.render_observation(observation), False),
        (byte_level.render_action(Action("answer", "19")), True),
    ]
    ids = np.concatenate([part for part, _ in parts])
    mask = np.concatenate([np.full(len(part), trained) for part, trained in parts])
    stop = StopReason.TIMEOUT if reason else StopReason.FINISHED
    return Trajectory(
        key=TrajectoryKey(12, 3, 1),
        ids=ids,
        loss_mask=mask,
        logprobs=np.zeros(len(ids), np.float32),
        turns=2,
        stop_reason=stop,
        policy_version=12,
        reward=reward,
        reason=reason,
    )


def test_turns_of_a_trajectory_show_what_each_was_worth():
    plain = trajectory()
    starts = np.flatnonzero(np.diff(plain.loss_mask.astype(int), prepend=0) == 1)
    u, v = np.ones(len(plain.ids)), np.zeros(len(plain.ids))
    u[starts[0] :], v[starts[1] :] = 2.0, -0.25
    stream = io.StringIO()
    credited = dataclasses.replace(plain, turn_weights=u, turn_credits=v)
    Display(stream).sample(credited, 0.5)
    assert "advantage +0.50  of its turns +1.00 +0.75" in stream.getvalue()


def sample_lines(*arguments, **options):
    stream = io.StringIO()
    Display(stream).sample(trajectory(*arguments), 0.577, **options)
    return stream.getvalue().splitlines()


def test_trained_tokens_stand_apart_without_colour():
    assert sample_lines() == [
        "train step 12 group 3 member 1",
        "  reward 1.000  advantage +0.58  finished  2 turns  19 tokens, 9 trained",
        "  observed  <user>12+7<assistant>",
        "  trained   <call>12+7<end>",
        "  observed  <tool>19<assistant>",
        "  trained   19<end>",
    ]


def test_a_failed_sample_says_why():
    lines = sample_lines("19", None, "verify() took longer than 2 s")
    assert lines[1].startswith("  reward -  advantage +0.58  timeout")
    assert lines[2] == "  verify() took longer than 2 s"


def test_sampled_bytes_cannot_drive_the_terminal():
    hostile = "\x1b[2J\x1b]0;title\x07\r\b\u202eabc\x00\x9b31m"
    text = "\n".join(sample_lines(hostile))
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert r"\x1b[2J" in text and r"\u202e" in text


def test_a_long_observation_loses_its_middle_and_keeps_its_width():
    words = " ".join(f"word{i}" for i in range(400))
    lines = sample_lines(words + "\n" + "x" * 300, lines=7)
    assert max(map(len, lines)) <= 100
    observed = lines[4:-1]
    assert len(observed) == 7
    assert "lines left out" in observed[3]
    assert observed[0].startswith("  observed  <tool>word0 word1")
    assert observed[-1].endswith("<assistant>")
    everything = "".join(sample_lines(words, lines=None))
    assert all(f"word{i}" in everything for i in range(400))


def test_colour_on_a_terminal_adds_nothing_to_the_text(terminal):
    stream, _ = terminal
    Display(stream).sample(trajectory(), 0.577)
    assert ESCAPE in stream.getvalue()
    assert visible(stream.getvalue()).splitlines() == sample_lines()


def test_letters_the_stream_cannot_write_do_not_end_the_run():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Display(stream).sample(trajectory("naïve ☃"))
    stream.flush()
    assert b"na?ve ?" in raw.getvalue()


# Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I,
# method 3 (Wilson without continuity correction).
@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 1 - 0.1170, 1.0),
    ],
)
def test_interval_agrees_with_published_values(successes, total, low, high):
    assert wilson_interval(successes, total) == pytest.approx((low, high), abs=5e-5)


def test_interval_of_nothing_says_nothing_and_of_too_many_is_refused():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    for total in range(1, 300):
        assert wilson_interval(0, total)[0] == 0.0
        assert wilson_interval(total, total)[1] == 1.0
    with pytest.raises(ValueError, match="greater than n"):
        wilson_interval(3, 2)


def test_evaluation_is_shown_with_its_interval():
    stream = io.StringIO()
    Display(stream).evaluation("held-out success", evaluation(81, 263, reward=1.5))
    assert stream.getvalue() == (
        "held-out success 30.8%  81 of 263, 95% interval 25.5% to 36.6%; "
        "mean reward 1.500\n"
    )


def test_a_silent_start_repeats_its_latest_line(monkeypatch):
    monkeypatch.setattr(display, "_PATIENCE_SECS", 0.04)
    stream = io.StringIO()
    with Display(stream).patience() as started:
        pass
    assert not stream.getvalue()
    shown = Display(stream)
    with shown.patience() as started:
        shown.line("compiling")
        deadline = time.monotonic() + 10
        while "since: compiling" not in stream.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started()
    assert stream.getvalue().startswith("compiling\n  0 s since: compiling\n")
    assert not any(t.name == "patience" for t in threading.enumerate())
