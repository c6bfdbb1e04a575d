"""Checkpoints on disk: save, find, verify, resume, inspect."""
