"""Conversations in a folder's own format: what is sampled is what is trained."""

import asyncio

import chat_folders
import numpy as np
import pytest
from chat_folders import CALCULATOR
from rollout_fakes import FakeEngine, FakeEnvironment, FakeTeacher, key, limits
from test_agent import InlineSampler

from thundersync_jax.chat.base import conversation, pieces
from thundersync_jax.chat.templates import TemplateChat
from thundersync_jax.config import Config, LatencyConfig
from thundersync_jax.envs.base import Action, Observation, TaskSet, WithLatency
from thundersync_jax.errors import ConfigError
from thundersync_jax.ops import losses
from thundersync_jax.rollout.agent import Agent
from thundersync_jax.rollout.commands import Commands, Stopped
from thundersync_jax.rollout.recorder import Recorder
from thundersync_jax.run import feed, task_tokens
from thundersync_jax.run import tasks as run_tasks
from thundersync_jax.stream import padding
from thundersync_jax.types import Message, StopReason

LENGTHS = {"context_tokens": 1024, "turn_tokens": 128}
LENGTHS |= {"prefill_buckets": (1024,), "gradient_buckets": (1024,)}


class Replies(FakeEnvironment):
    """Answers every action; done at the last."""

    def __init__(self, *replies, prompt="2+5"):
        super().__init__(prompt=prompt)
        self._replies = replies

    async def step(self, action):
        await super().step(action)
        place = len(self.actions)
        return Observation(self._replies[place - 1], done=place == len(self._replies))


def play(chat, environment, turns, task="a task", **changes):
    """A trajectory whose turns are sampled as given."""
    engine = FakeEngine(lambda request, turn: turns[turn], context_tokens=1024)
    settings = LENGTHS | {"stop_ids": None, "turns": len(turns)} | changes

    async def attempt():
        agent = Agent(
            key=key(),
            task=task,
            make_environment=lambda _: environment,
            sampler=InlineSampler(engine),
            commands=Commands(),
            limits=limits(**settings),
            seed=3,
            policy_version=0,
            chat=chat,
        )
        return await agent.act()

    return asyncio.run(attempt()), engine


def trained(trajectory):
    return trajectory.ids[trajectory.loss_mask].tolist()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = chat_folders.write(tmp_path_factory.mktemp("qwen3"), "qwen3")
    return TemplateChat(folder, (CALCULATOR,))


def test_sampled_ids_are_never_tokenised_again(tmp_path):
    """Ids 11, 12 read "ab", and "ab" is id 13: trained are 11, 12
    (huggingface/trl#5224)."""
    words = [*"cdefghijklm", "a", "b", "ab"]
    chat = TemplateChat(chat_folders.toy(tmp_path, words, [("a", "b")]))
    start, end = chat.vocabulary()["<s>"], chat.stop_ids[0]
    assert chat.prompt("ab").tolist() == [start, 13, end, start]
    environment = Replies("ab", "", prompt="ab")
    trajectory, engine = play(chat, environment, [[11, 12, end], [13, end]])
    assert [action.text for action in environment.actions] == ["ab", "ab"]
    assert trained(trajectory) == [11, 12, end, 13, end]
    given = [start, 13, end, start, 11, 12, end, start, 13, end, start, 13, end]
    assert trajectory.ids.tolist() == given
    assert engine.requests[1].new_ids.tolist() == [start, 13, end, start]


def test_thinking_of_earlier_turns_stays_where_it_was_sampled(qwen):
    """The template removes it from a history that is rendered again
    (verl-project/verl#6854, NVIDIA-NeMo/labs-molt#20, THUDM/slime#330)."""
    call = qwen.action(Action("call", "2+5"))
    thought = qwen.action(Action("answer", "<think>\nI add.\n</think>\n\n"))[:-1]
    answer = qwen.action(Action("answer", "7"))
    first = [*thought, *call]
    trajectory, engine = play(qwen, FakeEnvironment(reply="7"), [first, answer])
    parts = [qwen.prompt("2+5"), first, qwen.observation("7"), answer]
    assert trajectory.ids.tolist() == np.concatenate(parts).tolist()
    assert trained(trajectory) == [*first, *answer]
    np.testing.assert_array_equal(engine.requests[1].new_ids, parts[2])
    shown = "".join(piece.text for piece in pieces(qwen, trajectory))
    assert shown.count("I add.") == 1


