"""Records as the model sees them."""

from __future__ import annotations

from itertools import groupby, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from acsgd.config.options import DataConfig
from acsgd.data.opened import open_sources
from acsgd.io.formats.formats import read_each
from acsgd.io.sampling.encode import DocumentEncoder
from acsgd.io.sources.base import BadRecord, RecordCounts

MAX_TOKENS = 2000
"""Number of tokens of a record or row that are shown."""


def show_records(data: DataConfig, model: str, number: int) -> None:
    """Print the first records of each source. Raises ValueError."""
    sources, tokenizer, _ = open_sources(data, model)
    console = Console(soft_wrap=True, highlight=False)
    masked = "dimmed" if console.is_terminal else "in ⟦⟧"
    for source in sources:
        counts, encoder = RecordCounts(), DocumentEncoder(tokenizer)
        for index, (where, example) in enumerate(islice(read_each(source, tokenizer, counts), number)):
            if not index:
                console.print(Text(f'format "{counts.format}"; masked tokens are {masked}', style="bold"))
            if isinstance(example, BadRecord):
                console.print(Text(f"\n{where} {example.reason}; {example.remedy}", style="red"))
                continue
            encoded = encoder.encode([example], encoder.tokenize([example]))
            if error := encoded.refused.get(0):
                console.print(Text(f"\n{where} {error.reason}; {error.remedy}", style="red"))
                continue
            learned = int(encoded.targets.sum())
            console.print(Text(f"\n{where}: {len(encoded.tokens)} tokens, {learned} of them learned", style="bold"))
            console.print(decoded(encoded.tokens, encoded.targets, tokenizer, marks=not console.is_terminal))


def decoded(
    tokens: NDArray[Any], targets: NDArray[np.bool_], tokenizer: PreTrainedTokenizerBase, *, marks: bool
) -> Text:
    """Return the text of tokens, with those that are no targets dimmed or in brackets."""
    text = Text()
    pairs = zip(tokens[:MAX_TOKENS].tolist(), targets.tolist(), strict=False)
    for is_target, group in groupby(pairs, key=lambda pair: pair[1]):
        part = tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False)
        assert isinstance(part, str)
        text.append(f"⟦{part}⟧" if marks and not is_target else part, style="" if is_target else "dim")
    if (rest := len(tokens) - MAX_TOKENS) > 0:
        text.append(f"\n... and {rest} more tokens", style="italic")
    return text
