"""Uploads of checkpoints, in a thread that training never waits for.

An upload is complete when its manifest is at the target, which is written last. Until then a file there lists what was
sent and verified, so that an upload that was cut continues. Of hosts with disks of their own, each sends the files that
were written on it; the first one waits for the others, and writes the manifest.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from acsgd.io.checkpoint.copies import Disks, RateLimit
from acsgd.io.files.atomic import write_once
from acsgd.io.files.remote import RemoteDirectory, explain_remote
from acsgd.shards.manifest import MANIFEST, Manifest, StoredFile

SENT = ".sent-{}.json"
"""Name of the list of files that a disk has sent."""
OWNER = "run.txt"
"""Name of the file at the address that names the run whose checkpoints it holds: its log.dir, and its id."""
POLL_S = 2.0
"""Seconds between two looks at what other hosts have sent."""
OTHERS_S = 600.0
"""Time without a new file of another host after which it counts as failed, seconds."""
SUPERSEDED_S = 60.0
"""The same if there is a newer checkpoint to send."""


class UploadingRun(NamedTuple):
    """The run whose checkpoints are uploaded. No other run may use the address."""

    log_dir: str
    id: str
    """Different for runs that have the same log.dir."""
    id_file: Path
    """File on this disk that keeps the id over resumes."""
    resumed: Path | None
    """Checkpoint from which this start resumes; a run may take over the address that holds it."""


class _EndedError(Exception):
    """The upload is closed."""


class Uploader:
    """Sends the newest checkpoint of a run to an address. A context manager: leaving it ends the upload in progress.

    disk: number of this disk; bytes_per_s: maximum rate; None = no limit. note: called from the thread with one
    sentence per upload, or failure.
    """

    def __init__(
        self,
        address: str,
        disks: Disks,
        disk: int,
        *,
        run: UploadingRun,
        bytes_per_s: float | None,
        note: Callable[[str], None],
    ) -> None:
        self._address, self._disks, self._disk, self._run = address, disks, disk, run
        self._limit = RateLimit(bytes_per_s)
        self._note = note
        self._next: Path | None = None
        self._current: Path | None = None
        self._failed: Path | None = None
        self._has_ended = False
        self._has_claimed = False
        self._sent_bytes = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)

    def __enter__(self) -> Uploader:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def submit(self, checkpoint: Path) -> None:
        """Send a checkpoint, the newest one, once the upload in progress has ended."""
        with self._changed:
            self._next = checkpoint
            self._changed.notify_all()

    def is_reading(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint is being sent, or is the next one, and must not be removed."""
        with self._changed:
            return checkpoint in (self._current, self._next)

    def wait(self, within_s: float) -> bool:
        """Wait for the end of all uploads; return False if they have not ended in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and self._current is None, within_s)

    @property
    def failed(self) -> Path | None:
        """Checkpoint whose upload was the last one to fail."""
        return self._failed

    @property
    def sent_bytes(self) -> int:
        """Number of bytes sent so far."""
        return self._sent_bytes

    def _work(self) -> None:
        while True:
            with self._changed:
                self._current = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._next is not None or self._has_ended)
                if self._has_ended:
                    return
                self._current, self._next = self._next, None
            assert self._current is not None
            try:
                self._upload(self._current)
            except _EndedError:
                return
            except Exception as error:  # packages of protocols raise errors of many classes
                if not self._current.is_dir():
                    self._note(f"{self._current.name} was removed before it was uploaded")
                    continue
                self._note(
                    f"{self._current.name} could not be uploaded to {self._address}: {explain_remote(error)}; "
                    "the next save, or the same command, tries again"
                )
                self._failed = self._current

    def _upload(self, checkpoint: Path) -> None:
        started, before = time.monotonic(), self._sent_bytes
        target = RemoteDirectory.open(self._address)
        self._claim(target)
        if self._failed not in (None, checkpoint):
            self._remove_failed(target)
        remote = target.of(checkpoint.name)
        manifest, content = Manifest.read(checkpoint), (checkpoint / MANIFEST).read_bytes()
        former = remote.read(MANIFEST)
        if former == content:
            return
        sent = self._sent(manifest, remote, self._disk)
        for file in manifest.files:
            if self._disk_of(manifest, file) == self._disk and sent.get(file.file) != file.checksum:
                if former:  # of another checkpoint, whose files are replaced from here on
                    remote.remove(MANIFEST)
                    former = b""
                size, checksum = remote.send(checkpoint / file.file, self._paced)
                if (size, checksum) != (file.bytes, file.checksum):
                    raise OSError(f"{file.file} is not there as its manifest says")
                sent[file.file] = checksum
                remote.write(SENT.format(self._disk), json.dumps(sent).encode())
        if self._disk > 0:
            return
        others = sorted({self._disk_of(manifest, file) for file in manifest.files} - {self._disk})
        self._wait_for(manifest, remote, others)
        remote.write(MANIFEST, content)
        for disk in (self._disk, *others):
            remote.remove(SENT.format(disk))
        mb, seconds = (self._sent_bytes - before) / 1e6, time.monotonic() - started
        self._note(f"uploaded {checkpoint.name} to {remote.address}, {mb:,.1f} MB in {seconds:.1f} s")

    def _remove_failed(self, target: RemoteDirectory) -> None:
        """Remove what this disk has sent of a checkpoint that failed and is superseded: the target may be full."""
        assert self._failed is not None
        remote, sent = target.of(self._failed.name), SENT.format(self._disk)
        if not remote.read(MANIFEST):
            for name in (*json.loads(remote.read(sent) or b"{}"), sent):
                remote.remove(name)
        self._failed = None

    def _claim(self, target: RemoteDirectory) -> None:
        """Raise OSError if an address is that of another run; note there that it is that of this one.

        A start that resumes from a checkpoint there, without the disk of the run that saved it, takes the address over.
        """
        owner = target.read(OWNER).decode()
        log_dir, _, id_ = owner.partition("\n")
        if owner and log_dir != self._run.log_dir:
            raise OSError(
                f"it holds checkpoints of the run with log.dir={log_dir}, not {self._run.log_dir}; give each run an "
                f"address of its own, or remove {OWNER} there"
            )
        if id_ not in ("", self._run.id) and (self._has_claimed or not self._continues(target)):
            raise OSError(
                f"it holds checkpoints of another run with log.dir={log_dir}; to continue that one, give "
                f"checkpoint.resume={self._address}, else give each run an address of its own"
            )
        if id_ != self._run.id:
            target.write(OWNER, f"{self._run.log_dir}\n{self._run.id}".encode())
        if not self._has_claimed:
            self._keep_id()
        self._has_claimed = True

    def _keep_id(self) -> None:
        """Write the id to its file, which several disks of checkpoints may share: they write the same."""
        with contextlib.suppress(FileNotFoundError):
            if self._run.id_file.read_text() == self._run.id:
                return
        self._run.id_file.unlink(missing_ok=True)
        write_once(self._run.id_file, self._run.id)

    def _continues(self, target: RemoteDirectory) -> bool:
        """Return whether this start resumes from a checkpoint at an address, or from a copy of one."""
        resumed = self._run.resumed
        return resumed is not None and (resumed / MANIFEST).read_bytes() == target.of(resumed.name).read(MANIFEST)

    def _sent(self, manifest: Manifest, remote: RemoteDirectory, disk: int) -> dict[str, str]:
        """Return the checksums of the files that a disk has sent, by name, of those that have the manifest's size."""
        sent: dict[str, str] = json.loads(remote.read(SENT.format(disk)) or b"{}")
        entries, sizes = remote.list(), {file.file: file.bytes for file in manifest.files}
        return {
            name: checksum
            for name, checksum in sent.items()
            if name in entries and entries[name]["size"] == sizes.get(name)
        }

    def _disk_of(self, manifest: Manifest, file: StoredFile) -> int:
        """Return the disk that sends a file: the one on which it was written."""
        hosts = manifest.hosts.get(file.file)
        return self._disks.names.index(hosts[0]) if hosts and hosts[0] in self._disks.names else 0

    def _wait_for(self, manifest: Manifest, remote: RemoteDirectory, others: list[int]) -> None:
        """Wait until other hosts have sent their files. Raises OSError if they send nothing more."""
        known, changed_at = -1, time.monotonic()
        while True:
            sent = {name: sum_ for disk in others for name, sum_ in self._sent(manifest, remote, disk).items()}
            missing = [
                file.file
                for file in manifest.files
                if self._disk_of(manifest, file) in others and sent.get(file.file) != file.checksum
            ]
            if not missing:
                return
            if len(sent) != known:
                known, changed_at = len(sent), time.monotonic()
            with self._changed:
                limit_s = SUPERSEDED_S if self._next is not None else OTHERS_S
                self._changed.wait_for(lambda: self._has_ended, POLL_S)
                if self._has_ended:
                    raise _EndedError
            if time.monotonic() - changed_at > limit_s:
                hosts = ", ".join(sorted({self._disks.names[disk] for disk in others}))
                raise OSError(f"{len(missing)} files of {hosts} have not come, {missing[0]} first")

    def _paced(self, size: int) -> None:
        if self._has_ended:
            raise _EndedError
        self._limit.wait(size)
        self._sent_bytes += size
