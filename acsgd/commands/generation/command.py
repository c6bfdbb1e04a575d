"""`acsgd generate`: load the model, then continue one prompt, all prompts of a file, or chat."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import transformers
from xxhash import xxh3_64

from acsgd.commands.generation.adapter import PEFTAdapter
from acsgd.commands.generation.chat import Chat
from acsgd.commands.generation.decode import Generator, Ids
from acsgd.commands.generation.model import load
from acsgd.commands.generation.options import Decoding, GenerateOptions
from acsgd.commands.generation.prompts import PromptEncoder, describe_cuts
from acsgd.commands.generation.ranks import SINGLE_PROCESS, Ranks, StageRanks
from acsgd.commands.generation.records import (
    FIELDS,
    Options,
    OutputFile,
    PromptReader,
    PromptRecord,
    check_output_path,
    open_output,
    read_records,
)
from acsgd.commands.recorded import RecordedModel
from acsgd.commands.typed import as_typed
from acsgd.config.options import DataConfig, Offload
from acsgd.config.run_file import parse_flags
from acsgd.errors import RunError, is_out_of_memory
from acsgd.failures.failures import report_failure
from acsgd.failures.report import report_startup_error
from acsgd.failures.signals import StopSignals, reporting_stop, starting
from acsgd.groups import clone_store, connect, open_store
from acsgd.io.data.formats.base import Example
from acsgd.io.data.formats.formats import CHATS, read_options
from acsgd.launch import Launch
from acsgd.notes import print_note, report_if_slow
from acsgd.shards.disk import FORMATS
from acsgd.streams import open_streams
from acsgd.topology import Topology


def main(argv: list[str], launch: Launch, *, prog: str, end: Callable[[int], None]) -> None:
    """Generate as a command line asks, with several ranks in stages.

    prog: name of the command; end: see `report_failure`. Raises ReportedError after a failure.
    """
    options = parse_flags(GenerateOptions, argv, prog=prog, is_main=launch.rank == 0)
    options.check(launch.world_size)
    if launch.world_size == 1:
        with report_startup_error(launch), reporting_stop(), as_typed(GenerateOptions):
            generate(options)
        return
    with report_startup_error(launch), starting(launch, end):
        store = open_store(launch)
        store_of_failures = clone_store(store, launch)
    with contextlib.ExitStack() as stack, report_failure(store_of_failures, launch, end) as context:
        context.signals = stack.enter_context(StopSignals(end))
        context.timeout_s = options.timeout
        topology = Topology.of(launch.rank, launch.world_size, launch.world_size)
        groups = stack.enter_context(connect(topology, timeout=timedelta(seconds=options.timeout), store=store))
        with as_typed(GenerateOptions):
            equal = repr(dataclasses.replace(options, model="", file=None, out=None))  # paths of hosts may differ
            ranks = StageRanks(groups, launch, stack, timeout_s=options.timeout, options=equal)
            generate(options, ranks, on_start=context.start_training)


def generate(
    options: GenerateOptions, ranks: Ranks = SINGLE_PROCESS, *, on_start: Callable[[], None] = lambda: None
) -> None:
    """Run the command. on_start: called when all input is checked.

    Raises ValueError if the user's input is wrong, RunError if memory is short.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    records: Sequence[PromptRecord] = ()
    if options.file is not None and options.out is not None:
        check_output_path(options.out, options.file)
        records = read_records(options.file)
    generator = _open_model(options, ranks)
    reader = _prompt_reader(options, generator, records)
    with _short_memory(options.offload):
        if options.file is not None and options.out is not None:
            _generate_file(generator, options.out, records, reader, on_start)
        elif options.prompt is not None:
            prompt = reader.of_text(options.prompt)
            encoded = generator.prompts.encode(prompt)
            for note in describe_cuts([encoded.cut_by]):
                ranks.note(note)
            on_start()
            [_] = ranks.map(lambda ids: generator.stream(ids, index=0), [encoded.ids])
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            Chat(generator, reader).run()


def _open_model(options: GenerateOptions, ranks: Ranks) -> Generator:
    adapter = PEFTAdapter.open(options.adapter) if options.adapter else None
    return open_generator(
        options.model,
        options.decoding,
        dtype=options.dtype,
        device=options.device,
        offload=options.offload,
        adapter=adapter,
        ranks=ranks,
    )


