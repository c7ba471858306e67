"""Thoughts that leave the history (chat.drop_thoughts): as the template has it."""

import asyncio
import random

import chat_folders
import numpy as np
import pytest
from chat_folders import CALCULATOR
from rollout_fakes import (
    FakeEngine,
    FakeEnvironment,
    FakeTeacher,
    key,
    limits,
    teacher_logprobs,
)
from test_agent import InlineSampler

from thundersync_jax.chat.base import pieces
from thundersync_jax.chat.templates import TemplateChat, open_chat
from thundersync_jax.chat.thoughts import Thoughts
from thundersync_jax.config import ChatConfig, Config
from thundersync_jax.envs.base import Action, Observation
from thundersync_jax.errors import ConfigError
from thundersync_jax.rollout.agent import Agent
from thundersync_jax.rollout.commands import Commands
from thundersync_jax.run import tasks as run_tasks
from thundersync_jax.types import Message, StopReason

FORMS = {"sampled": "", "opened": "<think>\n", "off": "<think>\n\n</think>\n\n"}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n'
CALL += "</tool_call>"


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """By who begins a thought: the policy, the template, or the template ends it."""
    made = {}
    for form in FORMS:
        folder = chat_folders.write(tmp_path_factory.mktemp(form), "qwen3")
        if form == "opened":
            chat_folders.open_thoughts(folder)
        made[form] = TemplateChat(
            folder,
            (CALCULATOR,),
            thinking="off" if form == "off" else "default",
            drop_thoughts=True,
        )
    return made


class Talking(FakeEnvironment):
    """Says something to every action, and keeps the conversation as messages."""

    reply = "says {}\n"

    def __init__(self, chat, opened, turns):
        super().__init__(prompt="2+5")
        self.chat, self.opened, self.turns = chat, opened, turns
        self.said = [Message("user", "2+5")]
        self.histories = []  # before every action but the first

    async def step(self, action):
        await super().step(action)
        ids = np.array(action.ids)
        text = self.chat.decode(ids[: len(ids) - (ids[-1] in self.chat.stop_ids)])
        role = "tool" if action.kind == "call" else "user"
        reply = self.reply.format(len(self.actions))
        self.said.append(Message("assistant", self.opened + text))
        self.said.append(Message(role, reply))
        self.histories.append(list(self.said))
        return Observation(reply, done=len(self.actions) == self.turns)


def play(chat, opened, parts, teacher=None, make=Talking, **changes):
    """A conversation in which `parts` are sampled one after the other."""
    settings = {"context_tokens": 1024, "turn_tokens": 512, "samples": 16}
    settings |= {"prefill_buckets": (1024,), "gradient_buckets": (1024,)}
    settings |= {"stop_ids": None, "turns": len(parts), "cut_actions": "run"} | changes
    environment = make(chat, opened, settings["turns"])
    sampled = iter(parts)
    engine = FakeEngine(lambda request, turn: next(sampled), context_tokens=1024)

    async def attempt():
        agent = Agent(
            key=key(),
            task="a task",
            make_environment=lambda _: environment,
            sampler=InlineSampler(engine),
            commands=Commands(),
            limits=limits(**settings),
            seed=3,
            policy_version=0,
            chat=chat,
            teacher=teacher,
        )
        return await agent.scored(await agent.act()), await agent.verify()

    trajectory, verdict = asyncio.run(attempt())
    assert verdict.reward == 1.0
    return trajectory, environment, engine


def spoken(chat, text, spelled=False, ended=True):
    """Ids of a turn; a spelled one has a token for every character."""
    parts = [*text] if spelled else [text]
    ids = [chat.action(Action("answer", part))[:-1] for part in parts]
    return np.concatenate([*ids, chat.action(Action("answer", ""))[: int(ended)]])


def qwen(text):
    """What the template leaves of a turn."""
    return text.split("</think>")[-1].lstrip("\n")


def contexts(engine):
    """Ids that each session began with, and the number of its first request."""
    sessions = {}
    for number, request in enumerate(engine.requests):
        sessions.setdefault(request.session, (number, request.new_ids))
    return [*sessions.values()]


