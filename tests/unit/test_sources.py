"""Sources of text: the option that lists them, the documents they yield, and their errors."""

from __future__ import annotations

import errno
import gzip
import json
import os
import socket
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from lib.corpora import examples_of

from acsgd.config.spec import suggest
from acsgd.io.data.formats.base import Example, TextSegment
from acsgd.io.data.sources import json_records
from acsgd.io.data.sources import text as pieces
from acsgd.io.data.sources.address import FsspecFiles
from acsgd.io.data.sources.base import OnError, ReadOptions, RecordCounts, Source
from acsgd.io.data.sources.files import WHOLE_BYTES
from acsgd.io.data.sources.remote import ConnectionLostError
from acsgd.io.data.sources.sources import SOURCES, describe_shared, local_files, parse_sources

LINES = '{"text": "one\\ntwo"}\n\n  \n{"meta": 1, "text": "zwölf"}\r\n{"text": ""}'
TABLE = ["one\ntwo", "zwölf", ""]
"""Texts of LINES."""
DATA = Path(__file__).parents[2].parent / "shared" / "data"


def write(path: Path, data: str | bytes) -> str:
    """Write a file and return its path as a string."""
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def only(spec: str, on_error: OnError = "stop") -> Source:
    """Return the only source of a spec."""
    [part] = parse_sources(spec, options=[ReadOptions(on_error=on_error)])
    assert part.weight is None
    return part.source


def read(name: str) -> list[str]:
    """Return the documents of a source."""
    examples = list(examples_of(only(name)))
    assert all(example.ends_document for example in examples)
    return [example.text for example in examples]


