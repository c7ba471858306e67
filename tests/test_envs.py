"""Environments: the library's questions and verdicts, waits, and factories by name."""

import asyncio
import dataclasses
import math
import os
import pathlib
import random
import subprocess
import sys
import time

import numpy as np
import pytest

from thundersync_jax.config import EnvConfig, LatencyConfig, dotted
from thundersync_jax.envs import reasoning
from thundersync_jax.envs.base import (
    Action,
    Observation,
    TaskSet,
    WithLatency,
    check_split,
    draw,
    load_factory,
)
from thundersync_jax.envs.reasoning import ReasoningOptions
from thundersync_jax.errors import ConfigError

reasoning_gym = pytest.importorskip("reasoning_gym")

OWN_TASK = pathlib.Path(__file__).parents[1] / "configs" / "own_task.py"
MIXTURE = ReasoningOptions(
    tasks=("chain_sum", "products", "gcd"), train_tasks=300, heldout_tasks=100
)
JUNK = [
    "",
    "junk",
    " 7 ",
    "+07.0",
    "the answer is 12",
    "nan",
    "1e999999999",
    "\x00",
    "9" * 100_000,
    "x" * 100_000,
]


def _make(options: ReasoningOptions, seed: int = 0) -> TaskSet:
    return reasoning.make(EnvConfig(options=options), seed)


def _attempt(tasks: TaskSet, task, actions: list[Action]) -> tuple[list, float]:
    """Plays the actions; returns the observations and the verdict."""

    async def play():
        environment = tasks.environment()
        assert await environment.start(task) == tasks.prompt(task)
        observations = [await environment.step(action) for action in actions]
        return observations, await environment.verify()

    return asyncio.run(play())


@pytest.mark.parametrize("prompt", ["compact", "question"])
@pytest.mark.parametrize("terms", [(2, 2), (2, 4), (6, 6)])
def test_demonstrations_succeed_through_the_tool(prompt, terms):
    tasks = _make(dataclasses.replace(MIXTURE, prompt=prompt, terms=terms))
    for task in [*tasks.train, *tasks.heldout]:
        turns = tasks.demonstrate(task)
        observations, score = _attempt(tasks, task, [action for action, _ in turns])
        assert [seen.text for seen in observations] == [text for _, text in turns]
        assert [seen.done for seen in observations] == [False, True]
        assert score == 1.0, task


def test_reward_is_the_librarys_own_score():
    tasks = _make(MIXTURE)
    rng = random.Random(0)
    partial = 0
    for task in tasks.heldout:
        right = task.entry["answer"]
        scorer = reasoning_gym.get_score_answer_fn(task.task)
        near = [right, f"{right}.0", f" {right}", f"it is {right}", right[:-1]]
        for answer in [*near, *rng.sample(JUNK, 3)]:
            _, score = _attempt(tasks, task, [Action("answer", answer)])
            assert score == scorer(answer, task.entry), (task, answer[:40])
            partial += 0 < score < 1
    assert partial > len(tasks.heldout)


@pytest.mark.parametrize(
    "actions",
    [
        [],
        [Action("call", "1+1")],
        [Action("answer", "")],
        [Action("malformed", "<call>5")],
    ],
)
def test_attempt_without_an_answer_scores_zero(actions):
    tasks = _make(MIXTURE)
    for task in tasks.heldout[:6]:
        assert _attempt(tasks, task, actions)[1] == 0.0


def test_malformed_turn_ends_the_attempt_without_its_text():
    tasks = _make(MIXTURE)
    for task in tasks.heldout[:6]:
        turn = Action("malformed", task.entry["answer"])
        observations, score = _attempt(tasks, task, [turn])
        assert observations[-1].done
        assert score == 0.0


@pytest.mark.parametrize(
    "text", ["__import__('os').system('touch X')", "9**9**9**9", "(" * 10_000]
)
def test_model_text_is_never_evaluated(text, tmp_path, monkeypatch):
    """google/tunix c80286a9: reward code evaluated model text as Python."""
    monkeypatch.chdir(tmp_path)
    tasks = _make(MIXTURE)
    task = next(task for task in tasks.heldout if "9" not in task.entry["answer"])
    began = time.monotonic()
    turns = [Action("call", text), Action("answer", text)]
    observations, score = _attempt(tasks, task, turns)
    assert time.monotonic() - began < 1
    assert observations[0].text.startswith("error: ")
    assert score == 0.0
    assert list(tmp_path.iterdir()) == []


