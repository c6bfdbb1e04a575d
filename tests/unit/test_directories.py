"""Laws of what a run needs of the file system of its checkpoints."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar, cast

import pytest
from lib.records import RECORD

from acsgd.config.options import CheckpointConfig, LogConfig, OptimConfig, RunConfig
from acsgd.elastic.membership.messages import Host, View
from acsgd.elastic.membership.plan import Plan
from acsgd.elastic.view_resources import find_view_disks
from acsgd.errors import RefusedError, RunError
from acsgd.failures.processes import ProcessIdentity
from acsgd.groups import Groups
from acsgd.io.checkpoint import copies
from acsgd.io.checkpoint.copies import Disks, FileTransfer
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.files.atomic import missing_operations, rename
from acsgd.io.telemetry.json_lines import JsonLinesSink
from acsgd.io.telemetry.record import RunEvent
from acsgd.optim.adamw import AdamW
from acsgd.run.lock.lease import Lease
from acsgd.run.plan.job import Job
from acsgd.run.plan.limits import ParameterCount
from acsgd.run.setup import directories
from acsgd.run.setup.directories import RunDisks, check_room, find_run_disks, open_disks, share_metrics
from acsgd.shards.manifest import MANIFEST
from acsgd.topology import Topology

T = TypeVar("T")
WAIT_S = 60.0


class ThreadGroups:
    """The text exchanges of `Groups`, between threads."""

    run_id = "run"
    exchanges: ClassVar[list[str]] = []
    """Names of those so far."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._texts = [""] * ranks

    def of(self, rank: int) -> Groups:
        def all_gather_text(name: str, text: str, *, timeout_s: float) -> list[str]:
            self._texts[rank] = text
            if self._barrier.wait(min(timeout_s, WAIT_S)) == 0:
                self.exchanges.append(name)
            texts = [*self._texts]
            self._barrier.wait(min(timeout_s, WAIT_S))  # before one begins another exchange
            return texts

        def wait_for_all(name: str, *, timeout_s: float) -> None:
            self._barrier.wait(min(timeout_s, WAIT_S))

        texts = {"all_gather_text": all_gather_text, "wait_for_all": wait_for_all}
        return cast(Groups, SimpleNamespace(run_id=self.run_id, world=SimpleNamespace(rank=lambda: rank), **texts))


def job_of(rank: int, ranks: int, directory: Path) -> Job:
    config = SimpleNamespace(log=LogConfig(str(directory)), checkpoint=CheckpointConfig(), run=RunConfig())
    paths = SimpleNamespace(run=directory, checkpoints=CheckpointDirectory(directory / "checkpoints"))
    topology = Topology.of(rank, ranks, 1)
    return cast(Job, SimpleNamespace(topology=topology, paths=paths, config=config, disk_timeout_s=WAIT_S))


def on_ranks(of_ranks: list[Path], act: Callable[[Job, Groups], T]) -> list[T | RunError]:
    """Act on each rank with the directory that has the run's path on its host; return results or errors by rank."""
    groups = ThreadGroups(len(of_ranks))

    def run(rank: int) -> T | RunError:
        try:
            return act(job_of(rank, len(of_ranks), of_ranks[rank]), groups.of(rank))
        except RunError as error:
            return error

    with ThreadPoolExecutor(len(of_ranks)) as pool:
        return [*pool.map(run, range(len(of_ranks)))]


