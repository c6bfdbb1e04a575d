"""This rank's part of a job at work: its stages with their weights, its links, and the step they make together."""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from acsgd.errors import RunError
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.sampling.batches import Batch
from acsgd.io.telemetry.metrics import Totals, totals
from acsgd.io.telemetry.record import Record
from acsgd.meter import Meter
from acsgd.optim.adamw import Optimizer
from acsgd.optim.base import LocalStep
from acsgd.optim.clipping import clip_factor, scale_gradients_, squared_norm
from acsgd.optim.schedule import learning_rate
from acsgd.pp.nonfinite import NonFiniteTensor, first_non_finite
from acsgd.pp.runtime import Pipeline
from acsgd.pp.stage import Stage
from acsgd.run.control import Gather
from acsgd.run.job import Job
from acsgd.shards.weights import Weight
from acsgd.topology import Groups

log = logging.getLogger(__name__)


class Asks(NamedTuple):
    """What this rank asks all ranks for, at the end of a step."""

    stop: bool = False
    """It was told to end."""
    save: bool = False
    """It is time for a checkpoint."""
    report: bool = False
    """A save of this rank has failed."""


NOTHING = Asks()


class StepResult(NamedTuple):
    """What all ranks know after a step."""

    loss: float
    """Mean over the target tokens of the global batch, before the step."""
    grad_norm: float
    """Global, before clipping; the largest where each replica steps on gradients of its own."""
    lr: float
    totals: Totals
    """Sums over all ranks."""
    peak_memory_bytes: int
    """Largest among the ranks of this pipeline."""
    updated: bool
    """Whether the weights have changed: not, if the gradients were not finite."""
    progress: Progress
    """After the step."""

    def record(self, step_s: float, save_stall_s: float, eval_loss: float | None) -> Record:
        """Return the line of metrics.jsonl for this step."""
        totals, progress = self.totals, self.progress
        return Record(
            step=progress.step,
            loss=self.loss if math.isfinite(self.loss) else None,
            tokens=progress.tokens,
            tokens_per_s=totals.targets / step_s,
            step_s=step_s,
            lr=self.lr,
            grad_norm=self.grad_norm if math.isfinite(self.grad_norm) else None,
            pp_forward_bytes=int(totals.pp_forward_bytes),
            pp_backward_bytes=int(totals.pp_backward_bytes),
            dp_bytes=int(totals.dp_bytes),
            hidden_share=totals.hidden_share,
            peak_memory_bytes=self.peak_memory_bytes,
            skipped=progress.skipped,
            loss_scale=progress.loss_scale.value,
            save_stall_s=save_stall_s,
            eval_loss=eval_loss,
        )


class _Told(NamedTuple):
    """What the ranks have said of a step."""

    sums: Totals
    targets: list[float]
    """By replica."""
    squared: list[float]
    """Of the gradients' norms, by replica."""
    peak_bytes: int
    """Of memory, largest among the ranks of this pipeline."""