LOCAL = [pattern for pattern in SOURCES if not pattern.startswith(("http", "hf://"))]
"""Patterns of sources that need no network."""


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """One readable source per entry of SOURCES that needs no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    table = pa.table({"text": TABLE})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "dir").mkdir()
    write(tmp_path / "dir" / "b.jsonl", LINES)
    (tmp_path / "hub").mkdir()
    pq.write_table(table, tmp_path / "hub" / "train.parquet")
    (tmp_path / "ni" / "tasks").mkdir(parents=True)
    (tmp_path / "ni" / "splits" / "default").mkdir(parents=True)
    write(tmp_path / "ni" / "splits" / "default" / "train_tasks.txt", "task1\n")
    task = {"Definition": ["Do it."], "Instances": [{"id": "1", "input": "in", "output": ["out"]}]}
    write(tmp_path / "ni" / "tasks" / "task1.json", json.dumps(task))
    return {
        "demo": "demo",
        "stream:*": f"stream:{tmp_path / 'dir'}/",
        "hf:*": f"hf:{tmp_path / 'hub'}",
        "wikitext:*": f"wikitext:{write(tmp_path / 'wiki.txt', LINES)}",
        "cot:*": f"cot:{write(tmp_path / 'cot.json', json.dumps({'algebra': 'text'}))}",
        "natural_instructions:*": f"natural_instructions:{tmp_path / 'ni'}",
        "glue:*": "glue:cola:" + write(tmp_path / "cola", "gj04\t1\t\tA sentence.\n"),
        "arxiv21:*": "arxiv21:" + write(tmp_path / "abstracts.jsonl", '{"abstract": "text"}'),
        "pile:*": f"pile:{tmp_path / 'dir'}",
        "p3:*": "p3:" + write(tmp_path / "p3.jsonl", '{"inputs": "in", "targets": "out"}'),
        "*.jsonl": write(tmp_path / "a.jsonl", LINES),
        "*.jsonl.zst": write(tmp_path / "a.jsonl.zst", zstandard.compress(LINES.encode())),
        "*.jsonl.gz": write(tmp_path / "a.jsonl.gz", gzip.compress(LINES.encode())),
        "*.json": write(tmp_path / "a.json", json.dumps([{"text": text} for text in TABLE], indent=1)),
        "*.csv": write(tmp_path / "a.csv", 'n,text\n1,"one\ntwo"\n\n2,zwölf\n3,\n'),
        "*.tsv": write(tmp_path / "a.tsv", "text\tn\none\\ntwo\t1\nzwölf\t2\n\t3\n"),
        "*.parquet": str(tmp_path / "a.parquet"),
        "*.arrow": str(tmp_path / "a.arrow"),
        "*.txt": write(tmp_path / "a.txt", LINES),
        "*://*": f"file://{tmp_path / 'dir'}",
        "*/": f"{tmp_path / 'dir'}/",
    }


@pytest.mark.parametrize("pattern", LOCAL)
def test_every_source_can_be_read_again_and_ends_its_last_document(sample: dict[str, str], pattern: str) -> None:
    options = ReadOptions(fields=(("text", "sentence"),) if pattern == "glue:*" else ())
    [(source, _)] = parse_sources(sample[pattern], options=[options])
    examples = list(examples_of(source))
    assert examples == list(examples_of(source))
    assert examples[-1].ends_document
    assert any(example.text for example in examples)
    assert only(sample[pattern]).fingerprint == source.fingerprint


@pytest.mark.parametrize("size", [1, 2**20, 2**20 + 1, 30 * 2**20])
def test_an_edit_that_keeps_size_and_time_changes_the_fingerprint(tmp_path: Path, size: int) -> None:
    """Anywhere in a small file; in a large one within 64 KiB of an end, or if it covers 6 % of the file."""
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.truncate(size)
    os.utime(path, ns=(1, 1))
    fingerprints = {only(str(path)).fingerprint}
    edits = [(0, 1), (size - 1, 1), (min(size, 2**16) - 1, 1), (max(0, size - 2**16), 1), (size // 2, size // 16 + 1)]
    for start, length in dict.fromkeys(edits):
        original = path.read_bytes()
        path.write_bytes(original[:start] + b"x" * length + original[start + length :])
        os.utime(path, ns=(1, 1))
        assert path.stat().st_size == size
        assert only(str(path)).fingerprint not in fingerprints, (start, length)
        fingerprints.add(only(str(path)).fingerprint)
        path.write_bytes(original)
        os.utime(path, ns=(1, 1))
        assert only(str(path)).fingerprint in fingerprints


@pytest.mark.parametrize("pattern", [pattern for pattern in LOCAL if ":" not in pattern and pattern != "demo"])
def test_a_changed_file_changes_its_fingerprint(sample: dict[str, str], pattern: str) -> None:
    source = only(sample[pattern])
    before = source.fingerprint
    os.utime(f"{sample[pattern]}b.jsonl" if pattern == "*/" else sample[pattern], ns=(0, 1))
    assert source.fingerprint != before


@pytest.mark.parametrize(
    "pattern", [*(pattern for pattern in LOCAL if pattern[0] == "*" and pattern not in ("*.txt", "*.tsv")), "hf:*"]
)
def test_the_same_texts_are_read_from_files_of_any_kind(sample: dict[str, str], pattern: str) -> None:
    assert read(sample[pattern]) == TABLE


def test_the_index_of_pandas_is_a_column(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", ",text\n0,one\n1,two\n")
    counts = RecordCounts()
    assert [example.text for example in examples_of(only(str(tmp_path / "a.csv")), counts)] == ["one", "two"]
    assert counts.unread == {"Unnamed: 0": 2}


def test_cells_of_tsv_are_not_quoted(sample: dict[str, str]) -> None:
    assert read(sample["*.tsv"]) == ["one\\ntwo", *TABLE[1:]]


def test_demo_is_english_text_of_python() -> None:
    documents = read("demo")
    assert len(documents) > 50
    assert sum(map(len, documents)) > 400_000


def test_zst_equals_plain_also_in_several_frames(sample: dict[str, str], tmp_path: Path) -> None:
    raw = LINES.encode()
    frames = zstandard.compress(raw[:20]) + zstandard.compress(raw[20:])
    documents = read(sample["*.jsonl"])
    assert documents == ["one\ntwo", "zwölf", ""]
    assert read(sample["*.jsonl.zst"]) == documents
    assert read(write(tmp_path / "frames.jsonl.zst", frames)) == documents


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbfabc")) == ["abc"]


TEXTS = ["a\nb", "line\n" * 50, "x" * 1000, "x" * 16, "\n" * 40, "ab\ncdefghijklmnop" * 9, "ab\n" + "c" * 40 + "\nd"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_file_is_one_document_in_pieces_that_end_at_newlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARS", 16)
    examples = list(examples_of(only(write(tmp_path / "a.txt", text))))
    assert "".join(example.text for example in examples) == text
    assert [example.ends_document for example in examples] == [False] * (len(examples) - 1) + [True]
    assert all(len(example.text) < 32 for example in examples)
    assert all(len(example.text) >= 16 for example in examples[:-1])
    cut = "".join(example.text + "|" for example in examples)
    assert all(len(line.replace("|", "")) > 16 for line in cut.split("\n") if "|" in line[1:-1])


@pytest.mark.parametrize("text", TEXTS)
def test_a_long_record_is_cut_where_a_text_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARS", 16)
    record = json.dumps({"text": text}) + "\n"
    expected = list(examples_of(only(write(tmp_path / "a.txt", text))))
    assert list(examples_of(only(write(tmp_path / "a.jsonl", record * 2)))) == expected * 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
def test_a_record_above_the_limit_is_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The compressed one is a decompression bomb: 128 MiB in 12 KB."""
    monkeypatch.setattr(json_records, "MAX_RECORD_CHARS", 10**4)
    fits = b'{"text": "' + b"a" * (10**4 - 12) + b'"}'
    path = tmp_path / name
    nbytes = 2**27 if path.suffix == ".zst" else 2**24
    save(path, [fits, b'{"text": "' + b"b" * nbytes, fits])
    tracemalloc.start()
    try:
        counts = RecordCounts()
        examples = list(examples_of(only(str(path), on_error="skip"), counts))
        with pytest.raises(ValueError) as caught:
            list(examples_of(only(str(path))))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [len(example.text) for example in examples] == [10**4 - 12] * 2
    assert (counts.records, counts.skipped) == (3, 1)
    assert counts.first
    assert counts.first.where == f"{path}, line 2"
    reason = 'line 2 has more than 10000 characters: {"text": "bbb'
    assert str(caught.value).startswith(f"data.sources: {path}, {reason}")
    assert "; split the record or write its text to a *.txt file, or skip such records" in str(caught.value)
    assert peak < 2**27, "COMPRESSED_BYTES of compressed text expand to at most 32 MiB, copied once"


