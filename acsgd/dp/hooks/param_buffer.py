"""Parameters of a DDP model that are exchanged together, and the buckets whose exchange is pending."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from acsgd.codecs.message import MessageCodec
from acsgd.comm.waits import Meter
from acsgd.dp.exchange.averaging import split_evenly
from acsgd.dp.exchange.buckets import FlatLayout
from acsgd.dp.exchange.error_feedback import RESIDUAL, SERVER_RESIDUAL, ErrorFeedback, pad_part
from acsgd.dp.exchange.second_moments import ROW_MEANS, ROW_RATIOS, SecondMomentCorrection
from acsgd.dp.peers import Peers
from acsgd.errors import RunError
from acsgd.optim.base import SecondMoments


class SideStream:
    """Stream of the peers' thread on one device; the CPU has none."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None if device.type == "cpu" else torch.Stream(device)
        self.devices: list[int | str | torch.device] | None = None if device.type == "cpu" else [device]
        """Devices of a future's value, for torch.futures.Future."""

    def mark(self) -> torch.Event | None:
        """Record an event in the current stream of the caller; None on the CPU."""
        if self._stream is None:
            return None
        return torch.accelerator.current_stream(self._stream.device).record_event()

    @contextlib.contextmanager
    def after(self, events: Iterable[torch.Event | None]) -> Iterator[None]:
        """Run the body in this stream, after some events."""
        if self._stream is None:
            yield
            return
        with self._stream:
            for event in events:
                if event is not None:
                    self._stream.wait_event(event)
            yield


class PendingBucket:
    """A DDP bucket whose gradients wait for their exchange."""

    def __init__(self, bucket: dist.GradBucket, stream: SideStream) -> None:
        self._buffer = bucket.buffer()
        self._missing = len(bucket.parameters())
        self._failure: Exception | None = None
        self.ready = stream.mark()
        """Event after the computation of the gradients."""
        self._done: Future[Tensor] = Future(devices=stream.devices)
        self.future: Future[Tensor] = self._done.then(self._result)

    def count_down(self, failure: Exception | None) -> None:
        """Count one of the parameters as exchanged, or as failed."""
        self._missing -= 1
        self._failure = failure
        if not self._missing:
            self._done.set_result(self._buffer)

    def _result(self, done: Future[Tensor]) -> Tensor:
        if self._failure is not None:  # reaches backward as a RuntimeError with the same text
            raise self._failure
        return done.value()


ReadyGradients = Mapping[str, tuple[Tensor, PendingBucket]]
"""Gradients that are complete, with their DDP bucket, by parameter."""
EPS = 1e-8
"""Term added to the root of a second moment, as in AdamW."""
SECOND_MOMENT = "second_moment"
"""Name of the second moments in a saved state."""
STEPS = "steps"
"""Name of the number of gradients that a second moment has accumulated in a saved state."""


