"""Laws of runs that fail: all ranks end soon, one message names the rank at fault, and no rank outlives torchrun."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from acsgd import main, train
from acsgd.config.options import CheckpointConfig, Config, EvalConfig, RunConfig
from acsgd.errors import RunError
from acsgd.failures.failures import GRACE_S
from acsgd.failures.signals import REPEAT_S, WATCH_S
from acsgd.groups import Groups
from acsgd.io.data.held_out import HeldOut
from acsgd.io.telemetry.metrics import Metrics
from acsgd.layers.batch import Batch
from acsgd.pp.runtime import Evaluated, Pipeline
from acsgd.pp.stage import Stage
from acsgd.run.lock import lease, lock
from acsgd.run.plan.job import Job
from acsgd.run.plan.transports import Transports
from acsgd.run.setup import rows
from acsgd.run.step.checkpointing import Checkpointing
from acsgd.run.step.hooks import LoopState
from acsgd.run.step.run import NextBatch
from tests.lib.cache import shared_model, with_shared_cache
from tests.lib.corpora import write_records
from tests.lib.forks import checkpoints_of, finish, make_config, started
from tests.lib.launched import MARGIN_S, TRAIN, running
from tests.lib.ordered import ordered_transport
from tests.lib.patience import NO_LIMIT_S, stretched

HOST = socket.gethostname()
TIMEOUT_S = stretched(4.0)


def config_of(directory: Path, *, processes: int, stages: int, timeout_s: float = TIMEOUT_S) -> Config:
    """Return the config of a run that does not end by itself."""
    config = make_config(
        shared_model(directory, blocks=max(2, stages)),
        directory / "run",
        processes=processes,
        steps=100_000,
        checkpoint=CheckpointConfig(),
    )
    pp = dataclasses.replace(config.pp, stages=stages, layers=None)
    return with_shared_cache(dataclasses.replace(config, pp=pp, run=RunConfig(timeout=timeout_s)))


def inject(rank: int, *, at_rank: int, fault: str, notice: Path) -> None:
    """Patch this process: `at_rank` stops, dies, sleeps or raises in a forward of step 3, after creating `notice`.

    fault: "STOP" or "KILL" (signals), "sleep" or "raise".
    """
    forward = Stage.forward

    def faulty(self: Stage, micro: Any, *args: Any, **options: Any) -> Any:
        if rank == at_rank and micro.step == 2:
            notice.touch()
            if fault == "raise":
                raise ValueError("an error of one rank")
            if fault == "sleep":
                time.sleep(600)
            os.kill(os.getpid(), signal.Signals[f"SIG{fault}"])
        return forward(self, micro, *args, **options)

    Stage.forward = faulty  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("processes", "stages", "at_rank", "fault"),
    [(4, 4, 1, "STOP"), (4, 4, 2, "KILL"), (4, 2, 3, "STOP"), (4, 2, 2, "KILL"), (2, 1, 1, "KILL")],
)
def test_a_rank_that_hangs_or_dies_is_named_once_and_all_others_end(
    processes: int, stages: int, at_rank: int, fault: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, processes=processes, stages=stages)
    notice = tmp_path / "fault"
    with started(config, processes, setup=partial(inject, at_rank=at_rank, fault=fault, notice=notice)) as run:
        run.wait_until(notice.exists)
        # gloo reports the death of a peer at once, a peer that hangs only after run.timeout
        limit_s = TIMEOUT_S + 4 * min(GRACE_S, TIMEOUT_S / 4) + MARGIN_S
        others = [rank for rank in range(processes) if rank != at_rank]
        assert run.join(limit_s, ranks=others) == [1] * len(others)
        (error,) = run.errors
        assert f"; rank {at_rank} on {HOST} is silent: ended or hanging" in error
        # a rank of another pipeline may be late, in the reports of the step before
        assert re.match(rf"error: (step 3, stage \d, action .+: |)rank \d on {HOST}: ", error)
        assert error.startswith("error: step") or "exchanging loss and gradient norm" in error
        cause = error.partition(";")[0]
        assert f"rank {at_rank}" in cause or f"{at_rank}]" in cause
        assert "Traceback" not in run.stderr


def inject_over_ordered_transport(rank: int, **fault: Any) -> None:
    """As `inject`, in a run whose device tensors travel over the ordered transport."""

    def open_ordered(job: Job, groups: Groups, transports: Transports) -> tuple[Groups, list[str]]:
        return groups.with_transport(ordered_transport(rank), torch.device("cpu"), lambda axis, ranks: True), []

    main.open_transports = open_ordered
    inject(rank, **fault)


@pytest.mark.parametrize(
    ("stages", "at_rank", "fault", "operation"),
    [
        (2, 1, "KILL", r"(receiving gradient|sending activation) 0 across boundary 0-1, step 3, micro-batch \d.*"),
        (1, 1, "STOP", r"summing gradients of rank 0 of the pipelines over ranks \[0, 1\]"),
    ],
)
def test_a_rank_that_ends_within_an_operation_of_the_device_is_named(
    stages: int, at_rank: int, fault: str, operation: str, tmp_path: Path
) -> None:
    """NCCL waits for it for ever, and the host for its device."""
    config = config_of(tmp_path, processes=2, stages=stages)
    notice, limit_s = tmp_path / "fault", 2 * TIMEOUT_S + 4 * min(GRACE_S, TIMEOUT_S / 4) + MARGIN_S
    setup = partial(inject_over_ordered_transport, at_rank=at_rank, fault=fault, notice=notice)
    with started(config, 2, setup=setup) as run:
        run.wait_until(notice.exists)
        assert run.join(limit_s, ranks=[1 - at_rank]) == [1]
        (error,) = run.errors
        assert re.match(rf"error: rank {1 - at_rank} on {HOST}: {operation}, with ranks \[{at_rank}\]: ", error)
        assert "Traceback" not in run.stderr


def test_an_error_of_one_rank_is_printed_once_and_its_traceback_is_in_its_log(tmp_path: Path) -> None:
    config, notice = config_of(tmp_path, processes=4, stages=2), tmp_path / "fault"
    with started(config, 4, setup=partial(inject, at_rank=2, fault="raise", notice=notice)) as run:
        assert run.join() == [1] * 4
        (line,) = run.stderr.strip().splitlines()
        assert line.startswith(f"error: rank 2 on {HOST}: ValueError: an error of one rank (acsgd/pp/")
        log = tmp_path / "run" / "logs" / "rank-00002.log"
        assert line.endswith(f": this is a bug in acsgd; please report it with the traceback in {log}")
        assert "in faulty\n" in log.read_text()


class PanicException(BaseException):
    """As a Rust extension that panics raises it."""


SET_UP = [
    (main, "prepare", OSError(errno.ENOSPC, "", "x"), "x: No space left on device; free space"),
    (main, "open_inputs", ValueError("x has no token"), "x has no token"),
    (train, "start", RunError("x is corrupt"), "x is corrupt"),
    (Metrics, "open", IsADirectoryError(errno.EISDIR, "", "metrics.jsonl"), "metrics.jsonl: Is a directory; remove"),
    (Checkpointing, "open", PanicException("index"), f"rank 1 on {HOST}: "),
]
"""Module or class, its function that fails, the error, and the beginning of its message."""


def fail_in_set_up(rank: int, *, case: int) -> None:
    """Patch rank 1 of this process to fail before training; all others then wait for it."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    owner, function, error, _ = SET_UP[case]
    if rank == 1:
        setattr(owner, function, fail)


