"""Report on all records of sources."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from acsgd.commands.data.findings import Finding, LabelCounts
from acsgd.commands.data.show import open_sources, unused_run
from acsgd.config.options import DataConfig, ModelConfig
from acsgd.io.data.formats.formats import describe_unused
from acsgd.io.data.row_spec import RowSpec
from acsgd.io.data.sources.base import BadRecord, RecordCounts, Source
from acsgd.io.data.tokens.encode import Encoded, Encoder
from acsgd.io.data.tokens.pipeline import RecordPart, encode_source, progress
from acsgd.notes import print_note, report_if_slow
from acsgd.tasks import find_task
from acsgd.tasks.base import RowContext, Task

BAR_CHARS = 40
NOTHING = "nothing learned"
INVALID = ("malformed", "empty")
OTHER_FINDINGS = ("repeated", "too long", "special tokens in messages", NOTHING)
NUMBER, MAX_NUMBER = re.compile("[1-9][0-9]{0,11}"), 10**12
"""Numbers of lines, and what is above them."""
MAX_TOKENS = 2**24
"""Maximum number of tokens of an example with a label, or of a prompt or a target sequence."""


@dataclass
class SourceReport:
    """What was found in one source."""

    name: str
    task: Task
    sequence: int | None
    """Length above which a document is too long, tokens."""
    labels: LabelCounts | None
    """None for tasks without labels."""
    counts: RecordCounts = field(default_factory=RecordCounts)
    documents: int = 0
    tokens: int = 0
    targets: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    """Number of documents by the number of bits of their length: 3 = 4 to 7 tokens."""
    findings: dict[str, Finding] = field(init=False)

    def __post_init__(self) -> None:
        self.findings = {name: Finding() for name in (*self._invalid, *OTHER_FINDINGS)}

    @property
    def _invalid(self) -> Sequence[str]:
        """Names of findings that make a source invalid."""
        return INVALID if self.labels is None else (*INVALID, self.labels.finding)

    @property
    def is_valid(self) -> bool:
        """Whether no record is malformed or empty, or has a label that the model cannot learn, and some are learned."""
        is_learned = self.findings[NOTHING].count < self.documents
        return is_learned and not any(self.findings[name].count for name in self._invalid)

    def add_bad(self, record: BadRecord) -> None:
        """Count a record that is left out."""
        finding = self.findings["malformed"]
        if self.labels is not None and record.label is not None:
            finding = self.findings[self.labels.finding]
            self.labels.add_other(record.label)
        finding.add(f"{record.where} {record.reason}")
        finding.remedy = finding.remedy or record.remedy

    def add_documents(
        self, places: Sequence[str], lengths: NDArray[np.int64], first_targets: Sequence[int | None], encoded: Encoded
    ) -> None:
        """Count documents.

        places: of their last parts; lengths: numbers of tokens; first_targets: places of their first target tokens.
        """
        in_rows, limit = self.task.tokens_in_row(lengths, encoded), self.sequence if self.task.has_documents else None
        for where, tokens, in_row, first in zip(places, lengths.tolist(), in_rows.tolist(), first_targets, strict=True):
            self.documents += 1
            if first is None:
                self.findings[NOTHING].add(where)
            elif limit is not None and first > limit:  # a row has a token more than inputs, as its last label
                self.findings[NOTHING].add(f"{where}: in its first {limit} tokens")
            self.lengths[tokens.bit_length()] += 1
            if self.sequence is not None and in_row > self.sequence:
                self.findings["too long"].add(f"{where}: {in_row} tokens")
        if self.labels is not None:
            self.labels.add(encoded.labels)


def check(data: DataConfig, model: ModelConfig, sequence: int | None, typed: Callable[[str], str]) -> bool:
    """Print a report on each source; return whether all are valid. Raises ValueError.

    sequence: see SourceReport; typed: returns a message with the options of the command.
    """
    task, (sources, tokenizer, config, _) = find_task(model.task), open_sources(data, model)
    data = replace(data, sequence=MAX_TOKENS, long="truncate")
    spec = RowSpec.of(unused_run(data, model), task, config, tokenizer, ())
    context = RowContext(spec, config, tokenizer, model.name, Path())
    console = Console(soft_wrap=True, highlight=False)
    reports, seen = [], FirstPlaces()
    for source in sources:
        labels = task.labels(config)
        counts = None if labels is None else LabelCounts(labels)
        report = SourceReport(source.name, task, sequence, counts)
        reports.append(_examine(source, tokenizer, task.encoder(context), report, seen))
    for report in reports:
        _print(report, console, typed)
    for sentence in describe_unused(data, {report.counts.format for report in reports} - {""}):
        console.print(Text(typed(sentence), style="bold"))
    return all(report.is_valid for report in reports)


def _examine(
    source: Source, tokenizer: PreTrainedTokenizerBase, encoder: Encoder, report: SourceReport, seen: FirstPlaces
) -> SourceReport:
    """Read and tokenize a source; return the report, which is completed. seen: of earlier sources; updated."""
    started, texts = time.monotonic(), _Texts(report, seen)
    pending = 0  # tokens of a document whose end was not read yet
    first: int | None = None  # place of its first target token

    def describe() -> str:
        return progress("checking", source, report.counts, report.tokens, time.monotonic() - started)

    with report_if_slow(print_note, describe):
        for parts, encoded, bad, _ in encode_source(source, tokenizer, encoder, report.counts):
            for record in bad:
                report.add_bad(record)
            for part in parts:
                texts.add(part)
            ends = encoded.ends.tolist()
            places = [part.where for part in parts if part.example.ends_document]
            starts, targets, firsts = [-pending, *ends], np.flatnonzero(encoded.targets), list[int | None]()
            for start, stop in pairwise([*starts, len(encoded.tokens)]):
                here = targets[np.searchsorted(targets, start) : np.searchsorted(targets, stop)]
                if first is None and len(here):
                    first = int(here[0]) - start
                firsts, first = [*firsts, first], None
            first = firsts.pop()
            report.add_documents(places, np.diff(starts), firsts, encoded)
            pending = len(encoded.tokens) - starts[-1]
            report.tokens += len(encoded.tokens)
            report.targets += int(encoded.targets.sum())
    return report


class FirstPlaces:
    """Places of the first documents with each text, in up to 140 bytes each: a hash, and numbers of file and line."""

    def __init__(self) -> None:
        self._places = dict[int, int]()
        self._prefixes: list[str] = []
        """Places without their numbers, those of lines of a file once."""

    def find_or_add(self, digest: int, where: str) -> str | None:
        """Return the place that was added for a hash; if there is none, add `where`."""
        if (place := self._places.get(digest)) is not None:
            index, number = divmod(place, MAX_NUMBER)
            return f"{self._prefixes[index]} {number}" if number else self._prefixes[index]
        prefix, _, digits = where.rpartition(" ")
        if not NUMBER.fullmatch(digits):
            prefix, digits = where, "0"
        if self._prefixes[-1:] != [prefix]:
            self._prefixes.append(prefix)
        self._places[digest] = (len(self._prefixes) - 1) * MAX_NUMBER + int(digits)
        return None


class _Texts:
    """Texts of documents, of which those that are empty or repeated are reported."""

    def __init__(self, report: SourceReport, seen: FirstPlaces) -> None:
        self._findings = report.findings
        self._seen = seen
        self._hash, self._is_empty = xxhash.xxh3_128(), True

    def add(self, part: RecordPart) -> None:
        """Add the next part of a document."""
        self._hash.update(part.example.text.encode())
        self._is_empty = self._is_empty and not part.example.text.strip()
        if not part.example.ends_document:
            return
        first = self._seen.find_or_add(self._hash.intdigest(), part.where)
        if part.example.control_token is not None:
            self._findings["special tokens in messages"].add(f"{part.where}: {part.example.control_token}")
        if self._is_empty:
            self._findings["empty"].add(part.where)
        elif first is not None:
            self._findings["repeated"].add(f"{part.where} repeats {first}")
        self._hash, self._is_empty = xxhash.xxh3_128(), True


def _print(report: SourceReport, console: Console, typed: Callable[[str], str]) -> None:
    learned = f", {report.targets:,} of them learned" if report.labels is None else ""
    lines = [
        f"{report.name}: {report.counts.describe_format()}",
        f"{report.counts.records:,} records, {report.documents:,} documents, {report.tokens:,} tokens{learned}",
    ]
    lines += filter(None, (report.counts.unread_summary(), report.counts.unknown_summary()))
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
    for line in report.labels.lines() if report.labels is not None else ():
        console.print(Text(line))
    for name, finding in report.findings.items():
        console.print(Text(f"{name}: {finding.count:,}", style="bold" if finding.count else ""))
        for line in finding.lines():
            console.print(Text(line))
        if finding.remedy:
            console.print(Text(f"  for the first: {typed(finding.remedy)}"))
