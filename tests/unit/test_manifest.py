"""A manifest with a valid checksum and wrong fields is refused in one sentence that names the field, by all readers."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lib.commands import acsgd
from lib.saved import SMALL, small_run, train_alone

from acsgd.cli import ToHF
from acsgd.config.options import ModelConfig
from acsgd.errors import CorruptFileError
from acsgd.io.checkpoint.inspect import inspect
from acsgd.io.checkpoint.resume import Checkpoint
from acsgd.shards.locate import open_model
from acsgd.shards.manifest import MANIFEST, _with_checksum

TinyModel = Callable[..., Path]
ENTRY: dict[str, list[Any]] = {
    "file": [None, 5, [], "", ".", "..", "../config.json", "/etc/passwd", "a/b", "a\\b", "a\0b", "\ud800", "x" * 300],
    "bytes": [None, True, -1, 1.5, "1", 2**63, [1]],
    "checksum": [None, 5, "", "0" * 31, "0" * 33, "G" * 32, "A" * 32],
}
NATURAL = [None, True, -1, 1.5, "1", 10**30, []]
NUMBER = [True, "1", [], {}]
WRONG: dict[str, list[Any]] = {
    "step": NATURAL,
    "layers": [None, 5, [], "x", {"embed": None}, {"embed": {}}, {"embed": []}],
    **{f"layers.embed.{key}": values for key, values in ENTRY.items()},
    "layers.embed.more": [1],
    "replicas": [None, 5, [], {"embed": None}, {"embed": {}}, {"embed": ["x"]}],
    "model_files": [None, 5, {}, [None], [{}], ["config.json"]],
    **{f"model_files.0.{key}": values for key, values in ENTRY.items()},
    "tensors": [5, "x", [], {}],
    "tensors.shapes": [None, 5, [], {"a": None}, {"a": 2}, {"a": [-1]}, {"a": ["2"]}],
    "tensors.hidden_matrices": [None, 5, {}, [5]],
    "tensors.config": [None, 5],
    "run": [5, "x", [], {}],
    "more": [1],
    "run.more": [1],
    "run.progress": [None, 5, [], "x"],
    "run.progress.step": [*NATURAL, 7],
    "run.progress.tokens": NATURAL,
    "run.progress.skipped": NATURAL,
    "run.progress.more": [1],
    "run.progress.loss_scale": [None, 5, {"value": "x"}, {"value": 0}, {"value": float("inf")}, {"dynamic": 1}],
    "run.progress.recent": [None, 5, {}, "x", [None], ["x"], [True], [float("nan")]],
    "run.progress.is_spike": [None, 1, "x", []],
    "run.progress.evaluation": [None, 5, [], {"f1": None}, {"f1": "1"}, {"f1": float("nan")}],
    "run.progress.best": [None, 5, [], {"f1": None}, {"f1": True}, {"f1": float("inf")}],
    "run.progress.best_eval_loss": NUMBER,
    "run.identity": [None, 5, [], {}],
    "run.identity.model": [None, 5, [], {}, {"model_type": 5}],
    "run.identity.tokenizer": [None, 5],
    "run.identity.texts": [None, []],
    "run.identity.data": [None, 5, []],
    "run.identity.sources": [None, 5, {}, [5], [{"name": "a", "tokens": 5}], [{"name": "a"}]],
    "run.identity.reading": [None, 5, [], {"data.format": 5}],
    "run.options": [None, 5, [], {"optim.lr": 5}],
    "run.replicas": [True, -1, "2"],
    "run.best": [None, 1, "yes"],
}
REQUIRED = ("step", "layers", "replicas", "model_files", "run", "run.progress", "run.identity", "run.identity.model")


@pytest.fixture(scope="module")
def saved(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint saved by a run."""
    run = tmp_path_factory.mktemp("manifest") / "runs" / "run"
    return train_alone(small_run(tiny_model("gpt2", **SMALL), run)) / "step-00000002"


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def parent_of(fields: Any, path: str) -> tuple[Any, Any]:
    """Return the object or list that holds a field, and its key there."""
    *parents, last = path.split(".")
    for key in parents:
        fields = fields[int(key)] if isinstance(fields, list) else fields[key]
    return fields, last


def read_fields(checkpoint: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text())
    del fields["checksum"]
    return fields


def write_fields(checkpoint: Path, fields: dict[str, Any]) -> None:
    (checkpoint / MANIFEST).write_bytes(_with_checksum(fields))


def assert_refused(checkpoint: Path, case: str) -> str:
    """Check that a resume refuses the manifest, and return the sentence."""
    with pytest.raises(CorruptFileError) as error:
        Checkpoint.open(checkpoint)
    sentence = str(error.value)
    assert sentence.startswith(f"{checkpoint / MANIFEST} is invalid: "), f"{case}: {sentence}"
    assert "\n" not in sentence, case
    assert sentence.endswith(f"restore it from a copy, or remove {checkpoint}"), f"{case}: {sentence}"
    return sentence


