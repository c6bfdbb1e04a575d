"""Loss and bytes of ways to compress updates that acsgd does not have, simulated with all replicas in one process:

    python -m benchmarks.replicas.simulated --pretrain a.txt --finetune b.txt [--rows MODE ...] [--until 150]

The runs are those of `replicas.loss --task scratch`: initial weights, batches, AdamW, clipping and learning rate; by
default with half of the width. The second-moment correction is exact in every step, row by row, and its bytes are not
counted. Messages are encoded with the codecs of acsgd, and counted without frames. With --until runs are cut, and the
learning rate is then still high.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.lloyd import Lloyd
from acsgd.codecs.message import PackedCodec
from acsgd.codecs.topk import TopK
from acsgd.config.options import OptimConfig
from acsgd.config.ranges import Range
from acsgd.config.spec import from_spec
from acsgd.dp.exchange.averaging import split_evenly
from acsgd.dp.exchange.second_moments import by_rows
from acsgd.io.data.batches import Dataset
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.optim.gradient_scale import clip_factor
from acsgd.optim.schedule import learning_rate
from acsgd.run.plan.job import prepare
from acsgd.run.setup.data import open_data
from benchmarks.common.tuning import Tuning, Variant
from benchmarks.pipeline.convergence import texts
from benchmarks.replicas.ddp import make_model, summed_loss
from benchmarks.replicas.loss import TASKS

REPLICAS = 4
RING = 2 * (REPLICAS - 1) / REPLICAS
"""Messages of a whole vector that a replica sends in an all-reduce, and in an exchange through the owners of parts."""
HEAD = 32
"""Width of an attention head."""
GROUP = 128
"""Values that share a scale."""
MOMENTUM, MUON_MOMENTUM = 0.9, 0.95
split = partial(split_evenly, count=REPLICAS)


@dataclass(frozen=True)
class AllReduce:
    """Exact mean of the gradients."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """As in `Local`."""


@dataclass(frozen=True)
class Local:
    """Local steps, then a step with Nesterov momentum on the mean change, as in `diloco`."""

    optimizer: Literal["adamw", "muon"] = "muon"
    """Optimizer of the local steps. muon is for the matrices of blocks, as in MuLoCo (Therien et al. 2025)."""
    inner: Annotated[int, Range(1, 10000)] = 37
    """Number of local steps between two exchanges. The last step is followed by one, too."""
    bits: Annotated[int, Range(1, 8)] = 2
    """Bits per value."""
    outer_lr: float = 1.0
    """Learning rate of the outer optimizer."""
    momentum: float = 0.4
    """Momentum of the outer optimizer."""
    redundant_steps: Annotated[int, Range(0, 10000)] = 0
    """Number of first steps in which each replica computes the gradients of all, so that nothing has to be sent. With
    all steps this is an all-reduce."""
    moment_correction: bool = True
    """Whether second moments are corrected, with exact statistics, where the optimizer has some."""


@dataclass(frozen=True)
class Updates:
    """Updates of AdamW from the common weights, with error feedback, as in `cocktail_grad`, and variants of it."""

    topk: float = 0.005
    """Fraction of coordinates sent per exchange, in both directions; 0 = none."""
    bits: Annotated[int, Range(2, 8)] = 2
    """Bits per value."""
    importance: float = 0.0
    """Exponent of the second moment by which magnitudes are multiplied to select coordinates. 0 = magnitudes alone."""
    decay: float = 1.0
    """Decay of a replica's residual per exchange."""
    rank: int = 0
    """Rank of the factors that are sent of each matrix before coordinates are, one side per step. 0 = none."""
    factor_bits: int = 3
    """Bits per value of the factors."""
    local: float = 0.0
    """Fraction of its residual that a replica adds to the weights on which it computes gradients."""
    inner: int = 1
    """Number of local steps between two exchanges."""
    momentum: bool = False
    """Whether AdamW has its first moment."""
    vectors: float = 0.1
    """Fraction of norms and biases that is sent where rank > 0, in 2 bits."""


MODES: dict[str, type] = {"exact": AllReduce, "local_steps": Local, "updates": Updates}
ROWS = (
    "exact",
    "updates:topk=0.015",
    "updates:topk=0.005,importance=0.25",
    "updates:topk=0.0025,importance=0.25,rank=2",
    "local_steps:optimizer=adamw",
    "local_steps:optimizer=adamw,inner=30,redundant_steps=60",
    "exact:optimizer=muon",
    "local_steps",
    "local_steps:inner=30,redundant_steps=60",
)


class Result(NamedTuple):
    """Outcome of a run."""

    losses: list[float]
    """Mean over the replicas, by step."""
    held_out: float
    sent: float
    """Bytes per step and replica."""


