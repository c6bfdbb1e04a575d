"""Links between two ranks, and runs of delta links whose steps are recorded at both ends."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from acsgd.codecs.identity import Identity
from acsgd.comm.waits import Meter
from acsgd.groups import Groups, connect
from acsgd.pp.wire.cache import ActivationCache, EntryKey
from acsgd.pp.wire.cache_disk import HEADER_BYTES as FILE_HEADER_BYTES
from acsgd.pp.wire.cache_disk import TRAILER_BYTES, DiskStore
from acsgd.pp.wire.cache_plan import CachePlan
from acsgd.pp.wire.coder import TensorSpec, TransferInfo
from acsgd.pp.wire.delta import Delta
from acsgd.pp.wire.link import Link, LinkFactory
from acsgd.streams import Streams
from acsgd.topology import Topology
from lib.patience import NO_LIMIT_S
from lib.ranks import on_ranks

CPU = Streams(torch.device("cpu"))
MICRO, TOKENS, WIDTH = 2, 5, 6
SPEC = TensorSpec((MICRO, TOKENS, WIDTH), torch.float32)
LAYER = "block-00003"
SIDES = "sender", "receiver"
SLOT_BYTES = 2 * TOKENS * WIDTH + 4 + TRAILER_BYTES
"""Bytes of a slot in a cache file: the entry in fp16, padded to 16 bytes, and its trailer."""

Step = list[list[int]]
"""Sample ids of each micro-batch of a step."""
Edit = Callable[[int, Path], None]
"""Function of rank and directory that changes the cache files of a rank before a session."""


def connect_pipeline(
    rank: int, world_size: int, store: Path, timeout_s: float = NO_LIMIT_S
) -> AbstractContextManager[Groups]:
    """Connect `world_size` ranks as one pipeline."""
    file_store = dist.FileStore(str(store), world_size)
    return connect(Topology.of(rank, world_size, world_size), timeout=timedelta(seconds=timeout_s), store=file_store)


@dataclass
class LinkSession:
    """Steps of a link from open to close."""

    steps: Sequence[Step]
    layer: str = LAYER
    """First layer after the boundary."""
    fresh: bool = False
    exact_steps: int = 0
    edit: Edit | None = None
    lost_writes: int = 0
    """Number of writes at the end that rank 1 loses, as if killed before they reached the disk."""
    capacity: int = 100
    poison: tuple[int, int, float] | None = None
    """Step, sample and value of an activation that is replaced by inf or nan."""


@dataclass
class StepRecord:
    """What one rank observed in a step."""

    entries: dict[int, tuple[int, bytes]]
    """Version and entry in the cache after the step, by sample."""
    received: list[Tensor] = field(default_factory=list)
    sent_bytes: int = 0


Records = list[list[StepRecord]]
"""By session and step."""


@dataclass
class Scenario:
    """Consecutive sessions of one link."""

    delta: Delta
    sessions: Sequence[LinkSession]
    fault: Callable[[int], AbstractContextManager[None]] | None = None
    """Takes the rank and returns a context manager that injects a fault; entries may then be lost without an error."""


def activations(step: int, ids: Sequence[int]) -> Tensor:
    """Return activations of some samples that change a little in each step, [B, T, D]."""
    rows = []
    for sample in ids:
        base = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(sample))
        drift = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + sample))
        rows.append(base + 0.05 * drift)
    return torch.stack(rows)


def run_scenarios(
    rank: int, world_size: int, store: Path, directory: Path, scenarios: Mapping[str, Scenario]
) -> dict[str, Records]:
    """Run scenarios as rank 0, the sender, or rank 1, the receiver; cache files are kept in directory/name."""
    records: dict[str, Records] = {}
    with connect_pipeline(rank, world_size, store) as groups:
        for number, (name, scenario) in enumerate(scenarios.items()):
            fault = scenario.fault(rank) if scenario.fault is not None else contextlib.nullcontext()
            with fault:
                records[name] = _run(rank, groups, scenario, directory / str(number))
    return records


def _run(rank: int, groups: Groups, scenario: Scenario, directory: Path) -> Records:
    records: Records = []
    step = 0
    for number, session in enumerate(scenario.sessions):
        if session.edit is not None:
            session.edit(rank, directory)
        groups.all_gather_text(f"{directory} {number}", "", timeout_s=NO_LIMIT_S)
        meter = Meter()
        plan = CachePlan([session.capacity], directory, [session.layer], "test", session.fresh)
        codecs = [scenario.delta], [Identity()]
        factory = LinkFactory(groups.pp, groups.waits, CPU, [{"hidden": SPEC}], *codecs, meter, Meter(), plan)
        link = factory.open(0, peer=1 - rank, downstream=rank == 0)
        records.append([])
        for index, micros in enumerate(session.steps):
            meter.reset()
            upcoming = session.steps[min(index + 1, len(session.steps) - 1)]
            link.begin_step([*chain(*micros)], [*chain(*upcoming)])
            received = _transfer(rank, link, step, micros, session, codec=int(index >= session.exact_steps))
            entries = entries_of(cache_of(link), allow_lost=scenario.fault is not None)
            records[-1].append(StepRecord(entries, received, meter.sent_bytes))
            step += 1
        if rank == 1:
            lose_writes(cache_of(link), session.lost_writes)
        link.close()
    return records


def _transfer(rank: int, link: Link, step: int, micros: Step, session: LinkSession, *, codec: int) -> list[Tensor]:
    """Send the micro-batches of a step, or receive and return them."""
    received = []
    for micro, ids in enumerate(micros):
        info = TransferInfo(step, micro, codec, tuple(ids))
        if rank == 1:
            link.inbox.post()
            received.append(link.receive(info).state["hidden"])
            continue
        x = activations(step, ids)
        if session.poison is not None and session.poison[0] == step:
            x[[sample == session.poison[1] for sample in ids], 2, 3] = session.poison[2]
        link.send(info, {"hidden": x})
    link.outbox.drain()
    return received


def run_both_ends(tmp_path: Path, scenarios: Mapping[str, Scenario]) -> dict[str, tuple[Records, Records]]:
    """Return the records of sender and receiver by scenario. Both ends must hold the same entries after every step."""
    sender, receiver = on_ranks(2, run_scenarios, tmp_path / "store", tmp_path, scenarios)
    for name, scenario in scenarios.items():
        for step, (ours, theirs) in enumerate(zip(chain(*sender[name]), chain(*receiver[name]), strict=True)):
            assert scenario.fault is not None or ours.entries == theirs.entries, (name, step)
            assert ours.entries, (name, step)
    return {name: (sender[name], receiver[name]) for name in scenarios}


def exact_samples(first_step: int, steps: Sequence[Step], records: Sequence[StepRecord]) -> list[set[int]]:
    """Return by step the samples that arrived bit for bit, which cache misses do; records: the receiver's."""
    found = []
    for step, (micros, record) in enumerate(zip(steps, records, strict=True), start=first_step):
        ids = [*chain(*micros)]
        rows = zip(ids, torch.cat(record.received), activations(step, ids), strict=True)
        found.append({sample for sample, got, sent in rows if torch.equal(got, sent)})
    return found


