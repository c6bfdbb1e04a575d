"""Commands that show and check data before a run."""
