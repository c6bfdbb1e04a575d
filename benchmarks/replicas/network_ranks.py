"""Processes of network.py: one per host, each a replica that runs steps in any mode on request."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, PipelineConfig, ReplicaConfig, RunConfig
from acsgd.config.spec import from_spec
from acsgd.dp import MODES
from acsgd.dp.exchange.second_moments import INTERVAL
from acsgd.groups import Groups, connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import Job, prepare
from acsgd.run.report import DP_BYTES
from acsgd.run.setup.build import build_session
from acsgd.topology import Topology
from acsgd.train import train_step
from benchmarks.common import netlab
from benchmarks.pipeline.network_ranks import SEQUENCE, TIMEOUT_S, on_hosts, request_all
from benchmarks.runs.speed import BUCKET_MB, OPTIM, make_adamw, pretrained, summed_loss

VOCABULARY = 256
DDP, DDP_FP16, LOCAL = "DDP", "DDP, fp16", "local"
FIRST_STEP = 1199
"""Number of the first step of every mode. The next number is divisible by most periods, so exchanges follow it."""
SETTLING_BYTES = 1 << 20
"""Size of the all-reduce after a change of the rate, so that TCP adapts."""


@dataclass(frozen=True)
class Setting:
    """Options of a run, sent to every replica."""

    model: Path
    replicas: int
    micros: int
    """Micro-batches per step and replica, one sequence each; every step has the same."""
    modes: tuple[str, ...]
    """Values of dp.mode, DDP or DDP_FP16."""

    def config(self, mode: str) -> Config:
        """Return the configuration with this mode."""
        return Config(
            model=ModelConfig(str(self.model)),
            data=DataConfig(sources="demo", sequence=SEQUENCE, batch=self.micros * self.replicas),
            optim=OPTIM,
            pp=PipelineConfig(stages=1, micro=1),
            dp=ReplicaConfig(mode),
            log=LogConfig(dir=str(self.model.parent / "run")),
            run=RunConfig(timeout=TIMEOUT_S),
        )


class Request(NamedTuple):
    """Request to run consecutive steps in one mode."""

    mode: str | None
    """None = all-reduce SETTLING_BYTES instead."""
    steps: int = 1
    """Number of steps."""


class Block(NamedTuple):
    """Results of consecutive steps."""

    seconds: float
    """Per step."""
    sent_bytes: float
    """Bytes of all messages between replicas, per step and host."""
    loss: float
    """This rank's part of the loss of the first step; the parts sum to the loss."""


class StepCost(NamedTuple):
    """Results of one step."""

    loss: float
    """This rank's part of the loss."""
    sent_bytes: float
    """Per host."""


Step = Callable[[int], StepCost]
"""Runs step n, together with the other replicas."""


class Replicas:
    """Replicas of a model, one per host, that run steps in any of the modes."""

    def __init__(self, setting: Setting, network: netlab.Lab) -> None:
        self.network = network
        self._setting = setting
        self._pipes: Sequence[Connection] = ()

    @contextlib.contextmanager
    def running(self) -> Iterator[Replicas]:
        """Start the replicas and terminate them at the end."""
        with on_hosts(self.network, be_replica, self._setting) as self._pipes:
            yield self

    def block(self, mode: str, steps: int) -> Block:
        """Run steps; their time is that of the slowest rank. Raises RuntimeError if a rank has ended."""
        ranks: list[Block] = request_all(self._pipes, Request(mode, steps))
        return Block(max(rank.seconds for rank in ranks), ranks[0].sent_bytes, sum(rank.loss for rank in ranks))

    def limit(self, mbit: float | None) -> None:
        """Change the rate of all hosts, and all-reduce a message so that TCP adapts."""
        self.network.limit(mbit)
        request_all(self._pipes, Request(None))


def is_ddp(mode: str) -> bool:
    """Whether a mode is DistributedDataParallel."""
    return mode in (DDP, DDP_FP16)


def period(mode: str) -> int:
    """Return the number of steps after which a mode's exchanges repeat."""
    if is_ddp(mode):
        return 1
    parsed = from_spec(mode, MODES, key="--modes")
    between_exchanges = getattr(parsed, "inner", 1) // getattr(parsed, "fragments", 1)
    return math.lcm(between_exchanges, INTERVAL if getattr(parsed, "moment_correction", False) else 1)