@pytest.mark.parametrize(
    ("names", "members"),
    [
        ("aaa", [(0, 1, 2)]),
        ("ab", [(0,), (1,)]),
        ("aabb", [(0, 1), (2, 3)]),
        ("abab", [(0, 2), (1, 3)]),
        ("abca", [(0, 3), (1,), (2,)]),
    ],
)
def test_ranks_that_see_the_same_directory_share_a_disk(
    names: str, members: list[tuple[int, ...]], tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    of_ranks = [tmp_path / ("link" if rank and name == "a" else name) for rank, name in enumerate(names)]
    for found in on_ranks(of_ranks, partial(find_run_disks, host="host")):
        assert isinstance(found, RunDisks)
        assert [*found.log.members] == [*found.checkpoints.members] == members
        assert found.log.is_shared == (len(members) == 1)
        assert len({*found.log.names}) == len(members), "hosts of the same name are told apart by their paths"
        leaders = [ranks[0] for ranks in members]
        assert [rank for rank in range(len(names)) if found.log.is_leader(rank)] == leaders
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_file_that_another_host_sees_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with NFS, whose clients cache that a name is missing."""
    looked: list[Path] = []
    read_text = Path.read_text

    def late(path: Path, *args: Any) -> str:
        if path.name.startswith(directories.PROBE):
            looked.append(path)
            if len(looked) <= 6:
                raise FileNotFoundError
        return read_text(path, *args)

    monkeypatch.setattr(Path, "read_text", late)
    find = partial(find_run_disks, host="host")
    assert all(cast(RunDisks, found).log.is_shared for found in on_ranks([tmp_path, tmp_path], find))
    assert len(looked) > 6


class FilesOfThreads:
    """In place of `FileExchange`, between threads: copies what is at the same path on each disk."""

    directories: dict[int, Path]
    """By disk."""

    def __init__(self, groups: Groups, disks: Disks, rate: float | None = None) -> None:
        self._groups = groups
        self._disks = disks

    def run(self, transfers: Sequence[FileTransfer], directory: Path) -> str:
        for file, source, target in transfers:
            if target == self._disks.of(self._groups.world.rank()):
                shutil.copy(self.directories[source] / file.file, directory / file.file)
        self._groups.wait_for_all("copying", timeout_s=WAIT_S)
        return ""


@pytest.mark.parametrize("seed", [*range(8), 13])
def test_metrics_of_all_hosts_have_the_last_execution_of_each_step(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever hosts were away while the others repeated steps, with other losses, that these had written.

    A host may have completed a step of which no other has all reports, before it ends, or is cut off and joins again.
    The others return to a snapshot if a stage is lost. It also may have been a spare, while others trained. And some
    hosts may have been started without views, from a checkpoint. No clock is trusted.
    """
    monkeypatch.setattr(directories, "time", SimpleNamespace(time=lambda: 0.0))
    monkeypatch.setattr(directories, "FileExchange", FilesOfThreads)
    draw, executions, names = Random(seed), count(1), [tmp_path / name for name in "abcd"]
    sinks: dict[Path, JsonLinesSink] = {}
    members, losses, ahead = names, list[float](), 0
    for directory in names:
        directory.mkdir()
    for view in range(1, 9):
        free = [each for each in names if each != members[0] or not ahead]
        hosts, trained = draw.sample(free, min(len(free), draw.choice((2, 3, 4)))), [*{*free} & {*members}]
        members = [*hosts, *sorted(trained)[: not {*hosts} & {*trained}]]  # a majority of the hosts that have trained
        del losses[len(losses) - min(len(losses), draw.choice((0, 0, 0, 1, 7))) :]
        if is_static := draw.random() < 0.2:
            sinks.clear()
        resumed_at = len(losses) if is_static else None
        for directory in members:
            if directory not in sinks or draw.random() < 0.5:  # its processes are new ones
                sinks[directory] = JsonLinesSink(directory / "metrics.jsonl", resumed_at=len(losses), notify=print)
        disks = Disks(tuple((rank,) for rank in range(len(members))), tuple("abcd"))
        FilesOfThreads.directories = dict(enumerate(members))

        def share(job: Job, groups: Groups, disks: Disks = disks, resumed_at: int | None = resumed_at) -> list[str]:
            return share_metrics(job, groups, disks, sinks[job.paths.run], resumed_at=resumed_at)

        assert on_ranks(members, share) == [[] for _ in members]
        for directory in members if not is_static else ():
            sinks[directory].event(RunEvent("view", len(losses), "", {"view": view}))
        for _ in range(draw.choice((0, 1, 2, 8))):
            losses.append(next(executions))
            for directory in members:
                sinks[directory].log(RECORD._replace(step=len(losses), loss=losses[-1]))
        if ahead := draw.randint(0, 1):
            sinks[members[0]].log(RECORD._replace(step=len(losses) + 1, loss=next(executions)))
        for directory in members[ahead:]:
            lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
            steps = [(line["step"], line["loss"]) for line in lines if "step" in line]
            assert steps == [*enumerate(losses, 1)], f"view {view}, {directory.name}"
        if is_static:
            sinks.clear()


def test_a_host_that_was_away_keeps_lines_that_the_removed_file_of_another_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "FileExchange", FilesOfThreads)
    of_ranks, disks = [tmp_path / "a", tmp_path / "b"], Disks(((0,), (1,)), ("a", "b"))
    FilesOfThreads.directories = dict(enumerate(of_ranks))
    for directory in of_ranks:
        directory.mkdir()
    sinks = {each: JsonLinesSink(each / "metrics.jsonl", resumed_at=0, notify=print) for each in of_ranks}
    current, away = sinks.values()
    for sink in (current, away):
        sink.event(RunEvent("view", 0, "", {"view": 1}))
        for step in range(1, 5):
            sink.log(RECORD._replace(step=step))
    current.event(RunEvent("view", 4, "", {"view": 2}))
    for step in range(5, 9):
        if step == 7:
            (tmp_path / "a" / "metrics.jsonl").unlink()
        current.log(RECORD._replace(step=step))
        if step < 8:
            away.log(RECORD._replace(step=step, loss=0.0))
    on_ranks(of_ranks, lambda job, groups: share_metrics(job, groups, disks, sinks[job.paths.run]))
    found = [json.loads(line) for line in (tmp_path / "b" / "metrics.jsonl").read_text().splitlines()]
    lines = [(line.get("event", line.get("step")), line.get("loss")) for line in found]
    kept = [("view", None), *((step, RECORD.loss) for step in range(1, 5)), (5, 0.0), (6, 0.0)]
    assert lines == [*kept, ("view", None), (7, RECORD.loss), (8, RECORD.loss)]


