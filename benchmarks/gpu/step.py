"""Step time and MFU of a Llama-like model of 1.1 B parameters on one GPU, against a plain PyTorch loop:

    .venv/bin/python -m benchmarks.gpu.step [--quick] [--profile PATH] [--json runs/benchmarks/gpu/step.json]

Both sides have the same random weights, made on the device, and the same tokens. They keep bf16 parameters and fp32
masters, sum the gradients of micro-batches in fp32, clip by the global norm and use fused AdamW. The plain loop takes
the model's own forward, all logits at once, and multi-tensor operations between backward and update. The sides
alternate in one process (common/compare.py).

MFU (model FLOP utilization) is the FLOPs of forward and backward by the shapes of the matrix products, attention over
all pairs of tokens included, per second, relative to the peak of the data sheet; also relative to a large matrix
product, timed here.

--profile writes what host and device do in a step of either side: calls of the driver, such as launches and waits, the
kernels that take longest, and the longest gaps between kernels.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from acsgd.config.options import Config, DataConfig, LogConfig, ModelConfig, PipelineConfig, RunConfig
from acsgd.groups import connect
from acsgd.launch import Launch
from acsgd.run.plan.job import prepare
from acsgd.run.session import Session
from acsgd.run.setup.build import build_session
from acsgd.shards.layer_tensors import LayerTensors
from acsgd.shards.writer import OpenTensor
from acsgd.streams import peak_of_gpu
from benchmarks.common.compare import Comparison, Step, alternate, setting, summarise
from benchmarks.runs.speed import OPTIM, TIMEOUT, Size, acsgd, make_adamw, save_tokenizer, summed_loss, tokens_of

GOAL = 1.01
"""Largest acceptable ratio of step times."""
LOSS_TOLERANCE = 2e-3
"""Rounding to bf16 has a relative error of up to 2**-8; over the tokens of a batch most of it averages out."""
WARMUP, PROFILED = 3, 3
"""Steps."""
STD = 0.02
"""Standard deviation of new matrices."""


@dataclass(frozen=True)
class Llama(Size):
    """A Llama and its batch."""

    inner: int = 96
    kv_heads: int = 2

    def config(self) -> LlamaConfig:
        """Return the configuration for transformers."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.blocks,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.sequence,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )

    @property
    def step_tokens(self) -> int:
        """Number of tokens of a step."""
        return self.num_micros * self.micro * self.sequence

    @property
    def step_flops(self) -> float:
        """FLOPs of forward and backward of a step: three times those of the forward."""
        width, kv_width = self.width, self.width * self.kv_heads // self.heads
        block = 2 * width * (2 * width + 2 * kv_width + 3 * self.inner) + 4 * self.sequence * width
        return 3.0 * self.step_tokens * (self.blocks * block + 2 * width * self.vocabulary)


SIZES = {
    "1b": Llama(32000, 2048, 22, 32, 2048, micro=4, num_micros=4, inner=5632, kv_heads=4),
    "tiny": Llama(512, 64, 2, 4, 64, micro=2, num_micros=2),
}


class DeviceWeights:
    """Random weights that are made on the device, equal on all ranks: a `WeightSource`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def tensors(self, layer: str, stored: LayerTensors) -> dict[str, Tensor]:
        """Return normal numbers for matrices, 0 for biases and 1 for other vectors, which are norms."""
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(layer.encode()))
        return {
            key: torch.empty(weight.shape, device=self._device).normal_(std=STD, generator=generator)
            if weight.dim() > 1
            else torch.full(weight.shape, float(not key.endswith("bias")), device=self._device)
            for key, weight in stored.weights.items()
        }

    def constants(self, layer: str, stored: LayerTensors, *, check: bool = True) -> dict[str, Tensor]:
        """Return nothing: these models store none."""
        return {}

    def tensor(self, layer: str, key: str) -> Tensor:
        """Raise, since no weight is tied."""
        raise KeyError(key)

    def stored(self, layer: str, key: str) -> OpenTensor:
        """Raise, since these weights are in no file."""
        raise KeyError(key)


@torch.no_grad()
def copy_weights(session: Session, model: nn.Module) -> None:
    """Copy the weights of a session into the model that it was built from."""
    params = dict(model.named_parameters())
    for weight in session.weights:
        params[weight.key].copy_(weight.param)


def make_config(model: Path, size: Llama, device: str) -> Config:
    """Return acsgd's configuration."""
    return Config(
        model=ModelConfig(name=str(model), init="scratch", dtype="bf16"),
        data=DataConfig(sources="demo", sequence=size.sequence, batch=size.micro * size.num_micros),
        optim=OPTIM,
        pp=PipelineConfig(micro=size.micro),
        run=RunConfig(device=device),  # type: ignore[arg-type]
        log=LogConfig(dir=str(model.parent / "run")),
    )


