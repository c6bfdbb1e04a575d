"""Elastic runs under real torchrun agents: hosts end, join and leave, and the losses are those of a calm run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from acsgd.config.run_file import parse
from acsgd.shards.disk import ShardDirectory
from tests.lib.corpora import write_records
from tests.lib.forked_torchrun import ForkedTorchrun, Setup
from tests.lib.forks import finish
from tests.lib.hosts import LIMIT_S, Hosts
from tests.lib.injection import All, FullDisk, OverOrderedTransport, Pace
from tests.lib.patience import NO_LIMIT_S, stretched

TinyModel = Callable[..., Path]
STEPS = 60
PACE = Pace(0.1)
"""So that a run lasts for seconds at little work."""
WORKERS = [
    pytest.param(PACE, id="gloo"),
    pytest.param(All((PACE, OverOrderedTransport())), id="ordered", marks=pytest.mark.soak),
]
YEAR_S = 365 * 86400.0


@pytest.fixture(scope="module")
def run_file(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the sequences are streamed."""
    directory = tmp_path_factory.mktemp("elastic")
    write_records(directory / "a.jsonl")
    path = directory / "run.toml"
    path.write_text(
        f"""
        [model]
        name = "{tiny_model(n_layer=2)}"
        [data]
        sources = "stream:{directory / "a.jsonl"}:0.5,demo:0.5"
        window = 32
        sequence = 32
        batch = 4
        [pp]
        micro = 1
        [optim]
        lr = 1e-3
        steps = {STEPS}
        [run]
        timeout = {NO_LIMIT_S}
        [log]
        to = "jsonl,print"
        """
    )
    return path


def assert_same_losses(hosts: Hosts, run_file: Path) -> None:
    """Check that each step was completed once, with the loss of one process that nothing disturbs."""
    directory = run_file.parent / "calm"
    if not directory.exists():
        finish(parse([str(run_file), "--log.dir", str(directory), "--log.to", "jsonl"]), 1)
    calm = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = hosts.steps()
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["tokens"] for line in steps] == [line["tokens"] for line in calm]
    losses, expected = (torch.tensor([line["loss"] for line in each]) for each in (steps, calm))
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


def assert_has_copies(directories: list[Path], step: int) -> None:
    """Check that each file of a checkpoint is on two disks."""
    paths = [directory / f"step-{step:08d}" for directory in directories]
    for file in ShardDirectory(paths[0]).manifest.files:
        assert sum((path / file.file).is_file() for path in paths) >= 2, file


