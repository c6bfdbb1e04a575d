"""Objects from JSON values: the types of a dataclass are the format of a file.

@dataclass(frozen=True)
class Attachment:
    name: Annotated[str, check_file_name]     # a function that raises ValueError for a wrong value
    bytes: Natural = 0

from_json(Attachment, {"name": "a.txt"})
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from typing import Annotated, Any, Literal, TypeVar

T = TypeVar("T")


def check_natural(number: int) -> None:
    """Raise ValueError unless 0 <= number < 2**63."""
    if not 0 <= number < 2**63:
        raise ValueError(f"{number} is not in the range 0 to 2**63 - 1")


def check_finite(number: float) -> None:
    """Raise ValueError for NaN and infinities."""
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")


def check_positive(number: float) -> None:
    """Raise ValueError unless 0 < number < infinity."""
    if not 0 < number < math.inf:
        raise ValueError(f"{number} is not a positive finite number")


Natural = Annotated[int, check_natural]
Finite = Annotated[float, check_finite]
Positive = Annotated[float, check_positive]


def from_json(cls: type[T], value: Any, *, ignore_unknown: bool = False) -> T:
    """Return an object of a dataclass from a JSON object, after checking all its fields.

    Fields may be bool, int, float, str, None, Any, Literal, dataclasses, list, tuple[X, ...], dict[str, X], unions, and
    Annotated with functions that raise ValueError. ignore_unknown: allow fields that `cls` does not have.
    Raises ValueError with the name of the first wrong field.
    """
    return _convert(cls, value, "", ignore_unknown)


def _convert(kind: Any, value: Any, where: str, ignore_unknown: bool) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        converted = _convert(arguments[0], value, where, ignore_unknown)
        try:
            for check in arguments[1:]:
                check(converted)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return converted
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} must be {' or '.join(map(repr, arguments))}, not {value!r:.70}")
        return value
    if dataclasses.is_dataclass(kind):
        return _object(kind, value, where, ignore_unknown)
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _convert(_not_none(arguments), value, where, ignore_unknown)
    if origin in (list, tuple):
        _expect(list, value, where)
        items = [_convert(arguments[0], each, f"{where}[{i}]", ignore_unknown) for i, each in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is dict:
        _expect(dict, value, where)
        return {key: _convert(arguments[1], each, _join(where, key), ignore_unknown) for key, each in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    _expect(kind, value, where)
    return value


def _object(cls: Any, value: Any, where: str, ignore_unknown: bool) -> Any:
    _expect(dict, value, where)
    fields = _fields(cls)
    for name, (_, required) in fields.items():
        if required and name not in value:
            raise ValueError(f"{_join(where, name)} is missing")
    if not ignore_unknown and (unknown := value.keys() - fields.keys()):
        raise ValueError(f"{_join(where, min(unknown))} is not a field of the format")
    return cls(
        **{
            name: _convert(kind, value[name], _join(where, name), ignore_unknown)
            for name, (kind, _) in fields.items()
            if name in value
        }
    )


@functools.cache
def _fields(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Return type of each field of a dataclass, and whether it is required."""
    hints = typing.get_type_hints(cls, include_extras=True)
    missing = dataclasses.MISSING
    return {
        field.name: (hints[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(cls)
    }


def _not_none(arguments: tuple[Any, ...]) -> Any:
    """Return X of X | None, the only unions there are."""
    (kind,) = (each for each in arguments if each is not types.NoneType)
    return kind


def _expect(kind: type, value: Any, where: str) -> None:
    if type(value) is not kind:  # a bool is no int
        raise ValueError(f"{where or 'the file'} must be {_name(kind)}, not {_name(type(value))}")


def _name(kind: type) -> str:
    names = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}
    return names.get(kind, "null" if kind is types.NoneType else kind.__name__)


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
