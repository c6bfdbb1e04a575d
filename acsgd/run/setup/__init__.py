"""Build or resume what a rank trains with."""