def random_steps(seed: int, samples: int, steps: int, micros: int = 3) -> list[Step]:
    """Return steps of samples drawn with repetition, so that some occur twice in a step, or in a micro-batch."""
    draw = random.Random(seed)
    return [[[draw.randrange(samples) for _ in range(MICRO)] for _ in range(micros)] for _ in range(steps)]


def cache_of(link: Link) -> ActivationCache:
    (cache,) = link._cache_sync._caches
    return cache


def entries_of(cache: ActivationCache, *, allow_lost: bool = False) -> dict[int, tuple[int, bytes]]:
    """Return version and entry by sample. allow_lost: leave out entries that cannot be read instead of failing."""
    entries = {}
    for sample, (slot, version) in cache._table.items():
        entry = cache._store.read(slot, EntryKey(sample, version))
        assert entry is not None or allow_lost, sample
        if entry is not None:
            entries[sample] = version, entry.numpy().tobytes()
    return entries


def lose_writes(cache: ActivationCache, count: int) -> None:
    """Erase the slots written last, as if the process had been killed before it wrote them."""
    if count:
        store = cache._store
        assert isinstance(store, DiskStore)
        for slot in list(store._writes)[-count:]:
            store._writes[slot].result()
            with store._path.open("r+b") as file:
                file.seek(store._offset(slot))
                file.write(bytes(SLOT_BYTES))


def cache_file(rank: int, directory: Path) -> Path:
    return directory / f"{LAYER}.{SIDES[rank]}.hidden"


def flip_bits(path: Path, slots: Sequence[int], offset: int) -> None:
    """Flip a bit of the byte at `offset` in some slots of a cache file."""
    with path.open("r+b") as file:
        for slot in slots:
            position = FILE_HEADER_BYTES + slot * SLOT_BYTES + offset
            file.seek(position)
            byte = file.read(1)
            file.seek(position)
            file.write(bytes([byte[0] ^ 0x10]))
