"""Cut long texts into pieces that are tokenized one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TextIO

PIECE_CHARS = 2**17
"""Minimum length of a piece of a long text, characters. A piece ends at a newline.

A longer line is cut at multiples of this length."""


def pieces_of(text: str) -> Iterator[str]:
    """Yield a text in pieces of at least PIECE_CHARS and less than 2 PIECE_CHARS characters, an empty text as one."""
    yield from [text] if len(text) <= PIECE_CHARS else joined(_lines(text))


def parts_of(file: TextIO) -> Iterator[tuple[int, str]]:
    """Yield (line number, part of the line) of a file, parts of at most PIECE_CHARS characters."""
    line = 1
    while part := file.readline(PIECE_CHARS):
        yield line, part
        line += part.endswith("\n")


def joined(parts: Iterable[str]) -> Iterator[str]:
    """Join parts of at most PIECE_CHARS characters into pieces, as `pieces_of` cuts the whole text."""
    held: list[str] = []
    chars = 0
    for part in parts:
        if chars >= PIECE_CHARS:
            yield "".join(held)
            held, chars = [], 0
        held.append(part)
        chars += len(part)
    if held:
        yield "".join(held)


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, in parts of at most PIECE_CHARS characters."""
    start = 0
    while start < len(text):
        newline = text.find("\n", start, start + PIECE_CHARS)
        end = newline + 1 if newline >= 0 else start + PIECE_CHARS
        yield text[start:end]
        start = end
