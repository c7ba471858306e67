"""When gradient calls really ran, seen from a thread that does nothing but wait.

Dispatch returns at once; one thread per replica waits in place of the learner loop. The
sums that a gradient is folded into are donated to the next fold and cannot be waited
for. A device runs programs in order, so a tiny one behind the fold tells of its end.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from thundersync_jax.stream.schedule import Call, Prompt, TurnCall
from thundersync_jax.types import Span

_LIVENESS_SECS = 1.0
_behind = jax.jit(jnp.logical_not)


class Ran(NamedTuple):
    """One gradient call with its fold into sums, in seconds of the monotonic clock.

    It begins when it is dispatched or, if later, when the one before it has ended.
    """

    call: Call | TurnCall | Prompt
    dispatched_secs: float
    start_secs: float
    end_secs: float

    @property
    def replica(self) -> int:
        """The replica it ran on."""
        return _replica(self.call)

    @property
    def secs(self) -> float:
        """Seconds it ran."""
        return self.end_secs - self.start_secs


class Totals(NamedTuple):
    """Work since the clock was made."""

    samples: int  # whose gradient was started
    busy_secs: float  # of calls that have ended, summed over replicas


class LearnerClock:
    """Turns `GradientStream`'s `on_call` into records, and spans on a timeline.

    Its threads call `on_end` once a replica can take another call, then `on_span`.
    """

    def __init__(
        self, on_span: Callable[[Span], None], on_end: Callable[[], None] = lambda: None
    ):
        self._on_span = on_span
        self._on_end = on_end
        self._queues: dict[int, queue.SimpleQueue] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._samples = 0
        self._busy_secs: dict[int, float] = {}
        self._ran: list[Ran] = []
        self._error: BaseException | None = None

    @property
    def totals(self) -> Totals:
        """What has been started and done so far."""
        return Totals(self._samples, sum(self._busy_secs.values()))

    def on_call(self, call: Call | TurnCall | Prompt, ended: jax.Array) -> None:
        """Times one call, whose fold has been dispatched as well. Never blocks.

        `ended` is bool[], an output of the gradient's program.
        """
        now = time.monotonic()
        folded = _behind(ended)
        self._samples += _samples(call)
        replica = _replica(call)
        if replica not in self._queues:
            self._busy_secs[replica] = 0.0
            self._queues[replica] = queue.SimpleQueue()
            self._threads[replica] = threading.Thread(
                target=self._watch,
                args=(replica,),
                name=f"learner-clock-{replica}",
                daemon=True,
            )
            self._threads[replica].start()
        self._queues[replica].put((call, ended, folded, now))

    def take(self) -> list[Ran]:
        """Returns the calls since the last `take` by their ends, once all have ended.

        RuntimeError where a thread has died, so that some end will never be known.
        """
        for replica, calls in self._queues.items():
            seen = threading.Event()
            calls.put(seen)
            while not seen.wait(_LIVENESS_SECS):
                if not self._threads[replica].is_alive():
                    raise RuntimeError(
                        f"the clock of replica {replica} has stopped"
                    ) from self._error
        ran, self._ran = self._ran, []
        return sorted(ran, key=lambda call: call.end_secs)

    def close(self) -> None:
        """Ends the threads; their last spans are out afterwards."""
        for calls in self._queues.values():
            calls.put(None)
        for thread in self._threads.values():
            thread.join(timeout=2.0)

    def _watch(self, replica: int) -> None:
        try:
            self._time_calls(replica)
        except BaseException as error:
            self._error = error
            self._on_end()

    def _time_calls(self, replica: int) -> None:
        free = 0.0
        while (entry := self._queues[replica].get()) is not None:
            if isinstance(entry, threading.Event):
                entry.set()
                continue
            call, ended, folded, dispatched = entry
            ended.block_until_ready()
            self._on_end()  # the next call may be queued behind the fold
            folded.block_until_ready()
            ran = Ran(call, dispatched, max(dispatched, free), time.monotonic())
            free = ran.end_secs
            self._ran.append(ran)
            self._busy_secs[replica] += ran.secs
            name, lane = _name(call), f"replica {replica}"
            self._on_span(Span("learner", name, ran.start_secs, ran.end_secs, lane))


def _replica(call: Call | TurnCall | Prompt) -> int:
    return call.replicas[0] if isinstance(call, Prompt) else call.replica


def _samples(call: Call | TurnCall | Prompt) -> int:
    """Whose gradient it starts: a trajectory in turns counts with its first."""
    if isinstance(call, Call):
        return len(call.items)
    return int(isinstance(call, TurnCall) and not call.replay and not call.item.sample)


def _name(call: Call | TurnCall | Prompt) -> str:
    if isinstance(call, Prompt):
        return f"prompt g{call.group}"
    if isinstance(call, TurnCall):
        kind = "replay" if call.replay else "turn"
        return f"{kind} {call.item.sample} g{call.item.group}m{call.item.member}"
    first = call.items[0]
    more = f" +{len(call.items) - 1}" if len(call.items) > 1 else ""
    kind = "direct" if call.place is None else "streamed"
    return f"{kind} g{first.group}m{first.member}{more}"