def test_all_line_endings_are_read(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", "a\r\nb\rc\n")) == ["a\nb\nc\n"]
    assert read(write(tmp_path / "a.jsonl", '{"text": "a"}\r{"text": "b"}\r\n')) == ["a", "b"]


def test_weights_are_normalised_and_default_to_one(sample: dict[str, str]) -> None:
    parts = parse_sources(f"demo:6, {sample['*.jsonl']} ,demo : 1e0")
    assert [part.source.name for part in parts] == ["demo", sample["*.jsonl"], "demo"]
    assert [part.weight for part in parts] == [6 / 8, 1 / 8, 1 / 8]
    assert [part.weight for part in parse_sources("demo,demo")] == [None, None]


def test_a_name_may_contain_a_colon(tmp_path: Path) -> None:
    name = write(tmp_path / "12:30.txt", "text")
    assert [part.source.name for part in parse_sources(f"{name},{name}:3")] == [name, name]


def test_a_relative_path_starts_at_the_working_directory(
    sample: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read("a.jsonl") == read(sample["*.jsonl"])
    assert only("a.jsonl").fingerprint == only(sample["*.jsonl"]).fingerprint


KNOWN = suggest("", SOURCES)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", f'unknown source ""{KNOWN}'),
        ("demo,", f'unknown source ""{KNOWN}'),
        ("dmeo", f'unknown source "dmeo"{KNOWN} (did you mean "demo"?)'),
        ("x/a/b", "x/a/b does not exist in {cwd}; give the path of an existing file"),
        ("x/a", "x/a does not exist in {cwd}; give the path of an existing file, or hf:x/a for a dataset of the Hub"),
        (
            "emptey.jsonl",
            'emptey.jsonl does not exist in {cwd}; give the path of an existing file (did you mean "empty.',
        ),
        ("emtpy.json", 'emtpy.json does not exist in {cwd}; give the path of an existing file (did you mean "empty.j'),
        ("a.xml:0.5", "a.xml does not exist in {cwd}; give the path of an existing file"),
        ("notes.md", "notes.md has none of the endings of files that can be read, *.jsonl"),
        ("a.jsonl:0.7 demo:0.3", 'sources are separated by commas; write "a.jsonl:0.7,demo:0.3"'),
        ("demo:0", 'weight "0" of demo is not a number greater than 0; write, for example, demo:0.5'),
        ("demo:-1", 'weight "-1" of demo is not a number greater than 0'),
        ("demo:nan", 'weight "nan" of demo is not a number greater than 0'),
        ("demo:inf", 'weight "inf" of demo is not a number greater than 0'),
        ("demo:", 'weight "" of demo is not a number greater than 0'),
        ("demo:half", 'weight "half" of demo is not a number greater than 0'),
        ("none.txt", "none.txt does not exist in {cwd}; give the path of an existing file"),
        ("demo,dir.txt:2", "dir.txt is a directory without files that can be read, *.jsonl, *.jsonl.zst"),
        ("none*.txt", "none*.txt matches no file in {cwd} that can be read, *.jsonl"),
        ("hf:", "hf: is not the name of a dataset; write hf:NAME, hf:NAME:CONFIG:SPLIT"),
        ("hf:a:b:c:d", "hf:a:b:c:d is not the name of a dataset"),
        ("http://host/a.xml:0.5", "http://host/a.xml is not the address of a file that can be read, *.jsonl"),
        ("s4://bucket/a.jsonl", "s4://bucket/a.jsonl has a protocol that fsspec does not know; use s3, gs, hf, sftp"),
        ("s3://", "s3:// must be an address, such as s3://bucket"),
        ("empty.jsonl", "empty.jsonl is empty; give a file with text"),
        ("fifo.txt", "fifo.txt is a named pipe; its text is read more than once: write it to a file"),
        ("socket.txt", "socket.txt is a socket; its text is read more than once: write it to a file"),
        (
            "dangling.txt",
            "dangling.txt, a link to gone.txt, does not exist in {cwd}; give the path of an existing file",
        ),
        ("loop.txt", "loop.txt cannot be opened (Too many levels of symbolic links); give the path of an existing"),
        ("empty.jsonl/a.txt", "empty.jsonl/a.txt cannot be opened (Not a directory); give the path of an existing"),
        ("x" * 300 + ".txt", "x" * 300 + ".txt cannot be opened (File name too long); give the path of an existing"),
        ("~nobody-has-this-name/a.txt", "~nobody-has-this-name/a.txt cannot be opened (Could not determine home"),
        ("a\0b.txt", "a\0b.txt cannot be opened (embedded null byte); give the path of an existing file"),
        ("\udcff.txt", "'\\udcff.txt' is not a UTF-8 name; rename the file"),
    ],
)
def test_errors_in_a_spec_are_found_without_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir.txt").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "notes.md").touch()
    (tmp_path / "dangling.txt").symlink_to("gone.txt")
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    os.mkfifo("fifo.txt")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.txt")
    with pytest.raises(ValueError) as caught:
        parse_sources(spec)
    assert str(caught.value).startswith(f'data.sources="{spec}": {message.format(cwd=tmp_path)}')


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    name = write(tmp_path / "a.txt", "text")
    os.chmod(name, 0)
    with pytest.raises(ValueError, match=f"type: chmod \\+r {name}"):
        parse_sources(name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.txt"])
def test_a_file_that_can_no_longer_be_read_is_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, GOOD[name])
    source = only(path)
    os.remove(path)
    message = f"^data.sources: {path} cannot be read \\(No such file or directory\\); check the file and its disk$"
    with pytest.raises(ValueError, match=message):
        list(examples_of(source))
    with pytest.raises(ValueError, match=message):
        assert source.fingerprint


