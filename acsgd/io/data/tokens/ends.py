"""What ends a learned text: the tokens at which generation with the trained model has to stop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from acsgd.io.files.arrays import Array
from acsgd.shards.tokenizer import added_tokens, name_tokens


class TextEnds(NamedTuple):
    """How the learned texts of a source end."""

    ids: tuple[int, ...] = ()
    """Added tokens of the tokenizer in which learned parts of documents end, such as eos_token."""
    documents: int = 0
    """Number of documents that are learned, in whole or in part."""
    num_open: int = 0
    """Number of those whose last learned part ends in an ordinary token, which says nothing to generation."""

    @classmethod
    def union(cls, parts: Iterable[TextEnds]) -> TextEnds:
        """Return how all texts end."""
        ids, documents, num_open = tuple(zip(*parts, strict=True)) or ((), (), ())
        return cls(tuple(dict.fromkeys(id_ for each in ids for id_ in each)), sum(documents), sum(num_open))

    def describe(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return a sentence on the tokens."""
        return f"learned texts end with {name_tokens(tokenizer, self.ids) or 'no special token'}"

    def notes(self, tokenizer: PreTrainedTokenizerBase, known: Sequence[int]) -> list[str]:
        """Return sentences for the user. known: tokens at which the files of the model end a text."""
        found = []
        if new := [id_ for id_ in self.ids if id_ not in known]:
            others = f", and at {name_tokens(tokenizer, known)} as the model's files say" if known else ""
            found.append(
                f"ends: learned texts end with {name_tokens(tokenizer, new)}: generation with checkpoints and exports "
                f"of this run stops there{others}"
            )
        if self.num_open:
            found.append(
                f"warning: {self.num_open:,} of {self.documents:,} documents end in no learned special token, after "
                "which generation would stop; let the chat template write one at the end of an answer, inside of "
                "{% generation %} if it has such marks"
            )
        return found


class EndFinder:
    """Finds how the learned texts among encoded documents end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._marks = np.array(sorted(added_tokens(tokenizer)))
        self._blanks: dict[int, bool] = {}

    def find(self, tokens: Array, targets: Array | None, ends: NDArray[np.int64]) -> TextEnds:
        """Return how documents end. targets: None if all tokens are; ends: positions after their last tokens.

        Blanks after the end do not count: templates put a newline there.
        """
        if not len(ends):
            return TextEnds()
        ids = tokens[: ends[-1]]
        is_target = np.ones(len(ids), bool) if targets is None else targets[: ends[-1]].astype(bool)
        is_last = np.zeros(len(ids), bool)
        is_last[ends[ends > 0] - 1] = True
        # the last token of each learned part, and the document that it is in
        places = np.flatnonzero(is_target & (is_last | ~np.append(is_target[1:], False)))
        document = np.searchsorted(ends, places, side="right")
        starts = np.concatenate([[0], ends])[document]
        while (is_blank := self._are_blank(ids[places]) & (places > starts) & is_target[places - 1]).any():
            places = places - is_blank
        is_mark = np.isin(ids[places], self._marks)
        is_final = np.append(document[1:] != document[:-1], True)[: len(places)]
        found = tuple(np.unique(ids[places][is_mark]).tolist())
        return TextEnds(found, int(is_final.sum()), int((is_final & ~is_mark).sum()))

    def find_in_part(self, tokens: Array, targets: Array | None, ends: NDArray[np.int64]) -> TextEnds:
        """Return how documents end of which the last one may go on after these tokens: it counts if it ends in a token
        that is no ordinary one.
        """
        known, complete = self.find(tokens, targets, ends[:-1]), self.find(tokens, targets, ends)
        return complete if complete.num_open == known.num_open else known._replace(ids=complete.ids)

    def _are_blank(self, tokens: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which tokens are ordinary ones without a visible character."""
        known, places = np.unique(tokens, return_inverse=True)
        for id_ in known.tolist():
            if id_ not in self._blanks:
                text = self._tokenizer.decode([id_])
                self._blanks[id_] = id_ not in self._marks and not str(text).strip()
        return np.array([self._blanks[id_] for id_ in known.tolist()], bool)[places]
