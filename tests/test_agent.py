"""One attempt: what is recorded, how it ends, who is to blame."""

import asyncio
import contextlib

import numpy as np
import pytest
from rollout_fakes import ANSWER, CALL, FakeEngine, FakeEnvironment, key, limits, never

from thundersync_jax.chat import base, byte_level
from thundersync_jax.chat.byte_level import END
from thundersync_jax.envs.base import Action, Observation
from thundersync_jax.errors import PolicyFault
from thundersync_jax.rollout.agent import Agent
from thundersync_jax.rollout.commands import Commands, Stopped
from thundersync_jax.rollout.recorder import Recorder
from thundersync_jax.types import StopReason

_BYTE_LEVEL = byte_level.ByteLevel()


class InlineSampler:
    """Steps the engine inside the coroutine."""

    def __init__(self, engine):
        self.engine = engine

    async def sample(self, request):
        self.engine.submit(request)
        (response,) = self.engine.step()
        return response

    def release(self, session):
        self.engine.release(session)


def play(
    environment,
    policy=None,
    engine=None,
    version=0,
    seed=3,
    verify=True,
    chat=_BYTE_LEVEL,
    **changes,
):
    """Returns (trajectory, reward or None, engine) of one attempt."""
    engine = engine or FakeEngine(policy, policy_version=version)

    async def attempt():
        agent = Agent(
            key=key(member=2, group=1, step=5),
            task="a task",
            make_environment=lambda _: environment,
            sampler=InlineSampler(engine),
            commands=Commands(),
            limits=limits(**changes),
            seed=seed,
            policy_version=version,
            chat=chat,
        )
        trajectory = await agent.act()
        verdict = await agent.verify() if verify else None
        return trajectory, verdict.reward if verify else None

    return *asyncio.run(attempt()), engine


def call_then_answer(request, turn):
    return CALL if turn == 0 else ANSWER


def test_trained_tokens_are_exactly_the_sampled_ones():
    """Tool output is never trained (huggingface/trl#4975)."""
    environment = FakeEnvironment()
    trajectory, reward, engine = play(environment, call_then_answer)
    parts = [
        byte_level.render_prompt("2+5"),
        CALL,
        byte_level.render_observation("2"),
        ANSWER,
    ]
    sampled = np.repeat([False, True, False, True], [len(part) for part in parts])
    np.testing.assert_array_equal(trajectory.ids, np.concatenate(parts))
    np.testing.assert_array_equal(trajectory.loss_mask, sampled)
    np.testing.assert_array_equal(trajectory.logprobs, np.where(sampled, -0.5, 0))
    assert trajectory.stop_reason is StopReason.FINISHED
    assert (trajectory.turns, reward) == (2, 1.0)
    assert [action.text for action in environment.actions] == ["1+1", "7"]
    # A session's later requests bring only what is new.
    np.testing.assert_array_equal(engine.requests[1].new_ids, parts[2])


def test_answer_without_end_token_trains_its_own_tokens_only():
    """No padding is taken for the answer (verl-project/verl#3805)."""
    trajectory, _, _ = play(FakeEnvironment(), lambda *_: [53, 54, 55], turn_tokens=3)
    assert trajectory.action_tokens == 3
    assert trajectory.ids[-1] == 55


def test_every_turn_of_a_trajectory_is_trained():
    """Not only the last one (NovaSky-AI/SkyRL#1507)."""
    trajectory, _, _ = play(FakeEnvironment(), lambda *_: CALL, turns=3)
    assert trajectory.action_tokens == 3 * len(CALL)


def test_observation_that_does_not_fit_is_context_overflow_not_a_parse_failure():
    """Window 16, prompt 10, reply 8 (thinking-machines-lab/tinker-cookbook#506)."""
    environment = FakeEnvironment(prompt="12345678", reply="123456")
    assert len(byte_level.render_prompt("12345678")) == 10
    assert len(byte_level.render_observation("123456")) == 8
    trajectory, reward, _ = play(
        environment,
        engine=FakeEngine(lambda *_: [CALL[0], END], 16),
        context_tokens=16,
        turn_tokens=4,
        prefill_buckets=(16,),
        gradient_buckets=(16,),
    )
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert [action.kind for action in environment.actions] == ["call"]
    assert len(trajectory.ids) == 12
    assert reward == 1.0