class Sent(NamedTuple):
    """Decoded elements of a message, and its length."""

    positions: Tensor
    values: Tensor
    nbytes: int


def send_largest(x: Tensor, scores: Tensor, codec: TopK) -> Sent:
    """Encode the elements of x [n] with the largest |x| * score, and subtract what is decoded from x, in place."""
    message, positions = codec.encode_kept(x * scores)
    quantizer = Lloyd(codec.bits, "group", min(GROUP, len(positions)))
    kept = x[positions]
    values = quantizer.decode(quantizer.encode(kept), tuple(kept.shape), torch.float32)
    x[positions] -= values
    return Sent(positions, values, len(message))


Example = tuple[Tensor, Tensor]
"""Tokens and labels [B, T] of a step of one replica."""


def example_of(batch: Batch) -> Example:
    """Return tokens and labels of a batch of one micro-batch."""
    assert batch.inputs is not None
    assert batch.labels is not None
    return batch.inputs["input_ids"][0], batch.labels[0]


class Replicas:
    """The model and the batches of all replicas. n = parameters."""

    def __init__(self, tuning: Tuning, seed: int) -> None:
        config = tuning.config(Variant(replicas=REPLICAS), seed)
        jobs = [prepare(config, Launch(rank, rank, REPLICAS)) for rank in range(REPLICAS)]
        self.optim: OptimConfig = config.optim
        self._model = make_model(jobs[0])
        params = list(self._model.parameters())
        self.initial = torch.cat([param.detach().view(-1) for param in params])
        self._weights, self._grads = self.initial.clone(), torch.zeros_like(self.initial)
        self.shapes = [param.shape for param in params]
        for param, weight, grad in zip(params, self.views(self._weights), self.views(self._grads), strict=True):
            param.data, param.grad = weight, grad
        names = [name for name, _ in self._model.named_parameters()]
        self.is_hidden_matrix = [".h." in name and param.dim() == 2 for name, param in zip(names, params, strict=True)]
        self.is_matrix = torch.cat([torch.full((shape.numel(),), len(shape) > 1) for shape in self.shapes])
        rows = [by_rows(view).shape for view in self.views(self.initial)]
        counts = torch.cat([torch.full((count,), length) for count, length in rows])
        self.row_of = torch.arange(len(counts)).repeat_interleave(counts)
        self._counts = counts.float()
        self._batches, self._held_out = list[list[Example]](), list[Example]()
        for job in jobs:
            reader, held_out, *_ = open_data(job)
            assert held_out is not None
            with Dataset(reader, range(self.optim.num_steps)) as batches:
                self._batches.append([*map(example_of, batches)])
            self._held_out += map(example_of, held_out.batches(len(job.micro_ids)))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of a vector [n], one per weight."""
        pieces = flat.split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def row_means(self, flat: Tensor) -> Tensor:
        """Return the mean of each row of a vector [n]."""
        return torch.zeros_like(self._counts).index_add_(0, self.row_of, flat).div_(self._counts)

    def gradient(self, weights: Tensor, replica: int, step: int) -> tuple[float, Tensor]:
        """Return loss and gradient [n] of a replica's batch at the weights [n]."""
        self._weights.copy_(weights)
        self._grads.zero_()
        tokens, labels = self._batches[replica][step]
        loss = summed_loss(self._model(tokens, use_cache=False).logits, labels) / labels.numel()
        loss.backward()
        return loss.item(), self._grads.clone()

    @torch.no_grad()
    def held_out_loss(self, weights: Tensor) -> float:
        """Return the mean loss over the held-out tokens at the weights [n]."""
        self._weights.copy_(weights)
        losses = [summed_loss(self._model(x, use_cache=False).logits, y).item() for x, y in self._held_out]
        return sum(losses) / sum(labels.numel() for _, labels in self._held_out)

    def clipped(self, grad: Tensor) -> Tensor:
        """Clip a gradient [n] in place."""
        return grad.mul_(clip_factor(grad.norm().item(), self.optim.clip))

    def update(self, step: int, weights: Tensor, grad: Tensor, second: Tensor) -> Tensor:
        """Return the update [n] of AdamW. grad: with or without momentum, corrected; second: second moments."""
        rate, beta2 = learning_rate(step, self.optim), self.optim.betas[1]
        root = (second / (1 - beta2 ** (step + 1))).sqrt_().add_(self.optim.eps)
        decayed = weights * self.is_matrix * self.optim.weight_decay
        return grad.div(root).add_(decayed).mul_(-rate)


