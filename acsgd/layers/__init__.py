"""A Hugging Face model as a list of layers that can run on different ranks, derived from the model's own forward."""
