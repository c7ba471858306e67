"""Which devices learn, sample and teach, and what jax is told before it starts."""

import contextlib
import dataclasses
import functools
import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from thundersync_jax.config import Config
from thundersync_jax.errors import ConfigError
from thundersync_jax.hf import weights
from thundersync_jax.models import layers
from thundersync_jax.models.base import Model, Params
from thundersync_jax.ops.advantages import Estimator
from thundersync_jax.run.checkpoint import Checkpoints
from thundersync_jax.stream import mesh, sums
from thundersync_jax.stream.mesh import make_mesh

_KEPT_SECS = 30 * 24 * 3600  # of a compiled program in the cache


class Placement(NamedTuple):
    """The learner's mesh and the devices beside it."""

    mesh: Mesh
    samplers: tuple[jax.Device, ...]
    teacher: jax.Device  # the first sampler's where the config has none of its own


def prepare(config: Config) -> None:
    """Sets what jax reads once: CPU devices, 64-bit numbers, where programs are kept.

    A CPU counts as one device unless told otherwise. Harmless where a GPU or a TPU is
    used, or where jax runs already.
    """
    _keep_programs()
    wanted = _devices(config)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Refused where jax runs already, with as many devices as it has.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", wanted)
    if config.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)


def place(config: Config) -> Placement:
    """The learner's mesh over the first devices, and the devices behind it.

    The sampler takes those behind the mesh, or the learner's first where it is shared;
    a teacher the one behind those, or the sampler's first. ValueError: too few devices.
    """
    devices, axes = jax.devices(), config.mesh
    alone, wanted = _samplers(config), _devices(config)
    if devices[0].platform == "cpu" and len(devices) < wanted:
        raise ConfigError(
            f"jax runs already, with {len(devices)} CPU devices, and the config needs "
            f"{wanted}; something used jax before the run, as a task file that makes "
            "an array while it is imported. Make none there, or start Python with "
            f"JAX_NUM_CPU_DEVICES={wanted}"
        )
    mesh = make_mesh(axes.replica, axes.fsdp, axes.tensor, devices)
    rest = devices[mesh.size :]
    if alone > len(rest):
        raise ValueError(
            f"mesh.sampler is 'own_device' with mesh.sampler_devices {alone} and the "
            f"learner takes {mesh.size} of {len(devices)} devices; set "
            "mesh.sampler=shared or make the mesh smaller"
        )
    samplers, rest = tuple(rest[:alone]) or (devices[0],), rest[alone:]
    if not _teaches_alone(config):
        return Placement(mesh, samplers, samplers[0])
    if not rest:
        raise ValueError(
            f"teacher.device is 'own_device' and learner and sampler take all "
            f"{len(devices)} devices; set teacher.device=sampler or make the mesh "
            "smaller"
        )
    return Placement(mesh, samplers, rest[0])


def _keep_programs() -> None:
    """Keeps compiled programs in the user's cache folder (docs/commands.md)."""
    if (
        jax.config.jax_compilation_cache_dir
        or not jax.config.jax_enable_compilation_cache
    ):
        return
    # Programs for a CPU use the instructions of the one they were compiled on.
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    features = {line for line in lines if line.startswith(("flags", "Features"))}
    machine = hashlib.sha256("".join(sorted(features)).encode()).hexdigest()[:8]
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(caches).expanduser() / "thundersync_jax"
    folder = folder / f"{platform.machine()}-{machine}"
    with contextlib.suppress(OSError):
        for file in folder.glob("*"):
            if file.stat().st_mtime < time.time() - _KEPT_SECS:
                file.unlink()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small models have hundreds of programs of a few milliseconds each.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _teaches_alone(config: Config) -> bool:
    teacher = config.teacher
    return teacher.workdir is not None and teacher.device == "own_device"


def _devices(config: Config) -> int:
    """How many devices a config needs."""
    mesh = config.mesh
    learner = mesh.replica * mesh.fsdp * mesh.tensor
    return learner + _samplers(config) + _teaches_alone(config)


def _samplers(config: Config) -> int:
    """How many devices do nothing but sample; servers are elsewhere."""
    alone = config.mesh.sampler == "own_device" and not config.vllm.servers
    return config.mesh.sampler_devices if alone else 0


def initializer(config: Config, model: Model, devices: Mesh) -> Callable[[], Params]:
    """Makes the first parameters, at random or from `model.path`, at every call."""
    key, path = jax.random.key(config.seed), config.model.path
    if path is not None:
        weights.check(path, config.model)  # before jax meets an absurd size
    shapes = jax.eval_shape(model.init, key)
    shardings = mesh.parameter_shardings(
        devices, shapes, model.axes(), layers.MESH_AXES
    )
    if path is not None:
        return functools.partial(weights.load, path, config.model, shardings)
    return functools.partial(jax.jit(model.init, out_shardings=shardings), key)


