"""Two ranks on GPUs: step time against torch's tools over NCCL, and the time of a message between them:

    .venv/bin/python -m benchmarks.gpu.ranks [--quick] [--only NAME] [--transport gloo] [--rehearse]
        [--json runs/benchmarks/gpu/ranks.json]

    2 replicas    against DistributedDataParallel, and against FSDP2 (fully_shard of each block and of the model)
    2 stages      against torch.distributed.pipelining with the same stages, GPipe and 1F1B

Model, batch, optimizer and the alternation of the sides are those of benchmarks.runs.speed: GPT-2 of 124 M parameters,
with an untied head, fp32. The other side sends over NCCL, and so does acsgd, but for --transport gloo.

Each rank has a GPU of its own if there are two. On one GPU, both ranks share it: NCCL takes them for two hosts
(NCCL_HOSTID) and sends over the loopback interface. Then compute takes twice as long, and messages pass through host
memory on both sides: the figures are no measure of two GPUs.

--rehearse runs all of it on CPUs, with a small model and gloo in place of NCCL: it shows that the program ends, and its
times mean nothing.

The two processes run all cases; rank 0 writes the results after each, so that they remain. After a case that fails, the
others run in new processes. One that hangs for HANG_S is ended by torch, or by acsgd.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2LMHeadModel
from transformers.utils import logging as transformers_logging

from acsgd.comm.communicators import NCCL
from acsgd.groups import connect
from acsgd.launch import Launch, set_variables
from acsgd.run.plan.job import Job, prepare
from acsgd.run.setup.build import build_session
from benchmarks.common.compare import Cost, RankRounds, Step, alternate, on_ranks, run_all, setting, summarise
from benchmarks.gpu.step import DeviceWeights, copy_weights, synchronize
from benchmarks.runs.speed import (
    GPT2,
    WARMUP,
    Case,
    Size,
    acsgd,
    config_of,
    loop,
    make_adamw,
    pipelined,
    plain,
    save_tokenizer,
)

LOSS_TOLERANCE = 1e-4
Opener = Callable[[Job, Size, GPT2LMHeadModel, dist.ProcessGroup | None], Step]
Results = dict[str, Any]
RANKS = 2
HANG_S = 40.0
"""Time limit of an operation, seconds."""
TINY = Size(vocabulary=256, width=32, blocks=4, heads=2, sequence=16, micro=2, num_micros=4)
"""Of a rehearsal."""
MESSAGES = {"4 KB": 4096, "1 MB": 2**20, "16 MB": 2**24}


def fsdp(job: Job, size: Size, model: GPT2LMHeadModel, group: dist.ProcessGroup | None) -> Step:
    """Return the step of a plain loop with FSDP2, which shards gradients and moments over the ranks.

    Parameters are gathered once per step, not once per micro-batch: so each rank sends as much as with all-reduce.
    """
    assert group is not None
    mesh = DeviceMesh.from_group(group, job.streams.device.type)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)

    def during(is_last: bool) -> AbstractContextManager[None]:
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        return nullcontext()

    return loop(job, size, model, make_adamw(model), during)


def case(name: str, baseline: str, open_baseline: Opener, **options: Any) -> Case:
    """Return a case on GPUs."""
    return Case(name, f"{baseline}, NCCL", 1.02, open_baseline, tied=False, size=GPT2, device="cuda", **options)


CASES = [
    case("2 stages, 1f1b", "torch pipelining, 1F1B", pipelined, stages=2),
    case("2 replicas, DDP", "DistributedDataParallel", plain, replicas=2),
    case("2 stages, gpipe", "torch pipelining, GPipe", pipelined, stages=2, schedule="gpipe"),
    case("2 replicas, FSDP2", "fully_shard", fsdp, replicas=2),
]


def rehearsed(case: Case) -> Case:
    """Return a case as it is rehearsed."""
    return replace(case, size=TINY, device="cpu")


class Message(NamedTuple):
    """Time of a message from one GPU to the other, seconds: half of the time there and back."""

    gloo_s: float
    nccl_s: float


def run_rank(rank: int, directory: Path, options: argparse.Namespace, names: Sequence[str]) -> None:
    """Run some cases on this rank; rank 0 prints, and adds the results of each to those that are written."""
    transformers_logging.disable_progress_bar()
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"  # torch's default, for the other side: it ends what hangs
    set_variables()
    gpus = torch.cuda.device_count()
    if gpus < RANKS:
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
    name = "CPU, a rehearsal" if options.rehearse else torch.cuda.get_device_name()
    where = f"2 ranks on {'one' if gpus < RANKS else 'two'} {name}"
    transport = "gloo" if options.rehearse else options.transport
    results: Results = {**setting(where), "transport": transport}
    results |= read_results(options.json) or {"cases": [], "messages": {}}
    for compared in (rehearsed(each) if options.rehearse else each for each in CASES if each.name in names):
        run_case(compared, directory, Launch(rank, rank if gpus >= RANKS else 0, RANKS), options, results)
        write_results(options.json, rank, results)


def read_results(path: Path) -> Results | None:
    """Return the results so far, None before the first."""
    return json.loads(path.read_text()) if path.exists() else None


def write_results(path: Path, rank: int, results: Results) -> None:
    """Write the results so far, on rank 0."""
    if rank == 0:
        path.write_text(json.dumps(results, indent=1) + "\n")


def run_case(compared: Case, directory: Path, launch: Launch, options: argparse.Namespace, results: Results) -> None:
    """Run one rank of a case, and add it to the results."""
    model, size = directory / "model", compared.size
    job = prepare(compared.config(model, init="scratch"), launch)
    device, store = job.streams.device, dist.FileStore(str(directory / compared.name), RANKS)

    def barrier() -> None:
        synchronize(device)
        dist.barrier()

    with connect(job.topology, timeout=timedelta(seconds=HANG_S), store=store) as groups:
        backend = "gloo" if options.rehearse else "nccl"
        nccl = dist.new_group(backend=backend, timeout=timedelta(seconds=HANG_S))
        if not results["messages"]:
            results["messages"] = time_messages(launch.rank, nccl, device)
            write_results(options.json, launch.rank, results)
        if options.transport == "nccl" and not options.rehearse:  # a run would refuse it where the ranks share a GPU
            groups = groups.with_transport(NCCL, device, lambda axis, ranks: True)
        session = build_session(job, DeviceWeights(device), groups)
        with device:
            whole = GPT2LMHeadModel(config_of(size, tied=False)).train()
        copy_weights(session, whole)
        sides = acsgd(session, size), compared.open_baseline(job, size, whole, nccl)
        rounds = 2 if options.rehearse else 5 if options.quick else 15
        mine = alternate(*sides, warmup=WARMUP, rounds=rounds, steps=1, barrier=barrier)
        texts = groups.all_gather_text("rounds", json.dumps(mine), timeout_s=HANG_S)
    of_ranks = [json.loads(text) for text in texts]
    result = summarise([RankRounds(x, [(Cost(*a), Cost(*b)) for a, b in costs]) for x, costs in of_ranks], steps=1)
    results["cases"].append(
        {"case": compared.name, "baseline": compared.baseline, "goal": compared.goal, **result._asdict()}
    )
    if launch.rank == 0:
        print(f"{compared.name}: {result.median:.3f} x {compared.baseline}", flush=True)


def time_messages(rank: int, nccl: dist.ProcessGroup, device: torch.device, rounds: int = 10) -> dict[str, Message]:
    """Send messages of several lengths there and back, over gloo through pinned memory and over NCCL."""
    results = dict[str, Message]()
    for name, nbytes in MESSAGES.items():
        x = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=x.is_cuda)

        def send(group: dist.ProcessGroup | None, x: Tensor = x, host: Tensor = host) -> None:
            if group is None:
                host.copy_(x)
            dist.send(host if group is None else x, 1 - rank, group)

        def receive(group: dist.ProcessGroup | None, x: Tensor = x, host: Tensor = host) -> None:
            dist.recv(host if group is None else x, 1 - rank, group)
            if group is None:
                x.copy_(host)

        order: list[Callable[[dist.ProcessGroup | None], None]] = [send, receive] if rank == 0 else [receive, send]
        times: dict[str, list[float]] = {"gloo": [], "nccl": []}
        for _ in range(rounds + 1):
            for backend, group in {"gloo": None, "nccl": nccl}.items():
                started = time.perf_counter()
                for part in order:
                    part(group)
                synchronize(device)
                times[backend].append((time.perf_counter() - started) / 2)
        if not results:
            results[f"{name}, the first one, which connects"] = Message(*(each[0] for each in times.values()))
        results[name] = Message(*(statistics.median(each[1:]) for each in times.values()))
    return results


def tables(results: Results) -> list[Table]:
    """Return the tables of step times and of messages."""
    title = f"Step time over {results['transport']}, {results['device']}"
    steps = Table("acsgd", "compared with", "acsgd, s", "other, s", "ratio", "quartiles", "goal", title=title)
    for row in results["cases"]:
        low, high = row["quartiles"]
        mark = "met" if row["median"] <= row["goal"] else "missed"
        numbers = f"{row['ours_s']:.3f}", f"{row['theirs_s']:.3f}", f"{row['median']:.3f}", f"{low:.3f} - {high:.3f}"
        steps.add_row(row["case"], row["baseline"], *numbers, f"<= {row['goal']:g} {mark}")
    links = Table("message", "gloo, us", "NCCL, us", title="From one rank to the other")
    for name, (gloo_s, nccl_s) in results["messages"].items():
        links.add_row(name, f"{gloo_s * 1e6:.0f}", f"{nccl_s * 1e6:.0f}")
    return [steps, links]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/gpu/ranks.json"), help="path of the results")
    parser.add_argument("--quick", action="store_true", help="5 rounds per case instead of 15")
    parser.add_argument("--transport", choices=("nccl", "gloo"), default="nccl", help="of acsgd")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--rehearse", action="store_true", help="run everything small, on CPUs")
    options = parser.parse_args()
    console = Console(width=120)
    if not (options.rehearse or torch.cuda.is_available()):
        console.print("No CUDA device: nothing is measured.")
        return
    options.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        config_of(TINY if options.rehearse else GPT2, tied=False).save_pretrained(model)
        save_tokenizer(model)
        options.json.unlink(missing_ok=True)
        failed = run_all(
            [each.name for each in CASES if options.only in each.name],
            lambda names: on_ranks(RANKS, run_rank, Path(directory), options, names),
            lambda: {case["case"] for case in (read_results(options.json) or {"cases": []})["cases"]},
        )
    results = read_results(options.json)
    for each in tables(results) if results else ():
        console.print(each)
    if not results or failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")
    errors = {case["case"]: case["loss_error"] for case in results["cases"] if case["loss_error"] > LOSS_TOLERANCE}
    if errors:
        raise SystemExit(f"the losses of the two sides differ by more than {LOSS_TOLERANCE:g}: {errors}")


if __name__ == "__main__":
    main()