class ParamBuffer:
    """Parameters that are exchanged together."""

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        peers: Peers,
        codec: MessageCodec,
        *,
        precondition: float | None,
        moment_correction: bool,
        rate_of: Callable[[nn.Parameter], float],
        may_be_unused: bool,
    ) -> None:
        """precondition: decay of second moments, None = no preconditioning. moment_correction: whether to keep these as
        large as those of the mean gradient. rate_of: the present learning rate of a parameter, by which gradients are
        multiplied while they are exchanged. may_be_unused: whether a step may leave parameters without a gradient."""
        self.params = params
        self.ready: dict[str, tuple[Tensor, PendingBucket]] = {}
        """Gradients that wait for those of the other parameters, with their DDP bucket."""
        self.device = next(iter(params.values())).device
        self.steps = dict.fromkeys(params, 0)
        """Number of gradients that a second moment has accumulated, by parameter."""
        self._peers = peers
        self._codec = codec
        self._precondition = precondition
        self._rate_of = rate_of
        self._may_be_unused = may_be_unused
        self._layout = FlatLayout({name: (param.numel(),) for name, param in params.items()})
        self._feedback = ErrorFeedback(torch.zeros(self._layout.n, device=self.device), peers)
        self._residuals = self._layout.views(self._feedback.residual)
        second = {} if precondition is None else self._layout.views(torch.zeros_like(self._feedback.residual))
        self._second = second
        self._shaped = {name: x.view(params[name].shape) for name, x in second.items() if len(x)}
        """Second moments of parameters with elements, in their shapes; contiguous, whatever the parameters' layout."""
        correct = moment_correction and self._shaped and peers.size > 1
        self._correction = SecondMomentCorrection(self._shaped, peers) if correct else None

    @torch.no_grad()
    def reduce(self, grads: Mapping[str, Tensor], meter: Meter) -> None:
        """Replace gradients, by parameter, by their compressed mean, in place. Raises RunError.

        Call it in the thread of the peers. A gradient that is 0 on all replicas stays 0, since DDP drops it if no
        replica has used the parameter; its residual is kept for later, as where the learning rate is 0.
        """
        rates = {name: self._rate_of(param) for name, param in self.params.items()}
        unused = self._unused(grads, meter) if self._may_be_unused else ()
        used = {name: grad.float() for name, grad in grads.items() if name not in unused}
        shares = self._correction.shares() if self._correction is not None else {}
        for name, grad in used.items():
            self._residuals[name].add_(self._update(name, grad, shares.get(name)), alpha=rates[name])
        self._check_finite()
        kept = {name: self._residuals[name].clone() for name in self.params if name in unused or not rates[name]}
        for name in kept:
            self._residuals[name].zero_()
        mean = self._layout.views(self._exchange(meter))
        for name, residual in kept.items():  # the mean may hold server residuals of it
            self._residuals[name] += mean[name].add_(residual)
            mean[name].zero_()
        if self._correction is not None and used:
            self._correct_moments(self._correction, used, meter)
        for name, grad in grads.items():
            grad.copy_(mean[name].div_(rates[name] or 1.0))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as "name/parameter" -> tensor in the parameter's shape, not copied."""
        server = self._layout.views(pad_part(self._feedback.server_residual, self._feedback.residual, self._peers))
        by_name = {RESIDUAL.name: self._residuals, SERVER_RESIDUAL.name: server, SECOND_MOMENT: self._second}
        tensors = {
            f"{name}/{param}": x.view(self.params[param].shape)
            for name, by_param in by_name.items()
            for param, x in by_param.items()
        }
        corrections = self._correction.state_dict() if self._correction is not None else {}
        tensors |= {f"{name}/{param}": x for name, by_param in corrections.items() for param, x in by_param.items()}
        return tensors | {f"{STEPS}/{param}": torch.tensor(count) for param, count in self.steps.items()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned on this replica.

        Where this replica no longer owns a part, since buffers differ, its server residual is added to its residual,
        times R, since the mean divides by R.
        """

        def load(into: Mapping[str, Tensor], name: str) -> None:
            for param, x in into.items():
                x.copy_(saved[f"{name}/{param}"].view(-1))

        load(self._residuals, RESIDUAL.name)
        load(self._second, SECOND_MOMENT)
        self.steps = {param: int(saved[f"{STEPS}/{param}"]) for param in self.params}
        if self._correction is not None:
            states = ({param: saved[f"{s.name}/{param}"] for param in self._shaped} for s in (ROW_MEANS, ROW_RATIOS))
            self._correction.load(*states)
        server = torch.zeros_like(self._feedback.residual)
        load(self._layout.views(server), SERVER_RESIDUAL.name)
        mine = split_evenly(server, self._peers.size)[self._peers.replica]
        self._feedback.server_residual.copy_(mine)
        mine.zero_()
        self._feedback.residual.add_(server, alpha=self._peers.size)

    def _unused(self, grads: Mapping[str, Tensor], meter: Meter) -> Collection[str]:
        """Return the parameters whose gradients are 0 on all replicas."""
        used = torch.stack([grads[name].any() for name in self.params]).to(self._peers.device, torch.uint8)
        others = [peer for peer in range(self._peers.size) if peer != self._peers.replica]
        received = self._peers.exchange(dict.fromkeys(others, used), dict.fromkeys(others, len(used)), meter)
        for theirs in received.values():
            used = used | theirs
        return [name for name, is_used in zip(self.params, used.tolist(), strict=True) if not is_used]

    def _update(self, name: str, grad: Tensor, share: Tensor | None) -> Tensor:
        """Return the preconditioned gradient. share: fraction of its squares to accumulate, [rows]; None = all."""
        if self._precondition is None:
            return grad
        self.steps[name] += 1
        squares = grad.square()
        if share is not None:
            squares.view(len(share), -1).mul_(share.unsqueeze(1))
        second = self._second[name].lerp_(squares, 1 - self._precondition)
        return grad / _denominator(second, self._precondition, self.steps[name])

    def _correct_moments(self, correction: SecondMomentCorrection, grads: Mapping[str, Tensor], meter: Meter) -> None:
        """Correct the second moments after a step with these gradients, by parameter."""
        assert self._precondition is not None
        step, moments = max(self.steps.values()) - 1, SecondMoments(self._shaped, self._precondition)
        measured = None
        if correction.is_due(step):
            shaped = {name: grad.view(self.params[name].shape) for name, grad in grads.items()}
            measured = correction.measure(step, shaped, moments, meter)
        correction.update(step, moments, measured)

    def _exchange(self, meter: Meter) -> Tensor:
        if self._peers.size > 1:
            return self._feedback.sharded_mean(self._codec, meter)
        mean = self._feedback.residual.clone()
        self._feedback.residual.zero_()
        return mean

    def _check_finite(self) -> None:
        """Raise RunError before anything is sent if a gradient is not finite: residuals would keep NaN for ever."""
        residual = self._feedback.residual
        if not len(residual) or torch.linalg.vector_norm(residual, torch.inf).isfinite():
            return
        names = [name for name, x in self._residuals.items() if not x.isfinite().all()]
        raise RunError(f"replica {self._peers.replica}: gradients are not finite, of {', '.join(names)}")


def make_param_buffers(
    model: DistributedDataParallel,
    peers: Peers,
    codec: MessageCodec,
    *,
    precondition: float | None,
    moment_correction: bool,
    rate_of: Callable[[nn.Parameter], float],
) -> list[ParamBuffer]:
    """Group the parameters of a wrapped model into buffers about as large as its buckets, last parameter first.

    The groups depend on the model alone, not on the order in which its gradients become ready.
    """
    kept = [
        (name, param)
        for name, param in model.module.named_parameters()
        if param.requires_grad and name not in model.parameters_to_ignore
    ]
    groups: list[dict[str, nn.Parameter]] = []
    for _, members in itertools.groupby(reversed(kept), key=lambda member: member[1].device):
        size = model.bucket_bytes_cap  # each device starts with a new buffer
        for name, param in members:
            if size >= model.bucket_bytes_cap:
                groups.append({})
                size = 0
            groups[-1][name] = param
            size += param.numel() * torch.float32.itemsize
    unused = model.find_unused_parameters
    return [
        ParamBuffer(
            group,
            peers,
            codec,
            precondition=precondition,
            moment_correction=moment_correction,
            rate_of=rate_of,
            may_be_unused=unused,
        )
        for group in groups
    ]


def _denominator(second_moment: Tensor, beta2: float, steps: int) -> Tensor:
    """Return sqrt(bias-corrected second moment) + EPS, a new tensor. steps: number of gradients accumulated in it."""
    return (second_moment / (1 - beta2**steps)).sqrt_().add_(EPS)
