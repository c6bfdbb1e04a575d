"""Files as sources: one, all of a directory, or those that match a pattern; read in bounded memory."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from acsgd.errors import kind_of_file, similar
from acsgd.io.data.sources.base import BadRecord, NamedSource, RecordCounts, SourceRecord
from acsgd.io.data.sources.json_records import read_json, read_json_lines
from acsgd.io.data.sources.tables import read_arrow, read_csv, read_parquet, read_tsv
from acsgd.io.data.sources.text import read_text, reading
from acsgd.shards.files import GIT_LFS, blame, describe_pointer

WHOLE_BYTES = 2**20
"""Maximum size of a file whose fingerprint covers every byte, bytes."""
END_BYTES = 2**16
"""Bytes at each end of a larger file that its fingerprint covers."""
SAMPLES = 16
"""Number of samples between the ends, evenly spaced, that the fingerprint of a larger file covers."""
SAMPLE_BYTES = 2**12


def fingerprint_of(path: Path) -> str:
    """Return absolute path, size in bytes, modification time and a hash of both ends and of samples of a file."""
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        digest = _sampled_hash(file.fileno(), status.st_size)
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {digest}"


def version_of(path: Path) -> str:
    """Return size and hash of a file, as `fingerprint_of` does: equal for copies of it on several hosts."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        return f"{size} {_sampled_hash(file.fileno(), size)}"


def _sampled_hash(file: int, size: int) -> str:
    """Hash a file of `size` bytes, or parts of it if it is large."""
    digest = hashlib.sha256()
    if size <= WHOLE_BYTES:
        spans = [(0, size)]
    else:
        step = (size - 2 * END_BYTES) // (SAMPLES + 1)
        samples = [(END_BYTES + step * n, SAMPLE_BYTES) for n in range(1, SAMPLES + 1)]
        spans = [(0, END_BYTES), *samples, (size - END_BYTES, END_BYTES)]
    for start, length in spans:
        digest.update(os.pread(file, length, start))
    return digest.hexdigest()


Reader = Callable[[Path, str, str, RecordCounts], Iterator[SourceRecord | BadRecord]]
"""Reader of a file, called with its path, its name for messages, the configuration key, and the counts to update."""

READERS: Mapping[str, Reader] = {
    ".jsonl": read_json_lines,
    ".jsonl.zst": read_json_lines,
    ".jsonl.gz": read_json_lines,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": read_text,
}
"""Ending of a file name -> reader."""

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation", "heldout", "holdout"), "test"),
}
"""Word in the name of a file or directory -> split that it belongs to, as `datasets` divides files, and held out."""
PART = re.compile(r"(.*?)(\d+)-of-(\d+)(.*)")
"""Name of a part of a set: data-00000-of-00002.parquet."""
MAX_NAMED = 5
"""Number of files of a split that are named."""
STATE = "state.json"
"""File in which `datasets` lists the Arrow files of a directory that it saved."""
NO_RECORDS = re.compile(
    r"(\.|__).*|_temporary|cache-.*\.arrow|(dataset_infos?|dataset_dict|state)\.json|node_modules|venv|wandb|mlruns|"
    "lightning_logs"
)
"""Names of hidden files and directories, of the caches and descriptions that `datasets` writes beside records, and of
directories in which programs keep packages and logs."""
COPY = re.compile(r"(copy of )?(.*?)(( -|_)? ?\(?copy\)?( \d+)?| ?\(\d+\)|[-_. ](bak|backup|old|orig))?", re.IGNORECASE)
"""Name, without its ending, that browsers and desktops give to a copy: data (1), data copy 2, Copy of data."""
OTHER_RECORDS = re.compile(r"\.(jsonl?|ndjson|csv|tsv|parquet|arrow)(\.(gz|zst|xz|bz2|lz4|zip))?$")
"""Endings of names of files of records, also compressed, of which not all have a reader."""
UNFINISHED, FINISHED = "_temporary", "_SUCCESS"
"""Directory in which Spark and Hadoop write files until all are complete, and the file that they write then."""
TABLE_LOGS = ("_delta_log", ".hoodie", "metadata/version-hint.text")
"""What a table of Delta Lake, Hudi or Iceberg has beside its files, of which some may be of earlier versions."""
CONFIGS = re.compile(r"---\n(?:(?!---).*\n)*?configs:")
"""Beginning of a README.md that divides the files of a repository of the Hub into datasets and splits."""


