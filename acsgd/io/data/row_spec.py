"""What the rows of a run depend on besides the records of their sources.

To add an option of [data] on which rows depend, declare it as a field of `RowSpec` with the same name: keys of caches,
the identity of a run and `acsgd eval` follow. Code that makes rows reads options from the RowSpec alone. Options on
which no row depends belong in APART.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import Any, Literal, NamedTuple, Protocol

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from acsgd.config.options import Config, DataConfig
from acsgd.io.data.formats.formats import read_options
from acsgd.io.data.formats.labels import Labels
from acsgd.io.data.sources.base import ReadOptions
from acsgd.io.data.sources.sources import WeightedSource
from acsgd.io.data.sources.streamed import Streamed
from acsgd.model_classes import TOKEN_TYPES, ModelClass
from acsgd.shards.tokenizer import DocumentTokens, name_tokens, padding_id

RowPlacement = Literal["concat", "pack", "single"]
LongDocument = Literal["split", "truncate", "skip", "error"]


DenoisingMode = Literal["R", "S", "X"]
MODES: Sequence[DenoisingMode] = ("R", "S", "X")


class DenoisingTokens(NamedTuple):
    """Tokens that denoising adds to those of a text."""

    modes: Mapping[DenoisingMode, Sequence[int]]
    sentinels: Sequence[int]
    begin: Sequence[int]
    """Before a document; they stay in front of the mode."""
    end: int
    """After the removed tokens."""

    @property
    def ids(self) -> list[list[int]]:
        """Tokens of each mode, and the sentinels, as JSON values."""
        return [*map(list, self.modes.values()), list(self.sentinels)]

    def describe(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return a clause for the user."""
        modes = ", ".join(f"{mode} {name_tokens(tokenizer, ids)}" for mode, ids in self.modes.items())
        first, last = (name_tokens(tokenizer, [self.sentinels[index]]) for index in (0, -1))
        return f"denoising: modes {modes}; {len(self.sentinels)} sentinels, from {first} to {last}"


def denoising_tokens(tokenizer: PreTrainedTokenizerBase, modes: str, sentinels: str) -> DenoisingTokens:
    """Return the tokens of a tokenizer. modes, sentinels: data.modes and data.sentinels, which were checked.

    Raises ValueError if it has no sentinels.
    """
    pattern = re.compile(re.escape(sentinels).replace(re.escape("{}"), "([0-9]+)"))
    found = ((pattern.fullmatch(token), id_) for token, id_ in tokenizer.get_vocab().items())
    ids = [id_ for _, id_ in sorted((int(match[1]), id_) for match, id_ in found if match)]
    if not ids:
        raise ValueError(
            f'data.objective=ul2r needs sentinel tokens, but the tokenizer {tokenizer.name_or_path} has no "'
            f'{sentinels.replace("{}", "0")}"; name tokens that texts do not contain, such as '
            '--data.sentinels "<|reserved_special_token_{}|>", or add such tokens to the tokenizer and the model'
        )
    special = DocumentTokens.of(tokenizer)
    texts = zip(MODES, modes.split(","), strict=True)
    mode_ids = {mode: tokenizer.encode(text.strip(), add_special_tokens=False) for mode, text in texts}
    return DenoisingTokens(mode_ids, ids, special.begin, special.end)


class RowStage(IntEnum):
    """What is made of the records of a source, step by step. A stage depends on all fields of those before it, too."""

    TOKENS = 1
    """Tokens of the records; in the cache."""
    LAYOUT = 2
    """Which part of which document lies in which row; in the cache."""
    SEGMENTS = 3
    """Rows of a streamed source, a fixed number at a time; in log.dir."""
    ROWS = 4
    """Values of rows as the model gets them; not stored."""
    BATCHES = 5
    """Which rows a step trains on; not stored."""


VERSIONS = {RowStage.TOKENS: 15, RowStage.LAYOUT: 4, RowStage.SEGMENTS: 3}
"""Version of what is stored of a stage; part of its key."""

