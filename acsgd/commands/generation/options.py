"""Options of `acsgd generate`. Imports no torch, which takes seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from acsgd.config.options import Offload
from acsgd.config.ranges import Range, out_of_range


@dataclass(frozen=True)
class Decoding:
    """How the next tokens are chosen. They determine the generated text, together with the model and the prompts."""

    max_new_tokens: Annotated[int, Range(1, 2**20)] = 128
    """Maximum length of a generated text, tokens. It ends earlier where prompt and text reach the model's maximum."""
    temperature: Annotated[float, Range(0, 1000)] = 0.0
    """Temperature of sampling. 0 = greedy decoding, or beam search with --num-beams."""
    top_k: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Number of most probable tokens to sample from. 0 = all."""
    top_p: Annotated[float, Range(0, 1, above=True)] = 1.0
    """Sample from the most probable tokens whose probabilities add up to this. 1 = all."""
    num_beams: Annotated[int, Range(1, 1024)] = 1
    """Number of beams of beam search. 1 = none."""
    batch: Annotated[int, Range(1, 2**16)] = 8
    """Number of prompts of a file that are run at a time."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of sampling."""

    def check(self) -> None:
        """Raise ValueError for the first invalid option."""
        for error in out_of_range(self):
            name, _, rest = error.partition("=")
            raise ValueError(f"--{name.replace('_', '-')}={rest}")
        of_sampling = {"--top-k": self.top_k > 0, "--top-p": self.top_p < 1, "--seed": self.seed > 0}
        if not self.temperature and (
            option := next((name for name, is_given in of_sampling.items() if is_given), None)
        ):
            raise ValueError(f"{option} applies to sampling; add, for example, --temperature 1")

    def describe(self) -> str:
        """Return a clause such as "greedy decoding"."""
        beams = f"beam search with {self.num_beams} beams" if self.num_beams > 1 else ""
        if not self.temperature:
            return beams or "greedy decoding"
        limits = [f"top_k={self.top_k}"] * (self.top_k > 0) + [f"top_p={self.top_p:g}"] * (self.top_p < 1)
        return ", ".join([*([beams] if beams else []), f"sampling at temperature {self.temperature:g}", *limits])


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `acsgd generate`."""

    typed: ClassVar[Mapping[str, str]] = {"data.sources": "--file"}
    """Options by the options of a run that they set, where the names differ."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Checkpoint, run directory (its newest valid checkpoint), layer-shard directory, Hugging Face directory or id;
    adapter directory of PEFT that names its base."""
    prompt: str | None = None
    """Prompt to continue. The text is printed on standard output."""
    file: str | None = None
    """Sources of prompts, as data.sources of a run without weights: files with a prompt per record, or directories."""
    out: Path | None = None
    """File that gets each record of --file with its "generated_text". An interrupted start is resumed."""
    field: str | None = None
    """Field of --file with the prompt, a text or messages. Default: as the format of the records says; with --chat, and
    without messages, the first of prompt, text and input that the first record of a source has."""
    format: str | None = None
    """Format of the records of --file, as data.format; they need no answers. Default: as in the run that saved the
    checkpoint, else that of a run, as for the options below."""
    fields: str | None = None
    """Names of fields, as data.fields."""
    input_format: str | None = None
    """Text of a prompt, as data.input_format; --prompt, too, takes the place of __input__ in it."""
    chat: bool = False
    """Apply the tokenizer's chat template to prompts that are texts, as is done without it for a checkpoint of a run on
    chats, unless --format is given. Without --prompt and --file: chat."""
    decoding: tyro.conf.OmitArgPrefixes[Decoding] = dataclasses.field(default_factory=Decoding)
    adapter: Path | None = None
    """Adapter directory of PEFT, trained on the model: adapter_config.json and adapter_model.safetensors."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of parameters and activations. Default: that of the run that saved it, else that of config.json."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device: "auto" = a GPU if the host has one, else the CPU."""
    offload: Offload = "none"
    """Where the parameters of blocks lie between uses, as model.offload: "cpu" = in host memory; "disk" = in the files
    of a checkpoint or a layer-shard directory. "none" = on the device."""
    timeout: Annotated[float, Range(0.1, 10**6)] = 600.0
    """Of several processes: maximum time that one waits for a message of another, or for it to load, seconds."""

    def check_model(self) -> None:
        """Raise ValueError if the model or the adapter does not exist."""
        from acsgd.shards.hub import refuse_unknown

        refuse_unknown(self.model, self.adapter)

    def check(self, world_size: int = 1) -> None:
        """Raise ValueError for the first invalid option. world_size: number of processes."""
        self.decoding.check()
        for error in out_of_range(self):
            raise ValueError(f"--{error}")
        if world_size == 1 and self.timeout != GenerateOptions.timeout:
            raise ValueError("--timeout is the wait for other processes; remove it, or start several with torchrun")
        if world_size > 1 and (self.decoding.num_beams > 1 or self.adapter is not None):
            option = "--adapter" if self.adapter else "--num-beams"
            raise ValueError(f"{option} needs the whole model in one process; start acsgd generate without torchrun")
        if world_size > 1 and self.prompt is None and self.file is None:
            raise ValueError("a chat runs in one process; give --prompt or --file, or start it without torchrun")
        if self.prompt is not None and self.file is not None:
            raise ValueError("--prompt and --file exclude each other; give one of them")
        if (self.file is None) != (self.out is None):
            raise ValueError("--file and --out belong together; give both, or --prompt")
        if self.field is not None and self.file is None:
            raise ValueError("--field names a field of --file; give --file, too")
        if self.decoding.batch != Decoding.batch and self.file is None:
            raise ValueError("--batch is a number of prompts of --file; give --file, too")