def test_tool_switched_off_answers_with_an_error():
    tasks = _make(dataclasses.replace(MIXTURE, tool="none"))
    turns = [Action("call", "1+1"), Action("answer", tasks.heldout[0].entry["answer"])]
    observations, score = _attempt(tasks, tasks.heldout[0], turns)
    assert observations[0].text == "error: no tool"
    assert not observations[0].done
    assert score == 1.0


@pytest.mark.parametrize("seed", [0, 1, 7])
@pytest.mark.parametrize("prompt", ["compact", "question"])
def test_no_heldout_text_occurs_in_training(seed, prompt):
    # One- and two-digit pairs collide often enough to test the filter.
    options = dataclasses.replace(MIXTURE, prompt=prompt, terms=(2, 2), digits=(1, 2))
    tasks = _make(options, seed)
    heldout = {task.prompt for task in tasks.heldout}
    train = {task.prompt for task in tasks.train}
    assert len(heldout) == options.heldout_tasks
    assert len(tasks.train) == options.train_tasks
    assert not heldout & train
    assert not {q.expression for q in tasks.heldout} & {
        q.expression for q in tasks.train
    }
    check_split(tasks)


def test_training_depends_on_the_seed_and_heldout_does_not():
    one, again, other = _make(MIXTURE, 1), _make(MIXTURE, 1), _make(MIXTURE, 2)
    assert one.train == again.train
    assert one.heldout == again.heldout == other.heldout
    # The library seeds entry i with seed + i, so neighbours could share entries.
    shared = {q.prompt for q in one.train} & {q.prompt for q in other.train}
    assert len(shared) < len(one.train) / 5


def test_mixture_holds_equal_shares_in_turn():
    tasks = _make(MIXTURE)
    assert [task.task for task in tasks.train[:4]] == [*MIXTURE.tasks, "chain_sum"]
    for name in MIXTURE.tasks:
        assert sum(task.task == name for task in tasks.train) == 100


def test_terms_and_digits_bound_every_question():
    options = dataclasses.replace(MIXTURE, terms=(3, 5), digits=(2, 3))
    seen = set()
    for task in _make(options).train:
        text = task.expression.removeprefix("gcd(").rstrip(")")
        numbers = [
            int(n) for n in text.translate(str.maketrans("+-*", ",,,")).split(",")
        ]
        assert 3 <= len(numbers) <= 5
        assert all(10 <= number <= 999 for number in numbers)
        seen.add(len(numbers))
    assert seen == {3, 4, 5}


def test_prompts_are_bare_expressions_or_the_librarys_questions():
    compact = _make(MIXTURE)
    assert set("".join(task.prompt for task in compact.train)) <= set(
        "0123456789+-*gcd(),"
    )
    questions = _make(dataclasses.replace(MIXTURE, prompt="question"))
    for task in questions.heldout:
        assert task.prompt == task.entry["question"]


def test_generation_is_fast():
    began = time.perf_counter()
    _make(ReasoningOptions(MIXTURE.tasks, train_tasks=4500, heldout_tasks=500))
    assert time.perf_counter() - began < 2  # 0.2 s on an idle core


def test_too_small_a_space_of_questions_is_refused():
    options = ReasoningOptions(("products",), (2, 2), (1, 1), 90, 20)
    with pytest.raises(
        ConfigError, match=r"20 heldout questions .* gave 11 in .*fewer"
    ):
        _make(options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tasks": ("chain_sums",)}, "tasks.*chain_sum, products, gcd"),
        ({"tasks": ()}, "tasks"),
        ({"tasks": ("gcd", "gcd")}, "different names"),
        ({"terms": (1, 2)}, "terms.*at least 2"),
        ({"terms": (4, 2)}, "terms"),
        ({"digits": (1,)}, "digits"),
        ({"digits": ("1", "2")}, "digits"),
        ({"terms": (2, 20), "digits": (1, 9)}, "calculator"),
        ({"heldout_tasks": 0}, "heldout_tasks"),
        ({"train_tasks": "many"}, "train_tasks"),
        ({"tool": "python"}, "tool.*calculator"),
        ({"prompt": "long"}, "prompt.*compact"),
    ],
)
def test_impossible_options_are_refused_in_one_line(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        ReasoningOptions(**values)
    assert "\n" not in str(caught.value)


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"thundersync_jax\[tasks\]"):
        _make(MIXTURE)


