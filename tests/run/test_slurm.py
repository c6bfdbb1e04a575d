"""`acsgd launch --slurm` on a real Slurm whose two nodes are this host: a time limit, and a node that is lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lib.launched import ROOT
from tests.lib.patience import wait_until
from tests.lib.ports import free_port
from tests.run.test_torchrun import run_file

DAEMONS = ("munged", "slurmctld", "slurmd")
SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
MISSING = [name for name in (*DAEMONS, "sbatch") if shutil.which(name, path=SBIN) is None]
LIMIT_S = 120.0
NODES = ("n1", "n2")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(MISSING), reason=f"needs slurm-wlm and munge: no {', '.join(MISSING)}"),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root: slurmd runs jobs of all users"),
]


class Slurm:
    """A cluster of NODES, all of them this host, with keys, sockets and ports of its own in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {
            **{"SLURM_CONF": str(directory / "slurm.conf"), "PATH": SBIN},
            **{"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        }
        (directory / "slurm.conf").write_text(self._configuration())
        key = directory / "key"
        key.touch(mode=0o400)
        key.write_bytes(os.urandom(128))

    def _configuration(self) -> str:
        host = socket.gethostname().partition(".")[0]
        values = {
            **{"ClusterName": "test", "SlurmctldHost": f"{host}(127.0.0.1)", "SlurmctldPort": free_port()},
            **{"SlurmUser": "root", "AuthInfo": f"socket={self._directory}/munge", "StateSaveLocation": "state"},
            **{"SlurmdSpoolDir": "spool-%n", "SlurmctldPidFile": "ctld.pid", "SlurmdPidFile": "%n.pid"},
            **{"ProctrackType": "proctrack/pgid", "TaskPlugin": "task/none", "MpiDefault": "none"},
            **{"SelectType": "select/cons_tres", "SelectTypeParameters": "CR_Core", "ReturnToService": 2},
            **{"SlurmdParameters": "config_overrides", "KillWait": 5, "SlurmdTimeout": 60},
        }
        for name in ("StateSaveLocation", "SlurmdSpoolDir", "SlurmctldPidFile", "SlurmdPidFile"):
            values[name] = f"{self._directory}/{values[name]}"
        lines = [f"{name}={value}" for name, value in values.items()]
        lines += [f"NodeName={n} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2" for n in NODES]
        return "\n".join([*lines, f"PartitionName=test Nodes={','.join(NODES)} Default=YES", ""])

    def start(self, daemon: str, *arguments: str) -> None:
        """Start a daemon, by the name of its log; the first word is the program."""
        log = (self._directory / f"{daemon}.log").open("ab")
        command = [shutil.which(arguments[0], path=SBIN) or "", *arguments[1:]]
        self._daemons[daemon] = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def start_all(self) -> None:
        """Start the daemons; return once all nodes are idle."""
        paths = {"socket": "munge", "key-file": "key", "pid-file": "munge.pid", "seed-file": "seed", "log-file": "log"}
        files = [f"--{option}={self._directory}/{name}" for option, name in paths.items()]
        self.start("munged", "munged", "--foreground", "--force", *files)
        wait_until((self._directory / "munge").exists, LIMIT_S)
        self.start("slurmctld", "slurmctld", "-D", "-i")
        for node in NODES:
            self.start_node(node)
        wait_until(lambda: self.states() == dict.fromkeys(NODES, "idle"), LIMIT_S, describe=lambda: str(self.states()))

    def start_node(self, node: str) -> None:
        self.start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """End slurmd of a node and all that it runs, as a power cut does; Slurm then takes it for lost."""
        own = f"{self._directory}/spool-{node}"
        killed = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                environment = process.environ()
                if environment.get("SLURMD_NODENAME") == node or own in " ".join(process.cmdline()):
                    killed.append(process)
        for process in [psutil.Process(self._daemons[node].pid), *killed]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._daemons.pop(node).wait()
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    def run(self, *command: str) -> str:
        """Return what a command prints. Raises AssertionError with its errors."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return the state of each node."""
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format", "%N %t"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return dict(line.split() for line in done.stdout.splitlines())

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows of a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def jobs(self) -> list[str]:
        """Return the jobs that wait or run."""
        return self.run("squeue", "--noheader", "--format", "%i").split()

    def stop(self) -> None:
        """End all jobs and daemons."""
        with contextlib.suppress(AssertionError):
            self.run("scancel", "--user", "root")
            wait_until(lambda: not self.jobs(), LIMIT_S)
        for process in self._daemons.values():
            process.send_signal(signal.SIGTERM)
        for process in self._daemons.values():
            process.wait()


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory:  # a short path: sockets are in it
        cluster = Slurm(Path(directory))
        try:
            cluster.start_all()
            yield cluster
        finally:
            cluster.stop()


class Submitted:
    """A run that `acsgd launch --slurm` has submitted on both nodes."""

    def __init__(self, slurm: Slurm, directory: Path, model: Path, *options: str) -> None:
        self._slurm, self.run_dir = slurm, directory / "runs/one"
        file = run_file(directory, model)
        done = subprocess.run(
            [sys.executable, "-m", "acsgd.cli", "launch", str(file), "--slurm", "test", "--nodes", "2"]
            + ["--nproc", "1", "--pp.stages", "1", "--optim.steps", "1000000", *options],
            env=slurm.environment | {"MASTER_ADDR": "127.0.0.1"},
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        self.number = done.stdout.split()[2].rstrip(";")

    @property
    def log(self) -> str:
        path = self.run_dir / f"logs/slurm-{self.number}.log"
        return path.read_text() if path.exists() else ""

    def records(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def last_step(self) -> int:
        return max((record["step"] for record in self.records() if "step" in record), default=0)

    def wait_until(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        wait_until(condition, limit_s, poll_s=1.0, describe=lambda: f"{self._slurm.job(self.number)}\n{self.log}")


def test_a_time_limit_saves_and_the_job_is_submitted_again_by_itself(
    slurm: Slurm, tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    """Slurm sends the signal up to a minute before --grace, and looks at limits each minute."""
    run = Submitted(slurm, tmp_path, tiny_model(n_layer=2), "--sbatch", "sbatch --time 2", "--grace", "30")
    run.wait_until(lambda: slurm.job(run.number)["Restarts"] == "1", 3 * LIMIT_S)
    assert f"the run was saved before the time limit; job {run.number} is submitted again" in run.log
    (saved,) = (int(path.name.removeprefix("step-")) for path in (run.run_dir / "checkpoints").glob("step-*"))
    assert saved == run.last_step()
    run.wait_until(lambda: run.last_step() > saved, 3 * LIMIT_S)  # Slurm waits for two minutes
    slurm.run("scancel", "--signal=TERM", run.number)
    run.wait_until(lambda: not slurm.jobs())


def test_a_node_that_is_lost_in_an_elastic_job_is_asked_for_again(
    slurm: Slurm, tmp_path: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoints = ",".join(f"127.0.0.1:{free_port()}" for _ in NODES)
    monkeypatch.setitem(slurm.environment, "endpoints", endpoints)
    run = Submitted(slurm, tmp_path, tiny_model(n_layer=2), "--elastic")
    run.wait_until(lambda: run.last_step() > 2)
    slurm.kill_node("n2")
    run.wait_until(lambda: "1 of 2 nodes are lost; asking for as many" in run.log)
    run.wait_until(lambda: len(slurm.jobs()) == 2)
    lost_at = run.last_step()
    run.wait_until(lambda: run.last_step() > lost_at)
    slurm.start_node("n2")
    hosts = lambda: [record["hosts"] for record in run.records() if record.get("event") == "view"]  # noqa: E731
    run.wait_until(lambda: hosts()[-2:] == [1, 2])
    for job in slurm.jobs():
        slurm.run("scancel", "--signal=TERM", job)
    run.wait_until(lambda: not slurm.jobs())
    steps = [record["step"] for record in run.records() if "step" in record and "loss" in record]
    assert steps == [*range(1, len(steps) + 1)], "no step is lost or made twice"