@pytest.mark.parametrize(
    ("worker", "options"),
    [
        *(pytest.param(*each.values, (), id=each.id, marks=each.marks) for each in WORKERS),
        pytest.param(
            PACE, ("--optim.offload", "cpu", "--model.offload", "cpu"), id="offloaded", marks=pytest.mark.soak
        ),
    ],
)
def test_a_run_of_which_hosts_end_join_and_leave_is_the_calm_run(
    worker: Setup, options: tuple[str, ...], run_file: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        flags = ("--elastic.min_replicas", "2", "--elastic.join_budget", "0", "--checkpoint.every", "20", *options)
        hosts = Hosts(tmp_path, run_file, stack, 1, flags)
        clocks = {"a": 0.0, "b": -60.0, "c": YEAR_S}  # which nothing compares
        a, b, c = (hosts.start(name, min_hosts=3, clock_s=clock_s, worker=worker) for name, clock_s in clocks.items())
        hosts.wait_for_step(b, 3)
        pid = c.workers[0]
        a.kill()  # it has the first endpoint, and probably rank 0
        hosts.wait_for_step(b, len(hosts.steps()) + 3)
        assert len(hosts.hosts_that("left")) == 1, "the run has not noticed"
        assert hosts.lease_holder() in [*b.workers, *c.workers]

        os.kill(b.workers[0], signal.SIGKILL)  # c waits for it, then sends its state
        hosts.wait_for_step(c, len(hosts.steps()) + 3)
        assert hosts.events()[-1]["from"] == "memory"
        assert hosts.events()[-1]["moved_bytes"] == 0, "it gets its state in the background"

        b.signal(signal.SIGINT)  # b leaves; c waits again
        b.wait(LIMIT_S)
        assert c.workers[0] == pid, "c was not disturbed"
        a = hosts.start("a2", worker=worker)
        assert a.wait(LIMIT_S) == 0
        assert c.wait(LIMIT_S) == 0
        assert len(hosts.hosts_that("joined")) == 1, "the new host has not joined"
        assert len(hosts.hosts_that("left")) == 2
        assert any(line.get("event") == "ready" for line in hosts.lines()), "it has not got all of its state"
        assert not a.errors + b.errors + c.errors
        assert not a.pids() + c.pids()
        chosen = Counter(line for host in (b, c) for line in host.stdout.splitlines() if "transport of" in line)
        assert bool(chosen) == (worker is not PACE)
        assert all(": nccl (between hosts " in line for line in chosen)
        assert max(chosen.values(), default=2) > 1, "what was measured is kept while hosts leave"
        recoveries = [event["recovery_s"] for event in hosts.events()[1:]]
        assert len(recoveries) >= 3
        assert_same_losses(hosts, run_file)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("shard", "mode"), [("weights", "allreduce"), ("optimizer", "allreduce"), ("weights", "cocktail_grad:topk=.25")]
)
def test_hosts_that_hold_all_parts_of_the_state_end_join_and_leave(
    shard: str, mode: str, run_file: Path, tmp_path: Path
) -> None:
    """Two processes each, of which one ends: then its host has lost a part, which it gets from the other host."""
    with ExitStack() as stack:
        replicas = ("--elastic.min_replicas", "4", "--elastic.max_replicas", "4", "--checkpoint.every", "20")
        hosts = Hosts(tmp_path, run_file, stack, 2, ("--dp.shard", shard, "--dp.mode", mode, *replicas))

        def start(name: str) -> ForkedTorchrun:
            return hosts.start(name, min_hosts=3, worker=PACE, flags=("--dp.domain", name[0]))

        a, b, c = map(start, "abc")
        hosts.wait_for_step(b, 3)
        a.kill()
        hosts.wait_for_step(b, len(hosts.steps()) + 3)
        assert len(hosts.hosts_that("left")) == 1, "the run has not noticed"
        pids = c.workers
        os.kill(b.workers[1], signal.SIGKILL)  # c waits for b, then sends its state
        hosts.wait_for_step(c, len(hosts.steps()) + 3)
        b.signal(signal.SIGINT)  # b leaves; c waits again
        b.wait(LIMIT_S)
        assert c.workers == pids, "c was not disturbed"
        a = start("a2")
        assert a.wait(LIMIT_S) == 0
        assert c.wait(LIMIT_S) == 0
        assert not a.errors + b.errors + c.errors
        first, *others = hosts.events()
        assert first["from"] == "disk"
        assert len(others) >= 3
        assert {(event["from"], event["replicas"]) for event in others} == {("memory", 4)}
        if mode == "allreduce":
            assert_same_losses(hosts, run_file)
        steps = hosts.steps()
        assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
        assert steps[-1]["loss"] < steps[0]["loss"]


def test_hosts_with_disks_of_their_own_join_end_for_ever_and_start_again_without_one_of_them(
    run_file: Path, tmp_path: Path
) -> None:
    """A host is lost with its disk, and one with an empty disk takes its place; then all stop, and one stays away."""
    with ExitStack() as stack:
        flags = ("--checkpoint.every", "8", "--elastic.min_replicas", "3")
        hosts = Hosts(tmp_path, run_file, stack, 1, flags, has_own_disks=True)
        hosts.run_dir = hosts.disk_of("b")
        a, b, c = (hosts.start(name, min_hosts=3, worker=PACE) for name in "abc")
        hosts.wait_for_step(b, 10)
        c.kill()
        shutil.rmtree(hosts.disk_of("c"))
        d = hosts.start("d", worker=PACE)
        b.wait_until(lambda: hosts.hosts_that("joined"), LIMIT_S)
        assert len(hosts.hosts_that("left")) == 1
        hosts.wait_for_step(b, len(hosts.steps()) + 10)
        for host in (a, b, d):
            host.signal(signal.SIGTERM)
            time.sleep(0.5)  # several steps
        for host in (a, b, d):
            host.wait(LIMIT_S)
        assert_has_copies([hosts.disk_of(name) / "checkpoints" for name in "abd"], len(hosts.steps()))
        shutil.rmtree(hosts.disk_of("a"))
        later = Hosts(tmp_path, run_file, stack, 1, flags[:2], endpoints=hosts.endpoints, has_own_disks=True)
        started = [later.start(name, disk=disk) for name, disk in (("b2", "b"), ("d2", "d"))]
        assert [host.wait(LIMIT_S) for host in started] == [0, 0]
        assert not [host.errors for host in (a, b, d, *started) if host.errors]
        events = []
        for name in "db":
            hosts.run_dir = hosts.disk_of(name)
            assert_same_losses(hosts, run_file)
            events.append([line for line in hosts.lines() if "event" in line])
        assert events[0] == events[1]
        assert_has_copies([hosts.disk_of(name) / "checkpoints" for name in "bd"], STEPS)


