"""Checkpoints of the systems that acsgd replaces."""
