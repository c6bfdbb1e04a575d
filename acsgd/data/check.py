"""Report on all records of sources."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import xxhash
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from acsgd.config.options import DataConfig
from acsgd.data.opened import open_sources
from acsgd.io.formats.base import Example
from acsgd.io.formats.formats import parts_of, read_each
from acsgd.io.sampling.encode import DocumentEncoder
from acsgd.io.sources.base import BadRecord, RecordCounts, Source
from acsgd.notes import print_note, report_if_slow

BATCH_CHARS = 2**20
"""Characters tokenized at a time."""
MAX_SHOWN = 10
"""Number of records of each finding that are named."""
BAR_CHARS = 40


@dataclass
class Finding:
    """Records with something in common."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    """Descriptions of the first of them."""

    def add(self, description: str) -> None:
        """Count a record."""
        self.count += 1
        if len(self.first) < MAX_SHOWN:
            self.first.append(description)


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
    findings: dict[str, Finding] = field(
        default_factory=lambda: {name: Finding() for name in ("malformed", "empty", "repeated", "too long")}
    )

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
    pending = 0  # tokens of a document whose end was not read yet

    def progress() -> str:
        fraction = f" {report.counts.fraction():.0%} of" if report.counts.fraction else ""
        rate = report.tokens / (time.monotonic() - started)
        return f"checking: read{fraction} {source.name}, {report.tokens / 1e6:.1f} M tokens, {rate / 1e6:.2f} M/s"

    with report_if_slow(print_note, progress):
        for batch in _batches(_examined(source, tokenizer, report)):
            encoded = encoder.encode([example for _, example in batch])
            ends = encoded.ends.tolist()
            places = [where for where, example in batch if example.ends_document]
            for where, length in zip(places, np.diff([-pending, *ends]).tolist(), strict=True):
                report.add_document(where, length)
            pending = len(encoded.tokens) - ends[-1] if ends else pending + len(encoded.tokens)
            report.tokens += len(encoded.tokens)
            report.targets += int(encoded.targets.sum())
    return report


def _examined(source: Source, tokenizer: PreTrainedTokenizerBase, report: Report) -> Iterator[tuple[str, Example]]:
    """Yield place and example of each record that can be read, long ones in parts. Records what is wrong with them."""
    seen: dict[bytes, str] = {}
    is_part = False
    for where, example in read_each(source, tokenizer, report.counts):
        if isinstance(example, BadRecord):
            report.findings["malformed"].add(f"{where} {example.reason}")
            continue
        if example.ends_document and not is_part:
            text = example.text
            first = seen.setdefault(xxhash.xxh3_128_digest(text.encode()), where)
            if not text.strip():
                report.findings["empty"].add(where)
            elif first is not where:
                report.findings["repeated"].add(f"{where} repeats {first}")
        is_part = not example.ends_document
        yield from ((where, part) for part in parts_of(example))


def _batches(examples: Iterator[tuple[str, Example]]) -> Iterator[Sequence[tuple[str, Example]]]:
    """Group examples into lists of about BATCH_CHARS characters."""
    chars = 0

    def number(pair: tuple[str, Example]) -> int:
        nonlocal chars
        chars += len(pair[1].text) + 1
        return chars // BATCH_CHARS

    for _, group in groupby(examples, key=number):
        yield list(group)


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
        for each in finding.first:
            console.print(Text(f"  {each}"))
        if finding.count > len(finding.first):
            console.print(Text(f"  ... and {finding.count - len(finding.first):,} more"))
