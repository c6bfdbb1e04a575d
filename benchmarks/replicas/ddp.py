"""Training runs with DistributedDataParallel, plain or with a communication hook, as a baseline for acsgd's modes.

Apart from gradient synchronization, a run equals one of acsgd: initial weights, batches and their order, AdamW and its
options, clipping, learning rate, held-out text. It writes the same metrics.jsonl.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from acsgd.config.options import Config, OptimConfig, ReplicaConfig
from acsgd.config.spec import from_spec
from acsgd.dp.hooks.hooks import CocktailState, cocktail_hook
from acsgd.groups import connect
from acsgd.io.data.batches import Dataset
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.optim.schedule import learning_rate
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import Job, prepare
from acsgd.run.setup.data import open_data
from acsgd.shards.layer_tensors import layer_tensors
from tests.lib.processes import PRELOAD

TORCH = "torch:"
"""Prefix of the names in VARIANTS when used in place of dp.mode."""
TIMEOUT = timedelta(seconds=60)
BUCKET_MB = 25
"""DistributedDataParallel's default, given explicitly since the first bucket is smaller otherwise. The whole model is
one bucket; with several, the order of the collectives of PowerSGD's hook may differ between ranks over gloo."""

SentBytes = Callable[[], float]
"""Returns the number of bytes that this replica sent in the step that has just ended."""


@dataclass(frozen=True)
class Plain:
    """All-reduce of gradients in fp32."""

    def attach(self, model: DistributedDataParallel, optim: OptimConfig, optimizer: Optimizer) -> SentBytes:
        return lambda: ring_bytes(4 * num_params(model))


@dataclass(frozen=True)
class Half:
    """All-reduce of gradients in fp16, with torch's hook."""

    def attach(self, model: DistributedDataParallel, optim: OptimConfig, optimizer: Optimizer) -> SentBytes:
        model.register_comm_hook(None, fp16_compress_hook)
        return lambda: ring_bytes(2 * num_params(model))


@dataclass(frozen=True)
class PowerSGD:
    """Torch's PowerSGD hook: all-reduce of two low-rank factors of each gradient matrix that they make smaller."""

    rank: int = 1
    exact_steps: int = 10
    """Number of initial steps that use exact all-reduce, 2 or more."""

    def attach(self, model: DistributedDataParallel, optim: OptimConfig, optimizer: Optimizer) -> SentBytes:
        state = PowerSGDState(None, matrix_approximation_rank=self.rank, start_powerSGD_iter=self.exact_steps)
        model.register_comm_hook(state, powerSGD_hook)
        before = 0

        def sent_bytes() -> float:
            nonlocal before
            sent, before = state.total_numel_after_compression - before, state.total_numel_after_compression
            return ring_bytes(4 * (sent or num_params(model)))  # torch does not count the exact steps

        return sent_bytes


@dataclass(frozen=True)
class CocktailHook:
    """acsgd's `cocktail_hook` with preconditioning: top-k compression of preconditioned gradients."""

    topk: float = 0.02
    bits: int = 4
    plain: bool = False
    """Whether the hook knows no learning rates and clips nothing."""

    def attach(self, model: DistributedDataParallel, optim: OptimConfig, optimizer: Optimizer) -> SentBytes:
        options: dict[str, Any] = {} if self.plain else {"optimizer": optimizer, "clip": optim.clip}
        state = CocktailState(model, topk=self.topk, bits=self.bits, precondition=optim.betas[1], **options)
        model.register_comm_hook(state, cocktail_hook)

        def sent_bytes() -> float:
            sent = state.meter.sent_bytes
            state.meter.reset()
            return sent

        return sent_bytes


VARIANTS = {"ddp": Plain, "fp16": Half, "powersgd": PowerSGD, "cocktail_hook": CocktailHook}


def is_torch(mode: str) -> bool:
    """Whether a mode is one of VARIANTS with the prefix TORCH."""
    return mode.startswith(TORCH)


