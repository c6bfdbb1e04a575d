"""Mutations of bytes and of JSON values. Each returns what it made, and one line that describes the change."""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

INTEGERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    256,
    4095,
    65536,
    2**20,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    -(2**63),
    10**30,
)
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.5, 1e-320, 1e-8, 1e8, 1e300, math.inf, -math.inf, math.nan)
STRINGS = (
    *("", " ", "\0", "\n", "a\nb", "0", "1", "-1", "nan", "true", "null", "none", "auto"),
    *("../x", "/dev/null", "é", "\ud800", "x" * 300, "x" * 70_000, "%s{}", "٣"),
)


def any_value(draw: random.Random) -> Any:
    """Return a JSON value."""
    kinds: list[Callable[[], Any]] = [
        lambda: draw.choice(INTEGERS),
        lambda: draw.choice(FLOATS),
        lambda: draw.choice(STRINGS),
        lambda: draw.choice([None, True, False]),
        lambda: draw.choice([[], {}, [1], [None], [[]], {"": 0}, {"a": {"b": []}}, ["x"] * 1000]),
    ]
    return draw.choice(kinds)()


def near_value(draw: random.Random, value: Any) -> Any:
    """Return a value near another: of the same type, or the same in another type."""
    if isinstance(value, bool):
        return draw.choice([not value, int(value), str(value).lower(), None])
    if isinstance(value, int | float):
        changes: list[Callable[[], Any]] = [
            lambda: value + draw.choice([1, -1]),
            lambda: -value,
            lambda: value * draw.choice([2, 3, 10, 1000]),
            lambda: value / 2,
            lambda: float(value),
            lambda: str(value),
            lambda: [value],
            lambda: draw.choice(INTEGERS if draw.random() < 0.6 else FLOATS),
        ]
        return draw.choice(changes)()
    if isinstance(value, str):
        other = draw.choice(STRINGS)
        return draw.choice([value[:-1], value + value, value.upper(), other, value + other, other + value, [value], 0])
    if isinstance(value, list):
        return draw.choice([value[:-1], value + value[:1], value[::-1], [value], tuple(value)[:0], None, {"0": value}])
    if isinstance(value, dict):
        return draw.choice([{}, list(value.items()), {**value, "new": 1}, None, str(value)])
    return any_value(draw)


def changed_json(draw: random.Random, value: Any) -> tuple[Any, str]:
    """Return a copy of a JSON object with one value replaced, removed, renamed, or added."""
    changed = copy.deepcopy(value)
    parent, key = draw.choice(list(_places(changed)) or [(changed, None)])
    if key is None:
        return any_value(draw), "another value"
    action = draw.random()
    if action < 0.15:
        del parent[key]
        return changed, f"{key} removed"
    if action < 0.22 and isinstance(parent, dict):
        name = draw.choice([f"{key}_", str(key).upper(), "", "x"])
        parent[name] = parent.pop(key)
        return changed, f"{key} renamed to {name!r}"
    if action < 0.3 and isinstance(parent, dict):
        parent[draw.choice(["new", key + "s", "__class__", "0"])] = any_value(draw)
        return changed, f"a key added beside {key}"
    parent[key] = near_value(draw, parent[key]) if draw.random() < 0.6 else any_value(draw)
    return changed, f"{key}={shown(parent[key])}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value in a JSON value; of long lists, of the first ones."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:5]) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)


def to_json(value: Any) -> bytes:
    """Serialise a JSON value; lone surrogates are escaped, infinities and NaN written as Python does."""
    return json.dumps(value, indent=1).encode()


def changed_json_file(draw: random.Random, path: Path) -> str:
    """Change one value of a JSON file in place."""
    value, change = changed_json(draw, json.loads(path.read_text()))
    path.write_bytes(to_json(value))
    return f"{path.name}: {change}"


def changed_bytes(draw: random.Random, data: bytes, other: bytes = b"") -> tuple[bytes, str]:
    """Return bytes with a mutation; other: what may be spliced in."""
    size = len(data)
    at = draw.randrange(size) if size else 0
    count = min(draw.choice([1, 1, 2, 4, 8, 16, 64, 512, 4096]), size - at)
    source = other or data
    start = draw.randrange(len(source)) if source else 0
    changes: list[Callable[[], tuple[bytes, str]]] = [
        lambda: _with_number(draw, data),
        lambda: _with_number(draw, data[:64]) if size <= 64 else _with_number_in_front(draw, data),
        lambda: (_flipped(draw, data), "bits flipped"),
        lambda: (_flipped(draw, data), "bits flipped"),
        lambda: (data[:at], f"truncated to {at} of {size} bytes"),
        lambda: (data + draw.randbytes(draw.choice([1, 3, 16, 5000])), "random bytes appended"),
        lambda: (data + data, "doubled"),
        lambda: (data[:at] + draw.randbytes(count) + data[at + count :], f"{count} random bytes at {at} of {size}"),
        lambda: (data[:at] + bytes(count) + data[at + count :], f"{count} zeros at {at} of {size}"),
        lambda: (data[:at] + b"\xff" * count + data[at + count :], f"{count} bytes 0xff at {at} of {size}"),
        lambda: (data[:at] + data[at + count :], f"{count} bytes removed at {at} of {size}"),
        lambda: (data[:at] + data[at : at + count] + data[at:], f"{count} bytes repeated at {at} of {size}"),
        lambda: (data[:at] + source[start : start + count] + data[at + count :], f"{count} bytes spliced in at {at}"),
        lambda: (draw.randbytes(size), "random bytes instead"),
        lambda: (b"", "empty"),
    ]
    return draw.choice(changes)()


def _with_number(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Overwrite an aligned field by a number that is special in some format."""
    code, values = draw.choice(
        [("<B", (0, 1, 0x7F, 0x80, 0xFF)), ("<H", (0, 1, 0x7FFF, 0xFFFF)), ("<I", (0, 1, 2**31 - 1, 2**31, 2**32 - 1)),
         ("<Q", (0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1)), ("<e", (0.0, 65504.0, math.inf, math.nan)),
         ("<f", (0.0, 3e38, -1.0, math.inf, -math.inf, math.nan)), ("<d", (0.0, 1e300, math.inf, math.nan))]
    )  # fmt: skip
    value, width = draw.choice(values), struct.calcsize(code)
    if len(data) < width:
        return data, "unchanged"
    at = draw.randrange(len(data) // width) * width
    return data[:at] + struct.pack(code, value) + data[at + width :], f"{value} ({code[1]}) at {at} of {len(data)}"


def _with_number_in_front(draw: random.Random, data: bytes) -> tuple[bytes, str]:
    """Overwrite a field of the first 64 bytes, where headers are."""
    front, change = _with_number(draw, data[:64])
    return front + data[64:], change


def _flipped(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 8]) if data else 0):
        bit = draw.randrange(8 * len(data))
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def changed_file(draw: random.Random, path: Path, others: list[Path] | None = None) -> str:
    """Mutate the bytes of a file in place."""
    other = draw.choice(others).read_bytes() if others else b""
    data, change = changed_bytes(draw, path.read_bytes(), other)
    path.write_bytes(data)
    return f"{path.name}: {change}"


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file into memory."""
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file."""
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, metadata={"format": "pt"})


def shown(value: Any, chars: int = 60) -> str:
    """Return a value in one short line."""
    text = repr(value)
    return text if len(text) <= chars else f"{text[: chars - 3]}..."