def test_errors_name_the_configuration_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r'^data\.eval_sources="none\.txt": none\.txt does not exist'):
        parse_sources("none.txt", key="data.eval_sources")
    [part] = parse_sources(write(tmp_path / "a.jsonl", "bad"), key="data.eval_sources")
    with pytest.raises(ValueError, match=r"^data\.eval_sources: .*a\.jsonl, line 1 is not JSON"):
        list(examples_of(part.source))


UNREADABLE_LINES: list[tuple[bytes, str]] = [
    (b"{", "is not JSON (Expecting property name enclosed in double quotes at column 2): {"),
    (b"plain words", "is not JSON (Expecting value at column 1): plain words"),
    (b"[1]", "is not a JSON object: [1]"),
    (b"{}", 'has no string under "text"; its fields: none'),
    (b'{"txt": 1, "n": 2}', 'has no string under "text"; its fields: "txt" (a number), "n" (a number)'),
    (b'{"text": null}', 'has no string under "text"; its fields: "text" (null)'),
    (b'{"text": ["a"]}', 'has no string under "text"; its fields: "text" (a list)'),
    (b'{"text": "\\ud800"}', "has a lone surrogate, which is not valid text"),
    (b'{"text": "\\udc80"}', "has a lone surrogate, which is not valid text"),
    (b"\x00\x1b\xe2\x80\xa8!", r"is not JSON (Expecting value at column 1): \x00\x1b\xe2\x80\xa8!"),
    (b"[" * 10**5, f"exceeds the limits of the JSON parser: {'[' * 77}..."),
    (b'{"n": ' + b"9" * 5000 + b"}", f'exceeds the limits of the JSON parser: {{"n": {"9" * 71}...'),
    (b'{"text": "zw\xf6lf"}', r'is not UTF-8 (byte 0xf6): {"text": "zw\xf6lf"}'),
    (b'{"text": "good", "meta": "\xff"}', r'is not UTF-8 (byte 0xff): {"text": "good", "meta": "\xff"}'),
    (b'{"text": "' + b"y" * 500 + b"\xed\xa0\x80", f"is not UTF-8 (byte 0xed): ...{'y' * 40}" + r"\xed\xa0\x80"),
]
"""Lines of JSON and the reason why they cannot be read."""
UNREADABLE_TEXT: list[tuple[bytes, str]] = [
    (b"zw\xf6lf", r"is not UTF-8 (byte 0xf6): zw\xf6lf"),
    (b"x" * 1000 + b"\xff" * 50, f"is not UTF-8 (byte 0xff): ...{'x' * 40}" + r"\xff" * 9 + r"\..."),
    (b"\xc3", r"is not UTF-8 (byte 0xc3): \xc3"),
    (b"\xff\xfea\0", r"is not UTF-8 (byte 0xff): \xff\xfea\x00"),
]
"""Lines of plain text and the reason why they cannot be read."""
CASES = [
    *(("a.jsonl", line, reason) for line, reason in UNREADABLE_LINES),
    *(("a.jsonl.zst", line, reason) for line, reason in UNREADABLE_LINES[-3:]),
    *(("a.txt", line, reason) for line, reason in UNREADABLE_TEXT),
]
GOOD = {
    "a.jsonl": [b'{"text": "one"}', b"", b'{"text": "zw\xc3\xb6lf"}', b'{"text": ""}', b'{"text": "end"}'],
    "a.txt": [b"one", b"", b"zw\xc3\xb6lf", b"x" * 100, b"end"],
}
GOOD["a.jsonl.zst"] = GOOD["a.jsonl"]


