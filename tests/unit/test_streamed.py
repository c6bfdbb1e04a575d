"""Laws of streamed sources: read from any cursor on without what lies before it, and again after a lost connection."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from lib.sleeps import record_sleeps

from acsgd.io.data.sources import hub, remote, seekable, streamed
from acsgd.io.data.sources.base import BadRecord, ReadOptions, RecordCounts, SourceRecord
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.data.sources.streamed import Streamed

FIELDS = [{"text": f"zwölf {number}", "n": number} for number in range(40)]
GROUP = 7
"""Rows of a row group."""
Write = Callable[[Path, list[dict[str, object]]], None]


def lines(fields: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in fields).encode()


def write_arrow(path: Path, fields: list[dict[str, object]], new: Callable[..., Any] = pa.ipc.new_stream) -> None:
    table = pa.Table.from_pylist(fields)
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=GROUP)


def write_parquet(path: Path, fields: list[dict[str, object]]) -> None:
    pq.write_table(pa.Table.from_pylist(fields), path, row_group_size=GROUP)


WRITERS: dict[str, Write] = {
    ".jsonl": lambda path, fields: (path.write_bytes(lines(fields)), None)[1],
    ".jsonl.gz": lambda path, fields: (path.write_bytes(gzip.compress(lines(fields))), None)[1],
    ".jsonl.zst": lambda path, fields: (path.write_bytes(zstandard.compress(lines(fields))), None)[1],
    ".parquet": write_parquet,
    ".arrow": write_arrow,
}


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(seekable, "BATCH_ROWS", 5)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


def stream(name: str, on_error: str = "stop") -> Streamed:
    [(source, _)] = parse_sources(f"stream:{name}", options=[ReadOptions(on_error)])  # type: ignore[arg-type]
    assert isinstance(source, Streamed)
    return source


def read(
    source: Streamed, cursor: object = None, records: int = 0
) -> tuple[list[SourceRecord | BadRecord], list[tuple[object, int]]]:
    """Return the records from a cursor on, and the cursor and the count after each."""
    counts = RecordCounts(records, cursor=cursor)
    found, after = [], []
    for record in source.records(counts):
        found.append(record)
        after.append((json.loads(json.dumps(counts.cursor)), counts.records))
    return found, after


def fields_of(records: list[SourceRecord | BadRecord]) -> list[object]:
    return [dict(record.fields) for record in records if isinstance(record, SourceRecord)]


@pytest.fixture(params=[*WRITERS, "hf parquet", "hf jsonl", "hf saved"])
def name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A source of three files."""
    kind, directory = str(request.param), tmp_path / "data"
    if kind == "hf saved":
        datasets.Dataset.from_list(FIELDS).save_to_disk(directory, num_shards=3)
        return f"hf:{directory}"
    directory.mkdir()
    ending = f".{kind.split()[-1]}" if " " in kind else kind
    for number, part in enumerate((FIELDS[:25], FIELDS[25:33], FIELDS[33:])):
        WRITERS[ending](directory / f"train-{number}{ending}", part)
    return f"hf:{directory}" if " " in kind else f"{directory}/"


def test_a_source_is_read_from_any_record_on(name: str) -> None:
    records, after = read(stream(name))
    assert fields_of(records) == FIELDS
    assert [count for _, count in after] == list(range(1, 41))
    for number, (cursor, count) in enumerate(after, start=1):
        assert read(stream(name), cursor, count)[0] == records[number:], number


def test_an_arrow_file_is_read_as_a_stream_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    write_arrow(path, FIELDS, pa.ipc.new_file)
    records, after = read(stream(str(path)))
    assert fields_of(records) == FIELDS
    for number in range(len(FIELDS)):
        assert read(stream(str(path)), *after[number])[0] == records[number + 1 :]


