"""`acsgd generate`: load the model, then continue one prompt, all prompts of a file, or chat."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from torch import nn
from xxhash import xxh3_64

from acsgd.commands.generation.adapter import PEFTAdapter
from acsgd.commands.generation.chat import Chat
from acsgd.commands.generation.decode import Generator, Ids
from acsgd.commands.generation.model import load
from acsgd.commands.generation.options import Decoding, GenerateOptions
from acsgd.commands.generation.prompts import Prompt, PromptEncoder
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
from acsgd.config.options import DataConfig
from acsgd.errors import RunError, is_out_of_memory
from acsgd.failures.signals import reporting_stop
from acsgd.io.data.formats.formats import CHATS, read_options
from acsgd.notes import print_note, report_if_slow
from acsgd.shards.disk import FORMATS
from acsgd.streams import open_streams


def generate(options: GenerateOptions) -> None:
    """Run the command. Raises ValueError if the user's input is wrong, RunError if memory is short."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    records: Sequence[PromptRecord] = ()
    if options.file is not None and options.out is not None:
        check_output_path(options.out, options.file)
        records = read_records(options.file)
    generator = _open_model(options)
    reader = _prompt_reader(options, generator, records)
    with _short_memory():
        if options.file is not None and options.out is not None:
            _generate_file(generator, options.out, records, reader)
        elif options.prompt is not None:
            generator.stream(generator.prompts.encode(reader.of_text(options.prompt)), index=0)
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            Chat(generator, reader.of_text).run()


def _open_model(options: GenerateOptions) -> Generator:
    adapter = PEFTAdapter.open(options.adapter) if options.adapter else None
    return open_generator(options.model, options.decoding, dtype=options.dtype, device=options.device, adapter=adapter)


def _prompt_reader(options: GenerateOptions, generator: Generator, records: Sequence[PromptRecord]) -> PromptReader:
    """Return what makes prompts: as options say, else as the run did that saved the model. Raises ValueError.

    records: those of --file. Texts are messages of a user if the run has learned nothing but chats.
    """
    given = {name: getattr(options, name) for name in ("format", "fields", "input_format")}
    model = RecordedModel.of(str(generator.loaded.tokenizer_directory))
    used = model.data_options(given, given)
    if note := model.describe(given, used):
        print_note(note)
    config = DataConfig(sources="", sequence=1, batch=1, **used)
    reading, *others = read_options(config, has_labels=config.format == "label")
    if others:
        raise ValueError(
            f"the run has several formats, data.format={config.format}, data.fields={config.fields}; give --format and "
            "--fields of these prompts"
        )
    learned = {*model.options.get(FORMATS, ())}
    are_texts = not records or any(name in records[0].fields for name in FIELDS)
    is_chat = options.chat
    if learned and learned <= {*CHATS} and are_texts and not is_chat and not any(given.values()):
        print_note("as in the run: a text is the message of a user, in the chat template; --format text for plain ones")
        is_chat = True
    return PromptReader(reading, generator.loaded.tokenizer, field=options.field, is_chat=is_chat)


def open_generator(
    model: str, decoding: Decoding, *, dtype: str | None, device: str, adapter: PEFTAdapter | None = None
) -> Generator:
    """Load a model; print what it is, how it decodes and which special tokens it uses.

    model, dtype, device: see GenerateOptions. Raises ValueError, or RunError if memory is short.
    """
    with _short_memory(), report_if_slow(print_note, lambda: f"loading {model}"):
        of_parameters = getattr(torch, dtype) if dtype else None
        loaded = load(model, dtype=of_parameters, device=_device(device), adapter=adapter)
    prompts = PromptEncoder.of(loaded)
    print_note(loaded.describe())
    print_note(f"{decoding.describe()}, at most {decoding.max_new_tokens} new tokens")
    print_note(prompts.describe())
    return Generator(loaded, prompts, decoding)


def _device(name: str) -> torch.device:
    device = torch.device("cpu") if name == "cpu" else open_streams("auto", 0).device
    if name == "cuda" and device.type != "cuda":
        raise ValueError("--device cuda: this host has no GPU that torch can use; give --device cpu")
    return device


def _generate_file(generator: Generator, out: Path, records: Sequence[PromptRecord], reader: PromptReader) -> None:
    """Write each record with the text after its prompt to `out`; resume if the file exists."""
    prompts = [reader.of_record(record) for record in records]
    limits, digest = _check_prompts(generator, records, prompts)
    if generator.decoding.batch > 1 and not generator.pads_exactly():
        print_note("padding changes the results of this model: prompts are run one at a time, as with --batch 1")
        decoding = dataclasses.replace(generator.decoding, batch=1)
        generator = dataclasses.replace(generator, decoding=decoding)
    model = generator.loaded.model
    about: Options = {
        **dataclasses.asdict(generator.decoding),
        "field": reader.field,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "weights": _weights_digest(model),
        "prompts": digest,
    }
    with open_output(out, records, about) as output:
        if output.finished:
            print_note(f"{out} holds {output.finished} of {len(records)} records; resuming after them")
        progress = report_if_slow(print_note, lambda: f"generated {output.finished} of {len(records)} records")

        def outcome() -> str:
            return f"{out} holds {output.finished} of {len(records)} records; the same command resumes"

        with reporting_stop(outcome), progress:
            for batch in batches(limits, generator.decoding.batch):
                if batch.stop > output.finished:
                    _generate_batch(generator, records, prompts, batch, output)
        print_note(f"{out}: {len(records)} records")


def _check_prompts(
    generator: Generator, records: Sequence[PromptRecord], prompts: Sequence[Prompt]
) -> tuple[list[int], str]:
    """Return the maximum number of new tokens of each record, and a checksum of all prompts.

    Raises ValueError with the place of the first prompt that the model cannot take.
    """
    limits, digest = list[int](), xxh3_64()
    with report_if_slow(print_note, lambda: f"checked {len(limits)} of {len(records)} prompts"):
        for record, prompt in zip(records, prompts, strict=True):
            try:
                ids = generator.prompts.encode(prompt)
            except ValueError as error:
                raise ValueError(f"{record.where}: {error}") from None
            limits.append(generator.limit(ids))
            digest.update(repr(ids).encode())
    return limits, digest.hexdigest()


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


def _generate_batch(
    generator: Generator,
    records: Sequence[PromptRecord],
    prompts: Sequence[Prompt],
    batch: range,
    output: OutputFile,
) -> None:
    """Generate the texts of a batch and append those that the output lacks."""
    ids: list[Ids] = [generator.prompts.encode(prompts[index]) for index in batch]
    for index, text in zip(batch, generator.generate(ids, index=batch.start), strict=True):
        if index >= output.finished:
            output.append(records[index], text)


def _weights_digest(model: nn.Module) -> str:
    """Return a checksum of all parameters."""
    digest = xxh3_64()
    for param in model.parameters():
        digest.update(param.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def _short_memory() -> Iterator[None]:
    """Report that memory is short as a RunError with the options of this command."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise RunError("out of memory; give a smaller --batch or --max-new-tokens, or --dtype bfloat16") from None
        raise