def test_turn_at_its_token_limit_is_length_and_is_not_executed():
    """4 new tokens at limit 4 (thinking-machines-lab/tinker-cookbook#506)."""
    environment = FakeEnvironment()
    trajectory, reward, engine = play(environment, lambda *_: [53] * 4, turn_tokens=4)
    assert trajectory.stop_reason is StopReason.LENGTH
    assert trajectory.action_tokens == 4
    assert environment.actions == []
    assert engine.requests[0].max_new_tokens == 4
    assert reward == 1.0


@pytest.mark.parametrize(
    "context, stop_reason", [(8, "context_overflow"), (9, "finished")]
)
def test_observation_fits_with_room_for_exactly_one_token(context, stop_reason):
    # Prompt 3 tokens, call 2, observation 3; then an empty answer, the end token.
    trajectory, _, engine = play(
        FakeEnvironment(prompt="1", reply="1"),
        lambda request, _: [CALL[0], END][-request.max_new_tokens :],
        context_tokens=context,
        turn_tokens=2,
        prefill_buckets=(context,),
        gradient_buckets=(context,),
    )
    assert trajectory.stop_reason.value == stop_reason
    assert [r.max_new_tokens for r in engine.requests] == [2, 1][: context - 7]


def test_action_cut_by_the_end_of_the_context_is_context_overflow():
    trajectory, _, _ = play(
        FakeEnvironment(prompt="1"),
        lambda request, _: [53] * request.max_new_tokens,
        context_tokens=8,
        turn_tokens=7,
        prefill_buckets=(8,),
        gradient_buckets=(8,),
    )
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert len(trajectory.ids) == 8


def test_last_allowed_turn_is_executed_and_ends_with_turn_limit():
    environment = FakeEnvironment()
    trajectory, reward, _ = play(environment, lambda *_: CALL, turns=2)
    assert trajectory.stop_reason is StopReason.TURN_LIMIT
    assert len(environment.actions) == 2
    assert trajectory.loss_mask[-1]
    assert reward == 1.0


def test_cut_action_is_run_on_request_with_its_ids():
    environment = FakeEnvironment()
    trajectory, reward, engine = play(
        environment,
        lambda _, turn: [53, 300 + turn, 54, 55],
        turn_tokens=4,
        turns=2,
        cut_actions="run",
    )
    assert trajectory.stop_reason is StopReason.TURN_LIMIT
    assert [action.kind for action in environment.actions] == ["malformed"] * 2
    assert [action.ids for action in environment.actions] == [
        (53, 300, 54, 55),
        (53, 301, 54, 55),
    ]
    assert (trajectory.turns, trajectory.action_tokens, reward) == (2, 8, 1.0)
    reply = byte_level.render_observation("2")
    np.testing.assert_array_equal(engine.requests[1].new_ids, reply)


@pytest.mark.parametrize(
    "done, stop_reason", [(False, "context_overflow"), (True, "finished")]
)
def test_action_cut_by_the_end_of_the_context_is_run_on_request(done, stop_reason):
    class Ending(FakeEnvironment):
        async def step(self, action):
            await super().step(action)
            return Observation("", done)

    environment = Ending(prompt="1")
    trajectory, reward, _ = play(
        environment,
        lambda request, _: [53] * request.max_new_tokens,
        context_tokens=8,
        turn_tokens=7,
        prefill_buckets=(8,),
        gradient_buckets=(8,),
        cut_actions="run",
    )
    assert trajectory.stop_reason.value == stop_reason
    assert [action.ids for action in environment.actions] == [(53,) * 5]
    assert (len(trajectory.ids), reward) == (8, 1.0)


def test_stop_ids_of_the_settings_end_actions():
    environment = FakeEnvironment()
    trajectory, _, engine = play(environment, lambda *_: [55, 10], stop_ids=(10, 300))
    assert [request.stop_ids for request in engine.requests] == [(10, 300)]
    assert environment.actions == [Action("answer", "7")]
    assert environment.actions[0].ids == (55, 10)
    assert trajectory.stop_reason is StopReason.FINISHED
    # <end> is a token like any other then, and this action one that was cut.
    trajectory, _, _ = play(FakeEnvironment(), lambda *_: ANSWER, stop_ids=(10, 300))
    assert trajectory.stop_reason is StopReason.LENGTH


