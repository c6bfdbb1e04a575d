"""Files that are complete or absent, caches of them, and values in them."""
