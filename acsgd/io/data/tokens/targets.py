"""Tokens of the text of an example, and which of them are targets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Encoding

from acsgd.io.data.formats.base import Example, FormatError


class TextTokens(NamedTuple):
    """Tokens of the text of an example."""

    ids: Sequence[int]
    targets: Sequence[tuple[int, int]]
    """First token of each part that is learned, and its end."""
    has_control: bool = False
    """Whether messages of a chat have special tokens in their text that are control tokens."""


def with_targets(example: Example, ids: Sequence[int], encoding: Encoding) -> TextTokens | FormatError:
    """Return tokens with those as targets that stand for a character of a target, or why the example is refused.

    encoding: of the tokens, which are in the order of their characters, so that few of them are looked at: a list of
    the characters of all tokens takes a fifth of the time of tokenizing.
    """
    targets = []
    begin = 0
    for text, is_target in example.segments:
        end = begin + len(text)
        if is_target and text:
            first = bisect_right(range(len(ids)), begin, key=lambda token: _span(encoding, token)[1])
            last = bisect_left(range(len(ids)), end, key=lambda token: _span(encoding, token)[0])
            targets.append((first, last))
            if example.answers_begin_tokens and first < last:
                start = _span(encoding, first)[0]
                if example.text[start:begin].strip():
                    return _begins_within(example.text[slice(*_span(encoding, first))])
        begin = end
    return TextTokens(ids, targets)


def _span(encoding: Encoding, token: int) -> tuple[int, int]:
    """Return the first character of a token, and its end.

    Some tokenizers report an empty span, after it, for a token of blanks.
    """
    start, end = encoding.token_to_chars(token) or (0, 0)
    end = max(end, 1)
    return min(start, end - 1), end


def _begins_within(token: str) -> FormatError:
    return FormatError(
        f"has an answer that begins within a token, {token!r}",
        "end the prompt of the chat template with a special token or a newline",
    )
