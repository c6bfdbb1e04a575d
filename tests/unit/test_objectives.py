"""Laws of prefix language modelling and of UL2R: nothing is lost, masks and rates are exact, and draws repeat."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from lib.corpora import documents_of
from transformers import AutoConfig, PreTrainedTokenizerFast

from acsgd.commands.evaluation.job import config_of
from acsgd.commands.evaluation.options import EvalOptions
from acsgd.commands.recorded import RecordedModel
from acsgd.config.options import PipelineConfig
from acsgd.config.run_file import parse
from acsgd.io.data.row_spec import DenoisingMode, DenoisingTokens, denoising_tokens
from acsgd.io.data.rows.base import INPUT_IDS, LABELS
from acsgd.io.data.rows.documents import DocumentRows
from acsgd.io.data.rows.layout import RowKind, make_layout
from acsgd.io.data.rows.objectives import DocumentPart, Objective, PrefixLM
from acsgd.io.data.rows.ul2r import MIXTURE, UL2R, Denoiser, removed
from acsgd.io.data.sampler import Ints, random_words
from acsgd.launch import Launch
from acsgd.layers.masks import NO_PREFIX, PREFIXES
from acsgd.model_classes import IGNORED
from acsgd.run.plan.job import Job, prepare
from acsgd.run.setup.data import open_data
from acsgd.run.setup.inputs import open_inputs
from acsgd.tasks import check_options

BEGIN, END = 10**6, 10**6 + 1
SENTINELS = range(10**6 + 10, 10**6 + 20)
TOKENS = DenoisingTokens({"R": [BEGIN + 2], "S": [BEGIN + 3], "X": [BEGIN + 4, BEGIN + 5]}, SENTINELS, [BEGIN], END)
COUNTS = [2, 3, 4, 7, 20, 61, 400]
"""Numbers of tokens of texts."""


def part_of(objective: Objective, text: Ints, place: int = 0, epoch: int = 0) -> DocumentPart:
    """Return what an objective makes of a text, all of which is learned."""
    return objective.apply(text[:-1], text[1:], place, epoch)


def row_of(part: DocumentPart) -> tuple[list[int], list[int]]:
    """Return the prefix, and the learned tokens, of a part whose labels are exactly the tokens after the prefix."""
    row = [*part.tokens.tolist(), int(part.labels[-1])]
    expected = [token if place >= part.prefix else IGNORED for place, token in enumerate(row)][1:]
    assert part.labels.tolist() == expected
    return row[: part.prefix], row[part.prefix :]


def restored(part: DocumentPart) -> tuple[DenoisingMode, list[int], list[list[int]]]:
    """Return the mode, the text that a part was made of, and the removed spans."""
    prefix, learned = row_of(part)
    begin = prefix[: prefix[0] == BEGIN]
    mode: DenoisingMode = next(
        mode for mode, ids in TOKENS.modes.items() if prefix[len(begin) : len(begin) + len(ids)] == [*ids]
    )
    kept = prefix[len(begin) + len(TOKENS.modes[mode]) :]
    if mode == "S":
        assert not {*SENTINELS} & {*kept, *learned}
        return mode, begin + kept + learned, [learned]
    assert learned.pop() == END
    spans: list[list[int]] = []
    for token in learned:
        if token in SENTINELS:
            assert token == SENTINELS[len(spans)], "sentinels are distinct and in order"
            spans.append([])
        else:
            spans[-1].append(token)
    text = begin
    for token in kept:
        text += spans[SENTINELS.index(token)] if token in SENTINELS else [token]
    assert [token for token in kept if token in SENTINELS] == [*SENTINELS[: len(spans)]]
    return mode, text, spans


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("begin", [0, 1])
def test_what_was_removed_can_be_put_back(count: int, begin: int) -> None:
    text = np.array([BEGIN] * begin + [*range(count - begin)])
    denoised = UL2R(TOKENS, seed=3)
    for epoch in range(60):
        part = part_of(denoised, text, place=7, epoch=epoch)
        assert len(part.tokens) == len(part.labels) <= denoised.sizes(np.array([count - 1]))[0]
        mode, found, spans = restored(part)
        assert found == text.tolist()
        assert all(spans)
        numbers = {
            tuple(int(x) for x in removed(np.array(count - begin), each, len(SENTINELS)))
            for each in MIXTURE
            if each.mode == mode and each.span
        }
        assert mode == "S" or (sum(map(len, spans)), len(spans)) in numbers


@pytest.mark.parametrize("denoiser", sorted({each for each in MIXTURE if each.span}))
def test_rates_and_mean_lengths_of_spans_are_those_of_the_denoiser(denoiser: Denoiser) -> None:
    """Within rounding: half a token, and half a span."""
    tokens = np.arange(2, 3000)
    counts, spans = removed(tokens, denoiser, 10**6)
    exact = tokens * denoiser.rate
    assert (np.abs(counts - exact) <= np.where(exact < 1, 1, 0.5)).all()
    free = counts >= 1.5 * denoiser.span
    assert (np.abs(counts[free] / spans[free] - denoiser.span) <= denoiser.span / (2 * spans[free]) + 1e-9).all()
    limited = removed(tokens, denoiser, 5)
    assert (limited[0] == counts).all()
    assert (limited[1] == np.minimum(spans, 5)).all()


def test_denoisers_have_the_documented_rates_and_spans() -> None:
    assert Counter((*each,) for each in MIXTURE) == {
        ("S", 0.0, 0): 4,
        ("R", 0.15, 3): 2,
        ("X", 0.15, 32): 1,
        ("X", 0.5, 8): 1,
    }


def test_random_numbers_are_those_of_splitmix64() -> None:
    """The first outputs of its reference implementation with the seed 1234567."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert random_words(1234567, 4).tolist() == expected