def save(path: Path, lines: list[bytes]) -> str:
    """Write lines, compressed if the suffix is .zst."""
    raw = b"\n".join(lines) + b"\n"
    return write(path, zstandard.compress(raw) if path.suffix == ".zst" else raw)


@pytest.mark.parametrize(("name", "line", "reason"), CASES)
def test_an_unreadable_line_is_named(tmp_path: Path, name: str, line: bytes, reason: str) -> None:
    path = save(tmp_path / name, [*GOOD[name], line, *GOOD[name], line])
    with pytest.raises(ValueError) as caught:
        list(examples_of(only(path)))
    message = str(caught.value)
    assert message.startswith(f"data.sources: {path}, line 6 {reason}; ")
    assert message.endswith(", or skip such records with --data.on_error skip")
    encoding = "UTF-16" if b"\0" in line else "LATIN1"
    assert f"iconv -f {encoding} " in message or "UTF-8" not in reason
    assert message.isprintable()
    assert len(message) < len(path) + 300


@pytest.mark.parametrize(("name", "line", "reason"), CASES)
def test_skipping_equals_a_file_without_the_unreadable_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: bytes, reason: str
) -> None:
    """The examples are the same, so the tokens are, too."""
    monkeypatch.setattr(pieces, "PIECE_CHARS", 16)
    expected = list(examples_of(only(save(tmp_path / name, GOOD[name]))))
    for places in ([0], [3], [5], [0, 1, 5], [2, 2, 4]):
        broken = list(GOOD[name])
        for place in sorted(places, reverse=True):
            broken.insert(place, line)
        counts = RecordCounts()
        examples = list(examples_of(only(save(tmp_path / name, broken), on_error="skip"), counts))
        assert (counts.records, counts.skipped) == (len(broken), len(places))
        first = f"{tmp_path / name}, line {min(places) + 1}"
        assert counts.first
        assert counts.first.where == first
        if name != "a.txt" or len(line) < 16:  # the excerpt of a longer line of text starts at its unreadable part
            summary = f"skipped {len(places)} of {len(broken)} records; the first, {first}, {reason}"
            assert counts.summary() == summary
        assert examples == expected, places


