"""Rows of the sources of a run, as its task and its options need them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from acsgd.io.data.row_spec import RowStage
from acsgd.io.data.rows.base import Rows
from acsgd.io.data.rows.streamed import StreamedRows, layout_of
from acsgd.io.data.sources.base import Source
from acsgd.io.data.sources.sources import WeightedSource
from acsgd.io.data.sources.streamed import Streamed
from acsgd.io.data.stream.segment_cache import SegmentCache
from acsgd.io.data.stream.segment_files import OpenSegment
from acsgd.io.data.stream.segments import StreamSegment, read_segments
from acsgd.io.data.stream.state import SegmentStart
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.io.data.tokens.ends import EndFinder
from acsgd.io.data.tokens.tokens import open_tokens, token_dtype
from acsgd.tasks import find_task
from acsgd.tasks.base import RowContext, Task


def no_targets(source: Source, where: str, *, is_learned: bool = True) -> str:
    """Return why a source cannot be used.

    where: some of its rows, none of which has a target; is_learned: whether it has targets before it is cut into rows.
    """
    problem = f"{source.key}: {source.name} has no target tokens"
    if not is_learned:
        return (
            f"{problem}: none of its answers is learned, by their weights or flags, or the marks of the chat template; "
            "set them for answers to learn, or give data.targets=all to learn all texts"
        )
    return (
        f"{problem} in {where}: there is no loss; use a longer data.sequence, data.long=split, or data.targets=all to "
        "learn prompts, too"
    )


@dataclass(frozen=True, kw_only=True)
class RowMaker(RowContext):
    """Makes the rows of sources."""

    stream_dir: Path
    """Directory of the segments of streamed sources."""

    def open(self, sources: Sequence[WeightedSource]) -> list[Rows]:
        """Return the rows of each source. Tokenizes those that are not in the cache yet. Raises ValueError.

        Streamed sources are tokenized when their rows are read.
        """
        return [
            self._streamed(source, number)
            if isinstance(source, Streamed)
            else self._task.rows(self._corpus(source), self)
            for number, (source, _) in enumerate(sources)
        ]

    @property
    def _task(self) -> Task:
        return find_task(self.spec.task)

    def _corpus(self, source: Source) -> Corpus:
        return open_tokens(
            source,
            self.spec,
            self.tokenizer,
            self.cache_dir / "tokens",
            self._task.encoder(self),
            vocab_size=self.model.get_text_config().vocab_size,
            reports_wait=self.reports_wait,
        )

    def _streamed(self, source: Streamed, number: int) -> StreamedRows:
        """Return the rows of a streamed source. number: its index in the mixture."""
        spec, task, version, window = self.spec, self._task, source.fingerprint, self.spec.window
        assert window is not None
        if task.rows_per_example > 1:
            raise ValueError(f"{source.key}: {task.name} takes no streamed sources; remove stream:")

        def read(position: SegmentStart) -> Iterator[StreamSegment]:
            vocabulary = self.model.get_text_config().vocab_size
            encoder, cutter = task.encoder(self), task.cutter(self)
            return read_segments(source, self.tokenizer, encoder, cutter, position, vocab_size=vocabulary)

        finder = EndFinder(self.tokenizer)

        def make(segment: OpenSegment) -> Rows:
            corpus = segment.corpus
            corpus = corpus._replace(ends=finder.find_in_part(corpus.tokens, corpus.targets, corpus.offsets[1:]))
            rows = task.rows(corpus, self, layout_of(segment.layout, corpus) if segment.layout else None)
            if rows.num_empty(range(len(rows))) == len(rows) and not segment.about.start.tokens:
                raise ValueError(no_targets(source, f"the {len(rows):,} rows of its first window"))
            return rows

        span = -(-spec.batch // window)
        directory = self.stream_dir / f"{number}-{spec.key(RowStage.SEGMENTS, version, source.options)}"
        cache = SegmentCache(directory, source.name, window, read, token_dtype(self.tokenizer), span=span)
        return StreamedRows(source.name, version, cache, make, window, seed=spec.seed, source=number, span=span)