def test_a_rewritten_history_is_refused_with_where_it_differs():
    """Prompt 1, sampled 50, 51, 52, 2; then 1, 50, 52, 2, 60: two ids in common
    (verl-project/verl#6854, NVIDIA-NeMo/labs-molt#20, THUDM/slime#330)."""
    recorder = Recorder(key(member=4), [1], policy_version=0)
    recorder.action([50, 51, 52, 2], [-1.0] * 4, 0)
    match = r"member 4.* first 2 of .*position 2 it has id 52, the record id 51"
    with pytest.raises(ValueError, match=match):
        recorder.context([1, 50, 52, 2, 60])
    with pytest.raises(ValueError, match=r"first 3 .* it has nothing.* id 52"):
        recorder.context([1, 50, 51])
    recorder.context([1, 50, 51, 52, 2])
    assert recorder.length == 5
    recorder.context([1, 50, 51, 52, 2, 60])
    recorder.action([53, 2], [-1.0] * 2, 0)
    trajectory = recorder.trajectory(StopReason.FINISHED)
    assert trajectory.ids.tolist() == [1, 50, 51, 52, 2, 60, 53, 2]
    assert trained(trajectory) == [50, 51, 52, 2, 53, 2]
    assert trajectory.turns == 2


def test_assistant_turns_of_the_prompt_are_not_trained():
    """5 given tokens of loss 2, 4 sampled ones of loss 1: 1.0, not 1.555556
    (NVIDIA-NeMo/RL#2176, #1960, #1956)."""
    recorder = Recorder(key(), [10, 11, 12, 13, 14], policy_version=0)
    recorder.action([10, 11, 12, 13], [-1.0] * 4, 0)
    trajectory = recorder.trajectory(StopReason.FINISHED)
    weights = losses.token_weights(trajectory.loss_mask, "sequence_mean")
    loss = np.where(np.arange(9) < 5, 2.0, 1.0)
    assert np.sum(loss * weights) == pytest.approx(1.0, abs=1e-6)


def test_numbers_per_token_stay_with_their_tokens():
    """Prompt of two, log-probabilities -1, -2: sliced from the other side they were
    0, 0 (NovaSky-AI/SkyRL#1367)."""
    recorder = Recorder(key(), [8, 9], policy_version=0)
    recorder.action([5, 6], [-1.0, -2.0], 0)
    trajectory = recorder.trajectory(StopReason.FINISHED)
    assert trajectory.logprobs.tolist() == [0, 0, -1, -2]
    row = {"logprobs": trajectory.logprobs, "mask": trajectory.loss_mask}
    padded = padding.pad(row, (8,)).tree
    assert padded["logprobs"][padded["mask"]].tolist() == [-1, -2]


def words_of_four(tmp_path):
    words = [*"ab ", "aa", "aaaa", "bb", "bbbb", " bbbb"]
    merges = [("a", "a"), ("aa", "aa"), ("b", "b"), ("bb", "bb"), (" ", "bbbb")]
    return TemplateChat(chat_folders.toy(tmp_path, words, merges))


