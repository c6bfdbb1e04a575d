"""Sources of records. To add one, write a class that satisfies `Source` and add one line to SOURCES.

data.sources lists sources with optional weights: "demo:0.3,path/a.jsonl:0.7". Parsing is cheap: it finds
every error that can be found without reading the records.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import NamedTuple, NoReturn

from acsgd.config.options import DataConfig
from acsgd.config.spec import suggest
from acsgd.io.data.sources.address import FsspecFiles
from acsgd.io.data.sources.base import TEXT, NamedSource, ReadOptions, RecordCounts, Source, SourceRecord
from acsgd.io.data.sources.files import (
    READERS,
    WHOLE_BYTES,
    Files,
    readable_endings,
    reader_of,
    refuse_missing,
    version_of,
)
from acsgd.io.data.sources.glue import Glue
from acsgd.io.data.sources.hub import HubDataset
from acsgd.io.data.sources.natural_instructions import NaturalInstructions
from acsgd.io.data.sources.sets import ChainOfThought, LocalSet
from acsgd.io.data.sources.split_files import Arxiv21, Pile, PromptPool
from acsgd.io.data.sources.streamed import PREFIX, Streamed
from acsgd.io.data.sources.url import Url
from acsgd.io.data.sources.wikitext import WikiText
from acsgd.io.files.remote import PASSWORD

DEFAULTS = (ReadOptions(),)


class WeightedSource(NamedTuple):
    """A source and its weight in a mixture."""

    source: Source
    weight: float | None
    """Fraction of the mixture, as of data.weights. The weights of a mixture sum to 1. None if none has a weight."""


@dataclass(frozen=True)
class Demo(NamedSource):
    """Reference texts of Python's help(), part of every CPython: at least 450 KB of English, for demonstrations."""

    @property
    def fingerprint(self) -> str:
        """Version of the interpreter and hash of the texts."""
        texts = "\0".join(record.fields[TEXT] for record in self.records(RecordCounts()))
        return f"demo {platform.python_version()} {hashlib.sha256(texts.encode()).hexdigest()}"

    def check(self) -> None:
        """Do nothing: the texts are part of Python."""

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord]:
        """Yield one record per topic, in alphabetical order of the topics."""
        from pydoc_data.topics import topics  # large; only this source needs it

        for counts.records, (topic, text) in enumerate(sorted(topics.items()), start=1):
            yield SourceRecord({TEXT: text}, f"demo, topic {topic}")


SOURCES: dict[str, Callable[[str, str, ReadOptions], Source]] = {
    "demo": Demo,
    "stream:*": Streamed,
    "hf://*": FsspecFiles,
    "hf:*": HubDataset,
    "wikitext:*": WikiText,
    "cot:*": ChainOfThought,
    "natural_instructions:*": NaturalInstructions,
    "glue:*": Glue,
    "arxiv21:*": Arxiv21,
    "pile:*": Pile,
    "p3:*": PromptPool,
    "http://*": Url,
    "https://*": Url,
    "*://*": FsspecFiles,
    **{f"*{ending}": Files for ending in READERS},
    "*/": Files,
}
"""Pattern of a source name -> constructor, called with (name, configuration key, options)."""


def parse_sources(
    spec: str, *, key: str = "data.sources", options: Sequence[ReadOptions] = DEFAULTS
) -> tuple[WeightedSource, ...]:
    """Return the sources that a string lists, with weights that sum to 1. Checks that they exist; reads no record.

    spec: comma-separated "name" or "name:weight"; if any has a weight, that of the others is 1. key: configuration key
    to name in errors; options: for all sources, or for each one. Raises ValueError.
    """
    names = spec.split(",")
    each = options if len(options) > 1 else [*options] * len(names)
    if len(each) != len(names):
        raise ValueError(
            f'{key}="{spec}" has {len(names)} sources, but options of [data], such as data.format, have {len(each)} '
            "values; give one for all sources, or one for each"
        )
    try:
        parts = [_parse(name.strip(), key, reading) for name, reading in zip(names, each, strict=True)]
    except ValueError as error:
        raise ValueError(f'{key}="{PASSWORD.sub("", spec)}": {error}') from None
    if all(part.weight is None for part in parts):
        return tuple(parts)
    weights = [1.0 if part.weight is None else part.weight for part in parts]
    total = math.fsum(weights)
    return tuple(WeightedSource(part.source, weight / total) for part, weight in zip(parts, weights, strict=True))


