"""Attention masks other than the model's own: several documents per sequence, and prefixes with full attention."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DOCUMENTS = "documents"
"""Input of a model with the document of each token: integers [B, T], equal for the tokens of one document, which lie
side by side; attention stays within each, and positions start at 0 in each. Not passed to forward."""
PREFIXES = "prefixes"
"""Input of a causal model, with the tokens that attend to each other in both directions: integers [B, T], equal for the
tokens of one prefix, NO_PREFIX for all others. Not passed to forward."""
NO_PREFIX = -1

_WITH_MASKS = ("sdpa", "eager")
"""Implementations of attention that take a mask; flash attention finds documents in position_ids."""

Mask = Callable[..., Any]
"""Function of the indices of batch, head, query and key: whether the query attends to the key."""


@contextlib.contextmanager
def masked(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Context in which the masks that transformers builds follow DOCUMENTS and PREFIXES; yields forward's arguments."""
    from transformers import masking_utils  # takes a second

    arguments = dict(inputs)
    documents, prefixes = arguments.pop(DOCUMENTS, None), arguments.pop(PREFIXES, None)
    if documents is not None and "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = positions(documents)

    def change(mask: Mask) -> Mask:
        if prefixes is not None:
            mask = masking_utils.or_masks(mask, masking_utils.blockwise_overlay(prefixes))
        return mask if documents is None else masking_utils.and_masks(mask, _within(documents))

    find_packed = masking_utils.find_packed_sequence_indices

    def find_unknown(position_ids: Tensor) -> Tensor | None:
        """Do not let the host wait for the device to see positions whose sequences are known."""
        base = position_ids._base
        is_known = documents is not None or (base is not None and base.dim() == 1)  # else they may depend on inputs
        return None if is_known else find_packed(position_ids)

    builders = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    is_changed = documents is not None or prefixes is not None
    originals = {name: builders[name] for name in _WITH_MASKS if is_changed}
    try:
        masking_utils.find_packed_sequence_indices = find_unknown
        for name, build in originals.items():
            builders[name] = _with_change(build, change)
        yield arguments
    finally:
        masking_utils.find_packed_sequence_indices = find_packed
        for name, build in originals.items():
            builders[name] = build


def positions(documents: Tensor) -> Tensor:
    """Return the position of each token in its document."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_first = torch.ones_like(documents, dtype=torch.bool)
    is_first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - (index * is_first).cummax(dim=1).values


def _within(documents: Tensor) -> Mask:
    """Return the mask of pairs of tokens in one document."""
    return lambda batch, head, query, key: documents[batch, query] == documents[batch, key]


def _with_change(build: Callable[..., Any], change: Callable[[Mask], Mask]) -> Callable[..., Any]:
    """Return what builds a mask that was changed."""

    def build_changed(*args: Any, mask_function: Mask, **kwargs: Any) -> Any:
        return build(*args, mask_function=change(mask_function), **kwargs | {"allow_is_causal_skip": False})

    return build_changed