def test_an_error_of_one_rank_before_training_ends_all_with_code_2_and_one_sentence(tmp_path: Path) -> None:
    config = config_of(tmp_path, processes=2, stages=2, timeout_s=NO_LIMIT_S)
    for case, (_, function, _, message) in enumerate(SET_UP):
        with started(config, 2, setup=partial(fail_in_set_up, case=case)) as run:
            assert run.join(MARGIN_S) == [2, 2], function
            (line,) = run.stderr.strip().splitlines()
            assert line.startswith(f"error: {message}"), function
            assert not list((tmp_path / "run").glob(".lock*")), function


def stay_in_set_up(rank: int, *, case: int, notice: Path) -> None:
    """Patch rank 0 of this process to stay in a phase of its set-up; all others then wait for it."""

    def stay(*_: Any, **__: Any) -> Any:
        notice.touch()
        time.sleep(600)

    owner, function, _, _ = SET_UP[case]
    if rank == 0:
        setattr(owner, function, stay)


@pytest.mark.parametrize("case", range(len(SET_UP)))
def test_a_stop_signal_to_one_rank_ends_the_set_up_of_all_at_once(case: int, tmp_path: Path) -> None:
    config, notice = config_of(tmp_path, processes=2, stages=2, timeout_s=NO_LIMIT_S), tmp_path / "phase"
    number, rank = (signal.SIGUSR1, 1) if case % 2 else (signal.SIGTERM, 0)
    with started(config, 2, setup=partial(stay_in_set_up, case=case, notice=notice)) as run:
        run.wait_until(notice.exists)
        run.send(number, [rank])
        assert run.join(MARGIN_S) == [128 + number] * 2
        (line,) = run.stderr.strip().splitlines()
        assert line.startswith(f"error: stopped by {number.name} before the first step"), line
    assert not list((tmp_path / "run").glob(".lock*"))


