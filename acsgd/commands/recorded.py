"""The model that a command is given, and the options of the run that saved it, which hold unless others are given."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from acsgd.config.options import DataConfig
from acsgd.io.checkpoint.progress import RunState
from acsgd.io.data.sources.base import ReadOptions
from acsgd.shards.disk import RUN_OPTIONS, TASK, ShardDirectory
from acsgd.shards.files import read_json_object
from acsgd.shards.manifest import MANIFEST

READING = tuple(each.name for each in fields(ReadOptions))
"""Options of [data] that say how records are read; options of commands have the same names."""
LIMITS = ("max_prompt", "max_answer")
"""Those of them that limit tokens. Commands have no options of these names."""
DEFAULTS = {each.name: each.default for each in fields(DataConfig) if each.default is not MISSING}


@dataclass(frozen=True)
class RecordedModel:
    """A model by name, with what its manifest records."""

    name: str
    """Directory or Hugging Face id."""
    task: str | None = None
    """Task of layer shards, or of the run that a Hugging Face model is exported from; None for another one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the run that saved it, by their names; of an export those of [data]; empty if no run did."""
    new: tuple[str, ...] = ()
    """Parameters of a head that nothing has trained, see `Manifest`."""

    @classmethod
    def of(cls, name: str) -> RecordedModel:
        """Return the model in a directory, or of a Hugging Face id. Raises CorruptFileError."""
        path = Path(name)
        exported = read_json_object(path / RUN_OPTIONS) if (path / RUN_OPTIONS).is_file() else {}
        if not os.path.lexists(path / MANIFEST):
            return cls(name, exported.get(TASK), exported)
        shards = ShardDirectory(path)
        run = RunState.of(shards)
        return cls(name, shards.manifest.task, run.recorded if run else exported, shards.manifest.new)

    def data_options(self, given: Mapping[str, Any], names: Iterable[str] = READING) -> dict[str, Any]:
        """Return options of [data] by name: what is given, or else recorded. None is neither."""
        if given.get("format") is not None:
            names = [name for name in names if name != "fields"]  # those recorded are of another format
        recorded = {name: self.options.get(f"data.{name}") for name in names}
        values = {name: value for name, value in {**recorded, **_present(given)}.items() if value is not None}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    def for_sources(
        self, given: Mapping[str, Any], used: Mapping[str, Any], count: int, name: str
    ) -> tuple[dict[str, Any], str | None]:
        """Return options for a number of other sources than the run's, and what the user has to know of them.

        Limits of tokens that the run has for each of its sources are left out. given, used: arguments and result of
        `data_options`; name: of these sources. Raises ValueError for others that it has for each: the user gives them.
        """
        lists = {
            option: value
            for option, value in used.items()
            if isinstance(value, tuple) and len(value) != count and option not in _present(given)
        }
        if needed := [option for option in lists if option not in LIMITS]:
            flags = " and ".join(f"--{option.replace('_', '-')}" for option in needed)
            raise ValueError(
                f"the run reads each of its sources in its own way: {_texts(lists, needed)}; give {flags} of {name}"
            )
        rest = {option: value for option, value in used.items() if option not in lists}
        return rest, f"no limit for {name}: the run has {_texts(lists, lists)}, for its sources" if lists else None

    def describe(self, given: Mapping[str, Any], used: Mapping[str, Any]) -> str | None:
        """Return a sentence on the options of [data] that the run determines; None if it determines none.

        given, used: arguments and result of `data_options`. Defaults of a run are left out.
        """
        recorded = {name: value for name, value in used.items() if name not in _present(given)}
        names = [name for name, value in recorded.items() if value != DEFAULTS.get(name)]
        return f"as in the run: {_texts(recorded, names)}" if names else None


def _texts(values: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"data.{name}={json.dumps(values[name], ensure_ascii=False)}" for name in names)


def _present(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}
