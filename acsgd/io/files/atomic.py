"""Files and directories that appear under their name only when they are complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from acsgd.errors import InputError

PREFIX, SUFFIX = ".acsgd-", ".partial"
"""Start and end of the name of the hidden directory of a build; a random text lies between them."""
RESUMABLE = ".resumable"
"""End of the name of the hidden directory of a build that can be continued; the name of the result lies before it."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, a quota or a file size limit that has no room for a file."""
UNSUPPORTED = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EPROTO, errno.EROFS)
"""Errors of a file system that does not have links, or renames: exFAT, a mounted object store, a folder that a virtual
machine shares with its host."""
COMPLETING = ("manifest.json", "checksums")
"""Names of files without which the directory that they are in is incomplete."""


class BuildInProgressError(InputError):
    """Another process continues the same resumable build."""


def build_atomically(path: Path, build: Callable[[Path], None], *, resumable: bool = False) -> bool:
    """Build `path` and return True; return False, without a change, if another process has built it meanwhile.

    build: writes a file or directory at the path it is given, which has the name of `path` and is renamed to it at the
    end, when it is on disk. If it raises, everything it wrote is removed, new parent directories included. What a
    killed process left beside `path` is removed, too. A full disk is an OSError that names `path`.

    resumable: what is written is kept if the process is killed or interrupted (by an exception that is no Exception),
    and the next build of `path` gets it. Raises BuildInProgressError if another process is at it.
    """
    with _parents_of(path), _partial_directory(path, resumable=resumable) as partial:
        try:
            build(partial / path.name)
            _fsync(partial / path.name)
        except OSError as error:
            if error.errno in FULL:  # it names the hidden directory, or no file
                raise OSError(error.errno, error.strerror, str(path)) from None
            raise
        is_first = _rename(partial / path.name, path)
        fsync_directory(path.parent)
        return is_first


def check_space(directory: Path, nbytes: int, what: str) -> None:
    """Raise OSError if the disk of a directory has no room for a number of bytes. what: they are."""
    disk = shutil.disk_usage(directory)
    if nbytes > disk.free and disk.total:  # else it is a file system that does not know its size
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {nbytes:,} bytes of {what}", str(directory))


def describe_build(path: Path) -> str | None:
    """Return which process builds `path` and what it has written, None if none does."""
    for directory in (resumable_directory(path), *path.parent.glob(f"{PREFIX}*{SUFFIX}")):
        with contextlib.suppress(OSError):  # completed or removed meanwhile
            if os.path.lexists(directory / path.name):
                written = sum(file.lstat().st_size for file in _tree(directory / path.name))
                return f"{(directory / 'lock').read_text()} ({written / 1e6:.1f} MB so far)"
    return None


def describe_stopped_build(path: Path) -> str:
    """Return what a build of `path` by this process, which was stopped, has left."""
    if os.path.lexists(path):
        return f"{path} is complete"
    if os.path.lexists(kept := resumable_directory(path)):
        return f"start the same command again to continue, or remove {kept}"
    for directory in path.parent.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(OSError):  # of another process, which removes it meanwhile
            if (directory / "lock").read_text() == _this_process():
                return f"{directory} is left; remove it"
    return "nothing was written"


def rename(source: Path, target: Path) -> None:
    """Rename a file or a directory.

    Where the file system cannot, its files are moved or copied one by one, those that complete it last.
    """
    try:
        source.rename(target)
        return
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.EXDEV):
            raise
    if source.is_dir() and not source.is_symlink():
        target.mkdir(exist_ok=True)
        for part in sorted(source.iterdir(), key=lambda part: part.name in COMPLETING):
            rename(part, target / part.name)
        source.rmdir()
    else:
        target.unlink(missing_ok=True)
        shutil.copyfile(source, target, follow_symlinks=False)
        _fsync(target)
        source.unlink()