def finish(config: Config, processes: int, timeout: timedelta) -> None:
    """Run all steps in processes of their own. config.dp.mode: "torch:ddp" or another of VARIANTS.

    Raises RuntimeError if a rank fails or does not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ranks: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(dir=config.log.dir) as directory:
        for rank in range(processes):
            arguments = (rank, processes, config, f"{directory}/store")
            ranks.append(context.Process(target=run_rank, args=arguments, daemon=True))
        try:
            for each in ranks:
                each.start()
            for each in ranks:
                each.join(timeout.total_seconds())
            codes = [each.exitcode for each in ranks]
        finally:
            for each in ranks:
                if each.pid is not None:  # None if the process was not started
                    each.kill()
                    each.join()
    if codes != [0] * processes:
        raise RuntimeError(f"a run of {config.dp.mode} ended with {codes}")


def run_rank(rank: int, world_size: int, config: Config, store: str) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    variant = from_spec(config.dp.mode.removeprefix(TORCH), VARIANTS, key="dp.mode")
    job = prepare(replace(config, dp=ReplicaConfig()), Launch(rank, rank, world_size))
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(store, world_size)):
        model = DistributedDataParallel(make_model(job), bucket_cap_mb=BUCKET_MB)
        make = make_sgd if isinstance(variant, CocktailHook) else make_adamw
        optimizer = make(model, job.config.optim)
        train(job, model, optimizer, variant.attach(model, job.config.optim, optimizer))


def make_model(job: Job) -> PreTrainedModel:
    """Return the whole model with acsgd's initial weights."""
    source, meta = open_weight_source(job), job.model.task.model_class.build(job.model.config)
    weights: dict[str, Tensor] = {}
    for layer in job.model.layers:
        weights |= source.tensors(layer.name, layer_tensors(meta, job.model.description, layer.index))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(job.model.config, dtype=torch.float32)
    loaded = model.load_state_dict(weights, strict=False)  # tied weights are stored once
    assert not loaded.unexpected_keys, loaded
    assert set(weights) >= {name for name, _ in model.named_parameters()}, loaded
    return model.train()


def train(job: Job, model: DistributedDataParallel, optimizer: Optimizer, sent_bytes: SentBytes) -> None:
    """Run all steps and evaluate when due; rank 0 writes metrics.jsonl."""
    optim, every, is_main = job.config.optim, job.config.eval.every, job.topology.rank == 0
    reader, held_out, *_ = open_data(job)
    lines = []
    with Dataset(reader, range(optim.steps)) as batches:
        for step, batch in enumerate(batches):
            loss = make_step(model, optimizer, batch, step, optim)
            line = {"step": step + 1, "loss": mean_over_ranks(loss, 1.0), "eval_loss": None, "pp_forward_bytes": 0}
            line["dp_bytes"] = round(sent_bytes()) * job.topology.replicas
            if held_out is not None and (step + 1 == optim.steps or (every is not None and (step + 1) % every == 0)):
                line["eval_loss"] = evaluate(model, held_out.batches(len(job.micro_ids)))
            lines.append(line)
    if is_main:
        (Path(job.config.log.dir) / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_step(
    model: DistributedDataParallel, optimizer: Optimizer, batch: Batch, step: int, optim: OptimConfig
) -> float:
    """Run one optimizer step; return this replica's loss, the mean over its target tokens."""
    assert batch.inputs is not None
    assert batch.labels is not None
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, optim)  # before backward, in which the hook may need it
    loss = 0.0
    for index, (tokens, labels) in enumerate(zip(batch.inputs["input_ids"], batch.labels, strict=True)):
        with nullcontext() if index == len(batch.labels) - 1 else model.no_sync():
            share = summed_loss(model(tokens, use_cache=False).logits, labels) / batch.labels.numel()
            share.backward()
        loss += share.item()
    if isinstance(optimizer, torch.optim.AdamW):  # SGD steps on preconditioned gradients
        nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make_adamw(model: nn.Module, optim: OptimConfig) -> Optimizer:
    """Return torch's AdamW with the options and the weight decay groups of acsgd's."""
    return torch.optim.AdamW(groups_of(model, optim), lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


def make_sgd(model: nn.Module, optim: OptimConfig) -> Optimizer:
    """Return SGD, which on preconditioned gradients is AdamW without its first moment."""
    return torch.optim.SGD(groups_of(model, optim), lr=optim.lr)


def groups_of(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Return parameter groups: matrices with weight decay, norms and biases without."""
    return [
        {"params": [param for param in model.parameters() if param.dim() > 1], "weight_decay": optim.weight_decay},
        {"params": [param for param in model.parameters() if param.dim() <= 1], "weight_decay": 0.0},
    ]


@torch.no_grad()
def evaluate(model: DistributedDataParallel, batches: Iterable[Batch]) -> float:
    """Return the mean loss over the target tokens of all replicas."""
    loss, targets = 0.0, 0
    model.eval()
    for batch in batches:
        assert batch.inputs is not None
        assert batch.labels is not None
        for tokens, labels in zip(batch.inputs["input_ids"], batch.labels, strict=True):
            loss += float(summed_loss(model.module(tokens, use_cache=False).logits, labels))
            targets += int((labels != -100).sum())
    model.train()
    return mean_over_ranks(loss, targets)


def mean_over_ranks(total: float, count: float) -> float:
    """Return the sum of `total` over all ranks divided by the sum of `count`."""
    sums = torch.tensor([total, count], dtype=torch.float64)
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy, summed over target tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def num_params(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def ring_bytes(message: float) -> float:
    """Return the bytes that each rank sends in gloo's ring all-reduce of `message` bytes."""
    return 2 * (dist.get_world_size() - 1) / dist.get_world_size() * message
