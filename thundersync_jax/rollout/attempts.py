"""One member from its first attempt to its outcome: places, retries and ends.

An attempt has a fresh environment, which holds a place until it is closed, and a slot
while it acts. What is nobody's fault but the machinery's (`InfrastructureFault`) is
tried again after a wait, a verdict too; where environments cannot be started at all,
`StartGate` makes everybody wait. All of it belongs to one event loop.
"""

import asyncio
import collections
import contextlib
import dataclasses
import logging
import random
import sys
import time
from collections.abc import Callable

from thundersync_jax.config import RolloutConfig
from thundersync_jax.errors import StreamError
from thundersync_jax.rollout.agent import Agent
from thundersync_jax.rollout.commands import GRACE_SECS, Stopped
from thundersync_jax.rollout.events import Completed, Event, Failed, Job, Rewarded
from thundersync_jax.types import StopReason, Verdict

# Tried again with a fresh environment; not what would happen again (a refused request,
# a prompt too long).
RETRIED = frozenset({StopReason.ENVIRONMENT_ERROR, StopReason.TIMEOUT})
_WINDOW, _FEWEST = 16, 8  # latest starts that are looked at; of which there must be
_LONGEST_WAIT_SECS = 60.0  # between two probes of an outage, or two tries


@dataclasses.dataclass(eq=False)
class Member:
    """One member from its start to its outcome, on the event loop."""

    job: Job
    policy_version: int
    queued_secs: float
    agent: Agent | None = None
    task: asyncio.Task | None = None


class StartGate:
    """Lets environments be started, and holds them back while most starts fail.

    Then one at a time is tried, with growing waits between, until one succeeds.

    Attributes:
      paused_secs: When the pause began, on the monotonic clock; None where none is.
    """

    def __init__(
        self,
        limits: RolloutConfig,
        on_pause: Callable[[bool], None],
        on_end: Callable[[BaseException], None],
    ):
        """`on_pause` is told when a pause begins and ends, `on_end` why a run ends."""
        self._limits, self._on_pause, self._on_end = limits, on_pause, on_end
        # Groups, and whether their starts failed.
        self._latest: collections.deque[tuple] = collections.deque(maxlen=_WINDOW)
        self._probe = asyncio.Lock()
        self._probes = 0
        self._probed: set[tuple] = set()  # groups that failed in this pause
        # The latest two groups that started.
        self._started: collections.deque[tuple] = collections.deque(maxlen=2)
        self._given_up: set[tuple] = set()  # groups that fail while others start
        self._recovered_secs = 0.0  # when the last pause ended
        self.paused_secs: float | None = None

    @property
    def failing(self) -> bool:
        """Whether more of the latest starts failed than the settings allow."""
        failed = sum(failed for _, failed in self._latest)
        return failed > self._limits.start_fault_share * len(self._latest)

    def excuses(self, member: Member, begun_secs: float) -> bool:
        """Whether nobody could have started then: a failure uses up no attempt."""
        if _group(member) in self._given_up:
            return False
        return self.failing or begun_secs < self._recovered_secs

    async def enter(self, member: Member) -> bool:
        """Waits until this start may be tried; whether it is the probe of a pause."""
        while self.paused_secs is not None:
            async with contextlib.AsyncExitStack() as held:
                await held.enter_async_context(self._probe)
                if self.paused_secs is None:
                    break
                await asyncio.sleep(self.wait_secs(member, self._probes))
                held.pop_all()  # until `leave`
                return True
        return False

    def leave(
        self, member: Member, probe: bool, failed: bool | None, reason: str = ""
    ) -> None:
        """What became of a start; None where nothing was learned of it."""
        group = _group(member)
        if probe:
            self._probe.release()
        if not failed and failed is not None:
            if group not in self._started:
                self._started.append(group)
            self._given_up.discard(group)
        unheard = self.paused_secs is not None and not probe
        if failed is None or unheard or group in self._given_up:
            return
        self._latest.append((group, failed))
        now = time.monotonic()
        if not failed and probe:
            self._resume("environments start again after a pause")
        elif probe:
            self._probes += 1
            self._probed.add(group)
            if now - self.paused_secs > self._limits.outage_secs:
                self._end(reason)
        elif failed and self.failing and len(self._latest) >= _FEWEST:
            logging.warning(
                "%d of the latest %d starts of environments failed; paused, one is "
                "tried from time to time; the last: %s",
                sum(failed for _, failed in self._latest),
                len(self._latest),
                reason,
            )
            self.paused_secs = now
            self._on_pause(True)

    def _resume(self, why: str) -> None:
        logging.warning("%s", why)
        self.paused_secs, self._probes = None, 0
        self._recovered_secs = time.monotonic()
        self._latest.clear()
        self._probed.clear()
        self._on_pause(False)

    def _end(self, reason: str) -> None:
        """Gives up: one group where all others started, otherwise the run."""
        limit = f"longer than rollout.outage_secs {self._limits.outage_secs:g} allows"
        if len(self._probed) == 1 and {*self._started} - self._probed:
            self._given_up |= self._probed
            self._resume(
                "the environments of one group alone could not be started for "
                f"{limit}; its members fail; the last: {reason}"
            )
            return
        error = f"environments could not be started for {limit}; the last: {reason}"
        self._on_end(StreamError(error))

    def wait_secs(self, member: Member, number: int) -> float:
        """Before the next try after `number` others: longer and longer, never equal."""
        jitter = random.Random(f"{member.job.key} {number}").uniform(0.5, 1.5)
        secs = self._limits.retry_secs * 2 ** min(number, 16)
        return min(secs, _LONGEST_WAIT_SECS) * jitter


