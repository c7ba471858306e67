"""The teacher: who says how likely a student's own tokens are.

One asynchronous interface, so that scores are awaited while tools run. A local teacher
is a passive engine in a thread of its own, a remote one a client
(`engines.vllm.teacher`). Student and teacher must mean the same by every id, which
`check_vocabulary` checks.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

import numpy as np

from thundersync_jax.engines.base import EngineDriver, OnError, Scored, ScoreRequest
from thundersync_jax.errors import ConfigError, one_line
from thundersync_jax.rollout.commands import Stopped
from thundersync_jax.rollout.events import Turn
from thundersync_jax.rollout.recorder import Recorder
from thundersync_jax.types import StopReason


class Teacher(Protocol):
    """What a pool needs of a teacher; `close` belongs to any thread but its own."""

    async def logprobs(
        self, session: Hashable, tokens: np.ndarray, positions: np.ndarray
    ) -> Scored:
        """Waits for the scores of some positions of a trajectory.

        A session asks for one turn at a time; its tokens only grow. Whatever this
        raises is a failure of the trajectory. Arguments are those of `ScoreRequest`.
        """

    def release(self, session: Hashable) -> None:
        """Ends a session, wherever it stands; unknown sessions are ignored."""

    def close(self, timeout_secs: float) -> bool:
        """Ends whatever it runs; False where that takes longer."""


# (the event loop, a function to call with what the teacher died of) -> a teacher
MakeTeacher = Callable[[asyncio.AbstractEventLoop, OnError], Teacher]


class LocalTeacher(EngineDriver):
    """A passive scoring engine and its thread."""

    name = "teacher"

    async def logprobs(
        self, session: Hashable, tokens: np.ndarray, positions: np.ndarray
    ) -> Scored:
        """As `Teacher` says; ValueError where the engine refuses the request."""
        return await self.ask(ScoreRequest(session, tokens, positions))


@dataclasses.dataclass(eq=False)
class TurnScorer:
    """A task: the turns of one attempt go through a teacher, one after the other."""

    teacher: Teacher
    session: Hashable  # the engine's name for the attempt, and for its first sample
    recorder: Recorder  # keeps the scores
    on_scored: Callable[[Turn, float], None]  # a turn, monotonic seconds of its sending
    on_failed: Callable[[], None]  # called where `raise_error` raises from now on
    turn: int = 0  # number of the turn that is being scored, or comes next

    def __post_init__(self):
        self._stopped = False
        self._asked = self.session  # the teacher's name for the latest sample
        # None ends it.
        self._turns: asyncio.Queue[tuple[Turn, np.ndarray] | None] = asyncio.Queue()
        name = f"{asyncio.current_task().get_name()}, scoring"
        self._task = asyncio.create_task(self._run(), name=name)
        self._task.add_done_callback(self._ended)

    def add(self, turn: Turn, positions: np.ndarray) -> None:
        """Queues the positions of a turn's action in its sample."""
        self._turns.put_nowait((turn, positions))

    async def finish(self) -> None:
        """Waits for the scores of all turns.

        Raises:
          Stopped: TEACHER_ERROR, one line of what the teacher raised.
        """
        self._turns.put_nowait(None)
        await self._task

    def raise_error(self) -> None:
        """Raises what `finish` would, where that is known already."""
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    def stop(self) -> None:
        """Ends the task and the teacher's session; nothing more is told."""
        self._stopped = True
        self._task.cancel()
        self.teacher.release(self._asked)

    async def _run(self) -> None:
        while (entry := await self._turns.get()) is not None:
            turn, positions = entry
            start = time.monotonic()
            first, end = turn.trajectory.samples[turn.sample]
            ids = turn.trajectory.ids[first:end]
            name = (self.session, turn.sample) if turn.sample else self.session
            if name != self._asked:
                self.teacher.release(self._asked)
                self._asked = name
            try:
                scored = await self.teacher.logprobs(self._asked, ids, positions)
                # A teacher may swallow its cancellation, and answer.
                if self._stopped:
                    return
                self.recorder.score(positions, scored, turn.sample)
            except Exception as error:
                reason = f"scoring of turn {turn.turn}: {one_line(error)}"
                raise Stopped(StopReason.TEACHER_ERROR, reason) from error
            self.turn = turn.turn + 1
            self.on_scored(turn, start)

    def _ended(self, task: asyncio.Task) -> None:
        # Looked at in any case: asyncio reports exceptions that nobody retrieved.
        failed = not task.cancelled() and task.exception() is not None
        if failed and not self._stopped:
            self.on_failed()


def check_vocabulary(
    student: Mapping[str, int],
    teacher: Mapping[str, int],
    student_width: int,
    teacher_width: int,
) -> int:
    """Refuses a teacher that means another token by some id.

    Two vocabularies of one size can be different ones, whose scores mean nothing
    (huggingface/trl#4562), and two of unequal width the same, padded differently
    (huggingface/trl#2215): what counts is the content.

    Both vocabularies hold the id of every token, special ones included; a width is the
    rows of an embedding, padding included.

    Returns:
      The ids over which both are normalised: the smaller width. Padding rows below it
      are ids like any other on both sides, as they are in the sampler.

    Raises:
      ConfigError: The contents differ, or a width has no room for its content.
    """
    sides = ("student", student, student_width), ("teacher", teacher, teacher_width)
    for name, content, width in sides:
        highest = max(content.values(), default=-1)
        if highest >= width:
            raise ConfigError(
                f"the {name}'s vocabulary has id {highest} and its model {width} rows; "
                "give the tokenizer that the model was trained with"
            )
    if dict(student) == dict(teacher):
        return min(student_width, teacher_width)
    # Lowest id first: where the two part is where a reader looks.
    differing = sorted(
        student.items() ^ teacher.items(), key=lambda item: (item[1], item[0])
    )
    token = differing[0][0]
    raise ConfigError(
        f"student and teacher have different vocabularies, of {len(student)} and "
        f"{len(teacher)} tokens: {token!r} is {_id(token, student)} of the student and "
        f"{_id(token, teacher)} of the teacher; choose a teacher of the same tokenizer"
    )


def _id(token: str, content: Mapping[str, int]) -> str:
    return f"id {content[token]}" if token in content else "no token"
