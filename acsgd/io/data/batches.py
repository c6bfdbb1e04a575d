"""Batches of one replica, read ahead in the background."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import Tensor

from acsgd.comm.waits import DIRECT, Waits
from acsgd.io.data.rows.base import RowReader
from acsgd.io.data.rows.streamed import StreamedRows
from acsgd.io.data.sampler import Ints, Sampler, Samples
from acsgd.io.data.stream.state import StreamState
from acsgd.io.files.read_ahead import ReadAhead
from acsgd.layers.batch import Batch

AHEAD = 3
"""Maximum number of batches read ahead."""


@dataclass(frozen=True)
class BatchReader:
    """Reads one replica's batch of any step."""

    rows: RowReader
    sampler: Sampler
    micros: range
    """Micro-batches of the global batch that the replica trains on, where `batch` is not given others."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user on the rows of each source."""
        return self.rows.notes

    def fingerprint(self) -> str:
        """Return a string that differs between hosts with different texts."""
        return self.rows.fingerprint()

    def batch(self, step: int, micros: range | None = None) -> Batch:
        """Return the batch of a step, counted from 0, as new tensors.

        micros: micro-batches of the global batch, contiguous; may be empty. Default: those of this reader.
        """
        micros = self.micros if micros is None else micros
        mine = slice(micros.start * self.rows.micro, micros.stop * self.rows.micro)
        sources, indices, ids, epochs = (field[mine] for field in _dealt(self.sampler, step))
        rows = self.rows.read(sources, indices, epochs)
        upcoming = _dealt(self.sampler, step + 1).ids[mine]
        return Batch(
            inputs=rows.inputs,
            labels=rows.labels,
            sample_ids=self._in_micros(ids),
            micro_ids=micros,
            upcoming_ids=self._in_micros(upcoming),
            num_tokens=rows.num_tokens,
            longest_rows=rows.longest_rows,
            checksum=sum(streamed.checksum(index) for _, streamed, index in self._streams(step)),
        )

    def look_ahead(self, step: int) -> None:
        """Read what streamed sources have in a step, as `StreamedRows.look_ahead`."""
        for _, rows, index in self._streams(step):
            rows.look_ahead(index)

    def stream_states(self, step: int) -> tuple[StreamState | None, ...]:
        """Return what a checkpoint of `step` steps records of each source. Empty if this rank streams none."""
        states = {source: rows.state(index) for source, rows, index in self._streams(step)}
        return tuple(states.get(source) for source in range(len(self.rows.rows))) if states else ()

    def restore(self, states: Sequence[StreamState | None]) -> None:
        """Read streamed sources on from what a checkpoint records of each source."""
        for rows, state in zip(self.rows.rows, states, strict=False):
            if isinstance(rows, StreamedRows) and state is not None:
                rows.restore(state)

    def keep_known(self, before: BatchReader) -> None:
        """Keep what another reader of the same sources has found of streamed ones: how texts end, and formats."""
        for rows, known in zip(self.rows.rows, before.rows.rows, strict=True):
            if isinstance(rows, StreamedRows):
                rows.ends, rows.format = known.ends, known.format

    def close(self, *, wait: bool = True) -> None:
        """Stop reading streamed sources: a `batch` that waits for one raises WaitInterruptedError.

        wait: for the thread that tokenizes, for a few seconds; else it ends later.
        """
        for rows in self.rows.rows:
            if isinstance(rows, StreamedRows):
                rows.close(wait=wait)

    def _streams(self, step: int) -> list[tuple[int, StreamedRows, int]]:
        """Return index and rows of each source that this rank streams, and the number of rows before a step."""
        if not any(isinstance(rows, StreamedRows) for rows in self.rows.rows):
            return []
        sources = enumerate(zip(self.rows.rows, self.sampler.drawn_before(step), strict=True))
        return [(source, rows, index) for source, (rows, index) in sources if isinstance(rows, StreamedRows)]

    def _in_micros(self, ids: Ints) -> Tensor:
        return torch.from_numpy(ids.copy()).unflatten(0, (len(ids) // self.rows.micro, self.rows.micro))


@functools.lru_cache(maxsize=2)  # each step reads its own samples and the ids of the next ones
def _dealt(sampler: Sampler, step: int) -> Samples:
    """Return the samples of a step in the order in which they are dealt, which nobody changes."""
    return sampler.samples(step).dealt(sampler.unit)


class Dataset:
    """Batches of a run, read ahead by one background thread. The thread starts with the first batch.

    Can be iterated once. Errors of a read are raised by the iteration. To stop the thread early, close the dataset or
    use it as a context manager.

    micros: returns the micro-batches of a step, see `BatchReader.batch`; called by the thread that iterates, when the
    batch `ahead` steps before is taken. ahead: maximum number of batches read ahead. waits: in which training waits for
    a batch.
    """

    def __init__(
        self,
        reader: BatchReader,
        steps: range,
        *,
        micros: Callable[[int], range | None] = lambda _: None,
        ahead: int = AHEAD,
        waits: Waits = DIRECT,
    ) -> None:
        self.reader = reader
        keys = ((step, micros(step)) for step in steps)
        self._batches = ReadAhead(lambda key: reader.batch(*key), keys, max(ahead - 1, 0), waits=waits)
        self._upcoming: Batch | None = None
        self._waiting_since: float | None = None
        self._error: Exception | None = None
        """Of the read of the batch after the last one."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Return whether the next batch is there, after at most some seconds, which count as a wait for it."""
        if timeout_s:
            self._waiting_since = self._waiting_since or time.perf_counter()
        return self._error is not None or self._batches.has(1 if self._upcoming else 2, timeout_s)

    @property
    def has_failed(self) -> bool:
        """Whether the next batch could not be read: the iteration raises its error."""
        return self._error is not None or (self._upcoming is None and self._batches.has_failed)

    def __next__(self) -> Batch:
        started, self._waiting_since = self._waiting_since or time.perf_counter(), None
        if self._error is not None:
            raise self._error
        batch = self._upcoming or next(self._batches)
        try:
            self._upcoming = next(self._batches, None)
        except Exception as error:  # belongs to the next step
            self._upcoming, self._error = None, error
        return replace(batch, upcoming=self._upcoming, wait_s=time.perf_counter() - started)

    def __enter__(self) -> Dataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading ahead and end the iteration."""
        self._batches.close()
        self._upcoming = None


def reading_bytes(batch: int, replica_batch: int, sequence: int, *, arrays: int = 2) -> int:
    """Return how much host memory a `Dataset` takes at most, bytes.

    batch: sequences of the global batch, about 90 bytes each. replica_batch: sequences of the replica. arrays: inputs
    and labels of a sequence, of 8 bytes per token each: in the batches read ahead, the one in use and the next one,
    whose rows are held, too, inputs and labels of a language model in one array.
    """
    return 90 * batch + replica_batch * (sequence + 2) * 8 * (arrays * (AHEAD + 2) + arrays - 1)
