"""Checkpoints on disk: saving, finding, verifying, resuming from."""
