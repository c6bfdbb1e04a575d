"""Building blocks of data-parallel modes: messages between replicas, averaging, error feedback, buckets, moments."""