class LocalTraining:
    """Training with local steps. [R, n] = of all replicas."""

    def __init__(self, mode: Local, replicas: Replicas) -> None:
        self._mode, self._replicas = mode, replicas
        self._codec = PackedCodec(FixPoint(mode.bits, dims="group", group=GROUP))
        self._shared = replicas.initial.clone()
        self._changes, self._first, self._second = torch.zeros(3, REPLICAS, len(self._shared))
        self._momentum = torch.zeros_like(self._shared)
        self._shares = Shares(replicas)
        self._sent = 0.0

    def train(self, until: int) -> Result:
        """Run the steps."""
        losses = [self._step(step, is_last=step + 1 == until) for step in range(until)]
        return Result(losses, self._replicas.held_out_loss(self._shared), self._sent / until)

    @torch.no_grad()
    def _step(self, step: int, *, is_last: bool) -> float:
        mode, replicas = self._mode, self._replicas
        at = [self._shared + change for change in self._changes]
        with torch.enable_grad():
            computed = [replicas.gradient(weights, replica, step) for replica, weights in enumerate(at)]
        grads = torch.stack([grad for _, grad in computed])
        if is_redundant := step < mode.redundant_steps:
            grads = grads.mean(0).expand_as(grads)
        grads = torch.stack([replicas.clipped(grad.clone()) for grad in grads])
        shares = self._shares.after(grads) if mode.moment_correction else torch.ones_like(self._shared)
        self._second.mul_(replicas.optim.betas[1]).add_(grads.square() * shares, alpha=1 - replicas.optim.betas[1])
        momentum = self._momenta(grads)
        for change, weights, grad, first, second in zip(self._changes, at, grads, momentum, self._second, strict=True):
            update = replicas.update(step, weights, first / (1 - MOMENTUM ** (step + 1)), second)
            change += self._with_muon(step, update, weights, grad, first) if mode.optimizer == "muon" else update
        if is_redundant:
            self._shared += self._changes[0]
            self._changes.zero_()
        elif (step + 1 - mode.redundant_steps) % mode.inner == 0 or is_last:
            self._exchange()
        return fmean(loss for loss, _ in computed)

    def _momenta(self, grads: Tensor) -> Tensor:
        """Return the means of gradients after others [R, n]: those of AdamW, and for hidden matrices those of Muon."""
        decay = torch.full_like(self._shared, MOMENTUM)
        if self._mode.optimizer == "muon":
            for view, hidden in zip(self._replicas.views(decay), self._replicas.is_hidden_matrix, strict=True):
                view.fill_(MUON_MOMENTUM if hidden else MOMENTUM)
        return self._first.mul_(decay).add_(grads * (1 - decay))

    def _with_muon(self, step: int, update: Tensor, weights: Tensor, grad: Tensor, momentum: Tensor) -> Tensor:
        """Return an update [n] with Muon's of the hidden matrices, as torch has it with "match_rms_adamw"."""
        replicas, rate = self._replicas, learning_rate(step, self._replicas.optim)
        views = zip(*map(replicas.views, (update, weights, grad, momentum)), replicas.is_hidden_matrix, strict=True)
        for changed, weight, direction, mean, hidden in views:
            if hidden:
                length = rate * 0.2 * max(weight.shape) ** 0.5
                changed.copy_(orthogonalized(direction.lerp(mean, MUON_MOMENTUM)).mul_(-length))
                changed.sub_(weight, alpha=rate * replicas.optim.weight_decay)
        return update

    def _exchange(self) -> None:
        """Exchange the changes and apply the outer step."""
        mode = self._mode
        mean = self._sent_as(torch.stack([self._sent_as(change) for change in self._changes]).mean(0))
        self._momentum.mul_(mode.momentum).add_(mean)
        self._shared.add_(mean.add_(self._momentum, alpha=mode.momentum), alpha=mode.outer_lr)
        self._changes.zero_()

    def _sent_as(self, x: Tensor) -> Tensor:
        """Return what is decoded of a vector [n], and count the message."""
        message = self._codec.encode(x)
        self._sent += RING * len(message) / (REPLICAS + 1)
        return self._codec.decode(message, len(x))


