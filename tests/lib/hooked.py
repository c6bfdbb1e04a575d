"""A model with a communication hook on plain DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from acsgd.dp.hooks.hooks import CocktailState, HookState, MeanState, cocktail_hook, mean_hook
from lib.patience import NO_LIMIT_S
from lib.ranks import on_ranks

LR = 0.01
CLIP = 0.1
"""Norm of clipped gradients, less than that of any."""
SMALL_MB = 0.001
"""Size of a bucket, so that there are several."""
TIMEOUT = timedelta(seconds=NO_LIMIT_S)
FORMS: dict[str, tuple[Callable[..., HookState], Any]] = {
    "few": (partial(CocktailState, topk=0.1, bits=3, group=16), cocktail_hook),
    "few, clipped, with learning rates": (
        partial(CocktailState, topk=0.1, bits=3, group=16, clip=CLIP),
        cocktail_hook,
    ),
    "nearly all": (partial(CocktailState, topk=1, bits=8), cocktail_hook),
    "few bits": (partial(MeanState, bits=2), mean_hook),
    "bf16": (partial(MeanState, bits=16), mean_hook),
    "all": (partial(MeanState, bits=32), mean_hook),
    "preconditioned": (partial(CocktailState, topk=0.1, precondition=0.999), cocktail_hook),
    "preconditioned, all": (partial(MeanState, bits=32, precondition=0.999, moment_correction=False), mean_hook),
    "corrected": (partial(MeanState, bits=32, precondition=0.97), mean_hook),
    "uncorrected": (partial(MeanState, bits=32, precondition=0.97, moment_correction=False), mean_hook),
}


class Net(nn.Module):
    """Two branches, of which each call may use any; a parameter shorter than the number of replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(16, 5)
        self.branches = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.trunk = nn.Linear(8, 16)

    def forward(self, x: Tensor, branches: Sequence[int] = (0, 1)) -> Tensor:
        hidden = self.trunk(x).tanh()
        for branch in branches:
            hidden = hidden + self.branches[branch](hidden).tanh()
        return self.head(hidden * self.scale).square().sum(1).mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * number + rank))


class Run:
    """Training of a model with a hook on one replica."""

    def __init__(
        self,
        form: str,
        module: nn.Module | None = None,
        timeout: timedelta = TIMEOUT,
        transport: str = "auto",
        **of_model: Any,
    ) -> None:
        make, hook = FORMS[form]
        self.model = DistributedDataParallel(module or net(), **{"bucket_cap_mb": SMALL_MB, **of_model})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, weight_decay=0.1)
        known = {"optimizer": self.optimizer} if form.endswith("with learning rates") else {}
        self.state = make(self.model, timeout=timeout, transport=transport, **known)
        self.buckets: list[list[int]] = []
        """Parameters of each call of the hook, by id."""
        buckets = self.buckets

        def recording(state, bucket):  # DDP refuses annotations that are strings
            buckets.append([id(param) for param in bucket.parameters()])
            return hook(state, bucket)

        self.model.register_comm_hook(self.state, recording)

    def step(self, rank: int, number: int) -> None:
        self.optimizer.zero_grad()
        self.model(batch(rank, number)).backward()
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.model.module.named_parameters()}


def on_plain_ranks(world_size: int, body: Callable[..., Any], store: Path, *args: Any) -> list[Any]:
    return on_ranks(world_size, partial(_initialized, body), store, *args)


def _initialized(body: Callable[..., Any], rank: int, world_size: int, store: Path, *args: Any) -> Any:
    torch.set_num_threads(1)
    file_store = dist.FileStore(str(store), world_size)
    dist.init_process_group("gloo", store=file_store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    result = body(rank, *args)
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early would disturb the others' connections
        dist.destroy_process_group()
    return result
