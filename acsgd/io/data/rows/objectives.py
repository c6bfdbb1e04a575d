"""What is learned of a part of a document (data.objective), and how much of a row it takes."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from acsgd.io.data.sampler import Ints
from acsgd.model_classes import IGNORED
from acsgd.streams import mix_seed


class DocumentPart(NamedTuple):
    """A part of a document in a row."""

    tokens: Ints
    """Inputs."""
    labels: Ints
    """Next token of each input, or IGNORED."""
    prefix: int = 0
    """Number of tokens at its start that attend to each other in both directions."""


class Objective(Protocol):
    """What is learned of a part of a document."""

    @property
    def has_prefix(self) -> bool:
        """Whether parts have prefixes with attention in both directions."""
        ...

    def sizes(self, lengths: Ints) -> Ints:
        """Return how many tokens of a row parts take at most, by their number of inputs. Not decreasing."""
        ...

    def mean_sizes(self, lengths: Ints) -> NDArray[np.float64]:
        """Return how many tokens of a row parts take on average."""
        ...

    def learned(self, lengths: Ints) -> NDArray[np.float64]:
        """Return the mean number of labels of parts of texts, by their number of inputs."""
        ...

    def apply(self, tokens: Ints, labels: Ints, place: int, epoch: int) -> DocumentPart:
        """Return inputs and labels of a part of a row.

        tokens, labels: as in causal language modelling; place: index of the first token of the part in its corpus.
        A function of the seed and the arguments.
        """
        ...


class Causal:
    """Each token is predicted from those before it."""

    has_prefix = False

    def sizes(self, lengths: Ints) -> Ints:
        """Return the lengths."""
        return lengths

    def mean_sizes(self, lengths: Ints) -> NDArray[np.float64]:
        """Return the lengths."""
        return lengths.astype(np.float64)

    def learned(self, lengths: Ints) -> NDArray[np.float64]:
        """Return the lengths."""
        return lengths.astype(np.float64)

    def apply(self, tokens: Ints, labels: Ints, place: int, epoch: int) -> DocumentPart:
        """Return the tokens with all labels."""
        return DocumentPart(tokens, labels)


CAUSAL = Causal()


class PrefixLM:
    """Prefix language modelling (Raffel et al. 2020, section 3.2.1): full attention within a prefix, loss on the rest.

    The prefix is what is before the first target, such as a prompt; of a text without one, it ends at a random token.
    """

    has_prefix = True

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def sizes(self, lengths: Ints) -> Ints:
        """Return the lengths."""
        return lengths

    def mean_sizes(self, lengths: Ints) -> NDArray[np.float64]:
        """Return the lengths."""
        return lengths.astype(np.float64)

    def learned(self, lengths: Ints) -> NDArray[np.float64]:
        """Return half of the lengths: prefixes end anywhere."""
        return (lengths + 1) / 2

    def apply(self, tokens: Ints, labels: Ints, place: int, epoch: int) -> DocumentPart:
        """Return the tokens, with the labels after the prefix."""
        is_target = labels != IGNORED
        if not is_target[0]:
            return DocumentPart(tokens, labels, int(is_target.argmax()) + 1 if is_target.any() else len(tokens))
        prefix = 1 + mix_seed(self._seed, place, epoch) % len(tokens)
        return DocumentPart(tokens, np.where(np.arange(len(tokens)) < prefix - 1, IGNORED, labels), prefix)


def longest_part(objective: Objective, sequence: int) -> int:
    """Return the largest number of inputs of a part that fits into a row. Raises ValueError if there is none."""
    fits = objective.sizes(np.arange(1, sequence + 1)) <= sequence
    if not fits.any():
        raise ValueError(f"data.sequence={sequence} is too short for data.objective=ul2r; use a longer one")
    return int(np.flatnonzero(fits)[-1]) + 1
