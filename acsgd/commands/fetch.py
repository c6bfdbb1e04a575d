"""The command `acsgd fetch`: one whole checkpoint of a run whose hosts have disks of their own, on this host."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import tyro

from acsgd.commands.invitation import Invitation, known_invitations, private_file, write_privately
from acsgd.config.ranges import COUNT
from acsgd.notes import print_note, progress_bar

if TYPE_CHECKING:  # import torch, which takes seconds
    from acsgd.commands.members import DirectoryFetch, ListedSource
    from acsgd.shards.manifest import Manifest, StoredFile


@dataclass(frozen=True)
class FetchCommand:
    """Collect one whole checkpoint of an elastic run on this host, from the hosts that have parts of it.

    The files that this host has stay; the others come from running hosts, and from directories given with --from. All
    are verified. What running hosts have counts before what directories on this host have. An interrupted fetch
    continues when the same command is started again.
    """

    run_name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory or checkpoint of this host, as acsgd inspect takes; or an invitation, or a file with one."""
    step: Annotated[int, COUNT] | None = None
    """Which checkpoint. Default: the newest one that is complete."""
    best: bool = False
    """Take the checkpoint with the best evaluation instead."""
    state: bool = False
    """Whether the state of all replicas is taken, too, with which a run resumes."""
    weights: bool = False
    """Take the weights alone, into --to, from which no run resumes. With AdamW a third of the bytes."""
    to: Path | None = None
    """Directory of the checkpoint to create. Default: where this host has it as a member of the run."""
    from_: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="from")] = ()
    """Run directory or directory of checkpoints of a host that has ended: mounted, or copied. Can be repeated."""

    def run(self) -> None:
        """Run the command. Raises ValueError if the checkpoint cannot be completed."""
        from acsgd.commands.members import DirectoryFetch

        if self.best and self.step is not None:
            raise ValueError("--best and --step are two checkpoints; give one of them")
        if self.weights and (self.state or self.to is None):
            raise ValueError(
                "--weights takes no state of optimizer and replicas, and the checkpoints of a run have both: give it "
                "with --to, a directory to create, and without --state"
            )
        checkpoints, step, invitation = self._find()
        if step is not None and (self.best or self.step not in (None, step)):
            raise ValueError(
                f"{self.run_name} is one checkpoint already; give its run directory, or no --step or --best"
            )
        with self._sources(checkpoints, invitation) as (local, running):
            name, sha256 = self._choose(local, running, step or self.step)
            fetched = DirectoryFetch([*local, *running], name, sha256)
            manifest, raw = fetched.manifest()
            target, wanted = self.to or checkpoints / name, _files(manifest, has_state=self.state)
            with progress_bar() as report:
                if self.weights:
                    wanted = _collect_weights(fetched, manifest, raw, target, report)
                else:
                    fetched.collect(target, wanted, raw, report)
        has_all = len(wanted) == len(manifest.files)
        print(
            f"{target} has all {len(wanted)} files of step {manifest.step}"
            + (", weights alone" if self.weights else "" if has_all else ", without the state of replicas (--state)")
            + f", {sum(file.bytes for file in wanted) / 1e6:.1f} MB, verified"
        )

    def _find(self) -> tuple[Path, int | None, Invitation | None]:
        """Return the directory of the run's checkpoints, the step if RUN is that of a checkpoint, and an invitation."""
        from acsgd.io.checkpoint.directory import CHECKPOINTS, CheckpointDirectory, step_of

        path = Path(self.run_name)
        if not os.path.isdir(path):  # also for a text that is too long for a path
            invitation = Invitation.open(self.run_name)
            if not os.path.isfile(path):
                self._restart(invitation)
            return _checkpoints_of(invitation), None, invitation
        step = step_of(path.resolve())
        if step is not None:
            path = path.resolve().parent
        elif not CheckpointDirectory(path).steps():
            path = path / CHECKPOINTS
        known = [each for each in known_invitations() if _checkpoints_of(each).resolve() == path.resolve()]
        if not known and not self.from_:
            raise ValueError(
                f"this host knows no invitation to the run of {self.run_name}: type acsgd fetch INVITATION "
                f"--to {self.to or path / 'step-XXXXXXXX'} with what acsgd host printed, or give --from with the "
                "directories of its other hosts, mounted or copied"
            )
        return path, step, known[0] if known else None

    def _restart(self, invitation: Invitation) -> NoReturn:
        """Run the command again, without the secret on the command line, which other users of this host can see."""
        write_privately(file := private_file(f"{invitation.run}.fetch"), invitation.encode())
        options = {"--step": self.step, "--to": self.to}
        arguments = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        arguments += [
            name
            for name, value in {"--best": self.best, "--state": self.state, "--weights": self.weights}.items()
            if value
        ]
        arguments += [word for path in self.from_ for word in ("--from", str(path))]
        os.execv(sys.executable, [sys.executable, "-m", "acsgd.cli", "fetch", str(file), *arguments])

    @contextlib.contextmanager
    def _sources(
        self, checkpoints: Path, invitation: Invitation | None
    ) -> Iterator[tuple[list[ListedSource], list[ListedSource]]]:
        """Return the directories on this host, and the running hosts."""
        from acsgd.commands.members import ListedSource, open_members
        from acsgd.elastic.host.files import LocalFiles
        from acsgd.elastic.membership.messages import SharedFiles
        from acsgd.io.checkpoint.directory import checkpoints_of

        directories = [checkpoints] if checkpoints.is_dir() else []
        for path in self.from_:
            if not path.is_dir() or not (found := checkpoints_of(path)):
                raise ValueError(f"--from {path} is no run directory and no directory of checkpoints")
            directories.append(found[0].parent)
        files = [LocalFiles(SharedFiles(str(path))) for path in directories]
        local, running = [ListedSource(each, each.list()) for each in files], list[ListedSource]()
        with contextlib.ExitStack() as stack:
            if invitation is not None:
                try:
                    running = stack.enter_context(open_members(invitation))
                except ValueError as error:
                    if not self.from_:
                        raise
                    print_note(str(error))
            yield local, running

    def _choose(
        self, local: Sequence[ListedSource], running: Sequence[ListedSource], step: int | None
    ) -> tuple[str, str]:
        """Return name and manifest of the checkpoint to collect. Raises ValueError if none is complete."""
        from acsgd.commands.members import DirectoryFetch

        sources, problems = [*local, *running], list[str]()
        for candidate in self._candidates(local, running, step):
            fetched = DirectoryFetch(sources, *candidate)
            try:
                manifest, _ = fetched.manifest()
            except ValueError as error:
                problems.append(str(error))
                continue
            if not (missing := fetched.missing(_files(manifest, has_state=self.state))):
                for problem in (*problems, *_conflicts(candidate, local, running)):
                    print_note(problem)
                return candidate
            hosts = " and ".join(manifest.hosts.get(missing[0], ())) or "a host that does not answer"
            problems.append(f"{candidate[0]} lacks {len(missing)} files, the first one is {missing[0]} of {hosts}")
        raise ValueError(f"no checkpoint is complete: {'; '.join(problems)}; start these hosts, or give --from")

    def _candidates(
        self, local: Sequence[ListedSource], running: Sequence[ListedSource], step: int | None
    ) -> list[tuple[str, str]]:
        """Return names and manifests of the checkpoints that are asked for, the first choice first.

        Those of running hosts come first: directories on this host may be of steps that the run has given up. Raises
        ValueError if there are none.
        """
        from acsgd.io.checkpoint.directory import CheckpointDirectory

        current, counts = _listed(running), _listed([*local, *running])
        name = None if step is None else CheckpointDirectory(Path()).of(step).name
        if self.best:
            name = next((each.listing.best for each in (*running, *local) if each.listing.best), None)
            if name is None:
                raise ValueError("no host has a best checkpoint: the run has no checkpoint.best, or no evaluation yet")
        names = {each for each, _ in current}
        found = [each for each in counts if name in (None, each[0]) and (each in current or each[0] not in names)]
        if not found:
            have = ", ".join(sorted({each for each, _ in counts})) or "none"
            raise ValueError(f"no host has {name or 'a checkpoint'}; checkpoints there: {have}")
        return sorted(found, key=lambda each: (each in current, each[0], counts[each]), reverse=True)


