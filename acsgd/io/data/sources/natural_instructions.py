"""Super-NaturalInstructions (Wang et al. 2022), with varied prompts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from acsgd.io.data.sources.base import RecordCounts, SourceRecord
from acsgd.io.data.sources.sets import LocalSet, read_object
from acsgd.shards.files import blame

MAX_LABELS = 10
"""Maximum number of distinct outputs of a classification task."""
SHARE = Fraction(3, 10)
"""Minimum share of the records that are of classification tasks."""
STYLES = [("Input: ", "Output:"), ("Question: ", "Answer:"), ("Q: ", "A:"), ("Problem: ", "Solution:"), ("", "")]
"""Texts before the input and before the output."""
SEPARATORS = ["\n", "\n\n", "\n\n\n", "\n###\n", "\n---\n"]
"""Texts between the parts of a prompt."""


class NaturalInstructions(LocalSet):
    """Super-NaturalInstructions, "natural_instructions:DIRECTORY:SPLIT", by default the split "train".

    A prompt has the definition of its task in two of three cases, the possible labels in one of two cases if the task
    has few, and one of several STYLES and SEPARATORS. If less than SHARE of the instances are of classification tasks,
    theirs are repeated in other prompts, all about equally often, so that it is SHARE. A prompt depends on the id of
    the instance, and on the number of the repetition.
    """

    @property
    def path(self) -> Path:
        """Directory with tasks/ and splits/."""
        return Path(self.parts[0]).expanduser()

    def files(self) -> Sequence[Path]:
        """Return the files of the tasks in the split. Raises ValueError if there is no such split."""
        split = self.parts[1] if len(self.parts) > 1 else "train"
        splits = self.path / "splits" / "default"
        tasks = splits / f"{split}_tasks.txt"
        if not tasks.is_file():
            found = ", ".join(sorted(path.name.removesuffix("_tasks.txt") for path in splits.glob("*_tasks.txt")))
            raise ValueError(f"{tasks} does not exist; give a split of {splits} ({found or 'there is none'})")
        return [self.path / "tasks" / f"{task}.json" for task in tasks.read_text().split()]

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord]:
        """Yield prompt and completion of each instance."""
        files = self.files()
        repeated = _repeated(map(self._read, files))
        before = 0
        for number, path in enumerate(files):
            counts.fraction = partial(lambda done: done / len(files), number)
            task = self._read(path)
            for index, instance in enumerate(task.instances):
                where = f"{path}, instance {index + 1}"
                times = repeated(before) if task.is_classification else 1
                before += task.is_classification
                for repetition in range(times):
                    counts.records += 1
                    yield _record(instance, task, where, repetition)

    def _read(self, path: Path) -> _Task:
        """Read a task. Raises ValueError."""
        content = read_object(path, self.key)
        with blame(path, "is not a task of Super-NaturalInstructions", "download it again"):
            instances = [
                _Instance(str(each.get("id", f"{path.stem}-{number}")), str(each["input"]), _texts(each["output"]))
                for number, each in enumerate(content["Instances"])
            ]
            labels = sorted({each.outputs[0] for each in instances})
            return _Task(_texts(content["Definition"])[0], instances, labels)


class _Instance(NamedTuple):
    """An example of a task."""

    id: str
    input: str
    outputs: Sequence[str]
    """Correct answers."""


class _Task(NamedTuple):
    """A task of Super-NaturalInstructions."""

    definition: str
    instances: Sequence[_Instance]
    labels: Sequence[str]
    """Distinct answers of its instances."""

    @property
    def is_classification(self) -> bool:
        """Whether the task has few labels."""
        return len(self.labels) <= MAX_LABELS


def _repeated(tasks: Iterable[_Task]) -> Callable[[int], int]:
    """Return a function of the index of an instance, among those of classification tasks, to how often it is used."""
    classified = others = 0
    for task in tasks:
        classified += len(task.instances) * task.is_classification
        others += len(task.instances) * (not task.is_classification)
    needed = max(classified, math.ceil(others * SHARE / (1 - SHARE)))
    return lambda index: (index + 1) * needed // classified - index * needed // classified


def _record(instance: _Instance, task: _Task, where: str, repetition: int) -> SourceRecord:
    """Return prompt and completion of an instance of a task."""
    draw = random.Random(f"{instance.id} {repetition}" if repetition else instance.id)
    (before_input, before_output), separator = draw.choice(STYLES), draw.choice(SEPARATORS)
    parts = [task.definition] if draw.random() < 2 / 3 else []
    if task.is_classification and draw.random() < 1 / 2:
        parts.append(f"Possible labels: {', '.join(task.labels)}")
    prompt = separator.join([*parts, before_input + instance.input, before_output])
    output = draw.choice(instance.outputs)
    return SourceRecord({"prompt": prompt, "completion": f" {output}" if before_output else output}, where)


def _texts(value: Any) -> list[str]:
    """Return a text, or those of a list that is not empty."""
    return [str(value)] if not isinstance(value, list) else [str(value[0]), *map(str, value[1:])]
