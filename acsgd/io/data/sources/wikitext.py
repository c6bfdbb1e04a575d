"""WikiText (Merity et al. 2016), as running text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from acsgd.io.data.sources.base import TEXT, BadRecord, RecordCounts, SourceRecord
from acsgd.io.data.sources.json_records import MAX_RECORD_CHARS
from acsgd.io.data.sources.sets import LocalSet
from acsgd.io.data.sources.text import fraction_read, not_utf8, open_text

TITLE = re.compile(r" = [^=](.*[^=])? = \n?")
"""Line with the title of an article; the titles of sections have more signs of equality."""
SPACES: Sequence[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r" @([-,.])@ "), r"\1"),
    (re.compile(r" ([,.;:!?%)\]}])"), r"\1"),
    (re.compile(r"([(\[{$£€]) "), r"\1"),
    (re.compile(r'" ([^"\n]*) "'), r'"\1"'),
    (re.compile(r" ('(?:s|t|re|ve|ll|m|d)?)(?= |\n|$)"), r"\1"),
    (re.compile(r"(?<!\S)= =(?: =)*(?!\S)"), lambda match: match[0].replace(" ", "")),
    (re.compile(r" +\n"), "\n"),
    (re.compile(r"(?m)^ +"), ""),
]
"""Spaces that WikiText adds, and what they become."""


class WikiText(LocalSet):
    """Files of WikiText, "wikitext:PATH": a document for each article, with the spaces of running text.

    What is before the first title of a file belongs to its article.
    """

    endings = (".raw", ".tokens", ".txt")

    def _read_file(self, name: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        with open_text(Path(name), key=self.key) as file:
            counts.fraction = partial(fraction_read, file)
            article: list[str] = []
            first, has_title = 1, False
            for number, line in enumerate(iter(partial(file.readline, MAX_RECORD_CHARS), ""), start=1):
                counts.records = number
                if error := not_utf8(line):
                    yield BadRecord(f"{name}, line {number}", *error)
                    continue
                is_title = bool(TITLE.fullmatch(line))
                if is_title and has_title:
                    yield SourceRecord({TEXT: detokenized("".join(article))}, f"{name}, line {first}")
                    article, first = [], number
                has_title = has_title or is_title
                article.append(line)
            if article:
                yield SourceRecord({TEXT: detokenized("".join(article))}, f"{name}, line {first}")


def detokenized(text: str) -> str:
    """Return a text of WikiText without the spaces around its tokens."""
    for pattern, replacement in SPACES:
        text = pattern.sub(replacement, text)
    return text
