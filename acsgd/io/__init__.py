"""Input and output of a run: data, checkpoints, telemetry, and files."""
