"""Files of records: bad records of each kind, several files as one source, and directories with splits."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import re
import shutil
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.exceptions import DatasetNotFoundError
from lib.corpora import examples_of, tokenize_all
from transformers import PreTrainedTokenizerFast

from acsgd.io.data.sources import json_records
from acsgd.io.data.sources.base import OnError, ReadOptions, RecordCounts, Source, SourceRecord
from acsgd.io.data.sources.sources import parse_sources


def source_of(name: Path | str, on_error: OnError = "stop") -> Source:
    """Return a source by its name."""
    [part] = parse_sources(str(name), options=[ReadOptions(on_error=on_error)])
    return part.source


def texts(source: Source) -> list[str]:
    """Return the texts of a source."""
    return [example.text for example in examples_of(source)]


def write_bad_parquet(path: Path) -> None:
    """Write three rows, the second of which is not UTF-8."""
    column = pa.Array.from_buffers(
        pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")]
    )
    pq.write_table(pa.table({"text": column}), path)


BAD: dict[str, tuple[bytes, str, str]] = {
    "quote.csv": (b'text\na\n"x" y\nb\n', "line 3", "is not valid CSV (',' expected after '\"')"),
    "wide.csv": (b"text\na\nx,y\nb\n", "line 3", "has 2 columns, not 1"),
    "latin.csv": (b"text\na\n\xff\nb\n", "line 3", r"is not UTF-8 (byte 0xff): \xff"),
    "narrow.tsv": (b"text\tn\na\t1\nx\nb\t2\n", "line 3", "has 1 columns, not 2"),
    "number.json": (b'[{"text": "a"},\n 7,\n {"text": "b"}]', "line 2, record 2", "is not a JSON object: 7"),
    "latin.json": (
        b'[{"text": "a"},\n{"text": "\xff"}, {"text": "b"}]',
        "line 2, record 2",
        r'is not UTF-8 (byte 0xff): {"text',
    ),
    "lines.json": (b'{"text": "a"}\n[]\n{"text": "b"}\n', "line 2", "is not a JSON object: []"),
    "column.json": (
        b'[{"text": "a"}, {"txt": "x"}, {"text": "b"}]',
        "line 1, record 2",
        'has no string under "text"; its fields: "txt"',
    ),
    "latin.parquet": (b"", "row 2", "is not UTF-8; write its text as UTF-8"),
}
"""File name -> content, place of the bad record between "a" and "b", and the reason."""


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_named_or_skipped(tmp_path: Path, name: str) -> None:
    content, place, reason = BAD[name]
    path = tmp_path / name
    path.write_bytes(content) if content else write_bad_parquet(path)
    with pytest.raises(ValueError) as refused:
        texts(source_of(path))
    assert str(refused.value).startswith(f"data.sources: {path}, {place} {reason}")
    counts = RecordCounts()
    assert [example.text for example in examples_of(source_of(path, "skip"), counts)] == ["a", "b"]
    assert (counts.records, counts.skipped) == (3, 1)


UNREADABLE: dict[str, tuple[bytes, str]] = {
    "a.json": (b'[{"text": "a"},\n{"text": oops}]', ", line 2 is not JSON (Expecting value): oops}]; correct the file"),
    "b.json": (b'[{"text": "a"}\n{"text": "b"}]', ", line 2 is not JSON (Expecting ',' delimiter): {"),
    "arrays.json": (b'[{"text": "a"}]\n[{"text": "b"}]', ", line 2 is not JSON (Extra data): [{"),
    "rest.json": (b'{"text": "a"} {"text": ', ", line 1 is not JSON (Expecting value)"),
    "c.json": (b'{"data": [', ", line 1 is not JSON (Expecting value)"),
    "d.json": (b"[" * 10**5, " is not JSON (it exceeds the limits of the parser)"),
    "columns.json": (
        b'{"text": {"7": "a", "9": "b"}, "n": {"7": 1, "9": 2}}',  # without the rows that dropna() has removed
        " is a table of columns, as pandas writes",
    ),
    "index.json": (
        b'{"0": {"text": "a"}, "1": {"text": "b"}}',
        " is a table of columns, as pandas writes it, and no list",
    ),
    "split.json": (b'{"columns": ["text"], "index": [0], "data": [["a"]]}', 'with to_json("'),
    "no index.json": (b'{"columns": ["text"], "data": [["a"]]}', 'with to_json("'),
    "semicolons.csv": (
        b"input;output\na;b\n",
        ", line 1 has one column, 'input;output': they are separated by ';'",
    ),
    "a.csv": (b"text,text\n1,2\n", ", line 1 must name the columns, each once, but has: text, text; write a header"),
    "utf16.csv": ("text\na\n".encode("utf-16"), ", line 1 is not UTF-8 (byte 0xff): "),
    "b.csv": (b"a,,b\n1,2,3\n", ", line 1 must name the columns, each once"),
    "blank.csv": (b"\n\n", ", line 1 must name the columns, each once, but has: nothing"),
    "a.parquet": (b"PAR1 nothing", " is not valid Parquet ("),
    "a.arrow": (b"nothing at all", " is not valid Arrow ("),
    "a.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 999)[:-9], " is not valid gzip (the last frame is truncated)"),
    "b.jsonl.gz": (b'{"text": "a"}', " is not valid gzip ("),
}
"""File name -> content that cannot be read to its end, and the message."""


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_file_that_cannot_be_read_to_its_end_is_never_skipped(tmp_path: Path, name: str, on_error: OnError) -> None:
    content, message = UNREADABLE[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as refused:
        texts(source_of(tmp_path / name, on_error))
    assert str(refused.value).startswith(f"data.sources: {tmp_path / name}")
    assert message in str(refused.value)


def test_a_truncated_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a" * n for n in range(1000)]}), tmp_path / "whole.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "whole.parquet").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"a\.parquet is not valid Parquet \(.*\); write or download it again"):
        texts(source_of(tmp_path / "a.parquet"))


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_a_damaged_table_is_refused_or_read_and_never_ends_the_process(tmp_path: Path, kind: str) -> None:
    table = pa.table({"text": [f"row {n}" for n in range(300)], "more": [{"a": [n, None]} for n in range(300)]})
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=100)
    whole = path.read_bytes()
    draw = random.Random(kind)
    refused = []
    for _ in range(100):
        place = draw.randrange(len(whole))
        damaged = whole[:place] + bytes([whole[place] ^ draw.randrange(1, 256)]) + whole[place + 1 :]
        path.write_bytes(damaged if draw.random() < 0.7 else whole[:place])
        for on_error in ("stop", "skip"):
            try:
                texts(source_of(path, on_error))
            except ValueError as error:
                refused.append(str(error))
    assert len(refused) > 30
    assert all(message.startswith((f"data.sources: {path}", f'data.sources="{path}"')) for message in refused)


def test_a_table_that_vanished_is_named(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.arrow"):
        pq.write_table(pa.table({"text": ["a"]}), tmp_path / name)
        source = source_of(tmp_path / name)
        os.remove(tmp_path / name)
        with pytest.raises(ValueError, match=f"^data.sources: {tmp_path / name} cannot be read \\(No such file"):
            texts(source)


def test_a_json_value_above_the_limit_is_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file takes little memory, too: Python allocates what a single read may return."""
    monkeypatch.setattr(json_records, "READ_CHARS", 2**16)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "a"}], indent=1))
    tracemalloc.start()
    try:
        assert texts(source_of(path)) == ["a"]
        path.write_text(json.dumps([{"text": "a" * 2**24}], indent=1))
        monkeypatch.setattr(json_records, "MAX_JSON_CHARS", 2**20)
        with pytest.raises(ValueError) as refused:
            texts(source_of(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "has more than 1048576 characters in one JSON value; write one object per line: jq -c .[]" in str(
        refused.value
    )
    assert peak < 2**27


def test_a_file_of_one_chat_has_one_record(tmp_path: Path) -> None:
    record = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    (tmp_path / "a.json").write_text(json.dumps(record))
    [found] = source_of(tmp_path / "a.json").records(RecordCounts())
    assert isinstance(found, SourceRecord)
    assert found.fields == record


def test_an_object_with_one_list_of_objects_is_that_list(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": 1, "tags": ["x"], "data": [{"text": "a"}, {"text": "b"}]}, indent=2))
    assert texts(source_of(path)) == ["a", "b"]
    path.write_text(json.dumps({"text": "alone"}, indent=2))
    assert texts(source_of(path)) == ["alone"]


@pytest.mark.parametrize("between", ["", "\n", " \n\n"])
@pytest.mark.parametrize("indent", [None, 2])
def test_objects_that_follow_each_other_are_all_read(indent: int | None, between: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(between.join(json.dumps({"text": text}, indent=indent) for text in "abc") + "\n")
    assert texts(source_of(path)) == ["a", "b", "c"]


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A directory with files of three kinds, one of them in a directory of its own, and files that are not data."""
    directory = tmp_path / "parts"
    (directory / "more").mkdir(parents=True)
    (directory / "more" / "c.csv").write_text("text\nc\n")
    (directory / "a.jsonl").write_text('{"text": "a"}\n')
    (directory / "b.json").write_text('[{"text": "b"}]')
    (directory / "license.txt").write_text("not data beside other files")
    (directory / ".hidden.txt").write_text("hidden")
    (directory / "LICENSE").write_text("none")
    return directory


def test_several_files_are_one_source_in_the_order_of_their_names(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts(source_of(parts)) == ["a", "b", "c"]
    assert texts(source_of(f"{parts}/*")) == ["a", "b", "not data beside other files"]
    assert texts(source_of(f"{parts}/**/*.csv")) == ["c"]
    [half, _] = parse_sources(f"{parts}/[ab].*:0.5,demo:0.5")
    assert (texts(half.source), half.weight) == (["a", "b"], 0.5)
    monkeypatch.chdir(parts)
    assert texts(source_of("more")) == texts(source_of("more/")) == ["c"]


def test_a_bad_record_among_several_files_is_named_with_its_file(parts: Path) -> None:
    (parts / "b.json").write_bytes(b'{"text": "b"}\nx\xff\n')
    with pytest.raises(ValueError, match=f"^data.sources: {parts / 'b.json'}, line 2 is not UTF-8"):
        texts(source_of(parts))
    counts = RecordCounts()
    seen = []
    for example in examples_of(source_of(parts, "skip"), counts):
        assert counts.fraction
        seen.append((example.text, counts.records, counts.fraction()))
    assert [text for text, *_ in seen] == ["a", "b", "c"]
    assert [records for _, records, _ in seen] == [1, 2, 4]
    assert [fraction for *_, fraction in seen] == sorted(fraction for *_, fraction in seen)
    assert counts.fraction() == 1
    assert counts.summary() == f"skipped 1 of 4 records; the first, {parts / 'b.json'}, line 2, " + (
        r"is not UTF-8 (byte 0xff): x\xff"
    )


def test_files_of_a_directory_change_its_fingerprint(parts: Path) -> None:
    before = source_of(parts).fingerprint
    assert source_of(parts).fingerprint == before
    (parts / "d.jsonl").write_text('{"text": "d"}')
    assert source_of(parts).fingerprint != before


LAYOUTS: dict[str, tuple[list[str], str]] = {
    "directories": (["train/a.csv", "train/b.csv", "test/a.csv"], "train: {}/train; test: {}/test"),
    "the Hub": (
        ["data/train-00000-of-00002.csv", "data/train-00001-of-00002.csv", "data/test-00000-of-00001.csv"],
        "train: {}/data/*train*; test: {}/data/test-00000-of-00001.csv",
    ),
    "names of files": (["quiz_test.csv", "quiz_train.csv"], "train: {}/quiz_train.csv; test: {}/quiz_test.csv"),
    "upper case": (["Train.csv", "Dev.csv"], "train: {}/Train.csv; validation: {}/Dev.csv"),
    "configs": (["de/train.csv", "de/test.csv", "en/train.csv"], "train: {}/**/train.csv; test: {}/de/test.csv"),
    "some files": (["train.csv", "more.csv", "most.csv"], "train: {}/train.csv; others: {}/more.csv,{}/most.csv"),
    "camel case": (["trainData.csv", "testData.csv"], "train: {}/trainData.csv; test: {}/testData.csv"),
    "held out": (["a.csv", "held_out.csv"], "test: {}/held_out.csv; others: {}/a.csv"),
    "pattern": (["a_test.csv", "b_val.csv", "c_test.csv"], "validation: {}/b_val.csv; test: {}/*test*"),
}
"""Files of a directory, and what is advised to give."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_are_never_read_together(layout: str, tmp_path: Path) -> None:
    """What is advised reads the files of the split, as `datasets` divides them, and nothing else."""
    files, advice = LAYOUTS[layout]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"text\n{file}\n")
    with pytest.raises(ValueError) as refused:
        source_of(tmp_path)
    choices = advice.format(*[tmp_path] * 3)
    assert str(refused.value).endswith(f"{tmp_path} has several splits; give one of them: {choices}")
    read = [
        {text for part in parse_sources(choice.split(": ")[1]) for text in texts(part.source)}
        for choice in choices.split("; ")
    ]
    assert sorted(text for each in read for text in each) == sorted(files)
    if layout in ("upper case", "camel case", "held out"):  # which `datasets` does not divide
        return
    oracle = datasets.load_dataset(str(tmp_path), cache_dir=str(tmp_path / ".cache"))
    splits = {choice.split(": ")[0]: each for choice, each in zip(choices.split("; "), read, strict=True)}
    assert {split: {*rows["text"]} for split, rows in oracle.items()} == {
        split: each for split, each in splits.items() if split != "others"
    }


def test_caches_and_hidden_files_are_no_data(parts: Path) -> None:
    expected = texts(source_of(parts))
    for name in (
        ".ipynb_checkpoints/a-checkpoint.jsonl",
        "__MACOSX/a.jsonl",
        ".git/a.jsonl",
        ".a.jsonl",
        "cache-12ab.arrow",
        "dataset_info.json",
        "node_modules/a/package.json",
        "wandb/run-1/files/wandb-metadata.json",
        "_temporary/0/a.jsonl",
        "_SUCCESS",
    ):
        (parts / name).parent.mkdir(parents=True, exist_ok=True)
        (parts / name).write_text('{"text": "no data"}')
    assert texts(source_of(parts)) == expected


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (["x-00000-of-00003.csv", "x-00002-of-00003.csv"], "lacks 1 of 3 parts, such as {}/x-00001-of-00003.csv; "),
        (["x-01-of-02.csv"], 'lacks 1 of 2 parts, such as {}/x-00-of-02.csv; get them, or .* it has, "{}/x-\\*.csv"'),
        (["x.jsonl", "x.jsonl.gz"], "has x.jsonl and x.jsonl.gz, which .*; give one of them: {0}/x.jsonl or {0}/x"),
        (["more/x.csv", "more/x.parquet"], "has x.csv and x.parquet, which may hold the same records"),
        (["x (1).csv", "x.csv"], r"has {}/x \(1\).csv and {}/x.csv, which are equal; remove one of them"),
        (["x.csv", "more/y.csv.gz"], "{}/more/y.csv.gz is not read, since only .* are; convert it to one of them"),
        (["x.csv", "more/Copy of x.csv"], "has {}/more/Copy of x.csv and {}/x.csv, which are equal"),
        (["more/_temporary/0/x.csv", "x.csv"], "{}/more is being written, or was not .*, or remove {}/more/_temporary"),
        (["_delta_log/0.json", "x.csv"], r"{} is a table with versions \(_delta_log\), whose files are not all of the"),
        (["metadata/version-hint.text", "data/x.csv"], r"{} is a table with versions \(metadata/version-hint.text\)"),
    ],
)
def test_parts_that_are_missing_and_copies_of_files_are_found(files: list[str], problem: str, tmp_path: Path) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("text\na\n")
    with pytest.raises(ValueError, match=problem.format(tmp_path, tmp_path)):
        source_of(tmp_path)
    if "equal" not in problem:
        address = f"file://{tmp_path}"
        with pytest.raises(ValueError, match=problem.format(address, address)):
            _ = source_of(address).fingerprint


def test_text_beside_records_is_no_source_of_them_here_or_at_an_address(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "train.txt").write_text("b\n")
    assert texts(source_of(tmp_path)) == texts(source_of(f"file://{tmp_path}")) == ["a"]


def test_all_parts_are_read_and_links_beside_their_files_are_not(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"x-0000{number}-of-00002.csv").write_text(f"text\n{number}\n")
        (tmp_path / f"x{number}.csv").write_text("text\n3\n")  # equal, but no copies by their names
    (tmp_path / "latest.csv").symlink_to("x-00002-of-00002.csv")
    (tmp_path / "here").symlink_to(".")
    other = tmp_path.with_name("other")
    other.mkdir()
    (other / "4.csv").write_text("text\n4\n")
    (tmp_path / "there").symlink_to(other)
    (other / "back").symlink_to(tmp_path)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "5.csv").write_text("text\n5\n")
    (tmp_path / "the same").symlink_to("part")
    assert texts(source_of(tmp_path)) == ["5", "4", "1", "2", "3", "3"]


