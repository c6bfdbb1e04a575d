"""Law: training, saving, evaluating and generating on a GPU give what they give on the CPU, up to rounding."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from lib.commands import acsgd
from lib.model_types import TYPES
from lib.models import LLAMA_SHAPE, blocks_of, tiny_config
from lib.resume import HALF, losses_of, stopped_half_way, train_ranks
from lib.resume import make_config as make_saved_config
from lib.training import RELATIVE, losses_of_rank, make_config, schedule_of
from lib.typed_runs import Runs, result_of, splits, train_run

from acsgd.codecs import CODECS, parse
from acsgd.commands.evaluation import command
from acsgd.config.options import AdapterConfig, Config, RunConfig
from acsgd.dp.sync import SingleReplicaSync
from acsgd.launch import Launch
from acsgd.layers.composed import ComposedModel
from acsgd.model_classes import MODEL_CLASSES
from acsgd.optim import OPTIMIZERS
from acsgd.pp.chunked_loss import HeadLoss
from acsgd.pp.stage import MicroBatch, Stage
from acsgd.shards.load import LayerLoader, RandomWeights
from acsgd.streams import open_streams
from acsgd.tasks import TASKS

Device = Literal["cpu", "cuda"]
TinyModel = Callable[..., Path]
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ROUNDING = {"fp32": 10 * RELATIVE, "bf16": 2.0**-6, "fp16": 2.0**-9}
"""Largest relative difference of losses after a few steps.