@pytest.mark.parametrize("worker", WORKERS)
def test_stages_on_hosts_that_hang_and_end(worker: Setup, run_file: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        flags = ("--pp.stages", "2", "--elastic.hang", str(stretched(3.0)), "--elastic.silence", str(stretched(2.0)))
        hosts = Hosts(tmp_path, run_file, stack, 2, flags)
        a, b = (hosts.start(name, min_hosts=2, worker=worker) for name in "ab")
        hosts.wait_for_step(a, 3)
        stopped = b.workers[0]
        os.kill(stopped, signal.SIGSTOP)
        hosts.wait_for_replicas(a, 1)
        (hung,) = hosts.hosts_that("hung")
        b.kill()
        assert a.wait(LIMIT_S) == 0
        assert hosts.hosts_that("left") == [hung]
        assert not a.errors
        assert_same_losses(hosts, run_file)


def test_a_stage_whose_only_holder_ends_comes_from_the_snapshot_on_the_next_host(
    run_file: Path, tmp_path: Path
) -> None:
    """2 stages x 1 replica on three hosts, one of them a spare. There is no checkpoint."""
    with ExitStack() as stack:
        flags = ("--pp.stages", "2", "--elastic.snapshot", "5")
        hosts = Hosts(tmp_path, run_file, stack, 1, flags)
        started = [hosts.start(name, min_hosts=3, worker=PACE) for name in "abc"]
        hosts.wait_for_step(started[0], 13)
        first, *others = sorted(started, key=lambda host: hosts.lease_holder() not in host.workers)
        first.kill()  # it has rank 0, too, and so the metrics
        assert all(host.wait(LIMIT_S) == 0 for host in others)
        view = hosts.events()[-1]
        assert view["from"] == "snapshot"
        assert view["after_step"] >= 5
        assert view["moved_bytes"] > 0
        assert_same_losses(hosts, run_file)


def test_a_host_that_cannot_write_the_last_checkpoint_leaves_and_the_others_write_it(
    run_file: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        hosts = Hosts(tmp_path, run_file, stack, 1, ("--optim.steps", "12"))
        a, b = hosts.start("a", min_hosts=2), hosts.start("b", min_hosts=2, worker=FullDisk())
        assert b.wait(LIMIT_S) != 0
        assert a.wait(LIMIT_S) == 0
        (error,) = b.errors
        assert "step 12 could not be saved: rank " in error
        assert error.endswith("fix the cause and start this host again")
        assert not a.errors
        assert [line["step"] for line in hosts.steps()] == list(range(1, 13))
        assert hosts.events()[-1]["after_step"] == 12
        saved = ShardDirectory(hosts.run_dir / "checkpoints" / "step-00000012")
        assert not list(saved.corrupt_files())


def test_an_error_in_the_options_is_printed_once_and_workers_are_not_started_again(
    run_file: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        model = tmp_path / "none"
        host = Hosts(tmp_path, run_file, stack, 2, ("--model.name", str(model))).start("a")
        assert host.wait(LIMIT_S) == 2
        assert host.errors == [
            f"error: model.name={model} does not exist; give a directory or a Hugging Face id, owner/name"
        ]
        assert "Traceback" not in host.stderr
