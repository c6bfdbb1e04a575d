"""The step boundary: what ranks report in a step, and what acts between two steps."""
