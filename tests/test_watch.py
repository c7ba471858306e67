"""How an event loop ends, whatever still runs in it."""

import asyncio
import gc
import time

from thundersync_jax.rollout import commands


def stopped_loop(coroutine):
    """A loop that has just begun a task, and stops before any other begins."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)
    loop.call_soon(loop.stop)
    loop.run_forever()
    return loop, task


def test_no_coroutine_is_left_that_nobody_awaited():
    """Task groups wrap what they run, and a task may be cancelled before it begins."""
    ended = []

    async def inner():
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("inner")

    async def wrapped(coroutine):
        await coroutine

    async def host():
        child = asyncio.get_running_loop().create_task(wrapped(inner()))
        try:
            await asyncio.sleep(3600)
        finally:
            child.cancel()
            await asyncio.wait([child])
            ended.append("host")

    loop, task = stopped_loop(host())
    commands.end_tasks(loop, 5.0)
    assert task.done() and not asyncio.all_tasks(loop)
    loop.close()
    gc.collect()  # a warning is an error
    assert ended == ["inner", "host"]


def test_a_task_without_a_parent_ends_too_and_a_stubborn_one_is_left_behind():
    async def slow():
        await asyncio.sleep(3600)

    async def stubborn():
        asyncio.get_running_loop().orphan = asyncio.ensure_future(slow())
        while not released:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                cancelled.append(1)

    cancelled, released = [], []
    loop, task = stopped_loop(stubborn())
    orphan = loop.orphan
    start = time.monotonic()
    commands.end_tasks(loop, 0.1)
    assert 0.15 < time.monotonic() - start < 5.0
    assert orphan.cancelled() and not task.done() and cancelled == [1]
    released.append(1)
    loop.run_until_complete(task)
    loop.close()
