"""State of ranks between views: handover, transfer, joins and snapshots."""
