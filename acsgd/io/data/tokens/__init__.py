"""Tokenized sources, the sampler, the batches of a replica, and held-out data."""
