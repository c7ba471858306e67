"""What the tests of sandboxes share: providers that are here, and started sandboxes."""

import asyncio
import contextlib
import functools
import itertools
import os
import pathlib
import shutil

import pytest

from thundersync_jax.sandbox.base import Limits, Spec
from thundersync_jax.sandbox.bubblewrap import Bubblewrap

PROVIDERS = [
    pytest.param(
        Bubblewrap,
        marks=pytest.mark.skipif(
            shutil.which("bwrap") is None, reason="bubblewrap is not installed"
        ),
        id="bubblewrap",
    )
]
SMALL = Limits(memory_mb=256, processes=64, disk_mb=32, file_mb=16)
RUN_ID = f"tests{os.getpid()}"
_numbers = itertools.count()

every_provider = pytest.mark.parametrize("make", PROVIDERS)


def asynchronous(test):
    """Runs a test of coroutines in a loop of its own."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        return asyncio.run(test(*args, **kwargs))

    return run


@contextlib.asynccontextmanager
async def started(make, limits=SMALL, **spec):
    sandbox = make(RUN_ID).create(Spec(limits=limits, **spec), f"s{next(_numbers)}")
    try:
        await sandbox.start()
        yield sandbox
    finally:
        await sandbox.stop()


def processes(word):
    """Processes of the host whose command line has a word."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word.encode() in (folder / "cmdline").read_bytes():
                found.append(folder.name)
    return found


async def gone(word, secs=10.0):
    """Whether all processes with a word end in so many seconds."""
    for _ in range(int(secs / 0.05)):
        if not processes(word):
            return True
        await asyncio.sleep(0.05)
    return False
