"""Experiment trackers: numbers arrive, resumed runs stay one, and no tracker delays or ends training."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from lib.records import RECORD

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig
from acsgd.io.telemetry import trackers
from acsgd.io.telemetry.metrics import Metrics
from acsgd.io.telemetry.trackers import Steps, TrackedRun, TrackerSink

CONFIG = Config(
    model=ModelConfig(name="some/model"),
    data=DataConfig(sources="demo", sequence=8, batch=2),
    optim=OptimConfig(lr=0.1, steps=4),
    log=LogConfig(name="me"),
)
Points = Sequence[tuple[int, float]]
"""Steps and losses of a run."""


def read_tensorboard(run_dir: Path) -> list[Points]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    assert "some/model" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    return [[(event.step, event.value) for event in events.Scalars("loss")]]


def read_mlflow(run_dir: Path) -> list[Points]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir}/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert {run.data.params["model.name"] for run in runs} == {"some/model"}
    assert {run.info.run_name for run in runs} == {"me"}
    histories = [client.get_metric_history(run.info.run_id, "loss") for run in runs]
    return [[(metric.step, metric.value) for metric in history] for history in histories]


def read_trackio(run_dir: Path) -> list[Points]:
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_runs("acsgd")
    logs = [SQLiteStorage.get_logs("acsgd", run) for run in runs]
    return [[(row["step"], row["loss"]) for row in rows if "loss" in row] for rows in logs]


READERS: Mapping[str, Callable[[Path], list[Points]]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
}


def log_steps(tracker: str, run_dir: Path, steps: Mapping[int, float | None], resumed_at: int = 0) -> None:
    config = dataclasses.replace(CONFIG, log=dataclasses.replace(CONFIG.log, to=tracker))
    with Metrics.open(config, run_dir, resumed_at=resumed_at, is_main=True) as metrics:
        for step, loss in steps.items():
            metrics.log(RECORD._replace(step=step, loss=loss))


@pytest.mark.parametrize("tracker", READERS)
def test_a_resumed_run_is_one_run_with_the_numbers_of_all_its_starts(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(tracker, reason=f"the extra {tracker} is not installed")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    if tracker == "trackio":
        monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    log_steps(tracker, tmp_path, {1: 4.0, 2: None, 3: 3.5})
    log_steps(tracker, tmp_path, {3: 3.5, 4: 3.0}, resumed_at=2)
    [points] = READERS[tracker](tmp_path)
    assert sorted({*points}) == [(1, 4.0), (3, 3.5), (4, 3.0)]
    log_steps(tracker, tmp_path, {1: 2.0})  # not resumed: another run
    if tracker == "tensorboard":
        assert READERS[tracker](tmp_path) == [[(1, 2.0)]]
    else:
        assert len(READERS[tracker](tmp_path)) == 2


class Recording:
    """A tracker in memory. fails_at: step at which it fails; waits: for this before it takes the first step."""

    def __init__(self, run: TrackedRun, fails_at: int | None = None, waits: threading.Event | None = None) -> None:
        self.taken: list[int] = []
        self.end: bool | None = None
        self._fails_at, self._waits = fails_at, waits
        run.notify("it is open")

    def log(self, steps: Steps) -> None:
        if self._waits is not None:
            self._waits.wait()
        for step, _ in steps:
            if step == self._fails_at:
                raise OSError("No space left on device\nand more")
            self.taken.append(step)

    def close(self, *, failed: bool) -> None:
        self.end = failed


def sink_of(run_dir: Path, notes: list[str], **options: object) -> tuple[TrackerSink, list[Recording]]:
    opened: list[Recording] = []

    def open_(run: TrackedRun) -> Recording:
        opened.append(Recording(run, **options))  # type: ignore[arg-type]
        return opened[0]

    return TrackerSink("it", open_, CONFIG, run_dir, 0, notes.append), opened


def test_a_slow_tracker_delays_no_step_and_takes_all_in_the_end(tmp_path: Path) -> None:
    notes: list[str] = []
    may_go_on = threading.Event()
    sink, opened = sink_of(tmp_path, notes, waits=may_go_on)
    for step in range(1, 100):
        sink.log(RECORD._replace(step=step))  # returns while the tracker waits
    may_go_on.set()
    sink.close(failed=True)
    assert opened[0].taken == [*range(1, 100)]
    assert opened[0].end is True
    assert notes == ["it is open"]


def test_a_tracker_that_hangs_is_left_behind_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "FINISH_TIMEOUT_S", 0.01)
    notes: list[str] = []
    may_go_on = threading.Event()
    sink, _ = sink_of(tmp_path, notes, waits=may_go_on)
    sink.log(RECORD)
    sink.close(failed=False)
    may_go_on.set()
    assert notes[-1] == "it has not taken all metrics within 0 s, and is left"


def test_of_a_tracker_that_is_far_behind_steps_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "MAX_PENDING", 3)
    notes: list[str] = []
    may_open = threading.Event()

    def open_(run: TrackedRun) -> Recording:
        may_open.wait()
        return Recording(run)

    sink = TrackerSink("it", open_, CONFIG, tmp_path, 0, notes.append)
    for step in range(1, 10):
        sink.log(RECORD._replace(step=step))
    may_open.set()
    sink.close(failed=False)
    assert notes == ["it is 3 steps behind: step 4 and others are left out", "it is open"]


def test_a_run_directory_that_cannot_be_written_ends_the_tracker_alone(tmp_path: Path) -> None:
    notes: list[str] = []
    sink = TrackerSink("it", Recording, CONFIG, tmp_path / "missing", 0, notes.append)
    sink.log(RECORD)
    sink.close(failed=False)
    [note] = notes
    assert note.startswith("it failed ([Errno 2]")


def test_the_first_error_is_reported_once_and_ends_the_tracker_alone(tmp_path: Path) -> None:
    notes: list[str] = []
    sink, opened = sink_of(tmp_path, notes, fails_at=3)
    for step in range(1, 6):
        sink.log(RECORD._replace(step=step))
    sink.close(failed=False)
    assert opened[0].taken == [1, 2]
    assert notes == ["it is open", "it failed (No space left on device); training continues without it"]
