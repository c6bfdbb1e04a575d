"""Asynchronous checkpoints.

Training waits while the state is copied to host memory (`snapshot`). One thread per rank does the rest (`write`): it
writes the files and reports to the other ranks; the leader of each disk (see `acsgd.io.checkpoint.copies`) then gets
copies of files from other disks, completes and publishes the checkpoint. Extra host memory per rank: one copy of what
it writes, at most 12 bytes per parameter of its layers (weights and two AdamW moments in fp32), kept between saves.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from acsgd.config.options import CheckpointConfig
from acsgd.errors import NonFiniteError, RunError, WaitInterruptedError, explain
from acsgd.groups import Groups
from acsgd.io.checkpoint.constants import ConstantsFiles
from acsgd.io.checkpoint.copies import FileExchange, place, plan_transfers
from acsgd.io.checkpoint.directory import (
    CheckpointDirectory,
    PartKind,
    WrittenFile,
    check_visible,
    files_of_layers,
    files_of_replicas,
    files_of_tables,
)
from acsgd.io.files.atomic import naming
from acsgd.layers.description import ModelLayers
from acsgd.shards.disk import write_layer
from acsgd.shards.manifest import Manifest, ModelTensors, StoredFile
from acsgd.shards.weights import WeightState
from acsgd.streams import StreamEvent, Streams
from acsgd.topology import Topology

log = logging.getLogger(__name__)


class LayerState(NamedTuple):
    """What one rank writes of the state of a layer, or of a table. The tensors may be on any device."""

    name: str
    """Name of the layer, or of the weight."""
    position: int
    """Index of the layer in the model, or of the weight among its tables, 0 = first."""
    weights: Mapping[str, Tensor] | None
    """Master weights by their names, fp32, or bf16 without masters. A tied weight belongs to one layer only. None on
    ranks that do not write them."""
    constants: Mapping[str, Tensor]
    """Tensors of the layer that never change, by their names."""
    optimizer: WeightState
    """State of the optimizer; empty on ranks that do not write it."""
    replica: WeightState
    """State of the data-parallel mode that belongs to this replica."""
    is_table: bool = False
    """Whether this is the state of a tied weight that layers use as the table of an embedding: it has its own file,
    since the rank that holds it need not hold the first layer that uses it."""

    @property
    def stem(self) -> str:
        """Name of the file without suffix."""
        return f"table-{self.position:05d}" if self.is_table else self.name


class SaveResult(NamedTuple):
    """Result of a save; equal on all ranks except `seconds`."""

    step: int
    path: Path
    error: str | None
    """Why the save failed, None if it succeeded. A failed save does not affect earlier checkpoints."""
    failed_ranks: tuple[int, ...]
    """Ranks whose part of the save failed."""
    seconds: float
    """Time from the start of the save until the checkpoint was on disk."""


@dataclass(eq=False)
class Saver:
    """Writes checkpoints, one at a time. Every rank has one; all ranks save at the same steps.

    A context manager: leaving it waits for the save in progress, unless an exception was raised on this rank alone.
    """

    directory: CheckpointDirectory
    config: CheckpointConfig
    write_model_files: Callable[[Path], list[StoredFile]]
    """Writes config.json and the tokenizer into a directory; returns their manifest entries."""
    task: str
    """Recorded in the manifest, as are the next two."""
    model: ModelLayers
    adapter: str | None
    describe_tensors: Callable[[Sequence[StoredFile]], ModelTensors]
    """Returns what the manifest records of the tensors of the model, given the model files."""
    topology: Topology
    groups: Groups
    streams: Streams
    timeout_s: float
    """Maximum time to wait for the other ranks to finish writing, seconds."""
    constants: ConstantsFiles
    """Adds those of layers."""
    verify: Callable[[], None]
    """Raises RunError if another run owns the directory; called before a checkpoint is published."""
    exchange: FileExchange
    """Copies files between the disks of the run, if it has several."""
    is_used: Callable[[Path], bool] = lambda path: False
    """Returns whether a checkpoint must not be removed now."""
    _buffers: dict[str, Tensor] = field(default_factory=dict, init=False)
    _replica: int = field(default=0, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _result: SaveResult | None = field(default=None, init=False)
    _failure: Exception | None = field(default=None, init=False)

    def __enter__(self) -> Saver:
        if self._is_leader:
            self.directory.path.mkdir(parents=True, exist_ok=True)
            self.directory.clean()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._join()
        elif issubclass(kind, NonFiniteError) and self._thread is not None and self._thread.is_alive():
            self._thread.join(self.timeout_s)  # the other ranks wait here, too: the checkpoint is of a step before

    def snapshot(
        self,
        step: int,
        states: Sequence[LayerState],
        run: dict[str, Any],
        *,
        replica: int = 0,
        best: bool = False,
    ) -> None:
        """Copy the state to host memory, for `write`. Called by every rank, after `wait` for the previous save.

        states: what this rank writes; may change as soon as this returns. run: state of the run for the manifest.
        replica: number of the replica whose own state this rank writes. best: whether to point the link "best" to this
        checkpoint.
        """
        assert self._thread is None, "the previous save was not waited for"
        started = time.perf_counter()
        self._replica = replica
        copies = [self._copy(state) for state in states]
        event = self.streams.record_event()
        self._thread = threading.Thread(
            target=self._save, args=(step, copies, event, run, best, started), name=f"save {step}", daemon=True
        )

    def write(self) -> None:
        """Start to write the snapshot in the background."""
        assert self._thread is not None, "there is no snapshot"
        self._thread.start()

    @property
    def _is_leader(self) -> bool:
        return self.exchange.disks.is_leader(self.topology.rank)

    @property
    def result(self) -> SaveResult | None:
        """Result of the save in progress once it has ended on this rank; on other ranks it may end some steps later."""
        return self._result

    @property
    def is_writing(self) -> bool:
        """Whether the save in progress has not ended on this rank."""
        return self._thread is not None and self._result is None

    def wait(self) -> SaveResult | None:
        """Wait for the save in progress and return its result; None if there is none.

        Raises RunError if a rank did not report the end of its part in time. Then the results of ranks may differ.
        """
        self._join()
        if self._failure is not None:
            raise self._failure
        result, self._result = self._result, None
        return result

    def _join(self) -> None:
        if self._thread is not None:
            self.groups.waits.poll(self._has_ended, math.inf)  # the thread waits for other ranks
            self._thread = None

    def _has_ended(self, within_s: float) -> bool:
        assert self._thread is not None
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _copy(self, state: LayerState) -> LayerState:
        name = state.name
        return state._replace(
            weights=None if state.weights is None else self._copies(name, {"": state.weights})[""],
            optimizer=self._copies(name, state.optimizer),
            replica=self._copies(f"{name} replica", state.replica),
        )

    def _copies(self, owner: str, state: Mapping[str, Mapping[str, Tensor]]) -> WeightState:
        return {
            name: {key: self._copied(f"{owner} {name} {key}", tensor) for key, tensor in by_key.items()}
            for name, by_key in state.items()
        }

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._buffers:
            raw = self.streams.host_buffer(tensor.nbytes)
            self._buffers[name] = raw.view(tensor.dtype).view(tensor.shape)
        return self._buffers[name].copy_(tensor.detach(), non_blocking=True)

    # The rest runs in the thread.

    def _save(
        self, step: int, copies: list[LayerState], event: StreamEvent, run: dict[str, Any], best: bool, started: float
    ) -> None:
        errors: dict[int, str] = {}
        try:
            errors = self._write_all(step, copies, event, run, best)
            error = next(iter(errors.values()), None)
        except Exception as failure:  # `wait` raises it in the training thread
            self._failure, error = failure, str(failure)
        seconds = time.perf_counter() - started
        self._result = SaveResult(step, self.directory.of(step), error, tuple(errors), seconds)

    def _write_all(
        self, step: int, copies: list[LayerState], event: StreamEvent, run: dict[str, Any], best: bool
    ) -> dict[int, str]:
        """Write this rank's files and, on the leader of each disk, complete the checkpoint. Return errors by rank."""
        partial = self.directory.partial(step, self.groups.run_id)
        written: list[WrittenFile] = []
        error = self._attempt(lambda: written.extend(self._write_layers(step, copies, event)), partial)
        report = {"files": [asdict(file) for file in written], "layers": [copy.name for copy in copies], "error": error}
        try:
            reports = self._all_gather("writing a checkpoint", report)
            errors = _errors(reports) or _Completion(self, step, reports, run, best=best).run()
        except (RunError, WaitInterruptedError):
            if self._is_leader:  # another rank does not know whether this one has all reports
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if errors:
            shutil.rmtree(partial, ignore_errors=True)
        return errors

    def _write_layers(self, step: int, copies: Sequence[LayerState], event: StreamEvent) -> Iterator[WrittenFile]:
        partial, published = self.directory.partial(step, self.groups.run_id), self.directory.of(step)
        event.synchronize()
        partial.mkdir(parents=True, exist_ok=True)
        for copy in copies:
            if copy.weights is not None:
                file = write_layer(partial, copy.stem, copy.weights, copy.optimizer)
                yield WrittenFile.of(partial, "table" if copy.is_table else "layer", copy.name, file)
            if copy.constants:
                file = self.constants.add(partial, published, copy.name, copy.constants)
                yield WrittenFile.of(partial, "constants", copy.name, file)
            if copy.replica:
                file = write_layer(partial, f"{copy.stem}.replica-{self._replica:05d}", {}, copy.replica)
                yield WrittenFile.of(partial, "replica", copy.name, file, self._replica)

    def _all_gather(self, phase: str, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Gather a report of each rank at the end of a phase."""
        # copies take as long as the link needs; ranks that have ended are noticed by their heartbeat
        timeout_s = self.timeout_s if self.exchange.disks.is_shared else math.inf
        texts = self.groups.all_gather_text(phase, json.dumps(report), timeout_s=timeout_s)
        return [json.loads(text) for text in texts]

    def _attempt(self, work: Callable[[], None], directory: Path) -> str | None:
        """Do `work`; return why it failed. Catches every error, since the other ranks wait for this rank's report.

        directory: that is written to; it names an error of the disk that names no file. Raises a failure of a copy
        between hosts: a peer waits for this rank's part of it, and not for a report.
        """
        try:
            with naming(directory):
                work()
        except Exception as error:
            if isinstance(error, RunError) and error.awaited:
                raise
            return f"rank {self.topology.rank} on {socket.gethostname()}: {_message(error)}"
        return None


class _Completion:
    """Completes a checkpoint whose files the ranks have written, on each disk. Each leader of a disk acts for it.

    It is published when all copies are on disk, and older ones are removed when it is published everywhere.

    reports: of the ranks, what they have written, and the layers that they hold.
    """

    def __init__(
        self, saver: Saver, step: int, reports: Sequence[dict[str, Any]], run: dict[str, Any], *, best: bool
    ) -> None:
        self._saver, self._step, self._best = saver, step, best
        self._partial, self._published = saver.directory.partial(step, saver.groups.run_id), saver.directory.of(step)
        self._is_published = False
        self._disks, rank = saver.exchange.disks, saver.topology.rank
        self._here = self._disks.of(rank)
        self._parts = [WrittenFile(**file) for report in reports for file in report["files"]]
        origins = [self._disks.of(rank) for rank, report in enumerate(reports) for _ in report["files"]]
        users = [{name for rank in ranks for name in reports[rank]["layers"]} for ranks in self._disks.members]
        self._holders = {
            part.stored.file: place(origin, users, part.layer, copies=saver.config.copies)
            for part, origin in zip(self._parts, origins, strict=True)
        }
        """Disks that hold each file, first the one that has it by now."""
        self._report: dict[str, Any] = {"run": run if rank == 0 else None}
        self._reports: list[dict[str, Any]] = []

    def run(self) -> dict[int, str]:
        """Complete the checkpoint, or remove it; return the errors by rank. All ranks call it together."""
        errors: dict[int, str] = {}
        phases = (
            ("placing files", self._list),
            ("copying files", self._copy),
            ("completing a checkpoint", self._publish),
        )
        for phase, act in phases:
            error = self._saver._attempt(act, self._partial) if self._saver._is_leader else None
            self._reports = self._saver._all_gather(phase, self._report | {"error": error})
            if errors := _errors(self._reports):
                break
        if self._is_published:
            self._settle(is_complete=not errors)
        return errors

    def _list(self) -> None:
        """List what this disk has of the files that no rank has written for it: constants, and those of the model."""
        links = [
            part.stored.file
            for part in self._copied("constants")
            if self._saver.constants.link(self._partial, self._published, part.layer, part.stored)
        ]
        model_files = self._saver.write_model_files(self._partial)
        self._report |= {"linked": links, "model_files": [asdict(file) for file in model_files]}

    def _copy(self) -> None:
        """Get the files that this disk lacks, send those that others lack, and write the manifest."""
        leaders = [self._reports[ranks[0]] for ranks in self._disks.members]
        names = range(len(leaders))
        model_files = [StoredFile(**file) for file in leaders[0]["model_files"]]
        of_disk = [{*leader["linked"]} | _equal(leader["model_files"], leaders[0]["model_files"]) for leader in leaders]
        held = [of_disk[disk] | {file for file, disks in self._holders.items() if disks[0] == disk} for disk in names]
        everywhere = {file.file: tuple(names) for file in model_files}
        holders = self._holders | everywhere
        wanted = [{file for file, disks in holders.items() if disk in disks} for disk in names]
        files = [*(part.stored for part in self._parts), *model_files]
        if problem := self._saver.exchange.run(plan_transfers(files, held, wanted), self._partial):
            raise RunError(problem)
        check_visible(self._partial, sorted(wanted[self._here]))
        for part in self._copied("constants"):
            self._saver.constants.keep(self._partial, self._published, part.layer, part.stored)
        Manifest(
            step=self._step,
            task=self._saver.task,
            model=self._saver.model,
            layers=files_of_layers(self._parts, "layer", self._saver.model),
            tables=files_of_tables(self._parts),
            replicas=files_of_replicas(self._parts),
            model_files=model_files,
            run=self._reports[0]["run"],
            constants=files_of_layers(self._parts, "constants", self._saver.model),
            adapter=self._saver.adapter,
            tensors=self._saver.describe_tensors(model_files),
            hosts={} if self._disks.is_shared else self._disks.hosts_of(holders),
        ).write(self._partial)

    def _copied(self, kind: PartKind) -> list[WrittenFile]:
        """Return the files of a kind that another disk has written and this one holds."""
        held = {file for file, disks in self._holders.items() if self._here in disks[1:]}
        return [part for part in self._parts if part.kind == kind and part.stored.file in held]

    def _publish(self) -> None:
        self._saver.verify()
        self._saver.directory.publish(self._step, self._saver.groups.run_id)
        self._is_published = True

    def _settle(self, *, is_complete: bool) -> None:
        """Remove older checkpoints, or this one if it is not published on all disks."""
        directory, config = self._saver.directory, self._saver.config
        try:
            if not is_complete:
                directory.remove(self._step)
                return
            if self._best:
                directory.mark_best(self._step)
            is_used = self._saver.is_used
            directory.prune(self._step, keep=config.keep, keep_every=config.keep_every, is_used=is_used)
        except OSError as error:  # this checkpoint is saved, and the next save tries again
            log.warning("old checkpoints could not be removed: %s", error)


def _equal(files: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> set[str]:
    """Return the names of files that are the same in both lists of manifest entries."""
    return {file["file"] for file in files if file in others}


def _message(error: Exception) -> str:
    """Return one sentence on an error, with its type if the cause is not known."""
    return explain(error) or f"{type(error).__name__}: {error}"


def _errors(reports: Sequence[dict[str, Any]]) -> dict[int, str]:
    """Return the errors that ranks have reported, by rank."""
    return {rank: report["error"] for rank, report in enumerate(reports) if report["error"]}
