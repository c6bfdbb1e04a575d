"""Communication hooks for DistributedDataParallel: a compressed mean of gradients with error feedback.

    model = DistributedDataParallel(model)
    model.register_comm_hook(CocktailState(model), cocktail_hook)

What compression omits from the messages of a replica and from their mean is added to the gradients of later steps.
Parameters are grouped into buffers here, once: DDP rebuilds its buckets after the first backward of every process, and
a buffer is exchanged when all buckets that hold its parameters are ready. So residuals stay with their parameters, and
a resumed run equals an uninterrupted one.

R replicas; n = elements of a buffer.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types.

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from acsgd.codecs.base import Codec
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.identity import Identity
from acsgd.codecs.message import MessageCodec, PackedCodec
from acsgd.codecs.topk import TopK
from acsgd.comm.communicators import NCCL, Communicator
from acsgd.comm.host_links import LIMIT_S, HostRing
from acsgd.comm.process_groups import GLOO, Group
from acsgd.comm.waits import DIRECT, Meter
from acsgd.dp.hooks.param_buffer import (
    SECOND_MOMENT,
    ParamBuffer,
    PendingBucket,
    ReadyGradients,
    SideStream,
    make_param_buffers,
)
from acsgd.dp.peers import Peers
from acsgd.groups import machine_name
from acsgd.optim.gradient_scale import clip_factor
from acsgd.streams import mix_seed

log = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=10)
"""Time to wait for another replica. A replica whose process ends is noticed at once."""
REPLICA = "replica"
"""Name in a saved state of the replica's number and the number of replicas, int64 [2]."""
OF_UPDATES = "residuals_of_updates"
"""Name in a saved state that marks residuals as multiplied by the learning rate."""
GROUP = 128
"""Number of values that share a scale in `mean_hook` with few bits."""


def cocktail_hook(state: "CocktailState", bucket: dist.GradBucket) -> Future[Tensor]:
    """Replace a bucket of gradients by their mean over the replicas, with top-k compression."""
    return state.reduce(bucket)


def mean_hook(state: "MeanState", bucket: dist.GradBucket) -> Future[Tensor]:
    """Replace a bucket of gradients by their mean over the replicas, quantized."""
    return state.reduce(bucket)


