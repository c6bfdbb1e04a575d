"""wandb: metrics arrive online and offline, nothing else is collected, and no error of wandb ends a run."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lib.records import RECORD

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig
from acsgd.io.telemetry.metrics import Metrics, check_trackers
from acsgd.io.telemetry.record import StepRecord

SECRET = "0123456789secret" * 4  # the length of a key of wandb
CONFIG = Config(
    model=ModelConfig(name="some/model"),
    data=DataConfig(sources="demo", sequence=8, batch=2),
    optim=OptimConfig(lr=0.25, steps=4, clip=float("inf")),
    log=LogConfig(to="print,wandb", name="my run"),
)


def record(step: int, loss: float | None = 2.5) -> StepRecord:
    return RECORD._replace(step=step, loss=loss, tokens=64 * step)


def log_steps(run_dir: Path, first: int, last: int, *, resumed_at: int = 0) -> None:
    with Metrics.open(CONFIG, run_dir, resumed_at=resumed_at, is_main=True) as metrics:
        for step in range(first, last + 1):
            metrics.log(record(step, loss=None if step == 2 else 2.5))


@pytest.fixture
def real_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real package with an empty home directory, without a key, and with an unreachable server."""
    wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / ".netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb.teardown()
    yield
    wandb.teardown()


def offline_directories(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "wandb").glob("offline-run-*"))


