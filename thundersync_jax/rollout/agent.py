"""One attempt as a coroutine: prompt, turns of action and observation, verdict.

`act` ends when the tokens are final, `scored` when a teacher, where there is one, has
said what it has to (a turn is scored while its tool call runs), `verify` with the
verdict; the latter two have no claim on the engine. How a policy ends is its own doing,
verified and rewarded; what a component breaks is a `Stopped`. Slots, retries and
deadlines of a step belong to the pool.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from thundersync_jax.chat.base import Chat, StopTexts, cut
from thundersync_jax.chat.byte_level import ByteLevel
from thundersync_jax.config import RolloutConfig
from thundersync_jax.engines.base import Connection, Request, Response
from thundersync_jax.envs.base import Action, Context, Deadlines, Environment
from thundersync_jax.errors import one_line
from thundersync_jax.rollout import moves, observations
from thundersync_jax.rollout.commands import Commands, Stopped
from thundersync_jax.rollout.events import Failed, Turn
from thundersync_jax.rollout.history import History
from thundersync_jax.rollout.moves import Keep, Moves
from thundersync_jax.rollout.recorder import Recorder
from thundersync_jax.rollout.teacher import Teacher, TurnScorer
from thundersync_jax.types import (
    Span,
    StopReason,
    Trajectory,
    TrajectoryKey,
    Verdict,
)

# Part of every sampling seed: a phase keeps its number for good.
PHASES = {"train": 0, "evaluate": 1, "warm_start": 2}
WAITING = "the wait for a slot"
_SESSIONS = itertools.count()
_BYTE_LEVEL = ByteLevel()


@dataclasses.dataclass(eq=False)
class Agent:
    """One attempt of one member; its environment is made by `act`.

    Attributes:
      session: The engine's name for the attempt, never used twice: what a stopped one
        still does cannot touch a later one of the same key.
      moves: Its environment, and what it is busy with.
      recorder: Its tokens; None before the prompt is known.
      times: Seconds on the monotonic clock, by name as in `Trajectory`.
    """

    key: TrajectoryKey  # of the trajectory, the attempt included
    task: Any  # the environment's task
    make_environment: Callable[[Context], Environment]  # a fresh one
    sampler: Connection  # to the engine
    commands: Commands  # runs the environment's commands under their deadlines
    limits: RolloutConfig  # tokens, turns and deadlines
    seed: int  # first word of every sampling seed of the run
    policy_version: int  # version that has to sample every action
    on_span: Callable[[Span], None] | None = None  # decode, tool, score and verify bars
    teacher: Teacher | None = None  # scores the actions; None where none does
    on_turn: Callable[[Turn], None] | None = None  # every turn that it has scored
    chat: Chat = _BYTE_LEVEL
    temperature: float | None = None  # of its sampling; None takes that of `limits`
    keep: Keep | None = None  # takes the artefacts of its verdict
    deadlines: Deadlines | None = None  # of its task, within those of the limits
    folder: Path | None = None  # in which attempts have folders; None: temporary ones

    def __post_init__(self):
        key, stop_ids = self.key, self.limits.stop_ids
        if self.temperature is None:
            self.temperature = self.limits.temperature
        self.session = (key, next(_SESSIONS))
        self.recorder: Recorder | None = None
        self.times: dict[str, float] = {}
        # None takes the format's own end tokens.
        self._stop_ids = self.chat.stop_ids if stop_ids is None else stop_ids
        texts = self.limits.stop_texts
        self._stop_texts = StopTexts(texts, self.chat.decode) if texts else None
        # Without the attempt: a retry samples the tokens that the first try would have.
        self._seed = (self.seed, PHASES[key.phase], key.step, key.group, key.member)
        self._scorer: TurnScorer | None = None
        self._history: History | None = None
        self._segments = 0  # sent to the teacher so far: of a turn one, or two
        self._deadline_secs = 0.0  # on the event loop's clock
        deadlines = moves.deadlines(self.limits, self.deadlines)
        self._limit_secs = deadlines.agent
        context = Context(
            key=key,
            task=self.task,
            seed=self._seed,
            deadlines=deadlines,
            root=self.folder,
            remaining_secs=self._left_secs,
            remaining_tokens=self._left_tokens,
            cut=self._cut,
        )
        self.moves = Moves(
            context,
            self.make_environment,
            self.commands,
            self.limits,
            WAITING,
            self.on_span,
            self.keep,
        )
        self._timeout: asyncio.Timeout | None = None  # where one runs

    async def act(self) -> Trajectory:
        """Plays the turns and frees the engine.

        Raises:
          Stopped: A deadline passed, the environment raised, the engine refused, or
            the prompt leaves no room for a single token (CONTEXT_OVERFLOW).
        """
        self._begin_deadline()
        self.times["started"] = time.monotonic()
        try:
            async with self._deadline():
                stop_reason = await self._play()
        except _DeadlineError:
            played = self.recorder is not None and self.recorder.turns > 0
            if self.limits.agent_deadline == "fail" or not played:
                self._stop_scoring()
                raise
            stop_reason = StopReason.DEADLINE
            self._begin_deadline()  # what a teacher still has to say has its own
        except BaseException:
            self._stop_scoring()
            raise
        finally:
            self.sampler.release(self.session)
        self.moves.doing = "the wait for verification"
        self.times["completed"] = time.monotonic()
        return self.recorder.trajectory(stop_reason, times=self.times)

    async def scored(self, trajectory: Trajectory) -> Trajectory:
        """Waits for the teacher, if there is one, under the trajectory's deadline.

        Takes what `act` returned and adds the teacher's scores.

        Raises:
          Stopped: The deadline passed, or the teacher failed (TEACHER_ERROR).
        """
        if self._scorer is None:
            return trajectory
        self.moves.doing = _scoring(self._scorer.turn)
        try:
            async with self._deadline():
                await self._scorer.finish()
        finally:
            self._stop_scoring()
        self.moves.doing = "the wait for verification"
        self.times["completed"] = time.monotonic()
        return dataclasses.replace(
            trajectory,
            teacher=self.recorder.teacher_scores(trajectory),
            times=dict(self.times),
        )

    def _begin_deadline(self) -> None:
        self._deadline_secs = asyncio.get_running_loop().time() + self._limit_secs

    def _left_secs(self) -> float:
        return self._deadline_secs - asyncio.get_running_loop().time()

    def _left_tokens(self) -> int:
        history = self._history
        return self.limits.context_tokens if history is None else history.left_tokens

    def _cut(self, text: str, most: int) -> str:
        return cut(text, most, lambda shown: len(self.chat.observation(shown)))

    def release(self) -> None:
        """Frees engine and teacher of an attempt that somebody else ends."""
        self.sampler.release(self.session)
        self._stop_scoring()

    def failed(self, stop_reason: StopReason, reason: str) -> Failed:
        """The outcome without a verdict; the reason names the attempt of several."""
        attempts = self.limits.attempts
        if attempts > 1:
            reason += f" (attempt {self.key.attempt + 1} of {attempts})"
        trajectory = None
        if self.recorder is not None:
            trajectory = self.recorder.trajectory(stop_reason, reason, self.times)
            log = self.moves.context.text()
            trajectory = dataclasses.replace(trajectory, log=log)
        return Failed(self.key, stop_reason, reason, trajectory)

    async def verify(self) -> Verdict:
        """The verdict; see `Moves.verify`."""
        verdict = await self.moves.verify()
        self.times["verified"] = time.monotonic()
        return verdict

    async def _play(self) -> StopReason:
        """Runs start and all turns; returns how the policy ended."""
        limits = self.limits
        prompt, room = await self.moves.start(), limits.context_tokens
        ids = await observations.ids(
            self.chat, self.chat.prompt, prompt, room, self.moves.doing
        )
        if ids is None or len(ids) >= room:
            tokens = f"more than {room}" if ids is None else len(ids)
            raise Stopped(
                StopReason.CONTEXT_OVERFLOW,
                f"the prompt has {tokens} tokens, rollout.context_tokens is {room}; it "
                "leaves no room for an action",
            )
        room -= len(ids)
        self.recorder = Recorder(self.key, ids, self.policy_version, limits.samples)
        self._history = History(self.chat, limits, self.recorder)
        if self.teacher is not None:
            self._scorer = TurnScorer(
                self.teacher, self.session, self.recorder, self._on_scored, self._hurry
            )
        for turn in range(limits.turns):
            action = await self._act_once(turn, ids, room)
            if isinstance(action, StopReason):
                return action
            observation = await self.moves.respond(turn, action)
            if observation is None:
                return StopReason.POLICY_FAULT
            self.recorder.credit(float(observation.weight), float(observation.credit))
            if observation.done:
                return StopReason.FINISHED
            if turn + 1 == limits.turns:
                return StopReason.TURN_LIMIT
            sample = self.recorder.sample
            ids = await self._history.follow(observation, self.moves.doing)
            if ids is None:
                return StopReason.CONTEXT_OVERFLOW
            if self.recorder.sample != sample:  # the engine begins anew as well
                self.sampler.release(self.session)
                self.session = (self.key, next(_SESSIONS))
            room = self._history.left_tokens
        raise AssertionError("rollout.turns is at least 1")

    async def _act_once(
        self, turn: int, new_ids: np.ndarray, room: int
    ) -> Action | StopReason:
        """Samples and records one action, or says how its cut ends the trajectory."""
        limits, most = self.limits, min(self.limits.turn_tokens, room)
        thinking = min(limits.thinking_tokens or most, most)
        self.moves.doing = f"decoding of turn {turn}"
        start = time.monotonic()
        try:
            response = await self._sample(turn, new_ids, thinking)
            parts = [(new_ids, response)]
            if not response.stopped and thinking < most:
                closing = self.chat.closing(response.ids)
                room -= len(closing)
                if (left := min(limits.turn_tokens, room) - thinking) > 0:
                    before = () if len(closing) else response.ids
                    response = await self._sample(turn, closing, left, before, 1)
                    parts.append((closing, response))
            ids = self._record(parts)
            if not response.stopped and limits.cut_actions == "end":
                # The cut action is not run. Cut by the context's end rather than the
                # turn's own limit, it is the context that was too short.
                length = limits.turn_tokens <= room
                return StopReason.LENGTH if length else StopReason.CONTEXT_OVERFLOW
            by_text = response.stopped and ids[-1] not in self._stop_ids
            return self.chat.parse(ids, self._stop_ids, by_text)
        except ValueError as error:
            reason = f"{self.moves.doing}: {one_line(error)}"
            raise Stopped(StopReason.ENGINE_ERROR, reason) from error
        finally:
            self.moves.span("rollout", "decode", start)

    async def _sample(
        self,
        turn: int,
        new_ids: np.ndarray,
        most: int,
        before: Sequence[int] = (),
        *part: int,
    ) -> Response:
        """Samples a turn, or the part of one that follows `before`."""
        texts = self._stop_texts
        if texts is not None and len(before):
            texts = dataclasses.replace(texts, before=before)
        request = Request(
            session=self.session,
            new_ids=new_ids,
            max_new_tokens=most,
            stop_ids=self._stop_ids,
            temperature=self.temperature,
            seed=(*self._seed, turn, *part),
            stop_texts=texts,
        )
        return await self.sampler.sample(request)

    def _record(self, parts: list[tuple[np.ndarray, Response]]) -> np.ndarray:
        """Records an action and sends it to the teacher; returns all of its ids.

        It has two parts where its thought was cut, and between them what closed it.
        """
        (new_ids, first), *rest = parts
        whole = np.concatenate([first.ids, *(x for n, r in rest for x in (n, r.ids))])
        if rest and not len(rest[0][0]):  # no more than a pause
            logprobs = [response.logprobs for _, response in parts]
            last = rest[0][1]
            joined = dataclasses.replace(
                last, ids=whole, logprobs=np.concatenate(logprobs)
            )
            parts = [(new_ids, joined)]
        self._history.acted(new_ids, whole)
        for number, (new, part) in enumerate(parts):
            if number:
                self.recorder.observation(new)
            version = part.policy_version
            self.recorder.action(part.ids, part.logprobs, version, goes_on=number > 0)
            self._score(len(new), len(part.ids))
        return whole

    def _score(self, new_tokens: int, action_tokens: int) -> None:
        """Sends the latest tokens to the teacher; nobody waits for the answer here."""
        if self._scorer is not None:
            trajectory, sample = self.recorder.trajectory(None), self.recorder.sample
            first, end = trajectory.samples[sample]
            start = end - action_tokens - new_tokens
            positions = np.arange(end - action_tokens, end, dtype=np.int32) - first
            turn = Turn(self.key, self._segments, start, trajectory, sample)
            self._scorer.add(turn, positions)
            self._segments += 1

    def _on_scored(self, turn: Turn, start_secs: float) -> None:
        """Tells of a turn, the scores of its trajectory being in."""
        self.moves.span("teacher", f"score t{turn.turn}", start_secs)
        if "completed" in self.times:
            self.moves.doing = _scoring(turn.turn + 1)
        if self.on_turn is not None:
            scores = self.recorder.teacher_scores(turn.trajectory)
            trajectory = dataclasses.replace(turn.trajectory, teacher=scores)
            secs = time.monotonic()
            self.on_turn(dataclasses.replace(turn, trajectory=trajectory, secs=secs))

    def _stop_scoring(self) -> None:
        if self._scorer is not None:
            self._scorer.stop()

    @contextlib.asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        """The trajectory's deadline, which a failing teacher brings forward."""
        try:
            async with asyncio.timeout_at(self._deadline_secs) as self._timeout:
                yield
        except TimeoutError:
            if self._scorer is not None:
                self._scorer.raise_error()
            limit = f"trajectory deadline of {self._limit_secs:g} s"
            reason = f"{limit} passed during {self.moves.doing}"
            raise _DeadlineError(StopReason.TIMEOUT, reason) from None
        finally:
            self._timeout = None

    def _hurry(self) -> None:
        """Ends what runs under the deadline: a failed trajectory awaits no tool."""
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())


class _DeadlineError(Stopped):
    """The time of the agent is up."""


def _scoring(turn: int) -> str:
    return f"scoring of turn {turn}"
