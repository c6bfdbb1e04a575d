"""Communication hooks for anybody's DistributedDataParallel: a compressed mean of gradients that loses nothing.

    model = DistributedDataParallel(model)
    model.register_comm_hook(CocktailState(model), cocktail_hook)

What a replica's messages lack of its gradients, and what the answers lack of the mean, stays owed and travels with the
gradients of later steps (owed.py). Parameters are cut into units here, once: DDP cuts its buckets anew after the first
backward of every process, and a unit leaves when the buckets that hold its parameters have come, however they are cut.
So errors stay with their parameters, and a resumed run is the undisturbed one.

R replicas; n = elements of a unit.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with types.

import logging
from collections.abc import Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from acsgd.codecs.base import Codec
from acsgd.codecs.fixpoint import FixPoint
from acsgd.codecs.identity import Identity
from acsgd.codecs.message import MessageCodec, PackedCodec
from acsgd.codecs.topk import TopK
from acsgd.dp.exchange.peers import Peers
from acsgd.dp.hooks.units import SECOND_MOMENT, Arrived, Lane, Unit, make_units
from acsgd.meter import Meter

log = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=10)
"""For a replica that keeps silent; one that is gone is noticed at once."""
REPLICA = "replica"
"""Name under which are saved the number of a replica and how many there are, int64 [2]."""
GROUP = 128
"""Elements that share a scale in a dense mean of few bits."""


def cocktail_hook(state: "CocktailState", bucket: dist.GradBucket) -> Future[Tensor]:
    """Replace a bucket of gradients by their mean over the replicas, of which the largest few are told."""
    return state.reduce(bucket)


def mean_hook(state: "MeanState", bucket: dist.GradBucket) -> Future[Tensor]:
    """Replace a bucket of gradients by their mean over the replicas, of which all are told, in few bits."""
    return state.reduce(bucket)


class HookState:
    """What replicas owe each other, from backward to backward. It belongs to one wrapped model.

    All replicas make it together, since it opens a group of its own over gloo, whatever the backend of the model. An
    error of an exchange is raised by backward, on all replicas; the state is of no use afterwards. Gradients accumulate
    under the model's no_sync(). Not for gradients that are scaled in their turn (torch.amp.GradScaler): those may be
    infinite, and what is owed would count in another step's scale.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        compressor: MessageCodec,
        *,
        precondition: float | None,
        moment_correction: bool,
        timeout: timedelta,
    ) -> None:
        if precondition is not None and not 0 < precondition < 1:
            raise ValueError(f"precondition={precondition} must lie between 0 and 1, or be None; 0.999 is usual")
        if getattr(model, "skip_all_reduce_unused_params", False):
            raise ValueError("skip_all_reduce_unused_params=True keeps gradients from the hook; leave it out")
        self.meter = Meter()
        """Of the bytes that this replica has sent; `meter.reset()` begins anew."""
        self._precondition = precondition
        self._peers = Peers(_own_group(model, timeout))
        self._units = make_units(model, self._peers, compressor, precondition=precondition, moments=moment_correction)
        self._lanes = {unit.device: Lane(unit.device) for unit in self._units}
        self._unit_of = {id(param): (unit, name) for unit in self._units for name, param in unit.params.items()}
        self._failure: Exception | None = None
        if self._peers.size == 1:
            log.warning("one process: there is nobody to exchange gradients with")

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Start to replace a bucket of gradients by what the replicas agree on; return its promise."""
        if self._failure is not None:
            raise self._failure
        arrived = Arrived(bucket, self._lanes[bucket.buffer().device])
        for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            unit, name = self._unit_of[id(param)]
            unit.arrived[name] = grad, arrived
        for unit in self._units:
            if len(unit.arrived) == len(unit.params):
                self._peers.begin(partial(self._agree, unit, unit.arrived))
                unit.arrived = {}
        return arrived.future

    def state_dict(self) -> dict[str, Tensor]:
        """Return what this replica owes, by parameter, not copied: tensors alone, for safetensors' save_file.

        Each replica saves its own.
        """
        tensors = {key: tensor for unit in self._units for key, tensor in unit.state().items()}
        return {REPLICA: torch.tensor([self._peers.replica, self._peers.size]), **tensors}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Take over what this replica owed. Raises ValueError for the state of another replica, model or hook."""
        place, here = saved[REPLICA].tolist(), [self._peers.replica, self._peers.size]
        if place != here:
            raise ValueError(
                f"what replica {place[0]} of {place[1]} owes cannot be taken over by replica {here[0]} of {here[1]}: "
                "each loads what it has saved, and there must be as many"
            )
        if any(key.startswith(SECOND_MOMENT) for key in saved) != (self._precondition is not None):
            raise ValueError(f"precondition={self._precondition} is not that of the state that was saved")
        if others := self.state_dict().keys() ^ saved.keys():
            raise ValueError(
                f"the state that was saved is of another model or moment_correction=: it differs in {sorted(others)}"
            )
        for unit in self._units:
            unit.load(saved)

    def _agree(self, unit: Unit, arrived: Mapping[str, tuple[Tensor, Arrived]]) -> None:
        """Replace the gradients of a unit. Runs in the thread of the peers; a failure is told through the buckets."""
        with self._lanes[unit.device].after({bucket.ready for _, bucket in arrived.values()}):
            try:
                if self._failure is not None:  # peers would take one unit's messages for another's
                    raise self._failure
                unit.agree({name: grad.view(-1) for name, (grad, _) in arrived.items()}, self.meter)
            except Exception as error:
                if self._failure is None:
                    self._peers.give_up()
                self._failure = error
            for _, bucket in arrived.values():
                bucket.count_down(self._failure)


class CocktailState(HookState):
    """For `cocktail_hook`.

    With precondition=None the mean gradient comes back: for SGD-like optimizers. Under Adam, gradients that have waited
    come as bursts, which it divides by what it has seen of bursts.

    With precondition=0.999, an AdamW's beta2, each replica divides its gradient by the root of its second moment before
    it is compressed, and what comes back is for torch.optim.SGD(lr, weight_decay=...): AdamW without its first moment.
    With `moment_correction`, replicas exchange three numbers per row of a parameter every 16 steps, in a byte each, to
    keep second moments as large as those of the mean gradient; without, each replica divides by its own noise.

    topk: share that is told, in (0, 1]; bits: per value, 1 to 8; group: values that share a scale; timeout: how long a
    replica waits for another.
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
        timeout: timedelta = TIMEOUT,
    ) -> None:
        compressor = TopK(topk, bits, group)
        super().__init__(
            model, compressor, precondition=precondition, moment_correction=moment_correction, timeout=timeout
        )


class MeanState(HookState):
    """For `mean_hook`. bits: 32, 16 (bf16), or 1 to 8 with a scale per 128 elements; the others as in CocktailState."""

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        bits: int = 8,
        precondition: float | None = None,
        moment_correction: bool = True,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        whole: dict[int, Codec] = {32: Identity("fp32"), 16: Identity("bf16")}
        codec = whole.get(bits) or FixPoint(bits, dims="group", group=GROUP)
        super().__init__(
            model, PackedCodec(codec), precondition=precondition, moment_correction=moment_correction, timeout=timeout
        )


def _own_group(model: DistributedDataParallel, timeout: timedelta) -> dist.ProcessGroup:
    """Open a group for messages between the replicas of a model: two models' would meet in one, and nccl has none."""
    if model.process_group.size() == 1:
        return model.process_group
    ranks = dist.get_process_group_ranks(model.process_group)
    return dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
