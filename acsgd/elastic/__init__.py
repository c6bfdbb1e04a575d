"""Elastic runs: hosts join, leave and fail, and the other hosts' processes train on.

A daemon per host, a thread of torchrun's agent, exchanges heartbeats with the daemons of the other hosts. When a host
joins, leaves or fails, the daemons stop all workers, collect their states, and agree on the next view: its hosts and
the plan by which their workers train on. Nothing of it needs a store or a host that must live.
"""
