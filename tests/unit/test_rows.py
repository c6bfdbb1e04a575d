"""Laws of rows of whole documents: packed best-fit decreasing, or one per row."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from lib.corpora import documents_of, tokenize_all
from transformers import PreTrainedTokenizerFast

from acsgd.config.run_file import parse
from acsgd.io.data.row_spec import LongDocument
from acsgd.io.data.rows.base import INPUT_IDS, LABELS, RowReader
from acsgd.io.data.rows.documents import DocumentRows
from acsgd.io.data.rows.layout import RowKind, best_fit, make_layout, open_layout
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.launch import Launch
from acsgd.layers.masks import DOCUMENTS
from acsgd.model_classes import IGNORED
from acsgd.run.plan.job import prepare
from acsgd.run.setup.inputs import open_inputs
from acsgd.tasks import check_options

PAD = 10**6
LENGTHS = [1, 9, 2, 30, 5, 8, 9, 1, 3, 17, 2, 4]
"""Numbers of tokens of documents."""


def rows_of(corpus: Corpus, sequence: int, kind: RowKind, long: LongDocument) -> DocumentRows:
    """Return the rows of a corpus with a layout in memory."""
    return DocumentRows(corpus, make_layout(corpus, sequence, kind, long), sequence, padding=PAD)


def pairs_of(rows: DocumentRows) -> Counter[tuple[int, int]]:
    """Return how often each pair of an input and its label occurs, without ignored labels."""
    found: Counter[tuple[int, int]] = Counter()
    for index in range(len(rows)):
        row = rows.read(index)
        kept = row[LABELS] != IGNORED
        found.update(zip(row[INPUT_IDS][kept].tolist(), row[LABELS][kept].tolist(), strict=True))
    return found


def pairs_within(spans: list[tuple[int, int]]) -> Counter[tuple[int, int]]:
    """Return the pairs of consecutive tokens of documents with distinct tokens."""
    return Counter(pair for start, stop in spans for pair in itertools.pairwise(range(start, stop)))


SPANS = list(itertools.pairwise(np.cumsum([0, *LENGTHS]).tolist()))


# ---- best-fit decreasing


def count_of_best_fit(lengths: list[int], capacity: int) -> int:
    """Return the number of rows of best-fit decreasing, placed one document at a time."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in free if space >= length]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else capacity) - length)
    return len(free)


@pytest.mark.parametrize("capacity", [1, 2, 7, 64, 1000])
def test_rows_are_those_of_best_fit_decreasing(capacity: int) -> None:
    draw = np.random.default_rng(capacity)
    for count in (1, 2, 10, 400):
        for lengths in (
            draw.integers(1, capacity + 1, count),
            np.minimum(draw.geometric(4 / capacity if capacity > 4 else 1, count), capacity),
        ):
            rows = best_fit(lengths, capacity)
            assert np.bincount(rows, weights=lengths).max() <= capacity
            assert sorted(set(rows.tolist())) == list(range(count_of_best_fit(lengths.tolist(), capacity)))


