"""What a worker does on its own when the view changes."""

from __future__ import annotations

import contextlib
import json
import socket
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest

from acsgd.comm.store import StoreError
from acsgd.comm.waits import InterruptibleWaits
from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig
from acsgd.elastic.control import COMPLETE_S, Control
from acsgd.elastic.membership.messages import Broken, Done, End, Hello, Host, Run, Setup, Stop, Stopped, View, to_line
from acsgd.elastic.membership.plan import Plan
from acsgd.elastic.state.handover import is_run_over
from acsgd.elastic.view_resources import open_metrics
from acsgd.elastic.worker import ElasticWorker
from acsgd.errors import AfterLastStepError, ConnectError, RefusedError, RunError, SaveError
from acsgd.failures.failures import RunContext
from acsgd.failures.signals import StopSignals
from acsgd.io.checkpoint.progress import Progress
from acsgd.io.telemetry.record import StepRecord
from acsgd.launch import Launch
from acsgd.run.step.hooks import LoopState


def record(step: int) -> StepRecord:
    return StepRecord(step, 1.0, 10 * step, 1.0, 1.0, 1e-3, 1.0, 0, 0, 0, 0, 1.0, 0)


@pytest.mark.parametrize("num_logged", [2, 3])
def test_a_new_rank_0_logs_the_last_step_unless_the_rank_0_before_has(tmp_path: Path, num_logged: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record(step).numbers()) + "\n" for step in range(1, num_logged + 1)))
    config = Config(
        ModelConfig("m"),
        DataConfig("demo", 8, 2),
        OptimConfig(lr=1e-3, steps=9),
        log=LogConfig(dir=str(tmp_path), to="jsonl"),
    )
    state = LoopState(Progress(step=3), record=record(3))
    with open_metrics(config, state) as metrics:
        metrics.log(record(4))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_host_that_joins_after_an_evaluation_gets_the_record_of_the_last_step() -> None:
    evaluated = record(3)._replace(evaluation={"eval_loss": 2.0}, ranks={"step_s": [1.0]}, loss=None)
    view = View(7, (Host("a", "h:1"), Host("b", "h:2")), Plan(1, ranks=("a/0", "b/0")))
    session = SimpleNamespace(job=SimpleNamespace(disk_timeout_s=1.0))
    begun = SimpleNamespace(start=SimpleNamespace(session=session, progress=Progress(step=3)), received_bytes=0)
    sent = list[str]()

    def all_gather_text(_: str, text: str, **__: float) -> list[str]:
        sent.append(text)
        return sent

    for last in (evaluated, None):
        worker = new_worker(Script())
        worker._state = LoopState(Progress(step=3), record=last, is_open=True)
        args = view, begun, SimpleNamespace(all_gather_text=all_gather_text), SimpleNamespace(event=print), None
        worker._report_start(*args)  # type: ignore[arg-type]
        assert worker._state.record == evaluated


class Script:
    """Stands for the daemon: gives messages, and records the answers."""

    def __init__(self, *messages: Run | Stop | End) -> None:
        self.messages = list(messages)
        self.sent: list[object] = []

    def next_message(self) -> Run | Stop | End:
        return self.messages.pop(0)

    def send(self, message: object) -> None:
        self.sent.append(message)

    def attach(self, waits: InterruptibleWaits) -> None:
        pass

    def detach(self) -> None:
        pass


def new_worker(script: Script) -> ElasticWorker:
    config = Config(ModelConfig("m"), DataConfig("demo", 8, 2), OptimConfig(lr=1e-3, steps=9))
    return ElasticWorker(config, Launch(), script, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [RunError("x", awaited=[1]), ConnectError("x"), StoreError("x"), RunError("x")])
