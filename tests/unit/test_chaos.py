"""The command `acsgd chaos`, on processes that stand for the workers of a run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from lib.patience import stretched, wait_until

from acsgd import cli
from acsgd.commands.chaos import START, Injector, _end, _lines_after
from acsgd.elastic.host.processes import HostProcesses, describe, find_hosts
from acsgd.failures.processes import ProcessIdentity
from acsgd.io.telemetry.json_lines import METRICS

LIMIT_S = stretched(20.0)
LOGGING = """
import json, pathlib, time
path = pathlib.Path({path!r})
for step in range(1, 10**6):
    with path.open("a") as file:
        file.write(json.dumps({{"step": step}}) + chr(10))
    time.sleep(0.01)
"""
"""A program that logs steps as rank 0 does."""


class Host:
    """Processes with the environment of workers. The first logs steps, the second does nothing."""

    def __init__(self, directory: Path, stack: ExitStack, restarts: tuple[int, int]) -> None:
        self.run_dir, self._socket = directory / "run", directory / "0"
        self.run_dir.mkdir()
        environment = os.environ | {
            "ACSGD_DAEMON": str(self._socket),
            "TORCHELASTIC_RESTART_COUNT": str(restarts[0]),
            "TORCHELASTIC_MAX_RESTARTS": str(restarts[1]),
        }
        programs = LOGGING.format(path=str(self.run_dir / METRICS)), "import time; time.sleep(600)"
        self.workers = []
        for program in programs:
            self.workers.append(stack.enter_context(subprocess.Popen([sys.executable, "-c", program], env=environment)))
            stack.callback(self.workers[-1].kill)
        wait_for(lambda: (self.run_dir / METRICS).exists())
        describe(self._socket, str(self.run_dir), "h:1", {str(i): each.pid for i, each in enumerate(self.workers)})

    def injector(self, seed: int = 0, limit_s: float = LIMIT_S) -> Injector:
        return Injector(self.run_dir, random.Random(seed), stop_s=0.2, limit_s=limit_s)


@pytest.fixture
def make_host(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    with ExitStack() as stack:
        yield lambda restarts=(0, 3): Host(tmp_path, stack, restarts)


def wait_for(condition: Callable[[], object]) -> None:
    wait_until(condition, LIMIT_S)


def state_of(pid: int) -> str:
    """Return the state of a process: "T" if it is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_the_processes_of_a_run_are_found_and_those_of_others_are_not(
    make_host: Callable[..., Host], tmp_path: Path
) -> None:
    host = make_host()
    (found,) = find_hosts(host.run_dir)
    assert [worker.pid for worker in found.workers.values()] == [worker.pid for worker in host.workers]
    assert found.agent.pid == os.getpid()
    assert found.agent.is_alive()
    assert found.restarts_left() == 3
    assert not find_hosts(tmp_path)


def test_a_process_that_has_got_the_number_of_another_one_is_not_signalled(make_host: Callable[..., Host]) -> None:
    worker = ProcessIdentity.of(make_host().workers[1].pid)
    assert not replace(worker, started=str(int(worker.started) - 1)).send_signal(signal.SIGKILL)
    assert state_of(worker.pid) != "Z"
    assert worker.send_signal(signal.SIGKILL)


def test_faults_are_injected_and_the_time_to_the_next_step_is_measured(
    make_host: Callable[..., Host], capsys: pytest.CaptureFixture[str]
) -> None:
    host = make_host()
    injector = host.injector()
    injector.run(["stop"], 0.01, 3)
    assert [each.recovery_s is not None for each in injector.injected] == [True] * 3
    assert all(state_of(worker.pid) != "T" for worker in host.workers), "a worker is still stopped"
    assert injector.summarize() == 0
    assert "3 faults" in capsys.readouterr().out


def test_a_run_that_does_not_go_on_or_repeats_a_step_is_a_failure(make_host: Callable[..., Host]) -> None:
    host = make_host()
    host.workers[0].kill()  # no more steps
    host.workers[0].wait()
    injector = host.injector(limit_s=0.1)
    injector.run(["stop"], 0.01, None)
    assert injector.injected[-1].recovery_s is None
    assert injector.summarize() == 1
    (host.run_dir / METRICS).write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 2, 3)))
    assert host.injector().summarize() == 1


