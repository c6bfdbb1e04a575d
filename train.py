"""Fine-tune a Hugging Face causal language model over pipeline stages x replicas.

    torchrun --nproc-per-node 4 train.py examples/gpt2.toml                    # stages and replicas as the file says
    torchrun --nproc-per-node 4 train.py examples/gpt2.toml --pp.stages 4      # one pipeline of 4 stages
    python train.py examples/gpt2.toml --pp.stages 1                           # one process
    python train.py --help                                                     # every option with its default

Flags override the file. The run directory (log.dir) gets config.toml, metrics.jsonl and checkpoints/.
"""

from __future__ import annotations

import contextlib
import sys
import time
from datetime import timedelta
from pathlib import Path

from acsgd.config import parse, to_toml
from acsgd.failure import RunError, told_by_first, told_once
from acsgd.io.checkpoint import save
from acsgd.io.data import Dataset
from acsgd.io.metrics import Metrics, Record
from acsgd.job import Job, open_data, open_source, prepare
from acsgd.shards.load import Source
from acsgd.topology import Groups, Launch, connect
from acsgd.worker import StepResult, Worker, build_worker


def main(argv: list[str]) -> None:
    """Run a job from its command line: decide it, connect, train."""
    launch = Launch.from_env()
    with contextlib.ExitStack() as opened:
        with told_once(launch.rank, launch.local_rank):
            job = prepare(parse(argv, speak=launch.rank == 0), launch)
            data, source = open_data(job), open_source(job)
            timeout = timedelta(seconds=job.config.run.timeout)
            groups = opened.enter_context(connect(job.topology, timeout=timeout))
        with told_by_first(groups.first_to_fail):
            train(job, source, data, groups)


def train(job: Job, source: Source, data: Dataset, groups: Groups) -> None:
    """Make every optimizer step of the job, saving the model when due and at the end."""
    config, speaks = job.config, job.topology.rank == 0
    run_dir = Path(config.log.dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    if speaks:
        (run_dir / "config.toml").write_text(to_toml(config))
    if not groups.are_equal(job.fingerprint() + data.reader.fingerprint()):
        raise RunError("not all ranks run the same: compare run files, flags, model configs and texts of all hosts")
    worker = build_worker(job, source, groups)
    tokens = 0
    with Metrics.open(config.log.to, run_dir, steps=config.optim.steps, speaks=speaks) as metrics, data:
        metrics.note(job.describe())
        started = time.perf_counter()
        for step, batch in enumerate(data):
            result = worker.train_step(batch, step)
            tokens += int(result.totals.targets)
            metrics.log(record(result, step + 1, tokens, step_s=time.perf_counter() - started))
            if due(step + 1, config.checkpoint.every, config.optim.steps):
                metrics.note(f"saved {save_model(worker, step + 1)}")
            started = time.perf_counter()


def record(result: StepResult, step: int, tokens: int, *, step_s: float) -> Record:
    """Return the line of metrics.jsonl for one step."""
    totals = result.totals
    return Record(
        step=step,
        loss=result.loss,
        tokens=tokens,
        tokens_per_s=totals.targets / step_s,
        step_s=step_s,
        lr=result.lr,
        grad_norm=result.grad_norm,
        pp_forward_bytes=int(totals.pp_forward_bytes),
        pp_backward_bytes=int(totals.pp_backward_bytes),
        dp_bytes=int(totals.dp_bytes),
        hidden_share=totals.hidden_share,
        peak_memory_bytes=result.peak_memory_bytes,
    )


def due(step: int, every: int | None, steps: int) -> bool:
    """Whether the model is saved after `step` steps: every so many, and at the end."""
    return step == steps or (every is not None and step % every == 0)


def save_model(worker: Worker, step: int) -> Path:
    """Save the model as layer shards; called by every rank."""
    job = worker.job
    held = [layer for stage in worker.stages.values() for layer in stage.layers.items()]
    return save(
        job.checkpoint_dir,
        step,
        held=held,
        layers=job.layers,
        model_dir=job.model_dir,
        topology=job.topology,
        groups=worker.groups,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