APART = {
    "sources": "each has a fingerprint of its own",
    "weights": "they determine the slots of each source per block, which checkpoints record",
    "eval_sources": "no step trains on them",
    "deal": "it determines who trains on a row, not on which row",
    "chat_template": "it is the template of the tokenizer",
    "chat_template_kwargs": "they are in the template of the tokenizer",
}
"""Options of [data] that are no fields of RowSpec or ReadOptions, and why."""


OPTIONS = frozenset(each.name for each in fields(DataConfig))
"""Names of the options of [data]."""


def _at(stage: RowStage, name: str | None = None, *, unrecorded: object = None) -> dict[str, Any]:
    """Declare the first stage that depends on a field of RowSpec, and how checkpoints record it.

    name: under which they do; None for "data.FIELD" of an option of [data], and for other fields not at all.
    unrecorded: value that they do not record, besides None, which an option has if it has no effect.
    """
    return {"stage": stage, "name": name, "unrecorded": unrecorded}


class RowTask(Protocol):
    """What rows depend on of a task; see `acsgd.tasks.base.Task`."""

    @property
    def name(self) -> str: ...

    @property
    def model_class(self) -> ModelClass: ...

    @property
    def has_documents(self) -> bool: ...

    @property
    def has_labels(self) -> bool: ...

    def layout(self, data: DataConfig) -> RowPlacement: ...

    def long(self, data: DataConfig) -> LongDocument: ...

    def labels(self, model: PreTrainedConfig) -> Labels | None: ...


