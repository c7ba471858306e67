"""`Stream`: what streams of whole trajectories and of turns have in common.

A *schedule* decides what is computed next (plain data, no arrays), the *learner*
computes it on the devices, the *ledger* keeps what happened. Events come in as method
calls; each ends with `advance`, which starts whatever may start now.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from thundersync_jax.stream import refusals
from thundersync_jax.stream.learner import Learner
from thundersync_jax.stream.ledger import Computed, Entry, Ledger, Report
from thundersync_jax.stream.padding import Padded
from thundersync_jax.stream.schedule import Close, Item, Schedule, Turns
from thundersync_jax.stream.surrogate import Gradient, Sample


class Stream:
    """Collects one step and returns its gradient. One thread owns a stream.

    The two streams describe their settings. `scope` says whose rewards an advantage
    depends on, `lossy` whether sums may have to be forgotten with their group.
    """

    def __init__(
        self,
        schedule: Schedule | Turns,
        learner: Learner,
        *,
        scope: str,
        lossy: bool,
        denominator: refusals.Denominator,
        partial_groups: refusals.PartialGroups,
        policy_version: int | None,
        on_call: Callable[[Any, jax.Array], None] | None,
    ):
        self._schedule = schedule
        self._learner = learner
        self._ledger = Ledger()
        self._scope = scope
        self._lossy = lossy
        self._denominator = denominator
        self._partial = partial_groups
        self._version = policy_version
        self._on_call = on_call
        self._open: set[int] = set()  # places whose sums miss something
        self._open_max = 0
        self._thread = threading.get_ident()
        self._ended: str | None = None  # what became of the stream, as "is finished"

    def fail(
        self, group: Hashable, member: int, reason: str, replace: bool = True
    ) -> int | None:
        """Withdraws a member that is not settled, with whatever it left.

        Args:
          reason: One line, for the StreamError where `partial_groups` is "fail".
          replace: Whether a spare member may take its place.

        Returns:
          The index of that member, which is to settle now; None where there is none.
        """
        self._check_alive()
        close = self._schedule.fail(group, member, replace)
        self._ledger.failures[group, member] = reason
        self._ledger.rewards.pop((group, member), None)
        other = self._schedule.roster.replaced_by(group, member)
        if other is not None:
            self._ledger.replaced.add((group, member))
        elif self._partial == "fail":
            self._ended = "ended with a failed member"
            raise refusals.failed(group, member, reason)
        self._settle(close)
        return other

    def advance(self) -> bool:
        """Starts ready work on free replicas. Returns whether any is left waiting."""
        self._check_alive()
        while True:
            with self._or_end():
                self._fold()
                call = self._next_call()
                if call is None:
                    return self._schedule.ready
                computed = self._start(call)
                self._ledger.record_call(computed)
                if self._on_call:
                    self._on_call(call, computed.evaluated.finite)

    def drain(self) -> None:
        """Starts ready work, and waits until none is left waiting for a replica."""
        while self.advance():
            self._learner.wait(self._schedule.waits_for)

    def finish(self) -> tuple[Gradient, Report]:
        """Ends the step.

        Returns:
          The gradient, with the structure, shapes and layout of `params`, in float32
          (float64 for float64 parameters), and the report.

        Raises:
          ValueError: Members are neither settled nor failed; the stream goes on.
          StreamError: A gradient is not finite; names the trajectories where one of
            them is at fault.
        """
        self._check_alive()
        refusals.check_settled(self._schedule.roster.outstanding())
        with self._or_end():
            self._flush()
        self.drain()
        assert not self._schedule.unfinished
        self._ended = "is finished"
        ledger, schedule, parts = self._ledger, self._schedule, self._learner.structure
        denominator = ledger.denominator(self._denominator)
        evaluated = [computed.evaluated for computed in ledger.calls]
        finite = [finite for _, finite in ledger.prompt_calls]
        values, prompts = jax.device_get((evaluated, finite))
        ledger.check_finite(values, prompts, bool(parts and parts.additive))
        gradient, norm = self._learner.finish(denominator)
        ledger.check_norm(norm)
        report = ledger.report(
            values,
            denominator,
            columns=parts.columns if parts else (),
            waited=schedule.waited,
            waited_for_bucket=schedule.waited_for_bucket,
            compiles=self._learner.compiles,
            open_groups_max=self._open_max,
            group_sum_bytes=self._open_max
            * self._learner.unit_bytes(self._scope, self._lossy),
            gradient_norm=float(norm),
        )
        return gradient, report

    @property
    def advantages(self) -> dict[tuple[Hashable, int], float]:
        """Those of kept groups whose rewards are in, 0 where there are no rewards."""
        return {
            (group, member): advantage
            for group, members in self._ledger.advantages.items()
            for member, advantage in members.items()
        }

    @property
    def lost_groups(self) -> list[Hashable]:
        """Groups that do not count, dropped or filtered, in order of closing."""
        return list(self._ledger.lost)

    def _fold(self) -> None:
        """Carries out what the schedule says of sums that nothing joins any more."""
        raise NotImplementedError

    def _next_call(self) -> Any:
        """What a free replica should do next, or None."""
        raise NotImplementedError

    def _start(self, call: Any) -> Computed:
        """Has the learner compute what the schedule decided."""
        raise NotImplementedError

    def _flush(self) -> None:
        """No event will follow."""

    def _keep(self, group: Hashable) -> None:
        """A group counts for certain, and all its outcomes are in."""
        survivors = self._schedule.roster.survivors(group)
        self._ledger.advantages[group] = dict.fromkeys(survivors, 0.0)

    def _settle(self, close: Close | None) -> None:
        """Takes in what an event closed, and goes on."""
        if close is not None:
            with self._or_end():
                if close.verdict == "kept":
                    self._keep(close.group)
                else:
                    self._ledger.lost[close.group] = close.verdict
        self.advance()

    def _prompt(self, group: Hashable, prompt: Sample) -> Padded | None:
        """The prompt of a group as programs take it, if it has one."""
        if prompt is None:
            return None
        padded = Padded.of(prompt)
        refusals.check_some(group, padded.real_tokens)
        return padded

    def _share(self, group: Hashable, prompt: Padded | None) -> None:
        """Takes in the prompt of a group that has been opened."""
        if prompt is not None:
            self._ledger.prompts[group] = prompt.real_tokens, prompt.padded_tokens
            self._learner.open_prompt(group, prompt.tree)

    def _entry(
        self,
        group: Hashable,
        member: int,
        sample: Sample,
        tokens: int | None,
        version: int | None,
        event: str,
    ) -> tuple[Entry, Hashable]:
        """A sample as the ledger has it, and its bucket. Changes nothing."""
        self._check_alive()
        refusals.check_version(group, member, version, self._version)
        needed = self._denominator == "tokens"
        count = refusals.tokens(group, member, tokens, needed)
        padded = Padded.of(sample)
        self._schedule.roster.incomplete(group, member, event)
        bucket = self._learner.bucket(group, padded.tree)
        entry = Entry(padded.tree, count, padded.real_tokens, padded.padded_tokens)
        return entry, bucket

    def _enter(self, item: Item, entry: Entry, version: int | None) -> None:
        """Takes in a sample that was accepted."""
        entry.tree = self._learner.put(entry.tree)
        self._ledger.samples[item[:3]] = entry
        self._see(version)

    def _see(self, version: int | None) -> None:
        """An event of a policy version was accepted."""
        self._version = version if self._version is None else self._version

    def _hold(self, place: int) -> None:
        """Sums are held at a place that miss something."""
        self._open.add(place)
        self._open_max = max(self._open_max, len(self._open))

    def _close_prompts(self) -> None:
        """Differentiates the shared prompts that nothing more comes of."""
        for prompt in self._schedule.prompts() if self._learner.in_pieces else ():
            for replica, evaluated in self._learner.close_prompt(prompt):
                self._ledger.record_prompt(prompt.group, evaluated)
                if self._on_call:
                    there = prompt._replace(replicas=(replica,))
                    self._on_call(there, evaluated.finite)

    def _check_alive(self) -> None:
        """Raises ValueError in another thread, and after the end."""
        if threading.get_ident() != self._thread:
            raise ValueError(
                f"called from thread {threading.current_thread().name!r}; the thread "
                "that made a stream owns it, pass events to it in a queue"
            )
        if self._ended:
            raise ValueError(
                f"this stream {self._ended}; make a new one for every step"
            )

    @contextlib.contextmanager
    def _or_end(self) -> Iterator[None]:
        """A decision that is half carried out leaves no step to go on with."""
        try:
            yield
        except BaseException as error:
            self._ended = f"stopped at {type(error).__name__}"
            raise