def test_the_same_seed_injects_the_same_faults(make_host: Callable[..., Host]) -> None:
    host, runs = make_host(), []
    for _ in range(2):
        injector = host.injector(seed=5)
        injector.run(["stop"], 0.01, 4)
        runs.append([each.text.partition(", ")[2] for each in injector.injected])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4


def test_a_worker_is_not_killed_where_torchrun_would_not_start_it_again(make_host: Callable[..., Host]) -> None:
    host = make_host(restarts=(3, 3))
    with pytest.raises(ValueError, match="h:1 has no restarts left"):
        host.injector().run(["kill"], 0.01, 1)
    assert [worker.poll() for worker in host.workers] == [None, None]


def test_after_a_kill_only_steps_of_a_later_view_count(make_host: Callable[..., Host]) -> None:
    host = make_host()
    injector = host.injector(seed=0, limit_s=0.5)
    injector.run(["kill"], 0.01, 1)
    ((text, recovery_s),) = injector.injected
    assert "worker 1" in text, "the one that logs steps still runs"
    assert recovery_s is None, "a step of the view that was killed counts"

    def add_view() -> None:
        with (host.run_dir / METRICS).open("a") as file:
            file.write(json.dumps({"event": "view", "view": 1}) + "\n")

    timer = threading.Timer(0.3, add_view)
    timer.start()
    assert host.injector()._wait_for_step(0, START) is not None
    assert '"view"' in (host.run_dir / METRICS).read_text(), "a step before the next view counts"
    timer.join()


def write_lines(run_dir: Path, *lines: dict[str, object]) -> None:
    (run_dir / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_lines_after_a_mark_are_not_read_from_a_file_that_was_cut_off_and_has_grown_again(tmp_path: Path) -> None:
    assert _lines_after(tmp_path, _end(tmp_path)) == []
    write_lines(tmp_path, {"step": 1}, {"step": 2})
    mark = _end(tmp_path)
    assert _lines_after(tmp_path, mark) == []
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 3}\n{"step": 4')
    assert _lines_after(tmp_path, mark) == [{"step": 3}], "a line that is not complete is read"
    for text in ("", "again", "again, and longer than before"):
        write_lines(tmp_path, {"step": 1, "text": text})
        assert _lines_after(tmp_path, mark) is None
    assert _lines_after(tmp_path, START) == [{"step": 1, "text": text}]


def test_after_a_kill_steps_of_a_file_that_was_written_again_count(tmp_path: Path) -> None:
    injector = Injector(tmp_path, random.Random(0), stop_s=0.1, limit_s=LIMIT_S)
    write_lines(tmp_path, {"event": "view", "view": 1}, {"step": 1}, {"step": 2})
    mark = _end(tmp_path)
    write_lines(tmp_path, {"event": "view", "view": 1}, {"step": 1}, {"event": "returned to step 1"})
    assert injector._wait_for_step(1, mark) is None, "the step of the view that was killed counts"
    write_lines(tmp_path, {"event": "view", "view": 1}, {"step": 1}, {"event": "view", "view": 2}, {"step": 2})
    assert injector._wait_for_step(1, mark) is not None


def test_a_host_is_killed_with_its_torchrun(make_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    host, killed = make_host(), list[int]()
    (found,) = find_hosts(host.run_dir)
    monkeypatch.setattr(ProcessIdentity, "send_signal", lambda process, number: killed.append(process.pid) is None)
    assert host.injector()._inject("host", [found]) is not None
    assert killed == [os.getpid(), *(worker.pid for worker in host.workers)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--every", "30"], '--every 30 is not a time; give a number with a unit, such as "30s" or "5m"'),
        (["--every", "0s"], "--every 0s is not a time"),
        (["--faults", "kill,burn"], '--faults: "burn" is none of kill, stop, host'),
        (["--count", "0"], "--count 0 must be 1 or more"),
        ([], "no worker of this user on this machine trains in this run directory"),
    ],
)
def test_wrong_options_are_refused_with_a_sentence(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(["chaos", str(tmp_path), *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_hosts_without_a_description_are_left_alone(make_host: Callable[..., Host], tmp_path: Path) -> None:
    host = make_host()
    (tmp_path / "0.json").write_text('{"run_dir": 1}')
    assert find_hosts(host.run_dir) == list[HostProcesses]()