def test_lengths_are_tokens_and_not_characters(tmp_path):
    """9 characters, "aaaa bbbb", are 2 tokens: kept at a limit of 4
    (NovaSky-AI/SkyRL#764)."""
    chat = words_of_four(tmp_path)
    action = chat.action(Action("answer", "aaaa bbbb"))
    assert len(action) == 2 + len(chat.stop_ids)
    environment = Replies("", prompt="aaaa bbbb")
    lengths = {"context_tokens": 9, "turn_tokens": 4, "prefill_buckets": (9,)}
    trajectory, engine = play(
        chat, environment, [action], gradient_buckets=(9,), **lengths
    )
    assert trajectory.stop_reason is StopReason.FINISHED
    assert [action.text for action in environment.actions] == ["aaaa bbbb"]
    assert trajectory.action_tokens == 3
    assert engine.requests[0].max_new_tokens == 4
    tasks = TaskSet(["aaaa bbbb", "aaaa" * 9], ["bbbb"], FakeEnvironment, lambda t: t)
    config = Config(rollout=limits(gradient_buckets=(9,), **lengths))
    fitting, _ = run_tasks._fitting(tasks, config, task_tokens.Counts(tasks, chat))
    assert fitting.train == ["aaaa bbbb"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('<tool_call>\n{"name": "bash"}\n</tool_call>', "there is no tool 'bash'"),
        ("<tool_call>\n2+5\n</tool_call>", "the call is no JSON"),
    ],
)
def test_a_malformed_call_is_answered_and_counts_as_a_turn(qwen, text, told):
    environment = FakeEnvironment()
    turns = [qwen.action(Action("answer", said)) for said in (text, "7")]
    trajectory, engine = play(qwen, environment, turns)
    assert [action.text for action in environment.actions] == ["7"]
    assert told in qwen.decode(engine.requests[1].new_ids)
    assert (trajectory.turns, trajectory.stop_reason) == (2, StopReason.FINISHED)
    assert trained(trajectory) == np.concatenate(turns).tolist()
    last, _ = play(qwen, FakeEnvironment(), turns[:1])
    assert last.stop_reason is StopReason.TURN_LIMIT


def test_the_end_token_of_a_cut_action_is_observed(qwen):
    words = qwen.action(Action("answer", "one two three"))[:4]
    answer = qwen.action(Action("answer", "7"))
    cut = {"cut_actions": "run", "turn_tokens": 4}
    trajectory, engine = play(qwen, Replies("go on", ""), [words, answer], **cut)
    end = qwen.vocabulary()["<|im_end|>"]
    assert engine.requests[1].new_ids[0] == end
    assert trained(trajectory) == [*words, *answer]


def test_end_tokens_are_trained_as_sampled(qwen):
    """Both of the folder's, one of them its padding; never judged by their value."""
    ends = qwen.stop_ids
    assert len(ends) == 2
    turns = [[*qwen.action(Action("answer", "a"))[:-1], end] for end in ends]
    trajectory, engine = play(qwen, Replies("b", ""), turns)
    assert trained(trajectory) == [token for turn in turns for token in turn]
    assert engine.requests[0].stop_ids == ends
    told = qwen.observation([Message("user", "b")])
    np.testing.assert_array_equal(engine.requests[1].new_ids, told)


SEARCH = {
    "name": "search",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}


def calls(*pairs):
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in pairs
    )


class Credited(FakeEnvironment):
    """Answers every call with its number, a credit of .5 and a weight of 2."""

    done_at = 99

    async def step(self, action):
        await super().step(action)
        done = len(self.actions) == self.done_at or action.kind == "answer"
        return Observation(f"r{len(self.actions)}", done=done, credit=0.5, weight=2.0)


@pytest.fixture(scope="module")
def searching(tmp_path_factory):
    folder = chat_folders.write(tmp_path_factory.mktemp("qwen3"), "qwen3")
    return TemplateChat(folder, (CALCULATOR, SEARCH))


def test_all_calls_of_a_turn_are_run_in_order_and_answered_one_by_one(searching):
    text = "Both.\n" + calls(
        ("calculator", '{"expression": "1+1"}'),
        ("bash", "{}"),
        ("search", '{"query": "</tool_call>"}'),
    )
    environment = Credited()
    turns = [searching.action(Action("answer", said)) for said in (text, "7")]
    trajectory, engine = play(searching, environment, turns)
    first, second, answer = environment.actions
    assert (first.name, first.call_id, first.text) == ("calculator", "call_0", "1+1")
    assert (second.name, second.call_id) == ("search", "call_2")
    assert [call.name for call in second.calls] == ["calculator", "", "search"]
    assert (second.speech, answer.kind) == ("Both.", "answer")
    told = searching.decode(engine.requests[1].new_ids)
    replies = [
        "r1",
        "error: there is no tool 'bash'; there is: calculator, search",
        "r2",
    ]
    responses = "".join(
        f"\n<tool_response>\n{reply}\n</tool_response>" for reply in replies
    )
    assert told == f"\n<|im_start|>user{responses}<|im_end|>\n<|im_start|>assistant\n"
    assert trained(trajectory) == np.concatenate(turns).tolist()
    first_token = np.flatnonzero(trajectory.loss_mask)[0]
    assert trajectory.turn_credits[first_token] == 0.5 + 0.5
    assert trajectory.turn_weights[first_token] == 2.0 * 2.0


