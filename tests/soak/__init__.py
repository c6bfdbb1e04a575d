"""Soak tests: damaged input and injected faults, seeded, for as long as one likes. Usage: docs/howto/soak.md."""
