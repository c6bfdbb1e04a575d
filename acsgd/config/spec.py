"""Spec strings, "name:option=value,..." <-> instances of the frozen dataclass that `name` selects from a table.

The options of a plug-in are the fields of its dataclass; they add no command-line flags. A class that renames an
option lists it in `RENAMED: ClassVar[dict[str, str]]` (former name -> present name), so that errors give the new name.
An option whose text may have commas is named by `FREE_TEXT: ClassVar[str]`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from acsgd.config.other_tools import other_value
from acsgd.config.ranges import out_of_range
from acsgd.errors import similar

ASSIGNMENT = re.compile(r',(?=\s*\w[^,="]*=)(?=(?:[^"]*"[^"]*")*[^"]*$)')
"""Comma between two assignments."""
LIMIT = 10**12
"""Limit of the magnitude of numbers; fields declare narrower ranges."""


def from_spec(spec: str, table: Mapping[str, type], *, key: str) -> Any:
    """Parse a spec string into an instance of the class it selects. Returns Any: each table has its own protocol.

    Args:
        spec: "name" or "name:option=value,option=value".
        table: Name -> frozen dataclass.
        key: Configuration key that holds the spec; named in errors.

    Raises:
        ValueError: The name, an option or a value is invalid.
    """
    name, _, rest = spec.strip().partition(":")
    if name not in table:
        raise ValueError(f'{key}="{spec}": unknown name "{name}"{suggest(name, table, key)}')
    plugin = table[name]
    fields = _fields_of(plugin)
    values: dict[str, Any] = {}
    for part in _parts(rest, getattr(plugin, "FREE_TEXT", None), fields):
        option, equals, text = (piece.strip() for piece in part.partition("="))
        if option not in fields:
            if present := getattr(plugin, "RENAMED", {}).get(option):
                raise ValueError(f'{key}="{spec}": option "{option}" is now called "{present}"')
            known = f"{_one_of(fields)}{nearest(option, fields)}" if fields else "no options"
            raise ValueError(f'{key}="{spec}": "{name}" has no option "{option}"; it takes {known}')
        if not equals or not text:
            raise ValueError(f'{key}="{spec}": "{part}" has no value; write {option}=VALUE')
        if option in values:
            raise ValueError(f'{key}="{spec}": {option} is given twice')
        values[option] = _convert(text, fields[option], where=f'{key}="{spec}": {option}')
    try:
        parsed = plugin(**values)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f'{key}="{spec}": {error}') from None
    for wrong in out_of_range(parsed):
        raise ValueError(f'{key}="{spec}": {wrong}')
    return parsed


@functools.cache
def _fields_of(plugin: type) -> Mapping[str, Any]:
    """Return the type of each field of a dataclass, by name."""
    types = typing.get_type_hints(plugin)
    return {field.name: types[field.name] for field in dataclasses.fields(plugin)}


def assignments(text: str) -> list[tuple[str, str]] | None:
    """Parse "name=value,...". A comma ends a value where a name and "=" follow it, outside of double quotes.

    Returns None if the text is no such list, or ends a value with a comma.
    """
    pairs = [tuple(each.strip() for each in part.split("=", 1)) for part in ASSIGNMENT.split(text)]
    is_list = all(len(pair) == 2 and all(pair) and not pair[1].endswith(",") for pair in pairs)
    return [(pair[0], pair[1]) for pair in pairs] if is_list else None


def to_spec(plugin: Any, table: Mapping[str, type]) -> str:
    """Return the shortest spec string of a plug-in: options at their defaults are left out."""
    name = next(name for name, kind in table.items() if type(plugin) is kind)
    options = [
        f"{field.name}={_text(getattr(plugin, field.name))}"
        for field in dataclasses.fields(plugin)
        if getattr(plugin, field.name) != field.default
    ]
    return f"{name}:{','.join(options)}" if options else name


def _parts(rest: str, text: str | None, options: Mapping[str, Any]) -> list[str]:
    """Return the parts of a spec between commas. text: option of which a part without an option's name goes on."""
    parts: list[str] = []
    for part in rest.split(","):
        name, equals, _ = part.partition("=")
        is_option = bool(equals) and (name.strip() in options or bool(nearest(name.strip(), options)))
        if parts and parts[-1].partition("=")[0].strip() == text and not is_option:
            parts[-1] += f",{part}"
        elif part:
            parts.append(part)
    return parts


def suggest(name: str, known: Mapping[str, Any], key: str = "") -> str:
    """Return "; use a, b or c (did you mean b?)", the end of an error message about an unknown name.

    key: of the option whose value it is, which may have other names in other tools.
    """
    return f"; use {_one_of(known)}{other_value(key, name) or nearest(name, known)}"


def _convert(text: str, kind: Any, *, where: str) -> Any:
    """Convert the text of an option to its type: str, bool, int, float or a Literal of strings. Raises ValueError."""
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            raise ValueError(f'{where}="{text}" is not one of {", ".join(choices)}')
        return text
    if kind is str:
        return text
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f'{where}="{text}" is neither true nor false')
        return text == "true"
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f'{where}="{text}" is not of type {kind.__name__}') from None
    if not abs(value) < LIMIT:
        raise ValueError(f'{where}="{text}" must be a number of at most {LIMIT:.0e}')
    return value


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _one_of(names: Mapping[str, Any]) -> str:
    *first, last = (f'"{name}"' for name in names)
    return f"{', '.join(first)} or {last}" if first else last


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ' (did you mean "b"?)' with the name of which another one is a misspelling, "" if there is none."""
    close = similar(name, names)
    return f' (did you mean "{close[0]}"?)' if close else ""