def test_a_repository_with_configs_is_left_to_datasets(hub: Path) -> None:
    with pytest.raises(ValueError, match=f"{hub} is a dataset with several parts, see .*; give hf:{hub}:train or "):
        source_of(hub)


def test_a_saved_dataset_is_read_as_datasets_reads_it(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict({"text": [f"text {n}" for n in range(700)], "n": range(700)})
    saved.save_to_disk(tmp_path / "saved", num_shards=3)
    (tmp_path / "saved" / "cache-of-a-map.arrow").write_bytes(b"not part of it")
    assert texts(source_of(tmp_path / "saved")) == datasets.load_from_disk(str(tmp_path / "saved"))["text"][:]
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "splits")
    datasets.load_from_disk(str(tmp_path / "splits"))["train"].map(lambda row: {"text": row["text"].upper()})
    assert list((tmp_path / "splits" / "train").glob("cache-*.arrow"))
    assert texts(source_of(tmp_path / "splits")) == saved["text"][:]
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "both")
    with pytest.raises(ValueError, match=f"give one of them: train: {tmp_path}/both/train; test: {tmp_path}/both/test"):
        source_of(tmp_path / "both")


SHARED = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no {SHARED}")
def test_splits_of_real_data_are_found() -> None:
    for name, splits in (
        ("gsm8k-io", "train: .*; validation: .*; test: .*"),
        ("glue/CoLA", "train: .*; validation: .*"),
    ):
        with pytest.raises(ValueError, match=f"has several splits; give one of them: {splits}"):
            source_of(SHARED / name)


