"""Membership of a run as a state machine: pure, without I/O, threads or clocks."""
