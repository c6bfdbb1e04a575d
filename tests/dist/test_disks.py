"""Law: hosts with disks of their own train, save and resume as hosts that share a directory."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from acsgd.config.options import AdapterConfig, CheckpointConfig, Config
from acsgd.io.checkpoint import saver as saver_module
from acsgd.io.checkpoint.copies import FileExchange, FileTransfer
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.io.checkpoint.inspect import inspect
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.manifest import Manifest, StoredFile
from tests.lib.cache import share_cache, shared_model, with_shared_cache
from tests.lib.forks import Result, Setup, StartedRun, finish, make_config, result_of, started
from tests.lib.shared import use_own_caches

RANKS, STEPS = 4, 7
"""Two replicas of two stages."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def calm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Result of a run that shares a directory."""
    return finish(configure(model, tmp_path_factory.mktemp("calm") / "run"), RANKS)


def configure(model: Path, run_dir: Path, **saves: Any) -> Config:
    checkpoint = CheckpointConfig(**{"every": "3", "best": "eval_loss"} | saves)
    return with_shared_cache(make_config(model, run_dir, processes=RANKS, steps=STEPS, checkpoint=checkpoint))


def unchanged(rank: int) -> None:
    pass


class Hosts:
    """Hosts that have a directory each, and run on some ranks each.

    has_own_caches: whether each tokenizes, and derives layers, by itself.
    """

    def __init__(self, model: Path, directory: Path, number: int, *, has_own_caches: bool = False) -> None:
        self.directory, self.names = directory, [f"host{host}" for host in range(number)]
        self._model, self._has_own_caches = model, has_own_caches

    def run(
        self, *, setup: Setup = unchanged, adapter: str | None = None, **saves: Any
    ) -> tuple[list[int | None], StartedRun]:
        """Run to the last step; return the exit codes."""
        config = configure(self._model, self.directory / "unused", **saves)
        log = dataclasses.replace(config.log, dir="run")  # relative to the directory of a host
        config = dataclasses.replace(config, log=log, adapter=AdapterConfig(adapter))
        with started(config, RANKS, setup=partial(self._begin, setup)) as run:
            return run.join(), run

    def _begin(self, setup: Setup, rank: int) -> None:
        name = self.names[rank * len(self.names) // RANKS]
        (self.directory / name).mkdir(exist_ok=True)
        os.chdir(self.directory / name)
        if self._has_own_caches:
            use_own_caches()
        else:
            share_cache(self._model, Path.cwd() / "run")
        socket.gethostname = lambda: name
        setup(rank)

    def checkpoints(self, host: str) -> CheckpointDirectory:
        return CheckpointDirectory(self.directory / host / "run" / "checkpoints")

    def return_to(self, step: int) -> None:
        """Remove the checkpoints after a step from all hosts."""
        for directory in map(self.checkpoints, self.names):
            for each in directory.steps():
                if each > step:
                    directory.remove(each)

    def result(self, host: str) -> Result:
        """Return the result of the finished run as the files of a host have it."""
        config = configure(self._model, self.directory / host / "run")
        return result_of(config)


@pytest.fixture
def hosts(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Hosts:
    monkeypatch.chdir(tmp_path)
    number = getattr(request, "param", RANKS)
    return Hosts(model, tmp_path, number, has_own_caches=number == 2)


@pytest.fixture(scope="module")
def finished_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the hosts of a finished run."""
    directory = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        codes, run = Hosts(model, directory, RANKS).run()
    assert codes == [0] * RANKS, run.notes()
    return directory


@pytest.fixture
def finished_hosts(hosts: Hosts, finished_run: Path) -> Hosts:
    """Hosts that have finished a run."""
    shutil.copytree(finished_run, hosts.directory, symlinks=True, dirs_exist_ok=True)
    return hosts


def same(result: Result, calm: Result) -> None:
    assert result.layers == calm.layers
    assert result.losses == calm.losses
    assert result.best == calm.best


@pytest.mark.parametrize("hosts", [2, 4], indirect=True)
def test_a_run_whose_host_lost_its_directory_resumes_equal_to_the_uninterrupted_one(hosts: Hosts, calm: Result) -> None:
    """Two hosts make their tokens each, which must be equal."""
    codes, run = hosts.run()
    assert codes == [0] * RANKS, run.notes()
    for host in hosts.names:
        same(hosts.result(host), calm)
    survives_any_loss(hosts, STEPS)
    hosts.return_to(3)
    shutil.rmtree(hosts.directory / hosts.names[1])
    codes, run = hosts.run()
    assert codes == [0] * RANKS, run.notes()
    assert any("resuming from run/checkpoints/step-00000003" in note for note in run.notes()), run.notes()
    for host in hosts.names:
        same(hosts.result(host), calm)
    survives_any_loss(hosts, STEPS)


def survives_any_loss(hosts: Hosts, step: int) -> None:
    """Check that the other hosts have all files of a checkpoint, whichever is lost, and that manifests list them."""
    paths = {host: hosts.checkpoints(host).of(step) for host in hosts.names}
    manifests = {(path / "manifest.json").read_bytes() for path in paths.values()}
    assert len(manifests) == 1
    for lost in hosts.names:
        others = [path for host, path in paths.items() if host != lost]
        for file in Manifest.read(paths[lost]).files:
            assert any((path / file.file).is_file() for path in others), (lost, file)
    for host, path in paths.items():
        shards = ShardDirectory(path)
        assert not [*shards.corrupt_files()]
        listed = {file for file, holders in shards.manifest.hosts.items() if host in holders}
        assert listed == {each.name for each in path.iterdir()} - {"manifest.json"}
        assert not inspect(path)[0].errors


def test_a_corrupt_file_is_replaced_by_the_copy_of_another_host(finished_hosts: Hosts, calm: Result) -> None:
    finished_hosts.return_to(3)
    own = next(finished_hosts.checkpoints("host1").of(3).glob("block-*.safetensors"))
    content = own.read_bytes()
    own.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    codes, run = finished_hosts.run()
    assert codes == [0] * RANKS, run.notes()
    assert own.read_bytes() == content
    same(finished_hosts.result("host1"), calm)


def test_without_copies_a_lost_host_is_named_and_its_checkpoint_is_not_resumed(model: Path, hosts: Hosts) -> None:
    hosts.run(copies=1)
    path = hosts.checkpoints("host0").of(STEPS)
    lost = [file for file, names in Manifest.read(path).hosts.items() if names == ["host3"]]
    before = hosts.checkpoints("host0").steps()
    _, run = Hosts(model, hosts.directory, 3).run()
    (error,) = run.errors
    assert f"run/checkpoints/{path.name} needs {lost[0]} of host3: start host3 as well" in error
    assert all(hosts.checkpoints(host).steps() == before for host in hosts.names)
    shutil.rmtree(hosts.directory / "host3")
    codes, run = hosts.run()
    assert all(codes)
    (error,) = run.errors
    assert f"run/checkpoints/{path.name}/{lost[0]} is not valid on any host of this run; host3 had it" in error


def test_the_newest_step_that_is_complete_on_the_hosts_that_are_there_is_taken(
    finished_hosts: Hosts, calm: Result
) -> None:
    """Of another history of a step, such as of a run without host 0, that of most hosts counts."""
    for name in finished_hosts.names[1::2]:  # those of one stage, whose files no other host has
        shutil.rmtree(finished_hosts.checkpoints(name).of(STEPS))
    other = finished_hosts.checkpoints("host0").of(3)
    manifest = Manifest.read(other)
    dataclasses.replace(manifest, hosts={}).write(other)
    codes, run = finished_hosts.run()
    assert codes == [0] * RANKS, run.notes()
    assert any("resuming from run/checkpoints/step-00000006" in note for note in run.notes()), run.notes()
    assert "step-00000003 of host0 is another one than that of host1, and set aside" in run.stderr
    same(finished_hosts.result("host0"), calm)


def test_fewer_hosts_with_other_ranks_resume_and_inspect_lists_what_is_elsewhere(
    model: Path, finished_hosts: Hosts, calm: Result
) -> None:
    finished_hosts.return_to(3)
    (finished_hosts.directory / "host2").rename(finished_hosts.directory / "host1b")
    shutil.rmtree(finished_hosts.directory / "host1")
    (finished_hosts.directory / "host3").rename(finished_hosts.directory / "host1")
    two = Hosts(model, finished_hosts.directory, 2)
    codes, run = two.run()
    assert codes == [0] * RANKS, run.notes()
    for host in two.names:
        same(two.result(host), calm)
    (report,) = inspect(finished_hosts.directory / "host1b" / "run" / "checkpoints" / "step-00000003")
    assert not report.errors
    assert sorted(report.elsewhere["head.safetensors"]) == ["host1", "host3"]
    assert "head" not in {layer.layer for layer in report.layers}


def full_disk(rank: int) -> None:
    """Let the disk of rank 2 be full at the save of step 6."""
    write_layer = saver_module.write_layer

    def write(directory: Path, *args: Any) -> StoredFile:
        if rank == 2 and "00000006" in directory.name:
            raise OSError(28, "No space left on device", str(directory))
        return write_layer(directory, *args)

    saver_module.write_layer = write


def unpublished(rank: int) -> None:
    """Let rank 2 fail to give the checkpoint of step 6 its name, when others have done so."""
    publish = CheckpointDirectory.publish

    def failing(directory: CheckpointDirectory, step: int, run_id: str) -> Path:
        if (rank, step) == (2, 6):
            raise OSError(5, "Input/output error", str(directory.of(step)))
        return publish(directory, step, run_id)

    CheckpointDirectory.publish = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [full_disk, unpublished])
def test_a_save_that_fails_on_one_host_is_on_none_and_older_ones_stay(hosts: Hosts, fault: Setup) -> None:
    codes, run = hosts.run(setup=fault, keep=1)
    assert all(codes)
    (error,) = run.errors
    assert "step 6 could not be saved: rank 2 on host2: " in error
    for host in hosts.names:
        assert hosts.checkpoints(host).steps() == [3]
        assert not hosts.checkpoints(host).leftovers()


def test_frozen_weights_are_linked_on_each_host_and_not_sent(hosts: Hosts, tmp_path: Path) -> None:
    codes, run = hosts.run(adapter="lora:r=2", setup=partial(record_sent, out=tmp_path))
    assert codes == [0] * RANKS, run.notes()
    sent = {file.stem for file in tmp_path.glob("*.sent")}
    assert sent
    assert not [file for file in sent if "constants" in file]
    for host in hosts.names:
        of_steps = [[*hosts.checkpoints(host).of(step).glob("*.constants.*")] for step in (3, STEPS)]
        assert [each.name for each in of_steps[0]] == [each.name for each in of_steps[1]]
        assert all(one.samefile(other) for one, other in zip(*of_steps, strict=True))
    survives_any_loss(hosts, STEPS)


def record_sent(rank: int, *, out: Path) -> None:
    run = FileExchange.run

    def recorded(exchange: FileExchange, transfers: Sequence[FileTransfer], directory: Path) -> str:
        for transfer in transfers:
            (out / f"{transfer.file.file}.sent").touch()
        return run(exchange, transfers, directory)

    FileExchange.run = recorded  # type: ignore[method-assign]
