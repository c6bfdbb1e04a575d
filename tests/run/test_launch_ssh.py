"""`acsgd launch --hosts` over a real sshd on this host, reached by two names: no process stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.lib.launched import ROOT, Run, running
from tests.lib.ports import free_port
from tests.run.test_torchrun import run_file

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
LIMIT_S = 120.0
NAME = "TEST_HOST"
"""Variable with the name of the host in the environment of what runs there."""
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(SSHD is None or shutil.which("ssh-keygen") is None, reason="needs openssh-server"),
]


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """The command that connects to an sshd with a key of its own, which knows the hosts alpha and beta."""
    port = free_port()
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
        "SetEnv": f"PYTHONPATH={ROOT}",
        "AcceptEnv": NAME,
        "PidFile": "none",
    }
    arguments = [f"-o{name}={value}" for name, value in options.items()]
    config = tmp_path / "ssh_config"
    config.write_text(
        "".join(f"Host {name}\nSetEnv {NAME}={name}\n" for name in ("alpha", "beta"))
        + "Host stranger\nStrictHostKeyChecking yes\nUserKnownHostsFile /dev/null\n"
        "Host locked\nPubkeyAuthentication no\n"
        "Host gone\nPort 1\n"
        f"Host *\nHostName 127.0.0.1\nPort {port}\nIdentityFile {tmp_path}/user\nIdentitiesOnly yes\n"
        f"UserKnownHostsFile {tmp_path}/known\nStrictHostKeyChecking accept-new\n"
    )
    assert SSHD is not None
    server = subprocess.Popen([SSHD, "-D", "-f", "/dev/null", *arguments], stderr=subprocess.DEVNULL)
    yield f"ssh -F {config}"
    server.terminate()
    server.wait()


Launch = Callable[..., Run]


@pytest.fixture
def launch(ssh: str, tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Launch]:
    """Return a function that starts a run of two hosts that trains, without end. directory: of its output."""
    file = run_file(tmp_path, tiny_model(n_layer=2))
    arguments = ["--nproc", "1", "--ssh", ssh, "--env", "OMP_NUM_THREADS", "--dir", str(tmp_path)]

    with contextlib.ExitStack() as stack:

        def start(*options: str, hosts: str = "alpha,beta", directory: Path = tmp_path) -> Run:
            directory.mkdir(exist_ok=True)
            command = [sys.executable, "-m", "acsgd.cli", "launch", str(file), "--hosts", hosts, *arguments]
            return stack.enter_context(running([*command, "--optim.steps", "100000", *options], directory))

        yield start
    kill(tmp_path)


@pytest.fixture
def launched(launch: Launch, tmp_path: Path) -> Run:
    run = launch("--pp.stages", "2")
    trains(run, tmp_path)
    return run


def records(directory: Path) -> list[dict[str, Any]]:
    path = directory / "runs/one/metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def trains(run: Run, directory: Path) -> None:
    """Wait for two more steps."""
    former = len(records(directory))
    run.wait_until(lambda: len(records(directory)) > former + 2, LIMIT_S)


def processes(directory: Path, *hosts: str) -> list[psutil.Process]:
    """Return the processes on the hosts that belong to the launch: supervisors, torchruns and workers work there."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(directory) and process.environ().get(NAME) in (hosts or ("alpha", "beta")):
                found.append(process)
    return found


def kill(directory: Path, *hosts: str) -> None:
    """End all processes of hosts, as a power cut does; a connection ends with the first."""
    for process in processes(directory, *hosts):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def ends(run: Run, directory: Path) -> None:
    """Wait until nothing of the launch is left on the hosts."""
    run.wait_until(lambda: not processes(directory), LIMIT_S)


