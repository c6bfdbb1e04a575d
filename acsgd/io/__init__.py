"""Input and output of a run: sources of text, sampling, checkpoints, telemetry."""

from acsgd.io.data.sources.sources import SOURCES

__all__ = ["SOURCES"]