def orthogonalized(x: Tensor) -> Tensor:
    """Return the orthogonal factor of a matrix, nearly: torch's Newton-Schulz iteration of Muon, but in fp32.

    On CPUs without products in bf16, torch's own takes ten times as long.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.t() if len(x) > x.shape[1] else x
    wide = wide / wide.norm().clamp_min(1e-7)
    for _ in range(5):
        product = wide @ wide.t()
        wide = a * wide + (b * product + c * product @ product) @ wide
    return wide.t() if len(x) > x.shape[1] else wide


class Shares:
    """Of each row, the squared mean gradient relative to the mean of squares, over all steps so far."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._squares = torch.zeros(2, len(replicas.row_means(replicas.initial)))
        """Sums over the steps of the row means of the squared mean gradient, and of the mean of squares."""

    def after(self, grads: Tensor) -> Tensor:
        """Add the gradients [R, n] of a step; return the shares, [n]."""
        rows = self._replicas.row_means
        self._squares += torch.stack([rows(grads.mean(0).square()), rows(grads.square().mean(0))])
        return (self._squares[0] / self._squares[1]).nan_to_num_(1.0)[self._replicas.row_of]


class UpdateTraining:
    """Training with compressed updates. [R, n] = of all replicas."""

    def __init__(self, mode: Updates, replicas: Replicas) -> None:
        self._mode, self._replicas = mode, replicas
        self._weights = replicas.initial.clone()
        n = len(self._weights)
        self._residuals, self._local, self._first, self._second = torch.zeros(4, REPLICAS, n)
        self._server_residual = torch.zeros(n)
        self._shares = Shares(replicas)
        generator = torch.Generator().manual_seed(0)
        self._bases = {
            index: torch.randn(shape[1], mode.rank, generator=generator)
            for index, shape in enumerate(replicas.shapes)
            if mode.rank and len(shape) > 1
        }
        self._has_left = False
        """Whether the bases are of the columns, so that the next factors have a row for each column of a matrix."""
        self._sent = 0.0

    def train(self, until: int) -> Result:
        """Run the steps."""
        losses = [self._step(step) for step in range(until)]
        return Result(losses, self._replicas.held_out_loss(self._weights), self._sent / until)

    @torch.no_grad()
    def _step(self, step: int) -> float:
        mode, replicas = self._mode, self._replicas
        at = [self._weights + x for x in self._local + mode.local * self._residuals]
        with torch.enable_grad():
            computed = [replicas.gradient(weights, replica, step) for replica, weights in enumerate(at)]
        grads = torch.stack([replicas.clipped(grad) for _, grad in computed])
        shares = self._shares.after(grads)
        self._second.mul_(replicas.optim.betas[1]).add_(grads.square() * shares, alpha=1 - replicas.optim.betas[1])
        if mode.momentum:
            self._first.lerp_(grads, 1 - MOMENTUM)
            grads = self._first / (1 - MOMENTUM ** (step + 1))
        for local, weights, grad, second in zip(self._local, at, grads, self._second, strict=True):
            local += replicas.update(step, weights, grad, second)
        if (step + 1) % mode.inner == 0:
            self._residuals.mul_(mode.decay).add_(self._local)
            self._local.zero_()
            if mode.rank:
                self._exchange_factors()
            if mode.topk:
                self._exchange_coordinates()
        return fmean(loss for loss, _ in computed)

    def _exchange_coordinates(self) -> None:
        """Exchange the largest coordinates through the owners of parts, and apply the mean."""
        codec = TopK(self._mode.topk, self._mode.bits, GROUP)
        scores = self._second.pow(self._mode.importance)
        residuals, scores_of = (zip(*map(split, x), strict=True) for x in (self._residuals, scores))
        parts = zip(residuals, scores_of, split(self._server_residual), split(self._weights), strict=True)
        for owner, (of_replicas, score, server_residual, weights) in enumerate(parts):
            for replica, residual in enumerate(of_replicas):
                sent = send_largest(residual, score[replica], codec)
                server_residual.index_add_(0, sent.positions, sent.values, alpha=1 / REPLICAS)
                self._sent += sent.nbytes * (replica != owner) / REPLICAS
            sent = send_largest(server_residual, score[owner], codec)
            weights.index_add_(0, sent.positions, sent.values)
            self._sent += sent.nbytes * (REPLICAS - 1) / REPLICAS

    def _exchange_factors(self) -> None:
        """Exchange one factor of each matrix given the basis of the other side, and apply the product.

        The sides alternate as in ACP-SGD (Zhang et al. 2023). All replicas subtract the same product, so the mean of
        their residuals keeps all that was not sent.
        """
        replicas, codec = self._replicas, PackedCodec(Lloyd(self._mode.factor_bits, "group", GROUP))
        bases = {index: torch.linalg.qr(basis).Q for index, basis in self._bases.items()}
        sides = [{i: x.t() if self._has_left else x for i, x in enumerate(replicas.views(r))} for r in self._residuals]
        flat = [torch.cat([(side[i] @ basis).t().reshape(-1) for i, basis in bases.items()]) for side in sides]
        mean = torch.stack([codec.decode(codec.encode(x), len(x)) for x in flat]).mean(0)
        mean = codec.decode(codec.encode(mean), len(mean))
        self._sent += RING * codec.max_bytes(len(mean))
        change = torch.zeros_like(self._weights)
        factors = mean.split([len(sides[0][i]) * self._mode.rank for i in bases])
        for (i, basis), factor in zip(bases.items(), factors, strict=True):
            self._bases[i] = factor.view(self._mode.rank, -1).t()
            product = self._bases[i] @ basis.t()
            replicas.views(change)[i].copy_(product.t() if self._has_left else product)
        self._has_left = not self._has_left
        self._residuals -= change
        self._weights += change
        self._exchange_vectors()

    def _exchange_vectors(self) -> None:
        """Exchange the largest elements of norms and biases; the mean is not compressed again, but counted as if."""
        where = self._replicas.is_matrix.logical_not().nonzero()[:, 0]
        for residual in self._residuals:
            x = residual[where]
            sent = send_largest(x, torch.ones_like(x), TopK(self._mode.vectors, 2, GROUP))
            residual[where] = x
            self._weights.index_add_(0, where[sent.positions], sent.values, alpha=1 / REPLICAS)
            self._sent += RING * sent.nbytes / REPLICAS