def view_of(disks: str, *, from_disk: bool = False) -> View:
    """Return a view of hosts of one rank each, whose disks have the ids."""
    hosts = tuple(Host(f"h{rank}", f"host{rank}:1", disk) for rank, disk in enumerate(disks))
    return View(2, hosts, Plan(1, ranks=tuple(f"{host.id}/0" for host in hosts), from_disk=from_disk))


@pytest.mark.parametrize("from_disk", [True, False])
def test_a_copied_id_of_a_run_directory_is_refused_in_each_view(from_disk: bool, tmp_path: Path) -> None:
    of_ranks, view = [tmp_path / "a", tmp_path / "b", tmp_path / "c"], view_of("xyx", from_disk=from_disk)
    found = on_ranks(of_ranks, partial(find_view_disks, view=view))
    assert [type(each) for each in found] == [RunError, RunError, RefusedError]
    assert all("log.dir of host2:1 is a copy of that of host0:1" in str(each) for each in found)


def test_a_view_that_trains_on_writes_nothing_if_its_ids_say_who_shares_a_directory(tmp_path: Path) -> None:
    for found in on_ranks([tmp_path / "a", tmp_path / "b"], partial(find_view_disks, view=view_of("xy"))):
        assert cast(RunDisks, found) == RunDisks(*[Disks(((0,), (1,)), ("host0:1", "host1:1"))] * 2)
    assert not [*tmp_path.iterdir()]


