"""`acsgd doctor`: what would keep this host, or its links to others, from training."""
