"""Laws of segments of streamed sources, of their cache on disk, and of the rows that training reads from them."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from lib.cache import locked
from lib.labelled import with_special_tokens
from tokenizers import processors
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, OptimConfig
from acsgd.errors import RunError, WaitInterruptedError
from acsgd.io.data.batches import BatchReader
from acsgd.io.data.formats.formats import read_options
from acsgd.io.data.row_spec import RowSpec
from acsgd.io.data.rows.base import LABELS, RowReader, Rows
from acsgd.io.data.rows.layout import best_fit
from acsgd.io.data.rows.streamed import StreamedRows, fill
from acsgd.io.data.sampler import Sampler
from acsgd.io.data.sources.sources import parse_sources
from acsgd.io.data.stream import segment_cache
from acsgd.io.data.stream.state import StreamState
from acsgd.io.data.tokens import pipeline
from acsgd.io.files.fields import from_json
from acsgd.run.setup.rows import RowMaker
from acsgd.tasks import find_task

WINDOW = 16
DOCUMENTS = 150
KINDS = ["concat", "pack", "single", "overlap", "prefix", "prompts", "classification", "seq2seq"]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that all differ, some of them longer than a row."""
    draw, path = np.random.default_rng(0), tmp_path_factory.mktemp("records") / "a.jsonl"
    with path.open("w") as file:
        for number in range(DOCUMENTS):
            words = " ".join(map(str, draw.integers(0, 10**6, draw.integers(1, 20))))
            fields = {"text": f"{number}: {words}", "label": number % 2}
            fields |= {"input": f"{number}?", "output": words}
            file.write(json.dumps(fields) + "\n")
    return path


@pytest.fixture(autouse=True)
def _short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "BATCH_CHARS", 300)


class Maker(NamedTuple):
    """Makes the rows of a kind."""

    config: Config
    model: PreTrainedConfig
    tokenizer: PreTrainedTokenizerFast

    def open(self, directory: str = "run", sources: str = "", **data: Any) -> Rows:
        """Return the rows of data.sources in a run directory beside others. data: options that differ."""
        log = Path(self.config.log.dir).with_name(directory)
        options = dataclasses.replace(self.config.data, sources=sources or self.config.data.sources, **data)
        config = dataclasses.replace(self.config, data=options, log=LogConfig(dir=str(log)))
        reading = read_options(options, has_labels=find_task(config.model.task).has_labels)
        found = parse_sources(options.sources, options=reading)
        spec = RowSpec.of(config, find_task(config.model.task), self.model, self.tokenizer, found)
        maker = RowMaker(spec, self.model, self.tokenizer, "none", log.parent / "cache", stream_dir=log / "streams")
        [rows] = maker.open(found)
        return rows

    def streamed(self, directory: str = "run", sources: str = "", **data: Any) -> StreamedRows:
        """Return the rows of a streamed source."""
        rows = self.open(directory, sources, **data)
        assert isinstance(rows, StreamedRows)
        return rows

    def mapped(self, **data: Any) -> Rows:
        """Return the rows of the same source, tokenized at once."""
        return self.open(sources=self.config.data.sources.removeprefix("stream:"), **data)


