"""Metrics, their sinks, and text logs."""
