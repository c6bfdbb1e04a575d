"""How a run fails and ends: one message per failure, stop signals, standard streams."""