In fp32, sums in another order: RELATIVE is the bound for other divisions of a model, and the kernels of a GPU sum in
more ways. In 16 bits, four units of rounding, since the same sums are rounded at other places."""
HAS_8BIT = importlib.util.find_spec("bitsandbytes") is not None
PROMPTS = ("The statement of the list", "x =", "for", "and so on: 1, 2, 3")


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no product of fp32 be rounded to TF32, as convolutions are by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def on(device: Device, config: Config) -> Config:
    """Return a run on a device, in a directory of its own."""
    log = dataclasses.replace(config.log, dir=str(Path(config.log.dir).with_name(device)))
    return dataclasses.replace(config, run=RunConfig(device=device), log=log)


def assert_same_losses(config: Config, tmp_path: Path, bound: float = ROUNDING["fp32"]) -> None:
    """Train on both devices and compare the losses."""
    on_cpu, on_gpu = losses_of_rank(0, 1, tmp_path / "store", [on("cpu", config), on("cuda", config)])
    assert on_gpu == pytest.approx(on_cpu, rel=bound)
    assert len({*on_cpu}) == len(on_cpu), "a training that changes something"


@pytest.mark.parametrize("model_type", TYPES)
def test_every_type_of_model_trains_evaluates_and_saves(model_type: str, tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    config = runs.add(model_type, next(iter(splits(model_type))))
    alone = dataclasses.replace(config.pp, stages=1, layers=None, schedule="1f1b")
    results = []
    for device in ("cpu", "cuda"):
        of_device = on(device, dataclasses.replace(config, pp=alone))  # type: ignore[arg-type]
        train_run(of_device, Launch(), dist.FileStore(str(tmp_path / f"store-{device}"), 1))
        results.append(result_of(of_device))
    on_cpu, on_gpu = results
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=ROUNDING["fp32"])
    assert on_gpu.eval_loss == pytest.approx(on_cpu.eval_loss, rel=ROUNDING["fp32"])


@pytest.mark.parametrize("recompute", ["none", "layers"])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_precisions_and_recomputation(dtype: Any, recompute: Any, tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_config(tiny_model("llama", **blocks_of("llama", 2)), tmp_path)
    model = dataclasses.replace(config.model, dtype=dtype, recompute=recompute)
    assert_same_losses(dataclasses.replace(config, model=model), tmp_path, ROUNDING[dtype])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    if name == "adamw8bit" and not HAS_8BIT:
        pytest.skip("no bitsandbytes")
    config = make_config(tiny_model("llama", **blocks_of("llama", 2)), tmp_path)
    optim = dataclasses.replace(config.optim, name=name, schedule=schedule_of(name))
    bound = {"adamw8bit": 1e-3, "lion": 1e-3, "muon": 1e-3}.get(
        name, ROUNDING["fp32"]
    )  # codes, signs and bf16 products
    assert_same_losses(dataclasses.replace(config, optim=optim), tmp_path, bound)


@pytest.mark.parametrize(
    "spec",
    ["lora:r=4,alpha=8", "lora:r=4,alpha=8,dora=true", "ia3", "prompt_tuning:tokens=5", "prefix_tuning:tokens=5"],
)
def test_adapters(spec: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_config(tiny_model("llama", **blocks_of("llama", 2)), tmp_path)
    optim = dataclasses.replace(config.optim, lr=1e-2)
    assert_same_losses(dataclasses.replace(config, adapter=AdapterConfig(spec), optim=optim), tmp_path)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_adapters_on_a_quantized_base(quantize: Any, tiny_model: TinyModel, tmp_path: Path) -> None:
    if not HAS_8BIT:
        pytest.skip("no bitsandbytes")
    sizes = {"hidden_size": 64, "intermediate_size": 128}  # rows of whole blocks of bitsandbytes
    config = make_config(tiny_model("llama", **blocks_of("llama", 2), **sizes), tmp_path)
    model = dataclasses.replace(config.model, quantize=quantize)
    lora = AdapterConfig("lora:r=4,alpha=8")
    assert_same_losses(dataclasses.replace(config, model=model, adapter=lora), tmp_path, 1e-3)


def test_a_checkpoint_of_one_device_resumes_on_the_other(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_saved_config(tiny_model(**blocks_of("gpt2", 2)), tmp_path / "run", "fp32", "none")
    whole: dict[Device, Config] = {"cpu": on("cpu", config), "cuda": on("cuda", config)}
    train_ranks(0, 1, tmp_path / "store", [*whole.values()])
    others: dict[Device, Device] = {"cpu": "cuda", "cuda": "cpu"}
    for device, other in others.items():
        resumed = stopped_half_way(whole[device], tmp_path / f"resumed on {other}")
        resumed = dataclasses.replace(resumed, run=RunConfig(device=other))
        (batches,) = train_ranks(0, 1, tmp_path / f"store-{other}", [resumed])
        assert batches[0][0] == HALF
        assert losses_of(resumed) == pytest.approx(losses_of(whole["cpu"]), rel=ROUNDING["fp32"])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_generated_texts_and_evaluations(family: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    model, source = tiny_model(family, **blocks_of(family, 2)), tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    texts, losses = [], []
    for device in ("cpu", "cuda"):
        out = tmp_path / f"{device}.jsonl"
        options = ("--max-new-tokens", 12, "--batch", 2, "--device", device)
        code, printed = acsgd("generate", model, "--file", source, "--out", out, *options)
        assert code == 0, printed
        texts.append([json.loads(line)["generated_text"] for line in out.read_text().splitlines()])
        found, data = io.StringIO(), ("--data", source, "--format", "text", "--fields", "text=prompt")
        with contextlib.redirect_stdout(found):
            arguments = [str(model), *map(str, data), "--sequence", "16", "--device", device, "--json"]
            command.main(arguments, Launch(), prog="acsgd eval", end=sys.exit)
        losses.append(json.loads(found.getvalue())["metrics"]["eval_loss"])
    assert texts[0] == texts[1]
    assert losses[1] == pytest.approx(losses[0], rel=ROUNDING["fp32"])


@pytest.mark.parametrize("spec", [*CODECS, "fixpoint:bits=4", "fixpoint:bits=2,scale=l2,clip=16", "lloyd:bits=2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codecs(spec: str, dtype: torch.dtype) -> None:
    """The ends of a link may have different devices: fields are equal, and decode to the same bits."""
    codec = parse(spec)
    x = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    on_cpu, on_gpu = codec.encode(x), codec.encode(x.cuda())
    decoded = codec.decode(on_cpu, tuple(x.shape), dtype)
    assert (decoded.double() - x.double()).abs().le(codec.error_bound(x)).all()
    assert (
        codec.decode(on_gpu, tuple(x.shape), dtype).cpu().double().sub(x.double()).abs().le(codec.error_bound(x)).all()
    )
    assert torch.equal(codec.decode(tuple(field.cuda() for field in on_cpu), tuple(x.shape), dtype).cpu(), decoded)
    for a, b in zip(on_cpu, on_gpu, strict=True):
        assert torch.equal(a, b.cpu())


def make_stage(device: torch.device, logits_at_once: int) -> Stage:
    """Return a stage with all layers of a Llama whose logits are larger than its head."""
    config = tiny_config("llama", vocab_size=32768, **LLAMA_SHAPE | blocks_of("llama", 1))
    task = MODEL_CLASSES["lm"]
    description, model = task.layers(config), task.build(config)
    source = RandomWeights(task, config, description, seed=0)
    loader = LayerLoader(model, description, source, device=device, dtype=torch.float32)
    layers = [loader.load(index) for index in range(len(description.layers))]
    sync = SingleReplicaSync([weight for layer in layers for weight in layer.weights])
    composed = ComposedModel(model, description)
    return Stage(composed, HeadLoss(TASKS["lm"], logits_at_once=logits_at_once), layers, sync, seed=0, targets=64 * 64)


def test_a_loss_in_chunks_takes_less_memory() -> None:
    """In a quarter of the logits, which a GPU would compute at once in a run, so that the test needs little memory."""
    device, peaks, results = torch.device("cuda", 0), [], []
    streams, logits = open_streams("cuda", 0), 64 * 64 * 32768
    tokens = torch.randint(32768, (64, 64), generator=torch.Generator().manual_seed(0)).to(device)
    for at_once in (logits // 4, logits):
        stage = make_stage(device, at_once)
        torch.cuda.reset_peak_memory_stats(device)
        loss = stage.forward(MicroBatch(0, 0, 0, tuple(range(64))), {"input_ids": tokens}, {}, tokens)["loss"]
        stage.backward(0, None, last=True)
        peaks.append(streams.peak_memory_bytes())
        results.append([loss, *(weight.master.grad for weight in stage.weights)])
    assert 4 * logits < peaks[1]
    assert peaks[0] < peaks[1] / 2
    for chunked, whole in zip(*results, strict=True):
        assert (chunked - whole).norm() <= ROUNDING["fp32"] * whole.norm()
