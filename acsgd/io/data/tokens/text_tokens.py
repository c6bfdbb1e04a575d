"""Tokens of the text of an example: which of them are targets, and which special tokens are ordinary text."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from acsgd.io.data.formats.base import Example, FormatError, TextSpan

FIRST_STAND_IN = 0xF0000
"""First character that stands for a special token: private use, so that no text has a meaning for it."""


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


class PlainTokens(NamedTuple):
    """Tokens of a text."""

    ids: list[int]
    encoding: Encoding
    """Encoding of a text of the same length."""


class PlainSpecials:
    """Encodes texts in which special tokens at given places are ordinary text, and those elsewhere are special tokens.

    Works on a copy of the tokenizer that takes special tokens for text wherever they are. Those that are to be
    recognized are replaced by stand-ins of the same length, added tokens of the copy with the same flags, so that all
    other text is normalized, cut and merged between the same borders.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """tokenizer: a fast one, which is not changed."""
        special = {id_: token for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._copy.no_truncation()
        self._copy.no_padding()
        self._copy.encode_special_tokens = True
        self._stand_ins = {
            token.content: chr(FIRST_STAND_IN + number) * len(token.content)
            for number, token in enumerate(special.values())
        }
        flags = ("lstrip", "rstrip", "single_word", "normalized")
        self._copy.add_tokens(
            [
                AddedToken(self._stand_ins[token.content], **{flag: getattr(token, flag) for flag in flags})
                for token in special.values()
            ]
        )
        self._ids = {self._copy.token_to_id(self._stand_ins[token.content]): id_ for id_, token in special.items()}
        self._control = special.keys() - {tokenizer.unk_token_id}
        longest_first = sorted(self._stand_ins, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def encode(self, text: str, plain: Sequence[TextSpan], usual: Sequence[int]) -> PlainTokens | None:
        """Return the tokens of a text. plain: spans in which special tokens are text; usual: ids by the tokenizer.

        None if they cannot be exact: if the copy does not encode the whole text, with all special tokens recognized, as
        the tokenizer does, or if its model makes a special token of text.
        """
        if any(FIRST_STAND_IN <= ord(char) < FIRST_STAND_IN + len(self._stand_ins) for char in text):
            return None
        if self._renamed(self._encoding(text, ())) != list(usual):
            return None
        encoding = self._encoding(text, plain)
        if not self._control.isdisjoint(encoding.ids):
            return None
        return PlainTokens(self._renamed(encoding), encoding)

    def _encoding(self, text: str, plain: Sequence[TextSpan]) -> Encoding:
        """Encode a text with stand-ins for the special tokens outside of the spans."""

        def replaced(found: re.Match[str]) -> str:
            is_plain = any(found.start() < end and start < found.end() for start, end in plain)
            return found[0] if is_plain else self._stand_ins[found[0]]

        return self._copy.encode(self._pattern.sub(replaced, text), add_special_tokens=False)

    def _renamed(self, encoding: Encoding) -> list[int]:
        """Return the ids of an encoding with those of the special tokens in place of their stand-ins."""
        return [self._ids.get(id_, id_) for id_ in encoding.ids]