def _prompt_reader(options: GenerateOptions, generator: Generator, records: Sequence[PromptRecord]) -> PromptReader:
    """Return what makes prompts: as options say, else as the run did that saved the model. Raises ValueError.

    records: those of --file. Texts are messages of a user if the run has learned nothing but chats.
    """
    given = {name: getattr(options, name) for name in ("format", "fields", "input_format")}
    model = RecordedModel.of(str(generator.loaded.tokenizer_directory))
    used = model.data_options(given, (*given, "split_special_tokens", "max_prompt"))
    used, limits = model.for_sources(given, used, 1, "these prompts")
    for note in (model.describe(given, used), limits):
        if note:
            generator.ranks.note(note)
    config = DataConfig(sources="", sequence=1, batch=1, **used)
    [reading] = read_options(config, has_labels=config.format == "label")
    learned = {*model.options.get(FORMATS, ())}
    are_texts = not records or any(name in record.fields for record in records for name in FIELDS)
    is_chat = options.chat
    if is_chat and config.format not in ("auto", *CHATS):
        raise ValueError(
            f"--chat makes a prompt the message of a user, but --format {config.format} a plain one; remove one of them"
        )
    if learned and learned <= {*CHATS} and are_texts and not is_chat and not any(given.values()):
        generator.ranks.note(
            "as in the run: a text is the message of a user, in the chat template; --format text for plain ones"
        )
        is_chat = True
    return PromptReader(reading, generator.loaded.tokenizer, field=options.field, is_chat=is_chat)