@dataclass(frozen=True)
class RowSpec:
    """What the rows of a run depend on besides the records of their sources: options of [data], and what follows from
    the configuration, the model and the tokenizer."""

    reading: tuple[ReadOptions, ...] = field(metadata=_at(RowStage.TOKENS))
    """How the records of all sources are read, or those of each; recorded in RunIdentity.reading."""
    tokenizer: str = field(metadata=_at(RowStage.TOKENS))
    """Hash of the tokenizer; recorded in RunIdentity.tokenizer."""
    templates: str = field(metadata=_at(RowStage.TOKENS))
    """Chat templates, and the special tokens that they may name."""
    task: str = field(metadata=_at(RowStage.TOKENS))
    """model.task."""
    begin: list[int] | None = field(metadata=_at(RowStage.TOKENS, "tokens before a document"))
    """None for tasks with one example per row, which have the special tokens of the tokenizer."""
    end: int | None = field(metadata=_at(RowStage.TOKENS, "token after a document"))
    """None where `begin` is."""
    labels: str = field(metadata=_at(RowStage.TOKENS))
    """What the labels of records may be; empty for tasks without labels."""
    has_types: bool = field(metadata=_at(RowStage.TOKENS))
    """Whether tokens have types."""
    truncation: tuple[int, Literal["truncate", "skip", "error"]] | None = field(metadata=_at(RowStage.TOKENS))
    """Maximum number of tokens of an example, and what is done with longer ones. None for documents, which are divided
    when rows are made."""

    sequence: int = field(metadata=_at(RowStage.LAYOUT))
    virtual_tokens: int = field(metadata=_at(RowStage.LAYOUT))
    """Number of tokens of a sequence that stand for embeddings of an adapter."""
    rows: RowPlacement = field(metadata=_at(RowStage.LAYOUT, unrecorded="concat"))
    long: LongDocument | None = field(metadata=_at(RowStage.LAYOUT))
    objective: Literal["causal", "prefix", "ul2r"] = field(metadata=_at(RowStage.LAYOUT, unrecorded="causal"))
    sentinels: str | None = field(metadata=_at(RowStage.LAYOUT))
    modes: str | None = field(metadata=_at(RowStage.LAYOUT))
    denoising: DenoisingTokens | None = field(metadata=_at(RowStage.LAYOUT, "tokens of denoising"))

    window: int | None = field(metadata=_at(RowStage.SEGMENTS))

    isolate: bool | None = field(metadata=_at(RowStage.ROWS))
    seed: int = field(metadata=_at(RowStage.ROWS))
    padding: int = field(metadata=_at(RowStage.ROWS))
    """Token with which rows are padded."""

    batch: int = field(metadata=_at(RowStage.BATCHES))
    eval_fraction: float = field(metadata=_at(RowStage.BATCHES))

    @classmethod
    def of(
        cls,
        config: Config,
        task: RowTask,
        model: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        sources: Sequence[WeightedSource],
        *,
        virtual_tokens: int = 0,
    ) -> RowSpec:
        """Return what the rows of a configuration depend on. virtual_tokens: of the adapter.

        Raises ValueError if the tokenizer lacks a token that is needed.
        """
        data, rows, long = config.data, task.layout(config.data), task.long(config.data)
        # before the hash: a first use drops truncation and padding that tokenizer.json may set, as checkpoints have it
        document = DocumentTokens.of(tokenizer) if task.has_documents else None
        denoising = denoising_tokens(tokenizer, data.modes, data.sentinels) if data.objective == "ul2r" else None
        has_types = TOKEN_TYPES in task.model_class.inputs_of(model) and TOKEN_TYPES in tokenizer.model_input_names
        labels = task.labels(model)
        return cls(
            reading=read_options(data, has_labels=task.has_labels),
            tokenizer=tokenizer_fingerprint(tokenizer),
            templates=f"{tokenizer.chat_template} {tokenizer.special_tokens_map}",
            task=task.name,
            begin=document.begin if document else None,
            end=document.end if document else None,
            labels=labels.key if labels else "",
            has_types=has_types,
            truncation=None if document else (data.sequence - virtual_tokens, "truncate" if long == "split" else long),
            sequence=data.sequence,
            virtual_tokens=virtual_tokens,
            rows=rows,
            long=None if rows == "concat" else long,
            objective=data.objective,
            sentinels=data.sentinels if denoising else None,
            modes=data.modes if denoising else None,
            denoising=denoising,
            window=data.window if any(isinstance(source, Streamed) for source, _ in sources) else None,
            isolate=None if rows == "concat" else data.isolate,
            seed=data.seed,
            padding=padding_id(tokenizer, model),
            batch=data.batch,
            eval_fraction=data.eval_fraction,
        )

    @property
    def text_length(self) -> int:
        """Number of tokens of text of a row."""
        return self.sequence - self.virtual_tokens

    def key(self, stage: RowStage, source: str, reading: ReadOptions | None = None) -> str:
        """Return a hash of all that a stage of a source depends on.

        source: fingerprint of its records or tokens; reading: how its records are read, None = as `reading` says.
        """
        versions = [version for each, version in VERSIONS.items() if each <= stage]
        spec = self if reading is None else replace(self, reading=(reading,))
        values = [(each.name, getattr(spec, each.name)) for each in fields(spec) if each.metadata["stage"] <= stage]
        return hashlib.sha256(repr((source, versions, values)).encode()).hexdigest()[:16]

    def recorded(self) -> dict[str, Any]:
        """Return the values that a checkpoint records, by name."""
        found = dict[str, Any]()
        for each in fields(self):
            name = each.metadata["name"] or (f"data.{each.name}" if each.name in OPTIONS else None)
            value = getattr(self, each.name)
            if name and value not in (None, each.metadata["unrecorded"]):
                found[name] = value.ids if isinstance(value, DenoisingTokens) else value
        return found


def data_options(*stages: RowStage) -> tuple[str, ...]:
    """Return the names of the options of [data] whose first stage is one of `stages`."""
    return tuple(each.name for each in fields(RowSpec) if each.name in OPTIONS and each.metadata["stage"] in stages)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash that changes if the tokenizer may produce other tokens."""
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{type(tokenizer).__name__} {tokenizer.eos_token_id} {rules}".encode()).hexdigest()
