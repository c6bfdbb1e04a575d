"""Report on all records of sources."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import xxhash
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from acsgd.config.options import DataConfig
from acsgd.data.findings import Finding
from acsgd.data.opened import open_sources
from acsgd.io.sampling.encode import DocumentEncoder
from acsgd.io.sampling.pipeline import Part, encode_source, progress
from acsgd.io.sources.base import RecordCounts, Source
from acsgd.notes import print_note, report_if_slow

BAR_CHARS = 40
FINDINGS = ("malformed", "empty", "repeated", "too long", "special tokens in messages")


@dataclass
class Report:
    """What was found in one source."""

    name: str
    sequence: int | None
    """Length above which a document is too long, tokens."""
    counts: RecordCounts = field(default_factory=RecordCounts)
    documents: int = 0
    tokens: int = 0
    targets: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    """Number of documents by the number of bits of their length: 3 = 4 to 7 tokens."""
    findings: dict[str, Finding] = field(default_factory=lambda: {name: Finding() for name in FINDINGS})

    @property
    def is_valid(self) -> bool:
        """Whether no record is malformed or empty."""
        return not (self.findings["malformed"].count or self.findings["empty"].count)

    def add_document(self, where: str, tokens: int) -> None:
        """Count a document. where: place of its last part."""
        self.documents += 1
        self.lengths[tokens.bit_length()] += 1
        if self.sequence is not None and tokens > self.sequence:
            self.findings["too long"].add(f"{where}: {tokens} tokens")


def check(data: DataConfig, model: str, sequence: int | None) -> bool:
    """Print a report on each source; return whether all are valid. Raises ValueError.

    sequence: as of Report.
    """
    sources, tokenizer = open_sources(data, model)
    console = Console(soft_wrap=True, highlight=False)
    reports = [_examine(source, tokenizer, sequence) for source in sources]
    for report in reports:
        _print(report, console)
    return all(report.is_valid for report in reports)


def _examine(source: Source, tokenizer: PreTrainedTokenizerBase, sequence: int | None) -> Report:
    """Read and tokenize a source."""
    report, encoder, started = Report(source.name, sequence), DocumentEncoder(tokenizer), time.monotonic()
    texts = _Texts(report)
    pending = 0  # tokens of a document whose end was not read yet

    def describe() -> str:
        return progress("checking", source, report.counts, report.tokens, time.monotonic() - started)

    with report_if_slow(print_note, describe):
        for parts, encoded, bad, _ in encode_source(source, tokenizer, encoder, report.counts):
            for record in bad:
                report.findings["malformed"].add(f"{record.where} {record.reason}")
            for part in parts:
                texts.add(part)
            ends = encoded.ends.tolist()
            places = [part.where for part in parts if part.example.ends_document]
            for where, length in zip(places, np.diff([-pending, *ends]).tolist(), strict=True):
                report.add_document(where, length)
            pending = len(encoded.tokens) - ends[-1] if ends else pending + len(encoded.tokens)
            report.tokens += len(encoded.tokens)
            report.targets += int(encoded.targets.sum())
    return report


class _Texts:
    """Texts of documents, of which those that are empty or repeated are reported."""

    def __init__(self, report: Report) -> None:
        self._findings = report.findings
        self._seen: dict[bytes, str] = {}
        self._hash, self._is_empty = xxhash.xxh3_128(), True

    def add(self, part: Part) -> None:
        """Add the next part of a document."""
        self._hash.update(part.example.text.encode())
        self._is_empty = self._is_empty and not part.example.text.strip()
        if not part.example.ends_document:
            return
        first = self._seen.setdefault(self._hash.digest(), part.where)
        if part.example.control_token is not None:
            self._findings["special tokens in messages"].add(f"{part.where}: {part.example.control_token}")
        if self._is_empty:
            self._findings["empty"].add(part.where)
        elif first is not part.where:
            self._findings["repeated"].add(f"{part.where} repeats {first}")
        self._hash, self._is_empty = xxhash.xxh3_128(), True


def _print(report: Report, console: Console) -> None:
    lines = [
        f'{report.name}: format "{report.counts.format}"',
        f"{report.counts.records:,} records, {report.documents:,} documents, {report.tokens:,} tokens, "
        f"{report.targets:,} of them learned",
    ]
    console.print(Text("\n".join(lines), style="bold"))
    table = Table("tokens", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("documents", justify="right")
    table.add_column("")
    most = max(report.lengths.values(), default=1)
    for bits in sorted(report.lengths):
        count = report.lengths[bits]
        span = "0" if not bits else f"{2 ** (bits - 1):,} to {2**bits - 1:,}"
        table.add_row(span, f"{count:,}", "█" * -(-count * BAR_CHARS // most))
    console.print(table)
    for name, finding in report.findings.items():
        console.print(Text(f"{name}: {finding.count:,}", style="bold" if finding.count else ""))
        for line in finding.lines():
            console.print(Text(line))