EVALUATION_S = 600.0


def evaluate_slowly(rank: int, notice: Path) -> None:
    """Patch this process: the evaluation of step 3 takes at least EVALUATION_S."""
    evaluate, batches = Pipeline.evaluate, HeldOut.batches

    def slow(self: Pipeline, batch: Batch, step: int) -> Evaluated:
        if step == 2:
            time.sleep(0.01)
            notice.touch()
        return evaluate(self, batch, step)

    def many(self: HeldOut, micros: int, *args: Any, **options: Any) -> Iterator[Batch]:
        return itertools.cycle(list(batches(self, micros, *args, **options)))

    Pipeline.evaluate, HeldOut.batches = slow, many  # type: ignore[method-assign]
    HeldOut.most_batches = lambda *_: int(EVALUATION_S / 0.01)  # type: ignore[method-assign]


@pytest.mark.parametrize("processes", [1, 4])
def test_a_stop_signal_in_an_evaluation_is_saved_and_the_resumed_run_repeats_it(processes: int, tmp_path: Path) -> None:
    def config_in(name: str) -> Config:
        model = shared_model(tmp_path, blocks=2)
        best = CheckpointConfig(every="100", best="eval_loss")
        return with_shared_cache(make_config(model, tmp_path / name, processes=processes, steps=4, checkpoint=best))

    config, notice = config_in("run"), tmp_path / "evaluates"
    with started(config, processes, setup=partial(evaluate_slowly, notice=notice)) as run:
        run.wait_until(notice.exists)
        run.send(signal.SIGTERM, [processes - 1])
        assert run.join(MARGIN_S) == [0] * processes, run.stderr
        notes = run.notes()
    assert any(note.startswith("step 3: a stop signal has ended the evaluation") for note in notes)
    assert notes[-1].startswith("stopped after step 3 of 4 on ")
    assert checkpoints_of(config).steps() == [3]
    assert finish(config, processes) == finish(config_in("calm"), processes)


STALLED_AT = 3
"""Step after which no more streamed data arrive."""


def stall_the_stream(rank: int, notice: Path) -> None:
    """Patch this process: a source yields two windows of 8 sequences, and training creates `notice` when it waits."""
    read_segments, before_step = rows.read_segments, NextBatch.before_step

    def stalling(*args: Any, **options: Any) -> Iterator[Any]:
        yield from itertools.islice(read_segments(*args, **options), 2)
        time.sleep(600)

    def noticed(self: NextBatch, state: LoopState) -> None:
        if state.progress.step == STALLED_AT:  # whose next batch, that of two steps later, is not there
            notice.with_name(f"{notice.name}-{rank}").touch()
        before_step(self, state)

    rows.read_segments, NextBatch.before_step = stalling, noticed  # type: ignore[attr-defined, method-assign]