def assert_saved(directory: Path) -> None:
    (saved,) = (directory / "runs/one/checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) > 2


def test_ctrl_c_saves_and_ends_all_processes(launched: Run, tmp_path: Path) -> None:
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait(LIMIT_S) == 130
    ends(launched, tmp_path)
    assert_saved(tmp_path)
    assert "stopped after step" in launched.stdout
    log = (tmp_path / "runs/one/logs/host-alpha.log").read_text().splitlines()
    assert set(launched.stdout.splitlines()) <= set(log)
    assert not launched.errors
    assert "Traceback" not in launched.stderr


def test_a_launcher_that_is_killed_leaves_nothing_behind(launched: Run, tmp_path: Path) -> None:
    launched.process.kill()
    launched.wait()
    ends(launched, tmp_path)
    assert_saved(tmp_path)


def test_a_broken_connection_ends_the_run_which_saves(launched: Run, tmp_path: Path) -> None:
    (connection,) = (child for child in psutil.Process(launched.process.pid).children() if "beta" in child.cmdline())
    connection.kill()
    assert launched.wait(2 * LIMIT_S) == 1
    ends(launched, tmp_path)
    assert_saved(tmp_path)
    (error,) = launched.errors
    assert error.startswith("error: beta: the connection has ended")


def test_an_elastic_run_loses_a_host_which_comes_back(launch: Launch, tmp_path: Path) -> None:
    """Whichever it is: that whose output the terminal shows, or another one."""
    run = launch("--elastic", "--pp.stages", "1")
    trains(run, tmp_path)
    for host in ("beta", "alpha"):
        views = len(hosts_of_views(tmp_path))
        kill(tmp_path, host)
        run.wait_until(lambda views=views: hosts_of_views(tmp_path)[views:] == [1, 2], LIMIT_S)
        trains(run, tmp_path)
        assert run.errors[-1].startswith(f"error: {host}: the connection has ended")
        assert f"{host} is back" in run.stderr
    run.process.send_signal(signal.SIGINT)
    assert run.wait(LIMIT_S) == 130
    ends(run, tmp_path)
    steps = [record["step"] for record in records(tmp_path) if "loss" in record and "event" not in record]
    assert steps == [*range(1, len(steps) + 1)]
    assert run.stdout.count("saved ") == 1, "on the terminal, wherever rank 0 is"


def hosts_of_views(directory: Path) -> list[int]:
    return [record["hosts"] for record in records(directory) if record.get("event") == "view"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("stranger", "stranger has a host key that ssh does not know"),
        ("locked", "locked asks for a password or a passphrase"),
        ("gone", "gone cannot be reached"),
    ],
)
def test_a_host_that_ssh_does_not_reach_is_named_and_nothing_is_started(
    host: str, expected: str, launch: Launch, tmp_path: Path
) -> None:
    run = launch(hosts=f"alpha,{host}")
    assert run.wait(LIMIT_S) == 2
    (error,) = run.errors
    assert error.startswith(f"error: nothing was started; {expected}")
    ends(run, tmp_path)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--python", "/no/python"], "nothing was started; alpha has no /no/python"),
        (["--python", "/usr/bin/python3"], "nothing was started; alpha has no torch for /usr/bin/python3"),
        (["--dir", "/no/directory"], "nothing was started; alpha has no "),
        (["--data.sources", "no.txt"], "no.txt"),
        (["--pp.stages", "3"], "pp.stages=3"),
    ],
)
def test_a_mistake_is_one_sentence_without_a_traceback(
    options: list[str], expected: str, launch: Launch, tmp_path: Path
) -> None:
    run = launch(*options)
    assert run.wait(LIMIT_S) > 0
    (error,) = run.errors
    assert expected in error
    assert "Traceback" not in run.stderr
    assert run.stderr.rstrip().endswith(error), "it is the last line"
    ends(run, tmp_path)


def test_a_host_that_vanishes_while_workers_start_is_named(launch: Launch, tmp_path: Path) -> None:
    run = launch("--pp.stages", "2")
    run.wait_until(lambda: len(processes(tmp_path, "beta")) >= 2, LIMIT_S)  # a supervisor and torchrun
    kill(tmp_path, "beta")
    assert run.wait(LIMIT_S) == 1
    (error,) = run.errors
    assert error.startswith("error: beta: the connection has ended")
    ends(run, tmp_path)


@pytest.mark.parametrize("started", [1, 4])
def test_ctrl_c_during_the_start_leaves_nothing_behind(started: int, launch: Launch, tmp_path: Path) -> None:
    """As soon as some number of processes is on the hosts: while ssh connects, and while workers import torch."""
    run = launch("--pp.stages", "2")
    run.wait_until(lambda: len(processes(tmp_path)) >= started, LIMIT_S)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(LIMIT_S) == 130
    ends(run, tmp_path)
    assert len(run.errors) <= 1
    assert "Traceback" not in run.stderr


def test_a_second_launch_into_the_same_directory_is_refused(launched: Run, launch: Launch, tmp_path: Path) -> None:
    second = launch("--pp.stages", "2", directory=tmp_path / "second")
    assert second.wait(LIMIT_S) == 1
    (error,) = second.errors
    assert "is in use by another run" in error
    trains(launched, tmp_path)
    launched.process.send_signal(signal.SIGINT)
    assert launched.wait(LIMIT_S) == 130
    ends(launched, tmp_path)
