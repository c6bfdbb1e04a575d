"""Laws of runs whose terminal, output or run directory goes away: they lose no step."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

from acsgd.config.options import CheckpointConfig, Config
from acsgd.config.run_file import to_toml
from tests.lib.cache import shared_model, with_shared_cache
from tests.lib.forked_torchrun import Host, forked_torchrun
from tests.lib.forks import checkpoints_of, make_config, started
from tests.lib.launched import MARGIN_S, TRAIN, running


def config_of(directory: Path, *, processes: int, steps: int) -> Config:
    """Write directory/run.toml, a run that prints and logs, and return its config."""
    checkpoint = CheckpointConfig(every="4")
    config = make_config(
        shared_model(directory), directory / "run", processes=processes, steps=steps, checkpoint=checkpoint
    )
    config = with_shared_cache(config)
    config = dataclasses.replace(config, log=dataclasses.replace(config.log, to="print,jsonl,text"))
    (directory / "run.toml").write_text(to_toml(config))
    return config


def steps_of(config: Config) -> int:
    """Return the number of lines of metrics.jsonl."""
    path = Path(config.log.dir) / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def warnings_of(config: Config, rank: int) -> list[str]:
    """Return the warnings in the text log of a rank."""
    lines = (Path(config.log.dir) / f"logs/rank-{rank:05d}.log").read_text().splitlines()
    return [line.rpartition(" - ")[2] for line in lines if "| WARNING " in line]


def print_to(terminal: str, takes_it: bool) -> None:
    """Let this process print to a terminal. takes_it: which becomes its controlling terminal."""
    descriptor = os.open(terminal, os.O_RDWR | (0 if takes_it else os.O_NOCTTY))
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_run_whose_terminal_is_closed_saves_the_step_at_which_it_stops(tmp_path: Path) -> None:
    """torchrun gets the SIGHUP and forwards it; nothing can be printed any more."""
    config = config_of(tmp_path, processes=2, steps=100_000)
    screen, end = pty.openpty()
    agent, worker = (partial(print_to, os.ttyname(end), takes_it) for takes_it in (True, False))
    arguments = ["--standalone", "--nproc-per-node", "2", TRAIN, "run.toml"]
    with forked_torchrun(Host(arguments, {"OMP_NUM_THREADS": "1"}, tmp_path, agent=agent, worker=worker)) as run:
        run.wait_until(lambda: steps_of(config) >= 2, 120)
        os.close(end)
        os.close(screen)
        run.wait_until(lambda: run.exit_code is not None and not run.pids(), MARGIN_S)
        assert max(checkpoints_of(config).steps()) == steps_of(config)
        assert warnings_of(config, 0) == [
            "standard output cannot be written (Input/output error): output is dropped until it can"
        ]


def test_a_run_whose_output_cannot_be_written_runs_to_its_end(tmp_path: Path) -> None:
    config = config_of(tmp_path, processes=1, steps=6)
    reader, writer = os.pipe()
    os.close(reader)
    with running([sys.executable, TRAIN, "run.toml"], tmp_path, output=writer) as run:
        os.close(writer)
        assert run.wait(120.0) == 0
    assert checkpoints_of(config).steps() == [4, 6]
    assert steps_of(config) == 6
    failure = "standard output cannot be written (Broken pipe): output is dropped until it can"
    assert warnings_of(config, 0).count(failure) == 1


def test_a_run_whose_directory_is_removed_makes_it_again_and_saves(tmp_path: Path) -> None:
    config = config_of(tmp_path, processes=2, steps=100_000)
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(every="1000"))
    run_dir = Path(config.log.dir)
    with started(config, 2) as run:
        run.wait_for_training()
        for name in ("config.toml", "logs/rank-00001.log"):
            assert (run_dir / name).exists()
        remove(run_dir)
        run.wait_until(lambda: steps_of(config) > 0)
        run.send(signal.SIGTERM, [0])
        assert run.join() == [0, 0], run.stderr
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert checkpoints_of(config).steps() == steps[-1:]
    names = {"metrics.jsonl", "logs", "checkpoints"}
    assert {path.name for path in run_dir.iterdir()} == names
    assert {path.name for path in (run_dir / "logs").iterdir()} == {"rank-00000.log", "rank-00001.log"}
    (removed,) = [note for note in run.notes() if " was removed during the run; " in note]
    assert removed.startswith(str(run_dir / "metrics.jsonl"))


def remove(directory: Path) -> None:
    """Remove a directory that ranks write to: rename it first, so that it is gone at once."""
    shutil.rmtree(directory.rename(directory.with_name("removed")))
