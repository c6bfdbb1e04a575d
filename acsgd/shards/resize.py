"""A model with rows of embedding and head for all tokens of its tokenizer, as `resize_token_embeddings` adds them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from acsgd.layers.skeleton import set_buffer, set_tied_parameter
from acsgd.model_classes import UNTIED, ModelClass
from acsgd.shards.check import first_names
from acsgd.shards.files import blame
from acsgd.shards.hf_model import HFModel, names_of, tensor_of
from acsgd.shards.tokenizer import read_tokenizer


@dataclass(frozen=True)
class ResizedModel:
    """A model in the files of a Hugging Face directory with other tables. An `OpenedModel`."""

    opened: HFModel
    config: PreTrainedConfig
    model: PreTrainedModel
    """The model with its new shapes, its parameters on the meta device."""
    tables: Mapping[str, Tensor]
    """Parameters and buffers whose shapes are new, by name."""

    @property
    def new(self) -> Collection[str]:
        """Parameters of a new head, which the files lack."""
        return self.opened.new

    def read(self, names: Collection[str]) -> dict[str, Tensor]:
        """See HFModel."""
        found = self.opened.read([name for name in names if name not in self.tables])
        return found | {name: self.tables[name] for name in names if name in self.tables}

    def path_of(self, name: str) -> Path:
        """See HFModel."""
        return self.opened.path_of(name)

    def bytes_of(self, name: str) -> int:
        """See HFModel."""
        return self.tables[name].nbytes if name in self.tables else self.opened.bytes_of(name)


def resize(opened: HFModel, directory: Path, model_class: ModelClass) -> ResizedModel | None:
    """Add rows for the tokens of the tokenizer in a directory; None if there are no more tokens than rows.

    The values are those of transformers after torch.manual_seed(0). Raises ValueError if transformers cannot do it.
    """
    tokenizer, rows = read_tokenizer(directory, opened.config), opened.config.get_text_config().vocab_size
    if (tokens := len(tokenizer)) <= rows:
        return None
    if hasattr(opened.config, UNTIED):
        untied = first_names(getattr(opened.config, UNTIED))
        raise ValueError(f"{directory}: {untied} is not tied as by its class, so that transformers cannot add rows")
    config = copy.deepcopy(opened.config)
    config.get_text_config().vocab_size = tokens
    resized, model, names = model_class.build(config), model_class.build(opened.config), names_of(opened.model)
    tables = [key for key in names if tensor_of(resized, key).shape != tensor_of(model, key).shape]
    for key, tensor in opened.read([key for key in tables if key not in opened.new]).items():
        if key in dict(model.named_parameters()):
            set_tied_parameter(model, names[key], nn.Parameter(tensor.clone()))
        else:
            set_buffer(model, key, tensor)
    problem = f"holds a {type(model).__name__} to which transformers cannot add rows"
    with blame(directory, problem, "give another model"), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model.resize_token_embeddings(tokens)
        made = {key: tensor_of(model, key).detach() for key in tables if key not in opened.new}
        if wrong := [key for key, tensor in made.items() if tensor.shape != tensor_of(resized, key).shape]:
            raise ValueError(f"{wrong[0]} gets the shape {list(made[wrong[0]].shape)}")
    return ResizedModel(opened, config, resized, made)
