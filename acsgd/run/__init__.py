"""One rank's run, from the configuration to its end: deciding, building, training, saving, failing."""
