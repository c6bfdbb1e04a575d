"""Data parallelism: synchronization of the replicas of a pipeline."""

from acsgd.dp.modes import MODES

__all__ = ["MODES"]
