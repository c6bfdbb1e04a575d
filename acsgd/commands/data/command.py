"""The commands `acsgd data show`, `check` and `dedup`. Imports no torch, which takes seconds."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from acsgd.commands.typed import as_typed, typed
from acsgd.config.options import DataConfig, ModelConfig
from acsgd.config.ranges import COUNT, Range, out_of_range


@dataclass(frozen=True)
class DataOptions:
    """The data, and how it is read."""

    typed: ClassVar[Mapping[str, str]] = {"data.sources": "source", "model.name": "--model"}
    """Options by the options of a run that they set, where the names differ."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Sources, as data.sources of a run."""
    model: str
    """Model whose tokenizer is used, as model.name of a run."""
    tokenizer: str | None = None
    """Tokenizer that is used in place of the model's, as model.tokenizer of a run."""
    task: str = "lm"
    """What the model is trained for, as model.task of a run: "show" needs --sequence for others than lm, "check"
    compares labels with the classes of the model."""
    format: str = "auto"
    """Format of the records, as data.format of a run."""
    fields: str | None = None
    """Names of fields, as data.fields of a run."""
    targets: Literal["answers", "all"] = "answers"
    """Which tokens are learned, as data.targets of a run."""
    input_format: str = "__input__"
    """Text of a prompt, as data.input_format of a run."""
    output_format: str = "__output__"
    """Text of an answer, as data.output_format of a run."""
    chat_template: str | None = None
    """File with a chat template, as data.chat_template of a run."""
    chat_template_kwargs: str | None = None
    """Variables of the chat template, as data.chat_template_kwargs of a run."""
    split_special_tokens: bool = True
    """Whether special tokens in messages of chats are ordinary text, as data.split_special_tokens of a run."""

    def config(self) -> DataConfig:
        """Return the options as those of a run. Raises ValueError for the first number that is out of range."""
        for error in out_of_range(self):
            raise ValueError(f"--{error}")
        names = {field.name for field in dataclasses.fields(DataConfig)} & {
            field.name for field in dataclasses.fields(self)
        }
        values: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        return DataConfig(**{"sources": self.source, "sequence": 1, "batch": 1, **values})

    def check(self) -> None:
        """Raise ValueError for the first number out of range, and unless sources and model exist: before imports."""
        from acsgd.io.data.sources.sources import parse_sources
        from acsgd.shards.hub import find_model

        self.config()
        parse_sources(self.source, key="source")
        find_model(self.model, option="--model", weights=False)

    def model_config(self) -> ModelConfig:
        """Return the model and its tokenizer as options of a run."""
        return ModelConfig(self.model, tokenizer=self.tokenizer, task=self.task)


@dataclass(frozen=True)
class Show(DataOptions):
    """Show records or rows as the model sees them: decoded from their tokens, with masked tokens dimmed.

    With --sequence, the rows of a run: all texts are tokenized, which may take long. Without, the first records.
    """

    n: Annotated[int, COUNT, tyro.conf.arg(aliases=["-n"])] = 3
    """Number of records or rows of each source."""
    sequence: Annotated[int, Range(1, 2**24)] | None = None
    """Sequence length, as data.sequence of a run. Default: records are shown, not rows."""
    rows: Literal["concat", "pack", "single"] | None = None
    """How documents are put into rows, as data.rows of a run. Needs --sequence."""
    long: Literal["split", "truncate", "skip", "error"] | None = None
    """What is done with a document that is longer than a row, as data.long of a run. Needs --sequence."""
    objective: Literal["causal", "prefix", "ul2r"] = "causal"
    """What is learned of documents, as data.objective of a run. Others than causal need --sequence."""
    sentinels: str = "<extra_id_{}>"
    """Tokens of ul2r, as data.sentinels of a run."""
    modes: str = "[NLU],[S2S],[NLG]"
    """Names of the denoisers of ul2r, as data.modes of a run."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the objective, as data.seed of a run."""
    on_error: Literal["stop", "skip"] = "stop"
    """What an unreadable record does to rows, as data.on_error of a run. Records are shown with what is wrong."""

    def run(self) -> None:
        """Print the records or rows."""
        self.check()
        if self.sequence is not None:
            from acsgd.commands.data.show import show_rows  # takes seconds

            show_rows(self.config(), self.model_config(), self.n, lambda text: typed(text, Show))
            return
        if (self.task, self.objective, self.rows or self.long) != (Show.task, Show.objective, None):
            raise ValueError("--task, --rows, --long and --objective are options of rows; give --sequence, too")
        from acsgd.commands.data.show import show_records  # takes seconds

        show_records(self.config(), self.model_config(), self.n, lambda text: typed(text, Show))


@dataclass(frozen=True)
class Check(DataOptions):
    """Check all records: tokens, lengths, labels, and the records that are malformed, empty, repeated or too long.

    Exits with 1 if records are malformed or empty, or have labels that the model cannot learn, or if nothing is learned
    of any record, or there is none.
    """

    sequence: Annotated[int, Range(1, 2**24)] | None = None
    """Length above which a record is too long, tokens; for seq2seq of prompt and answer each. Default: none."""

    def run(self) -> None:
        """Print the report."""
        self.check()
        from acsgd.commands.data.check import check  # takes seconds

        if not check(self.config(), self.model_config(), self.sequence, lambda text: typed(text, Check)):
            sys.exit(1)


@dataclass(frozen=True)
class Dedup:
    """Write all records but the duplicates of earlier ones, in their order, to a new file of JSON lines."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Sources, as data.sources of a run."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """File to write, *.jsonl; must not exist. Lines of JSON files are written as they are."""
    near: Annotated[float, Range(0, 1, above=True)] | None = None
    """Similarity from which records are near-duplicates: of all sets of 5 consecutive words, the share that two records
    have in common, such as 0.8. Needs the extra "dedup". Default: only equal records are duplicates."""
    on: str | None = None
    """Names of the fields that are compared, comma-separated. Default: all, except for identifiers, addresses and
    metadata."""
    on_error: Literal["stop", "skip"] = "stop"
    """What an unreadable record does: "stop" ends the command and names it; "skip" leaves it out and counts it."""

    def run(self) -> None:
        """Write the records and print a report."""
        for error in out_of_range(self):
            raise ValueError(f"--{error}")
        from acsgd.commands.data.dedup import dedup

        names = [name.strip() for name in self.on.split(",")] if self.on is not None else []
        dedup(self.source, self.output, names, self.near, self.on_error)


@dataclass(frozen=True)
class DataCommand:
    """Show, check or deduplicate data before a run."""

    action: tyro.conf.OmitSubcommandPrefixes[
        Annotated[Show, tyro.conf.subcommand("show")]
        | Annotated[Check, tyro.conf.subcommand("check")]
        | Annotated[Dedup, tyro.conf.subcommand("dedup")]
    ]

    def run(self) -> None:
        """Run the subcommand."""
        with as_typed(type(self.action)):
            self.action.run()