def assert_refused_by_all(checkpoint: Path, case: str) -> None:
    """Check that a resume and `inspect` say the same of the manifest, and that a damaged layer table stops all."""
    sentence = assert_refused(checkpoint, case)
    (report,) = inspect(checkpoint)
    assert report.errors == [sentence], case
    if not case.startswith("run"):
        for read in (lambda: open_model(ModelConfig(str(checkpoint))), ToHF(checkpoint, checkpoint / "out").run):
            with pytest.raises(CorruptFileError) as error:
                read()
            assert str(error.value) == sentence, case


def test_a_wrong_field_is_refused(checkpoint: Path) -> None:
    original = read_fields(checkpoint)
    for path, values in WRONG.items():
        for number, value in enumerate(values):
            fields = copy.deepcopy(original)
            parent, key = parent_of(fields, path)
            parent[key] = value
            write_fields(checkpoint, fields)
            check = assert_refused if number else assert_refused_by_all
            check(checkpoint, f"{path}={value!r}")


def test_evaluation_losses_of_older_versions_are_read(checkpoint: Path) -> None:
    fields = read_fields(checkpoint)
    progress = fields["run"]["progress"]
    losses = progress["evaluation"]["eval_loss"], progress["best"]["eval_loss"]
    del progress["evaluation"], progress["best"]
    for last, best in (losses, (None, None)):
        progress |= {"eval_loss": last, "best_eval_loss": best}
        write_fields(checkpoint, fields)
        read = Checkpoint.open(checkpoint).run.progress
        assert (read.eval_loss, read.best.get("eval_loss")) == (last, best)
        (report,) = inspect(checkpoint)
        assert (report.eval_loss, report.errors) == (last, [])


def test_a_missing_field_is_refused(checkpoint: Path) -> None:
    original = read_fields(checkpoint)
    for path in REQUIRED:
        fields = copy.deepcopy(original)
        parent, key = parent_of(fields, path)
        del parent[key]
        write_fields(checkpoint, fields)
        assert_refused_by_all(checkpoint, f"{path} is missing")


def test_a_file_that_is_listed_twice_is_refused(checkpoint: Path) -> None:
    fields = read_fields(checkpoint)
    fields["layers"]["head"] = fields["layers"]["embed"]
    write_fields(checkpoint, fields)
    assert_refused_by_all(checkpoint, "embed twice")


def test_the_layers_of_another_model_are_refused(checkpoint: Path) -> None:
    fields = read_fields(checkpoint)
    del fields["layers"]["block-00000"]
    write_fields(checkpoint, fields)
    sentence = f"{checkpoint / MANIFEST} lists 2 layers, config.json describes 3 (embed .. head)"
    for read in (lambda: open_model(ModelConfig(str(checkpoint))), ToHF(checkpoint, checkpoint / "out").run):
        with pytest.raises(ValueError) as error:
            read()
        assert str(error.value).startswith(sentence)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_an_edited_model_file_is_neither_exported_nor_trained_from(name: str, checkpoint: Path, tmp_path: Path) -> None:
    path, target = checkpoint / name, tmp_path / "export"
    text = path.read_text()
    edited = text.replace('"n_head": 2', '"n_head": 4') if name == "config.json" else text + " "
    assert edited != text
    path.write_text(edited)
    code, printed = acsgd("convert", "to-hf", checkpoint, target)
    assert code == 2
    assert printed.startswith(f"error: {path} is corrupt: ")
    assert not target.exists()
    with pytest.raises(CorruptFileError, match="is corrupt"):
        open_model(ModelConfig(str(checkpoint)))
    path.write_text(text)
    assert acsgd("convert", "to-hf", checkpoint, target) == (0, "")
    open_model(ModelConfig(str(checkpoint)))


def test_a_link_out_of_a_checkpoint_is_not_followed(checkpoint: Path, tmp_path: Path) -> None:
    """Not even to the very bytes that the manifest lists."""
    for name in ("embed.safetensors", "config.json", "tokenizer.json"):
        path, outside = checkpoint / name, tmp_path / name
        path.rename(outside)
        path.symlink_to(outside)
        (report,) = inspect(checkpoint)
        assert report.errors == [
            f"{path} is a link to {outside}, outside of the directory; put a copy of the file in its place"
        ]
        code, printed = acsgd("convert", "to-hf", checkpoint, tmp_path / "export")
        assert (code, printed) == (2, f"error: {report.errors[0]}\n")
        path.unlink()
        outside.rename(path)
    assert os.listdir(tmp_path) == [checkpoint.name]
