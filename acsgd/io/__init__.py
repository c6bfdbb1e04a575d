"""Input and output of a run: sources of text, sampling, checkpoints, telemetry."""

from acsgd.io.sources.sources import SOURCES

__all__ = ["SOURCES"]
