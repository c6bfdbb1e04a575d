"""The optimizer, its learning-rate schedule, gradient clipping and the loss scale."""
