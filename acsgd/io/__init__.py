"""What a run reads and writes: sources of text, token caches, checkpoints, metrics."""

from acsgd.io.sources.sources import SOURCES

__all__ = ["SOURCES"]
