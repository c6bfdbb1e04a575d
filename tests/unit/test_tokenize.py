"""Laws of the tokens of a source, and of the key of their cache entry."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import numpy as np
import pytest
from lib.corpora import examples_of, source_of, tokenize_all
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from acsgd.io.data.row_spec import tokenizer_fingerprint
from acsgd.io.data.rows.documents import ConcatRows
from acsgd.io.data.sources.base import ReadOptions, RecordCounts
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.data.tokens import pipeline
from acsgd.io.data.tokens import tokens as tokens_module
from acsgd.io.data.tokens.corpus import OFFSETS, TOKENS
from acsgd.io.data.tokens.encode import DocumentEncoder
from acsgd.io.data.tokens.tokens import tokenize
from acsgd.io.files.arrays import ArrayFile

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


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


def test_text_that_the_tokenizer_does_not_know_is_counted(tmp_path: Path) -> None:
    """Unless eos_token stands for it, too: then it ends documents."""
    for unknown, notes in (("<unk>", ("2 tokens stand for text that the tokenizer does not know",)), ("<end>", ())):
        words = Tokenizer(models.WordLevel({"<end>": 0, "<unk>": 1, "known": 2}, unk_token=unknown))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token=unknown)
        (tmp_path / "a.txt").write_text("known { known }")
        [corpus] = tokenize_all(parse_sources(str(tmp_path / "a.txt")), fast, tmp_path / "cache", vocab_size=512)
        assert len(corpus.notes) == len(notes)
        assert all(expected in note for expected, note in zip(notes, corpus.notes, strict=True))


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
    sources = parse_sources(str(broken), options=[ReadOptions(on_error="skip")])
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
        parse_sources(str(path), options=[ReadOptions(on_error="skip")]), tokenizer, tmp_path / "cache", vocab_size=512
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
            parse_sources(str(path), options=[ReadOptions(on_error="skip")], key="data.eval_sources"),
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


def test_progress_has_the_share_the_rate_and_the_time_left(tmp_path: Path) -> None:
    source, counts = source_of(path := tmp_path / "a.txt", "text"), RecordCounts(fraction=lambda: 0.25)
    expected = f"tokenizing 25% of {path}: 2.0 M tokens, 0.20 M/s, 0:00:30 left"
    assert pipeline.progress("tokenizing", source, counts, 2 * 10**6, 10.0) == expected
    expected = f"tokenizing {path}: 2.0 M tokens, 0.20 M/s"
    assert pipeline.progress("tokenizing", source, RecordCounts(), 2 * 10**6, 10.0) == expected
