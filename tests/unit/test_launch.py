"""`acsgd launch`: what it starts on which host, and what the terminal shows of hosts, which are shell scripts here."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from acsgd.commands.launch import command as launch_command
from acsgd.commands.launch import hosts as launch_hosts
from acsgd.commands.launch.command import LaunchCommand
from acsgd.commands.launch.hosts import SUPERVISOR, Remote, RemoteLaunch
from acsgd.commands.launch.slurm import submission
from acsgd.commands.launch.supervisor import READY, TorchrunJob, _Launcher, _locked, _wait
from acsgd.config.run_file import parse
from acsgd.errors import ReportedError
from acsgd.versions import installed_versions

ROOT = Path(__file__).parents[2]
GPT2 = str(ROOT / "examples/gpt2.toml")
ANSWER = f"echo '{READY}{json.dumps({'port': 1234, 'versions': installed_versions()})}'; read job"
Script = Callable[..., str]


@pytest.fixture
def ssh(tmp_path: Path) -> Script:
    """Return a function that makes a command in place of ssh. hosts: lines of shell that each host runs."""

    def make(**hosts: str) -> str:
        cases = "\n".join(f"{name}) {lines} ;;" for name, lines in hosts.items())
        path = tmp_path / "my ssh"
        path.write_text(f'#!/bin/sh\nfor last; do host=$before; before=$last; done\ncase "$host" in\n{cases}\nesac\n')
        path.chmod(0o755)
        return f"'{path}'"

    return make


def launched(tmp_path: Path, ssh: str, *names: str, may_lack: bool = False) -> RemoteLaunch:
    return RemoteLaunch(names, Remote(ssh, "/", "python"), tmp_path / "logs", may_lack=may_lack)


def jobs(number: int) -> list[TorchrunJob]:
    return [TorchrunJob([], "", [], {}, 1.0, "name")] * number


def test_the_remote_command_is_read_by_a_shell_as_it_is_meant(tmp_path: Path) -> None:
    directory = tmp_path / "it's a $HOME; dir"
    directory.mkdir()
    python = directory / "py thon"
    python.write_text('#!/bin/sh\npwd; for each; do echo "$each"; done\n')
    python.chmod(0o755)
    *connect, host, remote = Remote("ssh -F 'my config'", str(directory), str(python)).command("me@a")
    assert connect[:3] == ["ssh", "-F", "my config"]
    assert "BatchMode=yes" in connect
    assert host == "me@a"
    shown = subprocess.run(["sh", "-c", remote], capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown == [str(directory), "-m", SUPERVISOR]


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (255, "me@a: Permission denied (publickey,password).", "a asks for a password or a passphrase"),
        (255, "Host key verification failed.", "a has a host key that ssh does not know"),
        (255, "ssh: connect to host a port 22: Connection refused", "a cannot be reached"),
        (-9, "", "a cannot be reached (ssh printed nothing)"),
        (1, "/p: No module named 'acsgd'", "/p of a cannot import acsgd"),
        (127, "sh: 1: /p: not found", "a has no /p, or no directory /d"),
        (2, "sh: 1: cd: can't cd to /d", "a has no /p, or no directory /d"),
        (3, "", "a ended with exit code 3 before torchrun was started (it printed nothing)"),
    ],
)
def test_a_host_that_does_not_answer_is_explained_in_one_sentence(code: int, said: str, expected: str) -> None:
    explained = Remote("ssh", "/d", "/p").explain("a", code, said)
    assert explained.startswith(expected)
    assert "\n" not in explained


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--hosts", "a", "--slurm", "p"], "two ways to start a run"),
        (["--hosts", "a,b,a"], "--hosts names a twice"),
        (["--hosts", "a,,b"], "must be names of hosts"),
        (["--hosts", "-oProxyCommand=x"], "all options: acsgd launch --help"),
        (["--hosts=-oProxyCommand=x"], "must be names of hosts"),
        (["--nodes", "2"], "--nodes is of a launch with --slurm"),
        (["--slurm", "p", "--ssh", "ssh"], "--ssh is of a launch with --hosts"),
        (["--elastic"], "--elastic is of several hosts"),
        (["--nproc", "0"], "--nproc=0 must be a number of processes"),
        (["--grace", "5"], "--grace=5 must be greater than 10"),
        (["--hosts", "a", "--env", "NO_SUCH_VARIABLE"], "has no variable NO_SUCH_VARIABLE"),
        (["--hosts", "a", "--ssh", "no-such-ssh"], "--ssh=no-such-ssh is no command"),
        (["--slurm", "p", "--sbatch", "no-such-sbatch"], "this host has no no-such-sbatch"),
        (["--pp.stages", "0"], "pp.stages=0"),
    ],
)
def test_invalid_options_are_refused_before_anything_is_started(
    options: list[str], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        LaunchCommand.parse([GPT2, *options, "--log.dir", str(tmp_path / "run")]).run()
    assert expected in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_without_hosts_torchrun_is_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(launch_command, "start_torchrun", started.append)
    LaunchCommand.parse([GPT2, "--nproc", "4", "--pp.stages", "2"]).run()
    options = get_args_parser().parse_args(started[0])
    assert (options.standalone, options.nproc_per_node, options.module) == (True, "4", True)
    assert options.training_script_args == [GPT2, "--pp.stages", "2"]


@pytest.mark.parametrize("elastic", [False, True])
def test_each_host_gets_its_line(elastic: bool, ssh: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """ssh -G names the address of each host; the job is what a host prints here."""
    answer = 'if [ "$last" = b -o "$last" = a ]; then echo "hostname 10.0.0.$last"; exit; fi'
    script = ssh(a=f'{ANSWER}; echo "$job"', b=f'{ANSWER}; echo "$job"')
    path = Path(script.strip("'"))
    path.write_text(path.read_text().replace("case", f"{answer}\ncase", 1))
    arguments = ["--hosts", "a,b", "--nproc", "2", "--ssh", script, *(["--elastic"] if elastic else [])]
    LaunchCommand.parse([GPT2, *arguments, "--log.dir", str(tmp_path)]).run()
    captured = capfd.readouterr()
    lines = [line for line in captured.err.splitlines() if ": torchrun " in line]
    assert [line.partition(":")[0] for line in lines] == ["a", "b"]
    parsed = [get_args_parser().parse_args(line.split()[2:]) for line in lines]
    if elastic:
        assert {each.rdzv_endpoint for each in parsed} == {"10.0.0.a:1234,10.0.0.b:1234"}
        assert len({each.rdzv_id for each in parsed}) == 1
        assert "ACSGD_SECRET" in captured.out
        assert "ACSGD_SECRET" not in captured.err
    else:
        assert [each.node_rank for each in parsed] == [0, 1]
        assert {(each.nnodes, each.master_addr, each.master_port) for each in parsed} == {("2", "10.0.0.a", 1234)}
    assert '"run_file": "#' in captured.out


def test_nothing_is_started_unless_all_hosts_answer(ssh: Script, tmp_path: Path) -> None:
    script = ssh(a=f"{ANSWER} && touch {tmp_path}/started", b="echo 'b: Permission denied (password).' >&2; exit 255")
    with (
        launched(tmp_path, script, "a", "b") as launch,
        pytest.raises(ValueError, match="asks for a password") as caught,
    ):
        launch.connect()
    assert "nothing was started" in str(caught.value)
    assert not (tmp_path / "started").exists()


def test_the_terminal_shows_the_first_host_and_each_error_once(
    ssh: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fail = "echo; echo 'error: pp.stages is wrong' >&2; echo W1126 torchrun >&2; exit 1"
    with launched(
        tmp_path, ssh(a=f"{ANSWER}; echo step 1; {fail}", b=f"{ANSWER}; echo other; {fail}"), "a", "b"
    ) as run:
        run.connect()
        with pytest.raises(ReportedError):
            run.run(jobs(2))
    out, err = capfd.readouterr()
    assert out.split() in (["step", "1"], [])  # the error of the other host may come first; then all is said
    assert err.count("pp.stages is wrong") == 1
    assert err.strip().startswith(("error: a: pp.stages", "error: b: pp.stages"))
    assert "other" in (tmp_path / "logs/host-b.log").read_text()
    assert "torchrun" in (tmp_path / "logs/host-a.log").read_text()


def test_a_host_that_vanishes_is_named_and_the_others_are_stopped(
    ssh: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    waits = f'{ANSWER}; while read line; do case "$line" in *SIGTERM*) exit 1;; esac; done'
    with launched(tmp_path, ssh(a=waits, b=f"{ANSWER}; echo 'Broken pipe' >&2; exit 255"), "a", "b") as launch:
        launch.connect()
        with pytest.raises(ReportedError):
            launch.run(jobs(2))
    err = capfd.readouterr().err
    assert "error: b: the connection has ended (Broken pipe)" in err
    assert "\na: ends as well, since b has ended" in err


def test_an_elastic_run_goes_on_without_a_host(ssh: Script, tmp_path: Path) -> None:
    hosts = ssh(a=f"{ANSWER}; exit 0", b=f"{ANSWER}; exit 255")
    with launched(tmp_path, hosts, "a", "b", may_lack=True) as launch:
        launch.connect()
        launch.run(jobs(2))
        assert [host.code for host in launch.hosts] == [0, 255]


def test_a_host_of_an_elastic_run_that_is_back_gets_its_job_again(
    ssh: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the run is complete elsewhere, it is stopped: no other host would come."""
    for name, seconds in {"AGAIN_S": 0.1, "BEAT_S": 0.05, "OTHERS_S": 0.2}.items():
        monkeypatch.setattr(launch_hosts, name, seconds)
    again = tmp_path / "again"
    waits = 'while read line; do case "$line" in *SIGTERM*) exit 1;; esac; done'
    first = f"if [ ! -e {again} ]; then touch {again}; {ANSWER}; exit 255; fi"
    ends = f"until [ -e {tmp_path}/joined ]; do read line || exit 1; done; exit 0"  # its input ends with the test
    second = f'{ANSWER}; echo "$job"; touch {tmp_path}/joined; {waits}'
    with launched(tmp_path, ssh(a=f"{ANSWER}; {ends}", b=f"{first}; {second}"), "a", "b", may_lack=True) as launch:
        launch.connect()
        launch.run(jobs(2))
        assert [host.code for host in launch.hosts] == [0, 1]
    out, err = capfd.readouterr()
    assert '"run_file": ""' in out, "what rank 0 prints is shown wherever it is"
    assert "error: b: the connection has ended (ssh printed nothing); the run continues without it" in err
    assert "b is back" in err
    assert "b: ends as well, since a has ended" in err


