"""Which devices learn and which one samples, decided before jax starts."""

import contextlib
import os
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from thundersync_jax.config import Config, MeshConfig
from thundersync_jax.mesh import make_mesh


class Placement(NamedTuple):
    """The learner's mesh and the sampler's device."""

    mesh: Mesh
    sampler: jax.Device


def prepare(config: Config) -> None:
    """Sets what jax reads once: the number of CPU devices, and 64-bit numbers.

    The CPU counts as one device unless told otherwise; a learner and a sampler of their
    own need two. Harmless where a GPU or a TPU is used, or where jax runs already.
    """
    mesh = config.mesh
    wanted = mesh.replica * mesh.fsdp * mesh.tensor + (mesh.sampler == "own_device")
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        # Refused where jax runs already, with as many devices as it has.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", wanted)
    if config.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)


def place(config: MeshConfig) -> Placement:
    """Returns the learner's mesh over the first devices and the sampler's device.

    The sampler takes the device behind the mesh, or the learner's first where the
    config says "shared".

    Raises:
      ValueError: There are too few devices.
    """
    devices = jax.devices()
    mesh = make_mesh(config.replica, config.fsdp, config.tensor, devices)
    if config.sampler == "shared":
        return Placement(mesh, devices[0])
    if len(devices) == mesh.size:
        raise ValueError(
            f"mesh.sampler is 'own_device' and the learner takes all {mesh.size} "
            "devices; set mesh.sampler=shared or make the mesh smaller"
        )
    return Placement(mesh, devices[mesh.size])
