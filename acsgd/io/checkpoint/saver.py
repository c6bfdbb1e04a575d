"""Save the state of a running job beside the training.

Training stands still while the state is copied to host memory (`take`); the rest (`write`) is done by one thread per
rank: write the files, tell the other ranks, and, on rank 0, complete the checkpoint and put it in place.
A layer is written by one replica only, so replicas share the work. Extra memory per rank: one copy of what it
writes, at most 12 bytes per parameter of its layers (weights and AdamW's two moments in fp32), kept between saves.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from acsgd.config.options import CheckpointConfig
from acsgd.errors import RunError
from acsgd.io.checkpoint.directory import CheckpointDirectory
from acsgd.shards.disk import Manifest, StoredFile, copy_model_files, write_layer
from acsgd.shards.weights import WeightState
from acsgd.streams import Event, Streams
from acsgd.topology import Groups, Topology

log = logging.getLogger(__name__)


class LayerState(NamedTuple):
    """One layer's part of the state, on the device, not copied."""

    layer: str
    place: int
    """In the model, 0 = first."""
    weights: Mapping[str, Tensor]
    """fp32 masters by their Hugging Face names; a tied weight is held by one layer only."""
    optimizer: WeightState
    replica: WeightState
    """What this replica remembers in its data-parallel mode."""


class Outcome(NamedTuple):
    """How a save ended; the same on every rank."""

    step: int
    path: Path
    error: str | None
    """Why it failed; the earlier checkpoints stay as they are."""
    seconds: float
    """From the start of the save until all of it was on disk."""


