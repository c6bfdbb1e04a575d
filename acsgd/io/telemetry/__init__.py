"""What a run reports: metrics, text logs, Weights & Biases."""
