"""Identity of a run: what it must have in common with a checkpoint to resume from it, and how the two differ."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from acsgd.io.data.sources.base import ReadOptions

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WEIGHTS = "weights of data.sources"
"""Key in RunIdentity.data of the slots of each source per block."""
ADAPTER = "adapter.spec"
"""Key in RunIdentity.data of the adapter, which is absent if there is none."""
VOLATILE = ("transformers_version", "_name_or_path", "architectures", "dtype", "use_cache")
"""Keys of a model config that do not change training."""
OF_TOKENIZER = "_token_id"
"""End of keys of a model config that another tokenizer (model.tokenizer) sets."""


@dataclass(frozen=True)
class SourceIdentity:
    """What a source must have in common with that of a checkpoint."""

    name: str
    """Name without directories."""
    tokens: str
    """Hash of its tokens."""

    @classmethod
    def of(cls, name: str, fingerprint: object) -> SourceIdentity:
        """Return the identity of a source. name: as given; fingerprint: that of its rows."""
        return cls(Path(name).name or name, hashlib.sha256(repr(fingerprint).encode()).hexdigest())


def describe_options(options: Sequence[ReadOptions]) -> dict[str, str]:
    """Return how the records of sources are read, as options of a run. options: of all sources, or of each."""
    values = {field.name: [getattr(each, field.name) for each in options] for field in dataclasses.fields(ReadOptions)}
    return {f"data.{name}": str(each[0] if len({*each}) == 1 else each) for name, each in values.items()}


def differing_sources(ours: Sequence[SourceIdentity], saved: Sequence[SourceIdentity]) -> str | None:
    """Return a clause that names the sources that differ, and says how; None if all are the same."""
    if [each.tokens for each in ours] == [each.tokens for each in saved]:
        return None
    added, removed = _missing(ours, saved), _missing(saved, ours)
    if not added and not removed:
        return f"the order of data.sources is {_names(saved)} in the checkpoint, {_names(ours)} in the run"
    old_names, new_names = ({each.name for each in sources} for sources in (removed, added))
    changed = [each for each in added if each.name in old_names]
    added = [each for each in added if each.name not in old_names]
    removed = [each for each in removed if each.name not in new_names]
    clauses = [f"the contents of {_names(changed)} changed"] if changed else []
    clauses += [f"data.sources lacks {_names(removed)}, which it was trained on"] if removed else []
    clauses += [f"data.sources has {_names(added)}, which it was not trained on"] if added else []
    return ", ".join(clauses)


def differing_weights(sources: Sequence[SourceIdentity], ours: object, saved: object) -> str | None:
    """Return a clause that names the sources with their weights if these differ; None if they are the same.

    sources: the same in both. ours, saved: slots of each source per block; [1] if the sources have no weights.
    """
    if ours == saved:
        return None
    before, now = _weights(sources, saved), _weights(sources, ours)
    return f"weights of data.sources are {before} in the checkpoint, {now} in the run"


def _weights(sources: Sequence[SourceIdentity], counts: object) -> str:
    if isinstance(counts, list) and len(counts) == len(sources):
        return ", ".join(f"{each.name}:{count}" for each, count in zip(sources, counts, strict=True))
    return "not given" if counts == [1] else str(counts)


def _missing(sources: Sequence[SourceIdentity], others: Sequence[SourceIdentity]) -> list[SourceIdentity]:
    """Return the sources whose tokens are not among those of the others, each of which stands for one source."""
    rest = [each.tokens for each in others]
    missing = []
    for each in sources:
        if each.tokens in rest:
            rest.remove(each.tokens)
        else:
            missing.append(each)
    return missing


def _names(sources: Sequence[SourceIdentity]) -> str:
    return ", ".join(each.name for each in sources)


def _check_model_type(model: dict[str, Any]) -> None:
    if not isinstance(model.get("model_type"), str):
        raise ValueError('"model_type" is missing')


@dataclass(frozen=True)
class RunIdentity:
    """What a run must have in common with a checkpoint to resume from it: the model and the samples of each step."""

    model: Annotated[dict[str, Any], _check_model_type]
    """Config of the model, without VOLATILE keys."""
    tokenizer: str
    """Hash of the tokenizer."""
    texts: str
    """Hash of the tokens of all sources."""
    data: dict[str, Any]
    """Options on which the samples of a step depend."""
    sources: tuple[SourceIdentity, ...] = ()
    """Sources in their order; empty in checkpoints of older versions."""
    reading: dict[str, str] = field(default_factory=dict)
    """Options on which the tokens of all sources depend; empty in checkpoints of older versions."""
    weights: str = ""
    """Checksum of the weights that the run started from, or how they were drawn; empty in checkpoints of older
    versions. Compared by `acsgd.run.initial_weights` when a run resumes, and not part of the digest."""

    @classmethod
    def of(
        cls,
        model: PreTrainedConfig,
        *,
        tokenizer: str,
        texts: str,
        data: Mapping[str, Any],
        sources: Iterable[SourceIdentity] = (),
        reading: Mapping[str, str] = MappingProxyType({}),
    ) -> RunIdentity:
        """Return the identity of a run. texts: a string of any length, which is hashed."""
        config = json.loads(model.to_json_string(use_diff=False))
        kept = {key: value for key, value in config.items() if key not in VOLATILE}
        digest = hashlib.sha256(texts.encode()).hexdigest()
        return cls(kept, tokenizer, digest, dict(data), tuple(sources), dict(reading))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def digest(self) -> str:
        """Return a hash of model, tokenizer and data, without the fields that only say why `texts` differ."""
        fields = {key: value for key, value in self.to_dict().items() if key not in ("sources", "reading", "weights")}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    def difference(self, saved: RunIdentity) -> str | None:
        """Return a clause that says why this run cannot resume from a checkpoint of `saved`; None if it can."""
        ours, theirs = self.model["model_type"], saved.model["model_type"]
        if ours != theirs:
            return f'its model is of family "{theirs}", the run\'s of family "{ours}"'
        special = [key for key in {**self.model, **saved.model} if key.endswith(OF_TOKENIZER)]
        if differing := _differing(*(_without(each.model, special) for each in (self, saved))):
            return f"its model differs: {differing}"
        if self.tokenizer != saved.tokenizer:
            return "its tokenizer differs from the run's"
        if differing := _differing(self.model, saved.model):
            return f"its model differs: {differing}"
        if differing := _differing(*({ADAPTER: each.data.get(ADAPTER)} for each in (self, saved))):
            return f"it trains other parameters: {differing}"
        if differing := _differing(*(_without(each.data, [WEIGHTS]) for each in (self, saved))):
            return f"its batches differ: {differing}"
        if self.texts != saved.texts:
            return self._differing_texts(saved)
        weights = differing_weights(self.sources, self.data.get(WEIGHTS), saved.data.get(WEIGHTS))
        return weights and f"its batches differ: {weights}"

    def differing_reading(self, saved: RunIdentity) -> str:
        """Return a clause on the options of reading that differ; empty if none of those that both record do."""
        common = {name: value for name, value in self.reading.items() if name in saved.reading}
        return _differing(common, {name: saved.reading[name] for name in common})

    def _differing_texts(self, saved: RunIdentity) -> str:
        """Return a clause that says how the sources differ."""
        if differing := self.differing_reading(saved):
            return f"the records of data.sources are read differently: {differing}"
        named = differing_sources(self.sources, saved.sources) if saved.sources else None
        return named or "the text of data.sources differs from the text it was trained on"


def _without(values: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """List the first 3 keys whose values differ."""
    keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]

    def text(values: Mapping[str, Any], key: str) -> str:
        return "not set" if values.get(key) is None else str(values[key])

    return ", ".join(
        f"{key} is {text(theirs, key)} in the checkpoint, {text(ours, key)} in the run" for key in keys[:3]
    )
