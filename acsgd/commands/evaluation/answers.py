"""Generated answers, compared with those of the data: exact match and ROUGE."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from typing import NamedTuple

import transformers

from acsgd.commands.evaluation.options import DTYPES, EvalOptions
from acsgd.commands.evaluation.report import EvaluationReport
from acsgd.commands.generation.command import batches, open_generator
from acsgd.commands.generation.decode import Generator, Ids
from acsgd.commands.generation.prompts import PromptIds, describe_cuts
from acsgd.commands.recorded import RecordedModel
from acsgd.config.options import DataConfig
from acsgd.io.data.formats.base import Example, FormatError, TextSegment
from acsgd.io.data.formats.formats import read_each, read_options
from acsgd.io.data.sources.base import BadRecord, RecordCounts
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.data.sources.text import excerpt
from acsgd.io.data.tokens.encode_examples import prompt_and_answer
from acsgd.io.data.tokens.pipeline import stop_or_skip
from acsgd.notes import print_note, report_if_slow

ROUGE = ("rouge1", "rouge2", "rougeL")


class Question(NamedTuple):
    """The prompt of an example, and its answer."""

    prompt: PromptIds
    answer: str


def evaluate_answers(
    options: EvalOptions, model: RecordedModel, data: DataConfig, places: Collection[str] | None = None
) -> EvaluationReport:
    """Generate the answer to the prompt of each example, and compare it with the example's.

    places: of the records that are read; None = all.
    Raises ValueError if an example has no prompt or no answer, or if torchmetrics is not installed.
    """
    if importlib.util.find_spec("torchmetrics") is None:
        raise ValueError('--generate needs torchmetrics: pip install "acsgd[eval]"')
    transformers.logging.set_verbosity_error()
    dtype = DTYPES[options.dtype] if options.dtype else None
    generator = open_generator(
        model.name, options.decoding, dtype=dtype, device=options.device, offload=options.offload
    )
    questions = read_questions(data, generator, places)
    answers = generate_answers(generator, [question.prompt.ids for question in questions])
    scores = compare(answers, [question.answer for question in questions])
    task = "seq2seq" if generator.prompts.is_encoder_decoder else "lm"
    evaluated = data.sources if places is None else f"{data.sources}, what data.eval_fraction has held out of it"
    return EvaluationReport(model.name, evaluated, task, len(questions), "examples", scores)


def read_questions(data: DataConfig, generator: Generator, places: Collection[str] | None = None) -> list[Question]:
    """Return prompt and answer of each example. Raises ValueError that names file and line.

    places: see `evaluate_answers`.
    """
    tokenizer, questions = generator.loaded.tokenizer, list[Question]()
    for source, _ in parse_sources(data.sources, key="--data", options=read_options(data)):
        counts, known = RecordCounts(), len(questions)
        for where, example in read_each(source, tokenizer, counts):
            if places is not None and where not in places:
                continue
            if isinstance(example, BadRecord):
                stop_or_skip(example, source, counts)
                continue
            try:
                questions.append(_question(example, generator))
            except FormatError as error:
                stop_or_skip(BadRecord(where, error.reason, error.remedy), source, counts)
        truncated = describe_cuts(question.prompt.cut_by for question in questions[known:])
        for note in (counts.unread_summary(), counts.summary(), *truncated):
            if note:
                print_note(f"--data: {source.name}: {note}")
    if not questions:
        raise ValueError(f"--data: {data.sources} has no examples; give prompts with answers")
    return questions


def _question(example: Example, generator: Generator) -> Question:
    prompts, (_, answer) = generator.prompts, prompt_and_answer(example)
    encoded = prompts.encode(_prompt_of(example))
    # as the generated text is: without special tokens, which chat templates write
    tokens = generator.loaded.tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"]
    if not (expected := prompts.decode(tokens)).strip():
        raise FormatError(
            f"has an answer that is empty without special tokens ({excerpt(answer)})", "remove the record"
        )
    return Question(encoded, expected)


def _prompt_of(example: Example) -> Example:
    """Return the prompt of an example. Raises FormatError if it has none."""
    prompt, _ = prompt_and_answer(example)
    plain = tuple(span for span in example.plain if span[1] <= len(prompt))
    return example._replace(segments=(TextSegment(prompt, is_target=False),), plain=plain)


def generate_answers(generator: Generator, prompts: Sequence[Ids]) -> list[str]:
    """Return the text that the model generates after each prompt."""
    answers: list[str] = []
    size = generator.decoding.batch if generator.pads_exactly() else 1
    # prompts of similar length together: less padding
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    with report_if_slow(print_note, lambda: f"generated {len(answers):,} of {len(prompts):,} answers"):
        for batch in batches([generator.limit(prompts[index]) for index in order], size):
            answers += generator.generate([prompts[order[place]] for place in batch], index=batch.start)
    return [answer for _, answer in sorted(zip(order, answers, strict=True))]


def compare(answers: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
    """Return the fraction of exact matches, without white space around texts, and the mean F-measures of ROUGE."""
    from torchmetrics.functional.text import rouge_score

    answers, expected = ([text.strip() for text in texts] for texts in (answers, expected))
    matches = sum(answer == other for answer, other in zip(answers, expected, strict=True))
    rouge = rouge_score(answers, expected, rouge_keys=ROUGE)
    return {"exact_match": matches / len(answers), **{name: rouge[f"{name}_fmeasure"].item() for name in ROUGE}}
