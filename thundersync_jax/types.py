"""Host records: what a trajectory is, before any device sees it.

Plain numpy and strings, so that records cross threads and processes. No jax.
"""

import dataclasses
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MOST_ADDENDS = 8191  # of a sum in ops/exact_sum.py, which this file must not import
LARGEST_REWARD = 1e30  # float32 sums of rewards times gradients need room above it


class StopReason(enum.Enum):
    """Why a trajectory ended. `failed` reasons carry no reward."""

    FINISHED = "finished"  # the environment said done
    LENGTH = "length"  # a turn reached its token limit without a stop token
    TURN_LIMIT = "turn_limit"  # the last allowed turn was used up
    CONTEXT_OVERFLOW = "context_overflow"  # the next observation does not fit
    DEADLINE = "deadline"  # the agent's time was up
    POLICY_FAULT = "policy_fault"  # the environment ended it for what the policy did
    TIMEOUT = "timeout"  # a command, trajectory or step deadline passed
    ENVIRONMENT_ERROR = "environment_error"  # start, step or verify raised
    ENGINE_ERROR = "engine_error"  # the sampler failed on this trajectory
    TEACHER_ERROR = "teacher_error"  # the teacher failed to score it
    INVALID_REWARD = "invalid_reward"  # verify gave no finite number
    CANCELLED = "cancelled"  # the step or the run was stopped

    @property
    def truncated(self) -> bool:
        """True where a limit of tokens, turns, context or time cut the policy off."""
        return self in _TRUNCATED

    @property
    def failed(self) -> bool:
        """True where a component failed, rather than the policy finishing."""
        return self in _FAILED


_TRUNCATED = frozenset(
    {
        StopReason.LENGTH,
        StopReason.TURN_LIMIT,
        StopReason.CONTEXT_OVERFLOW,
        StopReason.DEADLINE,
    }
)
_ENDED_BY_POLICY = {StopReason.FINISHED, StopReason.POLICY_FAULT}
_FAILED = frozenset(StopReason) - _TRUNCATED - _ENDED_BY_POLICY


class TrajectoryKey(NamedTuple):
    """What a trajectory is: its place in the run. Sampling keys derive from it."""

    step: int
    group: int
    member: int
    attempt: int = 0
    phase: str = "train"  # "train", "evaluate" or "warm_start"

    def __str__(self) -> str:
        if self.phase == "evaluate":
            return f"held-out question {self.group} answer {self.member}"
        attempt = f" attempt {self.attempt}" if self.attempt else ""
        return (
            f"{self.phase} step {self.step} group {self.group} "
            f"member {self.member}{attempt}"
        )


@dataclasses.dataclass(frozen=True)
class TeacherScores:
    """What a teacher says of a trajectory's tokens; whatever it was not asked is 0.

    K is 1 for the token itself, the number of the likeliest ids, or that of all ids.
    """

    logprobs: np.ndarray  # float32[T, K], log q at the rollout's temperature
    ids: np.ndarray | None  # int32[T, K], the likeliest, distinct; None: other cases
    known: np.ndarray  # bool[T], True at scored positions

    def __post_init__(self):
        shape = self.logprobs.shape
        ids_shape = shape if self.ids is None else self.ids.shape
        if shape != ids_shape or shape[:-1] != self.known.shape:
            raise ValueError(
                f"teacher scores of shape {shape} with ids of {ids_shape} and "
                f"{self.known.shape} known; expected [T, K] twice and [T]. Score every "
                "position alike."
            )


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One member's tokens and what is known about them.

    They are one sample, a sequence that was only appended to, or several one after the
    other where the history was rewritten in between. Each begins with a context of its
    own and is a sequence for itself; what follows from all tokens of a member, as their
    weights in the loss, follows from those of all samples together.
    """

    key: TrajectoryKey
    # int32[T], prompt, then actions and observations in order; so in each sample.
    ids: np.ndarray
    # bool[T], True exactly on sampled (action) tokens, where they were sampled: in a
    # later sample's context they are history.
    loss_mask: np.ndarray
    logprobs: np.ndarray  # float32[T], the sampler's where `loss_mask`, else 0
    turns: int  # number of actions
    stop_reason: StopReason | None  # None while it grows
    policy_version: int  # optimizer updates behind the parameters that sampled it
    reward: float | None = None  # None while unknown or where the trajectory failed
    reason: str = ""  # one line where it failed
    # Seconds on the pool's clock: "queued", "started", "completed", "verified".
    times: dict[str, float] = dataclasses.field(default_factory=dict)
    # float32[T], u of `Observation.weight` on the tokens of an action and 1 elsewhere,
    # v of `Observation.credit` and 0; None where the environment gave neither.
    turn_weights: np.ndarray | None = None
    turn_credits: np.ndarray | None = None
    teacher: TeacherScores | None = None  # None where nothing was scored
    # Of the verdict: numbers by name, and text for people.
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    log: str = ""
    starts: tuple[int, ...] = (0,)  # where in `ids` its samples begin

    def __post_init__(self):
        lengths = len(self.ids), len(self.loss_mask), len(self.logprobs)
        if len(set(lengths)) != 1:
            raise ValueError(
                f"trajectory {self.key}: ids, loss_mask and logprobs have lengths "
                f"{lengths[0]}, {lengths[1]} and {lengths[2]}; they must be equal. "
                "Record every token with its mask, never cut one of them."
            )
        for name in ("turn_weights", "turn_credits"):
            values = getattr(self, name)
            if values is not None and len(values) != lengths[0]:
                raise ValueError(
                    f"trajectory {self.key}: {name} has length {len(values)} with "
                    f"{lengths[0]} ids; give every token its number, or none at all."
                )
        if self.teacher is not None and len(self.teacher.known) != lengths[0]:
            raise ValueError(
                f"trajectory {self.key}: the teacher's scores have length "
                f"{len(self.teacher.known)} with {lengths[0]} ids; expected one entry "
                "per token, known or not."
            )
        bounds = np.append(self.starts, lengths[0])
        several = len(self.starts) > 1  # one may be empty
        if self.starts[:1] != (0,) or (several and np.any(np.diff(bounds) < 1)):
            raise ValueError(
                f"trajectory {self.key}: samples start at {self.starts} of "
                f"{lengths[0]} ids; expected 0 and then ascending places among them."
            )

    @property
    def samples(self) -> list[tuple[int, int]]:
        """Where its samples begin and end in `ids`."""
        ends = *self.starts[1:], len(self.ids)
        return list(zip(self.starts, ends, strict=True))

    @property
    def action_tokens(self) -> int:
        """Number of trained tokens."""
        return int(np.sum(self.loss_mask))

    @property
    def unscored_tokens(self) -> int:
        """Trained tokens that no teacher has scored; all of them without a teacher."""
        if self.teacher is None:
            return self.action_tokens
        return int(np.sum(np.asarray(self.loss_mask, bool) & ~self.teacher.known))


@dataclasses.dataclass(frozen=True)
class Span:
    """One bar of the timeline: seconds on the run's monotonic clock."""

    track: str  # "rollout", "teacher", "verify", "learner", "boundary"
    name: str
    start_secs: float
    end_secs: float
    lane: str = ""  # the row inside a track: a trajectory, a replica