# ---- datasets of the Hub, and the web


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a repository of a dataset, with two configs and two splits, and a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    directory = tmp_path / "hub"
    configs = []
    for config in ("red", "blue"):
        for split in ("train", "test"):
            (directory / config).mkdir(parents=True, exist_ok=True)
            (directory / config / f"{split}.jsonl").write_text(json.dumps({"text": f"{config} {split}"}))
        configs.append(f"- config_name: {config}\n  data_dir: {config}\n")
    (directory / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")
    return directory


def test_a_copy_of_a_dataset_is_read_by_config_and_split(hub: Path) -> None:
    assert texts(source_of(f"hf:{hub}:red")) == ["red train"]
    assert texts(source_of(f"hf:{hub}:red:test")) == ["red test"]
    [half, _] = parse_sources(f"hf:{hub}:blue:test:3,demo")
    assert (texts(half.source), half.weight) == (["blue test"], 0.75)
    assert source_of(f"hf:{hub}:red").fingerprint != source_of(f"hf:{hub}:blue").fingerprint


def test_what_is_wrong_with_a_dataset_is_named(hub: Path) -> None:
    for name, problem in (
        (f"hf:{hub}", "Config name is missing"),
        (f"hf:{hub}:green", "BuilderConfig 'green' not found. Available: ['red', 'blue']"),
        (f"hf:{hub}:red:dev", 'Unknown split "dev". Should be one of'),
    ):
        for read in (texts, lambda source: source.fingerprint):
            with pytest.raises(ValueError) as refused:
                read(source_of(name))
            assert str(refused.value).startswith(f"data.sources: {name} cannot be loaded: {problem}")
            assert "without a network, hf:DIRECTORY with a copy (hf download NAME" in str(refused.value)


def test_a_dataset_that_the_hub_does_not_show_is_named_with_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: object) -> None:
        raise DatasetNotFoundError("Dataset 'nobody/nothing' doesn't exist on the Hub or cannot be accessed.")

    monkeypatch.setattr("acsgd.io.data.sources.hub.load_dataset", absent)
    with pytest.raises(
        ValueError, match=r"or cannot be accessed; check the name, and if it is private type hf auth login"
    ):
        texts(source_of("hf:nobody/nothing"))


