"""What sandboxes cost and leave: `python tests/sandbox_soak.py [sandboxes] [alive]`.

Prints the medians of a start with many alive and of a command, how long the event loop
was kept from others, and what is left after so many sandboxes (default 5,000).
"""

import asyncio
import gc
import os
import pathlib
import statistics
import sys
import threading
import time

from thundersync_jax.sandbox import cgroups
from thundersync_jax.sandbox.base import Limits, Spec
from thundersync_jax.sandbox.bubblewrap import Bubblewrap

STARTING = 2  # at once: a start is all computation
LIMITS = Limits(memory_mb=256, processes=32, disk_mb=16, file_mb=8)
RUN_ID = f"soak{os.getpid()}"


def measured():
    """What may leak: descriptors, threads, mounts, bytes, processes, groups."""
    gc.collect()
    status = pathlib.Path("/proc/self/status").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "mounts": len(pathlib.Path("/proc/self/mountinfo").read_text().splitlines()),
        "MiB": int(status.partition("VmRSS:")[2].split()[0]) // 1024,
        "children": len(children()),
        "groups": len(cgroups.left(f"thundersync.{RUN_ID}.")),
    }


def children():
    """Processes of this session's tree that a sandbox could have left."""
    own, found = str(os.getpid()), []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == own:
            found.append(folder.name)
    return found


class Clock:
    """Seconds of one kind of call."""

    def __init__(self):
        self.secs = []

    async def of(self, call):
        began = time.monotonic()
        result = await call
        self.secs.append(time.monotonic() - began)
        return result

    def __str__(self):
        ms = sorted(1000 * secs for secs in self.secs)
        return f"{statistics.median(ms):.1f} ms ({ms[int(0.9 * len(ms))]:.1f} at p90)"


async def life(provider, name, gate, starts, commands):
    sandbox = provider.create(Spec(limits=LIMITS), name)
    try:
        async with gate:
            await starts.of(sandbox.start())
        await commands.of(sandbox.run("echo x > file; sleep 300 & true"))
        await sandbox.write("in", b"x")
        assert await sandbox.read("file") == b"x\n"
        await sandbox.kill_all()
    finally:
        await sandbox.stop()


async def many_alive(provider, alive):
    """Starts while others live, then commands one at a time."""
    gate, starts, commands = asyncio.Semaphore(STARTING), Clock(), Clock()
    sandboxes = [provider.create(Spec(limits=LIMITS), f"a{i}") for i in range(alive)]

    async def start(sandbox):
        async with gate:
            await starts.of(sandbox.start())

    try:
        await asyncio.gather(*map(start, sandboxes))
        for sandbox in sandboxes:
            await commands.of(sandbox.run("true"))
    finally:
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    print(f"{alive} alive: start {starts}, command {commands}", flush=True)


async def kept_waiting(worst):
    """The longest that a turn of the event loop took."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(0.001)
        worst.append(time.monotonic() - began - 0.001)


async def main(count, alive):
    provider, worst = Bubblewrap(RUN_ID), []
    print(await provider.check())
    watch = asyncio.ensure_future(kept_waiting(worst))
    await many_alive(provider, alive)
    gate, starts, commands = asyncio.Semaphore(STARTING), Clock(), Clock()
    before, began, cpu_secs = measured(), time.monotonic(), sum(os.times()[:4])
    for first in range(0, count, 8):
        names = [f"s{i}" for i in range(first, min(first + 8, count))]
        lives = (life(provider, name, gate, starts, commands) for name in names)
        await asyncio.gather(*lives)
        if first % 400 == 0:
            print(f"{first + len(names)} sandboxes: {measured()}", flush=True)
    secs = time.monotonic() - began
    spent = sum(os.times()[:4]) - cpu_secs
    watch.cancel()
    worst = sorted(worst)
    print(f"{count} sandboxes in {secs:.0f} s: start {starts}, command {commands}")
    print(
        f"{1000 * spent / count:.0f} ms of a processor for each, of ours and children's"
    )
    print(
        f"event loop late by {1000 * worst[int(0.99 * len(worst))]:.1f} ms at p99, "
        f"{1000 * worst[-1]:.1f} ms at most"
    )
    print(f"before {before}\nafter  {measured()}")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]] + [5000, 100][len(sys.argv) - 1 :]
    asyncio.run(main(*numbers))
