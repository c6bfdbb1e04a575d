"""A rank's pipeline driven by hand: batches drawn at random, gradient descent in one line, no files of data."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig, PipelineConfig
from acsgd.dp.sync import SingleReplicaSync
from acsgd.groups import connect
from acsgd.launch import Launch
from acsgd.layers.composed import ComposedModel
from acsgd.layers.skeleton import fill_with_stand_ins
from acsgd.model_classes import MODEL_CLASSES
from acsgd.pp.chunked_loss import HeadLoss
from acsgd.pp.stage import Stage
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.session import Session
from acsgd.run.setup.build import build_session
from acsgd.shards.load import LayerLoader, RandomWeights
from acsgd.shards.weights import Weight
from acsgd.tasks import TASKS
from lib.cache import with_shared_cache
from lib.models import layers_of
from lib.training import TIMEOUT

VOCABULARY = 512
SEQUENCES, SEQUENCE = 6, 32
RATE = 0.1
CPU = torch.device("cpu")


@dataclass(frozen=True)
class DrawnBatch:
    """Micro-batches of one replica."""

    inputs: dict[str, Tensor]
    labels: Tensor
    micro_ids: range
    sample_ids: Tensor
    upcoming_ids: Tensor
    longest_rows: None = None
    upcoming: None = None


def make_config(
    model: Path, run_dir: Path, *, dtype: Any = "fp32", recompute: Any = "none", dropout_mask: Any = "step", **pp: Any
) -> Config:
    """Return a run of 6 sequences per step: in micro-batches of 2 they are three, uneven for two replicas."""
    return with_shared_cache(
        Config(
            model=ModelConfig(name=str(model), dtype=dtype, recompute=recompute, dropout_mask=dropout_mask),
            data=DataConfig(sources="demo", sequence=SEQUENCE, batch=SEQUENCES, seed=3),
            optim=OptimConfig(lr=RATE, steps=1),
            pp=PipelineConfig(**pp),
            log=LogConfig(dir=str(run_dir / "run")),
        )
    )


def draw_batch(config: Config, step: int, micros: range | None = None) -> DrawnBatch:
    """Return the micro-batches `micros`, or all, of a step's global batch. About a third of the labels is -100."""
    generator = torch.Generator().manual_seed(step)
    shape = (SEQUENCES // config.pp.micro, config.pp.micro, SEQUENCE)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    labels = torch.where(torch.rand(shape, generator=generator) < 1 / 3, -100, tokens.roll(-1, -1))
    sample_ids = torch.arange(step * SEQUENCES, (step + 1) * SEQUENCES).view(shape[:2])
    micros = range(len(tokens)) if micros is None else micros
    mine = slice(micros.start, micros.stop)
    return DrawnBatch({"input_ids": tokens[mine]}, labels[mine], micros, sample_ids[mine], sample_ids[mine] + SEQUENCES)


@contextlib.contextmanager
def session_of(config: Config, rank: int, world_size: int, store: str) -> Iterator[Session]:
    """Yield one rank of a run; store: a file that only these ranks share, and only for this."""
    torch.set_num_threads(1)
    job = prepare(config, Launch(rank, rank, world_size))
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(store, world_size)) as groups:
        yield build_session(job, open_weight_source(job), groups)


@torch.no_grad()
def descend(weights: Iterable[Weight], scale: float = 1.0) -> None:
    """Make a step of gradient descent; scale: what the gradients are multiplied by."""
    for weight in weights:
        assert weight.master.grad is not None
        weight.master.sub_(weight.master.grad, alpha=RATE / scale)
        if weight.master is not weight.param:
            weight.param.copy_(weight.master)


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash that differs if any bit does."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def gradients(session: Session) -> list[Tensor]:
    """Return those of all weights of a rank."""
    grads = [weight.master.grad for weight in session.weights]
    return [grad for grad in grads if grad is not None]


def build_stages(
    config: PreTrainedConfig,
    cuts: Iterable[range],
    *,
    task: str = "lm",
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    compiles: bool = False,
    label_smoothing: float = 0.0,
    **options: Any,
) -> list[Stage]:
    """Return stages that hold the layers of each range, with new weights, in this process alone.

    options: of Stage.
    """
    description, model_class = layers_of(config, task), MODEL_CLASSES[task]
    source = RandomWeights(model_class, config, description, seed=0)
    stages = []
    for cut in cuts:
        model = model_class.build(config)
        loader = LayerLoader(model, description, source, device=device, dtype=dtype, has_masters=dtype != torch.float32)
        layers = [loader.load(index) for index in cut]
        fill_with_stand_ins(model, description.blocks, device, dtype)
        sync = SingleReplicaSync([weight for layer in layers for weight in layer.weights])
        composed = ComposedModel(model, description, compiles=compiles)
        head_loss = HeadLoss(TASKS[task], label_smoothing=label_smoothing)
        stages.append(Stage(composed, head_loss, layers, sync, seed=0, **{"targets": SEQUENCE} | options))
    return stages
