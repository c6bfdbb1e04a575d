"""Decisions about a run before any process group exists."""
