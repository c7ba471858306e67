"""The moves of one attempt's environment: each a command under its own deadline.

What goes wrong is a `Stopped` with whose fault it is. What an action asked for and took
too long is an observation; what the policy did wrong is a `PolicyFault`.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from thundersync_jax.config import RolloutConfig
from thundersync_jax.envs import base as envs
from thundersync_jax.envs.base import Action, Context, Environment, Observation
from thundersync_jax.errors import PolicyFault, one_line
from thundersync_jax.rollout import observations
from thundersync_jax.rollout.commands import Commands, Stopped
from thundersync_jax.types import Message, Span, StopReason, TrajectoryKey, Verdict

Keep = Callable[[TrajectoryKey, Mapping[str, bytes | Path]], None]


def deadlines(limits: RolloutConfig, own: envs.Deadlines | None) -> envs.Deadlines:
    """Those of the settings, or a task's own where they are shorter."""
    most = {
        "start": limits.start_timeout_secs or limits.command_timeout_secs,
        "command": limits.command_timeout_secs,
        "agent": limits.trajectory_timeout_secs,
        "verify": limits.verify_timeout_secs,
    }
    shorter = {name: getattr(own, name, None) or secs for name, secs in most.items()}
    return envs.Deadlines(
        **{name: min(secs, shorter[name]) for name, secs in most.items()}
    )


@dataclasses.dataclass(eq=False)
class Moves:
    """An environment from `start` to `close`.

    Attributes:
      doing: What the attempt is busy with, in words, for whoever has to stop it.
    """

    context: Context  # what the environment may know of its attempt
    make_environment: Callable[[Context], Environment]
    commands: Commands
    limits: RolloutConfig
    doing: str
    on_span: Callable[[Span], None] | None
    keep: Keep | None  # takes the artefacts of a verdict
    # Told whether the environment could not be started, and why.
    on_start: Callable[[bool, str], None] = lambda failed, reason: None

    def __post_init__(self):
        self._environment: Environment | None = None
        self._given: float | None = None  # a reward in place of a verdict
        self._secs = self.context.deadlines

    async def start(self) -> Any:
        """Makes and starts the environment; returns the prompt."""
        self.doing = "start()"
        try:
            self._environment = self.make_environment(self.context)
        except BaseException as error:  # no signal: those reach the main thread alone
            reason = f"making the environment raised {one_line(error)}"
            raise Stopped(StopReason.ENVIRONMENT_ERROR, reason) from error
        task = self.context.task
        try:
            prompt = await self._command(
                "start",
                self._secs.start,
                lambda: self._environment.start(task),
            )
        except Stopped as stopped:
            stopped.fault |= stopped.stop_reason is StopReason.TIMEOUT
            stopped.at_start = stopped.fault
            self.on_start(stopped.fault, stopped.reason)
            raise
        except PolicyFault as fault:
            reason = f"{self.doing} raised {one_line(fault)} before any action"
            raise Stopped(StopReason.ENVIRONMENT_ERROR, reason) from fault
        self.on_start(False, "")
        return observations.prompt(prompt, self.doing)

    async def respond(self, turn: int, action: Action) -> Observation | None:
        """What follows an action: all of its calls are run, in their order.

        None where the environment blames the policy, which ends the attempt.
        """
        weight, credit, done, rewrite = 1.0, 0.0, False, False
        messages: list[Message] = []
        single = len(action.calls) < 2 or action.kind == "malformed"
        parts = [action] if single else [action.one(call) for call in action.calls]
        try:
            sees_malformed = bool(getattr(self._environment, "sees_malformed", False))
        except BaseException as error:
            reason = f"sees_malformed raised {one_line(error)}"
            raise Stopped(StopReason.ENVIRONMENT_ERROR, reason) from error
        for part in parts:
            role = "tool" if part.call_id or part.kind == "call" else "user"
            if part.problem and not sees_malformed:
                observation = Observation(f"error: {part.problem}")
            else:
                try:
                    observation = await self._step(turn, part)
                except PolicyFault as fault:
                    self._blame(fault)
                    return None
            if observation.rewrite:
                messages, rewrite = [], True
            messages += observations.messages(observation, role, part.call_id)
            weight *= float(observation.weight)
            credit += float(observation.credit)
            if done := observation.done:
                break
        return Observation(
            done=done,
            credit=credit,
            weight=weight,
            messages=tuple(messages),
            rewrite=rewrite,
        )

    async def verify(self) -> Verdict:
        """Returns the verdict, its artefacts kept: what they are may soon be gone.

        Raises:
          Stopped: As a command does, and INVALID_REWARD for anything but finite
            numbers: a missing verdict is never 0.
        """
        self.doing = "verify()"
        if self._given is not None:
            return Verdict(self._given, log=self.context.text())

        async def verified() -> Any:
            verdict = envs.judged(await self._environment.verify())
            if isinstance(verdict, Verdict) and verdict.artefacts and self.keep:
                key, artefacts = self.context.key, verdict.artefacts
                await asyncio.to_thread(self.keep, key, artefacts)
            return verdict

        try:
            verdict = await self._command("verify", self._secs.verify, verified)
        except PolicyFault as fault:
            self._blame(fault)
            if self._given is None:
                reason = f"verify() raised {one_line(fault)} without a reward"
                raise Stopped(StopReason.INVALID_REWARD, reason) from fault
            verdict = Verdict(self._given)
        if isinstance(verdict, str):
            raise Stopped(StopReason.INVALID_REWARD, verdict)
        return dataclasses.replace(verdict, log=self.context.text(verdict.log))

    async def close(self) -> None:
        """Closes the environment, where one was made."""
        environment, self._environment = self._environment, None
        if environment is None:
            return
        limit_secs = self.limits.close_timeout_secs
        try:
            await self.commands.run(
                lambda: envs.close(environment), limit_secs, "close()"
            )
        except (Stopped, PolicyFault) as error:
            logging.warning("%s: %s", self.context.key, error)

    async def _step(self, turn: int, action: Action) -> Observation:
        self.doing = f"step() of turn {turn}"
        try:
            observation = await self._command(
                "tool",
                self._secs.command,
                lambda: self._environment.step(action),
            )
        except Stopped as stopped:
            late = stopped.stop_reason is StopReason.TIMEOUT and not stopped.left_behind
            if self.limits.command_deadline == "fail" or not late:
                raise
            secs = self._secs.command
            return Observation(
                f"error: it was stopped after {secs:g} s, the limit of a call"
            )
        return observations.checked(observation, self.doing)

    def _blame(self, fault: PolicyFault) -> None:
        """Takes the reward that a fault of the policy brings, if it does."""
        self._given = envs.finite(fault.reward)
        self.context.log(one_line(fault))

    async def _command(
        self, span: str, limit_secs: float, function: Callable[[], Awaitable[Any]]
    ) -> Any:
        start = time.monotonic()
        try:
            return await self.commands.run(function, limit_secs, self.doing)
        finally:
            self.span("verify" if span == "verify" else "rollout", span, start)

    def span(self, track: str, name: str, start_secs: float) -> None:
        """A bar of the timeline that ends now."""
        if self.on_span is not None:
            end_secs, key = time.monotonic(), self.context.key
            lane = f"g{key.group}m{key.member}"
            self.on_span(Span(track, name, start_secs, end_secs, lane))
