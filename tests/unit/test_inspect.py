"""`acsgd inspect` reports the content of checkpoints as tables and as JSON, and fails if a byte is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lib.saved import SMALL, small_run, train_alone
from safetensors.torch import load_file

from acsgd import cli
from acsgd.shards.convert import from_hf
from acsgd.shards.manifest import MANIFEST

TinyModel = Callable[..., Path]
Inspect = Callable[..., tuple[int, str]]
LAYERS = ["embed", "block-00000", "head"]
TABLE = "transformer.wte.weight"
"""Tied weight with a file of its own in the checkpoints of a run."""


@pytest.fixture(scope="module")
def saved_run(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of two steps, both saved, the second as the best."""
    run = tmp_path_factory.mktemp("inspect") / "runs" / "run"
    train_alone(small_run(tiny_model("gpt2", **SMALL), run, best="eval_loss"))
    return run


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    """Return a copy of it."""
    return Path(shutil.copytree(saved_run, tmp_path / "run", symlinks=True))


@pytest.fixture
def inspect(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inspect:
    """Return a function that calls `acsgd inspect` and returns its exit code and its output."""

    def call(path: Path, *flags: str, columns: int = 80) -> tuple[int, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        try:
            cli.run(["inspect", str(path), *flags])
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
            printed = capsys.readouterr()
            return code, printed.out + printed.err.strip()
        return 0, capsys.readouterr().out

    return call


def as_json(answer: tuple[int, str]) -> tuple[int, list[dict[str, Any]]]:
    return answer[0], json.loads(answer[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_json_of_a_checkpoint_matches_its_files(run: Path, inspect: Inspect) -> None:
    path = run / "checkpoints" / "step-00000002"
    code, (report,) = as_json(inspect(path, "--json"))
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert code == 0
    assert report["path"] == str(path)
    assert (report["step"], report["tokens"]) == (2, 2 * 2 * 16)
    assert report["loss"] == records[-1]["loss"]
    assert report["eval_loss"] == records[-1]["eval_loss"]
    assert report["errors"] == []
    assert report["bytes"] == sum(file.stat().st_size for file in path.iterdir() if file.name != MANIFEST)
    assert [layer["layer"] for layer in report["layers"]] == [*LAYERS, TABLE]
    for layer in report["layers"]:
        tensors = {key: x for key, x in load_file(path / layer["file"]).items() if "/" not in key}
        assert layer["bytes"] == (path / layer["file"]).stat().st_size
        assert layer["parameters"] == sum(x.numel() for x in tensors.values()) > 0
        assert layer["dtype"] == "fp32"
        assert layer["optimizer_state"] == ["exp_avg", "exp_avg_sq", "step"]


def test_json_of_a_run_has_all_its_checkpoints_oldest_first(run: Path, inspect: Inspect) -> None:
    answers = [as_json(inspect(path, "--json")) for path in (run, run / "checkpoints")]
    assert answers[0] == answers[1]
    code, reports = answers[0]
    assert code == 0
    assert [report["step"] for report in reports] == [1, 2]
    assert [report["tokens"] for report in reports] == [32, 64]


def test_best_is_the_checkpoint_it_points_to(run: Path, inspect: Inspect) -> None:
    of_link = inspect(run / "checkpoints" / "best", "--json")
    assert of_link == inspect(run / "checkpoints" / "step-00000002", "--json")


def test_a_converted_model_has_no_tokens_and_no_loss(tiny_model: TinyModel, inspect: Inspect, tmp_path: Path) -> None:
    from_hf(tiny_model("gpt2", **SMALL), tmp_path)
    code, (report,) = as_json(inspect(tmp_path, "--json"))
    assert code == 0
    assert (report["step"], report["tokens"], report["loss"], report["eval_loss"]) == (0, None, None, None)
    assert [(layer["layer"], layer["optimizer_state"]) for layer in report["layers"]] == [
        (layer, []) for layer in LAYERS
    ]
    code, printed = inspect(tmp_path)
    assert code == 0
    assert "a converted model without run state" in printed
    assert printed.count("none") == len(LAYERS)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_of_a_checkpoint_is_complete_and_fits(columns: int, run: Path, inspect: Inspect) -> None:
    code, printed = inspect(run / "checkpoints" / "step-00000002", columns=columns)
    _, (report,) = as_json(inspect(run / "checkpoints" / "step-00000002", "--json"))
    path, headline, *table, verdict = printed.splitlines()
    assert code == 0
    assert path == report["path"]
    assert headline.startswith(f"step 2: 64 tokens, loss {report['loss']:.4f}, held-out loss {report['eval_loss']:.4f}")
    assert max(map(len, table)) <= columns
    rows = {line.split()[0]: line for line in table if line.strip()}
    for layer in report["layers"]:
        for value in (f"{layer['parameters']:,}", f"{layer['bytes'] / 1e6:.2f}", "fp32", "exp_avg, exp_avg_sq, step"):
            assert value in rows[layer["layer"]]
    assert f"{sum(layer['parameters'] for layer in report['layers']):,}" in rows["4"]
    assert verdict == "all files are valid"


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_of_a_run_has_a_row_per_checkpoint_and_fits(columns: int, run: Path, inspect: Inspect) -> None:
    code, printed = inspect(run, columns=columns)
    assert code == 0
    rows = [line.split() for line in printed.splitlines() if "step-" in line]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("step-00000001", "32", "valid"),
        ("step-00000002", "64", "valid"),
    ]
    assert max(map(len, printed.splitlines())) <= columns


def corrupt(run: Path, name: str) -> Path:
    path = run / "checkpoints" / "step-00000001" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", ["block-00000.safetensors", "config.json", "tokenizer.json", MANIFEST])
def test_a_corrupt_file_is_named_and_the_exit_code_is_1(name: str, run: Path, inspect: Inspect) -> None:
    corrupted = corrupt(run, name)
    for path in (run, corrupted.parent):
        code, printed = inspect(path)
        assert code == 1
        assert f"CORRUPT: {corrupted} is corrupt" in printed
        assert "all files are valid" not in printed
        code, reports = as_json(inspect(path, "--json"))
        assert code == 1
        assert [len(report["errors"]) for report in reports] == ([1, 0] if path == run else [1])
        assert str(corrupted) in reports[0]["errors"][0]
    assert inspect(run / "checkpoints" / "best")[0] == 0


def test_an_incomplete_checkpoint_is_listed_with_the_others(run: Path, inspect: Inspect) -> None:
    missing = run / "checkpoints" / "step-00000001" / MANIFEST
    missing.unlink()
    code, printed = inspect(run)
    assert code == 1
    assert f"CORRUPT: {missing} is missing: step-00000001 is incomplete" in printed
    assert "step-00000002" in printed
    code, reports = as_json(inspect(run, "--json"))
    assert (code, [report["step"] for report in reports]) == (1, [None, 2])


def test_layers_of_corrupt_files_are_not_listed(run: Path, inspect: Inspect) -> None:
    _, (report,) = as_json(inspect(corrupt(run, "embed.safetensors").parent, "--json"))
    assert [layer["layer"] for layer in report["layers"]] == [*LAYERS[1:], TABLE]


def test_a_path_that_is_not_a_checkpoint_is_an_error(run: Path, tiny_model: TinyModel, inspect: Inspect) -> None:
    give = "give a checkpoint, a layer-shard directory or a run directory"
    step = run / "checkpoints" / "step-3"
    for path, problem in (
        (run / "nowhere", "does not exist"),
        (step, f"does not exist (the nearest is {run / 'checkpoints' / 'step-00000002'})"),
        (run / "metrics.jsonl", "is not a directory"),
    ):
        assert inspect(path) == (2, f"error: {path} {problem}; {give}")
    (run / "empty").mkdir()
    for path in (run / "empty", tiny_model("gpt2", **SMALL)):
        assert inspect(path, "--json") == (2, f"error: {path} has no checkpoints and no {MANIFEST}; {give}")
    (run / "empty" / MANIFEST).write_text('{"manifest_version": 3}')
    assert inspect(run / "empty") == (
        2,
        f"error: {run / 'empty' / MANIFEST} is not the manifest of a layer-shard directory",
    )
