"""Compiled programs that later processes find again, in the user's cache folder."""

import os
import shutil
import subprocess
import sys
import time

import pytest

SCRIPT = """
import jax, jax.numpy as jnp, pathlib, sys
from thundersync_jax.config import Config
from thundersync_jax.run import placement
hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None
)
placement.prepare(Config())
print(float(jax.jit(lambda x: jnp.sin(x) * 3)(2.0)).hex(), len(hits))
"""


@pytest.fixture(name="caches")
def _caches(tmp_path):
    return tmp_path / "caches"


def computed(caches, **environment):
    """What a process prints: its number, and how many programs it read."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("JAX_COMP")}
    given = {"XDG_CACHE_HOME": str(caches), "JAX_PLATFORMS": "cpu"} | environment
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=inherited | given,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    number, hits = ended.stdout.split()
    return number, int(hits), ended.stderr


def programs(folder):
    return sorted(path for path in folder.rglob("*-cache") if path.is_file())


def test_a_program_is_compiled_once_and_computes_the_same(caches):
    number, hits, _ = computed(caches)
    kept = programs(caches / "thundersync_jax")
    assert kept and hits == 0
    assert computed(caches)[:2] == (number, len(kept))
    # Old ones go, and damaged ones are compiled again with a warning.
    for path in kept:
        os.utime(path, (time.time() - 40 * 24 * 3600,) * 2)
    assert computed(caches)[:2] == (number, 0)
    for path in programs(caches):
        path.write_bytes(b"damaged")
    again, _, errors = computed(caches)
    assert again == number and "Traceback" not in errors


def test_a_folder_that_cannot_be_used_costs_nothing_but_a_warning(caches):
    number, _, _ = computed(caches)
    shutil.rmtree(caches)
    caches.write_text("a file where the folder should be")
    again, hits, errors = computed(caches)
    assert (again, hits) == (number, 0) and "Traceback" not in errors


def test_the_folder_of_jax_goes_before_and_its_switch_holds(caches, tmp_path):
    own = tmp_path / "own"
    given = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    given["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    computed(caches, JAX_COMPILATION_CACHE_DIR=str(own), **given)
    assert programs(own) and not caches.exists()
    computed(caches, JAX_ENABLE_COMPILATION_CACHE="false")
    assert not caches.exists()
