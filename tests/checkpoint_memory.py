"""How much memory loading a Hugging Face folder takes, sharded over eight fake devices.

As a script it writes folders of about 2 GB of parameters, stored as float32 and as
bfloat16, loads each in a process of its own and prints the process's peak (Linux, 2 GB
of disk):

    python tests/checkpoint_memory.py

The peak has to stay below the larger of parameters and files plus 1 GB, whatever the
interpreter, jax and the mapped files take.
"""

import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from thundersync_jax.config import model_folder
from thundersync_jax.config.model import ModelConfig
from thundersync_jax.hf import files, weights
from thundersync_jax.models import layers, transformer
from thundersync_jax.stream.mesh import make_mesh, parameter_shardings

# Qwen3-0.6B with a smaller vocabulary.
MODEL = ModelConfig(
    vocab_size=60_000,
    layers=28,
    width=1024,
    mlp_width=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    qk_norm=True,
)
DTYPES = ("float32", "bfloat16")
DEVICES = 8
GB = 10**9


class Peak(NamedTuple):
    """Bytes of one process that loaded a folder."""

    parameters: int
    files: int
    before: int  # resident at its peak before the loading
    after: int  # likewise after it
    secs: float  # of the loading


def write_folder(folder: Path, config: ModelConfig, dtype: str) -> None:
    """A folder of made-up weights, without ever holding them."""
    stored = np.dtype(jax.numpy.dtype(dtype))
    random = np.random.default_rng(0).standard_normal(2**20).astype(stored)

    def value(shape):
        return np.resize(random, math.prod(shape)).reshape(shape)

    pieces = [
        files.Piece(t.name, t.shape, functools.partial(value, t.shape))
        for t in files.tensors(config)
    ]
    files.write(folder / files.ONE_FILE, pieces, stored, {})
    text = json.dumps(files.config_json(config, dtype))
    (folder / model_folder.CONFIG_FILE).write_text(text)


def load_and_look(folder: Path, mesh: tuple[int, int, int]) -> Peak:
    """Loads a folder in this process."""
    config = ModelConfig(path=str(folder))
    init = functools.partial(transformer.init, config)
    shapes = jax.eval_shape(init, jax.random.key(0))
    axes = transformer.logical_axes(config)
    shardings = parameter_shardings(make_mesh(*mesh), shapes, axes, layers.MESH_AXES)
    before, start = _peak_bytes(), time.monotonic()
    params = jax.block_until_ready(weights.load(folder, config, shardings))
    secs, after = time.monotonic() - start, _peak_bytes()
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Peak(size, files, before, after, secs)


def measure(
    config: ModelConfig, dtype: str, mesh: tuple[int, int, int] = (1, DEVICES, 1)
) -> Peak:
    """Loads such a model in a process of its own."""
    fixed = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(DEVICES),
        "PYTHONPATH": os.pathsep.join(sys.path),  # finds what this process finds
    }
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), config, dtype)
        done = subprocess.run(
            [sys.executable, __file__, "--here", folder, json.dumps(mesh)],
            env=os.environ | fixed,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return Peak(*json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        print(json.dumps(load_and_look(Path(sys.argv[2]), json.loads(sys.argv[3]))))
        return
    print(
        "stored     mesh     parameters (GB)   files (GB)   peak (GB)   room (GB)   s"
    )
    for dtype in DTYPES:
        for mesh in ((1, 8, 1), (1, 1, 8), (2, 2, 2)):
            config = MODEL
            if mesh[0] > 1:  # every replica holds a copy
                config = dataclasses.replace(MODEL, layers=MODEL.layers // mesh[0])
            peak = measure(config, dtype, mesh)
            size = peak.parameters * mesh[0]
            room = max(size, peak.files) + GB - peak.after
            print(
                f"{dtype:9}  {mesh}  {size / GB:14.2f}  {peak.files / GB:11.2f}  "
                f"{peak.after / GB:10.2f}  {room / GB:10.2f}  {peak.secs:6.1f}",
                flush=True,
            )


def _peak_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", text).group(1))


if __name__ == "__main__":
    main()
