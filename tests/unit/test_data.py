"""Laws of tokenization, of the sampler and of the batches of a replica."""

from __future__ import annotations

import itertools
import logging
import os
import re
import resource
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import zstandard
from lib.corpora import examples_of, one_document, windows_of
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from acsgd import notes as notes_module
from acsgd.errors import CorruptFileError, RunError
from acsgd.io import entry as entry_module
from acsgd.io.rows.concat import ConcatRows
from acsgd.io.sampling import pipeline
from acsgd.io.sampling import tokens as tokens_module
from acsgd.io.sampling.arrays import ArrayFile
from acsgd.io.sampling.batches import Batch, BatchReader, Dataset, reading_bytes
from acsgd.io.sampling.corpus_writer import OFFSETS
from acsgd.io.sampling.encode import DocumentEncoder
from acsgd.io.sampling.sampler import Sampler, Samples, block_counts, deal, shuffled
from acsgd.io.sampling.tokens import (
    TOKENS,
    Corpus,
    tokenize,
    tokenize_all,
    tokenizer_fingerprint,
)
from acsgd.io.sources.base import BadRecord, ReadOptions, Record, RecordCounts, Source
from acsgd.io.sources.files import Files
from acsgd.io.sources.sources import WeightedSource, parse_sources

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
MIXTURE = Sampler(seed=7, batch=12, counts=(3, 7), sizes=(11, 40))
CORPORA = [
    one_document(np.arange(11 * 5 + 3, dtype="<u2")),
    one_document(np.arange(1000, 1000 + 40 * 5 + 1, dtype="<u4")),
]


def source_of(path: Path, text: str) -> Source:
    """Write a text and return it as a source."""
    path.write_text(text)
    return parse_sources(str(path))[0].source


def reader(micros: range, **options: bool) -> BatchReader:
    """Read MIXTURE in sequences of 5 and micro-batches of 2."""
    return BatchReader(windows_of(CORPORA, 5, 2, **options), MIXTURE, micros)


def keys(number: int, count: int) -> np.ndarray:
    """Return `count` equal keys."""
    return np.full(count, number, dtype=np.uint64)


# ---- tokenization