def policy(
    workdir: str | Path, like: Params, step: int | None = None
) -> tuple[int, Params]:
    """Reads a saved policy of a training run, with the shapes and layout of `like`.

    `step` is the number of training steps behind it; 0 is the warm start's, None the
    newest. Returns the step and the parameters; ConfigError where there are none.
    """
    folder = Path(workdir)
    with (
        Checkpoints(folder / "checkpoints") as trained,
        Checkpoints(folder / "warm_start") as warm,
    ):
        steps = [0] * bool(warm.steps()) + trained.steps()
        if not steps:
            raise ConfigError(
                f"{workdir} holds no policy; train one first with the same --workdir."
            )
        step = steps[-1] if step is None else step
        if step not in steps:
            raise ConfigError(
                f"{workdir} holds no policy of step {step}, expected one of {steps}. "
                "checkpoint.keep says how many a run keeps."
            )
        source, saved_step = (trained, step) if step else (warm, warm.latest())
        saved, _ = source.restore(saved_step, {"params": like}, part=True)
    return step, saved["params"]


_SHARE_OF_MEMORY = 0.25  # of a device, for group sums that the config does not limit


@dataclasses.dataclass(frozen=True)
class SumMemory:
    """The gradient-sized sums of a run."""

    # Groups that may hold sums that miss members, as far as memory goes. Under batch
    # and group release it is what comparisons with trajectory release use.
    open_groups: int
    description: str  # for people; empty where one plain sum is all there is


def plan(
    config: Config,
    model: Model,
    estimator: Estimator | None,
    params: Params,
    additive: bool,
) -> SumMemory:
    """What a config asks for, as far as it fits.

    The estimator is None without rewards; `params` lie on the learner's mesh;
    `additive` says whether the loss has a part that no advantage multiplies.
    ConfigError where the sums of one group do not fit, or nobody says what would.
    """
    if config.release == "turn":
        return _of_turns(config, model, params)
    scope = "member" if estimator is None else estimator.scope
    exact = config.accumulator == "exact"
    channels = sums.channels(
        scope,
        weighted=estimator is not None,
        additive=additive,
        lossy=config.partial_groups == "drop" or config.uniform_groups != "keep",
    )
    sum_bytes = sums.bytes_per_device(params, config.accumulator)
    open_groups = _open_groups(config, params, channels * sum_bytes)
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
    size = f"{total * sum_bytes / 2**20:,.1f} MiB of gradient sums per device"
    words = "; at most three 32-bit words per parameter and sum" * exact
    return SumMemory(open_groups, f"{size}: {_listed(parts)}{words}")


def _of_turns(config: Config, model: Model, params: Params) -> SumMemory:
    """Turn by turn: a sum per open trajectory, kept arrays with cotangents."""
    places, tokens = config.open_trajectories, config.rollout.context_tokens
    kept, _ = jax.eval_shape(lambda: model.empty(tokens))
    size = (1 + places) * sums.bytes_per_device(params)
    states = places * sum(
        x.size * (x.dtype.itemsize + 4) for x in jax.tree.leaves(kept)
    )
    return SumMemory(
        config.rollout.groups_per_step,
        f"{size / 2**20:,.1f} MiB of gradient sums per device: the batch and up to "
        f"{places} open trajectories; and {states / 2**20:,.1f} MiB of their keys, "
        "values and cotangents",
    )


def _open_groups(config: Config, params: Params, group_bytes: int) -> int:
    """How many groups may hold sums of so many bytes each."""
    budget = config.group_sum_bytes
    if budget is None:
        memory = jax.tree.leaves(params)[0].addressable_shards[0].device.memory_stats()
        budget = int((memory or {}).get("bytes_limit", 0) * _SHARE_OF_MEMORY) or None
    wished = config.open_groups or config.rollout.groups_per_step
    if not group_bytes:
        return wished
    if budget is None and config.open_groups is None:
        raise ConfigError(
            "open_groups is none and the device does not tell its memory; set "
            f"open_groups, or group_sum_bytes at {group_bytes:,} bytes a group"
        )
    if budget is not None and budget < group_bytes:
        raise ConfigError(
            f"group_sum_bytes is {budget:,} and the sums of one open group take "
            f"{group_bytes:,} bytes per device; raise it, or shard over mesh.fsdp"
        )
    return wished if budget is None else min(wished, budget // group_bytes)


def _listed(parts: list[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def introduction(
    config: Config,
    placement: Placement,
    params: Params,
    memory: SumMemory,
    teacher: Any,
    reference: bool,
) -> Iterator[str]:
    """Lines on what runs where, and what streaming costs in memory."""
    count = sum(x.size for x in jax.tree.leaves(params))
    axes = " x ".join(f"{name} {size}" for name, size in placement.mesh.shape.items())
    places = config.vllm.servers or placement.samplers
    sampler = ", ".join(map(str, places))
    yield f"{count:,} parameters; learner on {axes}, sampler on {sampler}"
    if config.model.path is not None:
        yield f"weights and shape of {config.model.path}"
    if memory.description:
        yield memory.description
    if teacher is not None and teacher.model is None:
        yield f"teacher on {teacher.source}"
    elif teacher is not None:
        count = sum(x.size for x in jax.tree.leaves(teacher.params))
        where = f"from {teacher.source} on {placement.teacher}"
        yield f"teacher of {count:,} parameters {where}"
    if reference:
        yield "one more copy of the parameters: the reference policy"
