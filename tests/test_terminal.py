"""Agents in terminals: what they see, what persists, and who grades them where."""

import asyncio
import dataclasses
import functools
import pathlib
import shutil

import pytest
import sandboxes

from thundersync_jax import flags, train
from thundersync_jax.config.settings import replace
from thundersync_jax.envs import base, shell_tasks, terminal
from thundersync_jax.envs.base import Action, Context, Deadlines
from thundersync_jax.envs.terminal import Sandboxes, SandboxOptions, TerminalTask
from thundersync_jax.metrics.records import read_step
from thundersync_jax.sandbox.base import Result, SandboxError
from thundersync_jax.sandbox.bubblewrap import BubblewrapSandbox
from thundersync_jax.types import TrajectoryKey

pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed"
)
OPTIONS = SandboxOptions()
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
TASK = TerminalTask(
    "one",
    "make it so",
    files={"a/b": b"\xff\x00", "c": b"see"},
    tests={"test.sh": b"echo $(cat /workspace/right) >/logs/verifier/reward.txt"},
)


@pytest.mark.usefixtures("quick_programs")
def test_the_config_trains(tmp_path):
    config = flags.load_config(f"{CONFIGS / 'terminal_cpu.py'}:smoke")
    small = {"model.width": 32, "model.layers": 1, "warm_start.batch_size": 4}
    result = train.train(replace(config, small), tmp_path)
    assert result["steps"] == 2
    _, records = read_step(tmp_path, 2)
    assert len(records) == 8
    for record in records:
        assert set(record.trajectory.parts) == {
            *("start_secs", "command_secs", "grade_secs", "reward_missing"),
        }


def play(task, *commands, calls=1, options=OPTIONS, **deadlines):
    """Returns (what was observed after each command, the last verdict, the log)."""
    secs = {"start": 30.0, "command": 30.0, "agent": 60.0, "verify": 30.0} | deadlines
    context = Context(
        key=TrajectoryKey(0, 0, 0),
        task=task,
        seed=(0,),
        deadlines=Deadlines(**secs),
        root=None,
        remaining_secs=lambda: 60.0,
        remaining_tokens=lambda: 1000,
        cut=lambda text, most: text,
    )

    async def played():
        environment = base.make(
            functools.partial(terminal.Terminal, Sandboxes(options)), context
        )
        try:
            assert await environment.start(task) == task.instruction
            seen = [
                await environment.step(
                    command if isinstance(command, Action) else Action("call", command)
                )
                for command in commands
            ]
            for _ in range(calls):
                verdict = await environment.verify()
            return [each.text for each in seen], verdict, context.text()
        finally:
            await environment.close()

    return asyncio.run(played())


@pytest.mark.parametrize("kind", shell_tasks.KINDS)
@pytest.mark.parametrize("number", range(2))
def test_a_task_is_worth_1_with_its_solution_and_0_without(kind, number):
    task = shell_tasks.made(kind, number)
    commands = [command for command, _ in task.solution]
    seen, verdict, log = play(task, *commands)
    assert seen == [text for _, text in task.solution]
    assert verdict.reward == 1.0 and verdict.parts["reward_missing"] == 0.0
    assert all(f"$ {command}" in log for command in commands)
    assert play(task)[1].reward == 0.0


def test_directory_and_exported_variables_persist():
    seen, *_ = play(
        TASK,
        "cd a; export X='1 2'; Y=3; false",
        'echo "$PWD $X $Y."',
        "exit 7",
        "cat b | od -An -tx1; cat ../c",
    )
    assert seen == [
        "[exit 1]",
        "/workspace/a 1 2 .\n[exit 0]",
        "[exit 7]",
        " ff 00\nsee\n[exit 0]",
    ]


def test_a_command_over_its_time_is_an_observation():
    call = Action(
        "call", "", name="bash", arguments={"command": "sleep 9", "timeout": 0.2}
    )
    seen, verdict, log = play(TASK, call, "echo 0.5 >right; echo on")
    assert seen == ["[timed out]", "on\n[exit 0]"]
    assert verdict.reward == 0.5
    assert "$ sleep 9\n[timed out, " in log


@pytest.mark.parametrize(
    "action",
    [
        Action("call", "{}", name="bash"),
        Action("call", "{}", name="bash", arguments={"command": 3}),
        Action("call", "{}", name="python", arguments={"command": "1"}),
        Action("call", "a\0b"),
    ],
)
def test_calls_that_are_none_are_told_so(action):
    (seen,), verdict, _ = play(TASK, action)
    assert seen.startswith("error: ") and verdict.reward == 0.0


