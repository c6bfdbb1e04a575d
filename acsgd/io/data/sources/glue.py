"""The tasks of GLUE (Wang et al. 2019), as their tab-separated files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from acsgd.io.data.sources.base import BadRecord, RecordCounts, SourceRecord
from acsgd.io.data.sources.sets import LocalSet
from acsgd.io.data.sources.tables import read_columns, read_tsv
from acsgd.io.data.sources.text import excerpt


class GlueTask(NamedTuple):
    """The columns of a task of GLUE."""

    fields: Mapping[str, str]
    """Name of a field in the records of the Hub -> name of the column."""
    columns: Sequence[str] | None = None
    """Names of the columns of a file without a header."""
    labels: Sequence[str] = ()
    """Names of the labels 0, 1, ...; none if the label is a score."""
    metrics: Sequence[str] = ("accuracy",)
    """Names of the metrics of the task."""


_PAIR = {"sentence1": "sentence1", "sentence2": "sentence2", "label": "label"}
GLUE: Mapping[str, GlueTask] = {
    "cola": GlueTask(
        {"sentence": "sentence", "label": "label"},
        ("source", "label", "mark", "sentence"),
        ("unacceptable", "acceptable"),
        metrics=("matthews",),
    ),
    "sst2": GlueTask({"sentence": "sentence", "label": "label"}, labels=("negative", "positive")),
    "sst2-sentences": GlueTask(
        {"sentence": "sentence", "label": "label"}, ("label", "sentence"), ("negative", "positive")
    ),
    "mrpc": GlueTask(
        {"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
        labels=("not_equivalent", "equivalent"),
        metrics=("accuracy", "f1"),
    ),
    "stsb": GlueTask(
        {"sentence1": "sentence1", "sentence2": "sentence2", "label": "score"}, metrics=("pearson", "spearman")
    ),
    "qqp": GlueTask(
        {"question1": "question1", "question2": "question2", "label": "is_duplicate"},
        labels=("not_duplicate", "duplicate"),
        metrics=("accuracy", "f1"),
    ),
    "mnli": GlueTask(
        {"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"},
        labels=("entailment", "neutral", "contradiction"),
    ),
    "qnli": GlueTask(
        {"question": "question", "sentence": "sentence", "label": "label"}, labels=("entailment", "not_entailment")
    ),
    "rte": GlueTask(_PAIR, labels=("entailment", "not_entailment")),
    "wnli": GlueTask(_PAIR, labels=("not_entailment", "entailment")),
}
"""Tasks of GLUE by name."""


class Glue(LocalSet):
    """Files of a task of GLUE, "glue:TASK:PATH", with the fields that the Hub has, and "label_name"."""

    endings = (".tsv",)

    @property
    def metrics(self) -> Sequence[str]:
        """Names of the metrics of the task."""
        return GLUE[self.parts[0]].metrics

    def check(self) -> None:
        """Raise ValueError unless the task is known and the files are readable."""
        if len(self.parts) != 2 or self.parts[0] not in GLUE:
            raise ValueError(f"{self.name} is not a task of GLUE; write glue:TASK:PATH, with one of {', '.join(GLUE)}")
        super().check()

    def _read_file(self, name: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        task = GLUE[self.parts[0]]
        if task.columns:
            rows = read_columns(Path(name), name, self.key, counts, task.columns)
        else:
            rows = read_tsv(Path(name), name, self.key, counts)
        for record in rows:
            yield record if isinstance(record, BadRecord) else _glue_record(record, task)


def _glue_record(record: SourceRecord, task: GlueTask) -> SourceRecord | BadRecord:
    """Return a row with the fields of the Hub."""
    missing = [column for column in task.fields.values() if column not in record.fields]
    if missing:
        found = ", ".join(record.fields)
        return BadRecord(
            record.where, f'has no column "{missing[0]}"; its columns: {found}', "give the file of the task"
        )
    fields = {field: record.fields[column] for field, column in task.fields.items()}
    label = fields["label"]
    try:
        if not task.labels:
            return record._replace(fields={**fields, "label": float(label)})
        number = task.labels.index(label) if label in task.labels else range(len(task.labels)).index(int(label))
        return record._replace(fields={**fields, "label": number, "label_name": task.labels[number]})
    except ValueError:
        known = f"one of {', '.join(task.labels)}" if task.labels else "a number"
        return BadRecord(record.where, f'has the label "{excerpt(label)}"', f"use {known}", label)
