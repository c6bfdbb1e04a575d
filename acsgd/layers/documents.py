"""Several documents per sequence: attention stays within each, and positions start at 0 in each."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, and_masks

DOCUMENTS = "documents"
"""Input of a model, by which documents are told apart: integers [B, T], equal for the tokens of one document, which lie
side by side. Not passed to forward."""

_WITH_MASKS = ("sdpa", "eager")
"""Implementations of attention that take a mask; flash attention finds documents in position_ids."""


@contextlib.contextmanager
def apart(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Context in which masks that transformers builds keep documents apart; yields the arguments of forward."""
    arguments = dict(inputs)
    documents = arguments.pop(DOCUMENTS, None)
    if documents is None:
        yield arguments
        return
    if "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = positions(documents)
    masks = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in _WITH_MASKS}
    try:
        for name, build in masks.items():
            ALL_MASK_ATTENTION_FUNCTIONS[name] = _within_documents(build, documents)
        yield arguments
    finally:
        for name, build in masks.items():
            ALL_MASK_ATTENTION_FUNCTIONS[name] = build


def positions(documents: Tensor) -> Tensor:
    """Return the position of each token in its document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - (index * is_first).cummax(dim=1).values


def _within_documents(build: Callable[..., Any], documents: Tensor) -> Callable[..., Any]:
    """Return what builds a mask that also demands that query and key are in one document."""

    def is_same(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return documents[batch, query] == documents[batch, key]

    def build_within(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> Any:
        mask_function = and_masks(mask_function, is_same)
        return build(*args, mask_function=mask_function, **kwargs | {"allow_is_causal_skip": False})

    return build_within