@dataclasses.dataclass(frozen=True)
class Message:
    """What somebody says in a conversation."""

    role: str  # "system", "user", "assistant" or "tool"
    content: str
    call_id: str = ""  # of a tool's message: the call that it answers


@dataclasses.dataclass(frozen=True)
class Call:
    """One tool call of a turn."""

    id: str  # its name among the calls of its turn
    name: str  # of the tool; empty where it is malformed
    arguments: Mapping[str, Any]
    text: str  # as `Action.text`
    problem: str = ""  # what is wrong with it


@dataclasses.dataclass(frozen=True)
class Action:
    """What the policy did in one turn.

    Attributes:
      kind: "answer" for plain text, "call" for a tool call, "malformed" for a turn
        without an end token or with misplaced special tokens.
      text: What an answer says or a tool is asked, decoded with replacement. Of a call
        with several arguments their JSON, with one string that string.
      ids: What was sampled, the end token included; empty where nothing was.
      name: The tool of a call, empty where the format has one tool without a name.
      arguments: Of a named call, by name.
      problem: What is wrong with a malformed call. The policy is told, and the
        environment does not see it.
      calls: All calls of the turn, in order; none where the format has one tool without
        a name. The environment is asked for one after the other.
      call_id: The call among them that the environment is asked for.
      speech: Text beside the calls.
      thought: What was thought before, without its tags.
      raw: The whole turn as text, without its end token.
    """

    kind: str
    text: str
    ids: tuple[int, ...] = dataclasses.field(default=(), compare=False, repr=False)
    name: str = ""
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    problem: str = ""
    calls: tuple[Call, ...] = dataclasses.field(default=(), compare=False, repr=False)
    call_id: str = dataclasses.field(default="", compare=False)
    speech: str = dataclasses.field(default="", compare=False)
    thought: str = dataclasses.field(default="", compare=False, repr=False)
    raw: str = dataclasses.field(default="", compare=False, repr=False)

    def one(self, call: Call) -> "Action":
        """The action of one call among those of a turn."""
        return dataclasses.replace(
            self,
            kind="malformed" if call.problem else "call",
            text=call.text,
            name=call.name,
            arguments=call.arguments,
            problem=call.problem,
            call_id=call.id,
        )


@dataclasses.dataclass(frozen=True)
class Observation:
    """What the environment answers: `text` for the policy, or `done`.

    Attributes:
      text: Shown to the policy, as one message.
      done: Whether the trajectory ends here.
      credit: v of the action it answers. Under `loss.turn_credit` "environment" the
        tokens of that action have the advantage A u + v, where A is their
        trajectory's; in units of A. Under "none" a run ends at the first one given.
      weight: u of that action.
      role: Who says `text`, None for "tool" where it answers a call and "user" where it
        answers anything else.
      messages: Several messages in place of `text`.
      rewrite: Whether they are all that the policy sees from here on, in place of the
        conversation so far: that begins another sample, of `rollout.samples` at most.
    """

    text: str = ""
    done: bool = False
    credit: float = 0.0
    weight: float = 1.0
    role: str | None = None
    messages: tuple[Message, ...] = ()
    rewrite: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What `verify` found, where a number alone does not say it.

    Attributes:
      reward: What training sees.
      parts: What it consists of, or goes with: numbers by name, of which metrics are
        the means.
      log: What people want to read, such as the output of a test.
      artefacts: Files to keep, by name: their content, or where they are now.
    """

    reward: float
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    log: str = ""
    artefacts: Mapping[str, bytes | Path] = dataclasses.field(default_factory=dict)
