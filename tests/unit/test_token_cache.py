"""Laws of tokenization under faults of the disk and of other processes."""

from __future__ import annotations

import os
import re
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zstandard
from lib.corpora import tokenize_all, windows_of
from transformers import PreTrainedTokenizerFast

from acsgd import notes as notes_module
from acsgd.errors import CorruptFileError, RunError
from acsgd.io.data.batches import BatchReader, Dataset
from acsgd.io.data.sampler import Sampler
from acsgd.io.data.sources.base import BadRecord, RecordCounts, SourceRecord
from acsgd.io.data.sources.files import Files
from acsgd.io.data.sources.sources import WeightedSource, parse_sources
from acsgd.io.data.tokens import tokens as tokens_module
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.files import arrays
from acsgd.io.files import entry as entry_module


def test_damaged_tokens_are_found_and_tokenized_again(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At the start if a file has another length or the damage is in the sample, else when training reads it."""
    text = tmp_path / "a.txt"
    text.write_text(" ".join(map(str, range(20_000))))
    monkeypatch.setattr(entry_module, "BLOCK_BYTES", 64)  # so that the sample leaves most blocks unread
    monkeypatch.setattr(arrays, "NEAR_BYTES", 64)

    def opened() -> list[Corpus]:
        return tokenize_all(parse_sources(str(text)), tokenizer, tmp_path / "cache", vocab_size=512)

    def read_all(corpora: list[Corpus]) -> list[torch.Tensor]:
        rows = windows_of(corpora, 16, 1)
        size = len(rows.rows[0])
        sampler = Sampler(seed=0, batch=size, counts=(1,), sizes=(size,))
        batches = Dataset(BatchReader(rows, sampler, range(size)), range(1))
        return [batch.inputs["input_ids"] for batch in batches if batch.inputs is not None]

    [intact] = read_all(opened())
    [entry] = (tmp_path / "cache").iterdir()
    path = entry / "tokens.npy"
    raw = path.read_bytes()
    last = len(raw) - 1
    cases = {
        "empty": b"",
        "short": raw[:-1],
        "long": raw + b"\0",
        "header": b"x" + raw[1:],
        "sampled": raw[:128] + bytes([raw[128] ^ 1]) + raw[129:],
        "last": raw[:last] + bytes([raw[last] ^ 1]),
        "middle": raw[: last // 2] + bytes([raw[last // 2] ^ 1]) + raw[last // 2 + 1 :],
    }
    late = []
    for name, damaged in cases.items():
        path.write_bytes(damaged)
        capsys.readouterr()
        corpora = opened()
        note = capsys.readouterr().err
        if not note:
            late.append(name)
            with pytest.raises(CorruptFileError) as found:
                read_all(corpora)
            assert str(found.value).startswith(f"{path} is corrupt: bytes "), name
            assert str(found.value).endswith("; start again, and the text is tokenized again"), name
            corpora = opened()
            note = capsys.readouterr().err
        assert note.startswith(f"{entry}"), name
        assert note.endswith(f"; {entry} is built again now\n"), name
        assert path.read_bytes() == raw, name
        assert torch.equal(read_all(corpora)[0], intact), name
    assert "middle" in late
    assert "sampled" not in late


def test_tokens_that_are_cut_off_under_a_run_are_an_error(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """A memory-mapped file would end the process with SIGBUS."""
    path = tmp_path / "a.txt"
    path.write_text("some words " * 1000)
    corpora = tokenize_all(parse_sources(str(path)), tokenizer, tmp_path / "cache", vocab_size=512)
    [entry] = (tmp_path / "cache").iterdir()
    fingerprint = [corpus.fingerprint() for corpus in corpora]
    os.truncate(entry / "tokens.npy", 1)
    with pytest.raises(CorruptFileError, match=r"tokens\.npy is corrupt: it was cut from \d+ to 1 bytes; start again"):
        corpora[0].tokens[:16]
    again = tokenize_all(parse_sources(str(path)), tokenizer, tmp_path / "cache", vocab_size=512)
    assert [corpus.fingerprint() for corpus in again] == fingerprint


class GrowingFile(Files):
    """A file to which another process appends while it is read."""

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        yield from super().records(counts)
        with open(self.name, "a") as file:
            file.write('{"text": "more"}\n')


def test_a_file_that_changes_while_it_is_tokenized_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one two three"}\n')
    sources = [WeightedSource(GrowingFile(str(path)), 1.0)]
    with pytest.raises(ValueError) as refused:
        tokenize_all(sources, tokenizer, tmp_path / "cache", vocab_size=512)
    message = f"data.sources: {path} changed while it was tokenized; start again when it is complete"
    assert str(refused.value) == message
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_is_one_sentence(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The limit of the size of files stands for the disk: the system refuses the write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(RunError, match=r"/cache/demo-\w+: File too large; raise the limit"):
            tokenize_all(parse_sources("demo"), tokenizer, tmp_path / "cache", vocab_size=512)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_a_source_may_have_the_longest_name(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 125 + "s.txt")
    path.write_text("some words")
    tokens = tokenize_all(parse_sources(str(path)), tokenizer, tmp_path / "cache", vocab_size=512)[0].tokens
    assert len(tokens) > 2


class SlowFile(Files):
    """A file whose second half is read when `go_on` is set."""

    go_on = threading.Event()

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        for record in super().records(counts):
            yield record
            assert self.go_on.wait(60)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_a_long_tokenization_reports_its_progress(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    lines = b"".join(b'{"text": "%s"}\n' % os.urandom(500).hex().encode() for _ in range(100))
    path = tmp_path / f"a{suffix}"
    path.write_bytes(zstandard.compress(lines) if suffix.endswith("zst") else lines)
    notes: list[str] = []
    slow = SlowFile(str(path))
    slow.go_on.clear()
    monkeypatch.setattr(notes_module, "FIRST_REPORT_S", 0.01)

    def note(text: str) -> None:
        if "%" in text:  # the first report may come before the first record
            notes.append(text)
            slow.go_on.set()

    monkeypatch.setattr(notes_module, "NEXT_REPORT_S", 0.01)
    monkeypatch.setattr(tokens_module, "print_note", note)
    tokenize_all([WeightedSource(slow, 1.0)], tokenizer, tmp_path / "cache", vocab_size=512)
    assert re.fullmatch(rf"tokenizing \d+% of {path}: 0\.0 M tokens, 0\.\d\d M/s, \d:\d\d:\d\d left", notes[0])