def test_every_document_ends_with_the_eos_token(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", '{"text": "one two"}\n{"text": ""}\n{"text": "three"}')
    tokenize(source, tokenizer, DocumentEncoder(tokenizer), tmp_path, vocab_size=512)
    tokens = np.load(tmp_path / TOKENS, mmap_mode="r")
    assert tokens.dtype == np.dtype("<u2")
    assert tokenizer.decode(tokens.tolist()) == "one two<|endoftext|><|endoftext|>three<|endoftext|>"


def test_a_vocabulary_above_65536_is_stored_as_uint32(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<end>": 0, "low": 1, "high": 2**16}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    wide = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    tokenize(source_of(tmp_path / "a.txt", "high low"), wide, DocumentEncoder(wide), tmp_path, vocab_size=2**17)
    tokens = np.load(tmp_path / TOKENS)
    assert tokens.dtype == np.dtype("<u4")
    assert tokens.tolist() == [2**16, 1, 0]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("chars", [1, 100, 10**9])
def test_the_tokens_depend_neither_on_the_batching_nor_on_the_threads(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chars: int, threads: int
) -> None:
    lines = [f'{{"text": "document {n} {"word " * n}"}}\n' for n in range(40)]
    source = source_of(tmp_path / "a.jsonl", "".join(lines))
    monkeypatch.setattr(pipeline, "BATCH_CHARS", chars)
    monkeypatch.setattr(pipeline, "THREADS", threads)
    tokenize(source, tokenizer, DocumentEncoder(tokenizer), tmp_path, vocab_size=512)
    oracle = [
        [*tokenizer(example.text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for example in examples_of(source)
    ]
    assert np.load(tmp_path / TOKENS).tolist() == list(itertools.chain(*oracle))
    assert np.load(tmp_path / OFFSETS).tolist() == list(itertools.accumulate(map(len, oracle), initial=0))


def test_long_documents_cause_no_warning(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>", model_max_length=4
    )
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        tokenize(source_of(tmp_path / "a.txt", "word " * 100), short, DocumentEncoder(short), tmp_path, vocab_size=512)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not caplog.records
    assert len(np.load(tmp_path / TOKENS)) > 100


def test_a_source_is_tokenized_once_and_stays_on_disk(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("some words " * 30)
    sources = parse_sources(f"demo,{tmp_path / 'a.txt'},demo")
    first = tokenize_all(sources, tokenizer, tmp_path / "cache", vocab_size=512)
    assert len(list((tmp_path / "cache").iterdir())) == 2
    monkeypatch.setattr(tokens_module, "tokenize", lambda *_, **__: pytest.fail("tokenized again"))
    again = tokenize_all(sources, tokenizer, tmp_path / "cache", vocab_size=512)
    assert all(isinstance(corpus.tokens, ArrayFile) for corpus in again)
    assert [corpus.tokens[:].tobytes() for corpus in again] == [corpus.tokens[:].tobytes() for corpus in first]
    assert not any(corpus.notes for corpus in first + again)


def test_the_offsets_are_those_of_the_documents(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    texts = ["one two", "", "three " * 50, "four"]
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    sources = parse_sources(str(tmp_path / "a.jsonl"))
    [corpus] = tokenize_all(sources, tokenizer, tmp_path / "cache", vocab_size=512)
    spans = itertools.pairwise(corpus.offsets[:].tolist())
    documents = [tokenizer.decode(corpus.tokens[start:end].tolist()) for start, end in spans]
    assert documents == [f"{text}<|endoftext|>" for text in texts]


BAD = ["bad", '{"text": "lone \\udfff"}', "{}", '{"text": "\udcff"}']


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_skipping_unreadable_lines_keeps_all_others_and_is_reported(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    good = ['{"text": "one two"}', "", '{"text": "three"}']
    lines = [good[0], *BAD, *good[1:], BAD[-1]]
    bad = BAD if suffix == ".jsonl" else BAD[-1:]
    broken, mended = (tmp_path / f"{name}{suffix}" for name in ("broken", "mended"))
    broken.write_text("\n".join(lines), errors="surrogateescape")
    mended.write_text("".join(f"{line}\n" for line in lines if line not in bad))
    sources = parse_sources(str(broken), options=ReadOptions(on_error="skip"))
    [corpus] = tokenize_all(sources, tokenizer, tmp_path / "cache", vocab_size=512)
    wanted = tokenize_all(parse_sources(str(mended)), tokenizer, tmp_path / "cache", vocab_size=512)[0].tokens
    assert corpus.tokens[:].tolist() == wanted[:].tolist()
    reason = f"{broken}, line 2, is not JSON (Expecting value at column 1): bad"
    if suffix == ".txt":
        reason = rf'{broken}, line 5, is not UTF-8 (byte 0xff): {{"text": "\xff"}}'
    count = len(bad) + 1
    assert corpus.notes == (f"data.sources: {broken}: skipped {count} of 8 records; the first, {reason}",)
    monkeypatch.setattr(tokens_module, "tokenize", lambda *_, **__: pytest.fail("tokenized again"))
    assert tokenize_all(sources, tokenizer, tmp_path / "cache", vocab_size=512)[0].notes == corpus.notes


def test_the_cache_key_depends_on_skipping(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one two three"}\nbad')
    tokenize_all(
        parse_sources(str(path), options=ReadOptions(on_error="skip")), tokenizer, tmp_path / "cache", vocab_size=512
    )
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is not JSON"):
        tokenize_all(parse_sources(str(path)), tokenizer, tmp_path / "cache", vocab_size=512)


@pytest.mark.parametrize(("suffix", "lines"), [("jsonl", "\n".join(BAD)), ("txt", "\udcff\n" * 4)])
def test_a_source_of_unreadable_lines_only_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, suffix: str, lines: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_text(lines, errors="surrogateescape")
    with pytest.raises(ValueError) as caught:
        tokenize_all(
            parse_sources(str(path), options=ReadOptions(on_error="skip"), key="data.eval_sources"),
            tokenizer,
            tmp_path / "cache",
            vocab_size=512,
        )
    assert str(caught.value).startswith(f"data.eval_sources: {path} has no token with the tokenizer")
    assert f"skipped 4 of 4 records; the first, {path}, line 1, is not" in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_text_and_tokenizer_change_the_cache_key(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["used"], add_special_tokens=False)
    assert tokenizer_fingerprint(tokenizer) == before
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="a")
    assert tokenizer_fingerprint(other) != before
    path = tmp_path / "a.txt"
    for text in ("some words", "other words now"):
        path.write_text(text)
        tokenize_all(parse_sources(str(path)), tokenizer, tmp_path / "cache", vocab_size=512)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_chat_template_changes_the_cache_key(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}\n')
    decoded = []
    for name in ("chat", "talk"):
        chat = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
        chat.chat_template = (
            f"{name} {{% for each in messages %}}{{% if each.role == 'assistant' %}}: {{% endif %}}"
            "{{ each.content }}{% endfor %}{% if add_generation_prompt %}: {% endif %}"
        )
        [corpus] = tokenize_all(parse_sources(str(path)), chat, tmp_path / "cache", vocab_size=512)
        decoded.append(chat.decode(corpus.tokens[:].tolist()))
    assert [text.split()[0] for text in decoded] == ["chat", "talk"]


def test_a_tokenizer_without_an_end_of_document_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    endless = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match=r'no eos_token .* set "eos_token" in its tokenizer_config\.json'):
        tokenize_all(parse_sources("demo"), endless, tmp_path / "cache", vocab_size=512)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            '{"text": ""}',
            "data.sources: .*a.jsonl has no token with the tokenizer .* of 512 tokens; give a text that is not blank",
        ),
        ("\n", "data.sources: .*a.jsonl has no token"),
        ('{"text": "good"}\nbad', "data.sources: .*a.jsonl, line 2 is not JSON"),
    ],
)
def test_an_unusable_source_leaves_no_cache_entry(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, lines: str, message: str
) -> None:
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=message):
        tokenize_all(parse_sources(str(tmp_path / "a.jsonl")), tokenizer, tmp_path / "cache", vocab_size=512)
    assert not (tmp_path / "cache").exists()


def test_a_short_source_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("zq" * 5)
    sources = parse_sources(str(tmp_path / "a.txt"))
    [corpus] = tokenize_all(sources, tokenizer, tmp_path, vocab_size=512)
    fits = len(corpus.tokens) - 1
    assert len(ConcatRows(corpus, fits)) == 1
    message = f"data.sequence={fits + 1}: .*a.txt has {fits + 1} tokens, .*use data.sequence={fits} or less"
    with pytest.raises(ValueError, match=message):
        ConcatRows(corpus, fits + 1)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no {SHARED}")
def test_real_text_is_decoded_exactly_from_its_tokens(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """1.3 MB are cut into ten pieces."""
    path = SHARED / "wikitext-2" / "test.txt"
    tokens = tokenize_all(parse_sources(str(path)), tokenizer, tmp_path, vocab_size=512)[0].tokens
    assert tokenizer.decode(tokens[:].tolist()) == path.read_text() + "<|endoftext|>"


# ---- token ids that the model has not


def sparse_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 3 tokens whose largest id is 9."""
    words = Tokenizer(models.WordLevel({"<end>": 0, "low": 1, "high": 9}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")


def test_a_token_that_the_model_has_not_is_named(tmp_path: Path) -> None:
    """While tokenizing, and for cached tokens if another model shares the cache."""
    path = tmp_path / "a.txt"
    path.write_text("low " * 100 + "high low")
    sources, wide = parse_sources(str(path)), sparse_tokenizer()
    for is_cached in (False, True):
        with pytest.raises(ValueError) as refused:
            tokenize_all(sources, wide, tmp_path / "cache", vocab_size=9)
        assert str(refused.value) == (
            f"data.sources: {path} has the token 'high' of id 9, but the model's vocab_size is 9; give the tokenizer "
            "that belongs to the model, or a model with a larger vocabulary"
        )
        assert (tmp_path / "cache").exists() == is_cached
        tokens = tokenize_all(sources, wide, tmp_path / "cache", vocab_size=10)[0].tokens
        assert max(tokens[:]) == 9


# ---- faults of the disk and of other processes


def test_damaged_tokens_are_found_and_tokenized_again(
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At the start if a file has another length or the damage is in the sample, else when training reads it."""
    text = tmp_path / "a.txt"
    text.write_text(" ".join(map(str, range(20_000))))
    monkeypatch.setattr(entry_module, "BLOCK_BYTES", 64)  # so that the sample leaves most blocks unread

    def opened() -> list[Corpus]:
        return tokenize_all(parse_sources(str(text)), tokenizer, tmp_path / "cache", vocab_size=512)

    def read_all(corpora: list[Corpus]) -> list[torch.Tensor]:
        rows = windows_of(corpora, 16, 1)
        size = len(rows.rows[0])
        sampler = Sampler(seed=0, batch=size, counts=(1,), sizes=(size,))
        batches = Dataset(BatchReader(rows, sampler, range(size)), range(1))
        return [batch.inputs["input_ids"] for batch in batches if batch.inputs is not None]

    [intact] = read_all(opened())
    [entry] = (tmp_path / "cache").iterdir()
    path = entry / "tokens.npy"
    raw = path.read_bytes()
    last = len(raw) - 1
    cases = {
        "empty": b"",
        "short": raw[:-1],
        "long": raw + b"\0",
        "header": b"x" + raw[1:],
        "sampled": raw[:128] + bytes([raw[128] ^ 1]) + raw[129:],
        "last": raw[:last] + bytes([raw[last] ^ 1]),
        "middle": raw[: last // 2] + bytes([raw[last // 2] ^ 1]) + raw[last // 2 + 1 :],
    }
    late = []
    for name, damaged in cases.items():
        path.write_bytes(damaged)
        capsys.readouterr()
        corpora = opened()
        note = capsys.readouterr().err
        if not note:
            late.append(name)
            with pytest.raises(CorruptFileError) as found:
                read_all(corpora)
            assert str(found.value).startswith(f"{path} is corrupt: bytes "), name
            assert str(found.value).endswith("; start again, and the text is tokenized again"), name
            corpora = opened()
            note = capsys.readouterr().err
        assert note.startswith(f"{entry}"), name
        assert note.endswith(f"; {entry} is built again now\n"), name
        assert path.read_bytes() == raw, name
        assert torch.equal(read_all(corpora)[0], intact), name
    assert "middle" in late
    assert "sampled" not in late


def test_tokens_that_are_cut_off_under_a_run_are_an_error(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """A memory-mapped file would end the process with SIGBUS."""
    path = tmp_path / "a.txt"
    path.write_text("some words " * 1000)
    corpora = tokenize_all(parse_sources(str(path)), tokenizer, tmp_path / "cache", vocab_size=512)
    [entry] = (tmp_path / "cache").iterdir()
    fingerprint = [corpus.fingerprint() for corpus in corpora]
    os.truncate(entry / "tokens.npy", 1)
    with pytest.raises(CorruptFileError, match=r"tokens\.npy is corrupt: it was cut from \d+ to 1 bytes; start again"):
        corpora[0].tokens[:16]
    again = tokenize_all(parse_sources(str(path)), tokenizer, tmp_path / "cache", vocab_size=512)
    assert [corpus.fingerprint() for corpus in again] == fingerprint


class GrowingFile(Files):
    """A file to which another process appends while it is read."""

    def records(self, counts: RecordCounts) -> Iterator[Record | BadRecord]:
        yield from super().records(counts)
        with open(self.name, "a") as file:
            file.write('{"text": "more"}\n')


def test_a_file_that_changes_while_it_is_tokenized_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one two three"}\n')
    sources = [WeightedSource(GrowingFile(str(path)), 1.0)]
    with pytest.raises(ValueError) as refused:
        tokenize_all(sources, tokenizer, tmp_path / "cache", vocab_size=512)
    message = f"data.sources: {path} changed while it was tokenized; start again when it is complete"
    assert str(refused.value) == message
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_is_one_sentence(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The limit of the size of files stands for the disk: the system refuses the write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(RunError, match=r"/cache/demo-\w+: File too large; raise the limit"):
            tokenize_all(parse_sources("demo"), tokenizer, tmp_path / "cache", vocab_size=512)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_a_source_may_have_the_longest_name(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 125 + "s.txt")
    path.write_text("some words")
    tokens = tokenize_all(parse_sources(str(path)), tokenizer, tmp_path / "cache", vocab_size=512)[0].tokens
    assert len(tokens) > 2


class SlowFile(Files):
    """A file whose second half is read when `go_on` is set."""

    go_on = threading.Event()

    def records(self, counts: RecordCounts) -> Iterator[Record | BadRecord]:
        for record in super().records(counts):
            yield record
            assert self.go_on.wait(60)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_a_long_tokenization_reports_its_progress(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    lines = b"".join(b'{"text": "%s"}\n' % os.urandom(500).hex().encode() for _ in range(100))
    path = tmp_path / f"a{suffix}"
    path.write_bytes(zstandard.compress(lines) if suffix.endswith("zst") else lines)
    notes: list[str] = []
    slow = SlowFile(str(path))
    slow.go_on.clear()
    monkeypatch.setattr(notes_module, "FIRST_REPORT_S", 0.01)

    def note(text: str) -> None:
        if "%" in text:  # the first report may come before the first record
            notes.append(text)
            slow.go_on.set()

    monkeypatch.setattr(notes_module, "NEXT_REPORT_S", 0.01)
    monkeypatch.setattr(tokens_module, "print_note", note)
    tokenize_all([WeightedSource(slow, 1.0)], tokenizer, tmp_path / "cache", vocab_size=512)
    assert re.fullmatch(rf"tokenizing \d+% of {path}: 0\.0 M tokens, 0\.\d\d M/s, \d:\d\d:\d\d left", notes[0])


# ---- packing


def test_every_token_but_the_first_is_a_target_once() -> None:
    sequence = 5
    for length in (6, 10, 11, 23):
        rows = windows_of([one_document(np.arange(length, dtype="<u2"))], sequence, 1)
        count = len(rows.rows[0])
        sampler = Sampler(seed=0, batch=count, counts=(1,), sizes=(count,))
        labels = BatchReader(rows, sampler, range(count)).batch(0).labels
        assert labels is not None
        assert sorted(labels.flatten().tolist()) == list(range(1, count * sequence + 1)), length
        assert length - count * sequence <= sequence, "the dropped remainder is at most a sequence"


def test_labels_are_the_inputs_shifted_by_one() -> None:
    batch = reader(range(6)).batch(3)
    assert batch.inputs is not None
    assert batch.labels is not None
    assert batch.inputs["input_ids"].dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.labels, batch.inputs["input_ids"] + 1)  # CORPORA count upwards


# ---- sampler


def test_a_shuffle_is_a_permutation() -> None:
    for size in (1, 2, 3, 4, 5, 16, 17, 100, 4097):
        for key in range(3):
            order = shuffled(np.arange(size), size, keys(key, size))
            assert sorted(order) == list(range(size)), size
        one = shuffled(np.array([size // 2]), size, keys(2, 1))
        assert one[0] == order[size // 2], size


def test_a_shuffle_is_uniform_in_every_position() -> None:
    """Chi-square of (size - 1)^2 degrees of freedom: mean d, deviation sqrt(2 d)."""
    draws = 2000
    for size in (2, 3, 5, 8, 16):
        orders = shuffled(np.tile(np.arange(size), draws), size, np.repeat(np.arange(draws, dtype=np.uint64), size))
        table = np.zeros((size, size))
        np.add.at(table, (np.tile(np.arange(size), draws), orders), 1)
        freedom = (size - 1) ** 2
        chi_square = ((table - draws / size) ** 2 / (draws / size)).sum()
        assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom), size


def test_all_orders_of_three_are_drawn_equally_often() -> None:
    draws = 6000
    orders = shuffled(np.tile(np.arange(3), draws), 3, np.repeat(np.arange(draws, dtype=np.uint64), 3))
    counts = Counter(map(tuple, orders.reshape(draws, 3).tolist()))
    assert len(counts) == 6
    assert all(abs(count - 1000) < 5 * np.sqrt(1000) for count in counts.values())


def test_every_epoch_has_each_sequence_once_in_a_new_order() -> None:
    sources, indices, *_ = (np.concatenate(f) for f in zip(*map(MIXTURE.samples, range(200)), strict=True))
    for source, size in enumerate(MIXTURE.sizes):
        visits = indices[sources == source]
        epochs = visits[: len(visits) // size * size].reshape(-1, size)
        assert len(epochs) > 10
        assert (np.sort(epochs, axis=1) == np.arange(size)).all()
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == len(epochs)


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1.0], (1,)),
        ([0.3, 0.7], (3, 7)),
        ([0.5, 0.25, 0.25], (2, 1, 1)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([1 / 7] * 7, (1,) * 7),
        ([0.999, 0.001], (999, 1)),
    ],
)
def test_weights_hold_exactly_over_each_block(weights: list[float], counts: tuple[int, ...]) -> None:
    assert block_counts(weights) == counts
    sampler = Sampler(seed=1, batch=sum(counts), counts=counts, sizes=(5,) * len(counts))
    orders = []
    for block in range(6):
        sources = sampler.samples(block).sources
        assert tuple(np.bincount(sources, minlength=len(counts))) == counts
        orders.append(tuple(sources))
    assert len(counts) == 1 or len(set(orders)) > 1


def test_any_weights_hold_to_a_thousandth_and_keep_every_source() -> None:
    for weights in ([np.pi / 4, 1 - np.pi / 4], [1e-6, 1 - 1e-6], [0.12345, 0.54321, 0.33334]):
        counts = block_counts(weights)
        assert min(counts) >= 1, weights
        assert np.allclose(np.array(counts) / sum(counts), weights, rtol=0, atol=1.5e-3), weights


def test_the_stream_of_samples_does_not_depend_on_the_batch() -> None:
    def stream(batch: int) -> list[int]:
        sampler = Sampler(MIXTURE.seed, batch, MIXTURE.counts, MIXTURE.sizes)
        return np.concatenate([sampler.samples(step).ids for step in range(111 // batch)]).tolist()

    for batch in (1, 3, 10, 12, 37):
        assert stream(batch) == stream(111)[: len(stream(batch))], batch


def test_a_late_step_of_large_sources_can_be_sampled() -> None:
    large = Sampler(seed=2**63 - 1, batch=4, counts=(400, 600), sizes=(10**9, 3))
    sources, indices, ids, _ = large.samples(10**12)
    assert len(sources) == 4
    assert (indices < np.array(large.sizes)[sources]).all()
    assert (ids == indices + np.array([0, 10**9])[sources]).all()


def test_sample_ids_identify_the_sequences_of_a_mixture() -> None:
    seen: dict[int, tuple[int, int]] = {}
    for step in range(50):
        for source, index, sample, _ in zip(*MIXTURE.samples(step), strict=True):
            assert seen.setdefault(int(sample), (source, index)) == (source, index)
    assert sorted(seen) == list(range(sum(MIXTURE.sizes)))


def test_seeds_give_different_orders() -> None:
    orders = {tuple(Sampler(s, 12, MIXTURE.counts, MIXTURE.sizes).samples(0).ids) for s in range(20)}
    assert len(orders) == 20


def test_the_order_of_a_seed_never_changes() -> None:
    """A resumed run continues in the same order with any version of its libraries."""
    assert MIXTURE.samples(0).ids.tolist() == [33, 31, 12, 48, 25, 9, 49, 2, 11, 10, 32, 39]


# ---- batches of one replica


def test_micro_batches_are_dealt_in_order_and_evenly() -> None:
    for micros, replicas in itertools.product([1, 4, 6, 7], [1, 2, 3, 4]):
        parts = deal(micros, [1.0] * replicas)
        assert list(itertools.chain(*parts)) == list(range(micros)), (micros, replicas)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1, (micros, replicas)


SPEEDS = ((1.0, 1.0), (1.0, 1.9), (1.0, 3.0), (2.0, 0.1, 1.0), (1.0, 0.0, 1.5), (0.0, 7.0))


@pytest.mark.parametrize(("micros", "fill"), list(itertools.product([1, 2, 4, 7, 12], [0.0, 2.5])))
@pytest.mark.parametrize("speeds", SPEEDS)
def test_no_other_split_lets_the_replicas_finish_earlier(micros: int, fill: float, speeds: tuple[float, ...]) -> None:
    def end(counts: Sequence[int]) -> float:
        return max((count + fill) / speed for count, speed in zip(counts, speeds, strict=True) if count)

    parts = deal(micros, speeds, fill)
    counts = [len(part) for part in parts]
    assert list(itertools.chain(*parts)) == list(range(micros))
    working = sum(speed > 0 for speed in speeds)
    splits = [
        split
        for split in itertools.product(range(micros + 1), repeat=len(speeds))
        if sum(split) == micros
        and all(speed > 0 or not count for count, speed in zip(split, speeds, strict=True))
        and sum(count > 0 for count in split) == min(micros, working)
    ]
    assert tuple(counts) in splits
    if micros >= working:
        assert end(counts) == min(map(end, splits))


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch with inputs and labels."""
    assert batch.inputs is not None
    assert batch.labels is not None
    return [batch.inputs["input_ids"], batch.labels, batch.sample_ids]


def test_a_step_is_the_same_for_any_number_of_replicas() -> None:
    whole = reader(range(6)).batch(5)
    for replicas in range(1, 8):  # of 7, one has no micro-batch
        parts = [reader(range(6)).batch(5, part) for part in deal(6, [1.0] * (replicas - 1) + [0.5])]
        assert list(itertools.chain(*(part.micro_ids for part in parts))) == list(whole.micro_ids), replicas
        parts = [part for part in parts if part.micro_ids]
        for tensors in zip(tensors_of(whole), *map(tensors_of, parts), strict=True):
            assert torch.equal(torch.cat(tensors[1:]), tensors[0]), replicas
    assert sorted(whole.sample_ids.flatten().tolist()) == sorted(MIXTURE.samples(5).ids.tolist())


@pytest.mark.parametrize(("replicas", "batch"), [(2, 8), (2, 32), (4, 32), (8, 64)])
def test_a_sequence_mostly_returns_to_its_replica(replicas: int, batch: int) -> None:
    """The position in a batch is a rank among uniform hashes, so near a border it scatters as a binomial count does.

    With s = sqrt(u (1 - u) / batch) at a border u, two visits lie on different sides of it with the probability
    2 s / sqrt(pi), the integral of 2 Phi(x / s) Phi(-x / s).
    """
    epochs, steps = 40, 1000 // batch
    # an epoch at once: the stream of samples does not depend on the batch size
    sampler = Sampler(seed=4, batch=steps * batch, counts=(1,), sizes=(steps * batch,))
    where = np.empty((epochs, steps * batch), dtype=np.int64)
    for epoch in range(epochs):
        for ids in sampler.samples(epoch).ids.reshape(steps, batch):
            where[epoch, Samples(ids, ids, ids, ids).dealt().ids] = np.arange(batch) * replicas // batch
    moved = (where[1:] != where[:-1]).mean()
    borders = np.arange(1, replicas) / replicas
    expected = (2 * np.sqrt(borders * (1 - borders) / batch / np.pi)).sum()
    assert 0.8 * expected < moved < 1.1 * expected


@pytest.mark.parametrize(("wants_inputs", "wants_labels"), list(itertools.product([False, True], repeat=2)))
def test_a_stage_reads_only_what_it_needs(wants_inputs: bool, wants_labels: bool) -> None:
    batch = reader(range(2, 4), wants_inputs=wants_inputs, wants_labels=wants_labels).batch(0)
    assert (batch.inputs is not None) == wants_inputs
    assert (batch.labels is not None) == wants_labels
    assert batch.sample_ids.shape == (2, 2)
    tokens = None if batch.inputs is None else batch.inputs["input_ids"]
    assert all(x is None or (x.shape == (2, 2, 5) and x.is_contiguous()) for x in (tokens, batch.labels))


def test_a_batch_moves_to_a_device() -> None:
    batch = reader(range(3), wants_labels=False).batch(0).to(torch.device("meta"))
    assert batch.inputs is not None
    assert batch.inputs["input_ids"].is_meta
    assert batch.labels is None
    assert not batch.sample_ids.is_meta


# ---- reading ahead


def same(a: Batch, b: Batch) -> bool:
    """Return whether two batches are equal."""
    return all(map(torch.equal, tensors_of(a), tensors_of(b)))


def test_starting_at_a_later_step_gives_the_same_batches() -> None:
    whole = list(Dataset(reader(range(6)), range(9)))
    late = list(Dataset(reader(range(6)), range(4, 9)))
    assert len(whole) == 9
    assert all(map(same, whole[4:], late))
    assert len(late) == 5


def read_ahead_threads() -> list[threading.Thread]:
    """Return the threads that read ahead in this process."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_closing_stops_the_thread_and_the_iteration() -> None:
    with Dataset(reader(range(6)), range(10**9)) as dataset:
        batches = iter(dataset)
        next(batches)
        assert read_ahead_threads()
    assert not read_ahead_threads()
    assert list(batches) == []
    with Dataset(reader(range(6)), range(3)):
        assert not read_ahead_threads()  # the thread starts with the first batch


def test_the_thread_ends_with_the_data() -> None:
    assert len(list(Dataset(reader(range(6)), range(2)))) == 2
    assert not read_ahead_threads()


def test_reading_ahead_is_bounded_and_micro_batches_are_those_known_when_a_read_begins() -> None:
    requested: list[int] = []

    def micros(step: int) -> range:
        requested.append(step)
        return range(step)

    with Dataset(reader(range(6)), range(10), micros=micros, ahead=2) as dataset:
        for step, batch in zip(range(4), dataset, strict=False):
            assert requested == list(range(step + 3))
            assert batch.micro_ids == range(step)


def test_the_time_that_training_waits_for_a_batch_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    may_read, ends, original = threading.Event(), list[float](), BatchReader.batch

    def read(self: BatchReader, step: int, micros: range | None) -> Batch:
        assert step < 2 or may_read.wait(60)
        batch = original(self, step, micros)
        ends.append(time.perf_counter())
        return batch

    monkeypatch.setattr(BatchReader, "batch", read)
    with Dataset(reader(range(6)), range(4), ahead=1) as dataset:
        next(dataset)
        next(dataset)
        threading.Timer(0.05, may_read.set).start()
        started = time.perf_counter()
        waited = next(dataset).wait_s
        assert ends[2] - started <= waited <= time.perf_counter() - started
        assert waited > 0.01


def test_the_memory_for_reading_is_bounded() -> None:
    """The bound that a start compares with the memory of the host holds, and is not far above."""
    sequence, batch = 64, 2**14
    rows = windows_of([one_document(np.zeros(batch * sequence + 1, dtype=np.uint16))], sequence, 1)
    sampler = Sampler(seed=0, batch=batch, counts=(1,), sizes=(batch,))
    bound = reading_bytes(batch, batch // 2, sequence)
    tracemalloc.start()
    try:
        for _ in Dataset(BatchReader(rows, sampler, range(batch // 2)), range(8)):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < bound < 4 * peak, (peak, bound)


def test_an_error_of_the_thread_is_raised_by_the_iteration() -> None:
    torn = [CORPORA[0], one_document(CORPORA[1].tokens[:7])]
    reader = BatchReader(windows_of(torn, 5, 2), MIXTURE, range(6))
    with pytest.raises(ValueError, match="shape"):
        list(Dataset(reader, range(9)))
    assert not read_ahead_threads()