def test_denoisers_and_places_are_drawn_evenly() -> None:
    """Counts are within 5 standard deviations of binomial ones."""
    denoised, drawn = UL2R(TOKENS, seed=0), 4000
    parts = [restored(part_of(denoised, np.arange(40), place)) for place in range(drawn)]
    modes = Counter(mode for mode, _, _ in parts)
    for mode, share in (("R", 0.25), ("S", 0.5), ("X", 0.25)):
        assert abs(modes[mode] / drawn - share) < 5 * (share * (1 - share) / drawn) ** 0.5
    cuts = Counter(spans[0][0] for mode, _, spans in parts if mode == "S")
    assert cuts.keys() == {*range(1, 40)}
    assert all(abs(cuts[cut] - modes["S"] / 39) < 5 * (modes["S"] / 39) ** 0.5 for cut in cuts)
    removed_at = Counter(token for mode, _, spans in parts if mode == "R" for span in spans for token in span)
    assert removed_at.keys() == {*range(1, 40)}, "the first span is never at the beginning, as in T5"


def test_a_text_with_sentinels_keeps_them() -> None:
    text = np.array([1, 2, SENTINELS[0], 3, 4, 5, 6, 7, 8, 9])
    for epoch in range(20):
        prefix, learned = row_of(part_of(UL2R(TOKENS, 0), text, epoch=epoch))
        assert [*prefix[1:], *learned] == text.tolist()