def with_shared_token(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose documents share the token between them, as those of OPT."""
    eos = tokenizer.eos_token
    copy = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token=eos, eos_token=eos)
    begin = processors.TemplateProcessing(single=f"{eos} $A", special_tokens=[(eos, tokenizer.eos_token_id)])
    copy.backend_tokenizer.post_processor = begin
    return copy


@pytest.fixture
def maker(records: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, request: pytest.FixtureRequest) -> Maker:
    """Maker of one of KINDS."""
    kind = getattr(request, "param", "concat")
    task = kind if kind in ("classification", "seq2seq") else "lm"
    options: dict[str, Any] = {"rows": kind} if kind in ("pack", "single") else {}
    options |= {"rows": "single"} if kind == "overlap" else {}
    options |= {"rows": "pack", "objective": "prefix"} if kind == "prefix" else {}
    options |= {"format": "io" if kind in ("prompts", "seq2seq") else "text"} if task != "classification" else {}
    config = Config(
        ModelConfig("none", task=task),
        DataConfig(sources=f"stream:{records}", sequence=24, batch=4, window=WINDOW, seed=5, **options),
        OptimConfig(lr=1e-3, steps=100),
        log=LogConfig(dir=str(tmp_path / "run")),
    )
    model = {"classification": "bert", "seq2seq": "bart"}.get(kind, "gpt2")
    if task != "lm":
        tokenizer = with_special_tokens(tokenizer)
    if kind == "overlap":
        tokenizer = with_shared_token(tokenizer)
    return Maker(config, AutoConfig.for_model(model, vocab_size=len(tokenizer), num_labels=2), tokenizer)


def row_bytes(row: Any) -> tuple[bytes, ...]:
    return tuple(np.asarray(row[name]).tobytes() for name in sorted(row))


def read(rows: Rows, numbers: range) -> list[tuple[bytes, ...]]:
    """Return rows by their numbers in the run."""
    return [row_bytes(rows.read(number)) for number in numbers]


def length_of(rows: StreamedRows) -> int:
    """Read until the end of the source is known; return the number of rows."""
    number = 0
    while (total := rows.cache.total) is None:
        rows.read(number)
        number += WINDOW
    return total


@pytest.mark.parametrize("maker", KINDS, indirect=True)
def test_an_epoch_has_each_row_of_the_tokenized_source_once(maker: Maker) -> None:
    with closing(maker.streamed()) as rows:
        total = length_of(rows)
        epochs = [read(rows, range(epoch * total, (epoch + 1) * total)) for epoch in range(2)]
    mapped = maker.mapped()
    assert epochs[0] != epochs[1]
    if find_task(maker.config.model.task).layout(maker.config.data) == "pack":  # each segment is packed alone
        assert len(mapped) <= total <= len(mapped) + 2 * -(-total // WINDOW)
    else:
        assert Counter(epochs[0]) == Counter(read(mapped, range(len(mapped))))
    if maker.config.data.objective == "causal":
        assert Counter(epochs[0]) == Counter(epochs[1])


@pytest.mark.parametrize("maker", ["pack"], indirect=True)
def test_packed_segments_have_each_token_once(maker: Maker) -> None:
    def labels(rows: Rows, count: int) -> Counter[int]:
        read = (rows.read(index) for index in range(count))
        return Counter(int(label) for row in read for label in row[LABELS][row[LABELS] >= 0])

    mapped = maker.mapped()
    with closing(maker.streamed()) as rows:
        assert labels(rows, length_of(rows)) == labels(mapped, len(mapped))


@pytest.mark.parametrize("maker", ["concat", "pack"], indirect=True)
def test_rows_are_shuffled_within_windows(maker: Maker) -> None:
    """Each window has the rows of one segment, the same with any seed, in an order of its own."""
    with closing(maker.streamed()) as one, closing(maker.streamed("other", seed=6)) as other:
        first, second = (read(rows, range(2 * WINDOW)) for rows in (one, other))
    for window in (slice(0, WINDOW), slice(WINDOW, 2 * WINDOW)):
        assert sorted(first[window]) == sorted(second[window])
        assert first[window] != second[window]
    if find_task(maker.config.model.task).layout(maker.config.data) == "concat":
        assert sorted(first) == sorted(read(maker.mapped(), range(2 * WINDOW)))


@pytest.mark.parametrize("chars", [1, 10**6])
@pytest.mark.parametrize("maker", KINDS, indirect=True)
def test_a_run_that_resumes_without_segments_reads_the_same_rows(
    maker: Maker, chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many records are tokenized at a time, in any epoch."""
    states = {}
    with closing(maker.streamed()) as rows:
        total = length_of(rows)
        for number in (WINDOW, 3 * WINDOW + 7, total - 1, total + WINDOW):
            numbers = range(number, number + WINDOW)
            states[numbers] = read(rows, numbers), json.dumps(dataclasses.asdict(rows.state(number)))
    monkeypatch.setattr(pipeline, "BATCH_CHARS", chars)
    for numbers, (expected, state) in states.items():
        with closing(maker.streamed(f"resumed-{numbers.start}")) as resumed:
            resumed.restore(from_json(StreamState, json.loads(state)))
            assert read(resumed, numbers) == expected, numbers


def test_a_resumed_run_does_not_read_records_before_its_segment(maker: Maker, records: Path, tmp_path: Path) -> None:
    numbers = range(6 * WINDOW, 7 * WINDOW)
    with closing(maker.streamed()) as rows:
        expected, state = read(rows, numbers), rows.state(numbers.start)
    _, _, byte = state.position.cursor
    damaged, raw = tmp_path / records.name, records.read_bytes()
    assert byte > len(raw) / 8
    assert state.position.tokens == state.segment * WINDOW * maker.config.data.sequence
    damaged.write_bytes(b"\xff" * byte + raw[byte:])
    with closing(maker.streamed("resumed", f"stream:{damaged}")) as resumed:
        resumed.restore(state)
        assert read(resumed, numbers) == expected
    with (
        closing(maker.streamed("start", f"stream:{damaged}")) as rows,
        pytest.raises(RunError, match=r"a\.jsonl, line 1 is not UTF-8"),
    ):
        rows.read(0)


def test_a_resumed_run_reads_the_format_that_the_first_record_has(maker: Maker, records: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "no prompt"}\n' + records.read_text())
    numbers, detected = range(6 * WINDOW, 7 * WINDOW), {"sources": f"stream:{tmp_path / 'a.jsonl'}", "format": "auto"}
    with closing(maker.streamed(**detected)) as rows:
        expected, state = read(rows, numbers), rows.state(numbers.start)
    with closing(maker.streamed("resumed", **detected)) as resumed:
        resumed.restore(state)
        assert read(resumed, numbers) == expected


@pytest.mark.parametrize("maker", ["prompts"], indirect=True)
@pytest.mark.parametrize("layout", [{}, {"rows": "pack"}, {"rows": "single", "long": "truncate"}])
def test_ends_format_and_rows_without_targets_are_known_and_counted(
    layout: dict[str, Any], maker: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.jsonl"
    lengths = np.random.default_rng(0).integers(1, 40, 120).tolist()
    path.write_text("".join(json.dumps({"input": "1 " * n, "output": f"{n}"}) + "\n" for n in lengths))
    with closing(maker.streamed(sources=f"stream:{path}", format="auto", **layout)) as rows:
        rows.look_ahead(0)
        assert (rows.format, rows.ends.ids, rows.ends.num_open) == ("io", (maker.tokenizer.eos_token_id,), 0)
        with closing(maker.streamed("later", sources=f"stream:{path}", format="auto", **layout)) as later:
            before, after = (BatchReader(RowReader([each], 1), Any, range(1)) for each in (rows, later))  # type: ignore[arg-type]
            after.keep_known(before)
            assert (later.format, later.ends) == (rows.format, rows.ends), "without a read"
        total = length_of(rows)
        empty = sum(not (rows.read(number)[LABELS] >= 0).any() for number in range(total))
        counted = f"rows: stream:{path}: {empty} of {total} rows have no target tokens, and no loss"
        assert rows.notes[1:] == (f'data.sources: stream:{path}: format "io"', counted)
        rows.read(total)  # the first row of the second epoch
        assert rows.notes[2] == counted
    assert "rows have no target tokens" in capsys.readouterr().err
    path.write_text('{"input": "' + "1 " * 9999 + '", "output": "1"}\n')
    with (
        closing(maker.streamed("empty", f"stream:{path}", **layout)) as rows,
        pytest.raises(RunError, match=r"no target tokens in the .* rows of its first window: there is no loss"),
    ):
        rows.look_ahead(0)


def test_segments_on_disk_are_few_and_those_removed_are_made_again(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_cache, "AHEAD", 2)
    monkeypatch.setattr(segment_cache, "BEHIND", 3)
    with closing(maker.streamed()) as rows:
        first = read(rows, range(WINDOW))
        for number in range(0, 40 * WINDOW, WINDOW // 4):
            rows.read(number)
            assert len(rows.cache._indices()) <= 2 + 3 + 1 + 1  # one may be new, and none removed yet
        assert rows.cache.total is not None
        assert rows.cache.total < 30 * WINDOW
        assert read(rows, range(WINDOW)) == first


def test_the_end_of_the_source_is_found_by_its_last_segment(maker: Maker) -> None:
    with closing(maker.streamed()) as rows:
        total = length_of(rows)
        expected, state = read(rows, range(total, total + 1)), rows.state(total - 1)
    assert total % WINDOW
    [end] = (Path(maker.config.log.dir) / "streams").glob("*/end.json")
    end.unlink()
    with closing(maker.streamed()) as again:
        again.restore(dataclasses.replace(state, rows=None))
        assert read(again, range(total, total + 1)) == expected


def test_one_process_of_a_host_writes_and_another_takes_over(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_cache, "AHEAD", 0)
    with closing(maker.streamed()) as second, closing(maker.streamed()) as third:
        with closing(maker.streamed()) as first:
            expected = read(first, range(WINDOW))
            assert read(second, range(WINDOW)) == expected
            assert (first.cache.writes, second.cache.writes) == (True, False)
        taken_over = read(second, range(WINDOW, 2 * WINDOW))
        assert second.cache.writes
        second.close()
        assert read(third, range(2 * WINDOW)) == expected + taken_over
        assert not third.cache.writes
        later = read(third, range(2 * WINDOW, 3 * WINDOW))
        assert third.cache.writes
    with closing(maker.streamed("alone")) as alone:
        assert read(alone, range(WINDOW, 3 * WINDOW)) == taken_over + later


def test_a_process_writes_beside_one_that_stands_still(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_cache, "STALL_S", 0.1)
    with closing(maker.streamed("alone")) as alone, closing(maker.streamed()) as rows:
        with locked(rows.cache._directory):  # of a process that is stopped
            assert read(rows, range(3 * WINDOW)) == read(alone, range(3 * WINDOW))
        assert rows.cache.writes


def test_closing_ends_a_wait_for_a_segment(maker: Maker) -> None:
    with closing(maker.streamed()) as rows, locked(rows.cache._directory), ThreadPoolExecutor() as pool:
        reading = pool.submit(rows.read, 0)
        assert not wait([reading], 0.1).done
        rows.close(wait=False)
        with pytest.raises(WaitInterruptedError):
            reading.result(60)


def test_a_damaged_segment_is_made_again(maker: Maker) -> None:
    with closing(maker.streamed()) as rows:
        expected = read(rows, range(WINDOW))
    [path] = (Path(maker.config.log.dir) / "streams").glob("*/segment-00000000/about.json")
    path.write_bytes(b"x" * path.stat().st_size)
    with closing(maker.streamed()) as rows:
        assert read(rows, range(WINDOW)) == expected


def test_a_record_that_cannot_be_read_ends_the_run_with_one_sentence(
    maker: Maker, records: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    bad.write_bytes(b"".join([*lines[:100], b"[1]\n", *lines[100:]]))
    with (
        closing(maker.streamed(sources=f"stream:{bad}")) as rows,
        pytest.raises(
            RunError, match=r"data\.sources: .*bad.jsonl, line 101 is not a JSON object.*data\.on_error skip"
        ),
    ):
        read(rows, range(20 * WINDOW))


def test_skipped_records_are_counted(
    maker: Maker, records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = records.read_text().splitlines()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join([*lines[:30], "[1]", *lines[30:], "[2]"]))
    with closing(maker.streamed("bad", f"stream:{bad}", on_error="skip")) as rows, closing(maker.streamed()) as good:
        assert read(rows, range(length_of(rows))) == read(good, range(length_of(good)))
        assert rows.state(0).position.skipped == 0
        assert rows.state(length_of(rows) - 1).position.skipped == 1
    assert "bad.jsonl: skipped 1 of " in (printed := capsys.readouterr().err)
    assert f"records; the first, {bad}, line 31, is not a JSON object: [1]\n" in printed


def test_a_source_without_a_row_is_named(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text('{"text": "a"}\n')
    with (
        closing(maker.streamed(sources=f"stream:{tmp_path / 'short.jsonl'}")) as rows,
        pytest.raises(RunError, match=r"short\.jsonl has no sequence"),
    ):
        rows.read(0)


def test_replicas_read_parts_of_one_batch_and_the_same_segments(maker: Maker) -> None:
    sampler = Sampler(seed=5, batch=4, counts=(1,), sizes=(None,))
    micros = [range(4), range(2), range(2, 4)]
    readers = [BatchReader(RowReader([maker.streamed()], 1), sampler, each) for each in micros]
    for step in range(20):
        whole, *parts = (reader.batch(step) for reader in readers)
        assert {part.checksum for part in parts} == {whole.checksum} != {0}
        joined = [np.concatenate([getattr(part, name).numpy() for part in parts]) for name in ("sample_ids", "labels")]
        assert (joined[0] == whole.sample_ids.numpy()).all()
        assert (joined[1] == whole.labels.numpy()).all()
    assert [reader.stream_states(7) for reader in readers[1:]] == [readers[0].stream_states(7)] * 2
    for reader in readers:
        reader.close()


def test_a_changed_token_changes_the_checksum_of_its_segment_and_the_version(
    maker: Maker, records: Path, tmp_path: Path
) -> None:
    changed = tmp_path / "a.jsonl"
    changed.write_text(records.read_text().replace('"0: ', '"1: ', 1))
    with closing(maker.streamed()) as rows, closing(maker.streamed("changed", f"stream:{changed}")) as other:
        checksums = [[each.checksum(number) for number in range(0, 5 * WINDOW, WINDOW)] for each in (rows, other)]
        assert checksums[0][0] != checksums[1][0]
        assert checksums[0][1:] == checksums[1][1:]
        assert rows.fingerprint() != other.fingerprint()


# ---- sampler


MIXED = Sampler(seed=3, batch=12, counts=(3, 7, 2), sizes=(11, None, None))


def test_ids_of_streamed_sources_are_their_own_and_their_rows_consecutive() -> None:
    samples = [MIXED.samples(step) for step in range(50)]
    for source in (1, 2):
        indices = np.concatenate([each.indices[each.sources == source] for each in samples])
        assert indices.tolist() == list(range(len(indices)))
    streamed = np.concatenate([each.ids[each.sources > 0] for each in samples])
    assert len({*streamed.tolist()}) == len(streamed)
    assert streamed.min() >= 11
    known = Sampler(seed=3, batch=12, counts=(3, 9), sizes=(11, 100))
    of_first = [each.ids[each.sources == 0].tolist() for each in samples]
    assert sum(map(len, of_first)) == sum((known.samples(step).sources == 0).sum() for step in range(50))


@pytest.mark.parametrize("sampler", [MIXED, Sampler(seed=1, batch=5, counts=(1,), sizes=(None,))])
def test_the_number_of_samples_before_a_step_is_known_without_them(sampler: Sampler) -> None:
    counts = np.zeros(len(sampler.sizes), int)
    for step in range(40):
        assert sampler.drawn_before(step) == tuple(counts)
        counts += np.bincount(sampler.samples(step).sources, minlength=len(counts))


# ---- packing


def test_the_first_parts_fill_exactly_as_many_rows_as_a_segment_has() -> None:
    draw = np.random.default_rng(1)
    for _ in range(300):
        capacity, rows = int(draw.integers(1, 40)), int(draw.integers(1, 12))
        sizes = draw.integers(1, capacity + 1, draw.integers(1, 200))
        placed = fill(sizes, capacity, rows)
        used = np.bincount(placed, weights=sizes[: len(placed)])
        assert used.max() <= capacity
        assert (used > 0).all()
        if sizes.sum() >= rows * capacity:
            assert len(used) == rows
        elif len(placed) == len(sizes):
            assert len(used) <= rows
        if (whole := best_fit(sizes, capacity)).max() < rows:
            assert (placed == whole).all()
