"""The most memory that a step takes on the learner's devices.

A device that keeps count, as GPUs and TPUs do, is asked every few milliseconds: bytes
in use, what running programs need for themselves included. CPU devices keep none. There
the arrays that are alive are counted when `look` is called, each buffer once: states of
the optimizer, sums, samples, keys and values of open trajectories, whoever made them.
Programs' own memory is not in it, nor is a gradient that a program is about to add to a
sum. Nothing is taken off.
"""

import collections
import threading
from collections.abc import Collection

import jax

_LOOK_SECS = 0.002


class PeakBytes:
    """Watches some devices while it is used as a context.

    Attributes:
      bytes: The most so far, of the fullest device.

    Args:
      devices: All of one kind; with none it does nothing.
    """

    def __init__(self, devices: Collection[jax.Device]):
        self.bytes = 0
        self._devices = frozenset(devices)
        self._told = bool(devices) and all(device.memory_stats() for device in devices)
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="peak-bytes", daemon=True
        )

    def __enter__(self) -> "PeakBytes":
        if self._told:
            self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()
        if self._told:
            self._thread.join()

    def look(self) -> None:
        """Counts what is alive, where devices do not tell by themselves."""
        if self._devices and not self._told:
            self.bytes = max(self.bytes, alive_bytes(self._devices))

    def _watch(self) -> None:
        while True:
            stats = [device.memory_stats() for device in self._devices]
            self.bytes = max(self.bytes, *(one["bytes_in_use"] for one in stats))
            if self._ended.wait(_LOOK_SECS):
                return


def alive_bytes(devices: Collection[jax.Device]) -> int:
    """Bytes of the arrays that are alive, of the fullest of some devices."""
    buffers: dict[jax.Device, dict[int | str, int]] = collections.defaultdict(dict)
    for array in jax.live_arrays():
        if array.sharding.device_set.isdisjoint(devices):
            continue
        try:
            # Shards are arrays that jax has to make first; most arrays are whole.
            whole = len(array.sharding.device_set) == 1
            parts = [array] if whole else [s.data for s in array.addressable_shards]
            for part in parts:
                (device,) = part.sharding.device_set
                # Views of replicas are further arrays of the same buffers. Asking for
                # the address of what a program still writes would wait for it.
                ready = part.is_ready()
                where = part.unsafe_buffer_pointer() if ready else f"array {id(part)}"
                buffers[device][where] = part.nbytes
        except RuntimeError:  # a sampler on the learner's device has just donated it
            continue
    return max((sum(buffers[device].values()) for device in devices), default=0)
