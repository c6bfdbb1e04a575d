"""Tokens of the text of an example: which of them are targets, and which special tokens are ordinary text."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from tokenizers import AddedToken, Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from acsgd.io.data.formats.base import Example, FormatError, TextSpan

FIRST_STAND_IN = 0xF0000
"""First character that stands for a special token: private use, so that no text has a meaning for it."""


FOLLOWING = "a"
"""Word after a prompt that ends in blanks, to find those that the tokenizer merges with a word."""
QUIET = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
"""Options of a tokenizer: ids alone, and no warning if a text is longer than the model's maximum sequence."""


class TextTokens(NamedTuple):
    """Tokens of the text of an example."""

    ids: Sequence[int]
    targets: Sequence[tuple[int, int]]
    """First token of each part that is learned, and its end."""
    has_control: bool = False
    """Whether messages of a chat have special tokens in their text that are control tokens."""


class PromptTokens(NamedTuple):
    """Tokens of a prompt."""

    ids: list[int]
    end: int
    """Number of characters of the prompt that they stand for."""


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> list[PromptTokens]:
    """Return the tokens of prompts, in training and in generation, without special tokens around them.

    Blanks at the end of a prompt that the tokenizer merges with a word after them are left to the answer: texts have
    the token " yes", so that an answer to "Answer: " begins after "Answer:".
    """
    is_followed = [tokenizer.is_fast and prompt[-1:].isspace() for prompt in prompts]
    texts = [f"{prompt}{FOLLOWING}" if each else prompt for prompt, each in zip(prompts, is_followed, strict=True)]
    found = list[PromptTokens]()
    if not prompts:
        return found
    encoded = tokenizer(texts, add_special_tokens=False, **QUIET)
    for index, (prompt, ids) in enumerate(zip(prompts, encoded["input_ids"], strict=True)):
        end = len(prompt)
        if is_followed[index]:
            encoding = encoded.encodings[index]
            ids = ids[: _token_beyond(encoding, len(ids), end)]
            end = _span(encoding, len(ids) - 1)[1] if ids else 0
        found.append(PromptTokens(ids, end))
    return found


def plain_prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, specials: PlainSpecials, prompt: str, plain: Sequence[TextSpan]
) -> list[int] | None:
    """Return the tokens of a prompt as `prompt_tokens` does, with special tokens in some spans as ordinary text.

    None if they cannot be exact, see `PlainSpecials`.
    """
    text = f"{prompt}{FOLLOWING}" if prompt[-1:].isspace() else prompt
    found = specials.encode(text, plain, tokenizer(text, add_special_tokens=False, **QUIET)["input_ids"])
    return None if found is None else found.ids[: _token_beyond(found.encoding, len(found.ids), len(prompt))]


class Answer(NamedTuple):
    """A learned part of a text, and the prompt before it, from the last added token of the tokenizer on.

    Nothing before an added token has an effect on the tokens after it.
    """

    begin: int
    """First character."""
    end: int
    """Character after the last one."""
    prompt: str
    at: int
    """First token of the prompt."""


def answers_of(example: Example, ids: Sequence[int], encoding: Encoding, added: Collection[int]) -> list[Answer]:
    """Return the answers in an example. ids, encoding: of its text; added: the added tokens of the tokenizer."""
    spans: list[TextSpan] = []
    begin = 0
    for text, is_target in example.segments:
        end = begin + len(text)
        if is_target and text:
            first = spans.pop()[0] if spans and spans[-1][1] == begin else begin
            spans.append((first, end))
        begin = end
    places = [token for token, id_ in enumerate(ids) if id_ in added] if spans else []
    answers = []
    for begin, end in spans:
        before = bisect_right(places, begin, key=lambda token: _span(encoding, token)[1])
        at = places[before - 1] if before else 0
        start = _span(encoding, at)[0] if before else 0
        answers.append(Answer(begin, end, example.text[start:begin], at))
    return answers


def with_targets(
    example: Example,
    ids: Sequence[int],
    encoding: Encoding,
    answers: Sequence[Answer],
    prompts: Mapping[str, PromptTokens],
    tokenizer: PreTrainedTokenizerBase,
) -> TextTokens | FormatError:
    """Return tokens with those after each prompt as targets, up to the end of the answer.

    The tokens of a prompt are those with which generation begins. A text whose tokens begin otherwise, since the
    tokenizer merges characters across the border, is divided there; if that cannot be exact, it is refused. encoding:
    of the tokens, which are in the order of their characters, so that few of them are looked at: a list of the
    characters of all tokens takes a fifth of the time of tokenizing. prompts: tokens by the prompts of the answers.
    """
    found = list[int]()
    done = 0
    targets = []
    for begin, end, text, at in answers:
        prompt = prompts[text]
        first, last = at + len(prompt.ids), _token_from(encoding, len(ids), end)
        if ids[at:first] != prompt.ids and example.plain:  # special tokens in the prompt may be ordinary text
            first = max(at, _token_beyond(encoding, len(ids), begin))
        elif ids[at:first] != prompt.ids:
            stop = _token_from(encoding, len(ids), begin)
            until = _span(encoding, stop)[0] if stop < len(ids) else len(example.text)
            part = example.text[begin - len(text) + prompt.end : until]
            rest = _continuation(tokenizer, prompt.ids, part, ids[at:stop])
            if rest is None or at < done:
                return _begins_within(example.text[begin : begin + 20])
            found += [*ids[done:at], *prompt.ids, *rest]
            first, done = stop - len(rest), stop
        targets.append((len(found) + first - done, len(found) + max(last, done) - done))
    return TextTokens([*found, *ids[done:]], targets)


def _continuation(
    tokenizer: PreTrainedTokenizerBase, prompt: list[int], text: str, usual: Sequence[int]
) -> list[int] | None:
    """Return tokens of a text that continues a prompt within a word; None if there are none.

    usual: tokens of both together.
    """
    for before in ("", "\n"):  # tokenizers may put a blank before a text, which it has not after a newline
        head, whole = tokenizer([before, f"{before}{text}"], add_special_tokens=False, **QUIET)["input_ids"]
        rest: list[int] = whole[len(head) :]
        texts = [
            tokenizer.decode([id_ for id_ in ids if id_ != tokenizer.unk_token_id], clean_up_tokenization_spaces=False)
            for ids in ([*prompt, *rest], usual)
        ]
        if whole[: len(head)] == head and texts[0] == texts[1]:
            return rest
    return None


def _token_from(encoding: Encoding, tokens: int, char: int) -> int:
    """Return the first of a number of tokens that begins at a character or after it."""
    return bisect_left(range(tokens), char, key=lambda token: _span(encoding, token)[0])


def _token_beyond(encoding: Encoding, tokens: int, char: int) -> int:
    """Return the first of a number of tokens that stands for something at a character or after it."""
    return bisect_right(range(tokens), char, key=lambda token: _span(encoding, token)[1])


def _span(encoding: Encoding, token: int) -> tuple[int, int]:
    """Return the first character of a token, and its end.

    Some tokenizers report an empty span, after it, for a token of blanks.
    """
    start, end = encoding.token_to_chars(token) or (0, 0)
    end = max(end, 1)
    return min(start, end - 1), end


def _begins_within(answer: str) -> FormatError:
    return FormatError(
        f"has an answer that begins within a token, at {answer!r}",
        "end the prompt, or the prompt of the chat template, with a special token or a newline",
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
