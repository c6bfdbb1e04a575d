"""Sources of text and the files they read."""