def _group(member: Member) -> tuple:
    key = member.job.key
    return key.phase, key.step, key.group


class Attempts:
    """Runs members, each as a task of its own.

    Attributes:
      tasks: The members that run.
    """

    def __init__(
        self,
        limits: RolloutConfig,
        make_agent: Callable[[Member, int], Agent],
        tell: Callable[[Member, Event], None],
        gate: StartGate,
    ):
        self.tasks: set[asyncio.Task] = set()
        self._closing: set[asyncio.Task] = set()  # environments
        self._limits, self._make_agent, self._tell = limits, make_agent, tell
        self._gate = gate
        self._slots = asyncio.Semaphore(limits.slots)
        self._environments = asyncio.Semaphore(limits.environments or sys.maxsize)
        self._verifiers = asyncio.Semaphore(limits.verify_concurrency)

    def begin(self, member: Member, loop: asyncio.AbstractEventLoop) -> asyncio.Task:
        """Begins a member, whose task this returns."""
        task = loop.create_task(self._run(member), name=str(member.job.key))
        member.task = task
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancels all members of a stopped loop, and waits until they are closed."""
        for task in self.tasks:
            task.cancel()
        end = time.monotonic() + self._limits.close_timeout_secs + 2 * GRACE_SECS
        while (left := self.tasks | self._closing) and (
            left_secs := end - time.monotonic()
        ) > 0:
            with contextlib.suppress(BaseException):
                first = asyncio.FIRST_COMPLETED
                some = asyncio.wait(left, timeout=left_secs, return_when=first)
                loop.run_until_complete(some)

    def fail(self, member: Member, stop_reason: StopReason, reason: str) -> None:
        """Tells of a member without a verdict."""
        if member.agent is None:
            self._tell(member, Failed(member.job.key, stop_reason, reason))
        else:
            self._tell(member, member.agent.failed(stop_reason, reason))

    async def _run(self, member: Member) -> None:
        """Takes one member from its first attempt to its outcome."""
        used, number = 0, 0  # attempts that count, and all
        while True:
            await self._environments.acquire()  # until this one is closed
            try:
                member.agent = agent = self._make_agent(member, number)
            except Stopped as stopped:
                self._environments.release()
                self.fail(member, stopped.stop_reason, stopped.reason)
                return
            try:
                stopped = await self._attempt(member, agent)
            finally:
                await asyncio.shield(self._close(agent))
            if stopped is None:
                return
            # An outage uses up no attempts: nobody could have started.
            begun_secs = agent.times.get("started", 0.0)
            outage = stopped.at_start and self._gate.excuses(member, begun_secs)
            used += not outage
            if used >= self._limits.attempts or stopped.stop_reason not in RETRIED:
                self.fail(member, stopped.stop_reason, stopped.reason)
                return
            number += 1
            if stopped.fault:
                await asyncio.sleep(self._gate.wait_secs(member, used))

    async def _attempt(self, member: Member, agent: Agent) -> Stopped | None:
        """Takes one attempt to its outcome, or returns why another may follow."""
        probe = await self._gate.enter(member)
        told = False

        def started(failed: bool | None, reason: str = "") -> None:
            nonlocal told
            if not told:
                told = True
                self._gate.leave(member, probe, failed, reason)

        agent.moves.on_start = started
        try:
            async with self._slots:
                trajectory = await agent.act()
            # Outside the slots, as the verdict: a teacher holds up no decoding.
            trajectory = await agent.scored(trajectory)
        except Stopped as stopped:
            return stopped
        finally:
            started(None)
        self._tell(member, Completed(agent.key, trajectory))
        try:
            verdict = await self._verdict(member, agent)
        except Stopped as stopped:
            # Its tokens are out already: no other attempt.
            self.fail(member, stopped.stop_reason, stopped.reason)
            return None
        trajectory = dataclasses.replace(
            trajectory,
            reward=verdict.reward,
            parts=dict(verdict.parts),
            log=verdict.log,
            times=dict(agent.times),
        )
        self._tell(member, Rewarded(agent.key, verdict.reward, trajectory))
        return None

    async def _verdict(self, member: Member, agent: Agent) -> Verdict:
        """Asks the same environment again after a fault: it holds the agent's work."""
        for number in range(1, self._limits.attempts + 1):
            try:
                async with self._verifiers:
                    return await agent.verify()
            except Stopped as stopped:
                if not stopped.fault or number == self._limits.attempts:
                    raise
            await asyncio.sleep(self._gate.wait_secs(member, number))
        raise AssertionError("rollout.attempts is at least 1")

    def _close(self, agent: Agent) -> asyncio.Task:
        """Closes an attempt's environment, whoever waits for it."""

        def closed(closing: asyncio.Task) -> None:
            self._closing.discard(closing)
            self._environments.release()

        closing = asyncio.create_task(agent.moves.close(), name=str(agent.key))
        self._closing.add(closing)
        closing.add_done_callback(closed)
        return closing
