"""What data-parallel modes are made of: messages between replicas, averaging, error feedback, buckets."""
