"""This rank's part of a job at work: its stages with their weights, its links, and the step they make together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from acsgd.codecs.identity import DTYPES
from acsgd.dp.clip import clip_factor, scale_gradients_, squared_norm, sum_over_ranks
from acsgd.io.data import Batch
from acsgd.io.metrics import Totals, totals
from acsgd.job import Job
from acsgd.meter import Meter
from acsgd.optim import Optimizer
from acsgd.pp.link import Link, LinkFactory, TensorSpec, TiedPair
from acsgd.pp.runtime import Pipeline
from acsgd.pp.stage import Stage
from acsgd.shards.base import Weight, skeleton, tied_keys
from acsgd.shards.load import Source, load_layer
from acsgd.topology import Groups


class StepResult(NamedTuple):
    """What all ranks know after a step."""

    loss: float
    """Mean over the target tokens of the global batch, before the step."""
    grad_norm: float
    """Global, before clipping."""
    lr: float
    totals: Totals
    """Sums over all ranks."""
    peak_memory_bytes: int
    """Largest among the ranks of this pipeline."""


@dataclass(frozen=True)
class Worker:
    """One rank's stages, ready to train."""

    job: Job
    groups: Groups
    stages: dict[int, Stage]
    weights: list[Weight]
    pipeline: Pipeline
    optimizer: Optimizer
    forward_meter: Meter
    backward_meter: Meter

    def train_step(self, batch: Batch, step: int) -> StepResult:
        """Make optimizer step `step`, counted from 0, together with all other ranks."""
        batch = batch.to(self.job.streams.device)
        loss = self.pipeline.run(batch, step)
        syncs = [stage.sync for stage in self.stages.values()]
        share = totals(
            loss,
            batch.labels,
            forward=self.forward_meter,
            backward=self.backward_meter,
            dp=[sync.meter for sync in syncs],
        )
        sums, squared, peak = self._agree(share)
        # gradients are of the summed loss over the number of targets if none is masked: now the true number is known
        correction = self._full_targets() / sums.targets
        norm = squared**0.5 * correction
        scale_gradients_(self.weights, correction * clip_factor(norm, self.job.config.optim.clip))
        lr = self.optimizer.step(step)
        for sync in syncs:
            sync.after_step(step)
        return StepResult(sums.loss * correction, norm, lr, sums, peak)

    def _agree(self, share: Totals) -> tuple[Totals, float, int]:
        """Return the sums over all ranks, the squared gradient norm, and the pipeline's peak memory."""
        topology = self.job.topology
        peaks = torch.zeros(topology.stages, dtype=torch.float64)
        peaks[topology.stage_rank] = self.job.streams.peak_memory_bytes()
        per_stage = torch.cat([squared_norm(self.weights), peaks])
        sums, per_stage = sum_over_ranks(share.tensor(), per_stage, self.groups)
        return Totals(*sums.tolist()), float(per_stage[0]), int(per_stage[1:].max())

    def _full_targets(self) -> int:
        return self.job.config.data.batch * self.job.config.data.sequence


def build_worker(job: Job, source: Source, groups: Groups) -> Worker:
    """Load this rank's layers, and no others, and connect them with their neighbours'."""
    forward_meter, backward_meter = Meter(), Meter()
    stages = build_stages(job, source, groups)
    links = _open_links(job, groups, forward_meter, backward_meter)
    tied = _pair_tied(job, groups, stages, backward_meter)
    weights = [weight for stage in stages.values() for weight in stage.weights]
    return Worker(
        job=job,
        groups=groups,
        stages=stages,
        weights=weights,
        pipeline=Pipeline(job.row, stages, links, tied),
        optimizer=Optimizer(weights, job.config.optim),
        forward_meter=forward_meter,
        backward_meter=backward_meter,
    )


def build_stages(job: Job, source: Source, groups: Groups) -> dict[int, Stage]:
    """Load the layers of this rank's stages, one at a time; all others stay without memory."""
    config, device = job.config, job.streams.device
    model = skeleton(job.model_config).train()
    job.family.rebuild_buffers(model, device)
    stages = {}
    for index in job.stages:
        shards = job.layers[slice(*job.specs[index])]
        held = {
            shard: load_layer(
                model, shard, source, device=device, dtype=DTYPES[config.model.dtype], embedding=job.layers[0]
            )
            for shard in shards
        }
        weights = [weight for layer in held.values() for weight in layer]
        stages[index] = Stage(
            model,
            job.family,
            held,
            job.mode.open(weights, groups.dp),
            targets=config.data.batch * config.data.sequence,
            seed=config.data.seed,
        )
    return stages


def _open_links(job: Job, groups: Groups, forward_meter: Meter, backward_meter: Meter) -> dict[int, Link]:
    """Open this rank's end of every boundary, both ends in the same order: by boundary."""
    config, topology = job.config, job.topology
    if topology.stages == 1:
        return {}
    shapes = job.family.boundary(job.model_config, config.pp.micro, config.data.sequence)
    tensors = {name: TensorSpec(shape, DTYPES[config.model.dtype]) for name, shape in shapes.items()}
    factory = LinkFactory(groups.pp, job.streams, tensors, job.forward, job.backward, forward_meter, backward_meter)
    links = {}
    for boundary in range(len(job.specs) - 1):
        for stage, other in ((boundary, boundary + 1), (boundary + 1, boundary)):
            if stage in job.stages:
                links[boundary] = factory.open(boundary, peer=_rank_of(job, other), downstream=stage == boundary)
    return links


def _pair_tied(job: Job, groups: Groups, stages: dict[int, Stage], meter: Meter) -> TiedPair | None:
    """Connect the two copies of a tied weight, if this rank holds one and another rank the other."""
    first, last = 0, len(job.specs) - 1
    originals = tied_keys(skeleton(job.model_config)).values()
    weight = next(
        (
            weight
            for index, stage in stages.items()
            for weight in stage.weights
            if weight.copy_of is not None or (index == first and weight.key in originals)
        ),
        None,
    )
    if weight is None or _rank_of(job, first) == _rank_of(job, last):
        return None
    peer = _rank_of(job, last if weight.copy_of is None else first)
    return TiedPair(weight, boundary=last, peer=peer, group=groups.pp, streams=job.streams, meter=meter)


def _rank_of(job: Job, stage: int) -> int:
    """Return the rank of this pipeline that holds a stage."""
    return job.topology.pipeline(job.topology.replica)[stage % job.topology.stages]
