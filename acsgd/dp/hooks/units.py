"""What the communication hooks of a model exchange together: parameters, what is owed of them, where it is worked on.

n = elements of a unit; R = replicas. Gradients come as vectors, one per parameter.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from acsgd.codecs.message import MessageCodec
from acsgd.dp.exchange.averaging import parts
from acsgd.dp.exchange.error_feedback import Owed
from acsgd.dp.exchange.local_weights import OWN_ERROR, SERVED_ERROR
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.exchange.second_moments import ROWS, RowMoments
from acsgd.errors import RunError
from acsgd.meter import Meter
from acsgd.optim.adamw import denominator
from acsgd.optim.base import SecondMoments

EPS = 1e-8
"""Added to the root of a second moment, as AdamW does it."""
SECOND_MOMENT = "second_moment"
"""Name under which is saved what gradients are divided by the root of."""
STEPS = "steps"
"""Of how many gradients that is made."""


class Lane:
    """Where the thread of the peers works on a device: in a stream of its own, but on the CPU there are none."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self.devices: list[int | str | torch.device] | None = None if device.type == "cpu" else [device]
        """Of a Future's value, which it orders by their streams."""

    def mark(self) -> torch.Event | None:
        """Mark the present point of the caller's stream; on the CPU everything has happened already."""
        if self._stream is None:
            return None
        return torch.accelerator.current_stream(self._stream.device).record_event()

    @contextlib.contextmanager
    def after(self, marks: Iterable[torch.Event | None]) -> Iterator[None]:
        """Run the body on the device behind some marks."""
        if self._stream is None:
            yield
            return
        with self._stream:
            for mark in marks:
                if mark is not None:
                    self._stream.wait_event(mark)
            yield


class Arrived:
    """A bucket of DDP's, under way."""

    def __init__(self, bucket: dist.GradBucket, lane: Lane) -> None:
        self._buffer = bucket.buffer()
        self._missing = len(bucket.parameters())
        self._failure: Exception | None = None
        self.ready = lane.mark()
        """Behind all that makes the gradients."""
        self._done: Future[Tensor] = Future(devices=lane.devices)
        self.future: Future[Tensor] = self._done.then(self._result)

    def count_down(self, failure: Exception | None) -> None:
        """Take note that one of its parameters has what the replicas agree on, or never will."""
        self._missing -= 1
        self._failure = failure
        if not self._missing:
            self._done.set_result(self._buffer)

    def _result(self, done: Future[Tensor]) -> Tensor:
        if self._failure is not None:  # raised here, it reaches backward as a RuntimeError with the same text
            raise self._failure
        return done.value()


