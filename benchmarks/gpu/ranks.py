"""Two ranks on GPUs: step time against torch's tools over NCCL, and the time of a message between them:

    .venv/bin/python -m benchmarks.gpu.ranks [--quick] [--only NAME] [--transport gloo]
        [--json runs/benchmarks/gpu/ranks.json]

    2 replicas    against DistributedDataParallel, and against FSDP2 (fully_shard of each block and of the model)
    2 stages      against torch.distributed.pipelining with the same stages, GPipe and 1F1B

Model, batch, optimizer and the alternation of the sides are those of benchmarks.runs.speed: GPT-2 of 124 M parameters,
fp32. The other side sends over NCCL, and so does acsgd, but for --transport gloo.

Each rank has a GPU of its own if there are two. On one GPU, both ranks share it: NCCL takes them for two hosts
(NCCL_HOSTID) and sends over the loopback interface. Then compute takes twice as long, and messages pass through host
memory on both sides: the figures are no measure of two GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers.utils import logging as transformers_logging

from acsgd.comm.process_groups import NCCL
from acsgd.groups import connect
from acsgd.launch import Launch, set_nccl_variables
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import Job, prepare
from acsgd.run.setup.build import build_session
from benchmarks.common.compare import RankRounds, Step, alternate, on_ranks, summarise
from benchmarks.runs import speed
from benchmarks.runs.speed import (
    GPT2,
    OPTIM,
    TIMEOUT,
    WARMUP,
    Case,
    Size,
    acsgd,
    make_adamw,
    pipelined,
    plain,
    pretrained,
    summed_loss,
    tokens_of,
)

LOSS_TOLERANCE = 1e-4
Opener = Callable[[Job, Size, dist.ProcessGroup | None], Step]
RANKS = 2
LIMIT_S = 140.0
"""Maximum time of one case."""
MESSAGES = {"4 KB": 4096, "1 MB": 2**20, "16 MB": 2**24}


def fsdp(job: Job, size: Size, group: dist.ProcessGroup | None = None) -> Step:
    """Return the step of a plain loop with FSDP2, which shards parameters, gradients and moments over the ranks."""
    device, replicas = job.streams.device, job.topology.replicas
    assert group is not None
    mesh = DeviceMesh.from_group(group, "cuda")
    model = pretrained(job).to(device)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    adamw = make_adamw(model)
    rows = slice(job.micro_ids.start, job.micro_ids.stop)

    def step(number: int) -> float:
        total = torch.zeros((), device=device)
        batch = tokens_of(number, size)[rows].to(device)
        for index, micro in enumerate(batch):
            model.set_requires_gradient_sync(index == len(batch) - 1)
            logits = model(micro[:, :-1], use_cache=False).logits
            loss = summed_loss(logits, micro[:, 1:]) / batch[..., 1:].numel()
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip)
        adamw.step()
        adamw.zero_grad()
        return total.item() / replicas

    return step


def case(name: str, baseline: str, open_baseline: Opener, **options: Any) -> Case:
    """Return a case on GPUs."""
    return Case(name, f"{baseline}, NCCL", 1.02, open_baseline, size=GPT2, device="cuda", **options)


STAGES = {"stages": 2, "tied": False}
CASES = [
    case("2 replicas, DDP", "DistributedDataParallel", plain, replicas=2),
    case("2 replicas, FSDP2", "fully_shard", fsdp, replicas=2),
    case("2 stages, 1f1b", "torch pipelining, 1F1B", pipelined, **STAGES),
    case("2 stages, gpipe", "torch pipelining, GPipe", pipelined, schedule="gpipe", **STAGES),
]


class Message(NamedTuple):
    """Time of a message from one GPU to the other, seconds: half of the time there and back."""

    gloo_s: float
    nccl_s: float


def rank_rounds(
    rank: int, index: int, model: Path, store: str, rounds: int, transport: str
) -> tuple[RankRounds, dict[str, Message]]:
    """Run one rank of a case; the first case also times messages."""
    transformers_logging.disable_progress_bar()
    set_nccl_variables()
    gpus = torch.cuda.device_count()
    if gpus < RANKS:
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
    compared = CASES[index]
    job = prepare(compared.config(model), Launch(rank, rank if gpus >= RANKS else 0, RANKS))
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(store, RANKS)) as groups:
        nccl = dist.new_group(backend="nccl", timeout=TIMEOUT)
        if transport == "nccl":  # a run would refuse it where the ranks share a GPU
            groups = groups.with_transport(NCCL, job.streams.device, lambda axis, ranks: True)
        messages = time_messages(rank, nccl, job.streams.device) if index == 0 else {}
        ours = acsgd(build_session(job, open_weight_source(job), groups), compared.size)
        theirs = compared.open_baseline(job, compared.size, nccl)

        def barrier() -> None:
            torch.cuda.synchronize()
            dist.barrier()

        return alternate(ours, theirs, warmup=WARMUP, rounds=rounds, steps=1, barrier=barrier), messages


def time_messages(rank: int, nccl: dist.ProcessGroup, device: torch.device, rounds: int = 10) -> dict[str, Message]:
    """Send messages of several lengths there and back, over gloo through pinned memory and over NCCL."""
    results = {}
    for name, nbytes in MESSAGES.items():
        x = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

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
                torch.cuda.synchronize()
                times[backend].append((time.perf_counter() - started) / 2)
        results[name] = Message(*(statistics.median(each[1:]) for each in times.values()))
    return results


def tables(rows: Sequence[dict], messages: dict[str, Message], title: str) -> list[Table]:
    """Return the tables of step times and of messages."""
    steps = Table("acsgd", "compared with", "acsgd, s", "other, s", "ratio", "quartiles", "goal", title=title)
    for row in rows:
        low, high = row["quartiles"]
        mark = "met" if row["median"] <= row["goal"] else "missed"
        numbers = f"{row['ours_s']:.3f}", f"{row['theirs_s']:.3f}", f"{row['median']:.3f}", f"{low:.3f} - {high:.3f}"
        steps.add_row(row["case"], row["baseline"], *numbers, f"<= {row['goal']:g} {mark}")
    links = Table("message", "gloo, us", "NCCL, us", title="From one rank to the other")
    for name, message in messages.items():
        links.add_row(name, f"{message.gloo_s * 1e6:.0f}", f"{message.nccl_s * 1e6:.0f}")
    return [steps, links]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/gpu/ranks.json"), help="path of the results")
    parser.add_argument("--quick", action="store_true", help="5 rounds per case instead of 15")
    parser.add_argument("--transport", choices=("nccl", "gloo"), default="nccl", help="of acsgd")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    options = parser.parse_args()
    console, rounds = Console(width=120), 5 if options.quick else 15
    if not torch.cuda.is_available():
        console.print("No CUDA device: nothing is measured.")
        return
    transformers_logging.disable_progress_bar()
    rows, messages, failed = [], {}, []
    for index, compared in enumerate(CASES):
        if options.only not in compared.name:
            continue
        with tempfile.TemporaryDirectory() as directory:
            model = speed.save_model(Path(directory) / "model", compared.size, tied=compared.tied)
            try:
                args = index, model, str(Path(directory) / "store"), rounds, options.transport
                of_ranks = on_ranks(RANKS, rank_rounds, *args, timeout_s=LIMIT_S)
            except Exception as error:
                failed.append(f"{compared.name}: {type(error).__name__}: {error}")
                console.print(failed[-1])
                continue
        result = summarise([rounds_of for rounds_of, _ in of_ranks], steps=1)
        messages |= of_ranks[0][1]
        rows.append({"case": compared.name, "baseline": compared.baseline, "goal": compared.goal, **result._asdict()})
        if result.loss_error > LOSS_TOLERANCE:
            failed.append(f"{compared.name}: the losses of the two sides differ by {result.loss_error:.1e}")
        console.print(
            f"{compared.name}: {result.median:.3f} x {compared.baseline}; losses differ by {result.loss_error:.1e}"
        )
    gpus = torch.cuda.device_count()
    where = f"2 ranks on {'one' if gpus < RANKS else 'two'} {torch.cuda.get_device_name()}"
    for each in tables(rows, messages, f"Step time over {options.transport}, {where}"):
        console.print(each)
    result_json = {
        "device": where,
        "transport": options.transport,
        "torch": torch.__version__,
        "cases": rows,
        "failed": failed,
    }
    result_json["messages"] = {name: message._asdict() for name, message in messages.items()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result_json, indent=1) + "\n")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
