"""Laws of copies between disks: where they are, who sends them, at which rate, and what a failure leaves."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import cast

import pytest
from torch import Tensor

from acsgd.comm.waits import DIRECT
from acsgd.errors import CorruptFileError, RunError
from acsgd.groups import Groups
from acsgd.io.checkpoint import copies
from acsgd.io.checkpoint.copies import Disks, FileExchange, FileTransfer, fetch, place, plan_transfers
from acsgd.io.files.checksum import new_file_checksum
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.manifest import StoredFile

A, B = {"a"}, {"b"}


@pytest.mark.parametrize(
    ("origin", "layers", "copies", "expected"),
    [
        (0, [A], 2, (0,)),
        (1, [A, A], 1, (1,)),
        (1, [A, A], 2, (1, 0)),
        (0, [A, B, A, B], 2, (0, 2)),  # a replica that reads it, before the next one
        (1, [A, A, B, B], 2, (1, 0)),
        (2, [A, B, A, B], 3, (2, 0, 3)),
        (3, [B, B, B, A], 3, (3, 0, 1)),  # a ring
        (0, [A, A, A], 9, (0, 1, 2)),
    ],
)
def test_copies_are_on_disks_that_read_the_layer_then_on_the_next_ones(
    origin: int, layers: list[set[str]], copies: int, expected: tuple[int, ...]
) -> None:
    assert place(origin, layers, "a", copies=copies) == expected


@pytest.mark.parametrize("disks", range(2, 6))
def test_each_disk_holds_as_much_if_each_writes_as_much(disks: int) -> None:
    for number in range(1, disks + 1):
        held = [disk for origin in range(disks) for disk in place(origin, [set()] * disks, "a", copies=number)]
        assert [held.count(disk) for disk in range(disks)] == [number] * disks


def file_of(name: str, size: int = 1) -> StoredFile:
    return StoredFile(name, size, "0" * 32)


@pytest.mark.parametrize(
    ("held", "wanted", "expected"),
    [
        (["ab", ""], ["ab", "ab"], ["a01", "b01"]),
        (["a", "b"], ["a", "b"], []),
        (["ab", "ab", ""], ["", "", "ab"], ["a02", "b12"]),  # from the one that has sent less
        (["a", "", ""], ["", "a", "a"], ["a01", "a02"]),
        (["", ""], ["a", ""], []),  # nobody has it
    ],
)
def test_each_disk_gets_what_it_lacks_from_those_that_have_it(
    held: list[str], wanted: list[str], expected: list[str]
) -> None:
    planned = plan_transfers([file_of("a"), file_of("b")], held, wanted)
    assert [f"{file.file}{source}{target}" for file, source, target in planned] == expected


class Links:
    """Messages and meetings between threads, as those of `Groups`."""

    def __init__(self) -> None:
        self._queues: dict[object, Queue[Tensor]] = {}

    def _queue(self, *key: object) -> Queue[Tensor]:
        return self._queues.setdefault(key, Queue())

    def of(self, rank: int) -> Groups:
        def isend(tensor: Tensor, to: int, tag: int) -> SimpleNamespace:
            self._queue(rank, to).put(tensor.clone())
            return SimpleNamespace(wait=lambda: True)

        def irecv(buffer: Tensor, source: int, tag: int) -> SimpleNamespace:
            return SimpleNamespace(wait=lambda: buffer.copy_(self._queue(source, rank).get(timeout=60)))

        def meet(name: str, other: int, *, timeout_s: float) -> None:
            self._queue(name, rank).put(Tensor())
            self._queue(name, other).get(timeout=60)

        background, world = SimpleNamespace(isend=isend, irecv=irecv), SimpleNamespace(rank=lambda: rank)
        return cast(Groups, SimpleNamespace(world=world, background=background, waits=DIRECT, meet=meet))


def exchange(directories: Sequence[Path], transfers: Sequence[FileTransfer], rate: float | None = None) -> list[str]:
    """Carry out transfers between hosts of one rank each; return what `FileExchange.run` does."""
    links, ranks = Links(), range(len(directories))
    disks = Disks(tuple((rank,) for rank in ranks), tuple(f"host{rank}" for rank in ranks))
    with ThreadPoolExecutor(len(directories)) as pool:
        runs = [
            pool.submit(FileExchange(links.of(rank), disks, rate).run, transfers, directory)
            for rank, directory in enumerate(directories)
        ]
        return [run.result(60) for run in runs]


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    """Directories of three hosts, each with a file of its number that has several messages."""
    directories = [tmp_path / f"host{host}" for host in range(3)]
    for host, directory in enumerate(directories):
        directory.mkdir()
        (directory / f"{host}.file").write_bytes(bytes([host + 1]) * 25)
    return directories


def all_to_all(hosts: Sequence[Path]) -> list[FileTransfer]:
    files = [StoredFile(f"{n}.file", 25, new_file_checksum(bytes([n + 1]) * 25).hexdigest()) for n in range(len(hosts))]
    pairs = itertools.permutations(range(len(hosts)), 2)
    return [FileTransfer(files[source], source, target) for source, target in pairs]


def test_all_hosts_send_and_receive_at_once(hosts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "CHUNK_BYTES", 10)
    for transfers in (all_to_all(hosts), all_to_all(hosts)[::-1]):
        assert exchange(hosts, transfers) == ["", "", ""]
        for directory in hosts:
            found = {path.name: path.read_bytes() for path in directory.iterdir()}
            assert found == {f"{n}.file": bytes([n + 1]) * 25 for n in range(3)}


def test_a_rate_bounds_what_a_host_sends(hosts: list[Path]) -> None:
    started = time.monotonic()
    transfers = [each for each in all_to_all(hosts) if each.source == 0]
    assert exchange(hosts, transfers, rate=100.0) == ["", "", ""]
    assert time.monotonic() - started >= 0.25, "the second file waits until the first may have been sent"


def corrupt(hosts: list[Path]) -> None:
    (hosts[0] / "0.file").write_bytes(b"x" * 25)


def shorten(hosts: list[Path]) -> None:
    (hosts[0] / "0.file").write_bytes(bytes(24))


def remove(hosts: list[Path]) -> None:
    (hosts[0] / "0.file").unlink()


def block(hosts: list[Path]) -> None:
    (hosts[1] / ".0.file.partial").mkdir()


NOT_THE_SAME = "0.file of host0 is not what its manifest says"


@pytest.mark.parametrize(
    ("damage", "reported"),
    [(corrupt, NOT_THE_SAME), (shorten, NOT_THE_SAME), (remove, "host0/0.file: "), (block, "host1/.0.file.partial: ")],
)
def test_a_file_that_cannot_be_copied_is_reported_and_absent_and_the_others_are_copied(
    damage: Callable[[list[Path]], None], reported: str, hosts: list[Path]
) -> None:
    damage(hosts)
    transfers = [each for each in all_to_all(hosts) if each.target == 1]
    assert any(reported in problem for problem in exchange(hosts, transfers))
    assert not (hosts[1] / "0.file").exists()
    assert (hosts[1] / "2.file").read_bytes() == bytes([3]) * 25


@pytest.mark.parametrize(
    ("holders", "gives_up", "is_corrupt", "message"),
    [
        (["b", "c"], False, False, "step-1 needs x of b, c: start b or c as well; to give this checkpoint up, move it"),
        (["a", "b"], False, False, "step-1 needs x of a, b: start b as well"),
        (["b"], True, True, "step-1/x is not valid on any host of this run; b had it"),
        (["a"], False, True, "step-1/x is not valid on any host of this run; a had it"),
        ([], False, True, "step-1/x is not valid on any host of this run$"),
    ],
)
def test_a_checkpoint_is_corrupt_if_no_absent_host_may_have_its_files(
    holders: list[str], gives_up: bool, is_corrupt: bool, message: str
) -> None:
    def verify(file: StoredFile) -> None:
        raise CorruptFileError(Path("step-1") / file.file, "is missing")

    world = SimpleNamespace(rank=lambda: 0)
    groups = SimpleNamespace(world=world, all_gather_text=lambda _, text, timeout_s: [text])
    manifest = SimpleNamespace(files=[file_of("x")], hosts={"x": holders})
    shards = SimpleNamespace(path=Path("step-1"), manifest=manifest, verify=verify)
    exchange = FileExchange(cast(Groups, groups), Disks(names=("a",)))
    with pytest.raises(RunError, match=message) as caught:
        fetch(cast(ShardDirectory, shards), ["x"], exchange, gives_up=gives_up, timeout_s=1)
    assert isinstance(caught.value, CorruptFileError) == is_corrupt
