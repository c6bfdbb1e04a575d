"""One rank's stages, pipeline and optimizer, and the parts of a training step that they carry out."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from acsgd.comm.waits import Meter
from acsgd.dp.peers import Peers
from acsgd.groups import Groups
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.telemetry.record import StepRecord
from acsgd.layers.batch import Batch
from acsgd.optim.base import LocalStep, Optimizer
from acsgd.optim.gradient_scale import clip_factor, scale_gradients_, squared_norm
from acsgd.optim.ownership import OwnedWeights
from acsgd.pp.nan_probe import NonFiniteTensor, first_non_finite
from acsgd.pp.runtime import Pipeline
from acsgd.pp.stage import Stage
from acsgd.pp.wire.cache import ActivationCache
from acsgd.pp.wire.cache_plan import CacheKey
from acsgd.run import report
from acsgd.run.evaluation import Evaluation
from acsgd.run.plan.job import Job
from acsgd.run.report import Report, StepSummary
from acsgd.shards.load import LoadedLayer
from acsgd.shards.weights import Weight

log = logging.getLogger(__name__)


class StepResult(NamedTuple):
    """Result of one optimizer step, equal on all ranks."""

    loss: float
    """Mean over the target tokens of the global batch, before the update; NaN if it has none."""
    grad_norm: float
    """Global gradient norm before clipping; in a local step, the largest of all replicas."""
    lr: float
    updated: bool
    """Whether the weights changed."""
    progress: Progress
    """Progress after the step."""
    summary: StepSummary
    schedule_bubble: float = 0.0
    """Idle share of the ranks of a pipeline by the schedule alone."""
    token_flops: float = 0.0
    """Arithmetic operations of the model per token, see `RunModel`."""
    device_memory_bytes: int = 0
    """See `StepRecord`."""
    copies: int = 1
    """See `Session.copies`."""

    def record(self, step_s: float) -> StepRecord:
        """Return the line of metrics.jsonl for this step, without what follows the update. step_s: its duration."""
        summary, progress, in_flight_s = self.summary, self.progress, self.summary[report.IN_FLIGHT_S]
        waited_s = sum(summary[field] for field in report.WAITS)
        tokens_per_s = summary[report.TOKENS] / self.copies / step_s
        model_flops, peak_flops = self.token_flops * tokens_per_s, summary[report.PEAK_FLOPS]
        return StepRecord(
            step=progress.step,
            loss=self.loss if math.isfinite(self.loss) else None,
            tokens=progress.tokens,
            tokens_per_s=tokens_per_s,
            targets_per_s=summary[report.TARGETS] / self.copies / step_s,
            step_s=step_s,
            lr=self.lr,
            grad_norm=self.grad_norm if math.isfinite(self.grad_norm) else None,
            pp_forward_bytes=int(summary[report.PP_FORWARD_BYTES]),
            pp_backward_bytes=int(summary[report.PP_BACKWARD_BYTES]),
            tied_bytes=int(summary[report.TIED_BYTES]),
            dp_bytes=int(summary[report.DP_BYTES]),
            hidden_share=1.0 - waited_s / in_flight_s if in_flight_s else 1.0,
            peak_memory_bytes=int(summary[report.PEAK_MEMORY_BYTES][0]),
            skipped=progress.skipped,
            loss_scale=progress.loss_scale.value,
            data_wait_s=summary[report.DATA_WAIT_S],
            schedule_bubble=self.schedule_bubble,
            device_tokens_per_s=tokens_per_s / summary.num_ranks,
            mfu=model_flops / peak_flops if model_flops and peak_flops else None,
            device_memory_bytes=self.device_memory_bytes,
            ranks=summary.by_rank(),
        )


class Computed(NamedTuple):
    """What one rank has computed in a step before ranks report."""

    loss: float
    """Part of the loss that backward started from, without the loss scale."""
    squared_norm: float
    """Of the gradients as backward left them."""
    seconds: float
    """Time without waits for other ranks."""


@dataclass
class Session:
    """Everything one rank trains with. Built by `build_session`; `close` it at the end."""

    job: Job
    """Another one after a change of the data-parallel mode; all else stays."""
    groups: Groups
    peers: Peers
    stages: dict[int, Stage]
    owned: OwnedWeights
    """What this rank owns of the weights of all of its stages."""
    pipeline: Pipeline
    optimizer: Optimizer
    forward_meter: Meter
    """Transfers of activations."""
    backward_meter: Meter
    """Transfers of activation gradients."""
    tied_meter: Meter
    """Transfers for tied weights."""
    caches: Mapping[CacheKey, ActivationCache]
    """Activation caches of the links of this rank."""

    @property
    def weights(self) -> Sequence[Weight]:
        """The weights of all stages of this rank."""
        return self.owned.weights

    def describe(self) -> str:
        """Return what computes the layers, for the user."""
        model = next(iter(self.stages.values())).composed.model
        compiled = ", blocks compiled by torch.compile" if self.job.config.model.compile else ""
        return f"attention: {model.config._attn_implementation}{compiled}"

    @property
    def layers(self) -> list[LoadedLayer]:
        """The layers of all stages of this rank."""
        return [layer for stage in self.stages.values() for layer in stage.layers]

    def forward_backward(self, batch: Batch, step: int, loss_scale: float) -> Computed:
        """Run forward, backward and the data-parallel reduce of a step, as the pipeline's program orders them.

        Leaves gradients times `loss_scale` in the masters. Waits for the device at the end, once.
        """
        started, waited_before_s = time.perf_counter(), self._waited_s()
        loss = self.pipeline.run(batch, step, loss_scale)
        loss_part, square = self.job.streams.read([loss, squared_norm(self.owned.of(self.weights))])
        return Computed(loss_part, square, time.perf_counter() - started - (self._waited_s() - waited_before_s))

    def report(self, computed: Computed, batch: Batch) -> Report:
        """Return this rank's report of a step, and reset the meters."""
        meters = [meter for _, meter in self.meters()]
        numbers: Report = {
            report.LOSS: computed.loss,
            report.TARGETS: 0.0 if batch.labels is None else float(self.job.model.task.num_targets(batch.labels)),
            report.TOKENS: 0.0 if batch.labels is None else float(batch.num_tokens),
            report.REPLICA_SQUARED_NORMS: computed.squared_norm,
            report.PP_FORWARD_BYTES: self.forward_meter.sent_bytes,
            report.PP_BACKWARD_BYTES: self.backward_meter.sent_bytes,
            report.TIED_BYTES: self.tied_meter.sent_bytes,
            report.DP_BYTES: sum(stage.sync.meter.sent_bytes for stage in self.stages.values()),
            report.IN_FLIGHT_S: sum(meter.in_flight_s for meter in meters),
            report.PP_FORWARD_WAIT_S: self.forward_meter.waited_s,
            report.PP_BACKWARD_WAIT_S: self.backward_meter.waited_s,
            report.TIED_WAIT_S: self.tied_meter.waited_s,
            report.DP_WAIT_S: sum(stage.sync.meter.waited_s for stage in self.stages.values()),
            report.PEAK_MEMORY_BYTES: self.job.streams.peak_memory_bytes(),
            report.DATA_WAIT_S: batch.wait_s,
            report.CHECKSUM: float(batch.checksum),
            report.PEAK_FLOPS: self.job.streams.peak_flops(self.job.shapes.dtype),
            report.MICROS: float(len(batch.micro_ids)),
            report.COMPUTE_S: computed.seconds,
        }
        log.info("waited %.3f s of %.3f s with transfers in flight", self._waited_s(), numbers[report.IN_FLIGHT_S])
        for meter in meters:
            meter.reset()
        return numbers

    def copies(self, summary: StepSummary) -> int:
        """Return how many replicas, or domains, have computed each micro-batch of a step: 1 unless it was redundant."""
        return max(1, round(summary[report.ALL_MICROS] / self.job.shapes.num_micros))

    def meters(self) -> list[tuple[str, Meter]]:
        """Return all meters of this rank, each with what its transfers are."""
        pipeline = {
            "activations": self.forward_meter,
            "gradients": self.backward_meter,
            "tied weights": self.tied_meter,
        }
        return [*pipeline.items(), *(("replicas", stage.sync.meter) for stage in self.stages.values())]

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Record the time of a part of the step, if the step is traced."""
        return contextlib.nullcontext() if self.pipeline.trace is None else self.pipeline.trace.span("phase", name)

    def _waited_s(self) -> float:
        """Return the time of waits for other ranks since the last report, seconds."""
        return sum(meter.waited_s for _, meter in self.meters())

    def local_step(self, step: int) -> LocalStep | None:
        """Return how each replica steps on its own gradients, the same on all stages; None if gradients are summed."""
        steps = [stage.sync.local_step(step) for stage in self.stages.values()]
        if (first := steps[0]) is None:
            return None
        return first._replace(shares={key: share for each in steps if each for key, share in each.shares.items()})

    def send_ahead(self) -> None:
        """Send the first rows of the next step from the tables that this step has updated. Does not wait."""
        self.pipeline.send_ahead()

    def settle(self) -> None:
        """Wait for the rows that `send_ahead` sends, for the next step. All ranks of a pipeline call it together."""
        self.pipeline.settle()

    def discard_ahead(self) -> None:
        """Forget the rows that `send_ahead` has sent: the weights have changed. All ranks of a pipeline call it."""
        self.pipeline.discard_ahead()

    def scale_and_clip(self, factor: float, norm: float) -> None:
        """Multiply the gradients by `factor`, then clip them; norm: that of the gradients times `factor`."""
        scale_gradients_(self.owned.of(self.weights), factor * clip_factor(norm, self.job.config.optim.clip))

    def commit(self) -> None:
        """Apply what data parallelism has received in this step. Called once all ranks have reported it."""
        for stage in self.stages.values():
            stage.sync.commit()

    def schedule_bubble(self, copies: int) -> float:
        """Return the idle share of the ranks of a pipeline by the schedule alone, if micro-batches are dealt evenly.

        copies: see `copies`.
        """
        micros = len(self.job.micro_ids) * copies
        return float(self.job.plugins.schedule.bubble(self.job.topology.stages, micros)) if micros else 0.0

    def exchanges_after(self, step: int) -> bool:
        """Return whether the weights after step `step` depend on an exchange that follows it."""
        return any(stage.sync.exchanges_after(step) for stage in self.stages.values())

    def exchanges_without_update(self, step: int) -> bool:
        """Return whether an exchange follows step `step` even if its update is skipped."""
        return any(stage.sync.exchanges_without_update(step) for stage in self.stages.values())

    def sync_after_step(self, step: int) -> None:
        """Run the part of data-parallel synchronization that follows the optimizer step.

        Changes nothing that lasts before the last message of all stages has arrived, so that it can be run again.
        """
        for stage in self.stages.values():
            stage.sync.exchange(step, self.optimizer.second_moments(self.owned.of(stage.weights)))
        self.sync_alone(step)

    def share_parts(self) -> None:
        """Share the parts of the weights that replicas own, once they have changed. All replicas call it together.

        It changes nothing of what this rank owns. So it can be left out, if it is called again before the weights are
        used.
        """
        if self.owned.ownership.parts is None:
            return
        with self.phase("share parts of weights"):
            for stage in self.stages.values():
                stage.sync.share_parts()

    def sync_alone(self, step: int) -> None:
        """Complete step `step` without other replicas. They may have exchanged something if `exchanges_after`."""
        for stage in self.stages.values():
            stage.sync.after_step(step, self.optimizer.second_moments(self.owned.of(stage.weights)))

    def evaluate(self, batches: Iterable[Batch], step: int) -> dict[str, float]:
        """Return the metrics of the batches of all replicas by name, without dropout. The loss is the first.

        Uses the global weights where replicas have local ones, and averages where the optimizer has some. step: for
        error messages only. batches: may raise what ends the evaluation, on all ranks together.
        """
        evaluation, sent_bytes = (
            Evaluation(self.job.metrics, self.groups, self.job.model.task.num_targets),
            self.tied_meter.sent_bytes,
        )
        try:
            with _evaluated_weights(self):
                for batch in batches:
                    part = self.pipeline.evaluate(batch, step)
                    evaluation.add(part, batch.labels)
        finally:
            self.forward_meter.reset()  # the reported bytes of a step are those of training
            self.tied_meter.reset()
            self.tied_meter.sent_bytes = sent_bytes  # of rows that are on their way to the next step
        return evaluation.compute()

    def explain_non_finite(self, batch: Batch, step: int, loss_scale: float, *, loss: float, grad_norm: float) -> str:
        """Run a step again with every layer watched; return an error message that names the first non-finite tensor.

        Every rank calls it with its own batch of the step; all return the same message.
        """
        tensor = self.pipeline.find_non_finite(batch, self.owned, step, loss_scale)
        found = None
        if tensor is not None:
            micro = None if tensor.micro is None else tensor.micro - batch.micro_ids.start
            ids = batch.sample_ids if micro is None else batch.sample_ids[micro]
            found = {"tensor": tensor.to_dict(), "ids": ids.flatten().tolist()}
        timeout_s = self.job.config.run.timeout
        texts = self.groups.all_gather_text("finding a non-finite tensor", json.dumps(found), timeout_s=timeout_s)
        reports = [report for report in map(json.loads, texts) if report]
        ids_of = {NonFiniteTensor.from_dict(report["tensor"]): report["ids"] for report in reports}
        summary = f"step {step + 1}: loss {loss:g}, gradient norm {grad_norm:g}"
        if not ids_of:
            return (
                f"{summary}; the same step run again is finite: suspect the hardware, or a gradient norm beyond fp32; "
                "start the run again"
            )
        first = first_non_finite(list(ids_of))
        return (
            f"{summary}; first in {first}, samples {ids_of[first]}; weights and checkpoints are unchanged; "
            "use a smaller optim.lr, or --optim.on_nan skip to skip such updates"
        )

    def close(self) -> None:
        """End all threads, and wait until activation caches on disk are saved."""
        self.pipeline.close()
        self.close_stages()

    def close_stages(self) -> None:
        """End the threads that fetch parameters, and let go of where these lie, as when others replace the stages."""
        for stage in self.stages.values():
            stage.close()

    def abort(self, reason: str) -> None:
        """End the threads and drop all messages, without waiting for any rank. Call it in the training thread.

        Interrupts the groups. Weights, optimizer state, the state of the data-parallel mode and activation caches stay
        as they are; they may be in the middle of an update if the error came from there.
        """
        self.groups.interrupt(reason)
        self.peers.close()
        self.pipeline.abort()


@contextlib.contextmanager
@torch.no_grad()
def _evaluated_weights(session: Session) -> Iterator[None]:
    """Load the weights to evaluate into the parameters, where others are trained; restore these on exit. A collective.

    They are the global weights where replicas have local ones, and the masters if the optimizer averages.
    """
    restore, changed = list[Callable[[], object]](), list[Stage]()
    try:
        for stage in session.stages.values():
            shared, weights = stage.sync.global_weights(), session.owned.of(stage.weights)
            if shared is not None:
                restore += [partial(weight.param.copy_, weight.param.clone()) for weight in weights]
            elif session.job.plugins.optimizer.averages:
                shared = {weight.key: weight.master for weight in weights}
                copy = session.optimizer.copy_trained
                restore += [partial(copy, weight, weight.param.detach()) for weight in weights]
            else:
                continue
            for weight in weights:
                weight.param.copy_(shared[weight.key])
            stage.sync.share_parts()
            changed.append(stage)
        yield
    finally:
        for each in restore:
            each()
    for stage in changed:  # not after an error, perhaps of this rank alone
        stage.sync.share_parts()
