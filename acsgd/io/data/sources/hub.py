"""Datasets of the Hugging Face Hub, and local copies of them, as `datasets` reads them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from acsgd.io.data.sources.base import BadRecord, NamedSource, RecordCounts, SourceRecord
from acsgd.io.data.sources.files import SPLITS, STATE
from acsgd.io.data.sources.tables import BATCH_ROWS, rows_of

PREFIX = "hf:"
CONNECT_S = 3.0
"""Seconds in which one of the addresses of the Hub must accept a connection."""
READ_S = 60.0
"""Seconds in which it must answer then."""
PAUSES_S = (1.0, 1.0)
"""Seconds before further attempts to reach the Hub after one that failed at once."""
SAVED = (STATE, "dataset_dict.json")
"""Files of a directory that `save_to_disk` wrote: of one split, or of several."""


class DatasetName(NamedTuple):
    """Parts of hf:NAME[@REVISION][:CONFIG][:SPLIT]."""

    path: str
    revision: str | None
    config: str | None
    split: str


@dataclass(frozen=True)
class HubDataset(NamedSource):
    """A dataset by its Hub id or a local directory, "hf:NAME[@REVISION][:CONFIG][:SPLIT]", by default of "train"."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the dataset. Raises ValueError if it cannot be loaded."""
        return f"{self.name} {self._dataset()._fingerprint}"

    def check(self) -> None:
        """Raise ValueError unless the name has the parts that it must have. Does not need the network."""
        parse_name(self.name)

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        """Yield the rows, as they are stored."""
        dataset = self._dataset()
        counts.fraction = lambda: counts.records / max(1, len(dataset))
        tables = dataset.with_format("arrow").iter(BATCH_ROWS)
        yield from rows_of((batch for table in tables for batch in table.to_batches()), self.name, counts)

    def _dataset(self) -> Any:
        with loading(self.name, self.key):
            return load_dataset(parse_name(self.name))


@contextlib.contextmanager
def loading(name: str, key: str) -> Iterator[None]:
    """Turn an error of loading a dataset into a ValueError that names it."""
    try:
        yield
    except Exception as error:  # datasets and the libraries of file formats raise errors of every class
        from datasets.exceptions import DatasetNotFoundError  # takes most of a second

        problem = first_line(error)
        if isinstance(error, DatasetNotFoundError):
            raise ValueError(
                f"{key}: {name} cannot be loaded: {problem}; check the name, and if it is private type hf auth login"
            ) from None
        raise ValueError(
            f"{key}: {name} cannot be loaded: {problem}; give {PREFIX}NAME:CONFIG:SPLIT or, without a "
            f"network, {PREFIX}DIRECTORY with a copy (hf download NAME --repo-type dataset --local-dir DIRECTORY)"
        ) from None


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, without a period."""
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


def parse_name(name: str) -> DatasetName:
    """Return the parts of a name. Raises ValueError."""
    path, *rest = name.removeprefix(PREFIX).split(":")
    if not path or not all(rest) or len(rest) > 2:
        raise ValueError(f"{name} is not the name of a dataset; write {PREFIX}NAME, {PREFIX}NAME:CONFIG:SPLIT")
    revision: str | None = None
    if "@" in path and not os.path.lexists(os.path.expanduser(path)):
        path, _, revision = path.partition("@")
    if len(rest) == 2:
        return DatasetName(path, revision, rest[0], rest[1])
    if rest and rest[0] in SPLITS:
        return DatasetName(path, revision, None, rest[0])
    return DatasetName(path, revision, rest[0] if rest else None, "train")


def is_saved(path: str) -> bool:
    """Return whether `save_to_disk` wrote a directory."""
    return any(os.path.lexists(os.path.join(path, name)) for name in SAVED)


@contextlib.contextmanager
def from_hub_or_cache(path: str) -> Iterator[None]:
    """Context in which `datasets` loads a dataset, only from its cache if the Hub cannot be reached.

    Without a network it would try again for half a minute, even if the dataset is in its cache, and has no option for
    that. Raises ConnectionError if the dataset is not there. path: id or directory.
    """
    import datasets

    if os.path.isdir(path) or datasets.config.HF_HUB_OFFLINE or (problem := _unreachable()) is None:
        yield
        return
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    except ConnectionError:
        raise ConnectionError(f"{datasets.config.HF_ENDPOINT} cannot be reached ({problem})") from None
    finally:
        datasets.config.HF_HUB_OFFLINE = False


def _unreachable() -> str | None:
    """Return why no request reaches the Hub; None if one does, whatever the answer."""
    import datasets
    from huggingface_hub.utils import get_session

    problem = ""
    for pause in (0.0, *PAUSES_S):
        time.sleep(pause)
        started = time.monotonic()
        try:
            get_session().head(datasets.config.HF_ENDPOINT, timeout=(CONNECT_S, READ_S, READ_S, READ_S))
        except Exception as error:  # of the HTTP library, which depends on the version of huggingface_hub
            problem = first_line(error)
            if time.monotonic() - started >= CONNECT_S:
                break
        else:
            return None
    return problem


@lru_cache(maxsize=8)
def load_dataset(name: DatasetName) -> Any:
    """Load a split, in the cache of `datasets` or memory-mapped from a directory."""
    import datasets  # takes most of a second

    path = os.path.expanduser(name.path)
    if not is_saved(path):
        with from_hub_or_cache(path):
            return datasets.load_dataset(path, name.config, split=name.split, revision=name.revision)
    saved = datasets.load_from_disk(path)
    return saved[name.split] if isinstance(saved, datasets.DatasetDict) else saved