class HookState:
    """State of a communication hook of one wrapped model: residuals, and second moments if it preconditions.

    All replicas create it together, since it opens groups of its own: one of gloo, and one of NCCL if messages stay on
    the GPU. An error of an exchange is raised by backward, on all replicas; the state cannot be used afterwards. To
    accumulate gradients, use the model's no_sync(). Not for scaled gradients (torch.amp.GradScaler): those may be
    infinite, and residuals would be added at the scale of another step.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        codec: MessageCodec,
        *,
        precondition: float | None,
        moment_correction: bool,
        optimizer: Optimizer | None,
        clip: float | None,
        timeout: timedelta,
        transport: str,
    ) -> None:
        _check(model, precondition, clip)
        self.meter = Meter()
        """Bytes sent by this replica since `meter.reset()`."""
        self._precondition = precondition
        self._clip = math.inf if clip is None else clip
        self._of_updates = optimizer is not None
        rate_of = _learning_rates(model, optimizer)
        self._peers = Peers(_open_group(model, timeout, transport), DIRECT)
        self._buffers = make_param_buffers(
            model,
            self._peers,
            codec,
            precondition=precondition,
            moment_correction=moment_correction,
            rate_of=rate_of,
        )
        self._streams = {buffer.device: SideStream(buffer.device) for buffer in self._buffers}
        self._buffer_of = {
            id(param): (buffer, name) for buffer in self._buffers for name, param in buffer.params.items()
        }
        self._failure: Exception | None = None
        if self._peers.is_single:
            log.warning("one process: no gradients are exchanged")

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start to replace a bucket of gradients by their mean; return its future."""
        if self._failure is not None:
            raise self._failure
        pending = PendingBucket(bucket, self._streams[bucket.buffer().device])
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            buffer, name = self._buffer_of[id(param)]
            buffer.ready[name] = grad, pending
        complete = [buffer for buffer in self._buffers if len(buffer.ready) == len(buffer.params)]
        if complete and (math.isinf(self._clip) or len(complete) == len(self._buffers)):
            self._peers.submit(partial(self._exchange, {buffer: buffer.ready for buffer in complete}))
            for buffer in complete:
                buffer.ready = {}
        return pending.future

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of this replica, not copied: tensors only, for safetensors' save_file.

        Each replica saves its own.
        """
        tensors = {key: tensor for buffer in self._buffers for key, tensor in buffer.state_dict().items()}
        unit = {OF_UPDATES: torch.ones(1)} if self._of_updates else {}
        return {REPLICA: torch.tensor([self._peers.replica, self._peers.size]), **unit, **tensors}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Load what this replica saved. Raises ValueError for the state of another replica, model or hook."""
        saved_by, here = saved[REPLICA].tolist(), [self._peers.replica, self._peers.size]
        if saved_by != here:
            raise ValueError(
                f"the state of replica {saved_by[0]} of {saved_by[1]} cannot be loaded by replica {here[0]} of "
                f"{here[1]}: each loads what it has saved, and the number of replicas must be the same"
            )
        if any(key.startswith(SECOND_MOMENT) for key in saved) != (self._precondition is not None):
            raise ValueError(f"precondition={self._precondition} differs from that of the saved state")
        if others := self.state_dict().keys() ^ saved.keys():
            raise ValueError(
                "the saved state is of another model, or of another moment_correction= or optimizer=: it differs in "
                f"{sorted(others)}"
            )
        for buffer in self._buffers:
            buffer.load_state_dict(saved)

    def _exchange(self, ready: Mapping[ParamBuffer, ReadyGradients]) -> None:
        """Replace the gradients of some buffers: of all if they are clipped.

        Runs in the thread of the peers; the buckets' futures raise its errors.
        """
        factor = None
        for buffer, gradients in ready.items():
            with self._streams[buffer.device].after({bucket.ready for _, bucket in gradients.values()}):
                try:
                    if self._failure is not None:  # peers would mistake messages of one buffer for those of another
                        raise self._failure
                    if factor is None:
                        factor = 1.0 if math.isinf(self._clip) else clip_factor(self._norm(ready), self._clip)
                    buffer.reduce({name: _scaled(grad, factor) for name, (grad, _) in gradients.items()}, self.meter)
                except Exception as error:
                    if self._failure is None:
                        self._peers.abort()
                    self._failure = error
                for _, bucket in gradients.values():
                    bucket.count_down(self._failure)

    def _norm(self, ready: Mapping[ParamBuffer, ReadyGradients]) -> float:
        """Return the norm of all gradients of this replica."""
        squares = 0.0
        for buffer, gradients in ready.items():
            with self._streams[buffer.device].after({bucket.ready for _, bucket in gradients.values()}):
                norms = [torch.linalg.vector_norm(grad.float()) for grad, _ in gradients.values()]
                squares += float(torch.stack(norms).square().sum())
        return math.sqrt(squares)


