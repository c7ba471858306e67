"""Tasks at the start of a run: which fit, in what order, and whether others are."""

import collections
import dataclasses
import json
import os
import subprocess
import sys

import chat_folders
import echo_task
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thundersync_jax import train
from thundersync_jax.chat.base import reply
from thundersync_jax.chat.byte_level import ByteLevel
from thundersync_jax.chat.templates import TemplateChat
from thundersync_jax.config import Config, EnvConfig, RolloutConfig, WarmStartConfig
from thundersync_jax.config.settings import replace
from thundersync_jax.envs import fingerprint
from thundersync_jax.envs.base import Action, TaskSet, check_split
from thundersync_jax.errors import ConfigError
from thundersync_jax.run import task_tokens
from thundersync_jax.run import tasks as run_tasks

pytestmark = pytest.mark.usefixtures("quick_programs")
TOOLS = (chat_folders.CALCULATOR,)


@pytest.fixture(name="chats", scope="module")
def _chats(tmp_path_factory):
    root = tmp_path_factory.mktemp("chats")
    names = ("qwen2", "qwen3", "llama3")
    folders = {name: chat_folders.write(root / name, name) for name in names}
    return {
        "bytes": ByteLevel(),
        "no tools": TemplateChat(chat_folders.write(root / "no", "no_tools")),
        **{name: TemplateChat(folder, TOOLS) for name, folder in folders.items()},
    }


class Counted:
    """A chat that notes what it renders."""

    def __init__(self, chat):
        self._chat, self.calls = chat, collections.Counter()

    def __getattr__(self, name):
        if name in ("prompt", "action", "observation"):
            self.calls[name] += 1
        return getattr(self._chat, name)


def config_of(limit, warm_start_steps=0):
    rollout = RolloutConfig(context_tokens=limit, turn_tokens=1)
    return Config(rollout=rollout, warm_start=WarmStartConfig(steps=warm_start_steps))


def prepared(tasks, chat, limit, warm_start_steps=0, workdir=None, lines=None):
    """The fitting tasks, the longest demonstration, and the counts."""
    counts = task_tokens.Counts(
        tasks, chat, (lines if lines is not None else []).append
    )
    config = config_of(limit, warm_start_steps)
    return *run_tasks._fitting(tasks, config, counts, workdir), counts


def tokens_of(tasks, chat, task):
    """The plain way: everything is rendered."""
    pieces = [chat.prompt(tasks.prompt(task))]
    for action, observation in tasks.demonstrate(task) if tasks.demonstrate else ():
        pieces.append(chat.action(action))
        if observation:
            pieces.append(chat.observation(reply(action, observation)))
    return len(np.concatenate(pieces))


MARKS = ["<|im_end|>", "<|eot_id|>", "<tool_call>", "\n\n", "  ", "é", "漢", "ﷺ", '"\\']
TEXTS = st.lists(
    st.sampled_from(MARKS) | st.text(max_size=60) | st.just("word " * 20), max_size=6
).map("".join)
TURNS = st.lists(
    st.tuples(st.sampled_from(["call", "answer"]), TEXTS, TEXTS), max_size=3
)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), name=st.sampled_from(["bytes", "no tools", "qwen2", "llama3"]))
def test_the_same_tasks_fit_as_when_each_is_rendered(data, name, chats):
    """And so every step has the tasks that it always had."""
    chat = chats[name]
    train = data.draw(st.lists(TEXTS, min_size=1, max_size=8))
    demonstrations = None
    if data.draw(st.booleans()):
        kinds = ["answer"] if name == "no tools" else ["call", "answer"]
        turns = {text: data.draw(TURNS) for text in train}
        demonstrations = {
            text: [(Action(k if k in kinds else "answer", a), o) for k, a, o in said]
            for text, said in turns.items()
        }
    tasks = TaskSet(
        train,
        ["heldout"],
        environment=None,
        prompt=lambda task: task,
        demonstrate=demonstrations and (lambda task: demonstrations.get(task, [])),
    )
    lengths = [tokens_of(tasks, chat, task) for task in train]
    least = min([*lengths, tokens_of(tasks, chat, "heldout")]) + 1
    limit = max(
        least, data.draw(st.sampled_from(lengths)) + data.draw(st.integers(-1, 1))
    )
    limit = max(limit, 2, tokens_of(tasks, chat, "heldout") + 1)
    expected = [t for t, n in zip(train, lengths, strict=True) if n < limit]
    for steps in (0, 1) if demonstrations else (0,):
        if not expected:
            with pytest.raises(ConfigError, match="no train task fits"):
                prepared(tasks, chat, limit, steps)
            continue
        fitting, longest, counts = prepared(tasks, chat, limit, steps)
        assert fitting.train == expected and fitting.heldout == ["heldout"]
        assert longest == steps * max(n for n in lengths if n < limit)
        bounds = counts._most["train"]
        assert np.all(bounds >= lengths)