def _listed(sources: Sequence[ListedSource]) -> Counter[tuple[str, str]]:
    """Return how many sources have files of each checkpoint, by name and hash of its manifest."""
    held = [each.listing.directories.items() for each in sources]
    return Counter((name, files.sha256) for items in held for name, files in items if files.sha256)


def _conflicts(
    chosen: tuple[str, str], local: Sequence[ListedSource], running: Sequence[ListedSource]
) -> Iterator[str]:
    """Yield a sentence on each way in which this host and running hosts differ about the chosen checkpoint."""
    name, sha256 = chosen
    if running and chosen not in _listed(running):
        yield f"no running host has {name}: the run may have given up its steps"
    for each in local:
        if any(other[0] == name and other[1] != sha256 for other in _listed([each])):
            yield f"{each.name} has another {name}, which is left out"


def _files(manifest: Manifest, *, has_state: bool) -> list[StoredFile]:
    """Return the files that are taken: without the state of replicas, if that may be elsewhere."""
    states = {file.file for files in manifest.replicas.values() for file in files}
    return [file for file in manifest.files if has_state or file.file not in states or file.file not in manifest.hosts]


def _collect_weights(
    fetched: DirectoryFetch, manifest: Manifest, raw: bytes, target: Path, report: Callable[[int, int], None]
) -> list[StoredFile]:
    """Collect the weights of a checkpoint as layer shards; return the files that were wanted."""
    from acsgd.commands.members import DirectoryFetch, list_again
    from acsgd.elastic.host.files import WEIGHTS
    from acsgd.shards.config import read_config
    from acsgd.shards.disk import ShardDirectory
    from acsgd.shards.export import write_model_files
    from acsgd.shards.manifest import MANIFEST, config_checksum

    sources, problems = list_again(fetched.sources, fetched.directory + WEIGHTS)
    weights = DirectoryFetch(sources, fetched.directory + WEIGHTS, fetched.sha256)
    states = {file for files in manifest.replicas.values() for file in files}
    found = {file.file: file for file in weights.held}
    names = [file.file for file in manifest.files if file not in states]
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"no host can send the weights in {missing[0]} ({'; '.join(problems) or 'it is corrupt'})")

    def finish(path: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="acsgd-") as original:
            (Path(original) / MANIFEST).write_bytes(raw)
            for file in manifest.model_files:
                shutil.copyfile(path / file.file, Path(original) / file.file)
            config = read_config(Path(original), manifest.task, is_valid=lambda config: True)
            listed = write_model_files(ShardDirectory(Path(original)), config, (), path)
        tensors = manifest.tensors and replace(manifest.tensors, config=config_checksum(listed))
        replace(
            manifest,
            layers={name: found[file.file] for name, file in manifest.layers.items()},
            tables={name: found[file.file] for name, file in manifest.tables.items()},
            replicas={},
            model_files=listed,
            run=None,
            hosts={},
            tensors=tensors,
        ).write(path)

    wanted = [found[name] for name in names]
    weights.collect(target, wanted, b"", report, finish)
    return wanted


def _checkpoints_of(invitation: Invitation) -> Path:
    """Return the directory of checkpoints of a run's hosts."""
    from acsgd.io.checkpoint.directory import CHECKPOINTS

    options = tomllib.loads(invitation.options)
    return Path(options.get("checkpoint", {}).get("dir") or os.path.join(options["log"]["dir"], CHECKPOINTS))