def test_bash_can_be_refused():
    options = SandboxOptions(bash=False)
    (seen,), verdict, _ = play(TASK, "echo 1 >right", options=options)
    assert seen == "error: no bash" and verdict.reward == 0.0


def test_neither_tests_nor_verdict_are_where_the_agent_is():
    seen, verdict, _ = play(
        TASK,
        "ls -d /tests /logs 2>/dev/null | wc -l",
        "mkdir -p /logs/verifier && echo 1 >/logs/verifier/reward.txt; echo $?",
        "mkdir -p logs/verifier; echo 1 >logs/verifier/reward.txt",
        "echo 'echo 1 >/logs/verifier/reward.txt' >~/.bashrc",
        "echo 0.25 >right",
    )
    assert seen[0] == "0\n[exit 0]"
    assert seen[1].splitlines()[-2:] == ["1", "[exit 0]"]
    assert verdict.reward == 0.25


def test_nothing_of_the_agent_runs_while_it_is_graded(monkeypatch):
    """Neither when its work is taken nor beside the tests."""
    alive, started, copied = [], Sandboxes.started, BubblewrapSandbox.copy_out

    async def starting(self, task, name, **spec):
        alive.append(sandboxes.processes("12345.5"))
        return await started(self, task, name, **spec)

    async def copying(self, *arguments, **named):
        alive.append(sandboxes.processes("12345.5"))
        return await copied(self, *arguments, **named)

    monkeypatch.setattr(Sandboxes, "started", starting)
    monkeypatch.setattr(BubblewrapSandbox, "copy_out", copying)
    left = "setsid sleep 12345.5 & (trap '' TERM; sleep 12345.5) & disown"
    count = Action("call", "grep -lsF 12345.5 /proc/[0-9]*/cmdline | grep -c .")
    seen, *_ = play(TASK, left, count)
    assert int(seen[1].split()[0]) >= 2  # they did run
    assert alive == [[], [], []]  # at the start, of the work, and of the grading


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "no reward"),
        ("echo good >/logs/verifier/reward.txt", "no reward"),
        ("echo nan >/logs/verifier/reward.txt", "no reward"),
        ("sleep 60", "timed out"),
        ("kill -9 $$", "exit 137"),
    ],
)
def test_a_verifier_without_a_reward_is_worth_0_and_counted(script, reason):
    task = dataclasses.replace(TASK, tests={"test.sh": script.encode()})
    _, verdict, _ = play(task, verify=2.0)
    assert verdict.reward == 0.0 and verdict.parts["reward_missing"] == 1.0
    assert reason in verdict.log


def test_work_that_is_too_large_to_grade_is_worth_0():
    options = SandboxOptions(artefact_mb=1)
    big = "head -c 2000000 /dev/zero >big; echo 1 >right"
    _, verdict, _ = play(TASK, big, options=options)
    assert verdict.reward == 0.0 and "cannot be graded" in verdict.log


def test_a_verdict_can_be_asked_for_again(monkeypatch):
    """Its sandbox may fail, which is not the agent's fault."""
    _, verdict, _ = play(TASK, "echo 0.25 >right", calls=2)
    assert verdict.reward == 0.25

    started = Sandboxes.started

    async def failing(self, task, name, **spec):
        if "grade" in name:
            raise SandboxError("no room")
        return await started(self, task, name, **spec)

    monkeypatch.setattr(Sandboxes, "started", failing)
    with pytest.raises(SandboxError, match="no room"):
        play(TASK)


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (b"", ""),
        (b"a", "a\n"),
        (b"a\r\nb\n", "a\nb\n"),
        (b"\xff\x00\x1b[31mred\x1b[0m\x07\x9b1m", "\ufffdred\ufffd1m\n"),
        (b"\x1b]0;title\x07x\x1bPq\x1b\\y\x1bc", "xy\n"),
        ("é\u009b2J\tz".encode(), "é2J\tz\n"),
    ],
)
def test_output_cannot_move_a_cursor(output, shown):
    assert terminal.text(Result(0, output, 0.0)) == shown


def test_what_is_cut_is_said():
    seen, _, log = play(
        TASK, "yes | head -c 1000000", options=SandboxOptions(output_tokens=10_000)
    )
    assert "\n[840,000 bytes cut]\n" in seen[0]
    assert ", 840,000 bytes cut]" in log
