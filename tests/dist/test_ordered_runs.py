"""Law: runs whose device tensors travel over an ordered transport, such as NCCL, train as over gloo, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from lib.models import dropout_of
from lib.ordered import ordered_transport
from lib.ranks import on_ranks
from lib.training import TIMEOUT, batches_of, make_config, train

from acsgd.config.options import Config
from acsgd.groups import connect
from acsgd.launch import Launch
from acsgd.run.initial_weights import open_weight_source
from acsgd.run.plan.job import prepare
from acsgd.run.setup.build import build_session

TinyModel = Callable[..., Path]


def losses_over_both(
    rank: int, world_size: int, store: Path, configs: Sequence[Config]
) -> list[tuple[list[float], list[float]]]:
    """Train each config over gloo and over the ordered transport; return the losses of each."""
    torch.set_num_threads(1)
    losses = []
    for number, config in enumerate(configs):
        job = prepare(config, Launch(rank, rank, world_size, world_size))
        with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(f"{store}-{number}", world_size)) as groups:
            over_gloo = train(build_session(job, open_weight_source(job), groups), batches_of(job))
            ordered = ordered_transport(seed=100 * number + rank)
            groups = groups.with_transport(ordered, torch.device("cpu"), lambda axis, ranks: True)
            over_ordered = train(build_session(job, open_weight_source(job), groups), batches_of(job))
        losses.append((over_gloo, over_ordered))
    return losses


def test_stages(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("gpt2", n_layer=4, **dropout_of("gpt2"))
    configs = [
        make_config(model, tmp_path, stages=2, schedule=schedule, forward=forward, backward=forward, micro=1)
        for schedule, forward in [
            ("gpipe", "none"),
            ("1f1b", "fixpoint:bits=4"),
            ("1f1b:lead=2", "lloyd:bits=4"),
            ("interleaved:chunks=2", "none:dtype=bf16"),
        ]
    ]
    for losses in on_ranks(2, losses_over_both, tmp_path / "store", configs):
        for over_gloo, over_ordered in losses:
            assert over_ordered == over_gloo
