"""Laws of `acsgd data dedup`: the first of each group stays as it was, in order, and nothing else."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from acsgd import cli
from acsgd.commands.data.dedup import NUM_HASHES, RECALL, NearDuplicates, rows_per_band, shingles

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `acsgd data dedup`; return exit code, output and errors."""

    def call(source: object, output: Path, *options: str) -> tuple[int, str, str]:
        code: Any = 0
        try:
            cli.run(["data", "dedup", str(source), "-o", str(output), *options])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return call


LINES = [
    b'{"text": "one",   "n": 1}',
    b'{"n": 1, "text": "one"}',
    '{"text": "zwölf", "id": 1}'.encode(),
    b'{"id": 2, "text": "zw\\u00f6lf"}',
    b'{"text": "one", "n": 2}',
    b'{"text": "one ", "n": 1}',
    b'{"text": ["one", {"a": 1, "b": 2}], "n": 1}',
    b'{"text": ["one", {"b": 2, "a": 1}], "n": 1}',
]
UNIQUE = [0, 2, 4, 5, 6]
"""Indices of the first lines of each group."""


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_the_first_of_equal_records_is_kept_byte_for_byte(run: Run, tmp_path: Path, ending: str) -> None:
    content = b"\n\n".join(LINES)
    (tmp_path / f"a{ending}").write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    code, out, _ = run(tmp_path / f"a{ending}", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == b"".join(LINES[index] + b"\n" for index in UNIQUE)
    assert code == 0
    head, *rest = out.splitlines()
    assert head == f"8 records: 5 kept in {tmp_path / 'out.jsonl'}; left out: 3 repeated, 0 unreadable"
    places = [f"  {tmp_path / f'a{ending}'}, line {2 * index + 1}" for index in range(8) if index not in UNIQUE]
    assert rest == ["repeated:", *places]


def test_a_result_has_no_duplicates(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(LINES))
    run(tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--near", "0.9")
    run(tmp_path / "b.jsonl", tmp_path / "c.jsonl", "--near", "0.9")
    assert (tmp_path / "b.jsonl").read_bytes() == (tmp_path / "c.jsonl").read_bytes()


def test_other_sources_become_json_lines(run: Run, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b", "a"], "n": [1, 2, 1]}), tmp_path / "a.parquet")
    (tmp_path / "b.txt").write_text("long\n" * 60000)
    run(f"{tmp_path / 'a.parquet'},{tmp_path / 'b.txt'},{tmp_path / 'b.txt'}", tmp_path / "out.jsonl")
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert records == [{"text": "a", "n": 1}, {"text": "b", "n": 2}, {"text": "long\n" * 60000}]


def test_named_fields_are_compared(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(LINES[:2] + LINES[4:5]))
    run(tmp_path / "a.jsonl", tmp_path / "out.jsonl", "--on", "text")
    assert (tmp_path / "out.jsonl").read_bytes() == LINES[0] + b"\n"
    code, out, err = run(tmp_path / "a.jsonl", tmp_path / "other.jsonl", "--on", "text,m")
    assert (code, out) == (2, "")
    assert f'{tmp_path / "a.jsonl"}, line 1 has no field "m"; its fields: "text", "n" (a number); correct --on' in err
    assert not (tmp_path / "other.jsonl").exists()


def test_unreadable_records_end_the_command_or_are_counted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nbad\n{"text": "\\ud800"}\n{"text": "a"}\n{"text": "b"}\n')
    code, _, err = run(tmp_path / "a.jsonl", tmp_path / "out.jsonl")
    assert code == 2
    assert f"{tmp_path / 'a.jsonl'}, line 2 is not JSON" in err
    assert "skip such records with --on-error skip" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]
    code, out, _ = run(tmp_path / "a.jsonl", tmp_path / "out.jsonl", "--on-error", "skip")
    assert (tmp_path / "out.jsonl").read_text() == '{"text": "a"}\n{"text": "b"}\n'
    assert "5 records: 2 kept" in out
    assert "1 repeated, 2 unreadable" in out
    assert "line 3 has a lone surrogate" in out


@pytest.mark.parametrize(
    ("output", "options", "message"),
    [
        ("out.txt", (), "is not a file of JSON lines; write, for example, out.jsonl"),
        ("a.jsonl", (), "exists already; give a file that does not, or remove it"),
        ("out.jsonl", ("--near", "0"), "--near=0.0 must be"),
        ("out.jsonl", ("--near", "1.1"), "--near=1.1 must be"),
    ],
)
def test_bad_options_are_one_sentence(
    run: Run, tmp_path: Path, output: str, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES[0])
    code, out, err = run(tmp_path / "a.jsonl", tmp_path / output, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert (tmp_path / "a.jsonl").read_bytes() == LINES[0]


def test_near_duplicates_need_a_library(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "a.jsonl").write_bytes(LINES[0])
    _, _, err = run(tmp_path / "a.jsonl", tmp_path / "out.jsonl", "--near", "0.8")
    assert '--near=0.8 needs rensa: pip install "acsgd[dedup]"' in err
    assert run(tmp_path / "a.jsonl", tmp_path / "out.jsonl")[0] == 0


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_near_duplicates_are_those_by_exact_similarity(threshold: float) -> None:
    """Within 5 standard deviations of the estimate, for pairs of texts of 150 words of which some differ."""
    pytest.importorskip("rensa", reason="the extra dedup is not installed")
    draw, margin = random.Random(0), 5 * (threshold * (1 - threshold) / NUM_HASHES) ** 0.5
    missed = compared = 0
    for number in range(400):
        words = [f"{number}-{draw.randrange(10**6)}" for _ in range(150)]
        other = [word if draw.random() > number / 4000 else "other" for word in words]
        first, second = (set(shingles(" ".join(each))) for each in (words, other))
        similarity = len(first & second) / len(first | second)
        near = NearDuplicates(threshold)
        assert near.add(" ".join(words))
        is_new = near.add(" ".join(other))
        if abs(similarity - threshold) > margin:
            compared += 1
            missed += similarity > threshold and is_new
            assert is_new or similarity > threshold
    assert compared > 200
    assert missed <= compared * (1 - RECALL) + 5 * (compared * RECALL * (1 - RECALL)) ** 0.5


def test_candidates_of_every_threshold_are_found() -> None:
    for percent in range(5, 101):
        rows = rows_per_band(percent / 100)
        found = 1 - (1 - (percent / 100) ** rows) ** (NUM_HASHES // rows)
        assert found >= RECALL or rows == 1


def test_short_texts_are_compared_as_a_whole() -> None:
    assert shingles("") == [""]
    assert shingles("One two") == ["one two"]
    assert shingles("a b c d e f") == ["a b c d e", "b c d e f"]


def test_a_streamed_source_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES[0])
    code, _, errors = run(f"stream:{tmp_path / 'a.jsonl'}", tmp_path / "out.jsonl")
    assert code == 2
    assert "dedup reads all records of stream:" in errors
