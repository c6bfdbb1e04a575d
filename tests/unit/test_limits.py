"""Laws of what a run needs of the memory, and of when it is refused."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.models import TINY
from lib.training import make_config
from torch import Tensor
from transformers import AutoConfig

from acsgd.config.options import AdapterConfig, Config
from acsgd.launch import Launch
from acsgd.layers.quantize import QuantizedFormat, is_quantized, quantize
from acsgd.run.plan import job
from acsgd.run.plan.job import prepare
from acsgd.run.plan.limits import ParameterCount, check_memory
from acsgd.run.plan.model import open_run_model
from acsgd.streams import Streams

TinyModel = Callable[..., Path]


class HostOf(Streams):
    """A host with some number of bytes of memory."""

    def __init__(self, size: int) -> None:
        super().__init__(torch.device("cpu"))
        self.size = size

    def memory_bytes(self) -> int:
        return self.size


def count_of(config: Config) -> ParameterCount:
    return prepare(config, Launch()).model.parameters


def test_gradients_are_counted_for_trained_parameters_alone(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = make_config(tiny_model("llama", num_hidden_layers=2), tmp_path)
    whole = count_of(config)
    assert whole.frozen == 0
    adapter = AdapterConfig("lora:r=4,targets=q_proj")
    with_lora = count_of(dataclasses.replace(config, adapter=adapter))
    model = prepare(config, Launch()).model.build(torch.float32)
    q_proj = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert with_lora == ParameterCount(2 * 4 * (q_proj.in_features + q_proj.out_features), whole.trained)
    freeze = dataclasses.replace(config.model, freeze="model.*")
    frozen = count_of(dataclasses.replace(config, model=freeze))
    assert frozen == ParameterCount(model.lm_head.weight.numel(), whole.trained - model.lm_head.weight.numel())
    head = dataclasses.replace(config.model, freeze="model.layers.*,lm_head.*")
    evaluated = open_run_model(dataclasses.replace(config, model=head), Launch(), HostOf(2**40), trains=False)
    blocks = {key for key, _ in model.named_parameters() if key.startswith("model.layers.")}
    assert {*evaluated.description.frozen} == blocks, "without gradients, the last layer counts as trained"


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_quantized_layers_are_counted_by_their_bytes(
    quantization: QuantizedFormat, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra 8bit is not installed")
    model = tiny_model("llama", num_hidden_layers=2, hidden_size=64, intermediate_size=128)
    plain = dataclasses.replace(make_config(model, tmp_path), adapter=AdapterConfig("lora:r=4"))
    config = dataclasses.replace(plain, model=dataclasses.replace(plain.model, quantize=quantization))
    job, full = prepare(config, Launch()), count_of(plain)
    built, count = job.model.build(job.shapes.dtype), job.model.parameters
    on_meta = {key: param for key, param in built.named_parameters() if is_quantized(param)}
    assert len(on_meta) == 2 * 7
    assert count == full._replace(
        quantized=sum(param.numel() for param in on_meta.values()),
        quantized_bytes=sum(bytes_of(key, param) for key, param in on_meta.items()),
    )
    needed = count.needed_bytes(job.shapes.dtype, has_masters=False)
    assert (
        needed == full.needed_bytes(job.shapes.dtype, has_masters=False) - 4 * count.quantized + count.quantized_bytes
    )
    monkeypatch.setattr(Streams, "memory_bytes", lambda self: needed)
    prepare(dataclasses.replace(config, run=dataclasses.replace(config.run, memory="ignore")), Launch())
    with pytest.raises(ValueError, match="weights need at least"):
        prepare(plain, Launch())


def bytes_of(key: str, meta: Tensor) -> int:
    """Return the bytes of the tensors of a quantized parameter."""
    param: Any = quantize(meta, torch.randn(meta.shape), key, device=torch.device("cpu"), dtype=torch.float32)
    state = getattr(param, "quant_state", None)
    parts = [param, param.SCB] if state is None else [param, state.absmax, state.code]
    return sum(part.nbytes for part in parts)


@pytest.mark.parametrize(
    ("count", "dtype", "has_masters", "trains", "expected"),
    [
        (ParameterCount(100, 0), torch.float32, False, True, 800),
        (ParameterCount(100, 0), torch.float32, False, False, 400),
        (ParameterCount(100, 0), torch.float32, True, True, 1200),
        (ParameterCount(100, 0), torch.bfloat16, True, True, 1000),  # fp32 master, bf16 copy, fp32 gradient
        (ParameterCount(100, 0), torch.bfloat16, False, True, 600),
        (ParameterCount(10, 1000), torch.float32, False, True, 4080),
        (ParameterCount(10, 1000), torch.float16, True, True, 2100),
    ],
)
def test_a_run_is_refused_if_it_needs_more_than_the_memory(
    count: ParameterCount, dtype: torch.dtype, has_masters: bool, trains: bool, expected: int
) -> None:
    assert count.needed_bytes(dtype, has_masters=has_masters, trains=trains) == expected
    check = partial(check_memory, count, dtype, 2, 4, has_masters=has_masters, trains=trains)
    check(streams=HostOf(2 * expected))
    with pytest.raises(ValueError, match=r"need at least 0 GiB on this host with pp.stages=2"):
        check(streams=HostOf(2 * expected - 1))


def test_operations_are_counted_once_in_a_process(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, calls = make_config(tiny_model("llama", num_hidden_layers=2), tmp_path), []
    monkeypatch.setattr(job, "token_flops", lambda *args: calls.append(args) or 5e6)
    assert prepare(config, Launch()).model.token_flops == 0, "of no use: the peak of a CPU is not known"
    monkeypatch.setattr(Streams, "peak_flops", lambda self, dtype: 7e12)
    assert prepare(config, Launch(), trains=False).model.token_flops == 0
    first = prepare(config, Launch())
    assert prepare(config, Launch(), model=first.model).model.token_flops == 5e6, "as in each view of an elastic run"
    assert len(calls) == 1


def test_a_model_without_sdpa_is_refused_with_what_to_type(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    AutoConfig.for_model("gemma2", **TINY["llama"]).save_pretrained(model)
    config = make_config(model, tmp_path)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="sdpa", init="scratch"))
    with pytest.raises(ValueError, match=r"attention=sdpa: gemma2 has no sdpa; use --model\.attention eager"):
        prepare(config, Launch())
