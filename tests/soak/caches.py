"""Caches on disk with changed files: tokens, converted models, activations."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from acsgd.pp.wire.cache import ActivationCache, EntryKey
from acsgd.pp.wire.cache_disk import DiskStore
from acsgd.streams import DONE, Streams
from tests.soak.area import ACCEPTED, Case, Outcome
from tests.soak.configs import replaced
from tests.soak.mutate import changed_bytes, changed_file
from tests.soak.runs import LIMIT_S, checkpoints, flags, result, train_here, write_inputs

CPU = Streams(torch.device("cpu"))


class Caches:
    """Runs that find a changed cache, and stores of activations whose file has changed.

    A cache may be rebuilt or refused; the result of a run that accepts one must be that of the undisturbed run.
    """

    deadline_s: ClassVar[float] = LIMIT_S + 30
    memory_bytes: ClassVar[int] = 3 * 2**30

    @classmethod
    def prepare(cls, directory: Path) -> None:
        """Train an undisturbed run, and keep its caches."""
        work = directory / "work"  # where each case runs again: the caches depend on the paths of their sources
        work.mkdir()
        os.chdir(work)
        write_inputs(work)
        ended = train_here(flags())
        assert ended.code == 0, ended.stderr
        (directory / "expected.json").write_text(json.dumps(result(Path("runs/run"))))
        shutil.rmtree("runs/run")
        os.chdir(directory)
        work.rename(directory / "prepared")

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._expected = json.loads((directory / "expected.json").read_text())

    def run(self, case: Case) -> Outcome:
        """Change a file of a cache and use it."""
        return (_activations if case.draw.random() < 0.8 else self._files)(case)

    def _files(self, case: Case) -> Outcome:
        """Change a cache of tokens or of a converted model; train."""
        draw = case.draw
        shutil.rmtree(self._directory / "work", ignore_errors=True)
        shutil.copytree(self._directory / "prepared", self._directory / "work")
        os.chdir(self._directory / "work")
        cache = Path("runs/cache")
        path = draw.choice(sorted(path for path in cache.rglob("*") if path.is_file()))
        status = path.stat()
        action = draw.random()
        if action < 0.75:
            text = changed_file(draw, path, sorted(path.parent.iterdir()))
            if draw.random() < 0.5:
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        elif action < 0.85:
            path.unlink()
            text = f"{path.name}: removed"
        else:
            path = draw.choice([path, path.parent])
            text = replaced(draw, path)
        case.describe(f"{path.parent.relative_to(cache)}/{text}")
        outcome = train_here(flags()).outcome([str(path), path.name, "runs/cache"])
        if outcome.verdict == "accepted":
            assert checkpoints(Path("runs/run")).steps(), "no checkpoint"
            assert result(Path("runs/run")) == self._expected, "trained to another result than with a valid cache"
        return outcome


def _activations(case: Case) -> Outcome:
    """Change the file of a store of activations: each entry is read as it was written, or is lost."""
    draw = case.draw
    path, identity = Path("cache/block-00001.sender.hidden"), {"run": "a", "tensor": "b"}
    nbytes = draw.choice([16, 48, 160, 4096])
    entries: dict[EntryKey, Tensor] = {}
    store = DiskStore(path, nbytes, identity, CPU, fresh=True)
    slots = draw.sample(range(12), draw.randint(1, 8))
    for slot in slots:
        key = EntryKey(draw.choice([slot, 2**40 + slot]), draw.randrange(1, 2**63))
        entries[key] = _entry(draw, nbytes)
        store.write(slot, store.buffer(slot).copy_(entries[key]), key, DONE)
    store.close()
    before = path.read_bytes()
    data, change = changed_bytes(draw, before)
    if draw.random() < 0.5:  # beyond the header, most of which is padding
        tail, change = changed_bytes(draw, before[4096:])
        data = before[:4096] + tail
    path.write_bytes(data)
    case.describe(f"{len(slots)} activations of {nbytes} bytes: {change}")
    store = DiskStore(path, nbytes, identity, CPU, fresh=False)
    cache = ActivationCache(12, store)
    try:
        samples = [key.sample for key in entries]
        for sample, version in zip(samples, cache.begin_step(samples, samples), strict=True):
            if version:
                expected = entries.get(EntryKey(sample, version))
                assert expected is not None, f"sample {sample} has version {version}, which was not written"
                assert torch.equal(cache.read(sample), expected), f"another entry of sample {sample} was read"
        assert data != before or all(cache.versions().values()), "an entry of an unchanged file was lost"
        others = set(cache.versions()) - set(samples)
        assert not any(cache.begin_step(sorted(others), [])), "an entry that was not written was read"
    finally:
        cache.close()
    return ACCEPTED


def _entry(draw: random.Random, nbytes: int) -> Tensor:
    return torch.frombuffer(bytearray(draw.randbytes(nbytes)), dtype=torch.uint8)
