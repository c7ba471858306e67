"""When gradient calls really ran, seen from a thread that does nothing but wait.

Dispatch returns at once, so the learner loop cannot know when a call ended without
stopping for it. One thread per replica waits instead and writes the call's bar.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from thundersync_jax.schedule import Call
from thundersync_jax.types import Span


class Totals(NamedTuple):
    """Work since the clock was made."""

    samples: int  # whose gradient was started
    busy_secs: float  # of calls that have ended, summed over replicas


class LearnerClock:
    """Turns `GradientStream`'s `on_call` into spans on the "learner" track."""

    def __init__(self, on_span: Callable[[Span], None]):
        self._on_span = on_span
        self._queues: dict[int, queue.SimpleQueue] = {}
        self._threads: list[threading.Thread] = []
        self._samples = 0
        self._busy_secs: dict[int, float] = {}

    @property
    def totals(self) -> Totals:
        """What has been started and done so far."""
        return Totals(self._samples, sum(self._busy_secs.values()))

    def on_call(self, call: Call, ended: jax.Array) -> None:
        """Times one call. Never blocks."""
        self._samples += len(call.items)
        if call.replica not in self._queues:
            self._busy_secs[call.replica] = 0.0
            self._queues[call.replica] = queue.SimpleQueue()
            thread = threading.Thread(
                target=self._watch,
                args=(call.replica,),
                name=f"learner-clock-{call.replica}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        self._queues[call.replica].put((call, ended, time.monotonic()))

    def close(self) -> None:
        """Ends the threads; their last spans are out afterwards."""
        for calls in self._queues.values():
            calls.put(None)
        for thread in self._threads:
            thread.join(timeout=2.0)

    def _watch(self, replica: int) -> None:
        free = 0.0
        while (entry := self._queues[replica].get()) is not None:
            call, ended, dispatched = entry
            ended.block_until_ready()
            now = time.monotonic()
            first = call.items[0]
            more = f" +{len(call.items) - 1}" if len(call.items) > 1 else ""
            kind = "direct" if call.place is None else "streamed"
            name = f"{kind} g{first.group}m{first.member}{more}"
            start = max(dispatched, free)
            self._on_span(Span("learner", name, start, now, lane=f"replica {replica}"))
            self._busy_secs[replica] += now - start
            free = now