@pytest.mark.parametrize("kind", ["pack", "single"])
@pytest.mark.parametrize("sequence", [8, 24, 100])
def test_rows_hold_every_document(kind: RowKind, sequence: int) -> None:
    lengths = [1, 9, 2, 30, 5, 8, 9, 1, 3, 17, 2, 4]
    corpus, denoised = documents_of(lengths), UL2R(TOKENS, seed=5)
    rows = DocumentRows(
        corpus, make_layout(corpus, sequence, kind, "split", denoised), sequence, padding=END, objective=denoised
    )
    found = Counter[int]()
    for index, epoch in itertools.product(range(len(rows)), range(2)):
        row = rows.read(index, epoch)
        assert len(row[INPUT_IDS]) == len(row[LABELS]) == len(row[PREFIXES]) == sequence
        for part in np.unique(row[PREFIXES][row[PREFIXES] != NO_PREFIX]):
            first, *_, last = (*np.flatnonzero(row[PREFIXES] == part),) * 2
            assert (row[PREFIXES][first : last + 1] == part).all()
            assert (row[LABELS][first:last] == IGNORED).all()
            assert row[LABELS][last] != IGNORED
        found.update({token for values in (row[INPUT_IDS], row[LABELS]) for token in values.tolist()})
    texts = {
        token
        for start, stop in itertools.pairwise(np.cumsum([0, *lengths]))
        if stop - start > 1
        for token in range(start, stop)
    }
    assert texts <= found.keys()
    assert any((rows.read(0, 0)[INPUT_IDS] != rows.read(0, epoch)[INPUT_IDS]).any() for epoch in range(1, 9))


@pytest.mark.parametrize("objective", [UL2R(TOKENS, seed=0), PrefixLM(seed=0)])
@pytest.mark.parametrize("count", [2, 5, 300])
def test_the_mean_numbers_of_labels_and_of_tokens_are_known(objective: Objective, count: int) -> None:
    parts = [part_of(objective, np.arange(count), place) for place in range(500)]
    labels, sizes = [int((part.labels != IGNORED).sum()) for part in parts], [len(part.tokens) for part in parts]
    lengths = np.array([count - 1])
    for drawn, [mean] in ((labels, objective.learned(lengths)), (sizes, objective.mean_sizes(lengths))):
        assert abs(np.mean(drawn) - mean) <= 5 * np.std(drawn) / len(drawn) ** 0.5


@pytest.mark.parametrize("objective", [UL2R(TOKENS, seed=0), PrefixLM(seed=0)])
def test_the_number_of_labels_of_a_layout_is_the_mean_over_epochs(objective: Objective) -> None:
    corpus = documents_of([5, 40, 90])
    layout = make_layout(corpus, 200, "single", "error", objective)
    rows = DocumentRows(corpus, layout, 200, padding=0, objective=objective)
    drawn = [sum(int((rows.read(row, epoch)[LABELS] != IGNORED).sum()) for row in range(3)) for epoch in range(500)]
    assert abs(np.mean(drawn) - layout.num_targets) <= 5 * np.std(drawn) / len(drawn) ** 0.5 + 0.5  # it is rounded


# ---- prefixes


def test_a_prompt_is_a_prefix() -> None:
    """Of two prompts with answers in turn, the second prompt has no loss, but is no prefix."""
    tokens = np.arange(12)
    is_target = np.array([0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0], dtype=bool)
    labels = np.where(is_target, tokens, IGNORED)[1:]
    part = PrefixLM(0).apply(tokens[:-1], labels, 0, 0)
    assert part.prefix == 3
    assert part.tokens.tolist() == tokens[:-1].tolist()
    assert part.labels.tolist() == labels.tolist()
    assert PrefixLM(0).apply(tokens[:-1], np.full(11, IGNORED), 0, 0).prefix == 11


def test_a_text_is_divided_anywhere() -> None:
    text, drawn = np.arange(10), 3000
    prefixes = Counter[int]()
    for place in range(drawn):
        prefix, learned = row_of(part_of(PrefixLM(1), text, place))
        assert prefix + learned == text.tolist()
        prefixes[len(prefix)] += 1
    assert prefixes.keys() == {*range(1, 10)}
    assert all(abs(count - drawn / 9) < 5 * (drawn / 9) ** 0.5 for count in prefixes.values())
    assert len({part_of(PrefixLM(1), text, epoch=epoch).prefix for epoch in range(50)}) > 1, "the same in every epoch"


# ---- runs


