"""Directories at the addresses of fsspec, such as s3://bucket/run or file:///mnt/run: listed, read and written.

No message holds a credential: those are read by the package of each protocol, from its own files and variables.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from acsgd.io.files.cache import open_cached
from acsgd.io.files.checksum import new_file_checksum

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "sftp": "paramiko", "ssh": "paramiko"}
"""Package that a protocol needs, if it is not one of acsgd's own."""
LOCAL = ("file", "local")
"""Protocols of files of this host."""
WITH_DIRECTORIES = (*LOCAL, "sftp", "ssh")
"""Protocols in which a file needs a directory that exists."""
PART_BYTES = 1 << 24
"""Size of the parts in which a file is sent to a store of objects."""
CHUNK_BYTES = 1 << 20
"""Size of a read from disk or network."""


VERSIONS = ("ETag", "etag", "blob_id", "sha", "checksum", "generation", "mtime", "LastModified", "created")
"""Keys of fsspec's info of a file whose values change with its content, the best one first."""
PASSWORD = re.compile(r"(?<=://)[^/@\s,]*:[^/@\s,]*@")
"""User and password in an address."""


def is_address(text: str) -> bool:
    """Return whether a text is an address, not a path or a Hugging Face id."""
    return re.match(r"[a-z][a-z0-9+.-]*://", text, re.IGNORECASE) is not None


def version_of(entry: Mapping[str, Any]) -> str:
    """Return what changes with the content of a file, and is equal on all hosts unless each has a copy of its own.

    Of a protocol that has none of VERSIONS, it is only the size. entry: fsspec's info of the file.
    """
    known = next((entry[key] for key in VERSIONS if entry.get(key) is not None), None)
    return f"{entry['size']} {known}"


def check_address(address: str, option: str | None = None) -> None:
    """Raise ValueError for an address that cannot be opened here, or that holds a password. Uses no network.

    option: that has this value, for messages.
    """
    from fsspec import get_filesystem_class  # imports packages of the protocol

    protocol, _, rest = address.partition("://")
    if PASSWORD.search(address):
        raise ValueError(
            f"{option or PASSWORD.sub('', address)} holds a password, which would be recorded with the run; remove it, "
            f"and give it as the documentation of {PACKAGES.get(protocol, protocol)} says"
        )
    given = f"{option}={address}" if option else address
    if not is_address(address) or not rest.strip("/"):
        raise ValueError(f"{given} must be an address, such as s3://bucket/run or file:///mnt/run")
    try:
        get_filesystem_class(protocol)
    except ImportError:
        package = PACKAGES.get(protocol, f"the package of fsspec for {protocol}")
        raise ValueError(f"{given} needs {package}, which is not installed; pip install {package}") from None
    except ValueError:
        known = "s3, gs, hf, sftp or file"
        raise ValueError(f"{given} has a protocol that fsspec does not know; use {known}") from None


