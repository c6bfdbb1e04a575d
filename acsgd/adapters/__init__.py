"""Adapters of PEFT inside the pipeline: a few new parameters are trained, and those of the model are frozen."""