def test_what_fits_by_its_size_is_not_rendered(chats):
    """axolotl-ai-cloud/axolotl#2396: a start took minutes, each of them again."""
    tasks = TaskSet(
        [f"add {i} and {i}" for i in range(2_000)],
        ["add 0.5 and 1"],
        environment=None,
        prompt=lambda task: task,
        demonstrate=lambda task: [
            (Action("call", "1+1"), "2"),
            (Action("answer", "2"), ""),
        ],
    )
    chat = Counted(chats["qwen2"])
    fitting, _, _ = prepared(tasks, chat, 4_000)
    assert fitting.train == tasks.train and sum(chat.calls.values()) < 10
    # A warm start pads to the longest demonstration.
    prepared(tasks, chat, 4_000, warm_start_steps=1)
    assert chat.calls["prompt"] > 2_000


def test_counts_are_kept_and_told_while_they_take_long(chats, tmp_path, monkeypatch):
    monkeypatch.setattr(task_tokens, "_PATIENCE_SECS", 0.0)
    monkeypatch.setattr(task_tokens, "_SAID_SECS", 0.01)
    words = [f"word {i} " * (i % 50) for i in range(1_000)]
    tasks = TaskSet(words, ["other"], environment=None, prompt=lambda task: task)
    lines, chat = [], Counted(chats["qwen2"])
    first, _, counts = prepared(tasks, chat, 300, lines=lines)
    assert 0 < len(first.train) < 1_000 and counts.took_long
    assert any(line.endswith("train tasks counted") for line in lines)
    assert any(line.startswith("0 of 1,000 train tasks read") for line in lines)
    counts.keep(tmp_path)
    before = chat.calls["prompt"]
    again, _, _ = prepared(tasks, chat, 300, workdir=tmp_path)
    assert chat.calls["prompt"] == before + 1  # a probe
    assert again.train == first.train
    # Lengths know no limit.
    shorter, _, _ = prepared(tasks, chat, 250, workdir=tmp_path)
    plain, _, _ = prepared(tasks, chats["qwen2"], 250)
    assert shorter.train == plain.train != first.train


@pytest.mark.parametrize("what", ["text", "template", "vocabulary", "torn", "empty"])
def test_counts_of_something_else_are_not_taken(what, chats, tmp_path):
    words = ["word " * (i % 50) for i in range(200)]
    tasks = TaskSet(words, ["other"], environment=None, prompt=lambda task: task)
    _, _, counts = prepared(tasks, chats["qwen2"], 250)
    counts._exact["train"][:] = 0  # as everything would fit
    counts.keep(tmp_path)
    wrong, _, _ = prepared(tasks, chats["qwen2"], 250, workdir=tmp_path)
    assert wrong.train == words
    chat, file = chats["qwen2"], tmp_path / task_tokens._COUNTS_FILE
    if what == "text":
        tasks = dataclasses.replace(tasks, train=[*words[:-1], "another word"])
    elif what == "template":
        chat = chats["no tools"]
    elif what == "vocabulary":
        chat = Counted(chat)
        chat.vocabulary = lambda: {"a": 0}
    else:
        file.write_bytes(file.read_bytes()[: 100 if what == "torn" else 0])
    limit = 60 if what == "template" else 250
    found, _, _ = prepared(tasks, chat, limit, workdir=tmp_path)
    plain = [task for task in tasks.train if len(chat.prompt(task)) < limit]
    assert found.train == plain != tasks.train


