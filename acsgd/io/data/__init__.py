"""Data of a run: from sources over tokens and rows to batches."""
