"""Eight fake CPU devices, no leniency, no screen; set before jax makes a backend."""

import os

import jax

# jax.config and not XLA_FLAGS: commands under test, run as processes, choose their own.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # all eight now: a run under test may ask for fewer
# Shapes that broadcast by accident are errors.
jax.config.update("jax_numpy_rank_promotion", "raise")

os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes
os.environ["MPLBACKEND"] = "agg"