class Made:
    """Tasks that exist while somebody looks at them."""

    def __init__(self, count, first=0):
        self._count, self._first = count, first

    def __len__(self):
        return self._count

    def __getitem__(self, place):
        if not 0 <= place < self._count:
            raise IndexError(place)
        return {"number": self._first + place, "text": "x" * (place % 7)}


def test_tasks_that_are_made_on_demand_stay_so(chats):
    tasks = TaskSet(
        Made(50), Made(9, 100), environment=None, prompt=lambda task: task["text"]
    )
    limit = len(chats["bytes"].prompt("xxxx"))
    fitting, _, _ = prepared(tasks, chats["bytes"], limit)
    expected = [task for task in tasks.train if len(task["text"]) < 4]
    assert not isinstance(fitting.train, list)
    assert list(fitting.train) == fitting.train[:] == expected
    assert (
        fitting.train[-1] == expected[-1] and fitting.heldout[2:4][1]["number"] == 103
    )
    assert run_tasks.take(fitting.train, 3, 5, 9) == run_tasks.take(expected, 3, 5, 9)


WORDS = echo_task.tasks()


def given_as(**changes):
    return lambda env, seed: dataclasses.replace(echo_task.tasks(), **changes)


@pytest.mark.parametrize("kind", [set, frozenset])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_set_of_tasks_is_refused(split, kind, tmp_path):
    """NVIDIA-NeMo/RL#2519: another order in every process."""
    factory = given_as(**{split: kind(getattr(WORDS, split))})
    with pytest.raises(ConfigError, match=rf"{split} is a {kind.__name__}.*sorted\("):
        train.train(echo_task.SCRIPTED, tmp_path, environment=factory)


@pytest.mark.parametrize("kind", [iter, tuple, dict.fromkeys, np.array])
def test_whatever_has_an_order_is_a_list_of_tasks(kind, tmp_path):
    config = echo_task.SCRIPTED
    factory = given_as(train=kind(WORDS.train), heldout=kind(WORDS.heldout))
    found = run_tasks.prepared(factory, config)
    expected = run_tasks.prepared(given_as(), config)
    assert list(found.tasks.train) == list(expected.tasks.train)
    assert found.fingerprint.prompts_sha256 == expected.fingerprint.prompts_sha256


@pytest.mark.parametrize("wrong", [None, 7])
def test_what_is_no_list_of_tasks_is_refused_in_one_line(wrong, tmp_path):
    with pytest.raises(ConfigError, match=f"train is {wrong}, expected a sequence"):
        run_tasks.prepared(given_as(train=wrong), echo_task.SCRIPTED)


def test_tasks_that_share_their_prompt_are_told_apart(tmp_path):
    """NVIDIA-NeMo/RL#3882: games begin alike and hide another word each."""
    tasks = TaskSet(
        WORDS.train[:8],
        WORDS.train[8:12],
        environment=None,
        prompt=lambda word: "Guess",
    )
    lines = []
    check_split(tasks, lines.append)
    assert len(lines) == 1 and lines[0].startswith("8 training tasks have the prompt")
    with pytest.raises(
        ConfigError, match="1 training tasks are held-out tasks.*'Guess'"
    ):
        check_split(dataclasses.replace(tasks, train=WORDS.train[:9]))


