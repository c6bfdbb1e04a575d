"""Laws of the batches of a replica, and of reading them ahead."""

from __future__ import annotations

import itertools
import threading
import time
import tracemalloc

import numpy as np
import pytest
import torch
from lib.corpora import one_document, windows_of
from torch import Tensor

from acsgd.io.data.batches import BatchReader, Dataset, reading_bytes
from acsgd.io.data.sampler import Sampler, Samples, deal
from acsgd.layers.batch import Batch

MIXTURE = Sampler(seed=7, batch=12, counts=(3, 7), sizes=(11, 40))
CORPORA = [
    one_document(np.arange(11 * 5 + 3, dtype="<u2")),
    one_document(np.arange(1000, 1000 + 40 * 5 + 1, dtype="<u4")),
]


def reader(micros: range, **options: bool) -> BatchReader:
    """Read MIXTURE in sequences of 5 and micro-batches of 2."""
    return BatchReader(windows_of(CORPORA, 5, 2, **options), MIXTURE, micros)


def test_every_token_but_the_first_is_a_target_once() -> None:
    sequence = 5
    for length in (6, 10, 11, 23):
        rows = windows_of([one_document(np.arange(length, dtype="<u2"))], sequence, 1)
        count = len(rows.rows[0])
        sampler = Sampler(seed=0, batch=count, counts=(1,), sizes=(count,))
        labels = BatchReader(rows, sampler, range(count)).batch(0).labels
        assert labels is not None
        assert sorted(labels.flatten().tolist()) == list(range(1, count * sequence + 1)), length
        assert length - count * sequence <= sequence, "the dropped remainder is at most a sequence"


def test_labels_are_the_inputs_shifted_by_one() -> None:
    batch = reader(range(6)).batch(3)
    assert batch.inputs is not None
    assert batch.labels is not None
    assert batch.inputs["input_ids"].dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.labels, batch.inputs["input_ids"] + 1)  # CORPORA count upwards


def test_the_upcoming_samples_are_those_of_the_next_step() -> None:
    for step in range(4):
        assert torch.equal(reader(range(2, 5)).batch(step).upcoming_ids, reader(range(2, 5)).batch(step + 1).sample_ids)


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch with inputs and labels."""
    assert batch.inputs is not None
    assert batch.labels is not None
    return [batch.inputs["input_ids"], batch.labels, batch.sample_ids]


def test_a_step_is_the_same_for_any_number_of_replicas() -> None:
    whole = reader(range(6)).batch(5)
    for replicas in range(1, 8):  # of 7, one has no micro-batch
        parts = [reader(range(6)).batch(5, part) for part in deal(6, [1.0] * (replicas - 1) + [0.5])]
        assert list(itertools.chain(*(part.micro_ids for part in parts))) == list(whole.micro_ids), replicas
        parts = [part for part in parts if part.micro_ids]
        for tensors in zip(tensors_of(whole), *map(tensors_of, parts), strict=True):
            assert torch.equal(torch.cat(tensors[1:]), tensors[0]), replicas
    assert sorted(whole.sample_ids.flatten().tolist()) == sorted(MIXTURE.samples(5).ids.tolist())


@pytest.mark.parametrize(("replicas", "batch"), [(2, 8), (2, 32), (4, 32), (8, 64)])
def test_a_sequence_mostly_returns_to_its_replica(replicas: int, batch: int) -> None:
    """The position in a batch is a rank among uniform hashes, so near a border it scatters as a binomial count does.

    With s = sqrt(u (1 - u) / batch) at a border u, two visits lie on different sides of it with the probability
    2 s / sqrt(pi), the integral of 2 Phi(x / s) Phi(-x / s).
    """
    epochs, steps = 40, 1000 // batch
    # an epoch at once: the stream of samples does not depend on the batch size
    sampler = Sampler(seed=4, batch=steps * batch, counts=(1,), sizes=(steps * batch,))
    where = np.empty((epochs, steps * batch), dtype=np.int64)
    for epoch in range(epochs):
        for ids in sampler.samples(epoch).ids.reshape(steps, batch):
            where[epoch, Samples(ids, ids, ids, ids).dealt().ids] = np.arange(batch) * replicas // batch
    moved = (where[1:] != where[:-1]).mean()
    borders = np.arange(1, replicas) / replicas
    expected = (2 * np.sqrt(borders * (1 - borders) / batch / np.pi)).sum()
    assert 0.8 * expected < moved < 1.1 * expected


@pytest.mark.parametrize(("wants_inputs", "wants_labels"), list(itertools.product([False, True], repeat=2)))
def test_a_stage_reads_only_what_it_needs(wants_inputs: bool, wants_labels: bool) -> None:
    batch = reader(range(2, 4), wants_inputs=wants_inputs, wants_labels=wants_labels).batch(0)
    assert (batch.inputs is not None) == wants_inputs
    assert (batch.labels is not None) == wants_labels
    assert batch.sample_ids.shape == (2, 2)
    tokens = None if batch.inputs is None else batch.inputs["input_ids"]
    assert all(x is None or (x.shape == (2, 2, 5) and x.is_contiguous()) for x in (tokens, batch.labels))


# ---- reading ahead


def same(a: Batch, b: Batch) -> bool:
    """Return whether two batches are equal."""
    return all(map(torch.equal, tensors_of(a), tensors_of(b)))


def test_starting_at_a_later_step_gives_the_same_batches() -> None:
    whole = list(Dataset(reader(range(6)), range(9)))
    late = list(Dataset(reader(range(6)), range(4, 9)))
    assert len(whole) == 9
    assert all(map(same, whole[4:], late))
    assert len(late) == 5


def read_ahead_threads() -> set[threading.Thread]:
    """Return the threads that read ahead in this process."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")}


