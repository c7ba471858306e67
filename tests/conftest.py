"""Eight fake CPU devices, no leniency, no screen; set before jax makes a backend."""

import gc
import os
import pathlib

import hypothesis
import jax
import pytest
from jax._src import compiler

# jax.config and not XLA_FLAGS: commands under test, run as processes, choose their own.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # all eight now: a run under test may ask for fewer
# Programs of a few milliseconds are kept as well.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
# Shapes that broadcast by accident are errors.
jax.config.update("jax_numpy_rank_promotion", "raise")

# How long an example takes says nothing on a busy machine.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes
os.environ["MPLBACKEND"] = "agg"

# Plainer machine code, made up to eight times as fast. Tiny models run as fast with it,
# those of a million parameters slower.
QUICK = [
    ("xla_backend_optimization_level", 0),
    ("xla_cpu_use_fusion_emitters", False),
]


# Of a process's memory mappings Linux allows 65,530 and each program takes some;
# beyond, compiling ends in a segmentation fault.
MOST_MAPPINGS = 25_000
MAPPINGS = pathlib.Path("/proc/self/maps")


@pytest.fixture(scope="session", autouse=True)
def kept_programs(tmp_path_factory):
    """Tests find each other's programs, and so do commands, of this session alone."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Forgets what earlier modules compiled before it becomes too much."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items):
    """The others come first: they would find quick programs in the caches of jit."""
    items.sort(key=lambda item: "quick_programs" in item.fixturenames)


@pytest.fixture(scope="module")
def quick_programs():
    """For what holds of any machine code: no test of rounding, memory or time.

    jax has options for one `jit` and for the whole process, but none for a while.
    """
    options_of = compiler.get_compile_options

    def quick(*arguments, **named):
        options = options_of(*arguments, **named)
        options.env_option_overrides = [*options.env_option_overrides, *QUICK]
        return options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", quick)
        yield