class CocktailState(HookState):
    """State of `cocktail_hook`.

    With precondition=None the hook returns the mean gradient: for SGD-like optimizers. Under Adam, gradients that have
    waited in a residual arrive as bursts, and Adam divides them by second moments of bursts.

    With precondition=0.999, AdamW's beta2, each replica divides its gradient by the root of its second moment before
    compression; use torch.optim.SGD(lr, weight_decay=...) to get AdamW without its first moment. With
    `moment_correction`, replicas exchange three numbers per row of a parameter every 16 steps, in a byte each, to keep
    second moments as large as those of the mean gradient; without, each replica divides by its own noise.

    Args:
        topk: Fraction of coordinates sent per step, in (0, 1].
        bits: Bits per value, 1 to 8.
        group: Number of values that share a scale.
        precondition: Decay of second moments, in (0, 1); None = no preconditioning.
        moment_correction: Whether to correct second moments; used with precondition only.
        optimizer: The optimizer of the model's parameters, if its learning rate changes: what waits in a residual is
            then applied with the learning rate of the step whose gradient it is, and not of the step that sends it.
            Set the learning rate of a step before its backward, as schedulers do. None = a constant learning rate.
        clip: Norm to which each replica clips its gradients before anything else, as optim.clip does in acsgd; clipping
            after backward would be of what has been received. The exchange then begins after the last gradient. None =
            no clipping.
        timeout: Time to wait for another replica.
        transport: What carries compressed gradients: "gloo", through host memory; "nccl", for a model on one GPU per
            process; "auto" = NCCL if the model's process group uses it on that GPU, and, between hosts, if it is
            measured to be 1.5 times as fast as gloo; else gloo.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        topk: float = 0.02,
        bits: int = 4,
        group: int = 128,
        precondition: float | None = None,
        moment_correction: bool = True,
        optimizer: Optimizer | None = None,
        clip: float | None = None,
        timeout: timedelta = TIMEOUT,
        transport: str = "auto",
    ) -> None:
        codec = TopK(topk, bits, group)
        super().__init__(
            model,
            codec,
            precondition=precondition,
            moment_correction=moment_correction,
            optimizer=optimizer,
            clip=clip,
            timeout=timeout,
            transport=transport,
        )


class MeanState(HookState):
    """State of `mean_hook`.

    Args:
        bits: Bits per value: 32, 16 (bf16), or 1 to 8 with a scale per 128 values.
        precondition, moment_correction, optimizer, clip, timeout, transport: As in CocktailState.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        bits: int = 8,
        precondition: float | None = None,
        moment_correction: bool = True,
        optimizer: Optimizer | None = None,
        clip: float | None = None,
        timeout: timedelta = TIMEOUT,
        transport: str = "auto",
    ) -> None:
        unquantized: dict[int, Codec] = {32: Identity("fp32"), 16: Identity("bf16")}
        codec = PackedCodec(unquantized.get(bits) or FixPoint(bits, dims="group", group=GROUP))
        super().__init__(
            model,
            codec,
            precondition=precondition,
            moment_correction=moment_correction,
            optimizer=optimizer,
            clip=clip,
            timeout=timeout,
            transport=transport,
        )


def _check(model: DistributedDataParallel, precondition: float | None, clip: float | None) -> None:
    """Raise ValueError for an invalid option, or a model whose gradients the hook cannot exchange."""
    if clip is not None and not clip > 0:
        raise ValueError(f"clip={clip} must be positive, or None for gradients of any norm; 1.0 is usual")
    if precondition is not None and not 0 < precondition < 1:
        raise ValueError(f"precondition={precondition} must lie between 0 and 1, or be None; 0.999 is usual")
    if getattr(model, "skip_all_reduce_unused_params", False):
        raise ValueError("skip_all_reduce_unused_params=True keeps gradients from the hook; leave it out")
    if (sparse := _sparse_parameter(model)) is not None:
        raise ValueError(f"{sparse} has sparse gradients, which the hook does not exchange; build it with sparse=False")


def _scaled(grad: Tensor, factor: float) -> Tensor:
    """Multiply a gradient by a factor, in place; return a view [n]."""
    return grad.view(-1) if factor == 1.0 else grad.view(-1).mul_(factor)


