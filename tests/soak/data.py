"""Sources of text: files in many valid forms, and the same files damaged."""

from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from acsgd.io.data.sources.base import ReadOptions
from acsgd.io.data.sources.sources import parse_sources
from acsgd.shards.config import read_config
from acsgd.shards.tokenizer import load_tokenizer
from tests.lib.corpora import tokenize_all
from tests.lib.forks import save_model
from tests.soak.area import ACCEPTED, Case, Outcome
from tests.soak.mutate import changed_bytes, shown
from tests.soak.oracle import attempt_start

MAX_BYTES = 4_000_000
"""Length of the longest document, bytes. Tokenized in bounded memory, it takes less than the area's memory."""
CHARACTERS = "abcdefghij  ,.\n\n\t\r\x0b\x0c\x1c\x85\u2028\ufeffäß€中😀\0"
END = 0
"""End-of-document token of the model."""


class Line(NamedTuple):
    """One line of a file."""

    data: bytes
    text: str | None
    """Document of the line; None if it has none, or is unreadable."""
    is_readable: bool = True


class Data:
    """Sources whose tokens are compared with their text. Tokens of the model are bytes."""

    deadline_s: ClassVar[float] = 240.0
    memory_bytes: ClassVar[int] = 600 * 2**20

    @classmethod
    def prepare(cls, directory: Path) -> None:
        """Write a model, for its tokenizer."""
        save_model(directory / "model")

    def __init__(self, directory: Path) -> None:
        model = directory / "model"
        config = read_config(model)
        self._tokenizer = load_tokenizer(model, config)
        self._vocab_size = config.vocab_size
        tokens = [self._tokenizer.convert_ids_to_tokens(i) for i in range(1, 257)]
        self._byte_of = {i + 1: _byte(token) for i, token in enumerate(tokens)}

    def run(self, case: Case) -> Outcome:
        """Tokenize a file, valid or damaged."""
        draw = case.draw
        runs = [self._valid, self._records, self._bad_lines, self._bad_lines, self._damaged, self._damaged]
        return draw.choice(runs)(case)

    def _valid(self, case: Case) -> Outcome:
        """Tokenize a valid file: it must give its text."""
        lines, name = _jsonl(case.draw) if case.draw.random() < 0.7 else _text(case.draw)
        path = _write(case.draw, name, b"".join(line.data for line in lines))
        case.describe(f"{path.name} with {len(lines)} lines, the longest of {max(len(x.data) for x in lines)} bytes")
        outcome = self._tokens(path, "stop")
        texts = [line.text for line in lines if line.text is not None]
        return self._compare(outcome, texts, path)

    def _records(self, case: Case) -> Outcome:
        """Tokenize records of a file that is not one line per record: it must give their texts."""
        data, name, texts = _table(case.draw)
        Path(name).write_bytes(data)
        case.describe(f"{name} with {len(texts)} records, {len(data)} bytes")
        return self._compare(self._tokens(Path(name), "stop"), texts, Path(name))

    def _bad_lines(self, case: Case) -> Outcome:
        """Tokenize JSON lines of which some are unreadable: refused with the first, or without them."""
        draw = case.draw
        lines, name = _jsonl(draw)
        for _ in range(draw.choice([1, 1, 3])):
            lines.insert(draw.randrange(len(lines) + 1), draw.choice(BAD_LINES))
        if not lines[-1].data.endswith(b"\n"):
            lines[-1] = lines[-1]._replace(data=lines[-1].data + b"\n")
        lines = [line if line.data.endswith(b"\n") else line._replace(data=line.data + b"\n") for line in lines]
        on_error = draw.choice(["stop", "skip"])
        path = _write(draw, name, b"".join(line.data for line in lines))
        bad = [number for number, line in enumerate(lines, start=1) if not line.is_readable]
        case.describe(
            f"{path.name} with lines {bad} of {len(lines)} unreadable, {shown(lines[bad[0] - 1].data)}, {on_error}"
        )
        outcome = self._tokens(path, on_error)
        if on_error == "stop":
            assert isinstance(outcome, Outcome), "an unreadable line was accepted"
            assert f"line {bad[0]} " in outcome.text, f"line {bad[0]} is not named: {outcome.text}"
            return outcome
        return self._compare(outcome, [line.text for line in lines if line.text is not None], path)

    def _damaged(self, case: Case) -> Outcome:
        """Tokenize a file with changed bytes: refused with a sentence, or tokens of the vocabulary."""
        draw = case.draw
        if draw.random() < 0.4:
            content, name, _ = _table(draw)
            path = Path(name)
            path.write_bytes(content)
        else:
            lines, name = _jsonl(draw) if draw.random() < 0.5 else _text(draw)
            path = _write(draw, name, b"".join(line.data for line in lines))
        data, change = changed_bytes(draw, path.read_bytes())
        path.write_bytes(data)
        on_error = draw.choice(["stop", "skip"])
        case.describe(f"{path.name}: {change}, {on_error}")
        outcome = self._tokens(path, on_error)
        if isinstance(outcome, Outcome):
            return outcome
        self._text_of(outcome)
        return ACCEPTED

    def _tokens(self, path: Path, on_error: str) -> np.ndarray | Outcome:
        """Return the tokens of a file, or the sentence with which it is refused."""

        def call() -> np.ndarray:
            sources = parse_sources(path.name, options=[ReadOptions(on_error=on_error)])  # type: ignore[arg-type]
            [corpus] = tokenize_all(sources, self._tokenizer, Path("tokens"), vocab_size=self._vocab_size)
            return corpus.tokens[:]

        return attempt_start(call, [path.name])

    def _compare(self, outcome: np.ndarray | Outcome, texts: list[str], path: Path) -> Outcome:
        """Compare tokens with the texts that they must give; texts that are too short may be refused."""
        if isinstance(outcome, Outcome):
            size = sum(len(text.encode()) for text in texts)
            assert size < 2, f"a valid file was refused: {outcome.text}"
            return outcome
        expected = [text.encode() for text in texts]
        assert self._text_of(outcome) == expected, f"{path.name} gives another text"
        return ACCEPTED

    def _text_of(self, tokens: np.ndarray) -> list[bytes]:
        """Return the documents that tokens encode."""
        values = tokens.tolist()
        assert set(values) <= self._byte_of.keys() | {END}, "tokens beyond the vocabulary"
        assert values[-1] == END, "the last document has no end"
        texts, start = [], 0
        for end in np.flatnonzero(tokens == END).tolist():
            texts.append(bytes(self._byte_of[token] for token in values[start:end]))
            start = end + 1
        return texts


