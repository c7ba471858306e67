"""What is measured of a run, and where the numbers go."""

from thundersync_jax.metrics.writer import METRICS, Metrics, Sink, read

__all__ = ["METRICS", "Metrics", "Sink", "read"]