@pytest.mark.parametrize("processes", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_a_stop_signal_while_ranks_wait_for_streamed_data_is_saved(processes: int, tmp_path: Path) -> None:
    write_records(tmp_path / "a.jsonl")

    def config_in(name: str) -> Config:
        model = shared_model(tmp_path, blocks=2)
        config = make_config(model, tmp_path / name, processes=processes, steps=6, checkpoint=CheckpointConfig())
        streamed = {"sources": f"stream:{tmp_path / 'a.jsonl'}", "window": 8, "eval_fraction": 0.0}
        data = dataclasses.replace(config.data, **streamed)  # type: ignore[arg-type]
        return with_shared_cache(dataclasses.replace(config, data=data, eval=EvalConfig()))

    config, notice = config_in("run"), tmp_path / "waits"
    with started(config, processes, setup=partial(stall_the_stream, notice=notice)) as run:
        run.wait_until(lambda: len([*tmp_path.glob("waits-*")]) == processes)
        run.send(signal.SIGUSR1, [processes - 1])
        assert run.join(MARGIN_S) == [0] * processes, run.stderr
        notes = run.notes()
    assert any(note.startswith("step 3: a stop signal has ended the wait for streamed data") for note in notes)
    assert notes[-1].startswith("stopped after step 3 of 6 on ")
    assert checkpoints_of(config).steps() == [STALLED_AT]
    assert finish(config, processes) == finish(config_in("calm"), processes)


def fail_while_rank_0_acquires(rank: int) -> None:
    """Patch this process: once rank 0 has acquired the run lock, it is slow to return, while rank 1 fails."""
    start = lock.RunLock.start

    def fail(self: lock.RunLock) -> None:
        raise ValueError("a failure")

    def slow(self: lock.RunLock) -> None:
        start(self)
        time.sleep(600)

    lock.RunLock.start = fail if rank else slow  # type: ignore[method-assign]


def test_a_rank_that_is_ended_while_it_acquires_the_run_lock_releases_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, processes=2, stages=2, timeout_s=NO_LIMIT_S)
    with started(config, 2, setup=fail_while_rank_0_acquires) as run:
        assert run.join(MARGIN_S) == [2, 2]
        assert len(run.errors) == 1
    assert not list((tmp_path / "run").glob(".lock*"))


def test_a_second_interrupt_ends_at_once_without_a_traceback(tmp_path: Path) -> None:
    config, notice = config_of(tmp_path, processes=1, stages=1), tmp_path / "fault"
    with started(config, 1, setup=partial(inject, at_rank=0, fault="sleep", notice=notice)) as run:
        run.wait_until(notice.exists)
        run.send(signal.SIGINT, [0])
        time.sleep(REPEAT_S / 2)
        run.send(signal.SIGINT, [0])  # an echo: from the terminal and forwarded by torchrun
        time.sleep(REPEAT_S)
        assert run.processes[0].is_alive()
        run.send(signal.SIGINT, [0])
        assert run.join(MARGIN_S, ranks=[0]) == [130]
        assert run.stderr == ""


def test_a_second_interrupt_ends_a_rank_that_waits_inside_gloo(tmp_path: Path) -> None:
    config, notice = config_of(tmp_path, processes=2, stages=2, timeout_s=NO_LIMIT_S), tmp_path / "fault"
    with started(config, 2, setup=partial(inject, at_rank=1, fault="STOP", notice=notice)) as run:
        run.wait_until(notice.exists)
        run.send(signal.SIGINT, [0])
        time.sleep(2 * REPEAT_S)
        assert run.processes[0].is_alive()
        run.send(signal.SIGINT, [0])
        assert run.join(MARGIN_S, ranks=[0]) == [130]
        assert not run.errors