class Unit:
    """Parameters that are exchanged together, and what this replica owes of them."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        peers: Peers,
        compressor: MessageCodec,
        *,
        precondition: float | None,
        moments: bool,
        may_be_idle: bool,
    ) -> None:
        """precondition: decay of second moments; moments: whether these get the size that they have for mean gradients
        (moments.py); may_be_idle: whether a step may leave parameters out."""
        self.params = params
        self.arrived: dict[str, tuple[Tensor, Arrived]] = {}
        """Gradients that wait for the others, with the bucket that each lies in."""
        self.device = next(iter(params.values())).device
        self.steps = dict.fromkeys(params, 0)
        """By parameter, how many gradients its second moment is of."""
        self._peers = peers
        self._compressor = compressor
        self._precondition = precondition
        self._may_be_idle = may_be_idle
        self._owed = Owed(torch.zeros(sum(param.numel() for param in params.values()), device=self.device), peers)
        self._own = self._split(self._owed.own)
        self._second = {} if precondition is None else self._split(torch.zeros_like(self._owed.own))
        self._shaped = {name: x.view(params[name].shape) for name, x in self._second.items() if len(x)}
        """Second moments of parameters with elements, in their shapes; contiguous, however these lie in memory."""
        self._rows = RowMoments(self._shaped, peers) if moments and self._shaped and peers.size > 1 else None

    @torch.no_grad()
    def agree(self, grads: Mapping[str, Tensor], meter: Meter) -> None:
        """Replace gradients, by parameter, by what all replicas agree on, in place. Raises RunError.

        To be called in the thread of the peers. A gradient that is 0 on all of them stays 0, since DDP drops it if no
        replica has used the parameter; what is owed of it waits.
        """
        idle = self._idle(grads, meter) if self._may_be_idle else ()
        made = {name: grad.float() for name, grad in grads.items() if name not in idle}
        shares = self._rows.shares() if self._rows is not None else {}
        for name, grad in made.items():
            self._own[name] += self._update(name, grad, shares.get(name))
        self._refuse_non_finite()
        waiting = {name: self._own[name].clone() for name in idle}
        for name in idle:
            self._own[name].zero_()
        mean = self._split(self._exchange(meter))
        for name in idle:  # the servers may still have told of it
            self._own[name] += mean[name].add_(waiting[name])
            mean[name].zero_()
        if self._rows is not None and made:
            self._follow(self._rows, made, meter)
        for name, grad in grads.items():
            grad.copy_(mean[name])

    def state(self) -> dict[str, Tensor]:
        """Return what is remembered as "kind/parameter", in its shape, not copied; of the served error, 0 elsewhere."""
        flats = {
            OWN_ERROR: self._own,
            SERVED_ERROR: self._split(self._owed.served_whole()),
            SECOND_MOMENT: self._second,
        }
        tensors = {
            f"{kind}/{name}": piece.view(self.params[name].shape)
            for kind, pieces in flats.items()
            for name, piece in pieces.items()
        }
        if self._rows is not None:
            tensors |= {f"{ROWS}/{name}": rows for name, rows in self._rows.state_dict()[ROWS].items()}
        return tensors | {f"{STEPS}/{name}": torch.tensor(count) for name, count in self.steps.items()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take over what this replica remembered. What it no longer serves, for units are cut anew, is its own error.

        The mean divides that by R.
        """
        for name, own in self._own.items():
            own.copy_(saved[f"{OWN_ERROR}/{name}"].view(-1))
            self.steps[name] = int(saved[f"{STEPS}/{name}"])
        for name, second in self._second.items():
            second.copy_(saved[f"{SECOND_MOMENT}/{name}"].view(-1))
        if self._rows is not None:
            self._rows.load({name: saved[f"{ROWS}/{name}"] for name in self._shaped})
        served = torch.zeros_like(self._owed.own)
        for name, piece in self._split(served).items():
            piece.copy_(saved[f"{SERVED_ERROR}/{name}"].view(-1))
        mine = parts(served, self._peers.size)[self._peers.replica]
        self._owed.served.copy_(mine)
        mine.zero_()
        self._owed.own.add_(served, alpha=self._peers.size)

    def _idle(self, grads: Mapping[str, Tensor], meter: Meter) -> Collection[str]:
        """Return the parameters whose gradients are 0 on all replicas."""
        used = torch.stack([grads[name].any() for name in self.params]).to(torch.uint8).cpu()
        others = [peer for peer in range(self._peers.size) if peer != self._peers.replica]
        told = self._peers.swap(dict.fromkeys(others, used), dict.fromkeys(others, len(used)), meter)
        for theirs in told.values():
            used = used | theirs
        return [name for name, is_used in zip(self.params, used.tolist(), strict=True) if not is_used]

    def _update(self, name: str, grad: Tensor, share: Tensor | None) -> Tensor:
        """Return what a gradient adds to what is owed; share: of its squares that count, [rows], None = all."""
        if self._precondition is None:
            return grad
        self.steps[name] += 1
        squares = grad.square()
        if share is not None:
            squares.view(len(share), -1).mul_(share.unsqueeze(1))
        second = self._second[name].lerp_(squares, 1 - self._precondition)
        return grad / denominator(second, self._precondition, self.steps[name], EPS)

    def _follow(self, rows: RowMoments, grads: Mapping[str, Tensor], meter: Meter) -> None:
        """Let second moments be as large as for the mean gradient, after a step with these gradients, by parameter."""
        assert self._precondition is not None
        step, moments = max(self.steps.values()) - 1, SecondMoments(self._shaped, self._precondition)
        rows.note(step, moments)
        if rows.is_due(step):
            shaped = {name: grad.view(self.params[name].shape) for name, grad in grads.items()}
            rows.measure(step, shaped, moments, meter)

    def _exchange(self, meter: Meter) -> Tensor:
        if self._peers.size > 1:
            return self._owed.exchange(self._compressor, meter)
        mean = self._owed.own.clone()
        self._owed.own.zero_()
        return mean

    def _refuse_non_finite(self) -> None:
        """Raise RunError, before anything is sent, if something cannot be: NaN would stay owed for ever."""
        if not len(self._owed.own) or torch.linalg.vector_norm(self._owed.own, torch.inf).isfinite():
            return
        names = [name for name, own in self._own.items() if not own.isfinite().all()]
        raise RunError(f"replica {self._peers.replica}: gradients are not finite, of {', '.join(names)}")

    def _split(self, flat: Tensor) -> dict[str, Tensor]:
        """View a tensor [n] as those of the parameters, vectors by name."""
        pieces = flat.split([param.numel() for param in self.params.values()])
        return dict(zip(self.params, pieces, strict=True))


def make_units(
    model: DistributedDataParallel, peers: Peers, compressor: MessageCodec, *, precondition: float | None, moments: bool
) -> list[Unit]:
    """Cut what a wrapped model exchanges into units about as large as its buckets, last parameter first.

    The cut depends on the model alone, not on what DDP finds out while it trains.
    """
    kept = [
        (name, param)
        for name, param in model.module.named_parameters()
        if param.requires_grad and name not in model.parameters_to_ignore
    ]
    cuts: list[dict[str, nn.Parameter]] = []
    for _, members in itertools.groupby(reversed(kept), key=lambda member: member[1].device):
        size = model.bucket_bytes_cap  # so that a device begins with a unit of its own
        for name, param in members:
            if size >= model.bucket_bytes_cap:
                cuts.append({})
                size = 0
            cuts[-1][name] = param
            size += param.numel() * torch.float32.itemsize
    idle = model.find_unused_parameters
    return [Unit(cut, peers, compressor, precondition=precondition, moments=moments, may_be_idle=idle) for cut in cuts]
