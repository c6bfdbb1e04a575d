"""Law: every changed bit and every missing or added byte of a checkpoint is detected, and the file is named."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lib.models import NO_LAYERS
from lib.saved import SMALL, small_run, train_alone

from acsgd.errors import CorruptFileError
from acsgd.io.checkpoint.inspect import inspect
from acsgd.io.checkpoint.resume import Checkpoint
from acsgd.shards import disk
from acsgd.shards.disk import ShardDirectory
from acsgd.shards.layer_tensors import LayerTensors
from acsgd.shards.manifest import MANIFEST, Manifest

TinyModel = Callable[..., Path]
TRUNCATIONS, ADDITIONS = 20, 5


@pytest.fixture(scope="module")
def checkpoint(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint saved by a run."""
    run = tmp_path_factory.mktemp("corruption") / "runs" / "run"
    return train_alone(small_run(tiny_model("gpt2", **SMALL), run)) / "step-00000002"


@pytest.fixture(autouse=True)
def _restore(checkpoint: Path) -> Iterator[None]:
    before = contents(checkpoint)
    yield
    for path, content in before.items():
        path.write_bytes(content)


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(directory.iterdir())}


def assert_named(path: Path) -> None:
    """Check that `inspect` reports exactly this file of a checkpoint."""
    (report,) = inspect(path.parent)
    assert [error.partition(" ")[0] for error in report.errors] == [str(path)]


def test_a_new_checkpoint_is_valid_and_its_manifest_names_all_files(checkpoint: Path) -> None:
    (report,) = inspect(checkpoint)
    assert report.errors == []
    named = {file.file for file in Manifest.read(checkpoint).files}
    assert named | {MANIFEST} == {path.name for path in checkpoint.iterdir()}
    assert len(named) >= 5


@pytest.mark.parametrize("flips", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_every_flip_of_a_bit_is_detected_and_named(flips: int, checkpoint: Path) -> None:
    draw = random.Random(1)
    files = contents(checkpoint)
    for number in range(flips):
        path, content = list(files.items())[number % len(files)]
        bit = draw.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with path.open("r+b") as file:
            file.seek(bit // 8)
            file.write(flipped[bit // 8 : bit // 8 + 1])
        assert path.read_bytes() == flipped
        assert_named(path)
        path.write_bytes(content)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.soak)])
def test_every_flip_of_a_bit_of_a_manifest_is_detected(step: int, tmp_path: Path) -> None:
    """On a short manifest: every seventh bit, which visits each bit of a byte, or all."""
    Manifest(step=2, task="lm", model=NO_LAYERS, layers={}, replicas={}, model_files=[], run=None).write(tmp_path)
    path = tmp_path / MANIFEST
    content = path.read_bytes()
    Manifest.read(tmp_path)
    for bit in range(0, 8 * len(content), step):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CorruptFileError, match=f"^{path} "):
            Manifest.read(tmp_path)


