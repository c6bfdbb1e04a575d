"""Corpora in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from acsgd.io.rows.base import RowReader
from acsgd.io.rows.concat import ConcatRows
from acsgd.io.sampling.tokens import Corpus


def one_document(tokens: NDArray[Any], skipped: str | None = None) -> Corpus:
    """Return a corpus of one document."""
    return Corpus("memory", "memory", tokens, np.array([0, len(tokens)]), skipped=skipped)


def documents_of(lengths: list[int], *, targets: NDArray[Any] | None = None, overlap: int = 0) -> Corpus:
    """Return a corpus of documents with these numbers of tokens. All tokens are distinct."""
    offsets = np.cumsum([0, *lengths])
    return Corpus("memory", "memory", np.arange(offsets[-1]), offsets, targets, overlap)


def windows_of(corpora: list[Corpus], sequence: int, micro: int, **wants: bool) -> RowReader:
    """Return the reader of rows that are windows of the tokens."""
    return RowReader([ConcatRows(corpus, sequence) for corpus in corpora], micro, **wants)