def test_stop_texts_of_the_settings_end_actions():
    """<end> is then supplied where the format needs it, and never trained."""
    said = [list(text.encode()) for text in ("ab</q>", "cd</q>")]
    seen = []

    class Search(FakeEnvironment):
        async def step(self, action):
            seen.append(action)
            return Observation("2", done=len(seen) == 2)

    trajectory, _, engine = play(
        Search(), lambda _, turn: said[turn], stop_texts=("</q>", "</a>")
    )
    texts = ("</q>", "</a>")
    assert [request.stop_texts.texts for request in engine.requests] == [texts] * 2
    assert seen == [Action("answer", "ab</q>"), Action("answer", "cd</q>")]
    assert trajectory.ids[trajectory.loss_mask].tolist() == said[0] + said[1]
    assert trajectory.stop_reason is StopReason.FINISHED
    environment = FakeEnvironment()
    trajectory, _, _ = play(environment, lambda *_: said[0])
    assert trajectory.stop_reason is StopReason.LENGTH and not environment.actions
    _, _, engine = play(environment, lambda *_: ANSWER, stop_texts=("</q>",))
    assert environment.actions == [Action("answer", "7")]


def test_prompt_without_room_for_a_token_is_a_failure():
    with pytest.raises(Stopped, match="66 tokens.*64") as stopped:
        play(FakeEnvironment(prompt="x" * 64))
    assert stopped.value.stop_reason is StopReason.CONTEXT_OVERFLOW
    with pytest.raises(Stopped, match="64 tokens"):
        play(FakeEnvironment(prompt="x" * 62))
    trajectory, _, _ = play(FakeEnvironment(prompt="x" * 61), lambda *_: [END])
    assert trajectory.action_tokens == 1


def test_sampling_seed_names_the_turn_and_nothing_else():
    _, _, engine = play(FakeEnvironment(), call_then_answer, seed=3)
    assert [request.seed for request in engine.requests] == [
        (3, 0, 5, 1, 2, 0),
        (3, 0, 5, 1, 2, 1),
    ]


@pytest.mark.parametrize(
    "reward", [True, 3, 0.5, np.float32(0.5), np.int64(2), np.bool_(1)]
)
def test_any_finite_number_is_a_reward(reward):
    assert play(FakeEnvironment(reward=reward))[1] == float(reward)


@pytest.mark.parametrize(
    "reward",
    [None, float("nan"), float("inf"), "1.0", np.float32("-inf"), [1], 10**400],
)
def test_anything_else_is_an_invalid_reward_and_never_zero(reward):
    """A missing reward must not become 0 (huggingface/trl#6427, ms-swift#8123)."""
    with pytest.raises(Stopped, match="expected a finite number") as stopped:
        play(FakeEnvironment(reward=reward))
    assert stopped.value.stop_reason is StopReason.INVALID_REWARD


def test_environment_faults_are_values_that_name_the_command():
    async def self_cancelling():
        raise asyncio.CancelledError

    class NotAwaitable(FakeEnvironment):
        def step(self, action):
            return None

    class NoObservation(FakeEnvironment):
        async def step(self, action):
            return None

    cases = [
        (FakeEnvironment(prompt=7), "start.. returned 7"),
        (FakeEnvironment(reply=None), "step.. of turn 0 returned None"),
        (NoObservation(), "step.. of turn 0 returned None"),
        (NotAwaitable(), "step.. of turn 0 raised TypeError"),
        (FakeEnvironment(start=self_cancelling), "start.. cancelled itself"),
        (object(), "AttributeError"),
    ]
    for environment, reason in cases:
        with pytest.raises(Stopped, match=reason) as stopped:
            play(environment)
        assert stopped.value.stop_reason is StopReason.ENVIRONMENT_ERROR, reason
        assert "\n" not in stopped.value.reason


def test_deadlines_name_what_they_stopped():
    cases = [
        (FakeEnvironment(start=never), {"command_timeout_secs": 0.2}, r"start\(\)"),
        (
            FakeEnvironment(step=never),
            {"command_timeout_secs": 0.2},
            "of turn 0.*0.2",
        ),
        (
            FakeEnvironment(reward=never),
            {"verify_timeout_secs": 0.2},
            "verify.*0.2 s",
        ),
        (
            FakeEnvironment(step=never),
            {"trajectory_timeout_secs": 0.2},
            r"trajectory deadline of 0.2 s .* step\(\) of turn 0",
        ),
    ]
    for environment, changes, reason in cases:
        with pytest.raises(Stopped, match=reason) as stopped:
            play(environment, command_deadline="fail", agent_deadline="fail", **changes)
        assert stopped.value.stop_reason is StopReason.TIMEOUT