class Saver:
    """Writes checkpoints, one at a time. Every rank has one; all save at the same steps.

    A context manager: leaving it waits for the save under way, unless an exception is the reason.
    model_dir: where config.json and the tokenizer are copied from; layers: all of the model, first to last;
    timeout_s: how long a rank that is done writing waits for the others.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        config: CheckpointConfig,
        *,
        model_dir: Path,
        layers: Sequence[str],
        topology: Topology,
        groups: Groups,
        streams: Streams,
        timeout_s: float,
        verify: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._config = config
        self._model_dir = model_dir
        self._layers = layers
        self._topology = topology
        self._groups = groups
        self._streams = streams
        self._timeout_s = timeout_s
        self._verify = verify
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._saves = 0
        self._broken: Exception | None = None

    def __enter__(self) -> Saver:
        if self._topology.rank == 0:
            self._directory.path.mkdir(parents=True, exist_ok=True)
            self._directory.clean()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._join()

    def take(self, step: int, states: Sequence[LayerState], run: dict[str, Any], *, best: bool = False) -> None:
        """Copy the state that is to be saved; nothing is written before `write`.

        states: of all layers this rank holds; they may change as soon as this returns. run: for the manifest.
        best: whether the link "best" is to lead here. Every rank calls it, and has taken the last outcome.
        """
        assert self._thread is None, "the outcome of the last save was not taken"
        started = time.perf_counter()
        copies = [self._copy(state) for state in states]
        event = self._streams.record_event()
        self._saves += 1
        self._thread = threading.Thread(
            target=self._finish, args=(step, copies, event, run, best, started), name=f"save {step}", daemon=True
        )

    def write(self) -> None:
        """Start to write what was taken."""
        assert self._thread is not None, "nothing was taken"
        self._thread.start()

    @property
    def ended(self) -> Outcome | None:
        """How the save under way has ended, if it has on this rank; on others it may end some steps later."""
        return self._outcome

    def take_outcome(self) -> Outcome | None:
        """Wait for the save under way, if any, and return, once, how it has ended.

        Raises what kept the ranks from telling each other: RunError if one was silent. Then each knows something else.
        """
        self._join()
        if self._broken is not None:
            raise self._broken
        outcome, self._outcome = self._outcome, None
        return outcome

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _copy(self, state: LayerState) -> LayerState:
        """Copy to host memory what this rank writes of a layer."""
        layer = state.layer
        replica = self._copies(f"{layer} replica", state.replica)
        if state.place % self._topology.replicas != self._topology.replica:
            return LayerState(layer, state.place, {}, {}, replica)
        weights = self._copies(layer, {"": state.weights})[""]
        return LayerState(layer, state.place, weights, self._copies(layer, state.optimizer), replica)

    def _copies(self, owner: str, state: Mapping[str, Mapping[str, Tensor]]) -> WeightState:
        return {
            name: {key: self._copied(f"{owner} {name} {key}", tensor) for key, tensor in by_key.items()}
            for name, by_key in state.items()
        }

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._buffers:
            raw = self._streams.host_buffer(tensor.nbytes)
            self._buffers[name] = raw.view(tensor.dtype).view(tensor.shape)
        return self._buffers[name].copy_(tensor.detach(), non_blocking=True)

    # From here on, in the thread.

    def _finish(
        self, step: int, copies: list[LayerState], event: Event, run: dict[str, Any], best: bool, started: float
    ) -> None:
        try:
            path, error = self._write_together(step, copies, event, run, best)
        except Exception as broken:  # raised by the training thread: nobody looks at this one
            self._broken, path, error = broken, self._directory.of(step), str(broken)
        self._outcome = Outcome(step, path, error, time.perf_counter() - started)

    def _write_together(
        self, step: int, copies: list[LayerState], event: Event, run: dict[str, Any], best: bool
    ) -> tuple[Path, str | None]:
        """Write this rank's files, and on rank 0 complete the checkpoint; return its path, and why it failed."""
        partial, path = self._directory.partial(step), self._directory.of(step)
        written: list[_Written] = []
        error = self._attempt(lambda: written.extend(self._write(partial, copies, event)))
        said = self._say("written", {"files": [asdict(file) for file in written], "error": error})
        error = _first_error(said)
        if error is not None:
            shutil.rmtree(partial, ignore_errors=True)
        elif self._topology.rank == 0:
            files = [_Written(**file) for each in said for file in each["files"]]
            error = self._attempt(self._verify)  # if it fails, another run owns the directory: remove nothing
            if error is None:
                error = self._attempt(lambda: self._complete(step, files, run, best))
                if error is not None:
                    shutil.rmtree(partial, ignore_errors=True)
        return path, _first_error(self._say("completed", {"error": error}))

    def _write(self, partial: Path, copies: Sequence[LayerState], event: Event) -> Iterator[_Written]:
        event.synchronize()
        partial.mkdir(parents=True, exist_ok=True)
        for copy in copies:
            if copy.weights:
                file = write_layer(partial, copy.layer, copy.weights, copy.optimizer)
                yield _Written(copy.layer, None, asdict(file))
            if copy.replica:
                replica = self._topology.replica
                file = write_layer(partial, f"{copy.layer}.replica-{replica:05d}", {}, copy.replica)
                yield _Written(copy.layer, replica, asdict(file))

    def _complete(self, step: int, written: Sequence[_Written], run: dict[str, Any], best: bool) -> None:
        """Complete a checkpoint all of whose layers are written, put it in place, and remove what is too old."""
        partial = self._directory.partial(step)
        _check_shared(partial, written)
        whole = {file.layer: StoredFile(**file.entry) for file in written if file.replica is None}
        parts = sorted((file for file in written if file.replica is not None), key=lambda file: file.replica or 0)
        Manifest(
            step=step,
            layers={layer: whole[layer] for layer in self._layers},
            replicas={
                layer: [StoredFile(**file.entry) for file in parts if file.layer == layer]
                for layer in sorted({file.layer for file in parts})
            },
            model_files=copy_model_files(self._model_dir, partial),
            run=run | {"best": best},
        ).write(partial)
        self._directory.publish(step)
        if best:
            self._directory.mark_best(step)
        try:
            self._directory.prune(step, keep=self._config.keep, keep_every=self._config.keep_every)
        except OSError as error:  # what was to be saved is: the next save tries again
            log.warning("checkpoints that are too old could not be removed: %s", error)

    def _say(self, what: str, said: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell all ranks, and return what each says."""
        texts = self._groups.all_gather_text(f"save {self._saves} {what}", json.dumps(said), timeout_s=self._timeout_s)
        return [json.loads(text) for text in texts]

    def _attempt(self, work: Callable[[], None]) -> str | None:
        """Do something; return why it failed, whatever that is: the other ranks wait to hear of it."""
        try:
            work()
        except Exception as error:
            return f"rank {self._topology.rank} on {socket.gethostname()}: {_said(error)}"
        return None


@dataclass(frozen=True)
class _Written:
    """One file of a checkpoint, as the ranks tell each other of it."""

    layer: str
    replica: int | None
    entry: dict[str, Any]


def _said(error: Exception) -> str:
    """Return what an error says, with its type unless it is one that a disk or this package may raise."""
    return str(error) if isinstance(error, (OSError, SafetensorError, RunError)) else f"{type(error).__name__}: {error}"


def _first_error(said: Sequence[dict[str, Any]]) -> str | None:
    return next((each["error"] for each in said if each["error"]), None)


def _check_shared(partial: Path, written: Sequence[_Written]) -> None:
    absent = [file.entry["file"] for file in written if not (partial / file.entry["file"]).is_file()]
    if absent:
        raise RunError(
            f"{partial} lacks {', '.join(absent[:3])}, which other ranks have written: "
            "checkpoint.dir must lie on a file system that all hosts share"
        )
