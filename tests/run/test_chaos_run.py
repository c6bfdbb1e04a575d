"""`acsgd chaos` on a real elastic run of two hosts: it recovers from each kind of fault, and loses no step."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lib.launched import ROOT, TRAIN, Run, running

from tests.lib.ports import free_addresses

TinyModel = Callable[..., Path]
LIMIT_S = 150.0


@pytest.fixture
def hosts(tiny_model: TinyModel, tmp_path: Path) -> Iterator[list[Run]]:
    """Two hosts of one elastic run that trains until it is ended, with a worker each."""
    (endpoint,) = free_addresses(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1"]
    command += ["--rdzv-backend", "acsgd", "--rdzv-endpoint", endpoint, "--rdzv-id", "test", TRAIN]
    command += ["--log.dir", str(tmp_path / "run"), "--model.name", str(tiny_model()), "--data.sources", "demo"]
    command += ["--data.sequence", "32", "--data.batch", "8", "--pp.micro", "1", "--optim.lr", "1e-3"]
    command += ["--optim.steps", "1000000", "--log.to", "jsonl,print", "--run.timeout", "60"]
    with ExitStack() as stack:
        runs = []
        for name in "ab":
            (cwd := tmp_path / name).mkdir()
            runs.append(stack.enter_context(running(command, cwd)))
        metrics = tmp_path / "run/metrics.jsonl"
        runs[0].wait_until(lambda: metrics.exists() and '"step"' in metrics.read_text(), LIMIT_S)
        yield runs


def chaos(run_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "acsgd.cli", "chaos", str(run_dir), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.mark.soak
def test_a_run_recovers_from_all_kinds_of_faults(hosts: list[Run], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    workers = {pid for host in hosts for pid in host.ranks().values()}
    killed = chaos(run_dir, "--every", "0.1s", "--faults", "kill", "--count", "1", "--seed", "1")
    assert killed.returncode == 0, killed.stdout + killed.stderr
    found = re.search(r"worker 0 of \S+ killed: a step followed after ([\d.]+) s$", killed.stdout, re.MULTILINE)
    assert found is not None, killed.stdout
    assert len(workers & {pid for host in hosts for pid in host.ranks().values()}) == 1, "one worker was killed"
    lines = records(run_dir)
    views = [number for number, line in enumerate(lines) if "view" in line]
    assert len(views) > 1, "the time ended with a step of the view that was killed"
    recovered = lines[views[1]]["recovery_s"]
    assert float(found[1]) >= recovered - 0.01, "the time ended before training continued"

    disturbed = chaos(run_dir, "--every", "0.1s", "--faults", "stop", "--stop", "1s", "--count", "2", "--seed", "0")
    ended = chaos(run_dir, "--every", "0.1s", "--faults", "host", "--count", "1", "--seed", "0")
    for command in (disturbed, ended):
        assert command.returncode == 0, command.stdout + command.stderr
    assert disturbed.stdout.count("a step followed") == 3, "two faults and the summary"
    assert sorted(bool(host.ranks()) for host in hosts) == [False, True], "one host is left"
    steps = [line["step"] for line in records(run_dir) if "step" in line]
    assert steps == list(range(1, len(steps) + 1))


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete lines of metrics.jsonl."""
    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
