"""Laws of what a run needs of the memory, and of when it is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lib.training import make_config

from acsgd.config.options import AdapterConfig, Config
from acsgd.launch import Launch
from acsgd.run.job import prepare
from acsgd.run.limits import ParameterCount, check_memory
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


@pytest.mark.parametrize(
    ("count", "dtype", "trains", "expected"),
    [
        (ParameterCount(100, 0), torch.float32, True, 800),
        (ParameterCount(100, 0), torch.float32, False, 400),
        (ParameterCount(100, 0), torch.bfloat16, True, 1000),  # fp32 master, bf16 copy, fp32 gradient
        (ParameterCount(10, 1000), torch.float32, True, 4080),
        (ParameterCount(10, 1000), torch.float16, True, 2100),
    ],
)
def test_a_run_is_refused_if_it_needs_more_than_the_memory(
    count: ParameterCount, dtype: torch.dtype, trains: bool, expected: int
) -> None:
    assert count.needed_bytes(dtype, trains=trains) == expected
    check_memory(count, dtype, 2, 4, HostOf(2 * expected), trains=trains)
    with pytest.raises(ValueError, match=r"need at least 0 GiB on this host with pp.stages=2"):
        check_memory(count, dtype, 2, 4, HostOf(2 * expected - 1), trains=trains)