@dataclass(frozen=True)
class Session:
    """One rank's stages, ready to train."""

    job: Job
    groups: Groups
    model: PreTrainedModel
    """The layers of this rank; all others are on the meta device."""
    stages: dict[int, Stage]
    weights: list[Weight]
    pipeline: Pipeline
    optimizer: Optimizer
    forward_meter: Meter
    backward_meter: Meter

    def train_step(self, batch: Batch, progress: Progress, asks: Asks = NOTHING, *, update: bool = True) -> StepResult:
        """Make the next optimizer step together with all other ranks; update: whether the weights may change.

        Raises RunError, the same on all ranks, if loss or gradients are not finite and optim.on_nan says to stop.
        """
        batch = batch.to(self.job.streams.device)
        step, scale = progress.step, progress.loss_scale
        gather = Gather(len(Totals._fields) + 2, self.groups.world)
        share = self.pipeline.run(batch, step, scale.value)
        told = self._agree(gather, share, batch, asks)
        sums, replica = told.sums, self.job.topology.replica
        # gradients are of the summed loss over the number of targets if none is masked: now the true number is known
        correction = self._full_targets() / max(1.0, sums.targets)
        corrections = [correction] * self.job.topology.replicas
        if self._local_step(step):  # then each replica's gradients are of its own mean
            corrections = [self._full_targets() / max(1.0, targets) for targets in told.targets]
        norms = [square**0.5 * each / scale.value for square, each in zip(told.squared, corrections, strict=True)]
        loss, norm = sums.loss * correction, max(norms, key=_or_inf)
        overflowed = scale.dynamic and math.isfinite(loss) and not math.isfinite(norm)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if not (finite or overflowed) and self.job.config.optim.on_nan == "stop":
            raise RunError(self._explain(batch, step, scale.value, loss, norm))
        if updated := update and finite:
            self._update(step, norms[replica], corrections[replica] / scale.value)
        log.info("step %d: loss %.6g, gradient norm %.6g%s", step + 1, loss, norm, "" if updated else ", left out")
        done = progress.after(loss if updated else None, int(sums.targets), scale.after(overflowed=overflowed))
        return StepResult(loss, norm, learning_rate(step, self.job.config.optim), sums, told.peak_bytes, updated, done)

    def evaluate(self, batches: Iterable[Batch], step: int) -> float:
        """Return the mean loss over the target tokens of all replicas' batches, without dropout; trains nothing.

        Of the weights that all replicas share, where each has its own.
        """
        gather = Gather(2, self.groups.world)
        sums = torch.zeros(2, dtype=torch.float64)
        with shared_weights(self.stages.values()):
            for batch in batches:
                sums[0] += self.pipeline.evaluate(batch.to(self.job.streams.device), step)
                if batch.labels is not None:
                    sums[1] += (batch.labels != -100).sum()
        self.forward_meter.reset()  # the bytes of a step are those of its training
        sums = gather.rows(sums).sum(0)
        return float(sums[0] / sums[1])

    def close(self) -> None:
        """Wait until what links remember beyond the run is kept."""
        self.pipeline.close()

    def _local_step(self, step: int) -> LocalStep | None:
        """Return how each replica makes a step on its own gradients, the same on all stages; None = it is common."""
        steps = [stage.sync.local_step(step) for stage in self.stages.values()]
        if (first := steps[0]) is None:
            return None
        return first._replace(shares={key: share for each in steps if each for key, share in each.shares.items()})

    def _agree(self, gather: Gather, loss: Tensor, batch: Batch, asks: Asks) -> _Told:
        """Tell all ranks this one's part of the step, and return what they say."""
        topology = self.job.topology
        share = totals(
            loss,
            batch.labels,
            forward=self.forward_meter,
            backward=self.backward_meter,
            dp=[stage.sync.meter for stage in self.stages.values()],
            stop_wishes=asks.stop,
            save_wishes=asks.save,
            save_failures=asks.report,
        )
        peak = torch.tensor([self.job.streams.peak_memory_bytes()], dtype=torch.float64)
        rows = gather.rows(torch.cat([share.tensor(), squared_norm(self.weights), peak]))
        log.info("waited %.3f s of %.3f s in which something was in flight", share.waited_s, share.in_flight_s)
        by_replica = rows.view(topology.replicas, topology.stages, -1)
        return _Told(
            sums=Totals(*rows[:, :-2].sum(0).tolist()),
            targets=by_replica[:, :, Totals._fields.index("targets")].sum(1).tolist(),
            squared=by_replica[:, :, -2].sum(1).tolist(),
            peak_bytes=int(by_replica[topology.replica, :, -1].max()),
        )

    def _update(self, step: int, norm: float, factor: float) -> None:
        """Change the weights by the gradients times `factor`, clipped; norm: of the gradients times `factor`."""
        scale_gradients_(self.weights, factor * clip_factor(norm, self.job.config.optim.clip))
        self.optimizer.step(step, **(self._local_step(step) or LocalStep())._asdict())
        for stage in self.stages.values():
            stage.sync.after_step(step, self.optimizer.second_moments(stage.weights))

    def _explain(self, batch: Batch, step: int, scale: float, loss: float, norm: float) -> str:
        """Make the step again, watching every layer, and say where its loss or gradients stop being finite."""
        fault = self.pipeline.find_non_finite(batch, step, scale)
        found = None
        if fault is not None:
            micro = None if fault.micro is None else fault.micro - self.job.micros.start
            ids = batch.sample_ids if micro is None else batch.sample_ids[micro]
            found = {"fault": fault.to_dict(), "ids": ids.flatten().tolist()}
        said = self.groups.all_gather_text(f"fault {step}", json.dumps(found), timeout_s=self.job.config.run.timeout)
        found_by = {NonFiniteTensor.from_dict(each["fault"]): each["ids"] for each in map(json.loads, said) if each}
        what = f"step {step + 1}: loss {loss:g}, gradient norm {norm:g}"
        if not found_by:
            return f"{what}; made again, it was finite: suspect the hardware or a norm beyond fp32; start again"
        first = first_non_finite(list(found_by))
        return (
            f"{what}; first in {first}, samples {found_by[first]}; no weight has changed and checkpoints are as they "
            "were; try a smaller optim.lr, or --optim.on_nan skip to leave such updates out"
        )

    def _full_targets(self) -> int:
        return self.job.config.data.batch * self.job.config.data.sequence


@contextlib.contextmanager
@torch.no_grad()
def shared_weights(stages: Iterable[Stage]) -> Iterator[None]:
    """Let the parameters of stages be, within, what all replicas have in common. All replicas call it together."""
    kept = []
    for stage in stages:
        shared = stage.sync.global_weights()
        if shared is not None:
            kept += [(weight.param, weight.param.clone()) for weight in stage.weights]
            for weight in stage.weights:
                weight.param.copy_(shared[weight.key])
    try:
        yield
    finally:
        for param, own in kept:
            param.copy_(own)


def _or_inf(norm: float) -> float:
    return math.inf if math.isnan(norm) else norm