@pytest.fixture(scope="module")
def with_sentinels(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A tokenizer with sentinels, in another order than their ids."""
    copy = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>")
    copy.add_tokens([f"<unused{number}>" for number in (2, 10, 1, 0)], special_tokens=True)
    return copy


def job_of(tokenizer: PreTrainedTokenizerFast, directory: Path, options: str, **sizes: object) -> Job:
    """Return a run of a small model on short documents."""
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64} | sizes
    AutoConfig.for_model("gpt2", vocab_size=len(tokenizer), **shape).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    (directory / "a.jsonl").write_text("".join(f'{{"text": "{"word " * (n % 7 + 1)}{n}"}}\n' for n in range(50)))
    flags = f"--model.name {directory / 'model'} --model.init scratch --log.dir {directory / 'runs' / 'a'}"
    rest = f"--data.sources {directory / 'a.jsonl'} --data.sequence 48 --data.batch 4 --optim.lr 1 --optim.steps 40"
    return prepare(parse([*flags.split(), *rest.split(), *options.split()]), Launch(0, 0, 1))


def rows_at(jobs: list[Job], steps: list[int]) -> list[list[tuple[int, list[int]]]]:
    """Return sample ids and tokens of the global batches of steps, read by the replicas of a run in turn."""
    readers = [open_data(job).reader for job in jobs]
    found = []
    for step in steps:
        batches = [reader.batch(step) for reader in readers]
        rows = [x.inputs[INPUT_IDS].flatten(0, 1).tolist() for x in batches if x.inputs]
        ids = [x.sample_ids.flatten().tolist() for x in batches]
        found.append([*zip(itertools.chain(*ids), itertools.chain(*rows), strict=True)])
    return found


def test_a_step_depends_on_the_seed_and_its_number_alone(
    with_sentinels: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Not on micro-batches, replicas, or earlier steps. A document is denoised in another way in each epoch."""
    job = job_of(with_sentinels, tmp_path, "--data.objective ul2r --data.sentinels <unused{}>")
    in_micros, seeded = (
        dataclasses.replace(job.config, pp=PipelineConfig(micro=2)),
        dataclasses.replace(job.config, data=dataclasses.replace(job.config.data, seed=1)),
    )
    replicas = [prepare(in_micros, Launch(rank, rank, 2)) for rank in range(2)]
    steps = [*range(30)]
    expected = rows_at([job], steps)
    assert rows_at(replicas, steps[::-1]) == expected[::-1]
    assert rows_at([prepare(seeded, Launch(0, 0, 1))], steps) != expected
    by_sample: dict[int, list[list[int]]] = {}
    for sample, tokens in itertools.chain(*expected):
        by_sample.setdefault(sample, []).append(tokens)
    repeated = [rows for rows in by_sample.values() if len(rows) > 1]
    differing = [rows for rows in repeated if len({*map(tuple, rows)}) > 1]
    assert len(differing) > 0.8 * len(repeated) > 5, "short documents may be denoised alike by chance"


def test_a_run_states_its_tokens_and_records_them(with_sentinels: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    inputs = open_inputs(job_of(with_sentinels, tmp_path, "--data.objective ul2r --data.sentinels <unused{}>"))
    ids = [with_sentinels.convert_tokens_to_ids(f"<unused{number}>") for number in (0, 1, 2, 10)]
    assert f"4 sentinels, from {ids[0]} ('<unused0>') to {ids[3]} ('<unused10>')" in inputs.notes[0]
    assert inputs.identity.data["data.objective"] == "ul2r"
    modes = [with_sentinels.encode(mode) for mode in ("[NLU]", "[S2S]", "[NLG]")]
    assert inputs.identity.data["tokens of denoising"] == [*modes, ids]
    assert inputs.identity.data["data.rows"] == "pack"


def test_an_evaluation_has_the_objective_of_the_run(with_sentinels: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """With the same tokens, and the same draws."""
    options = "--data.objective ul2r --data.sentinels <unused{}> --data.modes a,b,c --data.seed 7"
    job = job_of(with_sentinels, tmp_path, options)
    model = RecordedModel("m", "lm", open_inputs(job).identity.data)
    for rows in (None, "single"):
        data = config_of(EvalOptions("m", data="a.jsonl", rows=rows), model, 1).data  # type: ignore[arg-type]
        names = ("objective", "sentinels", "modes", "seed", "sequence")
        assert all(getattr(data, name) == getattr(job.config.data, name) for name in names)
        assert data.rows == (rows or "pack")


def test_a_tokenizer_without_sentinels_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    message = r'has no "<extra_id_0>"; name tokens that texts do not contain, such as --data\.sentinels'
    with pytest.raises(ValueError, match=message):
        denoising_tokens(tokenizer, "a,b,c", "<extra_id_{}>")
    with pytest.raises(ValueError, match=message):
        open_inputs(job_of(tokenizer, tmp_path, "--data.objective ul2r"))


def test_prompts_are_not_denoised(with_sentinels: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    options = "--data.objective ul2r --data.sentinels <unused{}>"
    job, with_targets = (job_of(with_sentinels, tmp_path, options + more) for more in ("", " --data.targets all"))
    (tmp_path / "a.jsonl").write_text('{"prompt": "a b c", "completion": " d e f"}\n' * 9)
    with pytest.raises(ValueError, match=r"^data\.objective=ul2r is for texts, but .*a\.jsonl has prompts; learn"):
        open_data(job)
    assert "9 documents" in open_data(with_targets).reader.notes[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--data.objective prefix --model.task classification",
            r"^data\.objective=prefix is for model\.task=lm; remove",
        ),
        (
            "--data.objective ul2r --data.rows concat",
            r"^data\.rows=concat cuts documents anywhere, but data\.objective",
        ),
        ("--data.sentinels <extra>", r'^data\.sentinels="<extra>" must contain \{\} once'),
        ("--data.modes a,b,a", r'^data\.modes="a,b,a" must be three different texts'),
        ("--data.modes a,,b", r'^data\.modes="a,,b" must be three different texts'),
    ],
)
def test_bad_options_are_refused(options: str, message: str) -> None:
    flags = "--model.name a --data.sources demo --data.sequence 8 --data.batch 2 --optim.lr 1 --optim.steps 2"
    with pytest.raises(ValueError, match=message):
        check_options(parse([*flags.split(), *options.split()]))


def test_a_row_without_room_is_refused(with_sentinels: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    options = "--data.objective ul2r --data.sentinels <unused{}> --data.sequence 4"
    with pytest.raises(ValueError, match=r"^data\.sequence=4 is too short for data\.objective=ul2r"):
        open_data(job_of(with_sentinels, tmp_path, options))


@pytest.mark.parametrize("model_type", ["gpt_neo", "mamba"])
def test_a_model_that_masks_prefixes_itself_is_refused(
    model_type: str,
    with_sentinels: PreTrainedTokenizerFast,
    tiny_config_of: Callable[[str], AutoConfig],
    tmp_path: Path,
) -> None:
    job = job_of(with_sentinels, tmp_path, "--data.objective prefix")
    tiny_config_of(model_type).save_pretrained(tmp_path / "model")
    job = prepare(job.config, Launch(0, 0, 1))
    with pytest.raises(ValueError, match=rf"^data\.objective=prefix: {model_type} cannot attend to a prefix in both"):
        open_inputs(job)


@pytest.fixture
def tiny_config_of(with_sentinels: PreTrainedTokenizerFast) -> Callable[[str], AutoConfig]:
    """Return a function that gives the config of a small model whose masks are its own."""
    options: dict[str, dict[str, object]] = {
        "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8},
        "mamba": {"num_hidden_layers": 2, "state_size": 8},
    }
    return lambda name: AutoConfig.for_model(name, hidden_size=32, vocab_size=len(with_sentinels), **options[name])
