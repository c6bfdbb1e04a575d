"""Run a function on N ranks, each a process of its own, without torchrun and without ports."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = [
    "pytest",
    "torch",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "acsgd.train",
]


def on_ranks(world_size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
    """Call body(rank, world_size, *args) in `world_size` processes and return what each gives, by rank.

    body: a function at the top of a module. What it raises is raised here, with the traceback of its process. The
    processes are forked from a server that has imported torch once, and that never ran a thread of it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with ProcessPoolExecutor(world_size, mp_context=context) as pool:
        futures = [pool.submit(body, rank, world_size, *args) for rank in range(world_size)]
        return [future.result(timeout=timeout_s) for future in futures]


def gather_states(state: dict[str, dict[str, torch.Tensor]], group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """All-gather the state of each rank of a group."""
    states: list[Any] = [None] * group.size()
    dist.all_gather_object(states, state, group=group)
    return states
