"""Sources and a tokenizer, opened without a run."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.config.options import DataConfig
from acsgd.io.formats.formats import read_options
from acsgd.io.formats.labels import LABELLED
from acsgd.io.sources.base import Source
from acsgd.io.sources.sources import parse_sources
from acsgd.io.sources.streamed import PREFIX, Streamed
from acsgd.shards.config import read_config
from acsgd.shards.hub import find_model
from acsgd.shards.tokenizer import load_tokenizer


def refuse_streams(sources: Sequence[Source], action: str) -> None:
    """Raise ValueError if a source is streamed. action: what needs all records at once."""
    for source in sources:
        if isinstance(source, Streamed):
            raise ValueError(f"{source.key}: {action} reads all records of {source.name}; remove {PREFIX}")


def open_sources(
    data: DataConfig, model: str, task: str = "lm"
) -> tuple[Sequence[Source], PreTrainedTokenizerBase, PreTrainedConfig]:
    """Return the sources, and tokenizer and config of a model, which is downloaded if it is a Hugging Face id.

    Raises ValueError.
    """
    options = read_options(data, has_labels=task in LABELLED)
    sources = [source for source, _ in parse_sources(data.sources, key="source", options=options)]
    directory = find_model(model, option="--model", weights=False)
    config = read_config(directory, task)
    return sources, load_tokenizer(directory, config), config
