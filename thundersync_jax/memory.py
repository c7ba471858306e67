"""What gradient sums take on a device, and how many groups may hold some.

Decided before anything is compiled. What a step then needed is in its report.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from thundersync_jax import sums
from thundersync_jax.config import Config
from thundersync_jax.errors import ConfigError
from thundersync_jax.ops.advantages import Estimator

Tree = Any
_SHARE_OF_MEMORY = 0.25  # of a device, for group sums where nothing else is said


@dataclasses.dataclass(frozen=True)
class SumMemory:
    """The gradient-sized sums of a run.

    Attributes:
      open_groups: How many groups may hold sums that miss members, as far as memory
        goes. Under batch and group release it is what comparisons with trajectory
        release use.
      description: One line for people; empty where one plain sum is all there is.
    """

    open_groups: int
    description: str


def plan(config: Config, estimator: Estimator | None, params: Tree) -> SumMemory:
    """What a config asks for, as far as it fits.

    Raises:
      ConfigError: The sums of one group do not fit, or nobody says what would.
    """
    if config.release == "turn":
        return _of_turns(config, params)
    scope = "member" if estimator is None else estimator.scope
    exact = config.accumulator == "exact"
    channels = sums.channels(
        scope,
        weighted=estimator is not None,
        additive=config.loss.has_additive,
        lossy=config.partial_groups == "drop" or config.uniform_groups != "keep",
    )
    one = sums.bytes_per_device(params, config.accumulator)
    open_groups = _open_groups(config, params, channels * one)
    parts, total = ["the batch"], 1
    if config.release == "trajectory" and channels:
        places = 1 if scope == "batch" else open_groups
        total += places * channels
        parts.append(
            f"{channels} that all groups share"
            if scope == "batch"
            else f"up to {open_groups} open groups of {channels} "
            f"sum{'s' * (channels > 1)} each"
        )
    if exact and scope != "member":
        total += 1
        parts.append("one for complete groups")
    if total == 1 and not exact:
        return SumMemory(open_groups, "")
    size = f"{total * one / 2**20:,.1f} MiB of gradient sums per device"
    words = "; at most three 32-bit words per parameter and sum" * exact
    return SumMemory(open_groups, f"{size}: {_listed(parts)}{words}")


def _of_turns(config: Config, params: Tree) -> SumMemory:
    """Turn by turn: a sum per open trajectory, keys and values with cotangents."""
    model, places = config.model, config.open_trajectories
    entries = 2 * model.layers * model.kv_heads * model.head_dim
    kept = entries * config.rollout.context_tokens
    size = (1 + places) * sums.bytes_per_device(params)
    states = places * kept * (jnp.dtype(model.dtype).itemsize + 4)
    return SumMemory(
        config.rollout.groups_per_step,
        f"{size / 2**20:,.1f} MiB of gradient sums per device: the batch and up to "
        f"{places} open trajectories; and {states / 2**20:,.1f} MiB of their keys, "
        "values and cotangents",
    )


def _open_groups(config: Config, params: Tree, one: int) -> int:
    """How many groups may hold sums of so many bytes each."""
    budget = config.group_sum_bytes
    if budget is None:
        memory = jax.tree.leaves(params)[0].addressable_shards[0].device.memory_stats()
        budget = int((memory or {}).get("bytes_limit", 0) * _SHARE_OF_MEMORY) or None
    wished = config.open_groups or config.rollout.groups_per_step
    if not one:
        return wished
    if budget is None and config.open_groups is None:
        raise ConfigError(
            "open_groups is none and the device does not tell its memory; set "
            f"open_groups, or group_sum_bytes at {one:,} bytes a group"
        )
    if budget is not None and budget < one:
        raise ConfigError(
            f"group_sum_bytes is {budget:,} and the sums of one open group take "
            f"{one:,} bytes per device; raise it, or shard over mesh.fsdp"
        )
    return wished if budget is None else min(wished, budget // one)


def _listed(parts: list[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
