"""Imports that every worker needs and that take seconds. Imported once, by the server that workers are forked from."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}  # read on import

import torch
import transformers.models.gpt2.modeling_gpt2
import transformers.models.gpt2.tokenization_gpt2
from transformers.utils import logging

import acsgd.main
import tests.lib.forks
import tests.soak.areas

torch.set_num_threads(1)
# torch makes its thread pool again at its first use after a fork; two threads that did so at once would abort
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
logging.disable_progress_bar()
__all__ = ["acsgd", "tests", "transformers"]
