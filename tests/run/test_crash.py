"""Law: a run may be ended at any moment, and started again, as often as one likes: it is the run nobody disturbed."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from acsgd.config.options import CheckpointConfig, Config
from acsgd.config.run_file import to_toml
from tests.lib.crashes import Campaign, summary
from tests.lib.forks import Result, checkpoints_of, finish, make_config, save_model
from tests.lib.launched import Run, running

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
STEPS = 80
MORE = 2
"""Checkpoints that a start makes before it is ended."""
MARGIN_S = 30.0
"""For the end of torchrun and its processes, on a busy machine."""


@pytest.mark.parametrize(("processes", "kills"), [(1, 30), (2, 20)])
def test_killed_again_and_again_it_is_the_same_run(processes: int, kills: int, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, processes, seed=processes)
    campaign.run(kills)
    result = summary(campaign, 0.0)
    assert result["kills"] == kills
    assert result["phases"]["saving"] >= kills // 5, "or it says nothing of saving"
    assert result["leftovers"] >= kills // 5
    assert result["resumed"] >= kills // 2
    assert result["runs_finished_and_equal"] >= 1


def test_asked_to_end_again_and_again_it_is_the_same_run(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, 2, signal.SIGTERM)
    for number in (signal.SIGUSR1, signal.SIGINT):
        campaign.end_once(number)
    campaign.run(22)
    assert summary(campaign, 0.0)["leftovers"] == 0


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Config, Result]]:
    """Return, by the number of processes, a run that nobody disturbed, and what it gave."""
    runs = tmp_path_factory.mktemp("calm")
    model, found = save_model(runs / "model"), {}
    for processes in (1, 2):
        rarely = CheckpointConfig(best=True)
        config = make_config(model, runs / f"run-{processes}", processes=processes, steps=STEPS, checkpoint=rarely)
        found[processes] = config, finish(config, processes)
    return found


class Started:
    """Real starts of one run, one after the other."""

    def __init__(self, calm: Config, processes: int, cwd: Path) -> None:
        self.config = dataclasses.replace(
            calm,
            checkpoint=CheckpointConfig(every="1", keep=2, best=True),
            log=dataclasses.replace(calm.log, dir=str(cwd / "run")),
        )
        aloud = dataclasses.replace(self.config, log=dataclasses.replace(self.config.log, to="print,jsonl"))
        (cwd / "run.toml").write_text(to_toml(aloud))
        self._processes = processes
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        self._command = [sys.executable, *(torchrun if processes > 1 else []), TRAIN, "run.toml"]
        self._cwd = cwd

    @property
    def newest(self) -> int:
        return max(checkpoints_of(self.config).steps(), default=0)

    def end(self, strike: Callable[[Run], None]) -> tuple[int, str, str]:
        """Start the run, wait for some checkpoints, strike, and return torchrun's exit code, and the output."""
        found = self.newest
        with running(self._command, self._cwd) as run:
            run.wait_until(lambda: run.process.poll() is not None or self.newest >= found + MORE, 120)
            strike(run)
            code = run.process.wait(MARGIN_S)
            run.wait_until(lambda: not run.environments(), MARGIN_S)
            if found:
                assert f"resuming from {checkpoints_of(self.config).of(found)}: step {found}, " in run.stdout
            return code, run.stdout, run.stderr

    def finish(self) -> Result:
        """Start the run once more, let it come to its end, and return what it gave."""
        return finish(self.config, self._processes)

    def last_words(self) -> str:
        """Return what a run says that was asked to end."""
        return f"resumes from {checkpoints_of(self.config).of(self.newest)}\n"


def kill(run: Run) -> None:
    """Kill torchrun and all its processes."""
    for pid in [run.process.pid, *run.environments()]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def terminate_ranks(run: Run) -> None:
    for pid in run.ranks().values():
        os.kill(pid, signal.SIGTERM)


def test_under_torchrun_killed_and_asked_to_end_it_is_the_same_run(
    calm: dict[int, tuple[Config, Result]], tmp_path: Path
) -> None:
    config, expected = calm[2]
    starts = Started(config, 2, tmp_path)
    for _ in range(2):
        starts.end(kill)
    code, out, err = starts.end(terminate_ranks)
    assert (code, err) == (0, "")
    assert out.endswith(starts.last_words())
    code, out, err = starts.end(lambda run: run.process.terminate())
    assert code == 1
    assert "SignalException" in err, "torchrun itself takes it for a failure"
    assert "error: " not in err
    assert out.endswith(starts.last_words())
    assert starts.finish() == expected


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGINT)])
def test_in_one_process_asked_to_end_it_is_the_same_run(
    numbers: tuple[signal.Signals, ...], calm: dict[int, tuple[Config, Result]], tmp_path: Path
) -> None:
    config, expected = calm[1]
    starts = Started(config, 1, tmp_path)
    for number in numbers:
        code, out, err = starts.end(lambda run, number=number: run.process.send_signal(number))  # type: ignore[misc]
        assert (code, err) == (0, "")
        assert f" on {number.name}; " in out
        assert out.endswith(starts.last_words())
    assert starts.finish() == expected


FAILING = """
import runpy, sys, threading, torch.distributed as dist
from acsgd import train
from acsgd.errors import RunError
from acsgd.io.checkpoint import saver
writing, train_step = threading.Event(), train.train_step
def busy(*args):
    writing.set()
    store = dist.HashStore()
    while True:
        store.check(["nothing"])
def failing(session, batch, progress, *args, **options):
    if progress.step == 3:
        writing.wait()
        raise RunError("the world failed the run")
    return train_step(session, batch, progress, *args, **options)
saver.write_layer, train.train_step = busy, failing
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script in which a step fails while a save goes on for ever, in native code: there the interpreter aborts a
thread's whole process, if it comes to its end."""


def test_a_run_that_fails_while_it_saves_ends_with_its_error_alone(
    calm: dict[int, tuple[Config, Result]], tmp_path: Path
) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    config = dataclasses.replace(
        calm[1][0],
        checkpoint=CheckpointConfig(every="3"),
        log=dataclasses.replace(calm[1][0].log, dir=str(tmp_path / "run")),
    )
    (tmp_path / "run.toml").write_text(to_toml(config))
    with running([sys.executable, "failing.py", TRAIN, "run.toml"], tmp_path) as run:
        assert run.process.wait(120) == 1
        assert run.stderr.strip() == "error: the world failed the run"
    assert checkpoints_of(config).steps() == []
    assert [path.name for path in checkpoints_of(config).leftovers()] == [".step-00000003.partial"]
