"""Throughput of conversion to layer shards and back against `cp`, and its peak memory for a model of 20 B parameters:

    .venv/bin/python -m benchmarks.models.convert [--rounds 9] [--json runs/benchmarks/convert.json]

The throughput is that of a GPT-NeoX of 1.1 GB with random weights in the page cache. Conversions alternate with copies.
Neither waits until its files are on disk; then both do, as `acsgd convert` does. The processor time is compared as
well: it does not depend on what else runs on the machine. The model of 20 B parameters has the shapes of GPT-NeoX-20B
and zeros as weights: its files are sparse and take no space on disk, nor do those that the conversions write. Its
peak includes the comparison of the layers with the whole model, which does not depend on the size of the files, and
which the throughput leaves out.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from acsgd.io.files.atomic import build_atomically
from acsgd.layers.skeleton import weights_on_meta
from acsgd.shards import writer
from acsgd.shards.convert import from_hf
from acsgd.shards.export import to_hf
from acsgd.shards.writer import TensorWriter, header_of

LIMIT_GIB = 4.0
"""Acceptable peak memory of the conversion of 20 B parameters."""
SMALL = GPTNeoXConfig(hidden_size=2048, num_hidden_layers=7, num_attention_heads=16, intermediate_size=8192)
LARGE = GPTNeoXConfig(num_hidden_layers=44, hidden_size=6144, num_attention_heads=64, intermediate_size=24576)
DIRECTIONS: dict[str, Callable[[Path, Path], None]] = {"from-hf": from_hf, "to-hf": to_hf}


def timed(run: Callable[..., object], *arguments: object) -> tuple[float, float]:
    """Return the seconds of a call, and those of processors, child processes included."""
    started, before = time.perf_counter(), os.times()
    run(*arguments)
    return time.perf_counter() - started, sum(os.times()[:4]) - sum(before[:4])


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)


def copy_to_disk(source: Path, target: Path) -> None:
    copy(source, target)
    subprocess.run(["sync", *target.iterdir()], check=True)


def convert(direction: str, source: Path, target: Path) -> None:
    target.mkdir()
    DIRECTIONS[direction](source, target)


def convert_to_disk(direction: str, source: Path, target: Path) -> None:
    build_atomically(target, lambda path: convert(direction, source, path))


def throughput(scratch: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds of copies and conversions, by direction, of a model that is in the page cache."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16)
    model = GPTNeoXForCausalLM(SMALL)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(scratch / "hf")
    nbytes = sum(param.nbytes for param in model.parameters())
    del model
    convert("from-hf", scratch / "hf", scratch / "shards")  # also imports what transformers imports late
    convert("to-hf", scratch / "shards", scratch / "again")
    shutil.rmtree(scratch / "again")
    sources = {"from-hf": scratch / "hf", "to-hf": scratch / "shards"}
    target = scratch / "target"
    runs: dict[str, Callable[[str], object]] = {
        "cp": lambda direction: copy(sources[direction], target),
        "convert": lambda direction: convert(direction, sources[direction], target),
        "cp to disk": lambda direction: copy_to_disk(sources[direction], target),
        "convert to disk": lambda direction: convert_to_disk(direction, sources[direction], target),
    }
    seconds: dict[str, dict[str, list[tuple[float, float]]]] = {each: {kind: [] for kind in runs} for each in sources}
    for _ in range(rounds):
        for direction in sources:
            for kind, run in runs.items():
                seconds[direction][kind].append(timed(run, direction))
                shutil.rmtree(target)
    return {"bytes": nbytes, "seconds": seconds}


def save_sparse(directory: Path) -> None:
    """Save the large model with zeros as weights, in files with holes."""
    with weights_on_meta():
        model = GPTNeoXForCausalLM(LARGE)
    LARGE.architectures, LARGE.dtype = [type(model).__name__], torch.float16
    LARGE.save_pretrained(directory)
    tensors = {name: param.half() for name, param in model.named_parameters()}
    weight_map = {}
    for number, start in enumerate(range(0, len(tensors), 50)):
        name = f"model-{number:05d}.safetensors"
        part = dict(list(tensors.items())[start : start + 50])
        with TensorWriter(directory / name, {key: header_of(tensor) for key, tensor in part.items()}) as file:
            size = len(file.header) + sum(tensor.nbytes for tensor in part.values())
        os.truncate(directory / name, size)
        weight_map |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def convert_sparse(direction: str, source: Path, target: Path) -> None:
    """Convert the large model, without writing zeros, and print the peak memory of this process in bytes."""

    class SparseWriter(TensorWriter):
        def write(self, name: str, tensor: torch.Tensor, use: Callable[[memoryview], object] = bool) -> None:
            with open(os.devnull, "wb") as nowhere:
                file, self._file = self._file, nowhere
                super().write(name, tensor, use)
                self._file = file
            end = len(self.header) + self.offsets[name] + tensor.nbytes
            os.truncate(self._file.fileno(), max(end, os.fstat(self._file.fileno()).st_size))

    DIRECTIONS["from-hf"] = functools.partial(from_hf, verify=True)
    writer.TensorWriter = SparseWriter  # type: ignore[misc]
    sys.modules["acsgd.shards.export"].__dict__["TensorWriter"] = SparseWriter
    seconds = timed(convert, direction, source, target)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024  # unlike getrusage, without that of the parent
    print(json.dumps({"seconds": seconds, "peak_bytes": peak}))


def peaks(scratch: Path) -> dict[str, Any]:
    """Return time and peak memory of both conversions of the large model, each in a process of its own."""
    save_sparse(scratch / "hf")
    results = {}
    for direction, source, target in (("from-hf", "hf", "shards"), ("to-hf", "shards", "back")):
        command = [sys.executable, "-m", __spec__.name, "--only", direction, scratch / source, scratch / target]
        printed = subprocess.run([*map(str, command)], check=True, capture_output=True, text=True).stdout
        results[direction] = json.loads(printed.splitlines()[-1])
    return results


def show(results: dict[str, Any]) -> None:
    table = Table("direction", "GB/s", "of cp", "of cp, processor time", "of cp, to disk", "20 B: GiB")
    for direction in DIRECTIONS:
        seconds = results["throughput"]["seconds"][direction]
        rate = results["throughput"]["bytes"] / statistics.median(wall for wall, _ in seconds["convert"]) / 1e9
        table.add_row(
            direction,
            f"{rate:.2f}",
            _ratio(seconds["cp"], seconds["convert"], 0),
            _ratio(seconds["cp"], seconds["convert"], 1),
            _ratio(seconds["cp to disk"], seconds["convert to disk"], 0),
            f"{results['large'][direction]['peak_bytes'] / 2**30:.2f}",
        )
    Console().print(table)


def _ratio(copies: list[tuple[float, float]], conversions: list[tuple[float, float]], which: int) -> str:
    """Return the median ratio of throughputs and its range. which: 0 = time, 1 = processor time."""
    ratios = [other[which] / own[which] for other, own in zip(copies, conversions, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="number of copies and conversions in each direction")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/convert.json"))
    parser.add_argument("--only", nargs=3, metavar=("DIRECTION", "SOURCE", "TARGET"), help="one conversion of 20 B")
    arguments = parser.parse_args()
    if arguments.only:
        direction, source, target = arguments.only
        convert_sparse(direction, Path(source), Path(target))
        return
    with tempfile.TemporaryDirectory() as small:
        results: dict[str, Any] = {"throughput": throughput(Path(small), arguments.rounds)}
    with tempfile.TemporaryDirectory() as large:
        results["large"] = peaks(Path(large))
    results["machine"] = {"cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(results, indent=2))
    show(results)
    if any(each["peak_bytes"] > LIMIT_GIB * 2**30 for each in results["large"].values()):
        sys.exit(f"a conversion took more than {LIMIT_GIB} GiB")


if __name__ == "__main__":
    main()
