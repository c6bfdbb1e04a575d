"""Errors that end a run, and errors of libraries and of the system in one sentence."""

from __future__ import annotations

import contextlib
import difflib
import errno
import operator
import os
import re
import socket
import stat
from collections.abc import Iterable
from pathlib import Path

REMEDIES = {
    errno.ENOSPC: "free space on its disk, or give a path on another one",
    errno.EDQUOT: "free space within the quota, or give a path on another disk",
    errno.EACCES: "give this user access to it, or give another path",
    errno.EPERM: "give this user access to it, or a path on a file system that allows this",
    errno.ENOTSUP: "give a path on a file system that can do this",
    errno.ENOSYS: "give a path on a file system that can do this",
    errno.EROFS: "give a path on a file system that can be written",
    errno.ENOENT: "give the path of an existing file",
    errno.EISDIR: "remove the directory, or give the path of a file",
    errno.ENOTDIR: "give a path whose parents are directories",
    errno.EEXIST: "remove it, or give another path",
    errno.ENAMETOOLONG: "give a path with shorter names",
    errno.ELOOP: "remove the symbolic link that leads back to itself",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or give a path on another disk",
    errno.EMFILE: "raise the limit on open files: ulimit -n 65536",
    errno.ENFILE: "raise the system's limit on open files, fs.file-max",
    errno.ENOMEM: "use fewer processes per host, or a host with more memory",
    errno.EIO: "check its disk",
    errno.ESTALE: "check its network file system, and start the run again",
    errno.EADDRINUSE: "end the process that uses it, or start torchrun with another port",
}
"""What to do about a system error, by its errno."""


class InputError(ValueError):
    """Base class of errors in the user's input. The message says what to do."""