def be_replica(rank: int, setting: Setting, store: str, pipe: Connection) -> None:
    """Run one replica: the steps of each request, until the pipe is closed."""
    files, timeout = dist.FileStore(store, setting.replicas), timedelta(seconds=TIMEOUT_S)
    topology = Topology.of(rank, setting.replicas, stages=1)
    with connect(topology, timeout=timeout, store=files) as groups, contextlib.suppress(EOFError):
        steps = open_steps(rank, setting, groups)
        numbers = dict.fromkeys(steps, FIRST_STEP)
        while True:
            request: Request = pipe.recv()
            if request.mode is None:
                groups.dp.all_reduce(torch.zeros(SETTLING_BYTES // 4)).wait()
                pipe.send(None)
                continue
            first = numbers[request.mode]
            pipe.send(run_block(steps[request.mode], range(first, first + request.steps)))
            numbers[request.mode] += request.steps


def open_steps(rank: int, setting: Setting, groups: Groups) -> dict[str, Step]:
    """Return the step of each mode; all use the same process groups."""
    steps: dict[str, Step] = {}
    for mode in setting.modes:
        job = prepare(setting.config(LOCAL if is_ddp(mode) else mode), Launch(rank, 0, setting.replicas))
        batch = make_batch(job, setting)
        steps[mode] = ddp(job, batch, groups, fp16=mode == DDP_FP16) if is_ddp(mode) else acsgd(job, batch, groups)
    return steps


def run_block(step: Step, numbers: range) -> Block:
    """Run the steps with these numbers."""
    dist.barrier()
    start = time.perf_counter()
    steps = [step(number) for number in numbers]
    seconds = time.perf_counter() - start
    return Block(seconds / len(steps), sum(each.sent_bytes for each in steps) / len(steps), steps[0].loss)


def make_batch(job: Job, setting: Setting) -> Batch:
    """Return a replica's batch of every step: random tokens."""
    generator = torch.Generator().manual_seed(0)
    all_tokens = torch.randint(VOCABULARY, (setting.micros * setting.replicas, 1, SEQUENCE + 1), generator=generator)
    tokens = all_tokens[job.micro_ids.start : job.micro_ids.stop]
    ids = torch.zeros(len(tokens), 1, dtype=torch.int64)
    return Batch({"input_ids": tokens[..., :-1]}, tokens[..., 1:], sample_ids=ids, micro_ids=job.micro_ids)


def acsgd(job: Job, batch: Batch, groups: Groups) -> Step:
    """Return acsgd's step in the mode of a job."""
    session, replicas = build_session(job, open_weight_source(job), groups), job.topology.replicas

    def step(number: int) -> StepCost:
        result = train_step(session, batch, Progress(step=number))
        return StepCost(result.loss / replicas, result.summary[DP_BYTES] / replicas)

    return step


def ddp(job: Job, batch: Batch, groups: Groups, *, fp16: bool) -> Step:
    """Return the step of DistributedDataParallel; fp16: with torch's hook for all-reduce in fp16."""
    replicas = job.topology.replicas
    model = DistributedDataParallel(
        pretrained(job), bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True, process_group=groups.dp.process_group
    )
    if fp16:
        model.register_comm_hook(groups.dp.process_group, fp16_compress_hook)
    adamw = make_adamw(model)
    num_params = sum(parameter.numel() for parameter in model.parameters())
    sent_bytes = 2 * (replicas - 1) / replicas * num_params * (2 if fp16 else 4)  # gloo's ring all-reduce

    def step(number: int) -> StepCost:
        loss, labels = torch.zeros(()), batch.labels
        assert batch.inputs is not None
        assert labels is not None
        for index, (micro, targets) in enumerate(zip(batch.inputs["input_ids"], labels, strict=True)):
            with nullcontext() if index == len(labels) - 1 else model.no_sync():
                logits = model(micro, use_cache=False).logits
                part = summed_loss(logits, targets) / labels.numel()
                part.backward()
            loss += part.detach()
        nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip)
        adamw.step()
        adamw.zero_grad()
        return StepCost(loss.item() / replicas, sent_bytes)

    return step
