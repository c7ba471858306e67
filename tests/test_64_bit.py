"""Tests of exact sums and of random streams once more, in jax's 64-bit mode.

There a sum of int32 is int64 unless it says otherwise, and so on: parameters are
float32 as before, and so must be everything that is made of them. And training in that
mode, and where jax promotes no types.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WIDE = os.environ | {"JAX_ENABLE_X64": "1"}
EVERY_TERM = {
    "accumulator": "exact",
    "loss.kl_coef": 0.1,
    "loss.entropy_coef": 0.01,
    "loss.importance_cap": 2.0,
}


@pytest.mark.parametrize(
    "names",
    [
        ("test_exact_sum", "test_accumulator"),
        ("test_stream_exact", "test_stream_sums", "test_stream_numbers"),
        ("test_properties", "test_schedule_random"),
    ],
    ids=" ".join,
)
def test_in_64_bit_mode(names):
    files = [str(TESTS / f"{name}.py") for name in names]
    quiet = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *quiet, *files]
    ran = subprocess.run(command, cwd=TESTS.parent, env=WIDE, capture_output=True)
    assert ran.returncode == 0, ran.stdout.decode()[-4000:]


@pytest.mark.parametrize(
    "mode, changes",
    [
        ("JAX_ENABLE_X64=1", EVERY_TERM),
        ("JAX_NUMPY_DTYPE_PROMOTION=strict", EVERY_TERM),
        ("JAX_NUMPY_DTYPE_PROMOTION=strict", {"share_prompt": "group"}),
    ],
    ids=str,
)
def test_train(tmp_path, mode, changes):
    command = [sys.executable, "-m", "thundersync_jax.train"]
    command += ["--config=configs/own_task.py:smoke", f"--workdir={tmp_path}"]
    command += [f"--config.{name}={value}" for name, value in changes.items()]
    name, _, value = mode.partition("=")
    # Plainer machine code, made up to eight times as fast: nothing here depends on it.
    quick = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    modes = os.environ | {name: value, "XLA_FLAGS": quick}
    ran = subprocess.run(command, cwd=TESTS.parent, env=modes, capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()[-4000:]
