"""Which devices learn, sample and teach, decided before jax starts."""

import contextlib
import os
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from thundersync_jax.config import Config
from thundersync_jax.mesh import make_mesh


class Placement(NamedTuple):
    """The learner's mesh and the devices beside it."""

    mesh: Mesh
    samplers: tuple[jax.Device, ...]
    teacher: jax.Device  # the first sampler's where the config has none of its own


def prepare(config: Config) -> None:
    """Sets what jax reads once: the number of CPU devices, and 64-bit numbers.

    The CPU counts as one device unless told otherwise; a learner, a sampler and a
    teacher of their own need three. Harmless where a GPU or a TPU is used, or where jax
    runs already.
    """
    mesh = config.mesh
    wanted = mesh.replica * mesh.fsdp * mesh.tensor
    wanted += _samplers(config) + _teaches_alone(config)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Refused where jax runs already, with as many devices as it has.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", wanted)
    if config.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)


def place(config: Config) -> Placement:
    """Returns the learner's mesh over the first devices, and those behind it.

    The sampler takes the devices behind the mesh, or the learner's first where the
    config says "shared". A teacher takes the one behind those, or the sampler's first.

    Raises:
      ValueError: There are too few devices.
    """
    devices, asked = jax.devices(), config.mesh
    mesh = make_mesh(asked.replica, asked.fsdp, asked.tensor, devices)
    rest = devices[mesh.size :]
    alone = _samplers(config)
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


def _teaches_alone(config: Config) -> bool:
    teacher = config.teacher
    return teacher.workdir is not None and teacher.device == "own_device"


def _samplers(config: Config) -> int:
    """How many devices do nothing but sample; servers are elsewhere."""
    alone = config.mesh.sampler == "own_device" and not config.vllm.servers
    return config.mesh.sampler_devices if alone else 0
