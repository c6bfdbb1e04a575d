"""Communication of the ranks of a run: process groups, the store, waits and heartbeats."""
