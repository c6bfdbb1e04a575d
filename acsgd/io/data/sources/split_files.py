"""Sets that are distributed as files of records: the Pile, arXiv abstracts, and the Public Pool of Prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from acsgd.io.data.sources.base import TEXT, BadRecord, RecordCounts, SourceRecord
from acsgd.io.data.sources.files import SPLITS, STATE, Files, files_below, split_of
from acsgd.io.data.sources.natural_instructions import SEPARATORS, STYLES
from acsgd.io.data.sources.sets import LocalSet


class _SplitFiles(LocalSet):
    """Files of a split of a directory, "NAME:DIRECTORY:SPLIT", by default of "train", if it is divided into splits.

    A split is a directory or files that are named after it: train/, train-00000-of-00001.parquet, val.jsonl.zst. Files
    beside them, 00.jsonl.zst, are of "train" unless others are named so.
    """

    fields: ClassVar[Sequence[str]]
    """Fields of a record that must be strings."""

    @property
    def path(self) -> Path:
        """Directory, or a file."""
        return Path(self.parts[0]).expanduser()

    def files(self) -> Sequence[Path]:
        """Return the files of the split. Raises ValueError if there are none."""
        split = self.parts[1] if len(self.parts) > 1 else "train"
        directory = self.path
        for each in (directory / split, directory / "data" / split):
            if each.is_dir():
                return self._files_in(each)
        if not directory.is_dir() or (directory / STATE).is_file():
            return self._files_in(directory)
        found = list(files_below(directory))
        named = {path: SPLITS[word] for path in found if (word := split_of(path.relative_to(directory)))}
        others = "" if "train" in named.values() else "train"
        chosen = [path for path in found if named.get(path, others) == SPLITS.get(split, split)]
        if not chosen:
            splits = ", ".join(sorted({*named.values()})) or "files of no split"
            raise ValueError(f"{self.name}: {directory} has no files of the split {split} ({splits}); give another one")
        return chosen

    def _read_file(self, name: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        """Yield the records of a file, in the form of a format."""
        for record in Files(name, self.key, self.options).records(counts):
            yield record if isinstance(record, BadRecord) else self._checked(record)

    def _files_in(self, path: Path) -> Sequence[Path]:
        return [Path(name).expanduser() for name in Files(str(path), self.key).names()]

    def _checked(self, record: SourceRecord) -> SourceRecord | BadRecord:
        missing = [name for name in self.fields if not isinstance(record.fields.get(name), str)]
        if not missing:
            return self._formed(record)
        found = ", ".join(f'"{name}"' for name in record.fields)
        reason = f'has no string under "{missing[0]}"; its fields: {found}'
        return BadRecord(record.where, reason, "give the set as it is distributed")

    def _formed(self, record: SourceRecord) -> SourceRecord:
        """Return a record with the fields of a format."""
        return record


class Pile(_SplitFiles):
    """The Pile (Gao et al. 2020), "pile:DIRECTORY:SPLIT": texts with the name of their part under "meta"."""

    fields = (TEXT,)


class Arxiv21(_SplitFiles):
    """Abstracts of arXiv of 2021, "arxiv21:DIRECTORY:SPLIT": a document each."""

    fields = ("abstract",)

    def _formed(self, record: SourceRecord) -> SourceRecord:
        return record._replace(fields={**record.fields, TEXT: record.fields["abstract"].strip()})


class PromptPool(_SplitFiles):
    """The Public Pool of Prompts (Sanh et al. 2022), "p3:DIRECTORY:SPLIT": prompts and completions.

    What is between a prompt and its completion is drawn from SEPARATORS and the ends of STYLES, unless the prompt ends
    with a colon. It depends on the prompt alone.
    """

    fields = ("inputs", "targets")

    def _formed(self, record: SourceRecord) -> SourceRecord:
        prompt, answer = record.fields["inputs"].rstrip(), record.fields["targets"].strip()
        draw = random.Random(prompt)
        (_, before), separator = draw.choice(STYLES), draw.choice(SEPARATORS)
        if not prompt.endswith(":"):
            prompt += separator + before
        return record._replace(
            fields={"prompt": prompt, "completion": f" {answer}" if prompt.endswith(":") else answer}
        )