def test_a_worker_goes_on_in_another_view_after_an_error_that_other_ranks_may_have_caused(
    monkeypatch: pytest.MonkeyPatch, error: RunError
) -> None:
    """Rank 0 may end while the groups are formed, in its store."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(ElasticWorker, "_train", fail)
    script = Script()
    view = View(7, (Host("a", "h:1"),), Plan(1, ranks=("a/0",)))
    run = partial(new_worker(script)._run_view, Run(view, "a/0"), cast(StopSignals, None), cast(RunContext, None))
    if type(error) is RunError and not error.awaited:
        with pytest.raises(RunError):
            run()
    else:
        assert not run()
        assert script.sent == [Broken(7, "x")]


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
def test_a_host_that_cannot_save_ends_alone_and_the_others_save_again(
    monkeypatch: pytest.MonkeyPatch, ranks: list[int]
) -> None:
    """The worker has rank 0."""

    def fail(*_: object) -> None:
        raise SaveError("step 5 could not be saved: its disk is full", ranks)

    monkeypatch.setattr(ElasticWorker, "_train", fail)
    script = Script()
    worker = new_worker(script)
    view = View(7, (Host("a", "h:1"), Host("b", "h:2")), Plan(1, ranks=("a/0", "b/0")))
    run = partial(worker._run_view, Run(view, "a/0"), cast(StopSignals, None), cast(RunContext, None))
    if 0 in ranks:
        with pytest.raises(RefusedError, match=r"its disk is full; fix the cause and start this host again$"):
            run()
        assert not script.sent
    else:
        assert not run()
        assert script.sent == [Broken(7, "step 5 could not be saved: its disk is full")]
        assert worker._has_dropped_save


def test_a_run_whose_last_upload_is_missing_is_done_and_its_hosts_are_not_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise AfterLastStepError("the last checkpoint is not uploaded")

    monkeypatch.setattr(ElasticWorker, "_train", fail)
    script = Script()
    view = View(7, (Host("a", "h:1"),), Plan(1, ranks=("a/0",)))
    with pytest.raises(RefusedError, match=r"^the last checkpoint is not uploaded$"):
        new_worker(script)._run_view(Run(view, "a/0"), cast(StopSignals, None), cast(RunContext, None))
    assert script.sent == [Done()]


def test_a_worker_reports_once_per_view_however_often_it_is_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is more urgent follows the first one; its answer could reach the daemon after the next view."""
    monkeypatch.setattr(ElasticWorker, "_run_view", lambda *_: False)
    run = Run(View(1, (), Plan(stages=1)), "a/0")
    script = Script(Stop(False), run, Stop(True), Stop(False), run, Stop(False), End(None))
    worker = new_worker(script)
    setup = Setup((((0,),),), "run", 1, None, 1.0, 1.0, False, {})
    worker.run(setup, cast(StopSignals, None), cast(RunContext, None))
    assert [type(message) for message in script.sent] == [Hello, Stopped, Stopped]


@pytest.mark.parametrize(("step", "stopped", "is_over"), [(9, False, True), (5, True, False), (5, False, False)])
def test_a_host_whose_workers_start_again_goes_on_after_all_others_have_left(
    step: int, stopped: bool, is_over: bool
) -> None:
    """Its workers have no ranks, so that those of the others are all that can vote to stop."""
    hosts = Host("a", "h:1"), Host("b", "h:2")
    state = LoopState(Progress(step), is_stopped=stopped)
    assert is_run_over(View(3, hosts, Plan(1, ranks=("a/0",))), state, 9) == is_over
    assert is_run_over(View(3, hosts, Plan(1, ranks=("a/0", "b/0"))), state, 9) == (is_over or stopped)
    state.end("all ranks have voted for it")
    assert is_run_over(View(3, hosts, Plan(1, ranks=("a/0",))), state, 9)


@pytest.mark.parametrize("message", [Stop(at_step_end=False), End("failed"), End(), End(is_over=True)])
def test_a_rank_of_a_run_that_is_over_may_complete_its_end(
    message: Stop | End, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank has done so before. Any other request ends at once what the rank waits for."""
    timer, interrupted = mock.Mock(), Event()
    monkeypatch.setattr("acsgd.elastic.control.threading.Timer", timer)
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(tmp_path / "daemon"))
        daemon.listen()
        with contextlib.closing(Control(tmp_path / "daemon")) as own:
            connection, _ = daemon.accept()
            waits = InterruptibleWaits()
            waits.on_interrupt(interrupted.set)
            own.attach(waits)
            with connection:
                connection.sendall(to_line(message))
                assert own.next_message() == message
                if message == End(is_over=True):
                    assert not interrupted.is_set()
                    timer.return_value.start.assert_called_once_with()
                    delay_s, interrupt, args = timer.call_args.args
                    assert delay_s == COMPLETE_S
                    interrupt(*args)
                assert interrupted.is_set()


def test_a_worker_that_starts_after_the_end_of_its_torchrun_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="torchrun of this host has ended"):
        Control(tmp_path / "none")