def test_waits_follow_the_distribution():
    lognormal = LatencyConfig("lognormal", median_secs=0.05, sigma=0.7)
    waits = np.array([draw(lognormal, (3, call)) for call in range(4000)])
    # 4,000 draws: the mean of the logarithm is good to 0.011, 5 sigma is 0.055.
    assert abs(np.mean(np.log(waits)) - np.log(0.05)) < 0.055
    assert abs(np.std(np.log(waits)) - 0.7) < 0.04
    assert draw(LatencyConfig(), (1,)) == 0.0
    assert draw(LatencyConfig("constant", median_secs=0.2), (1,)) == 0.2
    late = LatencyConfig("straggler", median_secs=0.2)
    # Run, phase, step, group, member, then the call.
    assert [draw(late, (1, 1, 1, 1, member), 1, 1) for member in range(3)] == [
        0.2,
        0,
        0,
    ]
    assert draw(late, (0, 0, 0, 0, 1), 0, 0) == 0.0


def test_wait_depends_on_its_own_seed_only():
    lognormal = LatencyConfig("lognormal", median_secs=0.05, sigma=0.7)
    seeds = [
        (seed, member, call) for seed in (0, 1) for member in (0, 1) for call in (0, 1)
    ]
    forward = [draw(lognormal, seed) for seed in seeds]
    backward = [draw(lognormal, seed) for seed in reversed(seeds)]
    assert forward == backward[::-1]
    assert len(set(forward)) == len(seeds)


def _waits(monkeypatch, seed: tuple[int, ...]) -> list[float]:
    """The sleeps of: call, call, answer, verify."""
    tasks = _make(MIXTURE)
    lognormal = LatencyConfig("lognormal", median_secs=0.05, sigma=0.7)
    waits = []

    async def sleep(secs):
        waits.append(secs)

    async def play():
        environment = WithLatency(tasks.environment(), lognormal, lognormal, seed)
        task = tasks.heldout[0]
        assert await environment.start(task) == task.prompt
        first = await environment.step(Action("call", "2*3"))
        await environment.step(Action("call", "2*3"))
        last = await environment.step(Action("answer", task.entry["answer"]))
        assert (first.text, last.done) == ("6", True)
        assert await environment.verify() == 1.0

    monkeypatch.setattr("thundersync_jax.envs.base.asyncio.sleep", sleep)
    asyncio.run(play())
    return waits


def test_calls_and_verification_wait_apart_and_reproducibly(monkeypatch):
    waits = _waits(monkeypatch, (0, 5, 1))
    assert len(waits) == len(set(waits)) == 3
    assert waits == _waits(monkeypatch, (0, 5, 1))
    assert not set(waits) & set(_waits(monkeypatch, (0, 5, 2)))


def test_waits_are_those_of_the_seed_then_the_call_then_its_kind(monkeypatch):
    """Written out: the same seed waits as long in every version."""

    def wait(*seed):
        normal = np.random.default_rng(seed).standard_normal()
        return 0.05 * math.exp(0.7 * normal)

    names = [(0, 5, 1, 0, 0), (0, 5, 1, 1, 0), (0, 5, 1, 0, 1)]
    assert _waits(monkeypatch, (0, 5, 1)) == [wait(*seed) for seed in names]


@pytest.mark.parametrize("kind", ["call", "answer", "malformed"])
def test_whatever_is_answered_was_a_tool_call_and_waits_afterwards(kind, monkeypatch):
    order = []

    class Scripted:
        async def step(self, action):
            order.append("step")
            return Observation("", done=action.text == "last")

    async def sleep(secs):
        order.append(secs)

    async def play():
        constant = LatencyConfig("constant", median_secs=0.5)
        environment = WithLatency(Scripted(), constant, constant, (0,))
        for text in ("first", "second", "last"):
            await environment.step(Action(kind, text))

    monkeypatch.setattr("thundersync_jax.envs.base.asyncio.sleep", sleep)
    asyncio.run(play())
    assert order == ["step", 0.5, "step", 0.5, "step"]