def hub_refusal(error: BaseException) -> str:
    """Return why the Hugging Face Hub refuses a repository, and what to type; empty for errors of other kinds."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    if isinstance(cause, GatedRepoError):
        return "gated on the Hugging Face Hub; ask for access on its page there, and type hf auth login"
    if isinstance(cause, RepositoryNotFoundError):
        return "not on the Hugging Face Hub, or private; check the name, and if it is private type hf auth login"
    if cause is not None and cause.response.status_code == 401:
        return "closed without a valid login to the Hugging Face Hub; type hf auth login"
    return ""


def explain_remote(error: BaseException) -> str:
    """Return one line on an error of a remote file system, without the signature of an address."""
    if refusal := hub_refusal(error):
        return f"its repository is {refusal}"
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)
    return text[:300] if isinstance(error, OSError) else f"{type(error).__name__}: {text[:300]}"


@dataclass(frozen=True)
class RemoteDirectory:
    """A directory of a remote file system. Its methods raise errors of many classes; see `explain_remote`."""

    address: str
    files: Any
    """File system of fsspec."""
    path: str

    @classmethod
    def open(cls, address: str) -> RemoteDirectory:
        """Open a directory, which need not exist."""
        from fsspec.core import url_to_fs

        files, path = url_to_fs(address, skip_instance_cache=True)
        return cls(address.rstrip("/"), files, path.rstrip("/"))

    def of(self, name: str) -> RemoteDirectory:
        """Return a directory in this one."""
        return RemoteDirectory(f"{self.address}/{name}", self.files, f"{self.path}/{name}")

    def list(self) -> dict[str, dict[str, Any]]:
        """Return fsspec's info of each file and directory in this one, by name; empty if it does not exist.

        Raises FileNotFoundError if its repository of the Hugging Face Hub does not.
        """
        self.files.invalidate_cache()
        try:
            entries = self.files.ls(self.path, detail=True)
        except FileNotFoundError as error:
            if hub_refusal(error):
                raise
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}

    def read(self, name: str) -> bytes:
        """Return the content of a small file; empty if it does not exist."""
        self.files.invalidate_cache()
        try:
            content: bytes = self.files.cat_file(f"{self.path}/{name}")
        except FileNotFoundError:
            return b""
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        self.make()
        self.files.pipe_file(f"{self.path}/{name}", content)

    def remove(self, name: str) -> None:
        """Remove a file; no-op if it does not exist."""
        if name in self.list():
            with contextlib.suppress(FileNotFoundError):  # another host has removed it since
                self.files.rm_file(f"{self.path}/{name}")

    def make(self) -> None:
        """Make the directory, where files need one."""
        protocols = self.files.protocol
        if any(each in WITH_DIRECTORIES for each in ([protocols] if isinstance(protocols, str) else protocols)):
            self.files.makedirs(self.path, exist_ok=True)

    def send(self, source: Path, paced: Callable[[int], None]) -> tuple[int, str]:
        """Send a file; return the size that it has at the target, and the checksum of what was sent.

        paced: called before each chunk with its size; may raise.
        """
        from fsspec.spec import AbstractBufferedFile

        self.make()
        target, digest = f"{self.path}/{source.name}", new_file_checksum()
        with source.open("rb") as content:
            remote = self.files.open(target, "wb", block_size=PART_BYTES)
            try:
                while chunk := content.read(CHUNK_BYTES):
                    paced(len(chunk))
                    digest.update(chunk)
                    remote.write(chunk)
            except BaseException:
                is_object = isinstance(remote, AbstractBufferedFile)
                with contextlib.suppress(Exception):  # that error would hide the first one
                    remote.discard() if is_object else remote.close()
                with contextlib.suppress(Exception):
                    if is_object:
                        remote.closed = True  # closing it would complete the object
                    else:
                        self.files.rm_file(target)
                raise
            remote.close()
        self.files.invalidate_cache()
        return self.files.info(target)["size"], digest.hexdigest()

    def get(self, name: str, target: Path) -> None:
        """Copy a file into a directory, where it is complete or absent."""
        partial = target / f".{name}.partial"
        with self.files.open(f"{self.path}/{name}", "rb") as content, partial.open("wb") as file:
            while chunk := content.read(PART_BYTES):
                file.write(chunk)
        partial.replace(target / name)


def fetch_directory(
    remote: RemoteDirectory, cache: Path, patterns: Collection[str], *, note: Callable[[str], None]
) -> Path:
    """Return a local copy of the files of a remote directory whose names match patterns; copies it at most once.

    A copy that was interrupted continues. Once a file of the directory has changed, it is copied again. cache: of this
    user.
    """
    entries = {name: entry for name, entry in remote.list().items() if entry.get("type") == "file"}
    chosen = {name: entry for name, entry in entries.items() if any(fnmatch(name, each) for each in patterns)}
    if not chosen:
        raise FileNotFoundError(f"{remote.address} holds no files" + (" of a model" if entries else ""))
    versions = [version_of(entry) for entry in chosen.values()]
    key = hashlib.sha256(repr((remote.address, [*chosen], versions)).encode()).hexdigest()[:32]

    def build(directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        total = sum(entry["size"] for entry in chosen.values())
        note(f"copying {len(chosen)} files of {remote.address}, {total / 1e6:,.1f} MB, to {target}")
        for name, entry in chosen.items():
            if not (directory / name).is_file():
                remote.get(name, directory)
            if (size := (directory / name).stat().st_size) != entry["size"]:
                (directory / name).unlink()
                raise OSError(f"{name} has {entry['size']} bytes there, of which {size} were received")

    target = cache / key / remote.address.rpartition("/")[2]
    target.parent.mkdir(parents=True, exist_ok=True)
    return open_cached(target, build, lambda path: path, resumable=True)
