"""Super-NaturalInstructions (Wang et al. 2022), with varied prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from acsgd.io.sources.base import Record, RecordCounts
from acsgd.io.sources.sets import LocalSet, read_object
from acsgd.shards.files import blame

MAX_LABELS = 10
"""Maximum number of distinct outputs of a classification task."""
STYLES = [("Input: ", "Output:"), ("Question: ", "Answer:"), ("Q: ", "A:"), ("Problem: ", "Solution:"), ("", "")]
"""Texts before the input and before the output."""
SEPARATORS = ["\n", "\n\n"]


class NaturalInstructions(LocalSet):
    """Super-NaturalInstructions, "natural_instructions:DIRECTORY:SPLIT", by default the split "train".

    A prompt has the definition of its task in two of three cases, the possible labels in one of two cases if the task
    has few, and one of several STYLES. They depend on the id of the instance alone.
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

    def records(self, counts: RecordCounts) -> Iterator[Record]:
        """Yield prompt and completion of each instance."""
        files = self.files()
        for number, path in enumerate(files):
            counts.fraction = partial(lambda done: done / len(files), number)
            task = read_object(path, self.key)
            with blame(path, "is not a task of Super-NaturalInstructions", "download it again"):
                definition, instances = _first(task["Definition"]), task["Instances"]
                labels = sorted({_first(instance["output"]) for instance in instances})
                places = (f"{path}, instance {index}" for index in range(1, len(instances) + 1))
                records = [
                    _instance(instance, definition, labels, where)
                    for instance, where in zip(instances, places, strict=True)
                ]
            for record in records:
                counts.records += 1
                yield record


def _instance(instance: Mapping[str, Any], definition: str, labels: Sequence[str], where: str) -> Record:
    """Return prompt and completion of an instance of a task."""
    draw = random.Random(str(instance.get("id", where)))
    (before_input, before_output), separator = draw.choice(STYLES), draw.choice(SEPARATORS)
    parts = [definition] if draw.random() < 2 / 3 else []
    if len(labels) <= MAX_LABELS and draw.random() < 1 / 2:
        parts.append(f"Possible labels: {', '.join(labels)}")
    prompt = separator.join([*parts, before_input + str(instance["input"]), before_output])
    output = _first(instance["output"])
    return Record({"prompt": prompt, "completion": f" {output}" if before_output else output}, where)


def _first(value: Any) -> str:
    """Return a text, or the first one of a list."""
    return str(value[0] if isinstance(value, list) else value)