FLAGS = "--model.name m --data.sources demo --data.sequence 8 --data.batch 2 --optim.lr 1 --optim.steps 3"


@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        (signal.SIGINT, [TRAIN, *FLAGS.split()]),
        (signal.SIGTERM, [TRAIN, *FLAGS.split()]),
        (signal.SIGTERM, ["-m", "acsgd.cli", "inspect", "."]),
    ],
)
def test_a_signal_among_the_imports_ends_at_once_without_a_traceback(
    number: signal.Signals, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").touch()  # what is no checkpoint is refused before the imports
    with running([sys.executable, *arguments], tmp_path) as run:
        maps = Path(f"/proc/{run.process.pid}/maps")
        run.wait_until(lambda: "libtorch" in maps.read_text(), 60)  # among the imports
        run.process.send_signal(number)
        assert run.wait() == 128 + number
        when = "" if arguments[0] == "-m" else " before the start; nothing was written"
        # an import may have caught the exception, which Python then reports as ignored
        assert run.stderr.endswith(f"\nerror: stopped by {number.name}{when}\n")


TORCHRUN = """
import atexit, signal
def main():
    atexit.register(print, "cleaned up")
    signal.raise_signal(signal.SIGINT)
"""


STOPPED = """
import os, sys
from torch.distributed.elastic.multiprocessing.api import SignalException
def main():
    sys.excepthook = lambda *_: print("this host has left the run")
    stop = SignalException()
    stop.sigval = signal.SIGINT
    raise stop
"""


@pytest.mark.parametrize(
    ("lines", "ended"),
    [
        ("", (130, "cleaned up\n")),
        ("main()", (-signal.SIGINT, "")),
        (STOPPED, (130, "")),
        (STOPPED + "os.environ['ACSGD_DAEMON'] = 'path'", (1, "this host has left the run\n")),
    ],
    ids=["while it runs", "among its imports", "as it says itself", "as it says itself, in an elastic run"],
)
def test_an_interrupt_of_torchrun_cleans_up_after_its_imports(
    lines: str, ended: tuple[int, str], tmp_path: Path
) -> None:
    package = tmp_path / "torch" / "distributed"
    api = package / "elastic" / "multiprocessing" / "api.py"
    api.parent.mkdir(parents=True)
    for path in (package.parent, package, api.parents[1], api.parent):
        (path / "__init__.py").touch()
    api.write_text("class SignalException(Exception): pass")
    (package / "run.py").write_text(TORCHRUN + lines)  # lines: among the imports
    heeded = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # these tests may ignore it
    start = f"{heeded}; from acsgd.launch import start_torchrun; start_torchrun([])"
    with running([sys.executable, "-c", start], tmp_path) as run:
        assert (run.wait(), run.stdout, run.stderr) == (*ended, "")


def wait_briefly_for_the_holder(rank: int) -> None:
    lease.WAIT_S = 1.0


def test_a_second_start_in_one_directory_is_refused_and_a_killed_one_is_taken_over(tmp_path: Path) -> None:
    config = config_of(tmp_path, processes=2, stages=2)
    elsewhere = dataclasses.replace(config.log, dir=str(tmp_path / "other"))
    shared = dataclasses.replace(config.checkpoint, dir=str(tmp_path / "run" / "checkpoints"))
    same_checkpoints = dataclasses.replace(config, log=elsewhere, checkpoint=shared)
    with started(config, 2) as first:
        first.wait_for_training()
        pid = first.processes[0].pid
        for second_config, option in ((config, "log.dir"), (same_checkpoints, "checkpoint.dir")):
            before = (tmp_path / "run" / "config.toml").read_bytes()
            with started(second_config, 2, setup=wait_briefly_for_the_holder) as second:
                assert second.join(ranks=[0]) == [2]
                (error,) = second.errors
                assert error.startswith(f"error: {option}: ")
                assert f" is in use by another run: process {pid} on {HOST}, started " in error
            assert (tmp_path / "run" / "config.toml").read_bytes() == before
        assert all(process.is_alive() for process in first.processes)
        first.send(signal.SIGKILL, [0, 1])
        first.join()
        with started(config, 2, setup=wait_briefly_for_the_holder) as third:
            third.wait_for_training()
            assert all(process.is_alive() for process in third.processes), third.stderr


CHAIN = """
import ctypes, os, signal, subprocess, sys, time
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
prctl = ctypes.CDLL(None).prctl
role, *options = sys.argv[1:]
print(f"{role} {os.getpid()}", flush=True)
def start(role):
    is_torchrun = sys.argv[1] == "torchrun"
    subprocess.Popen([sys.executable, __file__, role, *options], start_new_session=is_torchrun)
if role == "reaper":
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    start("torchrun")
elif role == "torchrun":
    prctl(PR_SET_NAME, b"pt_elastic", 0, 0, 0)
    start("shell" if "wrapped" in options else "rank")
elif role == "shell":
    start("rank")
elif "importing" in options:
    os.environ["TORCHELASTIC_RUN_ID"] = "1"
    from acsgd.__main__ import main
    flags = "--model.name m --data.sources demo --data.sequence 8 --data.batch 2 --optim.lr 1 --optim.steps 3"
    main(flags.split(), prog="train.py")
else:
    parent = os.getppid()
    from acsgd.failures import signals
    if "late" in options:
        print("imported", flush=True)
        while os.getppid() == parent:
            time.sleep(0.01)
    if "later" in options:
        parent = os.getppid()
    if "raced" in options:
        find = signals.find_torchrun
        def find_and_kill(parent):
            torchrun = find(parent)
            os.kill(torchrun, signal.SIGKILL)
            while signals.start_time(torchrun):
                time.sleep(0.01)
            return torchrun
        signals.find_torchrun = find_and_kill
    signals.end_with_torchrun(parent, is_main=True, end=os._exit)
    print("started", flush=True)
time.sleep(600)
"""
"""Script that starts a rank below a process named as torchrun, optionally below a subreaper, which adopts orphans."""
SLOW_TORCH = """
import time
print("importing", flush=True)
time.sleep(600)
"""


def pid_of(role: str, stdout: str) -> Iterator[int]:
    return (int(line.split()[1]) for line in stdout.splitlines() if line.startswith(f"{role} "))


@pytest.mark.parametrize(
    ("above", "when"),
    [("reaper", "wrapped raced"), ("torchrun", "late"), ("torchrun", "late later"), ("reaper", "importing")],
)
def test_a_rank_ends_with_torchrun_whichever_process_adopts_it(above: str, when: str, tmp_path: Path) -> None:
    """when torchrun dies: raced = just after the rank found it, below a shell; late = before the watch over torchrun
    starts; later = before the rank's first instruction; importing = while the rank imports torch.
    """
    (tmp_path / "chain.py").write_text(CHAIN)
    if when == "importing":
        (tmp_path / "torch.py").write_text(SLOW_TORCH)
    sign = {"late": "imported", "late later": "imported", "importing": "importing"}.get(when, "started")
    with running([sys.executable, "chain.py", above, *when.split()], tmp_path) as run:
        run.wait_until(lambda: sign in run.stdout or run.errors, 60)  # raced: it may end before it has started
        with contextlib.suppress(ProcessLookupError):  # raced
            os.kill(next(pid_of("torchrun", run.stdout)), signal.SIGKILL)
        if above == "torchrun":
            run.process.wait()
        run.wait_until(lambda: run.errors, WATCH_S + MARGIN_S)
        rank = next(pid_of("rank", run.stdout))
        run.wait_until(lambda: rank not in run.environments(), MARGIN_S)
        assert len(run.errors) == 1
        assert run.errors[0].startswith("error: torchrun, ")
        assert run.errors[0].endswith(" has ended; this host's ranks end with it")
