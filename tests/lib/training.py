"""A training run of N ranks without torchrun, and the one-process loop in plain PyTorch that it must equal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig, PipelineConfig
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.data.sampler import deal
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.optim import OPTIMIZERS
from acsgd.optim.gradient_scale import LossScale
from acsgd.optim.schedule import learning_rate
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import Job, prepare
from acsgd.run.session import Session
from acsgd.run.setup.build import build_session
from acsgd.run.setup.data import open_data
from acsgd.streams import mix_seed, seed_generators
from acsgd.train import train_step
from tests.lib.cache import with_shared_cache
from tests.lib.models import first_modules
from tests.lib.optimizers import MakeOptimizer
from tests.lib.patience import NO_LIMIT_S
from tests.lib.ranks import on_ranks

TIMEOUT = timedelta(seconds=NO_LIMIT_S)
STEPS = 4
RELATIVE = 1e-5
"""Tolerance on losses: sums in another order differ by about 1e-7 in fp32, and each step of AdamW amplifies that."""
SCHEDULES = ["gpipe", "1f1b", "interleaved:chunks=2"]
TOPOLOGIES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]
"""Stages and replicas."""


def make_config(model: Path, run_dir: Path, *, steps: int = STEPS, **pp: object) -> Config:
    """Return a run of 6 sequences per step: in micro-batches of 2 they are three, uneven for two replicas."""
    return with_shared_cache(plain_config(model, run_dir, steps=steps, **pp))


def schedule_of(optimizer: str) -> str:
    """Return a learning-rate schedule that an optimizer allows, the default if it may be."""
    return "constant" if OPTIMIZERS[optimizer.partition(":")[0]].averages else OptimConfig.schedule


def plain_config(model: Path, run_dir: Path, *, steps: int = STEPS, **pp: object) -> Config:
    """Return the same run with an empty cache."""
    return Config(
        model=ModelConfig(name=str(model)),
        data=DataConfig(sources="demo", sequence=32, batch=6, seed=3),
        optim=OptimConfig(lr=1e-3, steps=steps, warmup=3, clip=0.5, weight_decay=0.1),
        pp=PipelineConfig(**pp),  # type: ignore[arg-type]
        log=LogConfig(dir=str(run_dir / "run")),
    )


def assert_same_training(
    configs: Sequence[Config], world_size: int, tmp_path: Path, oracle: Callable[[Config], list[float]]
) -> None:
    """Train each config on `world_size` ranks and compare the losses with those of one process."""
    by_rank = on_ranks(world_size, losses_of_rank, tmp_path / f"store-{world_size}", configs)
    assert all(losses == by_rank[0] for losses in by_rank), "ranks return different losses"
    for config, losses in zip(configs, by_rank[0], strict=True):
        assert losses == pytest.approx(oracle(config), rel=RELATIVE), (world_size, config.model, config.pp)
        assert losses[-1] < losses[0]


def losses_of_rank(
    rank: int,
    world_size: int,
    store: Path,
    configs: Sequence[Config],
    masked: bool = False,
    speeds: Mapping[int, Sequence[Sequence[float]]] = MappingProxyType({}),
    domains: str = "",
) -> list[list[float]]:
    """Train each config on this rank, one after the other; return the loss of every step of each.

    masked: whether some labels are ignored, more of them in some replicas than in others. speeds: by number of the
    config, and by step, the speeds of the replicas, by which micro-batches are dealt. Default: equal speeds. domains: a
    letter per rank; empty = there are none.
    """
    torch.set_num_threads(1)
    all_losses = []
    for number, config in enumerate(configs):
        job = prepare(config, Launch(rank, rank, world_size))
        file_store = dist.FileStore(f"{store}-{number}", world_size)
        domain = domains[rank : rank + 1]
        opened = connect(
            job.topology, timeout=TIMEOUT, store=file_store, domain=domain, connections=config.run.connections
        )
        with opened as groups:
            session = build_session(job, open_weight_source(job), groups)
            batches = batches_of(job, speeds.get(number, ()))
            all_losses.append(train(session, map(mask, batches) if masked else batches))
    return all_losses


def train(session: Session, batches: Iterable[Batch]) -> list[float]:
    """Train one step per batch from the start of a run; return the losses."""
    progress, losses = Progress(loss_scale=LossScale.of(session.job.config)), []
    for batch in batches:
        result = train_step(session, batch, progress)
        progress = result.progress
        losses.append(result.loss)
    return losses


def batches_of(job: Job, speeds: Sequence[Sequence[float]] = ()) -> Iterator[Batch]:
    """Return the batch of every step of a job. speeds: of the replicas, by step. Default: equal speeds."""
    reader, num_micros = open_data(job).reader, job.config.data.batch // job.config.pp.micro
    deals = [deal(num_micros, of_step)[job.topology.replica] for of_step in speeds]
    return map(reader.batch, range(job.config.optim.num_steps), deals or itertools.repeat(None))


Wire = Callable[[Tensor, Sequence[int]], Tensor]
"""Function of an activation [B, T, H] and its samples [B] that returns the activation the next stage receives."""


def oracle_losses(
    config: Config,
    *,
    masked: bool = False,
    wires: Mapping[int, Wire] | None = None,
    gradient_wires: Mapping[int, Wire] | None = None,
    make: MakeOptimizer | None = None,
) -> list[float]:
    """Train in one process with the Hugging Face model, torch's AdamW and clip_grad_norm_; return the loss per step.

    Only the data and the rule that seeds dropout are from acsgd; with masks per sample, pp.micro must be 1. masked:
    whether `mask` removes labels. wires, gradient_wires: by number of blocks before a boundary, the wire of activations
    and that of their gradients. make: returns another optimizer than AdamW.
    """
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.float32).train()
    place = _seed_dropout(model, config)
    samples: list[int] = []
    for blocks in {**(wires or {}), **(gradient_wires or {})}:
        _cut(model, blocks, (wires or {}).get(blocks), (gradient_wires or {}).get(blocks), samples)

    def before(step: int, index: int, batch: Batch) -> None:
        samples[:] = batch.sample_ids[index].tolist()
        place[:] = [step, index] if config.model.dropout_mask == "step" else samples

    batches = whole_batches(config)
    of_groups = None if make is None else partial(make, model)
    return train_whole(model, config.optim, map(mask, batches) if masked else batches, before=before, make=of_groups)


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy summed over the labels that are not -100."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def train_whole(
    model: PreTrainedModel,
    optim: OptimConfig,
    batches: Iterable[Batch],
    *,
    loss: Callable[[Tensor, Tensor], Tensor] = summed_cross_entropy,
    before: Callable[[int, int, Batch], None] = lambda *_: None,
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
) -> list[float]:
    """Train a whole model with torch's AdamW and clip_grad_norm_, a step per batch; return the losses.

    loss: of logits and labels, summed over the labels. before: called with step, micro-batch and batch before each
    forward. make: returns another optimizer of two parameter groups.
    """
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = make(groups) if make else torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps)
    losses = []
    for step, batch in enumerate(batches):
        assert batch.inputs is not None
        assert batch.labels is not None
        targets = int((batch.labels != -100).sum())
        total = 0.0
        for index, labels in enumerate(batch.labels):
            before(step, index, batch)
            logits = model(**{name: tensor[index] for name, tensor in batch.inputs.items()}, use_cache=False).logits
            part = loss(logits, labels) / targets
            part.backward()
            total += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, optim)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def mask(batch: Batch) -> Batch:
    """Remove about half of the labels: all after the first "t" of each sequence."""
    if batch.labels is None:
        return batch
    labels = batch.labels.clone()
    labels[(labels == ord("t") - ord("!") + 1).cummax(dim=-1).values] = -100
    return dataclasses.replace(batch, labels=labels)


def whole_batches(config: Config) -> list[Batch]:
    """Return the global batch of every step."""
    alone = dataclasses.replace(config, pp=dataclasses.replace(config.pp, stages=1, schedule="gpipe", layers=None))
    return list(batches_of(prepare(alone, Launch())))


def _cut(
    model: PreTrainedModel, blocks: int, wire: Wire | None, gradient_wire: Wire | None, samples: Sequence[int]
) -> None:
    """Apply a wire to the output of the first `blocks` blocks, and another one to its gradient."""

    def through_wire(module: torch.nn.Module, inputs: object, output: Tensor) -> Tensor:
        received = output if wire is None else output + (wire(output.detach(), samples) - output).detach()
        if gradient_wire is not None:
            received.register_hook(lambda gradient: gradient_wire(gradient, samples))
        return received

    first_modules(model)[blocks].register_forward_hook(through_wire)  # layer 0 is the embedding


def _seed_dropout(model: PreTrainedModel, config: Config) -> list[int]:
    """Reseed before each layer of a Hugging Face model as acsgd does.

    Returns the list to set before each forward: [step, micro-batch], or [sample].
    """
    place = [0, 0]
    for index, module in enumerate(first_modules(model)):

        def reseed(*_: object, index: int = index) -> None:
            seed_generators(mix_seed(config.data.seed, *place, index))

        module.register_forward_pre_hook(reseed)
    return place
