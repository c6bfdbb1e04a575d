"""Options by the names that a user of a command types. Imports no torch, which takes seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from acsgd.config.options import Config


def typed(text: str, command: type[Any]) -> str:
    """Return a message with the options of a command in place of those of a run.

    command: dataclass of options. One that has the name of an option of a run sets that; its `typed`, if it has one,
    names the others.
    """
    own, names = {each.name for each in dataclasses.fields(command)}, dict[str, str]()
    for section, options in typing.get_type_hints(Config).items():
        shared = own & {each.name for each in dataclasses.fields(options)}
        names |= {f"{section}.{name}": f"--{name.replace('_', '-')}" for name in shared}
    others: Mapping[str, str] = getattr(command, "typed", {})
    names |= others
    # an option that is given to a run as a flag has the dashes already
    keys = "|".join(re.escape(key) for key in sorted(names, key=len, reverse=True))
    return re.sub(rf"(?:--)?\b({keys})\b", lambda found: names[found[1]], text) if keys else text


@contextlib.contextmanager
def as_typed(command: type[Any]) -> Iterator[None]:
    """Context in which errors name the options of a command in place of those of a run. command: see `typed`."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise ValueError(typed(str(error), command)) from error