def reader_of(name: str) -> Reader | None:
    """Return the reader of files with a name, None if there is none."""
    return next((reader for ending, reader in READERS.items() if name.endswith(ending)), None)


@dataclass(frozen=True)
class Files(NamedSource):
    """Files, by name, directory or pattern. A relative name is relative to the current working directory."""

    @property
    def fingerprint(self) -> str:
        """Path, size, modification time and samples of each file. Raises ValueError if one cannot be read."""
        parts = []
        for name in self.names():
            with reading(Path(name), key=self.key):
                parts.append(fingerprint_of(Path(name).expanduser()))
        return parts[0] if len(parts) == 1 else hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def check(self) -> None:
        """Raise ValueError unless there are files, and all are readable and not empty."""
        for name in self.names():
            check_file(name)

    def records(self, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
        """Yield the records of each file, in the order of their names."""

        def read(name: str, counts: RecordCounts) -> Iterator[SourceRecord | BadRecord]:
            reader = reader_of(name)
            assert reader
            return reader(Path(name).expanduser(), name, self.key, counts)

        return read_files(self.names(), counts, read)

    def names(self) -> list[str]:
        """Return the names of the files. Raises ValueError if there are none."""
        return names_of(self.name)


def read_files(
    names: Sequence[str],
    counts: RecordCounts,
    read: Callable[[str, RecordCounts], Iterator[SourceRecord | BadRecord]],
    *,
    sizes: Sequence[int] | None = None,
) -> Iterator[SourceRecord | BadRecord]:
    """Yield the records of each file.

    counts: updated in place; read: reads a file, with counts of its own; sizes: bytes of each, by default those of
    local files.
    """
    sizes = [_size(name) for name in names] if sizes is None else sizes
    for number, name in enumerate(names):
        part, earlier = RecordCounts(), counts.records
        counts.fraction = partial(_fraction, sizes, number, part)
        for record in read(name, part):
            counts.records = earlier + part.records
            yield record
        counts.records = earlier + part.records


def names_of(name: str, endings: Collection[str] = READERS, prefix: str = "") -> list[str]:
    """Return the names of the files of a file, directory or pattern, in a fixed order. Raises ValueError if none match.

    endings: of names of files that are read in directories and by patterns; prefix: of what the user types.
    """
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return _names_in(name, Path(path), endings, prefix)
    if os.path.lexists(path) or not glob.has_magic(path):
        return [name]
    names = [each for each in sorted(glob.glob(path, recursive=True)) if each.endswith(tuple(endings))]
    if not names:
        raise ValueError(f"{name} matches no file in {Path.cwd()} that can be read, {readable_endings(endings)}")
    return names


def _names_in(name: str, directory: Path, endings: Collection[str], prefix: str) -> list[str]:
    """Return the names of the files below a directory. Raises ValueError if there are none, or of several splits."""
    readme = directory / "README.md"
    if readme.is_file() and CONFIGS.match(readme.read_text(errors="replace")):
        raise ValueError(
            f"{name} is a dataset with several parts, see {readme}; give hf:{name}:train or hf:{name}:CONFIG:train"
        )
    paths = list(files_below(directory, endings))
    paths = [path for path in paths if path.suffix != ".txt"] or paths  # beside records, texts are licenses and notes
    files = {path.resolve() for path in paths if not path.is_symlink()}
    paths = [path for path in paths if not (path.is_symlink() and path.resolve() in files)]  # "latest" is read once
    if not paths:
        raise ValueError(f"{name} is a directory without files that can be read, {readable_endings(endings)}")
    found = [SPLITS.get(split_of(path.relative_to(directory)), "") for path in paths]
    splits = {split: [path for path, its in zip(paths, found, strict=True) if its == split] for split in found}
    if len(splits) > 1:
        choices = [
            f"{split or 'others'}: {prefix}{_typed(splits[split], directory, endings)}" for split in _in_order(splits)
        ]
        raise ValueError(f"{name} has several splits; give one of them: {'; '.join(choices)}")
    check_parts(name, paths)
    check_forms(name, paths, endings, prefix)
    _check_copies(name, paths, endings)
    return [str(path) for path in paths]


def check_parts(name: str, paths: Iterable[Path], above: str = "") -> None:
    """Raise ValueError if a file is a part of a set of which others are missing, as after an interrupted download.

    above: what a path begins with as the user types it.
    """
    found = dict[tuple[Path, str, str, str], set[int]]()
    for path in paths:
        if match := PART.fullmatch(path.name):
            start, number, total, end = match.groups()
            found.setdefault((path.parent, start, total, end), set()).add(int(number))
    for (directory, start, total, end), numbers in found.items():
        first = int(int(total) in numbers)  # some count from 1
        if missing := sorted({*range(first, first + int(total))} - numbers):
            part = f"{start}{missing[0]:0{len(total)}}-of-{total}{end}"
            raise ValueError(
                f"{name} lacks {len(missing)} of {int(total)} parts, such as {above}{directory / part}; get them, or "
                f'give a pattern of those that it has, "{above}{directory / f"{start}*{end}"}"'
            )


def check_forms(name: str, paths: Iterable[Path], endings: Collection[str] = READERS, prefix: str = "") -> None:
    """Raise ValueError for files of which one may be another in another form. prefix: of what the user types."""
    found = dict[Path, Path]()
    for path in paths:
        if other := found.get(path.with_name(stem := _stem(path, endings))):
            raise ValueError(
                f"{name} has {other.name} and {path.name}, which may hold the same records; give one of them: "
                f"{prefix}{other} or {prefix}{path}"
            )
        found[path.with_name(stem)] = path


def _check_copies(name: str, paths: Iterable[Path], endings: Collection[str]) -> None:
    """Raise ValueError for files of which one is a copy of another by its name and its bytes."""
    originals = dict[tuple[str, int], list[Path]]()
    for path in paths:
        match = COPY.fullmatch(_stem(path, endings))
        assert match
        originals.setdefault((match[2], _size(str(path))), []).append(path)
    for first, *others in originals.values():
        if equal := next((other for other in others if version_of(other) == version_of(first)), None):
            raise ValueError(
                f"{name} has {first} and {equal}, which are equal; remove one of them, or give the files by name"
            )


def _stem(path: Path, endings: Collection[str]) -> str:
    """Return the name of a file without its ending, one of `endings`."""
    return next(path.name.removesuffix(end) for end in endings if path.name.endswith(end))


def files_below(directory: Path, endings: Collection[str] = READERS, above: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield the files of records below a directory, in the order of their names; of a saved dataset those it lists.

    endings: of their names; above: directories that are being read, to which links are not followed. Raises ValueError
    for a file of records with another ending, which would be missing.
    """
    if (directory / STATE).is_file():
        with blame(directory / STATE, "is not the state of a dataset", "save the dataset again"):
            files = [file["filename"] for file in json.loads((directory / STATE).read_bytes())["_data_files"]]
        yield from (directory / file for file in files)
        return
    check_written(str(directory), lambda name: (directory / name).exists())
    above = (*above, directory.resolve())
    for path in sorted(directory.iterdir()):
        if NO_RECORDS.fullmatch(path.name):
            continue
        if path.is_dir():
            if not (path.is_symlink() and any(_overlap(path.resolve(), each) for each in above)):
                yield from files_below(path, endings, above)
        elif path.is_file() and path.name.endswith(tuple(endings)):
            yield path
        elif path.is_file():
            refuse_other_records(str(path), endings)


def refuse_other_records(name: str, endings: Collection[str] = READERS) -> None:
    """Raise ValueError for the name of a file of records with an ending that is not read."""
    if OTHER_RECORDS.search(name):
        raise ValueError(
            f"{name} is not read, since only {readable_endings(endings)} are; convert it to one of them, or move it "
            "elsewhere"
        )


def check_written(directory: str, has: Callable[[str], bool]) -> None:
    """Raise ValueError if a program has not written all files of a directory, or only some of them belong together.

    has: whether there is a file or directory with a name in it.
    """
    if has(UNFINISHED) and not has(FINISHED):
        raise ValueError(
            f"{directory} is being written, or was not written to its end: it has {UNFINISHED} and no {FINISHED}; "
            f"wait or write it again, or remove {directory}/{UNFINISHED}"
        )
    if log := next(filter(has, TABLE_LOGS), None):
        raise ValueError(
            f"{directory} is a table with versions ({log}), whose files are not all of the present one; write the "
            "present version to a directory of its own, such as Parquet files"
        )


def _overlap(one: Path, other: Path) -> bool:
    """Return whether one of two directories is part of the other."""
    return one.is_relative_to(other) or other.is_relative_to(one)


def split_of(path: Path) -> str:
    """Return the first word of a path that names a split, "train" of data/train-00000-of-00001.parquet; "" if none."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", str(path)).lower()  # trainData
    name = re.sub(r"(held|hold)[-_ ]out", r"\1out", name)
    return next((word for word in re.split(r"[-_. 0-9/]+", name) if word in SPLITS), "")


def _in_order(splits: Iterable[str]) -> list[str]:
    """Return splits in the order of SPLITS, then others."""
    return sorted(splits, key=[*SPLITS.values(), ""].index)


def _typed(paths: Sequence[Path], directory: Path, endings: Collection[str]) -> str:
    """Return sources of just these files, or the first of them: a directory, a pattern, or their names."""
    parent = Path(os.path.commonpath([path.parent for path in paths]))
    if parent != directory and list(files_below(parent, endings)) == list(paths):
        return str(parent)
    for pattern in (f"{parent}/*{split_of(Path(paths[0].name))}*", f"{directory}/**/{paths[0].name}"):
        if len(paths) > 1 and sorted(glob.glob(pattern, recursive=True)) == [*map(str, paths)]:
            return pattern
    return ",".join(map(str, paths[:MAX_NAMED])) + ",..." * (len(paths) > MAX_NAMED)


def readable_endings(endings: Collection[str] = READERS) -> str:
    """Return the endings of files that can be read, for messages."""
    return ", ".join(f"*{ending}" for ending in endings)


def _size(name: str) -> int:
    with contextlib.suppress(OSError):  # reading the file reports it
        return Path(name).expanduser().stat().st_size
    return 0


def _fraction(sizes: Sequence[int], number: int, part: RecordCounts) -> float:
    """Return the fraction of the bytes of all files that has been read while file `number` is being read."""
    within = part.fraction() if part.fraction else 0.0
    return (sum(sizes[:number]) + within * sizes[number]) / max(1, sum(sizes))


def refuse_missing(name: str, other: str = "") -> NoReturn:
    """Raise ValueError for a path that does not exist. other: what else may be given."""
    path = Path(name).expanduser()
    target, near = "", ""
    with contextlib.suppress(OSError):
        target = f", a link to {os.readlink(path)}," if path.is_symlink() else ""
        stems = {each.partition(".")[0]: each for each in sorted(os.listdir(path.parent))}  # endings are alike anyway
        near = next((f' (did you mean "{stems[each]}"?)' for each in similar(path.name.partition(".")[0], stems)), "")
    raise ValueError(
        f"{name}{target} does not exist in {Path.cwd()}; give the path of an existing file{near}{other}"
    ) from None


def check_file(name: str) -> None:
    """Raise ValueError unless a path is a readable, non-empty file."""
    try:
        name.encode()
        path = Path(name).expanduser()
        status = path.stat()
    except UnicodeEncodeError:
        raise ValueError(f"{name!a} is not a UTF-8 name; rename the file") from None
    except FileNotFoundError:
        refuse_missing(name)
    except (OSError, RuntimeError, ValueError) as error:  # ~user of an unknown user, a null byte
        cause = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{name} cannot be opened ({cause}); give the path of an existing file") from None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(
            f"{name} is a {kind_of_file(status.st_mode)}; its text is read more than once: write it to a file"
        )
    if not os.access(path, os.R_OK):
        raise ValueError(f"{name} is not readable by this user; type: chmod +r {name}")
    if not status.st_size:
        raise ValueError(f"{name} is empty; give a file with text")
    with path.open("rb") as file:
        if file.read(len(GIT_LFS)) == GIT_LFS:
            raise ValueError(f"{name} {describe_pointer(path)}")