class RunError(RuntimeError):
    """A failure outside this process (a lost peer, a corrupt file). The message says what to do.

    awaited: ranks that this rank waited for in vain; empty if the cause itself is known.
    """

    def __init__(self, message: str, *, awaited: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.awaited = tuple(awaited)


class RefusedError(RunError):
    """This host cannot take part in the run: starting its workers again would not help."""


class AfterLastStepError(RunError):
    """Training is complete and saved, but not what follows it. All ranks raise it together."""


class SaveError(RunError):
    """A save has failed, and it was the last one or checkpoint.on_error is "stop". All ranks raise it together.

    failure: what has failed; ranks: those whose files could not be written.
    """

    def __init__(self, failure: str, ranks: Iterable[int]) -> None:
        super().__init__(f"{failure}; fix the cause and start the run again")
        self.failure = failure
        self.ranks = tuple(ranks)


class ConnectError(RunError):
    """The groups of a run could not be formed: another rank has not come, or has ended meanwhile."""


class WaitInterruptedError(Exception):
    """The waits of this rank for other ranks were interrupted; the message says why.

    Not a RuntimeError: the code between must not take it for the failure of a peer.
    """


BEFORE_TRAINING, IN_TRAINING = 2, 1
"""Exit codes of failures. One before training would occur again if the process were started again."""


class ReportedError(SystemExit):
    """A failure that has been reported to the user. The entry of the program ends the process with its exit code.

    At once: threads may still wait in gloo or in the store, and Python would abort when they return while it ends.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.exit_code = code


class CorruptFileError(RunError):
    """A file of a model, a checkpoint or a cache is missing, unreadable or not as it was written."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(f"{path} {message}")
        self.path = path
        self.problem = message


class NonFiniteError(RunError):
    """Loss or gradients are not finite. All ranks raise it in the same step, so that none waits for another."""


def reason(error: Exception) -> str:
    """Return the message of a gloo error without its source location and its advice."""
    return re.sub(r"^\[\S+\] ", "", str(error)).partition(". This is typically")[0]


def printable(text: str) -> str:
    """Return a text in one line for every terminal: control characters are escaped, long words are shortened."""
    text = re.sub(r"\S{400,}", lambda word: f"{word[0][:150]}...{word[0][-50:]}", text)
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def explain(error: BaseException) -> str | None:
    """Return one sentence on an error that has its cause outside the program; None for any other error."""
    if isinstance(error, RunError | WaitInterruptedError):
        return str(error)
    if isinstance(error, socket.gaierror):
        return f"a host name cannot be resolved: {error.strerror}"
    if isinstance(error, OSError) and error.errno:
        paths = " -> ".join(_name(path) for path in (error.filename, error.filename2) if path is not None)
        remedy = REMEDIES.get(error.errno)
        if not paths and error.errno == errno.ENOENT:
            return f"the current directory does not exist any more ({error.strerror}); change to another one"
        free = _free_bytes(error.filename) if error.errno == errno.ENOSPC else ""
        problem = error.strerror or os.strerror(error.errno)
        return f"{paths or 'a file'}: {problem}" + (f"; {remedy}{free}" if remedy else "")
    if isinstance(error, UnicodeEncodeError):
        excerpt = error.object[max(0, error.start - 40) : error.end + 40]
        return f"{excerpt} is not valid UTF-8; rename it"
    if is_out_of_memory(error):
        return "out of memory; use a smaller pp.micro, more pp.stages, or fewer processes per host"
    if isinstance(error, ImportError):
        return f"a package cannot be imported: {' '.join(str(error).split())}; install acsgd and its dependencies again"
    return None


def similar(name: str, names: Iterable[str]) -> list[str]:
    """Return those of some names that are likely to be meant by a misspelled one, the most similar first.

    Numbers are no misspelling: nobody who writes int4 means int8.
    """
    digits = re.findall(r"\d+", name)
    near = difflib.get_close_matches(name, names)  # transposed letters count twice
    near = [
        each
        for each in near
        if sorted(each) == sorted(name)
        or difflib.get_close_matches(name, [each], cutoff=0.8)
        or (len(each) == len(name) > 3 and sum(map(operator.ne, each, name)) == 1)
    ]
    return [each for each in near if re.findall(r"\d+", each) == digits]


def missing(path: Path) -> str:
    """Return a predicate on a path that does not exist: "does not exist (the nearest is ...)"."""
    return f"does not exist{nearest_path(path)}"


def nearest_path(path: Path) -> str:
    """Return " (the nearest is ...)" with an existing path in place of one that does not exist, if one is near."""
    nearest = _nearest(path)
    return f" (the nearest is {nearest})" if nearest else ""


def _nearest(path: Path) -> Path | None:
    """Return the existing path that is nearest to a missing one: of checkpoints by step, of others by spelling."""
    parent = next((parent for parent in path.parents if parent.is_dir()), Path())
    name, *rest = path.relative_to(parent).parts
    names = list[str]()
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(parent))
    near = similar(name, names)
    if step := _STEP.fullmatch(name):
        steps = {int(found[1]): each for each in names if (found := _STEP.fullmatch(each))}
        near = [steps[min(steps, key=lambda each: abs(each - int(step[1])))]] if steps else []
    if not near:
        return None
    nearest = Path(parent, near[0], *rest)
    return nearest if nearest.exists() else _nearest(nearest) or Path(parent, near[0])


_STEP = re.compile(r"step-(\d+)")
"""Name of a checkpoint."""


def kind_of_file(mode: int) -> str:
    """Return what a file is by its st_mode, as in "a directory", without the article."""
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def _free_bytes(path: object) -> str:
    """Return " (... bytes are free)" of the disk of a file that could not be written; empty if that is unknown.

    What was written of the file may have been removed by now, and so may its directory.
    """
    with contextlib.suppress(OSError, TypeError):
        parents = Path(os.fsdecode(path)).absolute().parents  # type: ignore[arg-type]
        status = os.statvfs(next(parent for parent in parents if parent.exists()))
        return f" ({status.f_bavail * status.f_frsize:,} bytes are free now)"
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is that of Python's allocator, or of torch's for the CPU or a GPU."""
    texts = ("can't allocate memory", "out of memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
    )


def _name(path: object) -> str:
    """Return a path of any type as text."""
    return os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else f"file descriptor {path}"
