"""Held-out data: every sequence is evaluated once, for any number of replicas, and never trained on."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from lib.corpora import one_document, tokenize_all, windows_of
from transformers import PreTrainedTokenizerFast

from acsgd.config.run_file import parse
from acsgd.io.data.batches import BatchReader
from acsgd.io.data.held_out import HeldOut, held_out, parse_eval, split
from acsgd.io.data.rows.base import Rows
from acsgd.io.data.sampler import Sampler
from acsgd.io.data.sources import files
from acsgd.io.data.sources.base import ReadOptions
from acsgd.io.data.sources.files import fingerprint_of
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.data.tokens.corpus import Corpus
from acsgd.launch import Launch
from acsgd.layers.batch import Batch
from acsgd.run.plan.job import prepare
from acsgd.run.setup.data import Data, describe_overlaps, open_data

T = 5
LENGTHS = [T + 1, 7 * T + 3, 20 * T + 1, 3 * T + T]
CORPORA = [one_document(np.arange(1000 * i, 1000 * i + n, dtype="<u4")) for i, n in enumerate(LENGTHS)]
"""All tokens are distinct, so each identifies its position."""
LONG = CORPORA[1:]


def separate(corpora: list[Corpus], *, micro: int = 2, replicas: int = 1, replica: int = 0) -> HeldOut:
    """Hold out whole sources; by default for one replica in micro-batches of 2."""
    rows = windows_of(corpora, T, micro)
    made = held_out(windows_of([], T, micro), rows, 0.0, replicas=replicas, replica=replica)
    assert made is not None
    return made


def ends(fraction: float, *, replicas: int = 1, replica: int = 0) -> HeldOut:
    """Hold out a fraction of LONG."""
    made = held_out(windows_of(LONG, T, 2), windows_of([], T, 2), fraction, replicas=replicas, replica=replica)
    assert made is not None
    return made


def targets(batches: Iterator[Batch]) -> list[list[int]]:
    """Return the targets of every sequence that has targets, after checking that each follows its input."""
    found = []
    for batch in batches:
        assert batch.inputs is not None
        assert batch.labels is not None
        for tokens, labels in zip(batch.inputs["input_ids"].flatten(0, 1), batch.labels.flatten(0, 1), strict=True):
            assert torch.equal(labels, tokens + 1) or bool((labels == -100).all())
            if labels[0] != -100:
                found.append(labels.tolist())
    return found


def windows(corpora: list[Corpus]) -> list[list[int]]:
    """Return the targets of every sequence, computed from the tokens."""
    return [tokens[i + 1 : i + 1 + T].tolist() for _, _, tokens, *_ in corpora for i in range(0, len(tokens) - T, T)]


# ---- each sequence once


@pytest.mark.parametrize("replicas", [1, 2, 3, 7, 40])
def test_every_sequence_is_read_once_by_one_replica(replicas: int) -> None:
    for micro, micros, sources in itertools.product([1, 2, 3, 8, 50], [1, 2, 5], [1, 4]):
        case = f"micro-batches of {micro}, {micros} per batch, {sources} sources"
        corpora = CORPORA[:sources]
        parts = [separate(corpora, micro=micro, replicas=replicas, replica=replica) for replica in range(replicas)]
        assert {len(part) for part in parts} == {len(windows(corpora))}, case
        all_batches = [list(part.batches(micros)) for part in parts]
        shares = [targets(iter(batches)) for batches in all_batches]
        assert list(itertools.chain(*shares)) == windows(corpora), case
        for batches, share in zip(all_batches, shares, strict=True):
            shapes = [batch.inputs["input_ids"].shape for batch in batches if batch.inputs is not None]
            assert shapes == [(micros, micro, T)] * len(batches), case
            assert len(batches) == -(-len(share) // (micro * micros)), f"{case}: a batch is only padding"
        assert max(map(len, shares)) - min(map(len, shares)) < 2 * micro, case


def test_the_held_out_set_is_the_same_for_any_number_of_replicas() -> None:
    for fraction, replicas in itertools.product([0.01, 0.3, 0.99], [1, 2, 3, 8]):
        expected = targets(ends(fraction).batches(3))
        parts = (ends(fraction, replicas=replicas, replica=replica).batches(2) for replica in range(replicas))
        assert list(itertools.chain(*map(targets, parts))) == expected, (fraction, replicas)


def test_every_evaluation_reads_the_same() -> None:
    held = ends(0.5)
    assert targets(held.batches(2)) == targets(held.batches(2))


@pytest.mark.parametrize("replicas", [1, 3, 40])
def test_replicas_read_as_many_batches_where_it_is_asked(replicas: int) -> None:
    parts = [separate(CORPORA, replicas=replicas, replica=replica) for replica in range(replicas)]
    even = [list(part.batches(2, even=True)) for part in parts]
    assert {*map(len, even)} == {parts[0].most_batches(2)}
    assert [targets(iter(each)) for each in even] == [targets(part.batches(2)) for part in parts]


def test_sample_ids_are_indices_in_the_held_out_set() -> None:
    parts = [separate(CORPORA, replicas=3, replica=replica) for replica in range(3)]
    ids: list[int] = []
    for part in parts:
        for batch in part.batches(2):
            assert batch.labels is not None
            assert len(batch.micro_ids) == 2
            ids += batch.sample_ids[batch.labels[:, :, 0] != -100].tolist()
    assert ids == list(range(len(parts[0])))


@pytest.mark.parametrize(("wants_inputs", "wants_labels"), list(itertools.product([False, True], repeat=2)))
def test_a_stage_reads_only_what_it_needs(wants_inputs: bool, wants_labels: bool) -> None:
    rows = windows_of(CORPORA[1:2], T, 2, wants_inputs=wants_inputs, wants_labels=wants_labels)
    held = HeldOut(rows, [range(4, 7)], 1, 0)
    [batch] = held.batches(3)
    whole = next(HeldOut(windows_of(CORPORA[1:2], T, 2), [range(4, 7)], 1, 0).batches(3))
    tokens = None if batch.inputs is None else batch.inputs["input_ids"]
    assert whole.inputs is not None
    assert whole.labels is not None
    for given, wanted, expected in (
        (tokens, wants_inputs, whole.inputs["input_ids"]),
        (batch.labels, wants_labels, whole.labels),
    ):
        assert (given is not None) == wanted
        assert given is None or (torch.equal(given, expected) and given.dtype == torch.int64 and given.is_contiguous())
    assert batch.sample_ids.shape == (3, 2)


# ---- disjoint from the training data


@pytest.mark.parametrize("fraction", [0.0, 1e-9, 0.05, 1 / 3, 0.5, 0.9, 1 - 1e-9])
def test_trained_and_held_out_targets_are_disjoint_and_together_complete(fraction: float) -> None:
    rows = windows_of(LONG, T, 1)
    sizes = [len(each) for each in rows.rows]
    kept = tuple(split(size, fraction) for size in sizes)
    epoch = sum(kept)  # weights in proportion to the sizes make one epoch of each source in as many samples
    sampler = Sampler(seed=3, batch=epoch, counts=kept, sizes=kept)
    batch = BatchReader(rows, sampler, range(epoch)).batch(0)
    trained = targets(iter([batch]))
    held = targets(ends(fraction).batches(4)) if fraction else []
    assert sorted(trained + held) == windows(LONG)
    assert not set(itertools.chain(*trained)) & set(itertools.chain(*held))
    for number, size in enumerate(sizes, start=1):  # the end of each text
        of_this = [row for row in held if row[0] // 1000 == number]
        assert of_this == windows([CORPORA[number]])[size - len(of_this) :]


def test_a_fraction_is_met_to_half_a_sequence_with_at_least_one_on_each_side() -> None:
    for sequences, fraction in itertools.product([2, 3, 10, 999, 10**9], [1e-12, 0.01, 0.05, 0.5, 0.95, 1 - 1e-12]):
        held = sequences - split(sequences, fraction)
        assert 1 <= held <= sequences - 1, (sequences, fraction)
        assert held in (1, sequences - 1) or abs(held - sequences * fraction) <= 0.5 + 1e-6 * fraction


def test_fraction_0_holds_out_nothing() -> None:
    assert [split(sequences, 0.0) for sequences in (0, 1, 2, 10)] == [0, 1, 2, 10]
    assert held_out(windows_of(CORPORA, T, 1), windows_of([], T, 1), 0.0, replicas=1, replica=0) is None


# ---- errors


@pytest.mark.parametrize("sequences", [0, 1])
def test_a_source_that_is_too_short_to_split_is_refused(sequences: int) -> None:
    with pytest.raises(ValueError, match=rf"^data\.eval_fraction=0\.5 needs at least two .* has {sequences}; use a "):
        split(sequences, 0.5)


def test_a_fraction_together_with_sources_is_refused() -> None:
    message = r"^data\.eval_fraction=0\.1 and data\.eval_sources are both given; remove one of them$"
    with pytest.raises(ValueError, match=message):
        parse_eval("demo", 0.1)


def test_evaluation_sources_are_checked_and_have_no_weights() -> None:
    assert parse_eval(None, 0.1) == ()
    assert [source.key for source, _ in parse_eval("demo,demo", 0.0)] == ["data.eval_sources"] * 2
    with pytest.raises(ValueError, match=r'^data\.eval_sources="demo:0.5": .*; remove the weights$'):
        parse_eval("demo:0.5", 0.0)
    with pytest.raises(ValueError, match=r'^data\.eval_sources="demo:3,demo": .*; remove the weights$'):
        parse_eval("demo:3,demo", 0.0)
    with pytest.raises(ValueError, match=r'^data\.eval_sources="demi": unknown source'):
        parse_eval("demi", 0.0)


def test_fingerprints_differ_with_texts_and_fractions() -> None:
    other = [LONG[0], LONG[1], one_document(LONG[2].tokens[:-1])]
    prints = {separate(LONG).fingerprint(), separate(other).fingerprint(), ends(0.1).fingerprint()}
    assert len(prints) == 3
    assert ends(0.1, replicas=2, replica=1).fingerprint() == ends(0.1).fingerprint()


# ---- end to end


def test_notes_report_lines_skipped_from_evaluation_sources(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one two three four five"}\nbad\n')
    sources = parse_eval(str(tmp_path / "a.jsonl"), 0.0, options=[ReadOptions(on_error="skip")])
    own = tokenize_all(sources, tokenizer, tmp_path / "cache", vocab_size=512)
    trained = tokenize_all(parse_sources("demo"), tokenizer, tmp_path / "cache", vocab_size=512)
    held = held_out(windows_of(trained, T, 1), windows_of(own, T, 1), 0.0, replicas=1, replica=0)
    assert held is not None
    assert held.notes == own[0].notes
    assert held.notes[0].startswith(f"data.eval_sources: {tmp_path / 'a.jsonl'}: skipped 1 of 2 records")
    shared = held_out(windows_of(own + trained, T, 1), windows_of([], T, 1), 0.5, replicas=1, replica=0)
    assert shared is not None
    assert shared.notes == ()  # they are in BatchReader.notes


def test_options_of_a_run_select_its_held_out_data(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"some words in a line\n" * 200 + b"\xff\n")
    flags = f"--model.name {tiny_model()} --data.sources {tmp_path / 'a.txt'} --log.dir {tmp_path / 'runs' / 'a'}"
    rest = (
        "--data.sequence 16 --data.batch 4 --data.on_error skip --pp.stages 2 --pp.micro 2 --optim.lr 1 --optim.steps 2"
    )

    def opened(rank: int, options: str) -> Data:
        job = prepare(parse([*flags.split(), *rest.split(), *options.split()]), Launch(rank, rank, 4))
        return open_data(job)

    reader, nothing, *_ = opened(0, "")
    assert nothing is None
    [size] = reader.sampler.sizes
    assert "skipped 1 of 201 records" in reader.notes[0]
    for rank in range(4):
        reader, held, _, notes, _ = opened(rank, "--data.eval_fraction 0.25")
        assert "warning" not in "".join(notes)
        assert held is not None
        assert reader.sampler.sizes == (held.ranges[0].start,) == (size - round(size / 4),)
        assert (held.rows.micro, held.rows.wants_inputs, held.rows.wants_labels) == (2, rank % 2 == 0, rank % 2 == 1)
        assert held.replicas == 2
        assert held.replica == rank // 2
    reader, held, _, notes, _ = opened(0, "--data.eval_sources demo")
    assert not notes
    assert held is not None
    assert reader.sampler.sizes == (size,)
    assert len(held) == len(held.rows.rows[0]) > 1000


def test_text_that_is_trained_on_twice_or_evaluated_is_named(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of each source are listed once."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        Path(f"{name}.txt").write_text(f"some words in a line of {name}\n" * 20)
    flags = f"--model.name {tiny_model()} --data.sequence 16 --data.batch 4 --optim.lr 1 --optim.steps 2"
    names, listed = files.Files.names, list[str]()
    twice = "lists a source, or a file of it, more than once"
    for sources, evaluated, expected in (
        ("a.txt,b.txt", "demo", []),
        ("memory://absent/a.txt,c.txt", None, []),  # whose fingerprint would need the network
        ("a.txt,b.txt,a.txt", None, [twice]),
        ("a.txt,b.txt,*.txt", None, [twice]),
        ("demo,demo", None, [twice]),
        ("a.txt", "a.txt", ["warning: data.eval_sources: a.txt has the text of a source in data.sources: held-out"]),
        ("*.txt", "demo,b.txt", ["warning: data.eval_sources: b.txt reads b.txt, which is in data.sources: held-out"]),
    ):
        options = ["--data.sources", sources, *(["--data.eval_sources", evaluated] if evaluated else [])]
        job, training, separate = prepare(parse([*flags.split(), *options]), Launch()), list[Rows](), list[Rows]()
        if evaluated is not None:
            data = open_data(job)
            assert data.held_out is not None
            training, separate = [*data.reader.rows.rows], [*data.held_out.rows.rows]
            assert not data.notes
        with monkeypatch.context() as patched:
            patched.setattr(files.Files, "names", lambda self: (listed.append(self.name), names(self))[1])
            found = [*describe_overlaps(job, training, separate)]
        assert len(found) == len(expected)
        assert all(part in sentence for part, sentence in zip(expected, found, strict=True))
        assert max(Counter(listed).values(), default=0) <= 2  # a.txt may be two sources
        listed.clear()


def test_a_start_opens_each_source_once(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out data are read from the rows that training reads."""
    (tmp_path / "a.txt").write_text("some words in a line\n" * 20)
    flags = f"--model.name {tiny_model()} --data.sources {tmp_path / 'a.txt'} --log.dir {tmp_path / 'runs' / 'a'}"
    rest = "--data.sequence 16 --data.batch 4 --optim.lr 1 --optim.steps 2 --data.eval_fraction 0.25"
    job = prepare(parse([*flags.split(), *rest.split()]), Launch())
    open_data(job)
    opened: list[Path] = []
    monkeypatch.setattr(files, "fingerprint_of", lambda path: (opened.append(path), fingerprint_of(path))[1])
    reader, held, *_ = open_data(job)
    assert opened == [tmp_path / "a.txt"]
    assert held is not None
    assert held.rows is reader.rows
