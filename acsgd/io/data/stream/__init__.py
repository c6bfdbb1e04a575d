"""Streamed sources, which are tokenized while the run trains."""
