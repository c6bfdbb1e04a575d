"""Rows of the sources of a run, as its task and its options need them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.config.options import Config
from acsgd.io.data.rows.base import Rows
from acsgd.io.data.rows.concat import ConcatRows
from acsgd.io.data.rows.cuts import cut_concat, cut_documents, cut_examples, layout_of
from acsgd.io.data.rows.documents import DocumentRows
from acsgd.io.data.rows.labelled import LabelledRows, PairRows
from acsgd.io.data.rows.layout import RowLayout, open_layout
from acsgd.io.data.rows.objectives import CAUSAL, Objective, PrefixLM
from acsgd.io.data.rows.streamed import StreamedRows
from acsgd.io.data.rows.ul2r import UL2R, denoising_tokens
from acsgd.io.data.sources.sources import WeightedSource
from acsgd.io.data.sources.streamed import Streamed
from acsgd.io.data.stream.segment_cache import SegmentCache
from acsgd.io.data.stream.segment_files import OpenSegment
from acsgd.io.data.stream.segments import Cutter, SegmentStart, StreamSegment, read_segments
from acsgd.io.data.tokens.encode import Encoder
from acsgd.io.data.tokens.encode_examples import encoder_of
from acsgd.io.data.tokens.tokens import Corpus, token_dtype, tokenize_all, tokens_key
from acsgd.shards.tokenizer import padding_id
from acsgd.tasks import TASKS, TOKEN_TYPES

STREAMS = "streams"
"""Directory in log.dir with the segments of streamed sources."""


@dataclass(frozen=True)
class RowMaker:
    """What rows depend on besides their source."""

    config: Config
    model: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    cache_dir: Path
    """Directory of tokens and layouts."""
    reports_wait: bool = True
    """As of `open_cached`."""

    def open(self, sources: Sequence[WeightedSource]) -> list[Rows]:
        """Return the rows of each source. Tokenizes those that are not in the cache yet. Raises ValueError.

        Streamed sources are tokenized when their rows are read.
        """
        key = tokens_key(self.tokenizer)  # before use, which may change its state
        corpora = tokenize_all(
            [each for each in sources if not isinstance(each.source, Streamed)],
            self.tokenizer,
            self.cache_dir / "tokens",
            vocab_size=self.model.get_text_config().vocab_size,
            make_encoder=self._encoder,
            reports_wait=self.reports_wait,
        )
        mapped = map(self._rows, corpora)
        return [
            self._streamed(source, number, key) if isinstance(source, Streamed) else next(mapped)
            for number, (source, _) in enumerate(sources)
        ]

    @property
    def objective(self) -> Objective:
        """What is learned of documents. Raises ValueError if the tokenizer lacks the tokens for it."""
        data = self.config.data
        match data.objective:
            case "prefix":
                return PrefixLM(data.seed)
            case "ul2r":
                return UL2R(denoising_tokens(self.tokenizer, data.modes, data.sentinels), data.seed)
            case "causal":
                return CAUSAL

    @property
    def _has_types(self) -> bool:
        return TOKEN_TYPES in TASKS[self.config.model.task].inputs_of(self.model)

    def _encoder(self, tokenizer: PreTrainedTokenizerBase) -> Encoder:
        """Return what makes tokens of the examples of a source, as the task needs them."""
        config = self.config
        long = "truncate" if config.long == "split" else config.long  # documents are split when rows are made
        return encoder_of(config.model.task, tokenizer, self.model, config.data.sequence, long)

    def _streamed(self, source: Streamed, number: int, key: str) -> StreamedRows:
        """Return the rows of a streamed source. number: its index in the mixture; key: of the tokens."""
        config, data, version = self.config, self.config.data, source.fingerprint
        rows = (config.model.task, config.rows, config.long, data.sequence, self.objective.layout_key, data.window)
        parts = (version, source.options, key, self._encoder(self.tokenizer).key, rows)
        directory = f"{number}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"

        def read(position: SegmentStart) -> Iterator[StreamSegment]:
            vocabulary = self.model.get_text_config().vocab_size
            encoder = self._encoder(self.tokenizer)
            return read_segments(source, self.tokenizer, encoder, self._cutter(), position, vocab_size=vocabulary)

        def make(segment: OpenSegment) -> Rows:
            return self._rows(segment.corpus, layout_of(segment.layout) if segment.layout else None)

        span = -(-data.batch // data.window)
        cache = SegmentCache(
            Path(config.log.dir) / STREAMS / directory,
            source.name,
            data.window,
            read,
            token_dtype(self.tokenizer),
            span=span,
        )
        return StreamedRows(source.name, version, cache, make, data.window, seed=data.seed, source=number, span=span)

    def _cutter(self) -> Cutter:
        """Return what makes the rows of a segment of a streamed source."""
        config, data = self.config, self.config.data
        if config.model.task != "lm":
            return cut_examples(data.window)
        if config.rows == "concat":
            return cut_concat(data.window, data.sequence)
        return cut_documents(data.window, data.sequence, config.rows, config.long, self.objective)

    def _rows(self, corpus: Corpus, layout: RowLayout | None = None) -> Rows:
        """Return the rows of a corpus: as the task needs them, for language modelling as data.rows asks.

        layout: of documents, if it is known.
        """
        config, sequence, task = self.config, self.config.data.sequence, self.config.model.task
        padding = padding_id(self.tokenizer, self.model)
        if task == "seq2seq":
            return PairRows(corpus, sequence, padding=padding, start=self._decoder_start())
        if task != "lm":
            return LabelledRows(
                corpus,
                sequence,
                padding=padding,
                is_regression=task == "regression",
                has_types=self._has_types,
            )
        if config.rows == "concat":
            return ConcatRows(corpus, sequence)
        objective, isolate = self.objective, config.data.isolate
        if isinstance(objective, UL2R) and corpus.targets is not None:
            raise ValueError(
                f"data.objective=ul2r is for texts, but {corpus.name} has prompts; learn them, too, with "
                "data.targets=all, or use data.objective=prefix"
            )
        layout = layout or open_layout(
            corpus,
            sequence,
            config.rows,
            config.long,
            self.cache_dir / "rows",
            objective=objective,
            reports_wait=self.reports_wait,
        )
        return DocumentRows(corpus, layout, sequence, padding=padding, isolate=isolate, objective=objective)

    def _decoder_start(self) -> int:
        """Return the token that enters the decoder first. Raises ValueError if the model has none."""
        start = getattr(self.model, "decoder_start_token_id", None)
        if not isinstance(start, int):
            raise ValueError(
                f'{self.config.model.name} has no first token of a decoder; set "decoder_start_token_id" in config.json'
            )
        return start
