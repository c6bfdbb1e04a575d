"""Names and forms of tensors in Hugging Face files, which differ from those of the model for many types of models.

transformers stores the experts of a mixture one by one, for example, and computes with all of them stacked. Its own
conversion is used here, for some tensors at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from acsgd.model_classes import UNTIED


class Conversion(NamedTuple):
    """Tensors in files, and how they become tensors of the model."""

    target: str
    """Name in the model; of several tensors, the first."""
    names: tuple[str, ...]
    """Names in the files."""
    patterns: tuple[str, ...]
    """Pattern of the converter that each name matches."""
    converter: WeightConverter | None
    """None for one tensor that is stored as it is."""

    def convert(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the model, by name. tensors: by name in the files, also on the meta device.

        Raises errors of many classes if the tensors do not fit the model.
        """
        if self.converter is None:
            return {self.target: tensors[self.names[0]]}
        converter: Any = copy.deepcopy(self.converter)  # declared to take futures alone
        for name, pattern in zip(self.names, self.patterns, strict=True):
            converter.add_tensor(self.target, name, pattern, tensors[name])
        converted = converter.convert(self.target, model=model, config=model.config)
        return {key: each[0] if isinstance(each, list) else each for key, each in converted.items()}


def conversions(model: PreTrainedModel, names: Iterable[str]) -> tuple[list[Conversion], list[str]]:
    """Return how tensors in files become those of a model, and the names of tensors that the model does not have."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, known = model.base_model_prefix, model.state_dict()
    found: dict[str, Conversion] = {}
    unknown = []
    for name in sorted(names, key=dot_natural_key):  # some renamings depend on what was renamed before
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target not in known:
            unknown.append(name)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        before = found.get(target, Conversion(target, (), (), converter))
        found[target] = before._replace(names=(*before.names, name), patterns=(*before.patterns, pattern or ""))
    return list(found.values()), unknown


def to_files(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model under the names and in the forms in which transformers stores them.

    All tensors of a block must be given at once. A tied parameter, stored once, gets the name that transformers keeps;
    what transformers computes instead of saving it is left out.
    """
    computed = model._keys_to_ignore_on_save or ()
    untied = getattr(model.config, UNTIED, ())
    tied = {name: original for name, original in model.all_tied_weights_keys.items() if name not in untied}
    return dict(
        revert_weight_conversion(
            model, {_original(name, tied): each for name, each in tensors.items() if name not in computed}
        )
    )


def names_in_files(model: PreTrainedModel, target: str) -> dict[str, torch.Size]:
    """Return the names and shapes of the tensors in files from which a tensor of a model is made."""
    in_files = to_files(model, {name: tensor.to("meta") for name, tensor in model.state_dict().items()})
    made = {each.target: each for each in conversions(model, in_files)[0]}
    return {name: in_files[name].shape for name in made[target].names}


def _original(name: str, tied: Mapping[str, str]) -> str:
    """Return the name of a parameter whose values a tied one takes."""
    while name in tied:
        name = tied[name]
    return name
