"""Memory of a tied GPT-2 of 124 M parameters on two stages, with pp.tied=rows and with pp.tied=dense:

    .venv/bin/python -m benchmarks.pipeline.tied_memory [--json runs/benchmarks/tied_memory.json]

Each way trains two steps from new weights, in fp32, in two processes of its own, with half of the blocks on each stage.
Bytes are those of the tensors after the steps: fp32 weights, gradients, AdamW's moments, and the rows that a rank looks
up in place of the table, with their gradient. Peak memory is the largest resident set of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import GPT2Config

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig, PipelineConfig
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.session import Session
from acsgd.run.setup.build import build_session
from acsgd.train import train_step
from benchmarks.common.compare import on_ranks
from benchmarks.pipeline.network_ranks import save_tokenizer

STAGES, MICROS, SEQUENCE, STEPS = 2, 4, 256, 2
TIMEOUT = timedelta(minutes=5)


class Memory(NamedTuple):
    """Memory of one rank, bytes."""

    weights: int
    gradients: int
    moments: int
    rows: int
    """Rows of a table on another rank, their gradient, and the positions of all rows."""
    peak: int
    """Largest resident set of the process."""

    @property
    def total(self) -> int:
        """Sum of all tensors."""
        return self.weights + self.gradients + self.moments + self.rows


def train(rank: int, store: str, model: str, tied: str) -> Memory:
    """Train on one rank; return its memory."""
    config = Config(
        model=ModelConfig(model, init="scratch"),
        data=DataConfig(sources="demo", sequence=SEQUENCE, batch=MICROS),
        optim=OptimConfig(lr=1e-4, steps=STEPS),
        pp=PipelineConfig(STAGES, tied=tied, layers=(6, 6)),
        log=LogConfig(dir=str(Path(model).parent / "run")),
    )
    job = prepare(config, Launch(rank, 0, STAGES))
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(f"{store}-{tied}", STAGES)) as groups:
        session, progress = build_session(job, open_weight_source(job), groups), Progress()
        for step in range(STEPS):
            progress = train_step(session, make_batch(rank, step), progress).progress
        return memory_of(session)


def make_batch(rank: int, step: int) -> Batch:
    """Return a batch of random tokens."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(GPT2Config().vocab_size, (MICROS, 1, SEQUENCE + 1), generator=generator)
    return Batch(
        {"input_ids": tokens[..., :-1]} if rank == 0 else None,
        tokens[..., 1:] if rank == STAGES - 1 else None,
        sample_ids=torch.arange(MICROS).view(-1, 1),
        micro_ids=range(MICROS),
    )


def memory_of(session: Session) -> Memory:
    """Return the memory of this rank."""
    masters = [weight.master for weight in session.weights]
    states = [x for by_key in session.optimizer.state_of(session.weights).values() for x in by_key.values()]
    tables = [table for stage in session.stages.values() for table in stage.tables.values()]
    looked_up = [x for table in tables for x in (table._rows, table._positions, table.gradient)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    gradients = [master.grad for master in masters if master.grad is not None]
    return Memory(size(masters), size(gradients), size(states), size(looked_up), peak)


def size(tensors: list[Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/tied_memory.json"), help="the numbers")
    options = parser.parse_args()
    table = Table("pp.tied", "stage", *Memory._fields, "tensors", title="MB per rank")
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        GPT2Config(bos_token_id=0, eos_token_id=0).save_pretrained(model)
        save_tokenizer(model)
        for tied in ("rows", "dense"):
            ranks = on_ranks(STAGES, train, f"{directory}/store", str(model), tied)
            results[tied] = [{**memory._asdict(), "tensors": memory.total} for memory in ranks]
            for stage, memory in enumerate(results[tied]):
                table.add_row(tied, str(stage), *(f"{value / 1e6:,.0f}" for value in memory.values()))
    Console(width=120).print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