def test_without_a_network_a_local_copy_is_suggested(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"hf:nobody/nothing cannot be loaded: .*; give .* hf:DIRECTORY with a copy"):
        texts(source_of("hf:nobody/nothing"))


@pytest.mark.parametrize("prefix", ["", "stream:"])
def test_a_hub_that_cannot_be_reached_is_given_up_soon(
    prefix: str, hub: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`datasets` would try again for half a minute. A dataset in its cache is read."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with socket.socket() as never_listens:
        never_listens.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{never_listens.getsockname()[1]}"
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
        message = rf"hf:nobody/nothing cannot be loaded: {endpoint} cannot be reached \(.*refused.*\); .* a copy \(hf"
        with pytest.raises(ValueError, match=message):
            _ = source_of(f"{prefix}hf:nobody/nothing").fingerprint
        assert sum(slept) <= 2
        assert not datasets.config.HF_HUB_OFFLINE
        assert texts(source_of(f"hf:{hub}:red")) == ["red train"]
        shutil.copytree(tmp_path / "cache" / "hub", tmp_path / "cache" / "nobody___hub")
        assert texts(source_of(f"{prefix}hf:nobody/hub:red")) == ["red train"]
        assert sum(slept) <= 4


def test_saved_splits_are_read_by_name(tmp_path: Path) -> None:
    parts = {split: datasets.Dataset.from_dict({"text": [split]}) for split in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert texts(source_of(f"hf:{tmp_path / 'saved'}")) == ["train"]
    assert texts(source_of(f"hf:{tmp_path / 'saved'}:test")) == ["test"]
    assert texts(source_of(f"hf:{tmp_path / 'saved' / 'test'}")) == ["test"]
    assert texts(source_of(tmp_path / "saved" / "test")) == ["test"]


class Handler(SimpleHTTPRequestHandler):
    """Serves files without a line of log for each."""

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if not self.path.startswith("/torn"):
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'{"text": "a"}\n')


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Address of a server of the files in tmp_path."""
    with serving(tmp_path) as address:
        yield address


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Serve the files of a directory; yield the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(directory))) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_file_on_the_web_is_read_as_a_local_one(server: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'))
    pq.write_table(pa.table({"text": ["c"]}), tmp_path / "b.parquet")
    [gz, table] = parse_sources(f"{server}/a.jsonl.gz?version=2:0.25,{server}/b.parquet:0.75")
    assert (texts(gz.source), texts(table.source)) == (["a", "b"], ["c"])
    assert (gz.weight, table.weight) == (0.25, 0.75)
    before = table.source.fingerprint
    pq.write_table(pa.table({"text": ["changed"]}), tmp_path / "b.parquet")
    assert table.source.fingerprint != before
    (tmp_path / "bad.jsonl").write_text("bad")
    with pytest.raises(ValueError, match=f"^data.sources: {server}/bad.jsonl, line 1 is not JSON"):
        texts(source_of(f"{server}/bad.jsonl"))


def test_a_file_that_cannot_be_downloaded_is_named(server: str, tmp_path: Path) -> None:
    (tmp_path / "torn.jsonl").touch()
    with pytest.raises(ValueError, match=f"^data.sources: {server}/torn.jsonl was cut off after 14 of 1000 bytes"):
        texts(source_of(f"{server}/torn.jsonl"))
    message = r"none\.jsonl cannot be downloaded \(File not found\); check the address and the network, or download the"
    with pytest.raises(ValueError, match=message):
        texts(source_of(f"{server}/none.jsonl"))


def test_a_start_without_a_network_says_what_to_do(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Though the tokens are in the cache: which version they are of is known only from the server."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with serving(tmp_path) as server:
        sources = parse_sources(f"{server}/a.jsonl")
        tokenize_all(sources, tokenizer, tmp_path / "cache", vocab_size=512)
    with pytest.raises(ValueError) as refused:
        tokenize_all(sources, tokenizer, tmp_path / "cache", vocab_size=512)
    assert re.fullmatch(
        rf"data\.sources: the server of {server}/a\.jsonl cannot be reached for the version of the file \(.+\), which "
        r"every start compares with that of the cached tokens; check the address and the network; to start without a "
        r"network, download the file and give its path",
        str(refused.value),
    )