def test_a_resume_with_other_tasks_is_refused_or_accepted_by_name(tmp_path, capsys):
    """TensorAuto/OpenTau#502: it went on with whatever the factory gave."""

    def run(steps, factory=None, **changes):
        config = replace(echo_task.SCRIPTED, {"steps": steps, **changes})
        make = factory or given_as()
        result = train.train(config, tmp_path, environment=make)
        return result, capsys.readouterr().out

    def refusal(*arguments, **changes):
        with pytest.raises(ConfigError) as refused:
            run(*arguments, **changes)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    run(1)
    before = json.loads((tmp_path / "tasks.json").read_text())
    swapped = [*WORDS.train[1::-1], *WORDS.train[2:]]
    for other in (
        given_as(train=swapped),
        given_as(train=WORDS.train[1:]),
        given_as(heldout=WORDS.heldout[::-1]),
        given_as(prompt=lambda word: f"{word} "),
    ):
        line = refusal(2, other)
        assert before["sha256"][:12] in line and "had 184 for training and 32 h" in line
        new = line.partition("env.accept_tasks=")[2].split()[0]
        assert new not in before["sha256"]
        assert json.loads((tmp_path / "tasks.json").read_text()) == before
        refusal(2, other, **{"env.accept_tasks": before["sha256"][:12]})
    _, said = run(2, other, **{"env.accept_tasks": new[:8]})
    assert f"changed on resume: tasks: {before['sha256'][:12]} -> {new}" in said
    _, said = run(3, other)  # these are its tasks now
    assert "resume: tasks:" not in said
    refusal(4)
    _, said = run(4, **{"env.accept_tasks": "any"})
    assert "changed on resume: tasks: " in said
    # One from before there were hashes.
    (tmp_path / "tasks.json").unlink()
    run(5, other)
    assert refusal(6)
    (tmp_path / "tasks.json").write_text("{}")
    assert "Delete it and the run goes on" in refusal(6, other)


def test_what_tasks_hold_beside_their_prompt_counts(tmp_path):
    def factory(answer):
        words = [{"word": word, "answer": answer} for word in WORDS.train]
        return lambda env, seed: dataclasses.replace(
            echo_task.tasks(),
            train=words,
            prompt=lambda t: t["word"] if isinstance(t, dict) else t,
            demonstrate=None,
        )

    config = replace(echo_task.SCRIPTED, {"seed": 1})
    found = [run_tasks.prepared(factory(a), config).fingerprint for a in (1, 1, 2)]
    assert found[0] == found[1]
    assert found[0].prompts_sha256 == found[2].prompts_sha256
    assert found[0].sha256 != found[2].sha256


@pytest.mark.parametrize("wrong", ["", "abc", "ABCDEF", "all", "g" * 12])
def test_only_the_beginning_of_a_hash_accepts(wrong):
    with pytest.raises(ConfigError, match="env.accept_tasks is .*expected 6 to 64"):
        EnvConfig(accept_tasks=wrong)


CONTENTS = """
import dataclasses, datetime, enum, fractions, json, pathlib, threading
import numpy as np
from thundersync_jax.envs import fingerprint

@dataclasses.dataclass(frozen=True)
class Task:
    names: frozenset
    lock: object

class Plain:
    def __init__(self):
        self.words = {"b", "a", "c", "dd"}

class Colour(enum.Enum):
    RED = object()

itself = []
itself.append(itself)
values = [
    {"b": {"y", "x", "z"}, "a": (1, 2.5, None, True, b"x")},
    Task(frozenset(["one", "two", "three"]), threading.Lock()),
    Plain(), Colour.RED, itself, {(1, 2): 3, "a": 4}, {1: {"p", "q"}, None: 2},
    np.arange(3), np.float32(0.5), np.array([{"u", "v"}], object), pathlib.Path("a/b"),
    datetime.date(2020, 1, 1), fractions.Fraction(1, 3), len, Plain, lambda: 0,
    float("nan"), "\\ud800", object(), {}.keys(), range(3),
]
print(json.dumps([fingerprint.text(value) for value in values]))
"""


def test_the_text_of_a_value_is_the_same_in_every_process():
    outputs = set()
    for seed in ("1", "2", "3"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-c", CONTENTS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1
    texts = json.loads(outputs.pop())
    assert not any(" at 0x" in text for text in texts)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(a=VALUES, b=VALUES)
def test_texts_are_equal_where_values_are(a, b):
    same = json.dumps(fingerprint.text(a)) == json.dumps(fingerprint.text(b))
    assert same == (repr(sorted_keys(a)) == repr(sorted_keys(b)))


def sorted_keys(value):
    if isinstance(value, dict):
        return {key: sorted_keys(value[key]) for key in sorted(value)}
    return [sorted_keys(v) for v in value] if isinstance(value, list) else value