@pytest.mark.parametrize("is_back", [True, False])
def test_an_elastic_run_without_a_connected_host_ends_after_a_limited_time(
    is_back: bool, ssh: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in {"AGAIN_S": 0.05, "BEAT_S": 0.05, "ABSENT_S": 60.0 if is_back else 0.2}.items():
        monkeypatch.setattr(launch_hosts, name, seconds)
    lost = f"if [ ! -e {tmp_path}/lost ]; then touch {tmp_path}/lost; {ANSWER}; exit 255; fi"
    script = ssh(a=f"{lost}; {ANSWER}; exit 0" if is_back else f"{lost}; exit 255")
    with launched(tmp_path, script, "a", may_lack=True) as launch:
        launch.connect()
        with contextlib.nullcontext() if is_back else pytest.raises(ReportedError):
            launch.run(jobs(1))
    assert ("no host could be reached for 0.2 s" in capfd.readouterr().err) == (not is_back)


def answer_with(**versions: str) -> str:
    return json.dumps({"port": 1234, "versions": installed_versions() | versions})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (answer_with(torch="1.0"), "nothing was started; torch differs: 1.0 on b, "),
        (answer_with(torch="none"), "nothing was started; b has no torch for python"),
        (answer_with(code="0123"), "nothing was started; code of acsgd differs: 0123 on b, "),
        ("at port 1234", "nothing was started; code of acsgd differs: unknown on b, "),
        ('{"port": 1234}', "nothing was started; code of acsgd differs: unknown on b, "),
    ],
)
def test_hosts_with_other_versions_are_refused(answer: str, expected: str, ssh: Script, tmp_path: Path) -> None:
    """Also one whose supervisor is older than the answer in JSON."""
    script = ssh(a=ANSWER, b=f"echo '{READY}{answer}'; read job")
    with launched(tmp_path, script, "a", "b") as launch, pytest.raises(ValueError) as caught:
        launch.connect()
    assert str(caught.value).startswith(expected)


