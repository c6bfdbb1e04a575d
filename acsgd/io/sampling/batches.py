"""From text to the batches of one replica: tokenise once per host, then draw any step's samples in O(1).

Which samples step t trains on depends on the seed and t alone. The global batch is cut into micro-batches,
and these are dealt to replicas: neither the number of ranks nor a resumption changes what is learnt from.
"""

# M micro-batches of one replica, B sequences of a micro-batch, T tokens of a sequence, n any number

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from acsgd.io.sampling.sampler import Ints, Sampler
from acsgd.io.sampling.tokens import Tokens, in_micros, read_windows, sampled

if TYPE_CHECKING:
    pass

T = TypeVar("T")


@dataclass(frozen=True)
class Batch:
    """What one replica trains on in one step, on the host until moved."""

    tokens: Tensor | None
    """int64 [M, B, T], where wanted."""
    labels: Tensor | None
    """int64 [M, B, T], where wanted: the token that follows each of `tokens`."""
    sample_ids: Tensor
    """int64 [M, B], on the host: one number per sequence of the mixture, the same in every epoch."""
    micro_ids: range
    """Each micro-batch's place in the global batch."""
    upcoming_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64, on the host: sample ids of the replica's next batch, for what can be read ahead."""

    def to(self, device: torch.device) -> Batch:
        """Return the batch with tokens and labels on `device`."""
        tokens = None if self.tokens is None else self.tokens.to(device)
        labels = None if self.labels is None else self.labels.to(device)
        return replace(self, tokens=tokens, labels=labels)


@dataclass(frozen=True)
class Reader:
    """Makes one replica's batch of any step."""

    corpora: Sequence[Tokens]
    """Each source's tokens, in the order of the mixture."""
    sampler: Sampler
    sequence: int
    """T."""
    micro: int
    """B."""
    micros: range
    """Which micro-batches of the global batch the replica gets, as `deal` says."""
    wants_tokens: bool = True
    wants_labels: bool = True
    notes: tuple[str, ...] = ()
    """What the user should know about the texts: a sentence for each that was read only in part."""

    def fingerprint(self) -> str:
        """Return what differs between two hosts whose texts do."""
        return sampled(self.corpora)

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0, as new tensors."""
        mine = slice(self.micros.start * self.micro, self.micros.stop * self.micro)
        sources, indices, ids = (field[mine] for field in self.sampler.samples(step).dealt())
        tokens = labels = None
        if self.wants_tokens or self.wants_labels:
            windows = read_windows(self.corpora, self.sequence, sources, indices)
            tokens = in_micros(windows[:, :-1], self.micro) if self.wants_tokens else None
            labels = in_micros(windows[:, 1:], self.micro) if self.wants_labels else None
        upcoming = self.sampler.samples(step + 1).dealt().ids[mine]
        return Batch(tokens, labels, self._in_micros(ids), self.micros, self._in_micros(upcoming))

    def _in_micros(self, ids: Ints) -> Tensor:
        return torch.from_numpy(ids.copy()).view(len(self.micros), self.micro)


class Dataset:
    """The batches of a run, made ahead in one background thread from the first one asked for.

    Iterate once. What a read raises, the iteration raises. Close it, or use it as a context manager, to stop
    the thread early; one that is not stopped ends with the process, after at most `ahead` more reads.
    """

    def __init__(self, reader: Reader, steps: range, *, ahead: int = 3) -> None:
        self.reader = reader
        self._batches = _made_ahead(reader.batch, steps, ahead)

    def __iter__(self) -> Iterator[Batch]:
        return self._batches

    def __enter__(self) -> Dataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead; the iteration is then at its end."""
        self._batches.close()


def _made_ahead(make: Callable[[int], T], steps: Iterable[int], ahead: int) -> Generator[T, None, None]:
    """Yield make(step) for each step, in order, with up to `ahead` of them under way or waiting."""
    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
    try:
        for step in steps:
            pending.append(pool.submit(make, step))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
