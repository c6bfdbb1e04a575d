"""Imports that ranks need and that take seconds. Imported once, by the server that the ranks of tests are forked from.

No thread may start here, and no CUDA: a process that is forked after that cannot use it.
"""

import gc
import os
import pydoc_data.topics
from pathlib import Path

import pytest
import rich.progress
import torch
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import acsgd.train
import tests.lib.forks
from tests.lib.shared import share_caches

if not Path("/dev/nvidiactl").exists():  # else there is a GPU, where it starts CUDA
    import peft  # noqa: F401  # with bitsandbytes, which compiles a function where it is imported: a second

torch.set_num_threads(1)
# torch makes its thread pool again at its first use after a fork; two threads that did so at once would abort
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
get_checkpoint_conversion_mapping("")  # compiles the patterns of all types of models, once per process
share_caches()
gc.freeze()  # or each rank would visit, and thus copy, the objects of all these modules
__all__ = ["acsgd", "pydoc_data", "pytest", "rich", "tests", "transformers"]
