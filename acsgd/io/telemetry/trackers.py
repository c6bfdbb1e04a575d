"""Metrics to experiment trackers: TensorBoard, MLflow, Trackio, and Weights & Biases in `wandb_log`.

A tracker that is slow, or whose server or disk fails, neither delays nor ends training.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from acsgd.config.options import Config
from acsgd.config.run_file import to_toml
from acsgd.io.files.atomic import replace_text
from acsgd.io.telemetry.record import RunEvent, StepRecord

Steps = Sequence[tuple[int, Mapping[str, float]]]
"""Numbers of some steps by name, with the number of completed steps."""
PROJECT = "acsgd"
"""Default name of the project or experiment to which a run belongs."""
FINISH_TIMEOUT_S = 60.0
"""Time that the end of a run waits for a tracker to write what it has been sent, seconds."""
MAX_PENDING = 10_000
"""Steps that wait for a tracker; of more, none are kept."""
_MLFLOW_BATCH = 1000
"""Numbers per request: the limit of MLflow's REST API."""


class TrackedRun(NamedTuple):
    """What a tracker needs to know of a run."""

    config: Config
    directory: Path
    """Run directory, which exists."""
    name: str
    id: str
    """Name of the run within the tracker that all its starts have in common; a new run in the same directory has
    another one."""
    resumed_at: int
    """Completed steps of the checkpoint that this start continues; 0 = none."""
    notify: Callable[[str], None]
    """Prints a sentence for the user."""


class Experiment(Protocol):
    """A run of a tracker that is open. All calls come from one thread; errors of any kind end the tracker alone."""

    def log(self, steps: Steps) -> None:
        """Log the numbers of some steps. A resumed run may repeat steps."""
        ...

    def close(self, *, failed: bool) -> None:
        """Write what is buffered and end the run. failed: whether an error ended it."""
        ...


class TrackerSink:
    """Sends the numbers of each step to a tracker, in a separate thread.

    The first error is reported in one sentence, and the tracker gets nothing more.
    """

    def __init__(
        self,
        tracker: str,
        open_: Callable[[TrackedRun], Experiment],
        config: Config,
        run_dir: Path,
        resumed_at: int,
        notify: Callable[[str], None],
    ) -> None:
        """tracker: its name in log.to; the id of the run is in RUN_DIR/TRACKER-id. open_: called in the thread.

        resumed_at: as in `TrackedRun`. notify: prints a sentence for the user; called in the thread that trains.
        """
        self._tracker = tracker
        self._notify = notify
        self._notes = queue.SimpleQueue[str]()
        """Sentences of the thread that are to be printed."""
        self._pending = queue.SimpleQueue[tuple[int, Mapping[str, float]] | _End]()
        self._has_dropped = False
        name = config.log.name or run_dir.resolve().name
        run = TrackedRun(config, run_dir, name, "", resumed_at, self._notes.put)
        self._thread = threading.Thread(target=self._work, args=(open_, run), name=tracker, daemon=True)
        self._thread.start()

    def log(self, record: StepRecord) -> None:
        """Log the numbers of a record, without those that are not finite."""
        self._print_notes()
        if not self._thread.is_alive():
            return
        if self._pending.qsize() < MAX_PENDING:
            numbers = {name: value for name, value in record.numbers().items() if name != "step" and value is not None}
            self._pending.put((record.step, numbers))
        elif not self._has_dropped:
            self._has_dropped = True
            self._notify(f"{self._tracker} is {MAX_PENDING} steps behind: step {record.step} and others are left out")

    def note(self, text: str) -> None:
        """Do nothing: notes are for the terminal and the text logs."""

    def event(self, event: RunEvent) -> None:
        """Do nothing, as `note`."""

    def close(self, *, failed: bool) -> None:
        """End the run; waits at most FINISH_TIMEOUT_S for what the tracker has not written yet."""
        self._pending.put(_End(failed))
        self._thread.join(FINISH_TIMEOUT_S)
        self._print_notes()
        if self._thread.is_alive():
            self._notify(f"{self._tracker} has not taken all metrics within {FINISH_TIMEOUT_S:.0f} s, and is left")

    def _print_notes(self) -> None:
        while not self._notes.empty():
            self._notify(self._notes.get())

    def _work(self, open_: Callable[[TrackedRun], Experiment], run: TrackedRun) -> None:
        try:
            run_id = _run_id(run.directory / f"{self._tracker}-id", run.resumed_at)
            experiment, end = open_(run._replace(id=run_id)), None
            while end is None:
                steps, end = self._take()
                if steps:
                    experiment.log(steps)
            experiment.close(failed=end.failed)
        except (Exception, SystemExit) as error:  # of trackers, databases, sockets, services
            self._notes.put(f"{self._tracker} failed ({first_line(error)}); training continues without it")

    def _take(self) -> tuple[Steps, _End | None]:
        """Wait for something to do; return all steps that are pending, and whether the run ends after them."""
        steps, item = [], self._pending.get()
        while not isinstance(item, _End):
            steps.append(item)
            if self._pending.empty():
                return steps, None
            item = self._pending.get()
        return steps, item


