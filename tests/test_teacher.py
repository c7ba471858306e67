"""Teachers on their own: whose vocabulary they share, and how scores are kept."""

import asyncio
import threading

import numpy as np
import pytest
from rollout_fakes import FakeTeacher, key, teacher_logprobs

from thundersync_jax.chat import byte_level
from thundersync_jax.engines.base import Scored
from thundersync_jax.errors import ConfigError
from thundersync_jax.rollout.commands import Stopped
from thundersync_jax.rollout.events import Turn
from thundersync_jax.rollout.recorder import Recorder
from thundersync_jax.rollout.teacher import LocalTeacher, TurnScorer, check_vocabulary
from thundersync_jax.types import StopReason, TeacherScores, Trajectory

LETTERS = {"a": 0, "b": 1}


def test_vocabularies_of_one_size_that_mean_other_tokens_are_refused():
    """Ids of one tokenizer, scored by another (huggingface/trl#4562)."""
    with pytest.raises(
        ConfigError, match="of 2 and 2 tokens: 'a' is id 0 .* and id 1 of the teacher"
    ):
        check_vocabulary(LETTERS, {"a": 1, "b": 0}, 2, 2)
    with pytest.raises(ConfigError, match="'b' is id 1 .* no token of the teacher"):
        check_vocabulary(LETTERS, {"a": 0, "c": 1}, 2, 2)


@pytest.mark.parametrize("widths", [(8, 10), (10, 8), (8, 8)])
def test_equal_vocabularies_padded_differently_are_one(widths):
    """huggingface/trl#2215: 151,936 rows against 152,064."""
    content = {str(i): i for i in range(8)}
    assert check_vocabulary(content, dict(reversed(content.items())), *widths) == 8


def test_different_sizes_of_content_name_both():
    content = {str(i): i for i in range(8)}
    with pytest.raises(ConfigError, match="of 8 and 10 tokens: 'x' is no token of the"):
        check_vocabulary(content, content | {"x": 8, "y": 9}, 10, 10)


def test_a_vocabulary_that_its_own_model_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match="teacher's .* id 7 and its model 7 rows"):
        content = {str(i): i for i in range(8)}
        check_vocabulary(content, content, 8, 7)


def test_every_byte_level_token_has_a_name_of_its_own():
    content = byte_level.vocabulary()
    assert sorted(content.values()) == list(range(byte_level.END + 1))
    assert content["<0x41>"] == ord("A") and content["<end>"] == byte_level.END
    width = byte_level.VOCAB_SIZE
    assert check_vocabulary(content, byte_level.vocabulary(), width, width) == width


def recorder(*pieces):
    """Recorded lengths: a prompt, then actions and observations in turn."""
    record = Recorder(key(), np.arange(pieces[0]), 0)
    extend(record, *pieces[1:])
    return record


def extend(record, *pieces):
    for number, length in enumerate(pieces):
        if number % 2 == 0:
            record.action(np.arange(length), np.full(length, -1.0), 0)
        else:
            record.observation(np.arange(length))


def numbers(*shape):
    return -np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("kind", ["sampled", "top_k", "full"])
def test_scores_stand_at_their_positions_and_snapshots_stay(kind):
    entries = {"sampled": 1, "top_k": 2, "full": 9}[kind]
    record = recorder(3, 2)
    assert record.trajectory(None).teacher is None
    expected = np.zeros((0, entries), np.float32)
    snapshots = []
    for first, end in [(3, 5), (8, 12), (60, 61)]:
        if first > 5:
            extend(record, 1, first - record.length - 1)  # an action nobody scores
            extend(record, end - first)
        logprobs = numbers(end - first, entries)
        ids = np.tile(np.arange(first, first + 2), (end - first, 1))
        ids = ids if kind == "top_k" else None
        record.score(np.arange(first, end), Scored(logprobs, ids))
        gap = np.zeros((first - len(expected), entries))
        expected = np.concatenate([expected, gap, logprobs])
        snapshots.append((record.trajectory(None), expected))
    for trajectory, expected in snapshots:
        scores = trajectory.teacher
        assert len(scores.known) == len(trajectory.ids) == len(expected)
        np.testing.assert_array_equal(scores.logprobs, expected)
        np.testing.assert_array_equal(scores.known, expected[:, 0] != 0)
        if kind == "top_k":
            np.testing.assert_array_equal(scores.ids[3:5], [[3, 4]] * 2)
            assert not np.any(scores.ids[~scores.known])
        else:
            assert scores.ids is None


def test_trained_tokens_without_scores_are_told():
    """Fields lost on the way turned distillation off (NousResearch/atropos#456)."""
    record = recorder(3, 2, 4, 5)
    assert record.trajectory(StopReason.FINISHED).unscored_tokens == 7
    record.score(np.arange(3, 5), Scored(numbers(2, 1), None))
    trajectory = record.trajectory(StopReason.FINISHED)
    assert trajectory.unscored_tokens == 5
    assert trajectory.teacher.known.tolist() == [False] * 3 + [True] * 2 + [False] * 9
    record.score(np.arange(9, 14), Scored(numbers(5, 1), None))
    record.observation(np.arange(40))
    assert record.trajectory(StopReason.FINISHED).unscored_tokens == 0