def _learning_rates(model: DistributedDataParallel, optimizer: Optimizer | None) -> Callable[[nn.Parameter], float]:
    """Return a function of a parameter: its present learning rate, 1 without an optimizer.

    Raises ValueError if the optimizer lacks a parameter of the model.
    """
    if optimizer is None:
        return lambda param: 1.0
    group_of = {id(param): index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    for name, param in model.module.named_parameters():
        if param.requires_grad and id(param) not in group_of and name not in model.parameters_to_ignore:
            raise ValueError(f"the optimizer does not have {name}; give the one that updates the wrapped model")
    # load_state_dict of an optimizer replaces its groups, so that only their indices last
    return lambda param: float(optimizer.param_groups[group_of[id(param)]]["lr"])


def _sparse_parameter(model: DistributedDataParallel) -> str | None:
    """Return the name of a parameter of which DDP expects sparse gradients, None if there is none."""
    tables = (
        (f"{path}.weight".lstrip("."), module.weight)
        for path, module in model.module.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    )
    return next((name for name, x in tables if x.requires_grad and name not in model.parameters_to_ignore), None)


def _open_group(model: DistributedDataParallel, timeout: timedelta, transport: str) -> Group:
    """Open the groups for the messages of one model: several models' must not mix.

    Raises ValueError if the transport cannot carry them.
    """
    backend = choose_backend(model, transport)
    if model.process_group.size() == 1:
        return Group(model.process_group, GLOO)
    ranks = dist.get_process_group_ranks(model.process_group)
    group = Group(dist.new_group(ranks, timeout, GLOO.backend, use_local_synchronization=True), GLOO)
    if backend == GLOO.backend:
        return group
    (device,) = _devices(model)
    if transport == "auto" and not _is_faster(backend, group, device, timeout):
        return group
    return replace(group, updates=_open_communicator(backend, ranks, device, timeout))


def _open_communicator(backend: str, ranks: Sequence[int], device: torch.device, timeout: timedelta) -> Communicator:
    """Open a communicator of some ranks, which call this together."""
    opened = dist.new_group(ranks, timeout, backend, use_local_synchronization=True)
    return Communicator(opened._get_backend(device), ranks, opened.rank(), "gradients", device)


def _is_faster(backend: str, group: Group, device: torch.device, timeout: timedelta) -> bool:
    """Return whether a backend of the device carries messages between the hosts of a group faster than gloo.

    All ranks call it together, and have the same result; on one host it is.
    """
    machine = torch.tensor(mix_seed(*machine_name().encode()))
    machines = [torch.empty_like(machine) for _ in group.ranks]
    DIRECT.wait(dist.all_gather(machines, machine, group=group.process_group, async_op=True))
    first_of = {int(each): rank for each, rank in zip(reversed(machines), reversed(group.ranks), strict=True)}
    if len(first_of) == 1:
        return True
    ring, opened = sorted(first_of.values()), list[Communicator]()

    def open_of_ring() -> Communicator:
        opened.append(_open_communicator(backend, ring, device, timeout))
        return opened[0]

    times = HostRing(group, ring, device, DIRECT).measure(open_of_ring, min(LIMIT_S, timeout.total_seconds() / 2))
    for each in opened:
        each.abort()
    log.info("gradients between hosts: %s", times.describe(backend))
    return times.prefers_ordered


def choose_backend(model: DistributedDataParallel, transport: str) -> str:
    """Return the backend of torch.distributed that carries the compressed gradients of a model.

    transport: as in CocktailState. Raises ValueError if it cannot carry them.
    """
    devices = _devices(model)
    types = {device.type for device in devices}
    if transport == "auto":
        of_model = dist.get_backend_config(model.process_group).split(",")
        is_nccl = len(devices) == 1 and f"{types.pop()}:{NCCL.name}" in of_model
        return NCCL.name if is_nccl else GLOO.backend
    if transport != GLOO.backend and (
        len(devices) != 1 or not types <= {*dist.Backend.backend_capability.get(transport, ())}
    ):
        raise ValueError(
            f"transport={transport!r} cannot carry gradients on {', '.join(map(str, devices))}: 'nccl' takes a model "
            "on one GPU per process; leave transport out, or use 'gloo'"
        )
    return transport


def _devices(model: DistributedDataParallel) -> Collection[torch.device]:
    return dict.fromkeys(param.device for param in model.module.parameters() if param.requires_grad)