class _End(NamedTuple):
    """The end of the run."""

    failed: bool


def _run_id(path: Path, resumed_at: int) -> str:
    """Return the id in a file. A run that continues no checkpoint writes a new one."""
    known = path.read_text().strip() if resumed_at and path.exists() else ""
    if not known:
        replace_text(path, known := uuid.uuid4().hex[:8])
    return known


class TensorBoard:
    """Event files in RUN_DIR/tensorboard. The steps that a start repeats replace those of earlier starts."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = run.directory / "tensorboard"
        self._writer = SummaryWriter(str(directory), purge_step=run.resumed_at + 1)
        self._writer.add_text("config", f"```toml\n{to_toml(run.config.as_given)}\n```", run.resumed_at)
        run.notify(f"tensorboard: to look at the run: tensorboard --logdir {directory}")

    def log(self, steps: Steps) -> None:
        for step, numbers in steps:
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class Mlflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI, or else in the database RUN_DIR/mlflow.db."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # its import would report its use to its makers
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME
        from mlflow.tracking import is_tracking_uri_set

        self._metric = Metric
        uri = None if is_tracking_uri_set() else f"sqlite:///{(run.directory / 'mlflow.db').resolve()}"
        self._client = client = MlflowClient(uri)
        name = MLFLOW_EXPERIMENT_NAME.get() or PROJECT
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else client.create_experiment(name)
        known = client.search_runs([experiment], f"tags.acsgd_id = '{run.id}'")
        if known:
            self._id = known[0].info.run_id
            client.update_run(self._id, "RUNNING")
        else:
            self._id = client.create_run(experiment, run_name=run.name, tags={"acsgd_id": run.id}).info.run_id
            options = [Param(key, str(value)) for key, value in _flat(dataclasses.asdict(run.config)).items()]
            client.log_batch(self._id, params=options)
        if uri is not None:
            run.notify(f"mlflow: to look at the run: mlflow server --backend-store-uri {uri}")

    def log(self, steps: Steps) -> None:
        now_ms = time.time_ns() // 10**6
        metrics = [
            self._metric(name, value, now_ms, step) for step, numbers in steps for name, value in numbers.items()
        ]
        for first in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self._id, metrics=metrics[first : first + _MLFLOW_BATCH])

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class Trackio:
    """A run of Trackio: in its own directory, at TRACKIO_SERVER_URL, or in the Space TRACKIO_SPACE_ID."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._run = trackio.init(
            PROJECT,
            name=f"{run.name}-{run.id}",  # its runs are found by name
            resume="allow",
            config=dataclasses.asdict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, steps: Steps) -> None:
        for step, numbers in steps:
            self._run.log(dict(numbers), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()


def _flat(options: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return options by their dotted names, without those of no value."""
    flat: dict[str, object] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            flat[prefix + name] = value
    return flat


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its name."""
    return str(error).strip().split("\n")[0] or type(error).__name__
