"""Read a run's configuration from a TOML file and command-line flags, and write it back as TOML."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import tomllib
import typing
from pathlib import Path
from typing import Any

import tyro

from acsgd.config.options import RENAMED, Config
from acsgd.config.spec import suggest


def parse(argv: list[str], *, prog: str = "train.py", is_main: bool = True) -> Config:
    """Read `RUN.toml [--section.key value ...]`; flags > file > defaults.

    prog: name of the command in its help; is_main: whether this process prints help and usage errors. Does not check
    values; see `acsgd.config.checks`. Raises ValueError for an unreadable file, an unknown key or a renamed option,
    SystemExit (as tyro does) for --help and malformed flags.
    """
    argv = list(argv)
    arguments: list[str] = []
    if argv and not argv[0].startswith("-"):
        arguments = _as_flags(_read(Path(argv.pop(0))))
    _refuse_renamed(argv)
    with contextlib.nullcontext() if is_main else contextlib.redirect_stderr(io.StringIO()):
        return tyro.cli(
            Config,
            args=arguments + argv,
            prog=f"{prog} [RUN.toml]",
            description="Fine-tune a Hugging Face causal language model over pipeline stages x replicas.",
            console_outputs=is_main,  # False silences help and unknown flags, but not values of a wrong type
        )


def to_toml(config: Config) -> str:
    """Return the configuration as TOML. `parse` of it returns an equal Config."""
    lines = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        values = dataclasses.asdict(getattr(config, section.name))
        lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Read a run file. Raises ValueError for unknown sections and keys."""
    try:
        with path.open("rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"run file {path} cannot be read ({error.strerror}); give an existing TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    sections = typing.get_type_hints(Config)
    for name, values in table.items():
        if name not in sections or not isinstance(values, dict):
            raise ValueError(f"{path}: unknown section [{name}]{suggest(name, sections)}")
        keys = {key.name: key for key in dataclasses.fields(sections[name])}
        for key in values:
            if f"{name}.{key}" in RENAMED:
                raise ValueError(f"{path}: {name}.{key} is now called {RENAMED[f'{name}.{key}']}")
            if key not in keys:
                raise ValueError(f"{path}: unknown key {name}.{key}{suggest(key, keys)}")
    return table


def _refuse_renamed(argv: list[str]) -> None:
    """Raise ValueError for a flag with a former name."""
    for argument in argv:
        key = argument.removeprefix("--").partition("=")[0]
        if argument.startswith("--") and key in RENAMED:
            raise ValueError(f"--{key} is now called --{RENAMED[key]}")


def _as_flags(table: dict[str, dict[str, Any]]) -> list[str]:
    """Return a TOML table as flags, so that file and command line have the same type checks."""
    flags: list[str] = []
    for section, values in table.items():
        for key, value in values.items():
            if isinstance(value, bool):
                flags.append(f"--{section}.{key}" if value else f"--{section}.no-{key}")
            elif isinstance(value, list):
                flags += [f"--{section}.{key}", *map(str, value)]
            else:
                flags.append(f"--{section}.{key}={value}")
    return flags


def _toml(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value).lower() if isinstance(value, bool) else str(value)
