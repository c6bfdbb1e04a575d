"""acsgd: fine-tune any Hugging Face model over any network, pipeline x data parallel, both compressed."""

__version__ = "0.1.0"
