"""Weights that layers of several ranks share: `pp.tied`."""
