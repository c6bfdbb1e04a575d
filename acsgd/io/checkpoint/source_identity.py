"""Identity of the sources that a run trains on, and how those of a checkpoint differ."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from acsgd.io.data.sources.base import ReadOptions


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


def describe_options(options: ReadOptions) -> dict[str, str]:
    """Return how the records of sources are read, as options of a run."""
    return {f"data.{field.name}": str(getattr(options, field.name)) for field in dataclasses.fields(options)}


def differing_sources(ours: Sequence[SourceIdentity], saved: Sequence[SourceIdentity]) -> str | None:
    """Return a clause that names the sources that differ, and says how; None if all are the same."""
    if [each.tokens for each in ours] == [each.tokens for each in saved]:
        return None
    added, removed = _without(ours, saved), _without(saved, ours)
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


def _without(sources: Sequence[SourceIdentity], others: Sequence[SourceIdentity]) -> list[SourceIdentity]:
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
