"""Records as the model sees them."""

from __future__ import annotations

from itertools import groupby, islice

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from acsgd.config.options import DataConfig
from acsgd.data.opened import open_sources
from acsgd.io.formats.formats import read_each
from acsgd.io.sampling.encode import DocumentEncoder, Encoded
from acsgd.io.sources.base import BadRecord, RecordCounts

MAX_TOKENS = 2000
"""Number of tokens of a record that are shown."""


def show(data: DataConfig, model: str, number: int) -> None:
    """Print the first records of each source. Raises ValueError."""
    sources, tokenizer = open_sources(data, model)
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
            learned = int(encoded.targets.sum())
            console.print(Text(f"\n{where}: {len(encoded.tokens)} tokens, {learned} of them learned", style="bold"))
            console.print(_decoded(encoded, tokenizer, marks=not console.is_terminal))


def _decoded(encoded: Encoded, tokenizer: PreTrainedTokenizerBase, *, marks: bool) -> Text:
    """Return the text of tokens, with the masked ones dimmed or in brackets."""
    text = Text()
    pairs = zip(encoded.tokens[:MAX_TOKENS].tolist(), encoded.targets.tolist(), strict=False)
    for is_target, group in groupby(pairs, key=lambda pair: pair[1]):
        part = tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False)
        assert isinstance(part, str)
        text.append(f"⟦{part}⟧" if marks and not is_target else part, style="" if is_target else "dim")
    if (rest := len(encoded.tokens) - MAX_TOKENS) > 0:
        text.append(f"\n... and {rest} more tokens", style="italic")
    return text
