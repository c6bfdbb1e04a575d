"""Tasks: what a model is trained for. To add one, write a class that extends `Task` and a line in TASKS."""

from __future__ import annotations

from acsgd.config.checks import check
from acsgd.config.options import Config
from acsgd.config.spec import suggest
from acsgd.tasks.base import Task
from acsgd.tasks.labelled import Classification, Regression
from acsgd.tasks.language import LanguageModelling
from acsgd.tasks.seq2seq import SequenceToSequence

TASKS: dict[str, Task] = {
    "lm": LanguageModelling(),
    "classification": Classification(),
    "regression": Regression(),
    "seq2seq": SequenceToSequence(),
}
"""Tasks by name."""


def find_task(name: str) -> Task:
    """Return a task by name, that of model.task. Raises ValueError if there is none."""
    if name not in TASKS:
        raise ValueError(f'model.task="{name}": unknown task{suggest(name, TASKS)}')
    return TASKS[name]


def check_options(config: Config) -> Task:
    """Return the task of a run. Raises ValueError for the first option that is invalid, or that it does not take."""
    check(config)
    task = find_task(config.model.task)
    task.check(config)
    return task
