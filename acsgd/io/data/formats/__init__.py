"""Formats: what the fields of a record mean."""
