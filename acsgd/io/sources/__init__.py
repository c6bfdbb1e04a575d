"""Sources of text: what a run trains on."""
