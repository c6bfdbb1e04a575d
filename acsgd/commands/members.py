"""Files that this host gets from members of a run: connections to them, and directories that are collected from them.

Each file is verified against the manifest, which all hosts have, and is in place or absent. What was received of a file
is kept, so that the next attempt continues it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from acsgd.commands.invitation import Invitation
from acsgd.config.options import Config
from acsgd.elastic.host.files import (
    DATA,
    MODEL,
    FileSource,
    HeldFiles,
    Listing,
    RemoteFiles,
    check_room,
    check_taken,
    receive,
)
from acsgd.elastic.host.processes import started_at
from acsgd.elastic.membership.messages import SignatureError
from acsgd.errors import CorruptFileError, explain
from acsgd.io.data.sources.sources import files_of
from acsgd.io.files.atomic import build_atomically, fsync_directory
from acsgd.mesh.mesh import Mesh, MeshOptions
from acsgd.notes import print_note, progress_bar
from acsgd.shards.disk import verify_file
from acsgd.shards.manifest import MANIFEST, Manifest, StoredFile

CONNECT_S = 20.0
"""Time to find the hosts of a mesh, and for a host to accept a connection and to greet, seconds."""
RETRY_S = 0.2
"""Time between two attempts to connect, seconds."""


@dataclass(frozen=True)
class ListedSource:
    """A source with what it holds."""

    source: FileSource
    listing: Listing

    @property
    def name(self) -> str:
        return self.source.name

    def held(self, directory: str, sha256: str) -> set[StoredFile]:
        """Return which files of a directory with a manifest it holds."""
        found = self.listing.directories.get(directory, HeldFiles(()))
        return {*found.files} if found.sha256 == sha256 else set()


@contextlib.contextmanager
def open_members(invitation: Invitation) -> Iterator[list[ListedSource]]:
    """Connect to the hosts of a running run. Raises ValueError if none answers, or if this host is a stranger."""
    secret = invitation.current_secret().encode()
    with contextlib.ExitStack() as stack:
        endpoints: Sequence[str] = invitation.endpoints
        if invitation.has_mesh:
            endpoints = _enter_mesh(stack, invitation, secret)
            secret = invitation.run.encode()  # by which daemons sign in a mesh
        found: dict[str, ListedSource] = {}
        problems: list[str] = []
        remedy = "start one of them"
        addresses = [*endpoints]
        for address in addresses:  # which grows
            try:
                remote = _connect(address, invitation.run, secret)
                stack.callback(remote.close)
                found[address] = ListedSource(remote, remote.list())
            except SignatureError:
                problems.append(f"{address} is of another run, or the secret has been replaced")
                remedy = "get the invitation that acsgd host prints now"
                continue
            except (OSError, ValueError) as error:
                problems.append(f"{address}: {explain_short(error)}")
                continue
            addresses += [each for each in found[address].listing.hosts if each not in addresses]
        if not found:
            raise ValueError(f"no host of run {invitation.run} answers ({'; '.join(problems)}); {remedy}")
        for problem in problems:
            print_note(f"a host does not answer and is left out: {problem}")
        yield [*found.values()]


def get_inputs(invitation: Invitation, config: Config) -> None:
    """Get the model, its tokenizer and the files of data that this host lacks from members, to where it looks for them.

    Of layer shards, config, tokenizer and manifest: `ModelFiles` gets the layers that ranks of this host need. A model
    of the Hub, if it cannot be downloaded, goes into a directory of its name. Raises ValueError if no member has what
    is missing.
    """
    model = Path(config.model.name)
    has_model, numbers = (
        _has_model(config),
        [
            (number, Path(name).expanduser())
            for number, name in enumerate(files_of(config.data))
            if not os.path.lexists(Path(name).expanduser())
        ],
    )
    if has_model and not numbers:
        return
    lacks = ", ".join([*([] if has_model else [str(model)]), *(str(path) for _, path in numbers)])
    print_note(f"this host lacks {lacks}; looking for a host of run {invitation.run} that has it")
    with open_members(invitation) as members, progress_bar() as report:
        names = ", ".join(member.name for member in members)
        print_note(f"run {invitation.run}: connected to {names} after {time.monotonic() - started_at():.1f} s")
        if not has_model:
            fetched = _fetch_of(members, MODEL)
            if fetched.sha256:
                _get_description(fetched, model, report)
            elif config.model.init == "pretrained":
                raise ValueError(f"no host has layer shards of {model} to send: copy the model to this host")
            else:
                fetched.collect(model, wanted := fetched.files(), b"", report)
                print_note(f"{model}: {_megabytes(wanted)} MB, verified")
        if numbers:
            fetched = _fetch_of(members, DATA)
            by_number = {int(file.file.partition(".")[0]): file for file in fetched.files()}
            for number, path in numbers:
                if number not in by_number:
                    raise ValueError(f"no host has {path} to send: copy it to this host")
                path.parent.mkdir(parents=True, exist_ok=True)
                fetched.get(path, by_number[number], report)
                print_note(f"{path}: {_megabytes([by_number[number]])} MB, verified")


def _get_description(fetched: DirectoryFetch, model: Path, report: Callable[[int, int], None]) -> None:
    """Get all of a directory of layer shards but its layers. Its manifest names the hosts that hold them."""
    manifest, raw = fetched.manifest()
    hosts = {
        file.file: [each.name for each in fetched.sources if file in each.held(MODEL, fetched.sha256)]
        for file in manifest.trained_files
    }
    fetched.collect(model, manifest.model_files, raw, report, replace(manifest, hosts=hosts).write)
    print_note(
        f"{model}: config and tokenizer, {_megabytes(manifest.model_files)} MB, verified; of the layers, "
        f"{_megabytes(manifest.trained_files)} MB, the ranks of this host get those that they read"
    )


def _has_model(config: Config) -> bool:
    """Return whether a model is on this host, or can be downloaded."""
    if os.path.isdir(config.model.name):
        return True
    from acsgd.shards.hub import find_model  # imports transformers, which takes seconds

    try:
        find_model(config.model.name, option="model.name", weights=config.model.init == "pretrained")
    except ValueError:
        return False
    return True


def list_again(sources: Sequence[ListedSource], directory: str) -> tuple[list[ListedSource], list[str]]:
    """Return the sources with what they hold of a directory that no `Listing` has, and why others do not."""
    found, problems = [], []
    for each in sources:
        try:
            found.append(ListedSource(each.source, Listing({directory: each.source.held(directory)})))
        except (OSError, ValueError, CorruptFileError) as error:
            problems.append(f"{each.name}: {explain(error) or error}")
    return found, problems


def _fetch_of(members: Sequence[ListedSource], directory: str) -> DirectoryFetch:
    """Return how model or data are collected: as the first member has them, from all that have the same."""
    found, problems = list_again(members, directory)
    if not found:
        raise ValueError(
            f"no host can send the {directory} of the run ({'; '.join(problems)}); try again when it trains"
        )
    return DirectoryFetch(found, directory, found[0].listing.directories[directory].sha256)


def _megabytes(files: Sequence[StoredFile]) -> str:
    return f"{sum(file.bytes for file in files) / 1e6:.1f}"


def explain_short(error: OSError | ValueError) -> str:
    """Return what has failed, without a file name, which a connection has not."""
    return str(error.strerror or error) if isinstance(error, OSError) else str(error)


def _enter_mesh(stack: contextlib.ExitStack, invitation: Invitation, secret: bytes) -> list[str]:
    """Take part in the mesh of a run as a host without a port; return the daemons at the endpoints."""
    rejections: dict[str, str] = {}
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="acsgd-")))
    options = MeshOptions(invitation.run, secret, None, invitation.endpoints, listener=None, announced=None)
    mesh = Mesh(
        options,
        directory / "files",  # not as hosts name it: `acsgd net rotate` is for hosts that stay
        on_rejected=lambda address, problem: rejections.update({address: f"{address} {problem}"}),
        on_note=print_note,
    )
    mesh.start()
    stack.callback(mesh.stop)
    until = time.monotonic() + CONNECT_S
    while not mesh.daemons and not rejections.keys() >= {*invitation.endpoints} and time.monotonic() < until:
        time.sleep(RETRY_S)
    if not mesh.daemons:
        problem = "; ".join(rejections.values()) if rejections else f"{', '.join(invitation.endpoints)}: none answers"
        raise ValueError(f"no host of run {invitation.run} can be reached ({problem})")
    return mesh.daemons


def _connect(address: str, run: str, secret: bytes) -> RemoteFiles:
    """Connect to a daemon. In a mesh, its port may not be open on this host yet. Raises OSError, ValueError."""
    until = time.monotonic() + CONNECT_S / 4
    while True:
        try:
            return RemoteFiles(address, run, secret, connect_s=CONNECT_S)
        except ConnectionRefusedError:
            if time.monotonic() >= until:
                raise
        time.sleep(RETRY_S)


class _Interrupted(BaseException):
    """Files could not be collected; what is there is kept. No Exception, after which `build_atomically` removes it."""

    def __init__(self, error: Exception) -> None:
        self.error = error


@dataclass(frozen=True)
class DirectoryFetch:
    """Collects one directory from several sources. sha256: of its manifest; empty for a model without one.

    Raises ValueError if no source has the manifest, or if it lists what is not taken from another host.
    """

    sources: Sequence[ListedSource]
    directory: str
    sha256: str

    def manifest(self) -> tuple[Manifest, bytes]:
        """Return the manifest, parsed and as it is. Raises ValueError if no source has it."""
        problems = []
        for each in self.sources:
            if each.listing.directories.get(self.directory, HeldFiles(())).sha256 != self.sha256:
                continue
            try:
                raw = b"".join(each.source.read(self.directory, MANIFEST, 0))
                if hashlib.sha256(raw).hexdigest() != self.sha256:
                    raise ValueError("its manifest has changed")
                with tempfile.TemporaryDirectory(prefix="acsgd-") as path:
                    (Path(path) / MANIFEST).write_bytes(raw)
                    return Manifest.read(Path(path)), raw
            except CorruptFileError as error:
                problems.append(f"{each.name}: its manifest {error.problem}")
            except (OSError, ValueError) as error:
                problems.append(f"{each.name}: {explain_short(error)}")
        raise ValueError(f"{self.directory} cannot be listed: {'; '.join(problems)}")

    def files(self) -> tuple[StoredFile, ...]:
        """Return the files that the first source has."""
        return self.sources[0].listing.directories[self.directory].files

    def get(self, target: Path, file: StoredFile, report: Callable[[int, int], None]) -> None:
        """Let there be a file of some name. Raises ValueError, OSError."""
        check_taken(file.file)
        partial = target.parent / f".{target.name}.partial"
        check_room(target.parent, file.bytes - _size(partial))
        self._get(partial, target, file, lambda size: report(size, file.bytes))

    @property
    def held(self) -> set[StoredFile]:
        """The files that sources hold."""
        return set[StoredFile]().union(*(each.held(self.directory, self.sha256) for each in self.sources))

    def missing(self, wanted: Sequence[StoredFile]) -> list[str]:
        """Return the names of files that no source holds."""
        held = self.held
        return [file.file for file in wanted if file not in held]

    def collect(
        self,
        target: Path,
        wanted: Sequence[StoredFile],
        manifest: bytes,
        report: Callable[[int, int], None],
        finish: Callable[[Path], None] = lambda path: None,
    ) -> None:
        """Let a directory have some files, and the manifest if there is one. It appears when it is complete.

        finish: called with the directory before it appears. A directory that exists is completed, if it has the same
        manifest. Raises ValueError, OSError.
        """
        for file in wanted:
            check_taken(file.file)
        if os.path.lexists(target):
            own = (target / MANIFEST).read_bytes() if (target / MANIFEST).is_file() else None
            if own != manifest:
                raise ValueError(f"{target} exists and holds something else; it is kept: give another directory, --to")
            self._get_all(target, wanted, report)
            return

        def build(path: Path) -> None:
            try:
                path.mkdir(exist_ok=True)
                self._get_all(path, wanted, report)
                names = {file.file for file in wanted}
                for leftover in path.iterdir():  # of another attempt, for other files
                    if leftover.name not in names:
                        leftover.unlink()
                if manifest:
                    (path / MANIFEST).write_bytes(manifest)
                finish(path)
            except Exception as error:
                raise _Interrupted(error) from error

        try:
            is_new = build_atomically(target, build, resumable=True)
        except _Interrupted as interrupted:
            raise interrupted.error from None
        if not is_new:
            raise ValueError(f"{target} was created by another process meanwhile and is kept")

    def _get_all(self, path: Path, wanted: Sequence[StoredFile], report: Callable[[int, int], None]) -> None:
        needed = [file for file in wanted if not _is_valid(path, file)]
        begun = sum(min(_size(_partial(path, file)), file.bytes) for file in needed)
        total = sum(file.bytes for file in needed)
        check_room(path.parent, total - begun)
        done = 0
        for file in needed:
            self._get(
                _partial(path, file),
                path / file.file,
                file,
                lambda size, before=done: report(before + size, total),  # type: ignore[misc]
            )
            done += file.bytes
        fsync_directory(path)

    def _get(self, partial: Path, target: Path, file: StoredFile, report: Callable[[int], None]) -> None:
        """Get a file from the first source that has it and does not fail."""
        problems = []
        for each in self.sources:
            if file not in each.held(self.directory, self.sha256):
                continue
            try:
                receive(each.source, self.directory, file, partial, report)
            except (OSError, ValueError) as error:
                problems.append(f"{each.name}: {explain(error) or error}")
                continue
            partial.replace(target)
            return
        raise ValueError(f"{file.file} could not be received ({'; '.join(problems)}); type the same command again")


def _partial(path: Path, file: StoredFile) -> Path:
    return path / f".{file.file}.partial"


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _is_valid(path: Path, file: StoredFile) -> bool:
    try:
        verify_file(path / file.file, file)
    except CorruptFileError:
        return False
    return True
