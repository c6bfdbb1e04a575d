"""The daemon of a host: connections, workers and files."""