def read_offline(directory: Path) -> Iterator[Any]:
    """Read the records that `wandb sync` would upload: one block of LevelDB's log format after 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    [path] = directory.glob("*.wandb")
    data, start = path.read_bytes(), 7
    assert len(data) < 2**15
    while start < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, start)
        assert kind == 1
        start += 7 + length
        yield wandb_internal_pb2.Record.FromString(data[start - length : start])


def read_kind(kind: str, run_dir: Path) -> list[Any]:
    """Return the records of one kind in the only offline directory of a run."""
    [directory] = offline_directories(run_dir)
    return [getattr(r, kind) for r in read_offline(directory) if r.WhichOneof("record_type") == kind]


def history(directory: Path) -> list[dict[str, float]]:
    """Return the logged values, without those that wandb adds."""
    items = [r.history.item for r in read_offline(directory) if r.WhichOneof("record_type") == "history"]
    rows = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row} for row in items]
    return [{key: row[key] for key in row if key == "_step" or not key.startswith("_")} for row in rows]


@pytest.mark.usefixtures("real_wandb")
def test_configuration_and_numbers_arrive_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_steps(tmp_path, 1, 3)
    assert "\nwandb: offline mode; to upload" in capsys.readouterr().out
    [run] = read_kind("run", tmp_path)
    assert (run.project, run.display_name, run.run_id) == ("acsgd", "my run", (tmp_path / "wandb-id").read_text())
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    expected = json.loads(json.dumps(dataclasses.asdict(CONFIG)))
    assert {section: config[section] for section in expected} == expected
    records = (record(step, loss=None if step == 2 else 2.5).numbers() for step in (1, 2, 3))
    numbers = [{key: n for key, n in each.items() if key != "step" and n is not None} for each in records]
    [directory] = offline_directories(tmp_path)
    assert history(directory) == [row | {"_step": step} for step, row in enumerate(numbers, start=1)]


@pytest.mark.usefixtures("real_wandb")
@pytest.mark.parametrize(("log_name", "expected"), [(None, "from-environment"), ("from-config", "from-config")])
def test_project_and_name_of_the_environment_are_respected(
    log_name: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "my-project")
    monkeypatch.setenv("WANDB_NAME", "from-environment")
    config = dataclasses.replace(CONFIG, log=dataclasses.replace(CONFIG.log, name=log_name))
    with Metrics.open(config, tmp_path, resumed_at=0, is_main=True) as metrics:
        metrics.log(record(1))
    [run] = read_kind("run", tmp_path)
    assert (run.project, run.display_name) == ("my-project", expected)


@pytest.mark.usefixtures("real_wandb")
def test_without_names_a_run_is_named_after_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = dataclasses.replace(CONFIG, log=dataclasses.replace(CONFIG.log, name=None))
    (tmp_path / "my-run").mkdir()
    with Metrics.open(config, tmp_path / "my-run", resumed_at=0, is_main=True) as metrics:
        metrics.log(record(1))
    [run] = read_kind("run", tmp_path / "my-run")
    assert (run.project, run.display_name) == ("acsgd", "my-run")


@pytest.mark.usefixtures("real_wandb")
def test_nothing_of_the_environment_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(sys, "argv", ["script-of-mine.py", f"--token={SECRET}"])
    log_steps(run_dir, 1, 2)
    written = [path for path in run_dir.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in written)
    for private in (SECRET, "script-of-mine"):
        assert not [path for path in written if private.encode() in path.read_bytes()]
    [run] = read_kind("run", run_dir)
    assert (run.host, run.HasField("git")) == ("", False)
    assert not read_kind("environment", run_dir)
    [directory] = offline_directories(run_dir)
    assert not list((directory / "files").iterdir())  # requirements, code, output


@pytest.mark.usefixtures("real_wandb")
def test_a_resumed_run_keeps_its_id_and_a_new_run_gets_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for first, resumed_at in ((1, 0), (3, 2), (1, 0)):
        log_steps(tmp_path, first, first + 1, resumed_at=resumed_at)
        ids.append((tmp_path / "wandb-id").read_text())
    assert ids[0] == ids[1] != ids[2]
    steps = {
        i: [[row["_step"] for row in history(d)] for d in offline_directories(tmp_path) if i in d.name] for i in ids
    }
    assert steps == {ids[0]: [[1, 2], [3, 4]], ids[2]: [[1, 2]]}


@pytest.mark.usefixtures("real_wandb")
def test_without_login_a_run_is_offline_and_prints_how_to_upload_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_steps(tmp_path, 1, 2)
    [directory] = offline_directories(tmp_path)
    printed = capsys.readouterr()
    [message] = [line for line in printed.out.splitlines() if line.startswith("wandb: ")]
    assert message == f"wandb: not logged in; to upload the run later: wandb sync {directory}"
    assert printed.err == ""
    assert [row["_step"] for row in history(directory)] == [1, 2]


@pytest.mark.usefixtures("real_wandb")
def test_disabled_wandb_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    log_steps(tmp_path, 1, 2)
    assert not (tmp_path / "wandb").exists()
    assert "wandb" not in "".join(capsys.readouterr())


class FakeWandb(ModuleType):
    """The part of wandb that is used, logged in. fails: names of the calls that fail."""

    def __init__(self, fails: set[str]) -> None:
        super().__init__("wandb")
        self.fails = fails
        self.calls: list[str] = []
        self.settings = self
        self.mode = "online"
        self.project = self.run_name = None
        self.dir = self.url = "where"

    def setup(self, **_: object) -> FakeWandb:
        return self._call("setup")

    def Settings(self, **_: object) -> None:  # noqa: N802
        pass

    def login(self, **options: object) -> bool:
        assert options["prompt"] is False
        return bool(self._call("login"))

    def init(self, *, mode: str | None, **_: object) -> FakeWandb:
        return self._call(f"init {mode}")

    def teardown(self) -> None:
        self._call("teardown")

    def log(self, *_: object, step: int) -> None:
        self._call(f"log {step}")

    def finish(self, *, exit_code: int) -> None:
        self._call(f"finish {exit_code}")

    def _call(self, name: str) -> FakeWandb:
        self.calls.append(name)
        if name in self.fails:
            raise ConnectionError("no way out\nof this machine")
        return self


@pytest.mark.parametrize(
    ("fails", "calls", "printed"),
    [
        (set(), "setup, login, init None, log 1, log 2, finish 0, teardown", "wandb: where"),
        (
            {"init None"},
            "setup, login, init None, teardown, init offline, log 1, log 2, finish 0, teardown",
            "wandb: no connection (no way out); to upload the run later: wandb sync .",
        ),
        (
            {"login"},
            "setup, login, teardown, init offline, log 1, log 2, finish 0, teardown",
            "wandb: no connection (no way out); to upload the run later: wandb sync .",
        ),
        ({"setup"}, "setup, teardown", "wandb failed (no way out); training continues without it"),
        (
            {"init None", "init offline"},
            "setup, login, init None, teardown, init offline, teardown",
            "wandb failed (no way out); training continues without it",
        ),
        (
            {"log 1"},
            "setup, login, init None, log 1, teardown",
            "wandb: where\nwandb failed (no way out); training continues without it",
        ),
        (
            {"finish 0"},
            "setup, login, init None, log 1, log 2, finish 0, teardown",
            "wandb: where\nwandb failed (no way out); training continues without it",
        ),
    ],
)
def test_an_error_of_wandb_is_reported_once_and_does_not_end_training(
    fails: set[str],
    calls: str,
    printed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeWandb(fails)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log_steps(tmp_path, 1, 2)
    assert fake.calls == calls.split(", ")
    assert [line for line in capsys.readouterr().out.splitlines() if "wandb" in line] == printed.split("\n")


def test_a_run_that_ends_with_an_error_is_finished_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb(set())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(ZeroDivisionError), Metrics.open(CONFIG, tmp_path, resumed_at=0, is_main=True):
        _ = 1 / 0
    assert fake.calls[-2:] == ["finish 1", "teardown"]


def test_missing_wandb_is_an_error_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # wandb leaves such a directory in its working directory
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    check_trackers("print,jsonl")
    with pytest.raises(ValueError, match=re.escape('log.to="print,wandb" needs wandb: pip install "acsgd[wandb]"')):
        check_trackers("print,wandb")


def test_unknown_names_of_sinks_are_refused_with_those_that_exist() -> None:
    known = '"print", "jsonl", "tensorboard", "mlflow", "trackio", "wandb", "text"'
    expected = f'log.to="print,wandbb": unknown wandbb; use {known}, comma-separated'
    with pytest.raises(ValueError, match=re.escape(expected)):
        check_trackers("print,wandbb")


def test_installed_wandb_is_accepted() -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    check_trackers("print,wandb")