def test_what_lies_before_the_cursor_is_not_read(tmp_path: Path) -> None:
    for ending, write in WRITERS.items():
        path = tmp_path / f"a{ending}"
        write(path, FIELDS)
        _, after = read(stream(str(path)))
        if ending in (".jsonl", ".parquet"):
            cursor, count = after[3 * GROUP - 1]
            raw = path.read_bytes()
            groups = pq.ParquetFile(path).metadata if ending == ".parquet" else None
            end = groups.row_group(3).column(0).dictionary_page_offset if groups else cursor[2]  # type: ignore[index]
            path.write_bytes(b"PAR1" + b"\xff" * (end - 4) + raw[end:])
            assert fields_of(read(stream(str(path)), cursor, count)[0]) == FIELDS[3 * GROUP :], ending
            with pytest.raises((ValueError, AssertionError)):
                assert fields_of(read(stream(str(path)))[0]) == FIELDS


def test_files_long_before_the_cursor_are_not_opened(name: str, tmp_path: Path) -> None:
    if "hf" in name and (tmp_path / "data" / "state.json").exists():
        pytest.skip("datasets maps all files that save_to_disk wrote")
    source = stream(name)
    _, after = read(source)
    first = min(path for path in (tmp_path / "data").iterdir())
    first.write_bytes(b"\xff" * first.stat().st_size)
    cursor, count = after[38]
    assert fields_of(read(source, cursor, count)[0]) == FIELDS[39:]


