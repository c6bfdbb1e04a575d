"""Training over links that remember is AQ-SGD, as plain tensor arithmetic in one process says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lib.ranks import on_ranks
from lib.training import RELATIVE, TIMEOUT, make_config, oracle_losses, train
from torch import Tensor

from acsgd.codecs.fixpoint import FixPoint
from acsgd.config.options import Config
from acsgd.io.sampling.batches import Dataset
from acsgd.run.build import build_session
from acsgd.run.inputs import open_inputs
from acsgd.run.job import prepare
from acsgd.topology import Launch, connect

STEPS = 9
BLOCKS = {1: (6,), 2: (3, 3), 4: (1, 2, 2, 1)}
"""Of each number of stages."""


class Remembering:
    """AQ-SGD's Algorithm 1 at one cut, a row of the micro-batch at a time where rows do not share scales."""

    def __init__(self, codec: FixPoint) -> None:
        self._codec = codec
        self._m: dict[int, Tensor] = {}

    def __call__(self, a: Tensor, samples: Sequence[int]) -> Tensor:
        known = [row for row, sample in enumerate(samples) if sample in self._m]
        y = a.clone()
        if known:
            m = torch.stack([self._m[samples[row]] for row in known]).float()
            fields = self._codec.encode(a[known] - m)
            y[known] = m + self._codec.decode(fields, tuple(m.shape), torch.float32)
        self._m.update({sample: row.half() for sample, row in zip(samples, y, strict=True)})
        return y


def little_text(config: Config, tmp_path: Path) -> Config:
    """Let a run of 6 sequences per step have 15 of them, so that a step starts and ends in the middle of an epoch."""
    path = tmp_path / "little.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, again and again and " * 23)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, sources=str(path)))


def losses_and_bytes(rank: int, world_size: int, store: Path, configs: Sequence[Config]) -> list[list[float]]:
    torch.set_num_threads(1)
    runs = []
    for number, config in enumerate(configs):
        job = prepare(config, Launch(rank, rank, world_size))
        inputs = open_inputs(job)
        with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(f"{store}-{number}", world_size)) as groups:
            assert inputs.weight_source is not None
            worker = build_session(job, inputs.weight_source, groups, inputs.cache_plan)
            with Dataset(inputs.reader, range(config.optim.steps)) as batches:
                runs.append(train(worker, batches))
            worker.close()
    return runs


@pytest.mark.parametrize("stages", [2, 4])
def test_it_learns_what_one_process_learns_with_the_same_arithmetic(
    stages: int, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    blocks = BLOCKS[stages]
    plain = little_text(
        make_config(tiny_model(), tmp_path, steps=STEPS, micro=2, layers=blocks, stages=stages), tmp_path
    )
    specs = {
        "delta:bits=4": FixPoint(4),
        "delta:bits=2,dims=token,cache=disk": FixPoint(2, dims="token"),
        "delta:step=2": FixPoint(4, scale="l2", clip=16.0, centroids=True),
    }
    configs = [_with(plain, forward=spec, micro=micro) for spec, micro in zip(specs, (3, 2, 2), strict=True)]
    by_rank = on_ranks(stages, losses_and_bytes, tmp_path / "store", configs)
    assert all(losses == by_rank[0] for losses in by_rank)
    exact = oracle_losses(plain)
    cuts = [sum(blocks[:stage]) for stage in range(1, stages)]
    for config, losses in zip(configs, by_rank[0], strict=True):
        wires = {cut: Remembering(specs[config.pp.forward]) for cut in cuts}
        expected = oracle_losses(config, wires=wires)
        assert losses == pytest.approx(expected, rel=RELATIVE), config.pp
        assert expected != pytest.approx(exact, rel=RELATIVE), "the law would hold without a codec"


def _with(config: Config, **pp: object) -> Config:
    return dataclasses.replace(config, pp=dataclasses.replace(config.pp, **pp))  # type: ignore[arg-type]