def open_generator(
    model: str,
    decoding: Decoding,
    *,
    dtype: str | None,
    device: str,
    offload: Offload = "none",
    adapter: PEFTAdapter | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> Generator:
    """Load a model; print what it is, how it decodes and which special tokens it uses.

    model, dtype, device, offload: see GenerateOptions. Raises ValueError, or RunError if memory is short.
    """
    with _short_memory(offload), report_if_slow(print_note, lambda: f"loading {model}", enabled=ranks.is_main):
        of_parameters = getattr(torch, dtype) if dtype else None
        where = _device(device, ranks.local_rank)
        loaded = load(
            model,
            dtype=of_parameters,
            device=where,
            offload=offload,
            adapter=adapter,
            place=ranks.place,
            gather=ranks.gather,
        )
        ranks.take(loaded)
    prompts = PromptEncoder.of(loaded)
    ranks.note(loaded.describe())
    ranks.note(f"{decoding.describe()}, at most {decoding.max_new_tokens} new tokens")
    ranks.note(prompts.describe())
    return Generator(loaded, prompts, decoding, ranks)


def _device(name: str, local_rank: int) -> torch.device:
    device = torch.device("cpu") if name == "cpu" else open_streams("auto", local_rank).device
    if name == "cuda" and device.type != "cuda":
        raise ValueError("--device cuda: this host has no GPU that torch can use; give --device cpu")
    return device


def _generate_file(
    generator: Generator,
    out: Path,
    records: Sequence[PromptRecord],
    reader: PromptReader,
    on_start: Callable[[], None],
) -> None:
    """Write each record with the text after its prompt to `out`, on the main rank; resume if the file exists."""
    ranks = generator.ranks
    prompts = [reader.of_record(record) for record in records]
    limits, digest, cuts = _check_prompts(generator, records, prompts)
    for note in (*reader.notes(), *cuts):
        ranks.note(note)
    if generator.decoding.batch > 1 and not _pads_exactly(generator):
        ranks.note("padding changes the texts of this model: prompts are run one at a time, as with --batch 1")
        decoding = dataclasses.replace(generator.decoding, batch=1)
        generator = dataclasses.replace(generator, decoding=decoding)
    model = generator.loaded.model
    about: Options = {
        **dataclasses.asdict(generator.decoding),
        "field": reader.read,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "weights": _weights_digest(generator),
        "prompts": digest,
    }
    by_rank = [json.loads(text) for text in ranks.gather("comparing prompts", json.dumps(about))]
    if differing := [name for name in about if any(each[name] != about[name] for each in by_rank)]:
        raise RunError(
            f"the ranks differ in {', '.join(differing)}: give all hosts the same files, packages and kind of device"
        )
    with _open_on_main(ranks, out, records, about) as output:
        finished = int(ranks.gather("resuming", str(output.finished if output else 0))[0])
        on_start()
        if finished:
            ranks.note(f"{out} holds {finished} of {len(records)} records; resuming after them")
        rest = [batch for batch in batches(limits, generator.decoding.batch) if batch.stop > finished]
        texts = ranks.map(lambda batch: _generate_batch(generator, prompts, batch), rest)
        if output is None:
            for _ in texts:
                pass
        else:
            _write(texts, rest, records, output)


@contextlib.contextmanager
def _open_on_main(
    ranks: Ranks, out: Path, records: Sequence[PromptRecord], about: Options
) -> Iterator[OutputFile | None]:
    """Open the output file on the main rank; yield None on others. Arguments and errors: see `open_output`."""
    if not ranks.is_main:
        yield None
        return
    with open_output(out, records, about) as output:
        yield output


def _write(
    texts: Iterable[list[str]], rest: Iterable[range], records: Sequence[PromptRecord], output: OutputFile
) -> None:
    """Append the records of some batches with their texts, but those that the output has already."""

    def outcome() -> str:
        return f"{output.path} holds {output.finished} of {len(records)} records; the same command resumes"

    progress = report_if_slow(print_note, lambda: f"generated {output.finished} of {len(records)} records")
    with reporting_stop(outcome), progress:
        for batch, generated in zip(rest, texts, strict=True):
            for index, text in zip(batch, generated, strict=True):
                if index >= output.finished:
                    output.append(records[index], text)
    print_note(f"{output.path}: {len(records)} records")


def _pads_exactly(generator: Generator) -> bool:
    """Return whether padding changes nothing, as the last rank finds, which has the logits."""
    [found] = generator.ranks.map(lambda _: generator.pads_exactly(), [None])
    return generator.ranks.gather("trying padding", str(found))[-1] == str(True)


def _check_prompts(
    generator: Generator, records: Sequence[PromptRecord], prompts: Sequence[Example]
) -> tuple[list[int], str, list[str]]:
    """Return the maximum number of new tokens of each record, a checksum of all prompts, and notes on truncated ones.

    Raises ValueError with the place of the first prompt that the model cannot take.
    """
    limits, digest, is_main, cut_by = list[int](), xxh3_64(), generator.ranks.is_main, list[str]()
    with report_if_slow(print_note, lambda: f"checked {len(limits)} of {len(records)} prompts", enabled=is_main):
        for record, prompt in zip(records, prompts, strict=True):
            try:
                encoded = generator.prompts.encode(prompt)
            except ValueError as error:
                raise ValueError(f"{record.where}: {error}") from None
            limits.append(generator.limit(encoded.ids))
            digest.update(repr(encoded.ids).encode())
            cut_by.append(encoded.cut_by)
    return limits, digest.hexdigest(), describe_cuts(cut_by)


def batches(limits: Sequence[int], size: int) -> Iterator[range]:
    """Divide records into batches of at most `size` successive ones with the same maximum number of new tokens.

    They do not depend on how many are finished: a batch that was interrupted is run again as a whole, and all its
    texts are those of an undisturbed start, also where they are sampled.
    """
    start = 0
    for stop in range(1, len(limits) + 1):
        if stop == len(limits) or stop - start == size or limits[stop] != limits[start]:
            yield range(start, stop)
            start = stop


def _generate_batch(generator: Generator, prompts: Sequence[Example], batch: range) -> list[str]:
    """Return the texts of a batch."""
    ids: list[Ids] = [generator.prompts.encode(prompts[index]).ids for index in batch]
    return generator.generate(ids, index=batch.start)


def _weights_digest(generator: Generator) -> str:
    """Return a checksum of all parameters, equal for any number of ranks."""
    digests = {}
    for name, param in generator.loaded.own_parameters():
        values = param.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        digests[name] = xxh3_64(values).hexdigest()
    for text in generator.ranks.gather("comparing weights", json.dumps(digests)):
        digests |= json.loads(text)
    return xxh3_64(repr(sorted(digests.items())).encode()).hexdigest()


@contextlib.contextmanager
def _short_memory(offload: Offload) -> Iterator[None]:
    """Report that memory is short as a RunError with options of this command. offload: the given one."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            instead = ", or --offload cpu (on a GPU) or disk" if offload == "none" else ""
            raise RunError(
                f"out of memory; give a smaller --batch or --max-new-tokens, or --dtype bfloat16{instead}"
            ) from None
        raise