def _byte(token: str) -> int:
    """Return the byte that a token of the byte-level alphabet stands for."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if ord(token) in printable:
        return ord(token)
    return [byte for byte in range(256) if byte not in printable][ord(token) - 256]


def _any_text(draw: random.Random) -> str:
    length = draw.choice([0, 1, 3, 20, 20, 200, 200, 5000])
    return "".join(draw.choices(CHARACTERS, k=length))


def _long_text(draw: random.Random) -> str:
    part = draw.choice(["a", "ä", "a b ", "a b\n"])
    return part * (MAX_BYTES // len(part.encode()))


def _jsonl(draw: random.Random) -> tuple[list[Line], str]:
    """Return lines of JSON in many valid forms, and the name of their file."""
    lines = []
    for number in range(draw.choice([1, 2, 5, 30])):
        text = _any_text(draw)
        if number == 0 and draw.random() < 0.01:
            text = _long_text(draw)
        record = {"text": text} | draw.choice([{}, {}, {"id": number}, {"meta": {"text": 1, "nested": [None, 1e5]}}])
        if draw.random() < 0.3:
            record = dict(reversed(record.items()))
        separators = draw.choice([None, (",", ":"), (" , ", " :\t")])
        data = json.dumps(record, ensure_ascii=draw.random() < 0.5, separators=separators)
        data = draw.choice(["", "", "", " ", "\t"]) + data + draw.choice(["", "", " ", "  "])
        lines.append(Line(data.encode() + draw.choice([b"\n", b"\n", b"\r\n"]), text))
        if draw.random() < 0.1:
            lines.append(Line(draw.choice([b"\n", b"  \n", b"\r\n"]), None))
    if draw.random() < 0.3:
        lines[-1] = lines[-1]._replace(data=lines[-1].data.rstrip(b"\r\n"))
    return lines, draw.choice(["a.jsonl", "a.jsonl", "a.jsonl.zst", "ä b.jsonl"])


def _table(draw: random.Random) -> tuple[bytes, str, list[str]]:
    """Return a file of records, its name, and the texts of the records."""
    texts = [_any_text(draw) for _ in range(draw.choice([1, 2, 30]))]
    records = [{"n": number, "text": text, "more": {"a": [number]}} for number, text in enumerate(texts)]
    table, out = pa.Table.from_pylist(records), io.BytesIO()
    name = draw.choice(["a.parquet", "a.arrow", "b.arrow", "a.json", "a.jsonl.gz"])
    if name.endswith(".parquet"):
        pq.write_table(table, out, row_group_size=draw.choice([1, 7, 100]))
    elif name.endswith(".arrow"):
        with (pa.ipc.new_file if name == "a.arrow" else pa.ipc.new_stream)(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=draw.choice([1, 7, 100]))
    elif name.endswith(".json"):
        out.write(json.dumps(records, indent=draw.choice([None, 1]), ensure_ascii=draw.random() < 0.5).encode())
    else:
        out.write(gzip.compress(b"".join(json.dumps(record).encode() + b"\n" for record in records)))
    return out.getvalue(), name, texts


def _text(draw: random.Random) -> tuple[list[Line], str]:
    """Return a file that is one document."""
    text = _any_text(draw) + "ab"
    if draw.random() < 0.01:
        text = _long_text(draw)
    read = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return [Line(text.encode(), read)], "a.txt"


def _write(draw: random.Random, name: str, data: bytes) -> Path:
    """Write a file, perhaps with a byte-order mark; if its name ends in .zst, in one frame or several."""
    path = Path(name)
    if draw.random() < 0.1:
        data = b"\xef\xbb\xbf" + data.removeprefix(b"\xef\xbb\xbf")
    if path.suffix != ".zst":
        path.write_bytes(data)
        return path
    out, cuts = io.BytesIO(), sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice([0, 0, 1, 3])))
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        compressor = zstandard.ZstdCompressor(
            level=draw.choice([1, 3, 19]), write_checksum=draw.random() < 0.5, write_content_size=draw.random() < 0.5
        )
        out.write(compressor.compress(data[start:end]))
    path.write_bytes(out.getvalue())
    return path


BAD_LINES = [
    Line(data + b"\n", None, is_readable=False)
    for data in (
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"text"',
        b"text",
        b"{}",
        b'{"text": 1}',
        b'{"text": null}',
        b'{"text": ["a"]}',
        b'{"Text": "a"}',
        b'{"text": "a"',
        b'{"text": "a"} {"text": "b"}',
        b'{"text": "a"},',
        b"{'text': 'a'}",
        b'{"text": "a\xff"}',
        b'{"text": "\xe4"}',
        b'{"text": "\\ud800"}',
        b'{"text": "\\udc00\\ud800"}',
        b'{"text": "a\tb"}',
        b'{"text": "\\x"}',
        b'{"text": "a", "n": ' + b"9" * 5000 + b"}",
        b'{"text": "a", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"[" * 100_000,
        b"\0",
        b"\xff\xfe",
    )
]
"""Lines that have no document."""
