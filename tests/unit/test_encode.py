"""Laws of the tokens of examples and of their loss masks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from lib.corpora import encoded_of, tokenize_all, windows_of
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from acsgd.io.data.batches import BatchReader
from acsgd.io.data.formats.base import Example, TextSegment
from acsgd.io.data.sampler import Sampler
from acsgd.io.data.sources.base import RecordCounts, Source
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.data.tokens import pipeline
from acsgd.io.data.tokens.corpus import TARGETS, Corpus
from acsgd.io.data.tokens.encode import DocumentEncoder
from acsgd.model_classes import IGNORED

PARTS = [
    [("Question: one plus one?\n", False), ("two", True)],
    [("all of it is learned", True)],
    [("äß€😀 ", False), ("😀 ß\n\n  ", True), ("  then", False), (" more", True)],
    [("only a prompt", False)],
    [("", False), (" ", True), ("", True)],
    [("cut in the mid", False), ("dle of words", True)],
    [("of ", False), ("t", True), ("he end", False)],
]
EXAMPLES = [Example(tuple(TextSegment(*part) for part in parts)) for parts in PARTS]


def tokenizers(like: PreTrainedTokenizerFast) -> Iterator[PreTrainedTokenizerFast]:
    """Yield tokenizers that report characters in different ways."""
    yield like
    trimmed = PreTrainedTokenizerFast(tokenizer_object=like.backend_tokenizer, eos_token="<|endoftext|>")
    trimmed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    yield trimmed
    metaspace = Tokenizer(models.Unigram([("<end>", 0.0), ("▁", -1.0), *((c, -9.0) for c in "abcdefghijklmnop\n")], 0))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    yield PreTrainedTokenizerFast(tokenizer_object=metaspace, eos_token="<end>")


def test_targets_are_the_tokens_with_a_character_of_an_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    for each in tokenizers(tokenizer):
        eos = each.eos_token_id
        for example in EXAMPLES:
            found = encoded_of(each, example)
            encoding = each(example.text, add_special_tokens=False)
            assert found.tokens.tolist() == [*encoding["input_ids"], eos]
            flags = [segment.is_target for segment in example.segments for _ in segment.text]
            for index, is_target in enumerate(found.targets[:-1]):
                start, end = encoding.token_to_chars(index) or (0, 0)
                if each.decode(found.tokens[index : index + 1]).strip():
                    assert is_target == any(flags[start:end])
            assert found.targets[-1] == example.segments[-1].is_target


def test_blanks_that_an_answer_consists_of_are_targets(tokenizer: PreTrainedTokenizerFast) -> None:
    example = Example((TextSegment("one", False), TextSegment("\n\n")))
    for each in [*tokenizers(tokenizer)][:2]:
        found = encoded_of(each, example)
        assert each.decode(found.tokens[found.targets].tolist()) == f"\n\n{each.eos_token}"


def test_a_token_is_a_target_if_only_its_first_or_last_character_is_one(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("the", add_special_tokens=False)["input_ids"]
    assert len(ids) < 3, "the characters of the answer share a token with those of the prompt"
    for cut in (1, 2):
        for answer_first in (True, False):
            segments = (TextSegment("the"[:cut], answer_first), TextSegment("the"[cut:], not answer_first))
            found = encoded_of(tokenizer, Example(segments))
            spans = tokenizer("the", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            expected = [start < cut if answer_first else end > cut for start, end in spans]
            assert found.targets[:-1].tolist() == expected


def test_tokens_and_targets_do_not_depend_on_the_batching(tokenizer: PreTrainedTokenizerFast) -> None:
    single = DocumentEncoder(tokenizer)
    parts = [single.encode([example], single.tokenize([example])) for example in EXAMPLES]
    together = encoded_of(tokenizer, *EXAMPLES)
    assert together.tokens.tolist() == np.concatenate([part.tokens for part in parts]).tolist()
    assert together.targets.tolist() == np.concatenate([part.targets for part in parts]).tolist()
    assert together.ends.tolist() == np.cumsum([len(part.tokens) for part in parts]).tolist()


def test_an_example_with_its_own_special_tokens_gets_no_others(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "one<|endoftext|>"
    found = encoded_of(tokenizer, Example((TextSegment(text),), has_special_tokens=True))
    assert tokenizer.decode(found.tokens.tolist()) == text


def test_prompts_need_a_tokenizer_that_reports_characters(tokenizer: PreTrainedTokenizerFast) -> None:
    class Slow(PreTrainedTokenizerFast):
        is_fast = False

    slow = Slow(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>", name_or_path="m")
    with pytest.raises(ValueError, match=r"tokenizer m does not report which characters.* tokenizer\.json"):
        encoded_of(slow, *EXAMPLES)
    assert len(encoded_of(slow, EXAMPLES[1]).tokens)


def corpus_of(
    examples: list[Example], tokenizer: PreTrainedTokenizerFast, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Corpus:
    """Tokenize examples into a cache entry."""

    def read(source: Source, tokenizer: PreTrainedTokenizerFast, counts: RecordCounts) -> Iterator[tuple[str, Example]]:
        return (("", example) for example in examples)

    monkeypatch.setattr(pipeline, "read_each", read)
    (directory / "a.jsonl").write_text(json.dumps({"text": "unused"}))
    [corpus] = tokenize_all(parse_sources(str(directory / "a.jsonl")), tokenizer, directory, vocab_size=512)
    return corpus


def test_prompts_have_no_labels_and_do_not_count(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = corpus_of(EXAMPLES, tokenizer, tmp_path, monkeypatch)
    rows = windows_of([corpus], 7, 1)
    count = len(rows.rows[0])
    batch = BatchReader(rows, Sampler(seed=0, batch=count, counts=(1,), sizes=(count,)), range(count)).batch(0)
    assert batch.inputs is not None
    assert batch.labels is not None
    found = {int(id_): labels for id_, labels in zip(batch.sample_ids.flatten(), batch.labels[:, 0], strict=True)}
    labels = torch.cat([found[index] for index in range(count)])
    expected = encoded_of(tokenizer, *EXAMPLES)
    tokens = torch.from_numpy(np.where(expected.targets, expected.tokens.astype(np.int64), IGNORED))
    assert torch.equal(labels, tokens[1 : 1 + 7 * count])
    assert 0 < (labels != IGNORED).sum() < len(labels)


def test_a_mask_is_stored_only_where_there_are_prompts(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, examples in (("with", EXAMPLES), ("without", EXAMPLES[1:2])):
        (tmp_path / name).mkdir()
        corpus = corpus_of(examples, tokenizer, tmp_path / name, monkeypatch)
        assert (corpus.targets is not None) == (name == "with")
        assert bool(list((tmp_path / name).glob(f"*/{TARGETS}"))) == (name == "with")
