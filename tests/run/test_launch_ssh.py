"""`acsgd launch --hosts` over a real sshd on this host, reached by two names: no process stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.lib.launched import MARGIN_S, Run
from tests.run.test_torchrun import run_file

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
LIMIT_S = 120.0
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(SSHD is None or shutil.which("ssh-keygen") is None, reason="needs openssh-server"),
]


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """The command that connects to an sshd with a key of its own, which knows the hosts alpha and beta."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    options = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": tmp_path / "host",
        "AuthorizedKeysFile": tmp_path / "user.pub",
        "StrictModes": "no",
        "UsePAM": "no",
        "PidFile": "none",
    }
    arguments = [f"-o{name}={value}" for name, value in options.items()]
    config = tmp_path / "ssh_config"
    config.write_text(
        f"Host alpha beta\nHostName 127.0.0.1\nPort {port}\nIdentityFile {tmp_path}/user\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {tmp_path}/known\nStrictHostKeyChecking accept-new\n"
    )
    assert SSHD is not None
    server = subprocess.Popen([SSHD, "-D", "-f", "/dev/null", *arguments], stderr=subprocess.DEVNULL)
    yield f"ssh -F {config}"
    server.terminate()
    server.wait()


@pytest.fixture
def launched(ssh: str, tmp_path: Path, tiny_model: Callable[..., Path]) -> Run:
    """A run of two hosts that trains, without end."""
    file = run_file(tmp_path, tiny_model(n_layer=2))
    arguments = ["--hosts", "alpha,beta", "--nproc", "1", "--ssh", ssh, "--env", "OMP_NUM_THREADS,PYTHONPATH"]
    options = ["--optim.steps", "100000", "--pp.stages", "2"]
    run = Run([sys.executable, "-m", "acsgd.cli", "launch", str(file), *arguments, *options], tmp_path)
    metrics = tmp_path / "runs/one/metrics.jsonl"
    run.wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2, LIMIT_S)
    return run


def left_behind(directory: Path) -> list[str]:
    """Return the processes on the hosts that belong to the launch: supervisors, torchruns and workers work there."""
    lines = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(directory) and process.pid != os.getpid():
                lines.append(" ".join(process.cmdline())[:200])
        except psutil.Error:
            continue
    return lines


def ends(run: Run, directory: Path) -> None:
    run.wait_until(lambda: not left_behind(directory), LIMIT_S)
    (saved,) = (directory / "runs/one/checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) > 2


def test_ctrl_c_saves_and_ends_all_processes(launched: Run, tmp_path: Path) -> None:
    launched.process.send_signal(signal.SIGINT)
    assert launched.process.wait(LIMIT_S) == 130
    ends(launched, tmp_path)
    assert "stopped after step" in launched.stdout
    log = (tmp_path / "runs/one/logs/host-alpha.log").read_text().splitlines()
    assert set(launched.stdout.splitlines()) <= set(log)
    assert not launched.errors
    assert "Traceback" not in launched.stderr


def test_a_launcher_that_is_killed_leaves_nothing_behind(launched: Run, tmp_path: Path) -> None:
    launched.process.kill()
    launched.process.wait(MARGIN_S)
    ends(launched, tmp_path)


def test_a_broken_connection_ends_the_run_which_saves(launched: Run, tmp_path: Path) -> None:
    (connection,) = (child for child in psutil.Process(launched.process.pid).children() if "beta" in child.cmdline())
    connection.kill()
    assert launched.process.wait(2 * LIMIT_S) == 1
    ends(launched, tmp_path)
    (error,) = launched.errors
    assert error.startswith("error: beta: the connection has ended")
