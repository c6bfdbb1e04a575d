"""Laws of the tokens of examples and of their loss masks."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from lib.corpora import encoded_of, tokenize_all, windows_of
from lib.small_tokenizers import MAKE_TOKENIZER
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from acsgd.commands.generation.prompts import PromptEncoder
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
    [("of ", False), ("t", True), ("he end", False)],
]
EXAMPLES = [Example(tuple(TextSegment(*part) for part in parts)) for parts in PARTS]


def tokenizers(like: PreTrainedTokenizerFast) -> Iterator[PreTrainedTokenizerFast]:
    """Yield tokenizers that report characters in different ways."""
    yield like
    trimmed = PreTrainedTokenizerFast(tokenizer_object=like.backend_tokenizer, eos_token="<|endoftext|>")
    trimmed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    yield trimmed
    pieces = [("<unk>", 0.0), ("▁", -1.0), *((char, -9.0) for char in "abcdefghijklmnop\n")]
    metaspace = Tokenizer(models.Unigram(pieces, 0))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    yield PreTrainedTokenizerFast(tokenizer_object=metaspace, unk_token="<unk>", eos_token="<end>")


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


def test_prompts_and_answers_have_limits_of_their_own(tokenizer: PreTrainedTokenizerFast) -> None:
    eos, parts = tokenizer.eos_token_id, [("Question: one plus one?\n", False), ("two, or 2, if you like", True)]
    example = Example(tuple(TextSegment(*part) for part in parts))
    whole = encoded_of(tokenizer, example)
    ids, first = whole.tokens[:-1].tolist(), int(whole.targets.argmax())
    for max_prompt, max_answer in itertools.product((0, 1, first - 1, first, 99), (0, 1, 2, len(ids) - first, 99)):
        found = encoded_of(tokenizer, example._replace(max_prompt=max_prompt, max_answer=max_answer))
        prompt = ids[:first][: max_prompt or None]
        answer = [*ids[first:][: max_answer - 1 if max_answer else None], eos]
        assert found.tokens.tolist() == [*prompt, *answer]
        assert found.targets.tolist() == [False] * len(prompt) + [True] * len(answer)
        assert found.ends.tolist() == [len(found.tokens)]


def test_blanks_that_an_answer_consists_of_are_targets(tokenizer: PreTrainedTokenizerFast) -> None:
    example = Example((TextSegment("one", False), TextSegment("\n\n")))
    for each in [*tokenizers(tokenizer)][:2]:
        found = encoded_of(each, example)
        assert each.decode(found.tokens[found.targets].tolist()) == f"\n\n{each.eos_token}"


def test_a_token_that_crosses_a_border_is_learned_at_the_end_and_divided_at_the_beginning_of_an_answer(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    assert len(ids_of("the")) < 3, "the characters of the answer share a token with those of the prompt"
    for cut in (1, 2):
        parts = "the"[:cut], "the"[cut:]
        found = encoded_of(tokenizer, Example((TextSegment(parts[0]), TextSegment(parts[1], False))))
        spans = tokenizer("the", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        assert found.tokens[:-1].tolist() == ids_of("the")
        assert found.targets[:-1].tolist() == [start < cut for start, _ in spans]
        found = encoded_of(tokenizer, Example((TextSegment(parts[0], False), TextSegment(parts[1]))))
        prompt, answer = map(ids_of, parts)
        assert found.tokens[:-1].tolist() == [*prompt, *answer]
        assert found.targets[:-1].tolist() == [False] * len(prompt) + [True] * len(answer)


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


PROMPTS = ["one", "in the year 20", "A:", "A: ", "A:  ", "A:\n", "A:\n\n", "x =", "def f():\n    ", "(", " ", "é\t"]
ANSWERS = ["two", " two", "24", "\ntwo", "\n\ntwo", "  two", ")", "é", "    return", "="]


@pytest.mark.parametrize("kind", [*MAKE_TOKENIZER, "trained"])
@pytest.mark.parametrize("is_framed", [False, True])
def test_documents_begin_with_the_tokens_of_the_prompt_in_generation(
    kind: str, is_framed: bool, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Whatever the tokenizer merges across the border, and whatever it puts around a text: begin, end, both or none."""
    backend = Tokenizer.from_str(
        (tokenizer.backend_tokenizer if kind == "trained" else MAKE_TOKENIZER[kind]()).to_str()
    )
    each = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    if is_framed:
        frame = [("<s>", each.bos_token_id), ("</s>", each.eos_token_id)]
        each.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=frame
        )
    encoder = PromptEncoder(each, [each.bos_token_id] * is_framed, [], [], 0, None, is_encoder_decoder=False)
    num_divided = num_refused = 0
    for prompt, answer in itertools.product(PROMPTS, ANSWERS):
        documents = DocumentEncoder(each)
        example = Example((TextSegment(prompt, False), TextSegment(answer)))
        found = documents.encode([example], documents.tokenize([example]))
        if found.refused:
            num_refused += 1
            continue
        try:
            start = encoder.encode(Example((TextSegment(prompt, is_target=False),))).ids
        except ValueError:  # a blank, which is left to the answer
            start = []
        assert found.tokens[: len(start)].tolist() == start
        assert found.targets.tolist() == [place >= len(start) for place in range(len(found.tokens))]
        whole = [*encoder.before, *each(prompt + answer, add_special_tokens=False)["input_ids"], each.eos_token_id]
        assert each.decode(found.tokens) == each.decode(whole)
        num_divided += found.tokens.tolist() != whole
    assert num_divided < 20
    assert num_refused == 0 or kind == "WordPiece"
