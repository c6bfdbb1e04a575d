"""Check of tensors that were read from a file against what they must be, before their use."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from acsgd.errors import CorruptFileError
from acsgd.shards.layer_tensors import LayerTensors

FLOATING = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
"""Dtypes of the weights of a converted model; those of a checkpoint are fp32, or bf16 without masters."""


class Expected(NamedTuple):
    """What a tensor must be."""

    shape: tuple[int, ...] | None
    """None = any."""
    required: bool = True
    is_trained: bool = True
    """Whether its dtype and its values matter: constants of a model may be integers or infinite."""
    non_negative: bool = False
    may_be_nan: bool = False
    dtype: torch.dtype | None = None
    """None = one of those that the file may have."""


ANY = Expected(None, required=False, may_be_nan=True)
"""A tensor that nothing is known of."""


def expected_tensors(stored: LayerTensors) -> dict[str, Expected]:
    """Return what the tensors of a layer must be."""
    weights = {key: Expected(tuple(weight.shape)) for key, weight in stored.weights.items()}
    return weights | {key: Expected(tuple(x.shape), is_trained=False) for key, x in stored.constants.items()}


def check_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Expected],
    dtypes: Collection[torch.dtype],
    *,
    is_complete: bool,
) -> None:
    """Raise CorruptFileError if tensors are not as expected. is_complete: whether `expected` lists all of them."""
    if missing := [key for key, each in expected.items() if each.required and key not in tensors]:
        raise CorruptFileError(path, f"is invalid: it lacks {first_names(missing)}")
    if is_complete and (unknown := [key for key in tensors if key not in expected]):
        raise CorruptFileError(path, f"is invalid: it holds {first_names(unknown)}, which the run did not save")
    for key, tensor in tensors.items():
        if problem := _problem(tensor, expected.get(key, ANY), dtypes):
            raise CorruptFileError(path, f"is invalid: {key} {problem}")


def _problem(tensor: Tensor, expected: Expected, dtypes: Collection[torch.dtype]) -> str | None:
    """Return what is wrong with a tensor, None if nothing is."""
    if expected.shape is not None and tensor.shape != expected.shape:
        return f"has shape {list(tensor.shape)}, expected {list(expected.shape)}"
    if not expected.is_trained:
        return None
    dtypes = dtypes if expected.dtype is None else {expected.dtype}
    if tensor.dtype not in dtypes:
        return f"has dtype {_name(tensor.dtype)}, expected {' or '.join(sorted(map(_name, dtypes)))}"
    if not tensor.numel():
        return None
    if expected.may_be_nan:
        return "has infinite values" if tensor.isinf().any() else None
    lowest, highest = tensor.aminmax()  # NaN if any value is; one pass without a temporary tensor
    if not (lowest.isfinite() and highest.isfinite()):
        return "has values that are not finite"
    return "has negative values" if expected.non_negative and lowest < 0 else None


def describe_lost(directory: Path, names: Sequence[str]) -> str:
    """Return a sentence on parameters of a model that are not among the tensors of its directory."""
    return f"{directory} lacks parameters of the model: {first_names(names)}; give weights and config.json of one model"


def first_names(names: Sequence[str]) -> str:
    """List the first 3 names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
