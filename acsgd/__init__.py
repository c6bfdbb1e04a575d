"""acsgd: fine-tune any Hugging Face model over any network, pipeline x data parallel, both compressed."""

import logging

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # no output unless the application configures logging
