"""The initial adapter of a run."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from acsgd.adapters.inject import is_of_adapter
from acsgd.config.options import Config
from acsgd.launch import Launch
from acsgd.run.inputs import open_weight_source
from acsgd.run.job import prepare
from acsgd.shards.layer_tensors import layer_tensors


def initial_adapter(config: Config) -> dict[str, Tensor]:
    """Return the initial parameters of a run's adapter."""
    job = prepare(dataclasses.replace(config, pp=dataclasses.replace(config.pp, stages=1, layers=None)), Launch())
    model, source, layers = job.model.build(torch.float32), open_weight_source(job), job.model.description
    stored = [(layer.name, layer_tensors(model, layers, layer.index)) for layer in layers.layers]
    tensors = {key: x for name, each in stored for key, x in source.tensors(name, each).items()}
    return {key: tensor for key, tensor in tensors.items() if is_of_adapter(key)}