def test_copies_on_several_hosts_have_one_version_and_changed_ones_another(name: str, tmp_path: Path) -> None:
    version = stream(name).fingerprint
    (tmp_path / "data").rename(tmp_path / "copy")
    copy = name.replace("data", "copy")
    assert stream(copy).fingerprint == version
    path = max(path for path in (tmp_path / "copy").iterdir() if "-0" in path.name)
    raw = path.read_bytes()
    path.write_bytes(raw[:30] + bytes([raw[30] ^ 1]) + raw[31:])
    streamed._open.cache_clear()
    assert stream(copy).fingerprint != version


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_lines_that_cannot_be_read_are_named(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{ending}"
    text = b'\xef\xbb\xbf{"text": "one"}\n\n[1]\n{"text": "\xff"}\r\n{"text": "two"}'
    path.write_bytes(gzip.compress(text) if ending == ".jsonl.gz" else text)
    records, after = read(stream(str(path)))
    assert fields_of(records) == [{"text": "one"}, {"text": "two"}]
    bad = [record for record in records if isinstance(record, BadRecord)]
    assert [record.where for record in bad] == [f"{path}, line 3", f"{path}, line 4"]
    assert [count for _, count in after] == [1, 3, 4, 5]


def test_a_local_dataset_that_cannot_be_read_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_bytes(lines(FIELDS))
    source = stream(f"hf:{tmp_path / 'data'}")
    read(source)
    (tmp_path / "data" / "train.jsonl").write_bytes(b"[1")
    with pytest.raises(ValueError, match=r"hf:.*data cannot be read after row 0 \("):
        read(source)


@pytest.mark.parametrize("name", ["a.txt", "demo", "https://host/a.csv", "*.tsv"])
def test_what_cannot_be_streamed_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("a.txt", "b.tsv"):
        Path(file).write_text("x")
    with pytest.raises(ValueError, match=r"cannot be streamed, only .* without stream:"):
        stream(name)


def test_a_revision_of_a_dataset_can_be_named() -> None:
    assert hub.parse_name("hf:org/name@main:config:test") == ("org/name", "main", "config", "test")


# ---- http


class Server:
    """Serves one file. Counts bytes; may ignore ranges, cut responses off, or fail."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.has_ranges = True
        self.cut: list[int] = []
        """Lengths of the bodies of the next responses, bytes."""
        self.failures = 0
        """Number of next requests that fail."""
        self.starts: list[int] = []
        """First byte of each response to a GET."""

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.command == "GET" and self.failures:
            self.failures -= 1
            handler.send_error(503)
            return
        requested = handler.headers.get("Range") if self.has_ranges else None
        start = int(requested.removeprefix("bytes=").removesuffix("-")) if requested else 0
        body = self.content[start:]
        handler.send_response(206 if requested else 200)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("ETag", str(hash(self.content)))
        if requested:
            handler.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        handler.end_headers()
        if handler.command == "GET":
            self.starts.append(start)
            handler.wfile.write(body[: self.cut.pop(0)] if self.cut else body)


@contextlib.contextmanager
def serving(server: Server, ending: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(ConnectionError):  # the client has what it wants
                server.respond(self)

        do_HEAD = do_GET  # noqa: N815 (as http.server calls it)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}/a{ending}"
        finally:
            listening.shutdown()
            thread.join()


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were waited; nothing waits."""
    monkeypatch.setattr(streamed, "BUFFER_BYTES", 100)
    return record_sleeps(streamed, monkeypatch)


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("ending", WRITERS)
def test_a_file_at_an_address_is_read_from_any_record_on(
    ending: str, has_ranges: bool, delays: list[float], tmp_path: Path
) -> None:
    WRITERS[ending](tmp_path / "a", FIELDS)
    server = Server((tmp_path / "a").read_bytes())
    server.has_ranges = has_ranges
    with serving(server, ending) as address:
        records, after = read(stream(address))
        assert fields_of(records) == FIELDS
        server.starts.clear()
        cursor, count = after[30]
        assert read(stream(address), cursor, count)[0] == records[31:]
    if has_ranges and ending == ".jsonl":
        assert server.starts[-1] == cursor[2]  # type: ignore[index]
    assert not delays


@pytest.mark.parametrize("ending", WRITERS)
def test_files_of_fsspec_are_read_from_any_record_on(
    ending: str, store: str, delays: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And continue after an error of the file system."""
    WRITERS[ending](tmp_path / "a", FIELDS)
    files = fsspec.core.url_to_fs(store, skip_instance_cache=True)[0]
    for name in ("a", "b"):
        files.pipe(f"{store}/{name}{ending}", (tmp_path / "a").read_bytes())
    source = stream(store)
    records, after = read(source)
    assert fields_of(records) == [*FIELDS, *FIELDS]
    cursor, count = after[50]
    assert read(source, cursor, count)[0] == records[51:]
    assert not delays

    failures, opened = iter([OSError("reset"), OSError("reset")]), type(files).open

    def failing(*args: object, **options: object) -> object:
        for error in failures:
            with opened(files, f"{store}/0{ending}", "wb") as later:  # not of the files that were listed
                later.write(b"")
            raise error
        return opened(*args, **options)

    monkeypatch.setattr(type(files), "open", failing)
    assert read(source)[0] == records
    assert delays == [1.0, 2.0]


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_reading_continues_after_lost_connections(
    ending: str, delays: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    WRITERS[ending](tmp_path / "a", FIELDS)
    server = Server((tmp_path / "a").read_bytes())
    with serving(server, ending) as address:
        server.cut = [len(server.content) // 2, 0]
        server.failures = 2  # a later response of no byte at all counts on
        records, after = read(stream(address))
        assert fields_of(records) == FIELDS
        assert [count for _, count in after] == list(range(1, 41))
    assert delays == [1.0, 2.0] + ([1.0, 2.0] if ending == ".jsonl" else [4.0, 8.0])
    assert "trying again in 1 s" in capsys.readouterr().err


def test_a_connection_that_stays_lost_ends_with_the_cursor(delays: list[float]) -> None:
    server = Server(lines(FIELDS))
    server.cut = [200]
    with serving(server, ".jsonl") as address:
        records = stream(address).records(RecordCounts())
        next(records)
        server.failures = 10**6
        with pytest.raises(ValueError, match=r"8 times in a row, at \[0, 6, 174\]; check the network"):
            list(records)
    assert delays == [*streamed.DELAYS_S]


def test_a_file_that_changes_while_it_is_read_is_named(delays: list[float]) -> None:
    server = Server(lines(FIELDS))
    with serving(server, ".jsonl") as address:
        file = remote.RemoteFile(address)
        file.read(10)
        server.content = server.content[::-1]
        file.seek(50)
        with pytest.raises(ValueError, match="changed while it was read"):
            file.read(10)
        server.respond = lambda handler: handler.send_error(404)  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="404"):
            remote.RemoteFile(address).read(10)