def test_every_file_that_ends_early_or_late_is_detected_and_named(checkpoint: Path) -> None:
    draw = random.Random(2)
    files = contents(checkpoint)
    wrongs: list[Callable[[bytes], bytes]] = [lambda content: content[:-1], lambda _: b"", lambda content: content[:1]]
    wrongs += [lambda content: content[: draw.randrange(len(content))]] * TRUNCATIONS
    wrongs += [lambda content: content + draw.randbytes(draw.randrange(1, 9))] * ADDITIONS
    wrongs += [lambda content: content + b"\0", lambda content: content + b"\n", lambda content: content + content]
    for path, content in files.items():
        for wrong in wrongs[: 3 + TRUNCATIONS // len(files)] + wrongs[3 + TRUNCATIONS :]:
            path.write_bytes(wrong(content))
            assert_named(path)
            path.write_bytes(content)


def test_a_truncated_file_is_reported_with_both_sizes(checkpoint: Path) -> None:
    path = checkpoint / "embed.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:100])
    (report,) = inspect(checkpoint)
    assert report.errors == [f"{path} is corrupt: it has 100 bytes, the manifest says {size}"]


def test_every_missing_file_is_named(checkpoint: Path) -> None:
    for path, content in contents(checkpoint).items():
        path.unlink()
        assert_named(path)
        path.mkdir()
        assert_named(path)
        path.rmdir()
        path.write_bytes(content)


def test_two_swapped_files_are_both_named(checkpoint: Path) -> None:
    names = ["block-00000.safetensors", "embed.safetensors"]
    first, second = (checkpoint / name for name in names)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    (report,) = inspect(checkpoint)
    assert sorted(Path(error.split()[0]).name for error in report.errors) == names


def test_a_file_that_cannot_be_read_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = disk.file_checksum

    def failing(path: Path) -> str:
        if path.name == "head.safetensors":
            raise OSError(errno.EIO, "Input/output error")
        return hashed(path)

    monkeypatch.setattr(disk, "file_checksum", failing)
    (report,) = inspect(checkpoint)
    assert report.errors == [f"{checkpoint / 'head.safetensors'} cannot be read (Input/output error)"]


def _with_a_key_twice(text: str) -> str:
    return text.replace('"step": 2', '"step": 7,\n "step": 2')


SAME_MEANING: dict[str, Callable[[str], str]] = {
    "a space more": lambda text: text.replace('"step": 2', '"step":  2'),
    "no indent": lambda text: json.dumps(json.loads(text)),
    "no last newline": lambda text: text[:-1],
    "a newline more": lambda text: text + "\n",
    "a tab": lambda text: text.replace("\n ", "\n\t", 1),
    "a carriage return": lambda text: text.replace("\n", "\r\n"),
    "an escape": lambda text: text.replace('"step"', '"\\u0073tep"'),
    "a solidus escaped": lambda text: text.replace("config.json", "config\\u002ejson"),
    "a float": lambda text: text.replace('"step": 2', '"step": 2.0'),
    "an exponent": lambda text: text.replace('"step": 2', '"step": 0.2e1'),
    "a key twice": _with_a_key_twice,
    "another order": lambda text: json.dumps(dict(reversed(json.loads(text).items())), indent=1) + "\n",
    "sorted keys": lambda text: json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n",
    "a byte-order mark": lambda text: "\ufeff" + text,
    "a checksum in capitals": lambda text: text[:-48] + text[-48:].upper().replace("CHECKSUM", "checksum"),
}


@pytest.mark.parametrize("change", SAME_MEANING)
def test_a_manifest_with_the_same_content_in_other_bytes_is_corrupt(change: str, checkpoint: Path) -> None:
    path = checkpoint / MANIFEST
    text = path.read_text()
    changed = SAME_MEANING[change](text)
    assert changed != text
    if change not in ("a byte-order mark", "a checksum in capitals"):
        assert json.loads(changed) == json.loads(text)
    path.write_bytes(changed.encode())
    assert_named(path)
    with pytest.raises(CorruptFileError, match=r"manifest\.json is corrupt"):
        Checkpoint.open(checkpoint)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-le"])
def test_a_manifest_in_another_encoding_is_corrupt(encoding: str, checkpoint: Path) -> None:
    path = checkpoint / MANIFEST
    path.write_bytes(path.read_text().encode(encoding))
    assert_named(path)


@pytest.mark.parametrize("value", ["[]", "1", "null", '"text"', '{"format": "acsgd-shards", "version": 5}'])
def test_json_that_is_no_manifest_is_corrupt(value: str, checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text(value)
    assert_named(checkpoint / MANIFEST)


def test_files_are_verified_before_a_run_reads_them(checkpoint: Path) -> None:
    """No tensor of a corrupt file reaches a run, even without `inspect`."""
    shards = ShardDirectory(checkpoint)
    path = checkpoint / "block-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    reads: list[Callable[[], Any]] = [
        lambda: shards.state("block-00000"),
        lambda: shards.tensors("block-00000", LayerTensors({}, {})),
        lambda: shards.tensor("block-00000", "transformer.h.0.ln_1.weight"),
    ]
    for read in reads:
        with pytest.raises(CorruptFileError, match=r"block-00000\.safetensors is corrupt"):
            read()
    shards.state("embed")