def test_a_call_that_ends_the_attempt_is_the_last_one_run(searching):
    text = calls(*[("search", '{"query": "a"}')] * 3)
    environment = Credited()
    environment.done_at = 2
    turns = [searching.action(Action("answer", text))]
    trajectory, _ = play(searching, environment, turns)
    assert len(environment.actions) == 2
    assert trajectory.stop_reason is StopReason.FINISHED


@pytest.mark.parametrize("wrapped", [False, True])
def test_malformed_calls_reach_the_environment_that_asks_for_them(searching, wrapped):
    class Seeing(FakeEnvironment):
        sees_malformed = True

    environment = Seeing()
    none = LatencyConfig()
    played = WithLatency(environment, none, none, (0,)) if wrapped else environment
    text = calls(("bash", "{}"), ("search", '{"query": "a"}'))
    turns = [
        searching.action(Action("answer", said)) for said in (text, "<tool_call>", "7")
    ]
    play(searching, played, turns)
    assert [action.kind for action in environment.actions] == [
        "malformed",
        "call",
        "malformed",
        "answer",
    ]
    assert "no tool 'bash'" in environment.actions[0].problem


def test_an_environment_may_say_who_speaks_and_say_several_things(qwen):
    class Simulated(FakeEnvironment):
        async def step(self, action):
            await super().step(action)
            said = Message("user", "Too high"), Message("user", "Guess again.")
            return Observation(messages=said, done=len(self.actions) == 2)

    turns = [qwen.action(Action("answer", said)) for said in ("50", "7")]
    _, engine = play(qwen, Simulated(), turns)
    assert qwen.decode(engine.requests[1].new_ids) == (
        "\n<|im_start|>user\nToo high<|im_end|>"
        "\n<|im_start|>user\nGuess again.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_task_may_bring_its_own_tools_and_its_prompt_a_conversation(tmp_path):
    """Two tasks of one run, each with one tool, through a pool and the counts."""
    folder = chat_folders.write(tmp_path, "qwen3")
    chat = TemplateChat(folder)
    names = {"sum": CALCULATOR, "find": SEARCH}

    def prompt(task):
        return [{"role": "system", "content": "Be brief."}, Message("user", task)]

    tasks = TaskSet(
        ["sum"], ["find"], FakeEnvironment, prompt, tools=lambda task: [names[task]]
    )
    calculator, searcher = (task_tokens.of_task(chat, tasks, t) for t in names)
    assert task_tokens.of_task(chat, tasks, "sum") is calculator
    shown = {t: task_tokens.of_task(chat, tasks, t) for t in names}
    lengths = {t: task_tokens.tokens_of(tasks, chat, t) for t in names}
    for task, own in shown.items():
        ids = own.prompt(conversation(prompt(task)))
        text = own.decode(ids)
        assert len(ids) == lengths[task] and "Be brief." in text
        other = names["find" if task == "sum" else "sum"]
        assert names[task].get("function", names[task])["name"] in text
        assert other.get("function", other)["name"] not in text
    turns = [
        calculator.action(Action("call", "1+1")),
        chat.action(Action("answer", "2")),
    ]

    class Asking(FakeEnvironment):
        async def start(self, task):
            return prompt(task)

    environment = Asking()
    trajectory, _ = play(calculator, environment, turns, task="sum")
    assert [action.kind for action in environment.actions] == ["call", "answer"]
    assert calculator.decode(trajectory.ids).count("Be brief.") == 1
    environment = Asking()
    turns = [
        searcher.action(Action("answer", said))
        for said in (calls(("calculator", "{}")), "2")
    ]
    play(searcher, environment, turns, task="find")
    assert [action.kind for action in environment.actions] == ["answer"]  # no such tool


@pytest.mark.parametrize(
    "said",
    [7, None, [], [7], [{"role": "user"}], [{"role": "bot", "content": "x"}], [""]],
)
def test_what_is_no_conversation_fails_that_attempt_by_name(qwen, said):
    told = r"start\(\) returned .*, expected the prompt's text"
    with pytest.raises(Stopped, match=told):
        play(qwen, FakeEnvironment(prompt=said), turns=[[1]])


THOUGHTS = {"thinking_tokens": 4, "turn_tokens": 32}


def thinking(chat, *texts):
    """Ids of parts of turns; the last of a turn is ended."""
    return [
        chat.action(Action("answer", text.removesuffix("..."))).tolist()[
            : -1 if text.endswith("...") else None
        ]
        for text in texts
    ]


@pytest.mark.parametrize("template_opens", [False, True])
def test_a_thought_that_is_too_long_is_closed_and_the_turn_goes_on(
    tmp_path, template_opens
):
    folder = chat_folders.write(tmp_path, "qwen3")
    if template_opens:
        chat_folders.open_thoughts(folder)
    chat = TemplateChat(folder, (CALCULATOR,))
    start = "I add..." if template_opens else "<think>\nI..."
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+5"}}'
    parts = thinking(chat, start, f"{call}\n</tool_call>", start, "7")
    environment = Credited()
    trajectory, engine = play(chat, environment, parts, **THOUGHTS)
    first, second = environment.actions
    thought = start.removesuffix("...").removeprefix("<think>").strip()
    assert (first.kind, first.text, first.thought) == ("call", "2+5", thought)
    assert (second.kind, second.text, second.thought) == ("answer", "7", thought)
    closed = chat.decode(engine.requests[1].new_ids)
    assert closed == "\n</think>\n\n"
    assert trained(trajectory) == [token for part in parts for token in part]
    # Credit is of the whole turn; the closing tokens have none.
    mask, weights = trajectory.loss_mask, trajectory.turn_weights
    assert set(weights[mask]) == {2.0} and set(weights[~mask]) == {1.0}
    assert (trajectory.turns, trajectory.stop_reason) == (2, StopReason.FINISHED)
    most = [request.max_new_tokens for request in engine.requests]
    assert most == [4, 28, 4, 28]
    seeds = [request.seed[6 - 1 :] for request in engine.requests]
    assert seeds == [(0,), (0, 1), (1,), (1, 1)]


def test_a_thought_that_ends_in_time_is_left_as_it_is(qwen):
    """It only pauses: the recorded turn is one piece, and a stop text spans it."""
    parts = thinking(qwen, "<think>a</think>", "7 </se...", "arch>...")
    ended = [*parts[0][:-1], *parts[1]]
    environment = Replies("")
    trajectory, engine = play(
        qwen,
        environment,
        [ended, parts[2]],
        **THOUGHTS | {"stop_texts": ("</search>",)},
    )
    assert not len(engine.requests[1].new_ids)
    (action,) = environment.actions
    assert (action.text, action.thought) == ("7 </search>", "a")
    assert trained(trajectory) == ended + parts[2]
    assert trajectory.turns == 1


def test_a_teacher_scores_what_was_sampled_before_and_behind_a_closed_thought(qwen):
    parts = thinking(qwen, "<think>\nI...", "7")
    engine = FakeEngine(lambda request, turn: parts[turn], context_tokens=1024)
    turns = []

    async def attempt():
        agent = Agent(
            key=key(),
            task="a task",
            make_environment=lambda _: Replies(""),
            sampler=InlineSampler(engine),
            commands=Commands(),
            limits=limits(**LENGTHS | {"stop_ids": None} | THOUGHTS),
            seed=3,
            policy_version=0,
            chat=qwen,
            teacher=FakeTeacher(),
            on_turn=turns.append,
        )
        return await agent.scored(await agent.act())

    trajectory = asyncio.run(attempt())
    np.testing.assert_array_equal(trajectory.teacher.known, trajectory.loss_mask)
    assert [turn.turn for turn in turns] == [0, 1]
    told = [(turn.start, len(turn.trajectory.ids)) for turn in turns]
    assert told == feed.turns(trajectory)


def test_a_thought_without_room_behind_it_ends_as_any_cut_action(qwen):
    (start,) = thinking(qwen, "<think>\nI...")
    closing = qwen.closing(np.array(start))
    lengths = {"turn_tokens": 32, "thinking_tokens": len(start)}
    # Without room for a token behind the closing ones, and with room for one.
    for room, requests in ((len(closing), 1), (len(closing) + 1, 2)):
        tokens = len(qwen.prompt("2+5")) + len(start) + room
        lengths |= {"context_tokens": tokens}
        lengths |= {"prefill_buckets": (tokens,), "gradient_buckets": (tokens,)}
        environment = FakeEnvironment()
        trajectory, engine = play(qwen, environment, [start, start[:1]], **lengths)
        assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
        assert len(engine.requests) == requests and not environment.actions
        assert trained(trajectory) == start + start[:1] * (requests - 1)


def test_a_bound_for_thoughts_needs_a_template_and_room():
    with pytest.raises(ConfigError, match="thinking_tokens is 4 with byte-level"):
        Config(rollout=limits(thinking_tokens=4))
    with pytest.raises(ConfigError, match=r"thinking_tokens is 8 with .* 8"):
        limits(thinking_tokens=8, turn_tokens=8)


SAID = Message("user", "b")


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        (Observation("a", role="judge"), "'judge', expected a role of system, user"),
        (Observation("a", role=5), "5, expected a role of"),
        (
            Observation(messages=(Message("ipython", "a"),)),
            "'ipython', expected a role",
        ),
        (Observation(messages=(SAID, "a")), "messages that are a Message each"),
        (Observation(messages=(Message("user", None),)), "messages with text"),
        (Observation(messages=(Message("tool", "a", 3),)), "a text as call_id"),
        (Observation(messages=5), "an Observation with messages"),
        (Observation("a", messages=(SAID,)), "a text or messages, and got both"),
    ],
)
def test_an_observation_nobody_can_say_fails_that_trajectory(
    qwen, observation, expected
):
    class Wrong(FakeEnvironment):
        async def step(self, action):
            return observation

    turns = [qwen.action(Action("answer", "7"))] * 2
    with pytest.raises(Stopped, match=expected) as stopped:
        play(qwen, Wrong(), turns)
    assert stopped.value.stop_reason is StopReason.ENVIRONMENT_ERROR