def test_a_call_that_takes_too_long_is_told_to_the_policy():
    """What the agent asked for is its own doing."""

    class Slow(FakeEnvironment):
        async def step(self, action):
            if action.kind == "call":
                await never()
            return await super().step(action)

    trajectory, reward, _ = play(
        Slow(),
        call_then_answer,
        engine=FakeEngine(call_then_answer, context_tokens=128),
        command_timeout_secs=0.1,
        context_tokens=128,
        prefill_buckets=(128,),
        gradient_buckets=(128,),
    )
    assert (trajectory.stop_reason, reward) == (StopReason.FINISHED, 1.0)
    observed = byte_level.decode(trajectory.ids[~trajectory.loss_mask])
    assert "<tool>error: it was stopped after 0.1 s, the limit of a call" in observed


def test_an_agent_whose_time_is_up_is_graded_for_what_is_there():
    trajectory, reward, engine = play(
        FakeEnvironment(step=never), trajectory_timeout_secs=0.2
    )
    assert (trajectory.stop_reason, reward) == (StopReason.DEADLINE, 1.0)
    assert not trajectory.stop_reason.failed
    assert trajectory.ids[trajectory.loss_mask].tolist() == ANSWER.tolist()
    assert engine.released == [engine.requests[0].session]
    with pytest.raises(Stopped, match="deadline of 0.2 s passed during start"):
        play(FakeEnvironment(start=never), trajectory_timeout_secs=0.2)


def test_a_start_has_a_deadline_of_its_own():
    slow = FakeEnvironment(start=never)
    with pytest.raises(Stopped, match=r"start\(\) was stopped at its deadline of 0.1"):
        play(slow, start_timeout_secs=0.1)
    with pytest.raises(Stopped, match=r"start\(\) was stopped at its deadline of 0.2"):
        play(slow, command_timeout_secs=0.2)


@pytest.mark.parametrize("given", [None, 0.25, float("nan")])
def test_a_fault_of_the_policy_is_verified_or_has_its_reward(given):
    async def judge():
        raise PolicyFault("it deleted the tests", reward=given)

    trajectory, reward, _ = play(FakeEnvironment(step=judge))
    assert trajectory.stop_reason is StopReason.POLICY_FAULT
    assert reward == (0.25 if given == 0.25 else 1.0)
    if given == 0.25:
        assert play(FakeEnvironment(reward=judge))[1] == 0.25
    else:
        with pytest.raises(Stopped, match="it deleted the tests without a reward"):
            play(FakeEnvironment(reward=judge))
    with pytest.raises(Stopped, match=r"start\(\) raised .*PolicyFault: .* before any"):
        play(FakeEnvironment(start=judge))


def test_session_is_released_however_the_attempt_ends():
    for environment in (FakeEnvironment(), FakeEnvironment(reply=None)):
        engine = FakeEngine()
        with contextlib.suppress(Stopped):
            play(environment, engine=engine)
        assert engine.released == [engine.requests[0].session]


def test_answer_of_another_policy_version_is_refused_with_both_numbers():
    with pytest.raises(Stopped, match="version 6.* version 7") as stopped:
        play(FakeEnvironment(), engine=FakeEngine(policy_version=6), version=7)
    assert stopped.value.stop_reason is StopReason.ENGINE_ERROR


def test_recorder_refuses_what_does_not_belong_together():
    """Lengths that differ are named, never cut (huggingface/trl#5144)."""
    recorder = Recorder(key(member=4), [1, 2], policy_version=7)
    with pytest.raises(ValueError, match="member 4.*version 8.*version 7"):
        recorder.action([3], [-1.0], 8)
    with pytest.raises(ValueError, match="member 4.*2 ids.*(3,)"):
        recorder.action([3, 4], [-1.0, -1.0, -1.0], 7)
    with pytest.raises(ValueError, match="finite"):
        recorder.action([3], [float("nan")], 7)
    with pytest.raises(ValueError, match="at most 0"):
        recorder.action([3], [0.1], 7)
    for ids in ([], [1.5], [[1]]):
        with pytest.raises(ValueError, match="action ids"):
            recorder.action(ids, [-1.0] * len(ids), 7)
    with pytest.raises(ValueError, match="observation ids"):
        recorder.observation([])
    assert recorder.trajectory(StopReason.CANCELLED).ids.tolist() == [1, 2]


def graded(*answers):
    """An environment that answers each action with one of these observations."""

    class Graded(FakeEnvironment):
        async def step(self, action):
            await super().step(action)
            return answers[len(self.actions) - 1]

    return Graded()