def write_once(path: Path, text: str) -> None:
    """Write a file unless it exists: never in part, and not twice, also if several hosts do so.

    Requires that a hard link to a name that exists fails, as on every local file system and on NFS; without hard links,
    that a file is created once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        _write_new(new, text)
        try:
            os.link(new, path)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            _write_new(path, text)  # not there at once, but still once
    except FileExistsError:
        pass
    finally:
        new.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text file, in place of one that may exist: it is complete, or the former one stays.

    Does not wait until it is on disk. Raises OSError that names `path`.
    """
    partial = path.with_name(f".{path.name}{SUFFIX}")
    try:
        partial.write_text(text, encoding="utf-8")
        rename(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:  # of a full disk, it names no file
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from None
        raise


def _write_new(path: Path, text: str) -> None:
    """Create a file and wait until it is on disk; remove it if that fails. Raises FileExistsError."""
    with path.open("x") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()
            raise


def missing_operations(directory: Path) -> list[str]:
    """Return which of symbolic links, hard links and renames of directories the file system of a directory lacks."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, suffix=SUFFIX, dir=directory) as made:
        path = Path(made)
        (path / "file").touch()
        (path / "directory").mkdir()
        operations = {
            "symbolic links": lambda: os.symlink("file", path / "symbolic"),
            "hard links": lambda: os.link(path / "file", path / "hard"),
            "renames of directories": lambda: os.rename(path / "directory", path / "renamed"),
        }
        return [name for name, attempt in operations.items() if not _is_supported(attempt)]


def _is_supported(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return True


def fsync_directory(directory: Path) -> None:
    """Wait until the entries of a directory are on disk, if its file system can."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError that is raised in the context the name of the file, which those of write and fsync lack."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def flush(path: Path) -> None:
    """Wait until the content of a file is on disk."""
    with naming(path), path.open("rb") as file:
        os.fsync(file.fileno())


def _tree(path: Path) -> list[Path]:
    """Return a file, or a directory after everything in it."""
    return [*path.rglob("*"), path]


def _fsync(path: Path) -> None:
    """Wait until a file, or a directory with everything in it, is on disk."""
    for part in _tree(path):
        if part.is_dir():
            fsync_directory(part)
        else:
            flush(part)


def _rename(built: Path, path: Path) -> bool:
    if os.path.lexists(path):
        return False
    try:
        rename(built, path)
    except OSError as error:  # of two directories, one gets the name
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def resumable_directory(path: Path) -> Path:
    """Return the directory of a build of `path` that can be continued."""
    return path.parent / f"{PREFIX}{path.name}{RESUMABLE}"


@contextlib.contextmanager
def _partial_directory(path: Path, *, resumable: bool) -> Iterator[Path]:
    """Create a directory for a build beside `path`, and remove it at the end, and those of processes that were killed.

    The file "lock" in it is locked while its process lives, and names it.
    """
    for leftover in path.parent.glob(f"{PREFIX}*{SUFFIX}"):
        _remove_if_unlocked(leftover)
    resumable = resumable and _has_locks(path.parent)  # without, two processes would write the same directory
    directory, lock = _resumable_directory(path) if resumable else _new_directory(path.parent)
    is_kept = False
    try:
        yield directory
    except Exception:
        raise
    except BaseException:
        is_kept = resumable and os.path.lexists(directory / path.name)  # it was not renamed
        raise
    finally:
        if not is_kept:
            shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _new_directory(parent: Path) -> tuple[Path, int]:
    """Return a new directory and the descriptor of its lock."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, suffix=SUFFIX, dir=parent))
        if (lock := _try_lock(directory)) is not None:
            return directory, lock


def _resumable_directory(path: Path) -> tuple[Path, int]:
    """Return the directory of a build that can be continued, and the descriptor of its lock."""
    directory = resumable_directory(path)
    while True:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        if directory.is_symlink():
            raise ValueError(f"{directory} is a link; remove it")
        if (lock := _try_lock(directory)) is not None:
            return directory, lock
        with contextlib.suppress(FileNotFoundError):  # completed meanwhile
            holder = (directory / "lock").read_text()
            raise BuildInProgressError(f"{path} is being written by {holder}; wait for it, or end it")


def _try_lock(directory: Path) -> int | None:
    """Lock a directory and return the descriptor; None if another process holds the lock or has removed it."""
    try:
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    if _lock(lock) is not False and os.fstat(lock).st_nlink:
        os.truncate(lock, 0)
        os.write(lock, _this_process().encode())
        return lock
    os.close(lock)
    return None


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _remove_if_unlocked(directory: Path) -> None:
    if directory.is_symlink():
        return  # not of a build
    with contextlib.suppress(OSError):  # not a directory, or another process removes it
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if _lock(lock):
            shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _has_locks(directory: Path) -> bool:
    """Whether the file system of a directory has locks."""
    with tempfile.TemporaryFile(dir=directory) as file:
        return _lock(file.fileno()) is not None


def _lock(descriptor: int) -> bool | None:
    """Lock an open file; return False if another process holds the lock, None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def _parents_of(path: Path) -> Iterator[None]:
    """Create the parents of `path`; if the body raises, remove those that were created, if empty."""
    missing = [parent for parent in path.absolute().parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # not empty: another build uses it
            for parent in missing:
                parent.rmdir()
        raise
