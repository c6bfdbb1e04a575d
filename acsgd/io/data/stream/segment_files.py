"""Segments of streamed sources on disk: cache entries with the arrays of a corpus and its layout, and about.json."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from acsgd.errors import CorruptFileError
from acsgd.io.data.stream.segments import StreamSegment
from acsgd.io.data.stream.state import SegmentStart
from acsgd.io.data.tokens.corpus import Corpus, CorpusWriter, open_arrays
from acsgd.io.data.tokens.encode import Encoded
from acsgd.io.files.arrays import Array, ArrayFile, ArrayWriter
from acsgd.io.files.entry import Entry, seal
from acsgd.io.files.fields import Natural, check_positive, from_json

ABOUT = "about.json"
LAYOUT = "layout-"
"""Beginning of the names of the files of the layout, before the names of its arrays."""


@dataclass(frozen=True)
class SegmentAbout:
    """What about.json stores."""

    start: SegmentStart
    after: SegmentStart
    rows: Annotated[int, check_positive]
    overlap: Natural
    """See Corpus."""
    checksum: Natural
    """CRC-32 of tokens, targets and layout: equal on all hosts."""
    format: str
    """Name of the format of the records."""


class OpenSegment(NamedTuple):
    """A segment, read from disk when it is used."""

    about: SegmentAbout
    corpus: Corpus
    layout: Mapping[str, Array]


def write_segment(directory: Path, segment: StreamSegment, token_dtype: np.dtype[np.unsignedinteger]) -> None:
    """Write the files of a segment into a new directory. Raises OSError."""
    directory.mkdir()
    corpus = segment.corpus
    tokens = corpus.tokens[:]
    targets = np.ones(len(tokens), bool) if corpus.targets is None else corpus.targets[:]
    types = None if corpus.types is None else corpus.types[:]
    labels = np.empty(0) if corpus.labels is None else corpus.labels[:]
    with CorpusWriter(directory, token_dtype) as writer:
        writer.append(Encoded(tokens, targets, corpus.offsets[1:], len(tokens), labels, types))
    checksum = zlib.crc32(targets.tobytes(), zlib.crc32(tokens.astype("<u4").tobytes()))
    for name, values in segment.layout.items():
        with ArrayWriter(directory / f"{LAYOUT}{name}", np.dtype("<i8")) as file:
            file.append(values)
        checksum = zlib.crc32(values.astype("<i8").tobytes(), checksum)
    about = SegmentAbout(segment.start, segment.after, segment.rows, corpus.overlap, checksum, segment.format)
    (directory / ABOUT).write_text(json.dumps(asdict(about)))
    seal(directory)


def open_segment(path: Path, name: str) -> OpenSegment:
    """Open a segment. name: of the source. Raises CorruptFileError if it is missing or not as it was written."""
    entry = Entry(path)
    about = read_about(path, entry)
    corpus = Corpus(name, path.name, **open_arrays(entry), overlap=about.overlap, before=about.start.tokens)
    names = [file.name for file in path.glob(f"{LAYOUT}*") if file.name in entry]
    return OpenSegment(about, corpus, {file.removeprefix(LAYOUT): ArrayFile(entry, file) for file in names})


def read_about(path: Path, entry: Entry | None = None) -> SegmentAbout:
    """Read about.json of a segment. Raises CorruptFileError."""
    file = (entry or Entry(path)).file(ABOUT)
    try:
        return from_json(SegmentAbout, json.loads(file.read(0, file.size)))
    except ValueError as error:
        raise CorruptFileError(path / ABOUT, f"is invalid: {error}") from None
