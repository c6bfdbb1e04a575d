"""Rows of the sources of a run, as its task and its options need them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.io.data.row_spec import RowSpec, RowStage
from acsgd.io.data.rows.base import Rows
from acsgd.io.data.rows.documents import ConcatRows, DocumentRows
from acsgd.io.data.rows.labelled import LabelledRows, PairRows
from acsgd.io.data.rows.layout import RowLayout, make_layout, open_layout
from acsgd.io.data.rows.objectives import CAUSAL, Objective, PrefixLM
from acsgd.io.data.rows.streamed import StreamedRows, cut_concat, cut_documents, cut_examples, layout_of
from acsgd.io.data.rows.ul2r import UL2R
from acsgd.io.data.sources.base import Source
from acsgd.io.data.sources.sources import WeightedSource
from acsgd.io.data.sources.streamed import Streamed
from acsgd.io.data.stream.segment_cache import SegmentCache
from acsgd.io.data.stream.segment_files import OpenSegment
from acsgd.io.data.stream.segments import Cutter, SegmentStart, StreamSegment, read_segments
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.encode import Encoder
from acsgd.io.data.tokens.encode_examples import encoder_of
from acsgd.io.data.tokens.tokens import open_tokens, token_dtype
from acsgd.tasks import TASKS, TOKEN_TYPES


def objective_of(spec: RowSpec) -> Objective:
    """Return what is learned of documents."""
    match spec.objective:
        case "prefix":
            return PrefixLM(spec.seed)
        case "ul2r":
            assert spec.denoising is not None
            return UL2R(spec.denoising, spec.seed)
        case "causal":
            return CAUSAL


@dataclass(frozen=True)
class RowMaker:
    """Makes the rows of sources."""

    spec: RowSpec
    model: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    name: str
    """model.name, for messages."""
    cache_dir: Path
    """Directory of tokens and layouts."""
    stream_dir: Path
    """Directory of the segments of streamed sources."""
    reports_wait: bool = True
    """As of `open_cached`."""

    def open(self, sources: Sequence[WeightedSource]) -> list[Rows]:
        """Return the rows of each source. Tokenizes those that are not in the cache yet. Raises ValueError.

        Streamed sources are tokenized when their rows are read.
        """
        return [
            self._streamed(source, number) if isinstance(source, Streamed) else self._rows(self._corpus(source))
            for number, (source, _) in enumerate(sources)
        ]

    def _corpus(self, source: Source) -> Corpus:
        return open_tokens(
            source,
            self.spec,
            self.tokenizer,
            self.cache_dir / "tokens",
            self._encoder(),
            vocab_size=self.model.get_text_config().vocab_size,
            reports_wait=self.reports_wait,
        )

    @property
    def _has_types(self) -> bool:
        return TOKEN_TYPES in TASKS[self.spec.task].inputs_of(self.model)

    def _encoder(self) -> Encoder:
        """Return what makes tokens of the examples of a source, as the task needs them."""
        return encoder_of(self.spec.task, self.tokenizer, self.model, *self.spec.truncation or (0, "truncate"))

    def _streamed(self, source: Streamed, number: int) -> StreamedRows:
        """Return the rows of a streamed source. number: its index in the mixture."""
        spec, version, window = self.spec, source.fingerprint, self.spec.window
        assert window is not None

        def read(position: SegmentStart) -> Iterator[StreamSegment]:
            vocabulary = self.model.get_text_config().vocab_size
            encoder = self._encoder()
            return read_segments(source, self.tokenizer, encoder, self._cutter(window), position, vocab_size=vocabulary)

        def make(segment: OpenSegment) -> Rows:
            return self._rows(segment.corpus, layout_of(segment.layout) if segment.layout else None)

        span = -(-spec.batch // window)
        directory = self.stream_dir / f"{number}-{spec.key(RowStage.SEGMENTS, version)}"
        cache = SegmentCache(directory, source.name, window, read, token_dtype(self.tokenizer), span=span)
        return StreamedRows(source.name, version, cache, make, window, seed=spec.seed, source=number, span=span)

    def _cutter(self, window: int) -> Cutter:
        """Return what makes the rows of a segment of a streamed source."""
        spec = self.spec
        if spec.task != "lm":
            return cut_examples(window)
        if spec.rows == "concat":
            return cut_concat(window, spec.text_length)
        assert spec.long is not None
        return cut_documents(window, spec.text_length, spec.rows, spec.long, objective_of(spec))

    def _rows(self, corpus: Corpus, layout: RowLayout | None = None) -> Rows:
        """Return the rows of a corpus: as the task needs them, for language modelling as data.rows asks.

        layout: of documents, if it is known.
        """
        spec, length, padding = self.spec, self.spec.text_length, self.spec.padding
        if spec.task == "seq2seq":
            return PairRows(corpus, length, padding=padding, start=self._decoder_start())
        if spec.task != "lm":
            is_regression = spec.task == "regression"
            return LabelledRows(corpus, length, padding=padding, is_regression=is_regression, has_types=self._has_types)
        if spec.rows == "concat":
            return ConcatRows(corpus, length)
        objective = objective_of(spec)
        if isinstance(objective, UL2R) and corpus.targets is not None:
            raise ValueError(
                f"data.objective=ul2r is for texts, but {corpus.name} has prompts; learn them, too, with "
                "data.targets=all, or use data.objective=prefix"
            )
        if layout is None:
            assert spec.long is not None
            layout = open_layout(
                self.cache_dir / "rows" / f"{corpus.key}-{spec.key(RowStage.LAYOUT, corpus.key)}",
                partial(make_layout, corpus, length, spec.rows, spec.long, objective),
                reports_wait=self.reports_wait,
            )
        assert spec.isolate is not None
        return DocumentRows(corpus, layout, length, padding=padding, isolate=spec.isolate, objective=objective)

    def _decoder_start(self) -> int:
        """Return the token that enters the decoder first. Raises ValueError if the model has none."""
        start = getattr(self.model, "decoder_start_token_id", None)
        if not isinstance(start, int):
            raise ValueError(
                f'{self.name} has no first token of a decoder; set "decoder_start_token_id" in config.json'
            )
        return start
