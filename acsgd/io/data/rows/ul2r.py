"""UL2R (Tay et al. 2022, "Transcending Scaling Laws with 0.1% Extra Compute"): a mixture of denoising objectives for
decoders, as prefix language modelling.

A part of a document becomes

    begin  mode  kept ... <0> kept ... <1>   <0> removed ... <1> removed ... end
    --- prefix, attention in both directions    --- learned

where begin are the tokens before a document, mode is that of the denoiser, <0>, <1>, ... are sentinels, and end is
eos_token. The mode S has no sentinels and no end: it removes the end of the part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from acsgd.io.data.row_spec import DenoisingMode, DenoisingTokens
from acsgd.io.data.rows.objectives import DocumentPart
from acsgd.io.data.sampler import Ints, random_words
from acsgd.model_classes import IGNORED
from acsgd.streams import mix_seed


class Denoiser(NamedTuple):
    """One way to remove tokens."""

    mode: DenoisingMode
    rate: float = 0.0
    """Fraction of the tokens that is removed."""
    span: int = 0
    """Mean length of a removed span, tokens. 0 = the end of the part, from a random token on."""


SEQUENTIAL = Denoiser("S")
MIXTURE = (*(SEQUENTIAL,) * 4, *(Denoiser("R", 0.15, 3),) * 2, Denoiser("X", 0.15, 32), Denoiser("X", 0.5, 8))
"""Denoisers, each with the same probability: 50 % S, 25 % R, 25 % X. UL2 removes half of
a text in spans of 3 or of 8 tokens. Here they have 8: spans of 3 need more sentinels, for which each row keeps room.
Layouts depend on it: another mixture needs another version of them, see `row_spec`."""


class UL2R:
    """The mixture of denoisers. Which one is used for a part, and what it removes, is drawn in each epoch."""

    has_prefix = True

    def __init__(self, tokens: DenoisingTokens, seed: int) -> None:
        self.tokens = tokens
        self._seed = seed
        self._mode_length = max(map(len, tokens.modes.values()))

    def sizes(self, lengths: Ints) -> Ints:
        """Return the sizes with the denoiser that makes the most tokens."""
        spans = [spans for _, (_, spans) in self._removed(lengths)]
        return lengths + self._mode_length + 1 + 2 * np.max(spans, axis=0)

    def mean_sizes(self, lengths: Ints) -> NDArray[np.float64]:
        """Return the mean of the sizes over the denoisers."""
        modes = [len(self.tokens.modes[each.mode]) for each in MIXTURE]
        marks = [2 * spans + bool(each.span) for each, (_, spans) in self._removed(lengths)]
        return lengths + np.mean(modes) + np.mean(marks, axis=0)

    def learned(self, lengths: Ints) -> NDArray[np.float64]:
        """Return the mean number of tokens that are removed, with sentinels and end."""
        pairs = self._removed(lengths)
        return np.mean(
            [tokens + spans + 1 if each.span else (lengths + 1) / 2 for each, (tokens, spans) in pairs], axis=0
        )

    def _removed(self, lengths: Ints) -> list[tuple[Denoiser, tuple[Ints, Ints]]]:
        """Return each denoiser with the numbers of removed tokens and of spans; zeros without spans."""
        none = np.zeros_like(lengths), np.zeros_like(lengths)
        number = len(self.tokens.sentinels)
        return [(each, removed(lengths + 1, each, number) if each.span else none) for each in MIXTURE]

    def apply(self, tokens: Ints, labels: Ints, place: int, epoch: int) -> DocumentPart:
        """Return the kept and the removed tokens."""
        text = np.append(tokens, labels[-1])
        begin = self.tokens.begin if text[: len(self.tokens.begin)].tolist() == [*self.tokens.begin] else ()
        text = text[len(begin) :]
        seed = mix_seed(self._seed, place, epoch)
        denoiser = MIXTURE[seed % len(MIXTURE)]
        has_sentinels = np.isin(text, self.tokens.sentinels).any()  # then it could not be restored
        if len(text) < 2 or has_sentinels:
            denoiser = SEQUENTIAL
        kept, learned = self._divide(text, denoiser, mix_seed(seed, 1))
        prefix = [*begin, *self.tokens.modes[denoiser.mode], *kept]
        row = np.array([*prefix, *learned], dtype=np.int64)
        is_learned = np.arange(1, len(row)) >= len(prefix)
        return DocumentPart(row[:-1], np.where(is_learned, row[1:], IGNORED), min(len(prefix), len(row) - 1))

    def _divide(self, text: Ints, denoiser: Denoiser, seed: int) -> tuple[list[int], list[int]]:
        """Return what is kept and what is learned, with sentinels."""
        if not denoiser.span:
            cut = 1 + seed % (len(text) - 1) if len(text) > 1 else 0
            return text[:cut].tolist(), text[cut:].tolist()
        count, spans = (int(x) for x in removed(np.array(len(text)), denoiser, len(self.tokens.sentinels)))
        keep, remove = _random_lengths(len(text) - count, spans, seed), _random_lengths(count, spans, mix_seed(seed, 1))
        pieces = np.split(text, np.cumsum(np.stack([keep, remove], axis=1))[:-1])
        kept, learned = list[int](), list[int]()
        for sentinel, before, span in zip(self.tokens.sentinels, pieces[::2], pieces[1::2], strict=False):
            kept += [*before.tolist(), sentinel]
            learned += [sentinel, *span.tolist()]
        return kept, [*learned, self.tokens.end]


def removed(tokens: Ints, denoiser: Denoiser, sentinels: int) -> tuple[Ints, Ints]:
    """Return the number of removed tokens, and of the spans they form, by the number of tokens of a text, at least 2.

    As in T5, whose random_spans_noise_mask it follows: both depend on the length alone. sentinels: maximum of spans.
    """
    count = np.clip(np.rint(tokens * denoiser.rate), 1, tokens - 1).astype(np.int64)
    spans = np.clip(np.rint(count / denoiser.span), 1, np.minimum(np.minimum(count, tokens - count), sentinels))
    return count, spans.astype(np.int64)


def _random_lengths(total: int, count: int, seed: int) -> Ints:
    """Return `count` positive lengths with a sum, all such lengths with the same probability."""
    cuts = 1 + np.sort(np.argsort(random_words(seed, total - 1))[: count - 1])
    return np.diff(cuts, prepend=0, append=total)