def test_the_answer_of_a_call_has_its_id(qwen):
    """Also where the turn makes one call alone."""
    shown = []

    class Chat(TemplateChat):
        def observation(self, messages, ended=True):
            shown.append(messages)
            return super().observation(messages, ended)

    chat = Chat(qwen._folder, (CALCULATOR,))
    turns = [chat.action(Action("call", "2+5")), chat.action(Action("answer", "7"))]
    environment = FakeEnvironment()
    play(chat, environment, turns)
    call = environment.actions[0]
    assert call.call_id and list(shown[0]) == [Message("tool", "2", call.call_id)]


def test_an_environment_cuts_a_long_text_in_tokens(qwen):
    engine = FakeEngine(
        lambda request, turn: qwen.action(Action("answer", "7")), context_tokens=1024
    )
    text = "first line\n" + "line of output\n" * 9000 + "last line"
    seen = []

    class Cutting(FakeEnvironment):
        def __init__(self, context):
            super().__init__()
            self.context = context

        async def step(self, action):
            seen.append(self.context.cut(text, 100))
            assert self.context.cut("short", 100) == "short"
            assert self.context.cut(text, 3) == ""
            return Observation(seen[-1], done=True)

    async def attempt():
        agent = Agent(
            key=key(),
            task="a task",
            make_environment=Cutting,
            sampler=InlineSampler(engine),
            commands=Commands(),
            limits=limits(**LENGTHS | {"stop_ids": None}),
            seed=3,
            policy_version=0,
            chat=qwen,
        )
        return await agent.act()

    asyncio.run(attempt())
    (shown,) = seen
    assert 60 <= len(qwen.observation(shown)) <= 100
    assert shown.startswith("first line\n") and shown.endswith("last line")
    assert "characters left out]" in shown
