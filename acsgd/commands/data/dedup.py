"""Write the records of sources without their duplicates.

Memory grows by about 100 bytes for each record that is kept and, for near-duplicates, by another 4 KB.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from acsgd.commands.data.findings import Finding
from acsgd.failures.signals import build_until_stopped
from acsgd.io.data.formats.base import names_of
from acsgd.io.data.sources.base import TEXT, BadRecord, OnError, ReadOptions, RecordCounts, Source, SourceRecord
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.data.sources.streamed import refuse_streams
from acsgd.notes import print_note, report_if_slow

SHINGLE_WORDS = 5
"""Number of consecutive words whose sets are compared (Lee et al. 2022, "Deduplicating Training Data Makes Language
Models Better")."""
NUM_HASHES = 256
"""Length of a MinHash signature. The estimate of a similarity J has the standard deviation sqrt(J (1 - J) / 256)."""
RECALL = 0.99
"""Minimum probability that a pair with exactly the threshold's similarity is compared."""
SEED = 0
NOT_COMPARED = ("id", "idx", "index", "uuid", "url", "source", "timestamp", "meta", "metadata")
"""Fields that are not compared unless they are named."""


def dedup(names: str, output: Path, on: Sequence[str], near: float | None, on_error: OnError) -> None:
    """Write the first record of each group of equal or similar ones to a file of JSON lines, and print a report.

    Lines of JSON files are written as they are, other records as JSON. on: names of the fields that are compared;
    empty = all but NOT_COMPARED. near: similarity from which records are duplicates. Raises ValueError.
    """
    sources = [source for source, _ in parse_sources(names, key="source", options=[ReadOptions(on_error)])]
    refuse_streams(sources, "dedup")
    if output.suffix != ".jsonl":
        raise ValueError(f"--output={output} is not a file of JSON lines; write, for example, {output.stem}.jsonl")
    if os.path.lexists(output):
        raise ValueError(f"--output={output} exists already; give a file that does not, or remove it")
    writer = _Writer(on, None if near is None else NearDuplicates(near))

    def build(path: Path) -> None:
        with path.open("w", encoding="utf-8", newline="") as file, report_if_slow(print_note, writer.progress):
            for source in sources:
                writer.write(source, file)

    if not build_until_stopped(output, build):
        raise ValueError(f"--output={output} was created by another process meanwhile and is kept")
    print("\n".join(writer.report(output)))


class _Writer:
    """Writes records that are not duplicates of earlier ones."""

    def __init__(self, on: Sequence[str], near: NearDuplicates | None) -> None:
        self._on = on
        self._near = near
        self._seen: set[bytes] = set()
        self._read = self._kept = 0
        names = ("repeated", "similar", "unreadable") if near else ("repeated", "unreadable")
        self._left_out = {name: Finding() for name in names}

    def write(self, source: Source, file: IO[str]) -> None:
        """Write the new records of a source. Raises ValueError that names file and line of an unreadable one."""
        for record in _documents(source.records(RecordCounts())):
            self._read += 1
            compared = record if isinstance(record, BadRecord) else self._compared(record)
            if isinstance(compared, BadRecord):
                if source.options.on_error != "skip":
                    problem = f"{compared.where} {compared.reason}; {compared.remedy}"
                    raise ValueError(f"{problem}, or skip such records with --on-error skip")
                self._left_out["unreadable"].add(f"{compared.where} {compared.reason}")
                continue
            assert isinstance(record, SourceRecord)
            if finding := self._known(compared):
                self._left_out[finding].add(record.where)
                continue
            self._kept += 1
            line = json.dumps(record.fields, default=str) if record.line is None else record.line
            file.write(f"{line}\n")

    def progress(self) -> str:
        """Return a sentence on how far the records are read."""
        return f"deduplicating: {self._read:,} records read, {self._kept:,} kept"

    def report(self, output: Path) -> Iterator[str]:
        """Yield lines for the user."""
        left_out = ", ".join(f"{finding.count:,} {name}" for name, finding in self._left_out.items())
        yield f"{self._read:,} records: {self._kept:,} kept in {output}; left out: {left_out}"
        for name, finding in self._left_out.items():
            yield from [f"{name}:", *finding.lines()] if finding.count else []

    def _compared(self, record: SourceRecord) -> Mapping[str, Any] | BadRecord:
        """Return the fields that are compared."""
        if missing := [name for name in self._on if name not in record.fields]:
            reason = f'has no field "{missing[0]}"; its fields: {names_of(record.fields)}'
            return BadRecord(record.where, reason, "correct --on")
        names = self._on or [name for name in record.fields if name not in NOT_COMPARED]
        fields = {name: record.fields[name] for name in names}
        try:
            "".join(_texts(fields)).encode()
        except UnicodeEncodeError:
            return BadRecord(record.where, "has a lone surrogate, which is not valid text", "write the whole pair")
        return fields

    def _known(self, fields: Mapping[str, Any]) -> str | None:
        """Return what is wrong with a record: "repeated", "similar", or nothing. A new one is remembered."""
        digest = xxhash.xxh3_128_digest(json.dumps(fields, sort_keys=True, default=str).encode())
        if digest in self._seen:
            return "repeated"
        if self._near and not self._near.add("\n".join(_texts(fields))):
            return "similar"
        self._seen.add(digest)
        return None


class NearDuplicates:
    """Texts, of which none is similar to another one.

    Similarity: of the sets of SHINGLE_WORDS consecutive words, size of the intersection by that of the union (Jaccard),
    estimated by MinHash (Broder 1997); candidates are found by locality-sensitive hashing.
    """

    def __init__(self, threshold: float) -> None:
        """Raises ValueError if the library is not installed."""
        if importlib.util.find_spec("rensa") is None:
            raise ValueError(f'--near={threshold} needs rensa: pip install "acsgd[dedup]"')
        from rensa import RMinHashLSH

        self._threshold = threshold
        self._index = RMinHashLSH(threshold, NUM_HASHES, NUM_HASHES // rows_per_band(threshold))
        self._signatures: list[np.ndarray[Any, np.dtype[np.uint32]]] = []

    def add(self, text: str) -> bool:
        """Add a text and return True, unless it is similar to an earlier one."""
        from rensa import RMinHash

        hashes = RMinHash(NUM_HASHES, SEED)
        hashes.update(shingles(text))
        signature = np.array(hashes.digest(), dtype=np.uint32)
        candidates = self._index.query(hashes)
        if any((self._signatures[key] == signature).mean() >= self._threshold for key in candidates):
            return False
        self._index.insert(len(self._signatures), hashes)
        self._signatures.append(signature)
        return True


def shingles(text: str) -> list[str]:
    """Return the sets of consecutive words that are compared, without case; of a short text, all of its words."""
    words = text.lower().split()
    count = max(1, len(words) - SHINGLE_WORDS + 1)
    return sorted({" ".join(words[start : start + SHINGLE_WORDS]) for start in range(count)})


def rows_per_band(threshold: float) -> int:
    """Return the number of hashes that candidates have in common in a band: the largest one with RECALL."""
    powers = (2**power for power in range(NUM_HASHES.bit_length() - 1, 0, -1))
    return next((rows for rows in powers if 1 - (1 - threshold**rows) ** (NUM_HASHES // rows) >= RECALL), 1)


def _documents(records: Iterator[SourceRecord | BadRecord]) -> Iterator[SourceRecord | BadRecord]:
    """Yield records, with the pieces of a long text as one."""
    pieces: list[str] = []
    for record in records:
        if isinstance(record, BadRecord) or (record.ends_document and not pieces):
            yield record
            continue
        pieces.append(record.fields[TEXT])
        if record.ends_document:
            yield record._replace(fields={TEXT: "".join(pieces)})
            pieces = []


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value, in order."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif value is not None:
        yield str(value)