def test_a_host_that_cannot_write_ends_the_start_of_a_run_but_no_view_that_trains_on(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    of_ranks = [tmp_path / "a", tmp_path / "b"]
    found = on_ranks(of_ranks, partial(find_view_disks, view=view_of("xx", from_disk=True)))
    assert [type(each) for each in found] == [RunError, RefusedError]
    assert all(f"{tmp_path / 'b'}: " in str(each) for each in found)
    for each in on_ranks(of_ranks, partial(find_view_disks, view=view_of("xx"))):
        assert cast(RunDisks, each).log == Disks(((0, 1),), ("host0:1",))


@pytest.mark.parametrize(
    ("keep", "every", "copies", "there", "fits"),
    [
        (2, "1", 2, "", True),
        (3, "1", 2, "", False),
        (4, "1", 1, "", True),
        (3, "5", 2, "", True),
        (9, None, 2, "", True),
        (3, "1", 2, ".step-00000001.run.partial", True),
        (3, "1", 2, ".step-00000001.removed", True),
        (3, "1", 2, "step-00000001", True),
        (3, "1", 2, "never step-00000001", False),
    ],
)
def test_a_run_does_not_start_if_a_host_has_no_room_for_the_checkpoints_it_keeps(
    keep: int, every: str | None, copies: int, there: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10 steps of 1,000 parameters with AdamW, on two hosts, of which the second has 40,000 bytes free.

    there: checkpoint.resume, and what is there with 9,000 bytes, a link without a target, and a file that vanishes.
    """
    stat = Path.stat

    def vanish(path: Path, **options: bool) -> Any:
        if path.name == "vanished":
            raise FileNotFoundError
        return stat(path, **options)

    def usage(path: Path) -> Any:
        return SimpleNamespace(free=40_000 if tmp_path / "b" in (path, path.parent) else 10**9)

    def check(job: Job, groups: Groups) -> list[str]:
        resume = "never" if "never" in there else "auto"
        checkpoint = CheckpointConfig(keep=keep, every=every, copies=copies, resume=resume)
        config = SimpleNamespace(checkpoint=checkpoint, optim=OptimConfig(lr=1, steps=10))
        model = SimpleNamespace(parameters=ParameterCount(1000, 0))
        plugins = SimpleNamespace(optimizer=AdamW())
        fields = {**vars(job), "config": config, "model": model, "plugins": plugins}
        return check_room(cast(Job, SimpleNamespace(**fields)), groups, Disks(((0,), (1,)), ("a", "b")))

    for name in "ab":
        (tmp_path / name).mkdir()
        if there:
            left = job_of(0, 1, tmp_path / name).paths.checkpoints.path / there.split()[-1]
            left.mkdir(parents=True)
            (left / "file").write_bytes(bytes(9000))
            (left / "vanished").touch()
            (left / "link").symlink_to("nowhere")
    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(Path, "stat", vanish)
    results = on_ranks([tmp_path / "a", tmp_path / "b"], check)
    if fits:
        assert results == [[], []]
        return
    assert [type(result) for result in results] == [RunError, RefusedError]
    assert "checkpoints of b has 0.00 GB for checkpoints, and 4 of at least 0.00 GB each" in str(results[1])
    assert "lower checkpoint.keep to 2, free space" in str(results[1])


def test_checkpoints_of_hosts_that_were_away_are_set_aside_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that cannot write a manifest trains on, but does not start a run."""
    of_ranks, disks = [tmp_path / "a", tmp_path / "b"], Disks(((0,), (1,)), ("host0", "host1"))
    (tmp_path / "a" / "checkpoints" / "step-00000003").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "checkpoints").touch()
    monkeypatch.setattr(copies, "_manifests", lambda directory: {1: b"{}"} if "a" in directory.path.parts else {})
    monkeypatch.setattr(directories, "_check_copies", lambda *_, **__: None)
    act = partial(open_disks, disks=RunDisks(disks, disks), before=RunDisks(disks, disks))
    for found in on_ranks(of_ranks, partial(act, step=2)):
        aside, failed = cast(list[str], found)
        assert aside.endswith(
            "step-00000003 of host0 is later than step 2 of the run; renamed to corrupt-step-00000003"
        )
        assert failed.startswith(f"manifests of checkpoints cannot be written: {tmp_path / 'b' / 'checkpoints'}: ")
    assert [type(each) for each in on_ranks(of_ranks, act)] == [RunError, RefusedError]


@pytest.mark.parametrize(("is_new", "exchanges"), [(False, 1), (True, 3)])
def test_hosts_that_have_the_same_files_find_that_out_in_one_exchange(
    is_new: bool, exchanges: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of checkpoints, and of lines of metrics; where a host lacks some, the others send them."""
    of_ranks, disks = [tmp_path / "a", tmp_path / "b"], Disks(((0,), (1,)), ("host0", "host1"))
    FilesOfThreads.directories = dict(enumerate(of_ranks))
    monkeypatch.setattr(directories, "FileExchange", FilesOfThreads)
    monkeypatch.setattr(ThreadGroups, "exchanges", [])
    for directory in of_ranks:
        lines, manifest = directory / "metrics.jsonl", directory / "checkpoints" / "step-00000001" / "manifest.json"
        directory.mkdir()
        if not (is_new and directory.name == "b"):
            manifest.parent.mkdir(parents=True)
            manifest.write_text("{}")
            lines.write_text('{"step": 1}\n')
    monkeypatch.setattr(copies, "_manifests", lambda at: dict.fromkeys([1] if at.of(1).exists() else [], b"{}"))
    sinks = {each: JsonLinesSink(each / "metrics.jsonl", resumed_at=1, notify=print) for each in of_ranks}

    def share(job: Job, groups: Groups) -> list[str]:
        known = RunDisks(disks, disks)
        notes = open_disks(job, groups, known, step=1, before=known)
        return notes + share_metrics(job, groups, disks, sinks[job.paths.run])

    assert on_ranks(of_ranks, share) == [[], []]
    names = ["listing checkpoints of all hosts", "sharing manifests", "writing manifests"][:exchanges]
    names += ["comparing metrics", "listing missing metrics", "completing metrics"][:exchanges]
    assert ThreadGroups.exchanges == names
    assert (tmp_path / "b" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert len([*tmp_path.glob("*/*/*/manifest.json")]) == 2


def test_the_last_host_says_that_its_checkpoints_have_no_copies(tmp_path: Path) -> None:
    before, alone = (Disks(((0,), (1,)), ("a", "b")), Disks(((0,),), ("a",)))
    act = partial(open_disks, disks=RunDisks(alone, alone), step=2)
    (found,) = on_ranks([tmp_path], partial(act, before=RunDisks(before, before)))
    assert found == [
        f"until another host joins, checkpoints are saved in {tmp_path / 'checkpoints'} of a alone, without copies"
    ]
    assert on_ranks([tmp_path], partial(act, before=RunDisks(alone, alone))) == [[]], "it is said once"


LACKING = {"no links": ("symlink", "link"), "no renames": ("rename",), "an object store": ("symlink", "link", "rename")}


@pytest.mark.parametrize("lacking", LACKING)
@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EPROTO])
def test_checkpoints_are_saved_replaced_and_removed_without_links_or_renames(
    lacking: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    for name in LACKING[lacking]:
        monkeypatch.setattr(os, name, refuse)
    words = {"symlink": "symbolic links", "link": "hard links", "rename": "renames of directories"}
    assert missing_operations(tmp_path) == [words[name] for name in LACKING[lacking]]
    directory = CheckpointDirectory(tmp_path)
    for step, content in ((1, "a"), (2, "b"), (2, "c"), (3, "d")):
        partial = directory.partial(step, "run")
        partial.mkdir()
        for name in (MANIFEST, "embed.safetensors"):
            (partial / name).write_text(content)
        directory.publish(step, "run")
    assert (directory.of(2) / "embed.safetensors").read_text() == "c"
    for best in (3, 1):
        directory.mark_best(best)
        assert directory.best() == directory.of(best)
    directory.prune(3, keep=1, keep_every=None)
    assert directory.steps() == [1, 3]
    assert directory.set_aside(directory.of(3)).name == "corrupt-step-00000003"
    moved = CheckpointDirectory(directory.set_all_aside(tmp_path / "metrics.jsonl"))
    assert (moved.steps(), directory.steps()) == ([1], [])
    assert moved.best() == moved.of(1)
    assert not directory.leftovers()

    first, second = (Lease(tmp_path, "log.dir", ProcessIdentity.current()) for _ in range(2))
    assert first._take([])
    assert not second._take([])
    first.release()
    assert second._take([])
    second.release()


def test_a_directory_that_is_moved_is_incomplete_until_all_of_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "rename", refuse)
    (tmp_path / "source").mkdir()
    for name in ("a", MANIFEST, "z"):
        (tmp_path / "source" / name).write_text(name)
    copied: list[str] = []
    copyfile = shutil.copyfile

    def copy(source: Path, target: Path, **options: bool) -> None:
        copied.append(target.name)
        copyfile(source, target, **options)

    monkeypatch.setattr(shutil, "copyfile", copy)
    rename(tmp_path / "source", tmp_path / "target")
    assert sorted(copied) == sorted(("a", MANIFEST, "z"))
    assert copied[-1] == MANIFEST
    assert not (tmp_path / "source").exists()