def save_config(directory: Path, size: Llama) -> Path:
    """Write the config of a model without weights, and no real tokenizer."""
    size.config().save_pretrained(directory)
    return save_tokenizer(directory)


def plain(session: Session, size: Llama) -> Step:
    """Return the step of a plain PyTorch loop, with a copy of the weights of a session."""
    device = session.job.streams.device
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(size.config(), dtype=torch.bfloat16).train()
    copy_weights(session, model)
    params = dict(model.named_parameters())
    masters = nn.ParameterList(weight.master.detach().clone() for weight in session.weights)
    rounded = [params[weight.key] for weight in session.weights]
    adamw = make_adamw(masters)

    def step(number: int) -> float:
        total = torch.zeros((), device=device)
        batch = tokens_of(number, size).to(device)
        for micro in batch:
            logits = model(micro[:, :-1], use_cache=False).logits
            loss = summed_loss(logits.float(), micro[:, 1:]) / batch[..., 1:].numel()
            loss.backward()
            accumulate(masters, rounded)
            total += loss.detach()
        nn.utils.clip_grad_norm_(masters, OPTIM.clip)
        adamw.step()
        adamw.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(rounded, list(masters))
        return total.item()

    return step


@torch.no_grad()
def accumulate(masters: Iterable[nn.Parameter], rounded: Sequence[nn.Parameter]) -> None:
    """Move the gradients of a micro-batch into those of the masters."""
    masters = list(masters)
    if masters[0].grad is None:
        for master, param in zip(masters, rounded, strict=True):
            master.grad = param.grad.float()
    else:
        torch._foreach_add_([master.grad for master in masters], [param.grad for param in rounded])
    for param in rounded:
        param.grad = None