def train(mode: object, replicas: Replicas, until: int) -> Result:
    """Run a mode to step `until`."""
    if isinstance(mode, Updates):
        return UpdateTraining(mode, replicas).train(until)
    if isinstance(mode, Local):
        return LocalTraining(mode, replicas).train(until)
    assert isinstance(mode, AllReduce)
    result = LocalTraining(Local(mode.optimizer, redundant_steps=until), replicas).train(until)
    return result._replace(sent=RING * 4 * len(replicas.initial))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS, help="modes; options are the fields of Updates and Local")
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[1.0, 2.0], help="learning rates, as in replicas.loss"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=64, help="width of the model; 128 is that of replicas.loss")
    parser.add_argument("--steps", type=int, default=150, help="steps per epoch")
    parser.add_argument("--until", type=int, help="step after which runs are cut; all by default")
    parser.add_argument("--pretrain", required=True, help="text of the tokenizer, as in data.sources")
    parser.add_argument("--finetune", required=True, help="text of the runs, as in data.sources")
    parser.add_argument("--dir", type=Path, default=Path("runs/benchmarks/replicas"), help="model and text")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/replicas_simulated.json"))
    return parser.parse_args()


def main() -> None:
    """Run all rows, print and save the results."""
    options, console = parse_arguments(), Console(width=160)
    modes = {mode: from_spec(mode, MODES, key="--rows") for mode in options.rows}
    torch.set_num_threads(1)
    heads = options.hidden // HEAD
    setting = replace(TASKS["scratch"].setting(options.steps), hidden=options.hidden, heads=heads)
    options.dir.mkdir(parents=True, exist_ok=True)
    pretrain, finetune = texts(options.pretrain, options.finetune)
    tuning = Tuning.open(options.dir, setting, pretrain=pretrain, finetune=finetune)
    replicas = Replicas(tuning, options.seed)
    until, rows = min(options.until or replicas.optim.num_steps, replicas.optim.num_steps), []
    for rate in options.rates:
        replicas.optim = replace(replicas.optim, lr=setting.lr * rate)
        for mode, parsed in modes.items():
            started = time.monotonic()
            result = train(parsed, replicas, until)
            rows.append({"mode": mode, "rate": rate, **result._asdict()})
            seconds = f"{time.monotonic() - started:.0f} s"
            console.print(f"{mode}, rate x {rate:g}: held-out loss {result.held_out:.4f}, {seconds}", highlight=False)
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps({"hidden": options.hidden, "until": until, "rows": rows}, indent=1))
    console.print(table(rows, exact_bytes=RING * 2 * len(replicas.initial)))


def table(rows: Sequence[dict[str, Any]], exact_bytes: float) -> Table:
    """Return a table of the results, one run per row. exact_bytes: per step, of all-reduce in fp16."""
    shown = Table()
    for name in ("mode", "rate", "loss of steps up to 50", "up to 100", "last 25", "held-out", "fewer"):
        shown.add_column(name, no_wrap=name == "mode")
    for row in rows:
        losses = row["losses"]
        means = [fmean(each or [math.nan]) for each in (losses[25:50], losses[75:100], losses[-25:])]
        numbers = [f"{mean:.3f}" for mean in (*means, row["held_out"])]
        shown.add_row(row["mode"], f"{row['rate']:g}", *numbers, f"{exact_bytes / row['sent']:.3g} x")
    return shown


if __name__ == "__main__":
    main()
