"""Waiting that is drawn, not real: a laptop with the timing of agents that wait.

A wait depends on the seed and the number of the call alone, so every release rule and
every order of arrival meets the same ones. Nothing here retries or times out; deadlines
belong to the rollout pool.
"""

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from thundersync_jax.config import LatencyConfig
from thundersync_jax.envs.base import Action, Environment, Observation

# Last seed word: a tool call and the verification of one attempt draw apart.
_TOOL, _VERIFY = 0, 1


def draw(latency: LatencyConfig, attempt: Sequence[int], *call: int) -> float:
    """Returns seconds: 0, the median, or median · exp(sigma · z) with z ~ N(0, 1).

    Args:
      latency: Distribution of the wait.
      attempt: Non-negative integers that name the attempt, its member last; a
        straggler is member 0.
      call: Non-negative integers that name the call; equal names give equal waits.
    """
    if latency.kind == "none":
        return 0.0
    if latency.kind == "straggler":
        return 0.0 if attempt[-1] else latency.median_secs
    if latency.kind == "constant":
        return latency.median_secs
    normal = np.random.default_rng([*attempt, *call]).standard_normal()
    return float(latency.median_secs * math.exp(latency.sigma * normal))


@dataclasses.dataclass
class WithLatency:
    """An environment that waits before it answers a tool call or gives its verdict.

    A tool call is an action that does not end the attempt, whatever its kind.
    """

    environment: Environment
    tool: LatencyConfig
    latency: LatencyConfig  # of the verdict
    seed: tuple[int, ...]  # names the attempt: run, step, group, member
    calls: int = 0

    async def start(self, task: Any) -> str:
        return await self.environment.start(task)

    async def step(self, action: Action) -> Observation:
        observation = await self.environment.step(action)
        if not observation.done:
            wait_secs = draw(self.tool, self.seed, self.calls, _TOOL)
            self.calls += 1
            await asyncio.sleep(wait_secs)
        return observation

    async def verify(self) -> float:
        await asyncio.sleep(draw(self.latency, self.seed, 0, _VERIFY))
        return await self.environment.verify()