THOUGHTS = ["", "", "<think>\n\n</think>\n\n", "<think>\nI add.\n</think>\n\n"]
THOUGHTS += ["<think>a\n\n</think>\n", "<think>\nI\n</think> 🙂</think>\n\n\n"]
THOUGHTS += ["<think>\nI add"]
SPEECH = [CALL, CALL, "7", " 7 \n", "🙂é", "", "a </b>", "message"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spelled", [False, True])
def test_every_history_is_the_templates_of_ids_as_sampled(chats, form, spelled):
    """In random conversations, cut actions and chains of calls included."""
    chat, rng, seen = chats[form], random.Random(0), set()
    for _ in range(40):
        turns = []
        for _ in range(rng.randint(2, 6)):
            thought = rng.choice(THOUGHTS)
            if form == "opened":
                thought = thought.removeprefix(FORMS["opened"])
            ended = rng.random() < 0.8
            text = thought + rng.choice(SPEECH) or "7"
            turns.append(spoken(chat, text, spelled, ended))
        trajectory, environment, engine = play(chat, FORMS[form], turns)
        trained = trajectory.ids[trajectory.loss_mask]
        np.testing.assert_array_equal(trained, np.concatenate(turns))
        (_, first), *later = contexts(engine)
        np.testing.assert_array_equal(first, chat.prompt("2+5"))
        # A question behind a thought, and nothing else, begins another sample.
        expected, thought = [], False
        for number, said in enumerate(environment.histories[:-1], 1):
            thought |= "</think>" in said[-2].content
            if thought and said[-1].role == "user":
                expected.append(number)
                thought = False
        assert [number for number, _ in later] == expected
        assert len(trajectory.samples) == 1 + len(expected)
        for number, ids in later:
            whole = chat.prompt(environment.histories[number - 1])
            assert chat.decode(ids) == chat.decode(whole)
            if not spelled:
                np.testing.assert_array_equal(ids, whole)
            last, action = turns[number - 1], environment.actions[number - 1]
            ended = last[-1] in chat.stop_ids
            seen.add((action.kind, bool(action.thought), ended))
            if spelled:
                body = last[: len(last) - ended]
                left = len(spoken(chat, qwen(chat.decode(body)), True, False))
                assert body[len(body) - left :].tobytes() in ids.tobytes()
    assert {("answer", form != "off", True), ("malformed", False, False)} <= seen


@pytest.mark.parametrize("form", FORMS)
def test_without_thoughts_there_is_one_sample(chats, form):
    """But for an empty thought in the prompt, which no template keeps."""
    chat = chats[form]
    turns = [spoken(chat, text) for text in ("7", CALL, "8", "9")]
    trajectory, _, engine = play(chat, FORMS[form], turns)
    assert len(trajectory.samples) == (3 if form == "off" else 1)
    if form != "off":
        told = chat.observation([Message("user", "says 1\n")])
        np.testing.assert_array_equal(engine.requests[1].new_ids, told)


@pytest.mark.parametrize("form", ["sampled", "opened"])
def test_a_thought_closed_at_its_limit_leaves_as_any_other(chats, form):
    chat, begins = chats[form], FORMS["opened"].removeprefix(FORMS[form])
    thought = spoken(chat, f"{begins}I add", ended=False)
    parts = [thought, spoken(chat, "7"), thought, spoken(chat, "8")]
    trajectory, environment, engine = play(
        chat, FORMS[form], parts, turns=2, thinking_tokens=len(thought)
    )
    _, (number, second) = contexts(engine)
    assert number == 2  # of the requests, two of which make a turn
    assert "I add\n</think>\n\n7" in environment.said[1].content
    np.testing.assert_array_equal(second, chat.prompt(environment.histories[0]))
    trained = trajectory.ids[trajectory.loss_mask]
    np.testing.assert_array_equal(trained, np.concatenate(parts))
    shown = [piece.text for piece in pieces(chat, trajectory)]
    assert "".join(shown).count("I add") == 2  # each where it was sampled


def thinking(chat, count, thought="I add."):
    text = f"<think>\n{thought}\n</think>\n\n7"
    return [spoken(chat, text)] * count


def test_one_history_more_than_samples_ends_as_a_context_that_is_full(chats):
    chat = chats["sampled"]
    trajectory, _, _ = play(chat, "", thinking(chat, 5), samples=3)
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert len(trajectory.samples) == trajectory.turns == 3
    trajectory, _, _ = play(chat, "", thinking(chat, 5), samples=5)
    assert trajectory.stop_reason is StopReason.FINISHED


@pytest.mark.parametrize("long", ["overflow", "cut"])
def test_what_a_thought_took_is_room_for_what_follows(chats, long):
    """The thought and the answer to it would not fit."""

    class Telling(Talking):
        reply = "so " * 40

    chat = chats["sampled"]
    turns = [*thinking(chat, 1, "I add. " * 20), spoken(chat, "7")]
    told = chat.observation([Message("user", Telling.reply)])
    room = len(chat.prompt("2+5")) + len(turns[0]) + len(told) - 1
    lengths = {"context_tokens": room, "turn_tokens": len(turns[0])}
    lengths |= {"prefill_buckets": (room,), "gradient_buckets": (room,)}
    lengths |= {"long_observations": long}
    trajectory, _, _ = play(chat, "", turns, make=Telling, **lengths)
    assert trajectory.stop_reason is StopReason.FINISHED
    assert len(trajectory.samples) == 2
    assert Telling.reply in chat.decode(trajectory.ids)


def test_after_a_rewritten_history_only_later_thoughts_are_there_to_leave(chats):
    chat = chats["sampled"]

    class Summing(Talking):
        async def step(self, action):
            observation = await super().step(action)
            if len(self.actions) > 1:
                return observation
            return Observation("so far: 7", rewrite=True)

    _, _, engine = play(chat, "", thinking(chat, 3), make=Summing)
    said = [Message("user", "so far: 7"), Message("assistant", "7")]
    said += [Message("user", "says 2\n")]
    (_, last) = contexts(engine)[-1]
    np.testing.assert_array_equal(last, chat.prompt(said))


def test_a_teacher_sees_the_history_that_the_policy_saw(chats):
    chat, teacher = chats["sampled"], FakeTeacher()
    trajectory, _, _ = play(chat, "", thinking(chat, 3), teacher=teacher)
    assert trajectory.unscored_tokens == 0 and len(trajectory.samples) == 3
    for start, end in trajectory.samples:
        scores = teacher_logprobs(trajectory.ids[start:end])
        trained = trajectory.loss_mask[start:end]
        found = trajectory.teacher.logprobs[start:end]
        np.testing.assert_array_equal(found[trained], scores[trained])


@pytest.mark.parametrize(
    ("template", "sampled", "kept"),
    [
        (qwen, ["I</think>", "\n\n", "7", " ", "8"], ["7", " ", "8"]),
        (qwen, ["I</think>\n", "\n7", "8"], ["7", "8"]),  # in the middle of a token
        (qwen, ["I</think>7"], ["7"]),
        (qwen, ["I</think>", "\n"], []),
        (qwen, ["I", "</think>", "</think>", "a", "a"], ["a", "a"]),
        (lambda text: text.split("</think>")[-1], ["</think>", "\n", "7"], ["\n", "7"]),
        (lambda text: qwen(text).strip(), ["</think>", "7", "8", " "], ["78"]),
        (lambda text: "<think></think>" + qwen(text), ["I</think>", "\n", "7", "8"],
         ["<think></think>", "7", "8"]),
    ],
)  # fmt: skip
def test_sampled_tokens_are_kept_as_far_as_the_template_does(template, sampled, kept):
    """What stands before them in the history, or is cut, is a token of its own."""
    words = []

    def encode(text):
        if text and text not in words:
            words.append(text)
        return np.array([words.index(text)] if text else [], np.int32)

    def render(messages):
        action, *said = [message["content"] for message in messages] or [None]
        return "[?]" if action is None else f"[?]{template(action)}<end>{said}"

    def decode(ids):
        return "".join(words[token] for token in ids)

    stop = 99
    thoughts = Thoughts(render, encode, decode, [stop])
    ids = np.concatenate([*map(encode, sampled), [stop]])
    shown = encode("[?]")
    history = thoughts.history([(shown, ids)], [{"role": "user", "content": "?"}])
    assert [words[token] for token in history[1:-1]] == kept
    assert history[-1] == stop


def keeping(folder):
    file = folder / "chat_template.jinja"
    kept = file.read_text().replace("loop.index0 > last.question", "true")
    file.write_text(kept)


@pytest.mark.parametrize(
    ("family", "change"), [("qwen3", keeping), ("qwen2", None), ("llama3", None)]
)
def test_a_template_that_leaves_thoughts_in_is_refused(tmp_path, family, change):
    folder = chat_folders.write(tmp_path, family)
    if change:
        change(folder)
    match = "leaves the thoughts of earlier turns in the history, and chat.drop_th"
    with pytest.raises(ConfigError, match=match) as refusal:
        open_chat(folder, drop_thoughts=True)
    assert "\n" not in str(refusal.value)
    open_chat(folder)


def test_it_needs_a_template_samples_and_a_prompt_that_stays(tmp_path, chats):
    drop = ChatConfig(drop_thoughts=True)
    with pytest.raises(ConfigError, match=r"rollout\.samples 1.*samples to 4, which"):
        Config(chat=drop, rollout=limits(turns=4))
    with pytest.raises(ConfigError, match="drop_thoughts is True with byte-level tok"):
        Config(chat=drop, rollout=limits(samples=4))
    with pytest.raises(ConfigError, match="drop_thoughts is True with byte-level tok"):
        open_chat(tmp_path, drop_thoughts=True)
    config = Config(share_prompt="group")
    for form, chat in chats.items():
        if form == "sampled":
            run_tasks._check_prompt(chat, config)
            continue
        with pytest.raises(ConfigError, match="begins a thought in the prompt"):
            run_tasks._check_prompt(chat, config)
        run_tasks._check_prompt(chat, Config())