@pytest.mark.parametrize(
    "logprobs, ids, message",
    [
        (numbers(3, 1), None, "2 positions with shape"),
        (numbers(2), None, "shape"),
        (np.array([[-1], [np.nan]]), None, "not finite"),
        (np.array([[-1], [-np.inf]]), None, "not finite"),
        (np.array([[-1, -2], [np.inf, -1]]), None, "not finite"),
        (numbers(2, 2), None, "2 entries a position after 1"),
        (numbers(2, 1), np.zeros((2, 1), int), "one kind"),
    ],
)
def test_scores_that_are_none_are_refused(logprobs, ids, message):
    record = recorder(3, 1, 1, 2)
    record.score(np.array([3]), Scored(numbers(1, 1), None))
    with pytest.raises(ValueError, match=message):
        record.score(np.array([5, 6]), Scored(logprobs, ids))
    assert record.trajectory(None).unscored_tokens == 2


def test_an_id_that_the_teacher_excludes_is_a_score():
    record = recorder(3, 1)
    logprobs = np.array([[0.0, -np.inf]], np.float32)
    record.score(np.array([3]), Scored(logprobs, None))
    np.testing.assert_array_equal(
        record.trajectory(None).teacher.logprobs[3:], logprobs
    )


def test_scores_of_another_length_than_the_trajectory_are_refused():
    with pytest.raises(ValueError, match=r"\(4, 1\).*\(5,\) known"):
        TeacherScores(np.zeros((4, 1)), None, np.zeros(5, bool))
    scores = TeacherScores(np.zeros((4, 1)), None, np.zeros(4, bool))
    with pytest.raises(ValueError, match="scores have length 4 with 3 ids"):
        Trajectory(key(), *np.zeros((3, 3)), 1, StopReason.FINISHED, 0, teacher=scores)


def score_turns(teacher, lengths):
    """Adds turns of one session at once; what was told, and how it ended."""
    told = []

    async def attempt():
        record = recorder(3)
        scorer = TurnScorer(
            teacher, "s", record, lambda turn, _: told.append(turn.turn), told.clear
        )
        for number, length in enumerate(lengths):
            start = record.length
            extend(record, length)
            positions = np.arange(start, record.length)
            scorer.add(Turn(key(), number, start, record.trajectory(None)), positions)
        try:
            await scorer.finish()
        finally:
            scorer.stop()
        return record.trajectory(None)

    return asyncio.run(attempt()), told


def test_turns_of_a_session_are_asked_for_in_order_one_at_a_time():
    busy = []

    async def slow_first(tokens, number):
        busy.append(number)
        assert busy == [number]
        await asyncio.sleep(0.02 if number == 0 else 0)
        busy.clear()

    teacher = FakeTeacher(slow_first)
    trajectory, told = score_turns(teacher, [2, 1, 3])
    assert told == [0, 1, 2] and trajectory.unscored_tokens == 0
    asked = [(len(tokens), positions) for _, tokens, positions in teacher.asked]
    assert asked == [(5, [3, 4]), (6, [5]), (9, [6, 7, 8])]
    np.testing.assert_array_equal(
        trajectory.teacher.logprobs[3:5], teacher_logprobs(trajectory.ids[:5])[3:]
    )
    assert teacher.released == ["s"]


def test_what_a_teacher_raises_is_one_line_with_the_turn():
    async def second_fails(tokens, number):
        if number == 1:
            raise ConnectionError("gone\nfor good")

    with pytest.raises(Stopped) as stopped:
        score_turns(FakeTeacher(second_fails), [2, 1, 3])
    assert stopped.value.stop_reason is StopReason.TEACHER_ERROR
    assert stopped.value.stop_reason.failed
    assert stopped.value.reason == "scoring of turn 1: ConnectionError: gone"


class Stepped:
    """A passive engine that answers in the order of `submit`, some at a time."""

    def __init__(self):
        self.threads = set()
        self.queue = []
        self.released = []

    def submit(self, request):
        self.threads.add(threading.current_thread().name)
        if request.session == "refused":
            raise ValueError("no such session")
        self.queue.append(request)

    def step(self):
        queue, self.queue = self.queue, []
        return [Scored(numbers(len(r.positions), 1), None, r.session) for r in queue]

    def release(self, session):
        self.released.append(session)

    @property
    def busy(self):
        return bool(self.queue)


def test_local_teacher_answers_many_sessions_from_a_thread_of_its_own():
    engine, died = Stepped(), []

    async def ask():
        teacher = LocalTeacher(engine, asyncio.get_running_loop(), died.append)
        tokens = np.arange(5)
        *answers, refused = await asyncio.gather(
            *(teacher.logprobs(n, tokens, np.arange(1, 2 + n)) for n in range(3)),
            teacher.logprobs("refused", tokens, np.arange(1, 2)),
            return_exceptions=True,
        )
        teacher.release(1)
        assert await asyncio.to_thread(teacher.close, 5.0)
        return answers, refused

    answers, refused = asyncio.run(ask())
    assert [len(answer.logprobs) for answer in answers] == [1, 2, 3]
    assert isinstance(refused, ValueError) and not died
    assert engine.threads == {"teacher"} and engine.released == [1]
