"""Data parallelism: how the replicas of a pipeline synchronize."""

from acsgd.dp.modes import MODES

__all__ = ["MODES"]
