"""Task strings, and what each source of text yields."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import zstandard

from acsgd.io import TASKS, tasks
from acsgd.io.tasks import Piece, Task, parse_tasks

LINES = '{"text": "one\\ntwo"}\n\n  \n{"meta": 1, "text": "zwölf"}\r\n{"text": ""}'
DATA = Path(__file__).parents[2].parent / "shared" / "data"


def write(path: Path, data: str | bytes) -> str:
    """Write a file and return its name, as the user types it."""
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def only(spec: str) -> Task:
    """Return the task of a spec of one."""
    [part] = parse_tasks(spec)
    assert part.weight == 1
    return part.task


def read(name: str) -> list[str]:
    """Return the documents of a source."""
    pieces = list(only(name).pieces())
    assert all(piece.ends_document for piece in pieces)
    return [piece.text for piece in pieces]


@pytest.fixture
def sample(tmp_path: Path) -> dict[str, str]:
    """One readable source per entry of TASKS."""
    compressed = zstandard.compress(LINES.encode())
    return {
        "demo": "demo",
        "*.jsonl": write(tmp_path / "a.jsonl", LINES),
        "*.jsonl.zst": write(tmp_path / "a.jsonl.zst", compressed),
        "*.txt": write(tmp_path / "a.txt", LINES),
    }


@pytest.mark.parametrize("pattern", TASKS)
def test_every_source_yields_the_same_again_and_ends_its_last_document(sample: dict[str, str], pattern: str) -> None:
    task = only(sample[pattern])
    pieces = list(task.pieces())
    assert pieces == list(task.pieces())
    assert pieces[-1].ends_document
    assert any(piece.text for piece in pieces)
    assert only(sample[pattern]).fingerprint == task.fingerprint


@pytest.mark.parametrize("pattern", [pattern for pattern in TASKS if pattern != "demo"])
def test_a_changed_file_changes_its_fingerprint(sample: dict[str, str], pattern: str) -> None:
    task = only(sample[pattern])
    before = task.fingerprint
    os.utime(sample[pattern], ns=(0, 1))
    assert task.fingerprint != before


def test_demo_is_english_that_python_carries() -> None:
    documents = read("demo")
    assert len(documents) > 50
    assert sum(map(len, documents)) > 400_000


def test_zst_equals_plain_even_in_several_frames(sample: dict[str, str], tmp_path: Path) -> None:
    raw = LINES.encode()
    frames = zstandard.compress(raw[:20]) + zstandard.compress(raw[20:])
    documents = read(sample["*.jsonl"])
    assert documents == ["one\ntwo", "zwölf", ""]
    assert read(sample["*.jsonl.zst"]) == documents
    assert read(write(tmp_path / "frames.jsonl.zst", frames)) == documents


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbfabc")) == ["abc"]


@pytest.mark.parametrize("text", ["a\nb", "line\n" * 50, "x" * 1000, "x" * 16, "\n" * 40, "ab\ncdefghijklmnop" * 9])
def test_a_text_file_is_one_document_in_pieces_that_end_at_newlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(tasks, "PIECE_CHARS", 16)
    pieces = list(only(write(tmp_path / "a.txt", text)).pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece.text) <= 32 for piece in pieces)
    assert all(piece.text.endswith("\n") or len(piece.text) == 32 for piece in pieces[:-1])


def test_weights_are_normalised_and_default_to_one(sample: dict[str, str]) -> None:
    parts = parse_tasks(f"demo:6, {sample['*.jsonl']} ,demo : 1e0")
    assert [part.task.name for part in parts] == ["demo", sample["*.jsonl"], "demo"]
    assert [part.weight for part in parts] == [6 / 8, 1 / 8, 1 / 8]


def test_a_name_may_hold_a_colon(tmp_path: Path) -> None:
    name = write(tmp_path / "12:30.txt", "text")
    assert [part.task.name for part in parse_tasks(f"{name},{name}:3")] == [name, name]


def test_a_relative_path_starts_at_the_working_directory(
    sample: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read("a.jsonl") == read(sample["*.jsonl"])
    assert only("a.jsonl").fingerprint == only(sample["*.jsonl"]).fingerprint


KNOWN = '; use "demo", "*.jsonl", "*.jsonl.zst" or "*.txt"'


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", f'unknown source ""{KNOWN}'),
        ("demo,", f'unknown source ""{KNOWN}'),
        ("dmeo", f'unknown source "dmeo"{KNOWN} (did you mean "demo"?)'),
        ("x/a.json", f'unknown source "x/a.json"{KNOWN} (did you mean "*.jsonl"?)'),
        ("a.csv:0.5", f'unknown source "a.csv"{KNOWN}'),
        ("demo:0", 'weight "0" of demo is not a number greater than 0; write demo:0.5, say'),
        ("demo:-1", 'weight "-1" of demo is not a number greater than 0'),
        ("demo:nan", 'weight "nan" of demo is not a number greater than 0'),
        ("demo:inf", 'weight "inf" of demo is not a number greater than 0'),
        ("demo:", 'weight "" of demo is not a number greater than 0'),
        ("demo:half", 'weight "half" of demo is not a number greater than 0'),
        ("none.txt", "none.txt does not exist in {cwd}; give the path of an existing file"),
        ("demo,dir.txt:2", "dir.txt is not a file; give a file in it, as dir.txt/..."),
        ("empty.jsonl", "empty.jsonl is empty; give a file with text"),
    ],
)
def test_what_is_wrong_with_a_spec_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir.txt").mkdir()
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError) as caught:
        parse_tasks(spec)
    assert str(caught.value).startswith(f'data.task="{spec}": {message.format(cwd=tmp_path)}')


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_one_may_not_read_is_named(tmp_path: Path) -> None:
    name = write(tmp_path / "a.txt", "text")
    os.chmod(name, 0)
    with pytest.raises(ValueError, match=f"type: chmod \\+r {name}"):
        parse_tasks(name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON (Expecting"),
        ("plain words", "is not JSON (Expecting value"),
        ("[1]", 'has no string under "text": [1]; write {"text": "..."}'),
        ('{"txt": 1}', 'has no string under "text": {"txt": 1};'),
        ('{"text": null}', 'has no string under "text": {"text": null};'),
        ('{"text": "\\ud800"}', "holds half of a surrogate pair"),
        (json.dumps({"body": "y" * 500}), f'has no string under "text": {{"body": "{"y" * 67}...; write'),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    name = write(tmp_path / "a.jsonl", '{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=re.escape(f"data.task: {name}, line 3 {message}")):
        read(name)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_that_is_not_utf8_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"data.task: {tmp_path / name} is not UTF-8 .* iconv"):
        read(write(tmp_path / name, "zwölf".encode("latin1")))


def test_zst_that_is_not_zst_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst is not sound zstd .* zstd -t"):
        read(write(tmp_path / "a.jsonl.zst", LINES))


def test_a_torn_download_is_noticed(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": os.urandom(300).hex()}) + "\n" for _ in range(2000))
    torn = zstandard.compress(lines.encode())[:-1000]
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst"):
        read(write(tmp_path / "a.jsonl.zst", torn))


def test_sources_of_the_real_world(tmp_path: Path) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no {DATA}")
    for file in sorted((DATA / "pile-zst").glob("*.jsonl.zst")):
        assert all(isinstance(piece, Piece) and piece.text for piece in only(str(file)).pieces())
