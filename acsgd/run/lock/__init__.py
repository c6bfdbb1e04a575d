"""At most one run per directory."""