def test_credit_of_a_turn_lies_on_its_own_tokens():
    environment = graded(
        Observation("2", credit=0.5, weight=np.float32(2)), Observation("3", credit=-1)
    )
    trajectory, _, _ = play(environment, lambda *_: CALL, turns=2)
    mask = trajectory.loss_mask
    starts = np.flatnonzero(np.diff(mask.astype(int), prepend=0) == 1)
    first = mask & (np.arange(len(mask)) < starts[1])
    second = mask & ~first
    u, v = trajectory.turn_weights, trajectory.turn_credits
    assert (u.dtype, v.dtype) == (np.float32, np.float32)
    np.testing.assert_array_equal(u, np.where(first, 2, 1))
    np.testing.assert_array_equal(v, np.where(first, 0.5, np.where(second, -1, 0)))


def test_turn_that_gets_no_answer_has_no_credit_of_its_own():
    environment = graded(Observation("2", credit=0.5))
    trajectory, _, _ = play(
        environment,
        lambda request, turn: CALL if turn == 0 else [53] * request.max_new_tokens,
        turns=3,
        turn_tokens=len(CALL),
    )
    assert trajectory.stop_reason is StopReason.LENGTH
    credited = np.flatnonzero(trajectory.turn_credits)
    last = np.flatnonzero(trajectory.loss_mask)[-1]
    assert len(credited) == len(CALL) and last not in credited


def test_environment_without_credit_leaves_none():
    trajectory, _, _ = play(FakeEnvironment(), call_then_answer)
    assert trajectory.turn_weights is None and trajectory.turn_credits is None


@pytest.mark.parametrize("given", [{"credit": None}, {"weight": float("nan")}])
def test_credit_that_is_no_number_is_the_environments_fault(given):
    (name,) = given
    with pytest.raises(Stopped, match=f"turn 0 .* with {name} .*finite") as stopped:
        play(graded(Observation("2", **given)), lambda *_: CALL)
    assert stopped.value.stop_reason is StopReason.ENVIRONMENT_ERROR


def test_record_does_not_change_with_the_callers_buffer():
    ids = np.array([5, 6], np.int32)
    recorder = Recorder(key(), ids, policy_version=0)
    ids[:] = 0
    recorder.action([7], [-1.0], 0)
    assert recorder.trajectory(StopReason.FINISHED).ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("setting", ["overflow", "cut"])
def test_an_observation_that_cannot_fit_is_never_tokenised_whole(setting, monkeypatch):
    """10 MB of a tool's output for 128 tokens (huggingface/trl#5521)."""
    encoded = []
    encode = byte_level.encode

    def counted(text):
        encoded.append(len(text))
        return encode(text)

    monkeypatch.setattr(byte_level, "encode", counted)
    reply = "first line" + "x" * 10_000_000 + "last line"
    trajectory, _, _ = play(
        FakeEnvironment(reply=reply),
        call_then_answer,
        engine=FakeEngine(call_then_answer, context_tokens=128),
        context_tokens=128,
        long_observations=setting,
        prefill_buckets=(128,),
        gradient_buckets=(128,),
    )
    assert max(encoded) < 1000
    if setting == "overflow":
        assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
        return
    assert trajectory.stop_reason is StopReason.FINISHED and trajectory.turns == 2
    observed = byte_level.decode(trajectory.ids[~trajectory.loss_mask])
    assert "<tool>first line" in observed and "last line<assistant>" in observed
    assert "characters left out]" in observed


@pytest.mark.parametrize("most", [5, 30, 40, 55, 60, 10_000])
@pytest.mark.parametrize("length", [0, 10, 50, 1000])
def test_a_cut_text_keeps_its_head_and_its_tail(most, length):
    text = "".join(chr(ord("a") + i % 26) for i in range(length))
    asked = []

    def tokens(shown):
        asked.append(len(shown))
        return len(shown)

    shown = base.cut(text, most, tokens)
    assert len(shown) <= most and max(asked, default=0) <= 8 * most + 60
    if length <= most:
        assert shown == text
    elif shown:
        head, _, rest = shown.partition("\n[")
        gone, _, tail = rest.partition(" characters left out]\n")
        assert text.startswith(head) and text.endswith(tail) and head
        assert int(gone) == length - len(head) - len(tail)
        assert abs(len(head) - len(tail)) <= 1
    else:
        assert most < 40
