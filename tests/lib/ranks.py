"""Run a function on N ranks, each a process of its own, without torchrun and without ports."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ALL_COMPLETED, FIRST_EXCEPTION, BrokenExecutor, Future, ProcessPoolExecutor, wait
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from acsgd.comm.process_groups import Group
from tests.lib.patience import NO_LIMIT_S, TEST_S, Patience
from tests.lib.processes import CONTEXT

END_S = 30.0
"""Time for ranks to fail after the first, seconds on a quiet machine: some wait for it."""


def on_ranks(world_size: int, body: Callable[..., Any], *args: Any, timeout_s: float = TEST_S) -> list[Any]:
    """Call body(rank, world_size, *args) in `world_size` processes and return the results by rank.

    body: a module-level function. Its exceptions are raised here, with the traceback of its process; ranks that still
    wait END_S seconds later are killed. Raises TimeoutError, and kills the processes, after `timeout_s` seconds of a
    quiet machine.
    """
    barrier = CONTEXT.Barrier(world_size, timeout=NO_LIMIT_S)
    with ProcessPoolExecutor(world_size, mp_context=CONTEXT, initializer=_keep, initargs=(barrier,)) as pool:
        futures = [pool.submit(_run_together, body, rank, world_size, *args) for rank in range(world_size)]
        ended, waiting = _wait(futures, timeout_s, return_when=FIRST_EXCEPTION)
        if has_failed := any(future.exception() for future in ended):
            waiting = _wait(waiting, END_S)[1]
        if waiting:
            for process in list(pool._processes.values()):  # or leaving the pool would wait for them
                process.kill()
        if waiting and not has_failed:
            raise TimeoutError(f"ranks {[futures.index(future) for future in waiting]} have not ended")
    errors = [future.exception() for future in futures]
    failed = {rank: error for rank, error in enumerate(errors) if error is not None}
    if failed:  # one rank often fails because another one did, and later
        first = min(failed.values(), key=lambda error: isinstance(error, BrokenExecutor))
        first.add_note("; ".join(f"rank {rank} failed: {error!r:.200}" for rank, error in failed.items()))
        raise first
    return [future.result() for future in futures]


def _wait(
    futures: Collection[Future[Any]], limit_s: float, *, return_when: str = ALL_COMPLETED
) -> tuple[set[Future[Any]], set[Future[Any]]]:
    """Wait for ranks, for a time that a busy machine stretches; return those that have ended, and the others."""
    patience = Patience(limit_s)
    while True:
        ended, waiting = wait(futures, 1.0, return_when=return_when)
        if not waiting or (return_when == FIRST_EXCEPTION and any(each.exception() for each in ended)):
            return ended, waiting
        if patience.is_over:
            return ended, waiting


_barrier: Barrier


def _keep(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _run_together(body: Callable[..., Any], *args: Any) -> Any:
    """Call `body` once all ranks can: on a busy machine they start seconds apart, longer than some timeouts."""
    _barrier.wait()
    return body(*args)


def gather_states(state: dict[str, dict[str, torch.Tensor]], group: Group) -> list[dict[str, Any]]:
    """All-gather the state of each rank of a group, as safetensors. Names and shapes may differ between ranks."""
    tensors = {f"{name}|{key}": x.contiguous() for name, by_key in state.items() for key, x in by_key.items()}
    mine = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group.process_group)
    longest = int(max(lengths))
    messages = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(messages, torch.nn.functional.pad(mine, (0, longest - len(mine))), group=group.process_group)
    states: list[dict[str, Any]] = []
    for message, length in zip(messages, lengths, strict=True):
        states.append({name: {} for name in state})
        for path, x in load(message[: int(length)].numpy().tobytes()).items():
            name, _, key = path.partition("|")
            states[-1].setdefault(name, {})[key] = x
    return states