def test_closing_stops_the_thread_and_the_iteration() -> None:
    before = read_ahead_threads()
    with Dataset(reader(range(6)), range(10**9)) as dataset:
        batches = iter(dataset)
        next(batches)
        assert read_ahead_threads() - before
    assert not read_ahead_threads() - before
    assert list(batches) == []
    with Dataset(reader(range(6)), range(3)):
        assert not read_ahead_threads() - before  # the thread starts with the first batch


def test_the_thread_ends_with_the_data() -> None:
    before = read_ahead_threads()
    assert len(list(Dataset(reader(range(6)), range(2)))) == 2
    assert not read_ahead_threads() - before


def test_reading_ahead_is_bounded_and_micro_batches_are_those_known_when_a_read_begins() -> None:
    requested: list[int] = []

    def micros(step: int) -> range:
        requested.append(step)
        return range(step)

    with Dataset(reader(range(6)), range(10), micros=micros, ahead=2) as dataset:
        for step, batch in zip(range(4), dataset, strict=False):
            assert requested == list(range(step + 3))
            assert batch.micro_ids == range(step)


def test_the_time_that_training_waits_for_a_batch_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    may_read, ends, original = threading.Event(), list[float](), BatchReader.batch

    def read(self: BatchReader, step: int, micros: range | None) -> Batch:
        assert step < 2 or may_read.wait(60)
        batch = original(self, step, micros)
        ends.append(time.perf_counter())
        return batch

    monkeypatch.setattr(BatchReader, "batch", read)
    with Dataset(reader(range(6)), range(4), ahead=1) as dataset:
        next(dataset)  # and the one after it
        threading.Timer(0.05, may_read.set).start()
        started = time.perf_counter()
        waited = next(dataset).wait_s
        assert ends[2] - started <= waited <= time.perf_counter() - started
        assert waited > 0.01


def test_the_memory_for_reading_is_bounded() -> None:
    """The bound that a start compares with the memory of the host holds, and is not far above."""
    sequence, batch = 64, 2**13
    rows = windows_of([one_document(np.zeros(batch * sequence + 1, dtype=np.uint16))], sequence, 1)
    sampler = Sampler(seed=0, batch=batch, counts=(1,), sizes=(batch,))
    bound = reading_bytes(batch, batch // 2, sequence)
    tracemalloc.start()
    try:
        for _ in Dataset(BatchReader(rows, sampler, range(batch // 2)), range(4)):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < bound < 4 * peak, (peak, bound)


def test_an_error_of_the_thread_is_raised_by_the_iteration() -> None:
    torn = [CORPORA[0], one_document(CORPORA[1].tokens[:7])]
    reader, before = BatchReader(windows_of(torn, 5, 2), MIXTURE, range(6)), read_ahead_threads()
    with pytest.raises(ValueError, match="shape"):
        list(Dataset(reader, range(9)))
    assert not read_ahead_threads() - before
