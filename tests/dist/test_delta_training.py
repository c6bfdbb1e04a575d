"""Training with delta links equals AQ-SGD in plain tensor arithmetic in one process."""

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
from acsgd.groups import connect
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.data.batches import Dataset
from acsgd.launch import Launch
from acsgd.pp.wire.frame import HEADER_BYTES
from acsgd.run.plan.job import prepare
from acsgd.run.report import PP_FORWARD_BYTES
from acsgd.run.setup.build import build_session
from acsgd.run.setup.inputs import open_inputs
from acsgd.train import train_step

STEPS = 7
TEXT = "the quick brown fox jumps over the lazy dog, again and again and " * 23
"""15 sequences, of which a step uses 6: epochs end in the middle of a step."""
BLOCKS = {2: (3, 3), 4: (1, 2, 2, 1)}
"""By number of stages, the number of blocks of each."""
CODECS = {
    "delta:bits=4": FixPoint(4),
    "delta:bits=4,cache=disk": FixPoint(4),
    "delta:bits=2,dims=token,cache=disk": FixPoint(2, dims="token"),
    "delta:step=2": FixPoint(4, scale="l2", clip=16.0, centroids=True),
}
"""Codec of the differences of each spec."""
RUNS = {
    2: [("delta:bits=4", "none", 3), ("delta:bits=2,dims=token,cache=disk", "delta:bits=4,cache=disk", 2)],
    4: [("delta:step=2", "none", 2), ("delta:bits=2,dims=token,cache=disk", "none", 1), ("none", "delta:step=2", 2)],
}
"""By number of stages, specs of activations and of gradients and micro-batch size of some runs."""


class AQSGD:
    """AQ-SGD's Algorithm 1 at one boundary."""

    def __init__(self, codec: FixPoint, entry: torch.dtype) -> None:
        """entry: dtype of what is cached."""
        self._codec, self._entry = codec, entry
        self._m: dict[int, Tensor] = {}

    def __call__(self, a: Tensor, samples: Sequence[int]) -> Tensor:
        hits = [row for row, sample in enumerate(samples) if sample in self._m]
        y = a.clone()
        if hits:
            m = torch.stack([self._m[samples[row]] for row in hits]).float()
            fields = self._codec.encode(a[hits] - m)
            y[hits] = m + self._codec.decode(fields, tuple(m.shape), torch.float32)
        self._m.update({sample: row.to(self._entry) for sample, row in zip(samples, y, strict=True)})
        return y


def use_little_text(config: Config, tmp_path: Path) -> Config:
    path = tmp_path / "little.txt"
    path.write_text(TEXT)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, sources=str(path)))


def losses_of_rank(rank: int, world_size: int, store: Path, configs: Sequence[Config]) -> list[list[float]]:
    torch.set_num_threads(1)
    runs = []
    for number, config in enumerate(configs):
        job = prepare(config, Launch(rank, rank, world_size))
        inputs = open_inputs(job)
        with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(f"{store}-{number}", world_size)) as groups:
            assert inputs.weight_source is not None
            session = build_session(job, inputs.weight_source, groups, inputs.cache_plan)
            with Dataset(inputs.reader, range(config.optim.steps)) as batches:
                runs.append(train(session, batches))
            session.close()
    return runs


@pytest.mark.parametrize("stages", BLOCKS)
def test_training_equals_aq_sgd_in_one_process(stages: int, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    blocks = BLOCKS[stages]
    exact = make_config(tiny_model(), tmp_path, steps=STEPS, micro=2, layers=blocks, stages=stages)
    exact = use_little_text(exact, tmp_path)
    configs = [
        dataclasses.replace(exact, pp=dataclasses.replace(exact.pp, forward=forward, backward=backward, micro=micro))
        for forward, backward, micro in RUNS[stages]
    ]
    by_rank = on_ranks(stages, losses_of_rank, tmp_path / "store", configs)
    assert all(losses == by_rank[0] for losses in by_rank)
    without = oracle_losses(exact)
    cuts = [sum(blocks[:stage]) for stage in range(1, stages)]
    for config, losses in zip(configs, by_rank[0], strict=True):
        wires, gradient_wires = (
            {cut: AQSGD(CODECS[spec], entry) for cut in cuts if spec != "none"}
            for spec, entry in ((config.pp.forward, torch.float16), (config.pp.backward, torch.bfloat16))
        )
        expected = oracle_losses(config, wires=wires, gradient_wires=gradient_wires)
        assert losses == pytest.approx(expected, rel=RELATIVE), config.pp
        assert expected != pytest.approx(without, rel=RELATIVE), "the test would pass without a codec"


def bytes_of_rank(rank: int, world_size: int, store: Path, config: Config) -> list[int]:
    """Train on this rank; return the bytes of activations that all ranks have sent in each step."""
    torch.set_num_threads(1)
    job = prepare(config, Launch(rank, rank, world_size))
    inputs = open_inputs(job)
    with connect(job.topology, timeout=TIMEOUT, store=dist.FileStore(str(store), world_size)) as groups:
        assert inputs.weight_source is not None
        session, progress = build_session(job, inputs.weight_source, groups, inputs.cache_plan), Progress()
        sent = []
        with Dataset(inputs.reader, range(config.optim.num_steps)) as batches:
            for batch in batches:
                result = train_step(session, batch, progress)
                progress = result.progress
                sent.append(round(result.summary[PP_FORWARD_BYTES]))
        session.close()
    return sent


def test_above_frozen_layers_only_headers_follow_the_first_epoch(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Of each micro-batch 48 bytes, and of each sequence the 8 bytes by which both ends compare their caches."""
    config = make_config(tiny_model(), tmp_path, steps=7, micro=2, layers=(3, 3), stages=2, forward="delta:bits=4")
    config = use_little_text(config, tmp_path)
    frozen = dataclasses.replace(config.model, freeze="transformer.w[tp]e.*,transformer.h.[0-2].*")
    (sent, _) = on_ranks(2, bytes_of_rank, tmp_path / "store", dataclasses.replace(config, model=frozen))
    assert sent[5:] == [3 * HEADER_BYTES + 2 * 6 * 8] * 2
    assert min(sent[:2]) > 6 * 32 * 32 * 4
