"""Options as they were typed: of a command, of a file, and of a whole command line of another tool."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LAUNCHERS = ("python", "python3", "bash", "sh", "torchrun", "deepspeed", "accelerate", "launch", "mpirun", "srun")
"""Words before a program that are no part of it."""
FILES = (".yml", ".yaml", ".json", ".toml")
"""Ends of the names of configuration files."""
OF_FILES = ("config_file", "CONFIG_FILE", "job.config_file", "deepspeed", "deepspeed_config")
"""Normalized names of options of other tools whose values are such files."""


class Option(NamedTuple):
    """An option as it was typed, or a key of a file with its values."""

    name: str
    values: Sequence[str]

    @property
    def key(self) -> str:
        """Normalized name."""
        return normalized(self.name)


class Line(NamedTuple):
    """A whole command line: NAME=VALUE ... LAUNCHER --option ... PROGRAM ARGUMENT ... --option ..."""

    program: Option
    """File name, module or name of the program, with the first of its arguments that is neither option nor file."""
    options: Sequence[Option]
    """Variables and options of launcher and program."""
    files: Sequence[str]
    """Configuration files among arguments and options."""


def normalized(name: str) -> str:
    """Return the name of an option without leading dashes, with underscores."""
    return name.lstrip("-").replace("-", "_")


def typed_options(argv: Sequence[str]) -> list[Option]:
    """Return the options of a command line, each with the words after it."""
    options = list[Option]()
    for word in argv:
        if re.match(r"--?[A-Za-z]", word):
            name, is_assigned, value = word.partition("=")
            options.append(Option(name, [value] if is_assigned else []))
        elif options:
            options[-1] = Option(options[-1].name, [*options[-1].values, word])
    return options


def typed_line(words: Sequence[str], programs: Collection[str]) -> Line | None:
    """Return the parts of a command line of another tool, None if no program is among its words.

    programs: names of programs that are neither files nor modules of Python.
    """
    variables = list(itertools.takewhile(lambda word: re.match(r"[A-Z_]+=", word), words))
    words = words[len(variables) :]
    before = ["", *words]
    files = [place for place, word in enumerate(words) if word.endswith((".py", ".sh")) or before[place] == "-m"]
    named = [place for place, word in enumerate(words) if word in programs and not {*words[:place]} - {*LAUNCHERS}]
    known = [place for place in files if Path(words[place]).name in programs]
    if not (places := known or files or named):
        return None
    place = places[0]
    rest = words[place + 1 :]
    arguments = list(itertools.takewhile(lambda word: word[:1] != "-", rest))
    of_launcher = [word for word in words[:place] if word not in (*LAUNCHERS, "-m")]
    options = typed_options([*(f"--{each}" for each in variables), *of_launcher, *rest[len(arguments) :]])
    options[: len(variables)] = [each._replace(name=each.name[2:]) for each in options[: len(variables)]]
    values = [value for each in options if each.key in OF_FILES for value in each.values]
    given = [each for each in (*arguments, *values) if each.endswith(FILES)]
    of_program = [each for each in arguments if each not in given][:1]
    return Line(Option(Path(words[place]).name, of_program), options, given)


def read_table(path: Path) -> Any:
    """Return the contents of a file in TOML, YAML or JSON. Raises OSError or ValueError if it cannot be read."""
    import yaml

    text = path.read_text()
    try:
        return tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (RecursionError, yaml.YAMLError) as error:
        raise ValueError(str(error)) from None


def keys_of(table: Any, prefix: str = "") -> list[Option]:
    """Return the keys of nested tables, "a.b", with their values. Lists of tables are one table with several values.

    Keys without a value are left out.
    """
    if isinstance(table, list) and any(isinstance(each, dict) for each in table):
        merged: dict[str, list[str]] = {}
        for name, values in (option for each in table for option in keys_of(each, prefix)):
            merged.setdefault(name, []).extend(values)
        return [Option(name, values) for name, values in merged.items()]
    if not isinstance(table, dict):
        values = table if isinstance(table, list) else [] if table is None else [table]
        return [Option(prefix, [str(each).lower() if isinstance(each, bool) else str(each) for each in values])]
    return [
        option
        for key, each in table.items()
        if each is not None
        for option in keys_of(each, f"{prefix}.{key}" if prefix else str(key))
    ]