def test_hosts_with_other_builds_of_a_version_are_accepted(ssh: Script, tmp_path: Path) -> None:
    torch = installed_versions()["torch"].partition("+")[0]
    script = ssh(a=ANSWER, b=f"echo '{READY}{answer_with(torch=f'{torch}+other')}'; read job")
    with launched(tmp_path, script, "a", "b") as launch:
        launch.connect()


def test_ctrl_c_reaches_all_hosts(ssh: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    waits = f'{ANSWER}; echo ready; while read line; do case "$line" in *SIGINT*) echo got SIGINT; exit 1;; esac; done'
    logs = [tmp_path / f"logs/host-{name}.log" for name in "ab"]

    def interrupt() -> None:
        while not all(log.read_text() for log in logs):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with launched(tmp_path, ssh(a=waits, b=waits), "a", "b") as launch:
        launch.connect()
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(ReportedError) as caught:
            launch.run(jobs(2))
    assert caught.value.exit_code == 130
    assert capfd.readouterr().out.splitlines() == ["ready", "got SIGINT"]
    assert logs[1].read_text().splitlines() == ["ready", "got SIGINT"]


@pytest.mark.parametrize(("ignores", "code"), [(False, 3), (True, 137)])
def test_a_lost_connection_ends_torchrun_in_a_limited_time(ignores: bool, code: int) -> None:
    """The supervisor stops it as SIGTERM does, once, and kills it if that does not end it."""
    handler = "signal.SIG_IGN" if ignores else "lambda *_: sys.exit(3)"
    script = f"import signal, sys; signal.signal(signal.SIGTERM, {handler}); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        launcher = _Launcher()
        launcher._has_ended = True
        assert _wait(process, launcher, 0.3 if ignores else 60.0) == code


def test_a_host_runs_a_job_once_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several supervisors wait for the end of one; each removes the file for which the next ones wait."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    running, counts = list[None](), list[int]()

    def supervise() -> None:
        with _locked("job"):
            running.append(None)
            time.sleep(0.01)
            number = len(running)
            running.pop()
        counts.append(number)

    with _locked("job"), _locked("other"):
        threads = [threading.Thread(target=supervise, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        threads[0].join(0.1)
        assert not counts
    for thread in threads:
        thread.join(60.0)
    assert counts == [1] * 8
    assert not list(tmp_path.iterdir())


def test_a_line_that_is_cut_is_the_end_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"signal": "SIGINT"}\n{"signal": "SIGT'))
    launcher = _Launcher()
    launcher.listen()
    assert launcher.is_lost
    assert launcher.signals.get_nowait() == signal.SIGINT


def test_the_submission_to_slurm_stops_the_run_before_its_limit() -> None:
    config = parse([GPT2, "--log.dir", "runs/my run"])
    arguments = {"nodes": 2, "grace_s": 300, "save_s": 290, "sbatch": "sbatch --time 1:00:00"}
    command, variables = submission(config, "gpu", elastic=False, **arguments)  # type: ignore[arg-type]
    assert command[:6] == ["sbatch", "--time", "1:00:00", "--parsable", "--partition", "gpu"]
    assert command[command.index("--signal") + 1] == "B:USR1@300"
    assert variables == {"checkpoints": str(Path("runs/my run/checkpoints").absolute()), "shutdown_s": "290"}
    assert Path(command[-1]).samefile(ROOT / "slurm/train.sbatch")
    elastic, variables = submission(config, "gpu", elastic=True, **arguments)  # type: ignore[arg-type]
    assert Path(elastic[-1]).samefile(ROOT / "slurm/elastic.sbatch")
    assert variables["submit"] == "sbatch --time 1:00:00 --signal B:USR1@300", "also for nodes that are lost"


def test_scripts_for_slurm_are_valid_shell() -> None:
    for script in (ROOT / "slurm").iterdir():
        subprocess.run(["bash", "-n", script], check=True)
