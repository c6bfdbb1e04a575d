"""Sizes with units, as users type them."""

from __future__ import annotations

import re

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
"""Units of sizes, bytes."""


def parse_size(text: str, *, option: str, example: str) -> int:
    """Return a number of bytes. Raises ValueError that names the option and gives an example."""
    number, unit = re.fullmatch(r"([0-9.]*)(.*)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    if unit not in UNITS or not re.fullmatch(r"\d+(\.\d+)?", number) or float(number) == 0:
        raise ValueError(f"{option} {text} is not a size; give a number with a unit, such as {example}")
    return int(float(number) * UNITS[unit])