@pytest.mark.parametrize("name", GOOD)
def test_skipping_changes_nothing_in_a_readable_file(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, GOOD[name])
    counts = RecordCounts()
    assert list(examples_of(only(path, on_error="skip"), counts)) == list(examples_of(only(path)))
    assert counts == RecordCounts(records=5, format="text")
    assert counts.summary() is None


def test_the_last_line_may_be_unreadable_and_lack_a_newline(tmp_path: Path) -> None:
    source = only(write(tmp_path / "a.txt", b"good\nbad\xff"), on_error="skip")
    assert list(examples_of(source)) == [Example((TextSegment("good\n"),))]


def test_a_file_that_is_not_zstd_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst is not valid zstd .* zstd -t"):
        read(write(tmp_path / "a.jsonl.zst", LINES))


@pytest.mark.parametrize("lost", [1, 5, 1000, 130_000])
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_truncated_file_is_never_skipped(tmp_path: Path, on_error: OnError, lost: int) -> None:
    """The lost end is a byte of a checksum, of a line, or of a frame after a complete one."""
    lines = "".join(json.dumps({"text": f"{number**30:x}" * 12}) + "\n" for number in range(4000))
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(lines.encode())
    assert len(frame) > lost
    for torn in (frame[:-lost], frame + frame[:-lost]):
        with pytest.raises(ValueError, match=r"a\.jsonl\.zst is not valid zstd \(the last frame is truncated\)"):
            list(examples_of(only(write(tmp_path / "a.jsonl.zst", torn), on_error=on_error)))


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_corrupt_zstd_stream_is_never_skipped(tmp_path: Path, on_error: OnError) -> None:
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(b'{"text": "a"}\n' * 1000))
    frame[-1] ^= 1
    with pytest.raises(ValueError, match=r"a\.jsonl\.zst is not valid zstd"):
        list(examples_of(only(write(tmp_path / "a.jsonl.zst", bytes(frame)), on_error=on_error)))


def test_frames_without_text_are_ignored(tmp_path: Path) -> None:
    """pzstd writes such frames."""
    skippable = bytes.fromhex("502a4d18") + (3).to_bytes(4, "little") + b"any"
    frames = skippable + zstandard.compress(LINES.encode()) + skippable + zstandard.compress(b"")
    assert read(write(tmp_path / "a.jsonl.zst", frames)) == ["one\ntwo", "zwölf", ""]


def test_real_zstd_files_are_read(tmp_path: Path) -> None:
    if not DATA.is_dir():
        pytest.skip(f"no {DATA}")
    for file in sorted((DATA / "pile-zst").glob("*.jsonl.zst")):
        assert all(example.text for example in examples_of(only(str(file))))


# ---- addresses


@pytest.fixture
def address(store: str) -> str:
    """A directory of a store, with the same records as JSON lines and as a compressed file."""
    for file in ("a.jsonl", "data/b.jsonl.gz", ".hidden/c.jsonl", "LICENSE.txt"):
        content = LINES.encode()
        put(f"{store}/{file}", gzip.compress(content) if file.endswith("gz") else content)
    return store


def files_of(address: str) -> Any:
    """Return the file system of an address."""
    return fsspec.core.url_to_fs(address, skip_instance_cache=True)[0]


def put(address: str, content: bytes) -> None:
    files_of(address).pipe(address, content)


def test_files_at_an_address_are_read_as_local_ones(address: str, tmp_path: Path) -> None:
    expected = read(write(tmp_path / "a.jsonl", LINES))
    assert read(f"{address}/a.jsonl") == read(f"{address}/a*l") == read(f"{address}/data/") == expected
    assert read(address) == read(f"{address}/**") == [*expected, *expected]
    assert read(f"{address}/.hidden/*.jsonl") == expected  # hidden files are read where they are named


def test_what_changes_at_an_address_changes_the_fingerprint(address: str) -> None:
    former = only(address).fingerprint
    assert only(address).fingerprint == former
    for change in (
        lambda: put(f"{address}/a.jsonl", LINES[::-1].encode()),
        lambda: put(f"{address}/c.jsonl", LINES.encode()),
        lambda: files_of(address).rm(f"{address}/data/b.jsonl.gz"),
    ):
        change()
        assert only(address).fingerprint != former
        former = only(address).fingerprint