def test_many_documents_are_packed_with_little_padding() -> None:
    """A million lengths as in "Fewer Truncations Improve Language Modeling", where padding is below 0.01 %."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1.2, 10**6).astype(np.int64), 1, 2048)
    rows = best_fit(lengths, 2048)
    used = np.bincount(rows, weights=lengths)
    assert used.max() <= 2048
    assert used.sum() == lengths.sum()
    assert lengths.sum() / (len(used) * 2048) > 0.9999


# ---- whole documents in rows


@pytest.mark.parametrize("kind", ["pack", "single"])
@pytest.mark.parametrize("sequence", [1, 4, 8, 29, 100])
def test_no_token_is_lost(kind: RowKind, sequence: int) -> None:
    rows = rows_of(documents_of(LENGTHS), sequence, kind, "split")
    assert pairs_of(rows) == pairs_within(SPANS)


@pytest.mark.parametrize("kind", ["pack", "single"])
def test_a_long_document_is_truncated_or_skipped(kind: RowKind) -> None:
    corpus = documents_of(LENGTHS)
    truncated = rows_of(corpus, 8, kind, "truncate")
    assert pairs_of(truncated) == pairs_within([(start, min(stop, start + 9)) for start, stop in SPANS])
    skipped = rows_of(corpus, 8, kind, "skip")
    assert pairs_of(skipped) == pairs_within([(start, stop) for start, stop in SPANS if stop - start <= 9])
    assert "longer than a row and truncated: 2" in truncated.notes[0]
    assert "longer than a row and left out: 2" in skipped.notes[0]


def test_a_long_document_is_an_error_if_asked() -> None:
    message = (
        r"data\.long=error: document 4 of memory has 30 tokens, but a row of data\.sequence=8 takes at most 8 \+ 1"
    )
    with pytest.raises(ValueError, match=message):
        make_layout(documents_of(LENGTHS), 8, "pack", "error")
    assert len(rows_of(documents_of(LENGTHS), 29, "single", "error")) == len(LENGTHS) - 2


def test_documents_are_cut_only_if_they_are_longer_than_a_row() -> None:
    layout = make_layout(documents_of(LENGTHS), 8, "pack", "split")
    assert sorted(layout.lengths[:].tolist()) == sorted([8, 1, 8, 8, 8, 5, 4, 7, 8, 2, 8, 8, 1, 3])


def test_packing_that_puts_no_two_documents_together_is_reported() -> None:
    assert (
        "data.isolate and data.rows=pack have no effect" in make_layout(documents_of([8, 9]), 8, "pack", "split").note
    )
    for kind, lengths in (("pack", [4, 4, 9]), ("single", [8, 9])):
        assert "no effect" not in make_layout(documents_of(lengths), 8, kind, "split").note


def test_single_rows_hold_one_document_each_in_order() -> None:
    rows = rows_of(documents_of(LENGTHS), 8, "single", "skip")
    kept = [(start, stop) for start, stop in SPANS if 2 <= stop - start <= 9]
    for index, (start, stop) in enumerate(kept):
        inputs, padding = list(range(start, stop - 1)), 8 - (stop - start - 1)
        row = rows.read(index)
        assert row[INPUT_IDS].tolist() == inputs + [PAD] * padding
        assert row[LABELS].tolist() == [token + 1 for token in inputs] + [IGNORED] * padding
    assert len(rows) == len(kept)


def test_prompts_are_no_labels() -> None:
    targets = np.arange(sum(LENGTHS)) % 3 > 0
    rows = rows_of(documents_of(LENGTHS, targets=targets), 8, "pack", "split")
    assert pairs_of(rows) == Counter({pair: 1 for pair in pairs_within(SPANS) if targets[pair[1]]})


def test_a_document_begins_with_the_end_of_the_one_before_if_they_share_it() -> None:
    rows = rows_of(documents_of([4, 3, 5], overlap=1), 4, "single", "split")
    inputs = [rows.read(index)[INPUT_IDS].tolist() for index in range(4)]
    assert inputs == [[0, 1, 2, PAD], [3, 4, 5, PAD], [6, 7, 8, 9], [10, PAD, PAD, PAD]]


def test_packed_rows_at_the_end_are_no_different() -> None:
    """They may be held out: they have as many documents as all rows, and the longest of each is as long.

    Best-fit decreasing opens rows for the longest documents first.
    """
    lengths = np.random.default_rng(1).integers(2, 500, 20_000)
    layout = make_layout(documents_of(lengths.tolist()), 512, "pack", "split")
    for values in (np.diff(layout.offsets[:]), np.maximum.reduceat(layout.lengths[:], layout.offsets[:-1])):
        assert abs(values[-1000:].mean() - values.mean()) < 5 * values.std() / 1000**0.5


def test_a_source_without_a_document_that_fits_is_refused() -> None:
    for lengths in ([1, 1], [50, 60]):
        with pytest.raises(ValueError, match=r"data\.rows=pack: no document of memory has at least 2 tokens and fits"):
            make_layout(documents_of(lengths), 8, "pack", "skip")


def test_documents_and_padding_are_told_apart() -> None:
    corpus = documents_of([3, 3, 4])
    rows = DocumentRows(corpus, make_layout(corpus, 8, "pack", "split"), 8, padding=PAD, isolate=True)
    assert rows.read(0)[DOCUMENTS].tolist() == [0, 0, 1, 1, 2, 2, 2, 3]


# ---- layouts on disk


def test_a_layout_is_made_once_and_read_from_disk(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    [corpus] = tokenize_all(parse_sources("demo"), tokenizer, tmp_path / "tokens", vocab_size=512)
    made = make_layout(corpus, 64, "pack", "split")
    opened = open_layout(tmp_path / "rows", lambda: made)
    again = open_layout(tmp_path / "rows", lambda: pytest.fail("made again"))
    for layout in (opened, again):
        for found, expected in zip(layout[:3], made[:3], strict=True):
            assert found[:].tolist() == expected[:].tolist()  # type: ignore[index]
        assert layout.note == made.note


# ---- options of a run


def test_options_of_a_run_select_its_rows(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{"word " * (n % 7 + 1)}"}}\n' for n in range(50)))
    flags = f"--model.name {tiny_model()} --data.sources {tmp_path / 'a.jsonl'} --log.dir {tmp_path / 'runs' / 'a'}"
    rest = "--data.sequence 48 --data.batch 2 --optim.lr 1 --optim.steps 2 --data.rows pack --data.eval_fraction 0.2"

    inputs = open_inputs(prepare(parse([*flags.split(), *rest.split()]), Launch(0, 0, 1)))
    rows = inputs.reader.rows.rows[0]
    assert isinstance(rows, DocumentRows)
    assert len(rows) == inputs.reader.sampler.sizes[0] + len(inputs.held_out or ())
    assert len(rows) < 50
    assert "padding is 0 ('<|endoftext|>')" in inputs.notes[0]
    assert f"50 documents in {len(rows)} rows of 48 tokens (data.rows=pack)" in inputs.notes[1]
    assert inputs.identity.data["data.rows"] == "pack"
    assert isinstance(inputs.reader.rows, RowReader)


def test_options_for_whole_documents_need_such_rows() -> None:
    flags = "--model.name a --data.sources demo --data.sequence 8 --data.batch 2 --optim.lr 1 --optim.steps 2"
    with pytest.raises(ValueError, match=r"^data\.long=skip applies to whole documents.* data\.rows=pack or single"):
        check_options(parse([*flags.split(), "--data.long", "skip"]))
    with pytest.raises(ValueError, match=r"^data\.isolate needs data\.rows=pack, but data\.rows=single"):
        check_options(parse([*flags.split(), "--data.isolate", "--data.rows", "single"]))