def test_waiting_agents_wait_at_the_same_time():
    tasks = _make(MIXTURE)
    constant = LatencyConfig("constant", median_secs=0.1)

    async def play():
        environments = [
            WithLatency(tasks.environment(), constant, LatencyConfig(), (member,))
            for member in range(20)
        ]
        call = Action("call", "1+1")
        await asyncio.gather(*(environment.step(call) for environment in environments))

    began = time.monotonic()
    asyncio.run(play())
    assert 0.1 <= time.monotonic() - began < 1


def test_split_that_leaks_or_is_empty_is_refused():
    tasks = _make(MIXTURE)
    leaky = dataclasses.replace(tasks, train=[*tasks.train, tasks.heldout[3]])
    with pytest.raises(ConfigError, match="1 training tasks are held-out") as caught:
        check_split(leaky)
    assert repr(tasks.heldout[3].prompt) in str(caught.value)
    with pytest.raises(ConfigError, match="no heldout tasks"):
        check_split(dataclasses.replace(tasks, heldout=[]))


def test_factory_is_found_by_import_path(tmp_path, monkeypatch):
    assert load_factory("thundersync_jax.envs.reasoning:make") is reasoning.make
    (tmp_path / "tasks_beside_it.py").write_text("def make(env, seed): return seed\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_factory("tasks_beside_it:make")(None, 3) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("make", "package.module:function"),
        ("tasks:", "package.module:function"),
        (".tasks:make", "package.module:function"),
        ("no_such_package.tasks:make", "no module 'no_such_package'"),
        ("thundersync_jax.envs.reasonings:make", "no module.*reasonings"),
        ("thundersync_jax.envs.reasoning:build", "no function 'build'"),
        ("thundersync_jax.envs.reasoning:TASKS", "expected a function, not "),
        ("os:getcwd", r"function of \(\).*called as getcwd\(config.env, seed\)"),
    ],
)
def test_unknown_factory_is_refused_in_one_line(name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_factory(name)
    assert "\n" not in str(caught.value)


def test_any_setting_can_name_a_function_with_its_own_parameters():
    setting = "loss.surrogate"
    assert dotted.load(setting, "math:hypot", ("x", "y")) is math.hypot
    assert dotted.load(setting, "collections:Counter", ("items",))
    dotted.check(setting, "no.such.module:function")  # imports nothing
    for name in ("loss", "loss:", "a.b:c.d", "a/b.py:c"):
        with pytest.raises(ConfigError, match="^loss.surrogate is .*colon"):
            dotted.check(setting, name)
    with pytest.raises(
        ConfigError, match=r"^loss.surrogate is .*dumps\(config\.l, m\)"
    ):
        dotted.load(setting, "json:dumps", ("config.l", "m"))


def test_import_error_inside_a_factory_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "broken_tasks.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_factory("broken_tasks:make")


def test_own_task_runs_from_outside_the_package(tmp_path):
    source = OWN_TASK.read_text()
    assert len(source.splitlines()) <= 60
    (tmp_path / "my_copy.py").write_text(source)
    (tmp_path / "play.py").write_text(PLAY)
    # A folder of its own, with the package found as an installed one would be.
    played = subprocess.run(
        [sys.executable, "play.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(OWN_TASK.parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert played.returncode == 0, played.stderr
    assert played.stdout.split() == ["my_copy:make", "True", "1.0", "0.5", "0.0"]


PLAY = """
import asyncio
from thundersync_jax.envs.base import Action, check_split, load_factory
from thundersync_jax.flags import load_config
from thundersync_jax.chat.byte_level import render_action, render_prompt

config = load_config("my_copy.py")
load_config("my_copy.py:smoke")
tasks = load_factory(config.env.factory)(config.env, seed=1)
check_split(tasks)

async def play(task, actions):
    environment = tasks.environment()
    assert await environment.start(task) == tasks.prompt(task)
    done = [(await environment.step(action)).done for action in actions]
    return done, await environment.verify()

def answer(text):
    return asyncio.run(play("abcd", [Action("answer", text)]))[1]

task = tasks.heldout[0]
actions = [action for action, _ in tasks.demonstrate(task)]
prompt = render_prompt(tasks.prompt(task))
tokens = len(prompt) + sum(len(render_action(action)) for action in actions)
assert tokens <= config.rollout.context_tokens
done, score = asyncio.run(play(task, actions))
print(config.env.factory, done[-1], score, answer("dc"), answer("xxxx"))
"""