def matmul_flops(device: torch.device, width: int = 8192, rounds: int = 10) -> float:
    """Return the FLOP/s of a bf16 matrix product of normal numbers, median."""
    a, b = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.mm(a, b)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * width**3 / sorted(times)[rounds // 2]


def describe_profile(name: str, step: Step, first: int, device: torch.device) -> str:
    """Return a text on what the device and the host do in PROFILED steps."""
    synchronize(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for number in range(first, first + PROFILED):
            step(number)
        synchronize(device)
    events = list(profiler.events())
    on_device = torch.autograd.DeviceType.CUDA
    kernels = [e for e in events if e.device_type == on_device and not (e.is_user_annotation or "#" in e.name)]
    kernels.sort(key=lambda event: event.time_range.start)
    calls = Counter(e.name for e in events if e.device_type != on_device and e.name.startswith("cu"))
    lines = [f"== {name}: {PROFILED} steps; all numbers are per step"]
    lines += [f"{count / PROFILED:10.1f} x {call}" for call, count in calls.most_common(15)]
    if kernels:
        lines += _device_lines(kernels)
    lines.append(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=60))
    return "\n".join(lines)


def _device_lines(kernels: Sequence[torch.autograd.profiler_util.FunctionEvent]) -> list[str]:
    """Describe kernels in the order of their start: those that take longest, and the gaps between them."""
    first, last = kernels[0].time_range.start, max(each.time_range.end for each in kernels)
    busy, end, gaps = 0.0, first, []
    before = "(start)"
    for each in kernels:
        if each.time_range.start > end:
            gaps.append((each.time_range.start - end, before, each.name))
        busy += max(0.0, each.time_range.end - max(end, each.time_range.start))
        if each.time_range.end >= end:
            end, before = each.time_range.end, each.name
    lines = [
        f"device: {len(kernels) / PROFILED:.1f} kernels and copies, busy {busy / PROFILED / 1e3:.2f} ms of "
        f"{(last - first) / PROFILED / 1e3:.2f} ms, {1 - busy / (last - first):.2%} idle"
    ]
    by_name, counts = Counter[str](), Counter[str]()
    for each in kernels:
        by_name[each.name] += each.time_range.elapsed_us()
        counts[each.name] += 1
    lines += [
        f"{us / PROFILED / 1e3:10.3f} ms {us / busy:7.2%} {counts[name] / PROFILED:8.1f} x {name[:150]}"
        for name, us in by_name.most_common(30)
    ]
    lines.append("longest gaps, us: after which kernel, before which")
    lines += [f"{us:10.1f} {after[:80]} -> {then[:80]}" for us, after, then in sorted(gaps, reverse=True)[:30]]
    sums = Counter[tuple[str, str]]()
    for us, after, then in gaps:
        sums[after, then] += us
    lines.append("gaps by pair of kernels, ms per step")
    lines += [f"{us / PROFILED / 1e3:10.3f} {a[:80]} -> {b[:80]}" for (a, b), us in sums.most_common(15)]
    return lines


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(result: Comparison, rates: dict[str, float], title: str) -> Table:
    """Return the table of the comparison."""
    shown = Table("", "acsgd", "plain loop", title=title)
    low, high = result.quartiles
    shown.add_row("step, s", f"{result.ours_s:.4f}", f"{result.theirs_s:.4f}")
    for name, rate in rates.items():
        ours, theirs = rate / result.ours_s, rate / result.theirs_s
        digits = ",.0f" if ours > 100 else ".1%"
        shown.add_row(name, f"{ours:{digits}}", f"{theirs:{digits}}")
    mark = "met" if result.median <= GOAL else "missed"
    shown.add_row("ratio", f"{result.median:.4f} ({low:.4f} - {high:.4f})", f"goal <= {GOAL:g}: {mark}")
    return shown


def report(result: Comparison, options: argparse.Namespace, size: Size, device: torch.device, console: Console) -> None:
    """Print the results, and write them to a file."""
    rates = {"tokens/s": float(size.step_tokens)}
    name = "cpu"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if peak := peak_of_gpu(name, torch.bfloat16):
            rates[f"MFU, {peak / 1e12:.0f} TFLOP/s"] = size.step_flops / peak
        measured = matmul_flops(device)
        rates[f"of a matrix product, {measured / 1e12:.0f} TFLOP/s"] = size.step_flops / measured
    console.print(table(result, rates, f"Llama-like, {options.size}, bf16, on {name}"))
    shares = {key: [rate / result.ours_s, rate / result.theirs_s] for key, rate in rates.items()}
    about = {**setting(name), "size": options.size, "goal": GOAL}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(about | {"rates": shares} | result._asdict(), indent=1) + "\n")


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks/gpu/step.json"), help="path of the results")
    parser.add_argument("--profile", type=Path, help="path of a text on the kernels and gaps of both sides")
    parser.add_argument("--quick", action="store_true", help="7 rounds instead of 21")
    parser.add_argument("--size", choices=SIZES, default="1b")
    options = parser.parse_args()
    console, size = Console(width=120), SIZES[options.size]
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu" and options.size != "tiny":
        console.print("No CUDA device: nothing is measured.")
        return
    with tempfile.TemporaryDirectory() as temporary:
        model = save_config(Path(temporary) / "model", size)
        job = prepare(make_config(model, size, kind), Launch())
        device, store = job.streams.device, dist.FileStore(str(Path(temporary) / "store"), 1)
        with connect(job.topology, timeout=TIMEOUT, store=store) as groups:
            torch.manual_seed(0)
            session = build_session(job, DeviceWeights(device), groups)
            ours, theirs = acsgd(session, size), plain(session, size)
            console.print(f"{job.model.parameters.describe()} on {device}; both sides are built")
            rounds = alternate(
                ours,
                theirs,
                warmup=WARMUP,
                rounds=7 if options.quick else 21,
                steps=1,
                barrier=lambda: synchronize(device),
            )
            result = summarise([rounds], steps=1)
            report(result, options, size, device, console)
            if options.profile:
                sides = {"acsgd": ours, "plain loop": theirs}
                texts = [describe_profile(name, step, WARMUP, device) for name, step in sides.items()]
                options.profile.parent.mkdir(parents=True, exist_ok=True)
                options.profile.write_text("\n\n".join(texts) + "\n")
    if result.loss_error > LOSS_TOLERANCE:
        raise SystemExit(
            f"the relative difference of the two losses, {result.loss_error:.1e}, exceeds {LOSS_TOLERANCE:g}"
        )


if __name__ == "__main__":
    main()