def test_copies_of_a_file_on_several_hosts_have_one_fingerprint(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.jsonl", LINES))
    former = only(f"file://{path}").fingerprint
    os.utime(path, (1, 1))
    assert only(f"file://{path}").fingerprint == former
    path.write_text(LINES[::-1])
    assert only(f"file://{path}").fingerprint != former


@pytest.mark.parametrize(
    ("source", "shared"),
    [
        ("data/a.jsonl", "reads data/a.jsonl, which is in data.sources"),
        ("stream:data/a.jsonl", "reads data/a.jsonl, which is in data.sources"),
        ("link.jsonl", "reads link.jsonl, which is in data.sources"),
        ("c*.jsonl", "reads copy.jsonl, which is equal to data/a.jsonl of data.sources"),
        ("large.jsonl", "reads large.jsonl, which looks equal to data/b.jsonl (same size and samples) of data.sources"),
        ("cot:data/c.json", "reads data/c.json, which is in data.sources"),
        ("other.jsonl", ""),
        ("demo", ""),
    ],
)
def test_files_that_two_sources_share_are_found(
    source: str, shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data/a.jsonl", '{"text": "one"}\n')
    write(tmp_path / "data/c.json", '{"s": "one two"}')
    write(tmp_path / "copy.jsonl", '{"text": "one"}\n')
    write(tmp_path / "other.jsonl", '{"text": "two"}\n')  # of the same size
    (tmp_path / "link.jsonl").symlink_to("data/a.jsonl")
    for name in ("large.jsonl", "data/b.jsonl"):
        write(tmp_path / name, "{}\n")
        os.truncate(tmp_path / name, WHOLE_BYTES + 1)
    trained = [file for each in parse_sources("demo,data") for file in local_files(each.source)]
    [found] = parse_sources(source, key="data.eval_sources")
    assert describe_shared(local_files(found.source), trained) == shared


def test_no_message_holds_the_password_of_an_address() -> None:
    with pytest.raises(ValueError, match=r'data.sources="demo,s3://bucket/a": .* holds a password') as caught:
        parse_sources("demo,s3://user:secret@bucket/a")
    assert "secret" not in str(caught.value)


def test_a_missing_package_of_a_protocol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=r"s3://bucket/a.jsonl needs s3fs, which is not installed; pip install s3fs"):
        parse_sources("s3://bucket/a.jsonl")


def raise_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_files_at_an_address_that_cannot_be_read_are_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    none = f"{address}none"
    with pytest.raises(ValueError, match=rf"{none}/a.jsonl cannot be read \((it does not exist|its repository)"):
        _ = only(f"{none}/a.jsonl").fingerprint
    with pytest.raises(
        ValueError,
        match=rf"{none} (holds no files that can be read, \*.jsonl|cannot be read \((it does not|its repository))",
    ):
        read(none)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=5))
        with pytest.raises(ValueError, match=f"room for 0.0 GB; set TMPDIR to .* without a copy: stream:{address}/a"):
            read(f"{address}/a.jsonl")
    records = only(f"{address}/a.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr(FsspecFiles, "_entries", lambda self: {f"{address}/a.jsonl": {"size": len(LINES) + 9}})
        with pytest.raises(ValueError, match=r"was cut off after .* bytes; start again"):
            list(records.records(RecordCounts()))
    with monkeypatch.context() as patched:
        patched.setattr("shutil.copyfileobj", lambda content, file, length: raise_full(content.read(1)))
        with pytest.raises(ValueError, match=r"a.jsonl cannot be copied to .*No space"):
            read(f"{address}/a.jsonl")
    source = only(address)
    assert isinstance(source, FsspecFiles)
    with monkeypatch.context() as patched, source.open(f"{address}/a.jsonl") as content:
        patched.setattr(type(files_of(address).open(f"{address}/a.jsonl")), "read", raise_full, raising=False)
        with pytest.raises(ConnectionLostError, match="No space"):
            content.read(1)
    with pytest.raises(OSError, match="of a reader"), source.open(f"{address}/a.jsonl"):
        raise OSError("of a reader")
    with pytest.raises(ValueError, match=r"a.jsonl changed while it was read"), source.open(f"{address}/a.jsonl"):
        put(f"{address}/a.jsonl", b"{}")
    put(f"{address}/train/a.jsonl", b"{}")
    with pytest.raises(ValueError, match=rf"has several splits, others, train; give .* such as {address}/\*train\*"):
        read(address)