class LocalFile(NamedTuple):
    """A local file of a source."""

    path: Path
    inode: tuple[int, int]
    """Device and number, which are those of all names of the file."""
    size: int
    """Bytes."""


def local_files(source: Source) -> list[LocalFile]:
    """Return the local files of a source, of which some have none. Raises ValueError or OSError if they are removed."""
    if isinstance(source, Streamed) and _kind(name := source.name.removeprefix(PREFIX)) is Files:
        source = Files(name, source.key)
    if isinstance(source, Files):
        paths: Sequence[Path] = [Path(name).expanduser() for name in source.names()]
    else:
        paths = source.files() if isinstance(source, LocalSet) else ()
    states = [(path, path.stat()) for path in paths]
    return [LocalFile(path, (state.st_dev, state.st_ino), state.st_size) for path, state in states]


def describe_shared(files: Sequence[LocalFile], trained: Sequence[LocalFile]) -> str:
    """Return a predicate that names a file that data.sources has, too, or a copy of it; "" if there is none.

    trained: files of data.sources. Reads only files of equal size, as `version_of` does. Raises OSError.
    """
    inodes = {each.inode for each in trained}
    if same := next((each for each in files if each.inode in inodes), None):
        return f"reads {same.path}, which is in data.sources"
    sizes, trained_sizes = {each.size for each in files}, {each.size for each in trained}
    versions = {version_of(each.path): each.path for each in reversed(trained) if each.size in sizes}
    for path, _, size in files:
        if size in trained_sizes and (other := versions.get(version_of(path))):
            equal = f"is equal to {other}"
            if size > WHOLE_BYTES:
                equal = f"looks equal to {other} (same size and samples)"
            return f"reads {path}, which {equal} of data.sources"
    return ""


def files_of(data: DataConfig) -> list[str]:
    """Return the files that sources name one by one, whether they exist or not; no directories and patterns."""
    specs = (data.sources, data.eval_sources or "")
    parts = [part.strip() for spec in specs for part in spec.split(",")]
    names = [part if _kind(part) else part.rpartition(":")[0] for part in parts]
    return [name for name in names if name and _kind(name) is Files and reader_of(name) and not has_magic(name)]


def check_weights(sources: Sequence[WeightedSource], unit: str) -> None:
    """Raise ValueError if several sources have no weights, but data.weights=`unit` says what these are fractions of."""
    if unit != "sequences" and len(sources) > 1 and sources[0].weight is None:
        spec = ",".join(f"{source.name}:{1 / len(sources):.2g}" for source, _ in sources)
        raise ValueError(f'data.weights={unit}, but data.sources has no weights; write, for example, "{spec}"')


def _parse(part: str, key: str, options: ReadOptions) -> WeightedSource:
    name, weight = part, None
    if len(words := part.split()) > 1 and not _exists(part) and all(_kind(word.partition(":")[0]) for word in words):
        raise ValueError(f'sources are separated by commas; write "{",".join(words)}"')
    if ":" in part and (_kind(part) is None or _ends_with_weight(part)):
        name, _, weight = (text.strip() for text in part.rpartition(":"))
    kind = _kind(name)
    if kind is None:
        _refuse_unknown(name)
    source = kind(name, key, options)
    source.check()
    return WeightedSource(source, None if weight is None else _weight(weight, name))


def _kind(name: str) -> Callable[[str, str, ReadOptions], Source] | None:
    found = next((kind for pattern, kind in SOURCES.items() if fnmatchcase(name, pattern)), None)
    return found or (Files if has_magic(name) or os.path.isdir(os.path.expanduser(name)) else None)


def _exists(name: str) -> bool:
    return os.path.lexists(os.path.expanduser(name))


def _refuse_unknown(name: str) -> NoReturn:
    """Raise ValueError for a name that is of no source."""
    if _exists(name):
        raise ValueError(f"{name} has none of the endings of files that can be read, {readable_endings()}; convert it")
    if "/" not in name and "." not in name:
        raise ValueError(f'unknown source "{name}"{suggest(name, SOURCES)}')
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    refuse_missing(name, f", or hf:{name} for a dataset of the Hub" if is_id else "")


def _ends_with_weight(part: str) -> bool:
    """Whether a number follows the last colon, and it does not belong to the name of a file."""
    with contextlib.suppress(ValueError):
        float(part.rpartition(":")[2])
        return not _exists(part)
    return False


def _weight(text: str, name: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f'weight "{text}" of {name} is not a number greater than 0; write, for example, {name}:0.5')
    return weight
