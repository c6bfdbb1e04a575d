"""Whether results of rows depend on the padding behind them, as those of a model with Fourier transforms do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from acsgd.layers.batch import Lengths, cut
from acsgd.layers.compare import ComparedStages, InputTensors

APART = 1e-3
"""Largest difference of logits that must not depend on other documents, later tokens or padding. Sums have another
order."""
LIMITS = ("expert_capacity", "block_per_row")
"""Options of a config that limit how many tokens are computed, in Switch Transformers, NLLB-MoE and MRA."""
SHORTER = 2
"""Tokens that the second row has less than the first."""


def ignores_padding(
    stages: ComparedStages, batch: InputTensors, inputs: Mapping[str, Sequence[str]], predicted: str | None
) -> bool:
    """Whether padded rows have the same logits when they are cut to the longest row.

    batch: without padding; inputs, predicted: as in `verify`. The rows become as short as a fourth of it, since
    sliding windows may hide a difference.
    """
    full = _lengths_of(batch, inputs)
    for parts in (3, 1):
        lengths = Lengths(*(length * parts // 4 for length in full))
        padded = _pad(stages.whole.config, batch, inputs, lengths)
        shorter = {name: cut(x, inputs[name], lengths) for name, x in padded.items()}
        try:
            with torch.no_grad():
                logits = [stages.run_whole(each) for each in (padded, shorter)]
        except Exception:  # raised in transformers' code, which may need rows of a minimum length
            return False
        kept = None if predicted is None else getattr(lengths, inputs[predicted][1])
        if not all(map(_is_close, *(_of_rows(each, kept) for each in logits))):
            return False
    return True


def depends_on_length(config: PreTrainedConfig, sequence: int) -> bool:
    """Whether a model computes otherwise for short batches than for those of `sequence` tokens, by its config.

    A comparison on a small scale does not show it: block-sparse attention is for long batches only or has more blocks
    in these, experts take a limited number of tokens, and some rotary frequencies change beyond the length of the
    pretraining.
    """
    parts = [config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))]
    for part in parts:
        if getattr(part, "attention_type", None) == "block_sparse" or any(getattr(part, name, None) for name in LIMITS):
            return True
    return any(
        sequence > (rope.get("original_max_position_embeddings") or getattr(part, "max_position_embeddings", None) or 0)
        for part in parts
        for rope in _ropes(getattr(part, "rope_parameters", None))
        if "dynamic" in str(kind := rope.get("rope_type")) or kind == "longrope"
    )


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield the parameters of rotary embeddings, of which a model has one set, or one for each type of layer."""
    if isinstance(parameters, dict):
        yield parameters
        for value in parameters.values():
            yield from _ropes(value)


def _lengths_of(batch: InputTensors, inputs: Mapping[str, Sequence[str]]) -> Lengths:
    sizes = {size: length for name, x in batch.items() for size, length in zip(inputs[name], x.shape, strict=True)}
    return Lengths(**{size: length for size, length in sizes.items() if size in Lengths._fields})


def _pad(
    config: PreTrainedConfig, batch: InputTensors, inputs: Mapping[str, Sequence[str]], lengths: Lengths
) -> InputTensors:
    """Return the batch with padding behind `lengths`, and rows of which each is shorter than the one before.

    Each ends with an end of sequence, for which some classifiers look.
    """
    text = config.get_text_config()
    padding, end = getattr(text, "pad_token_id", None) or 0, getattr(text, "eos_token_id", None)
    padded = {}
    for name, x in batch.items():
        stop = getattr(lengths, inputs[name][1]) - SHORTER * torch.arange(len(x))[:, None]
        place = torch.arange(x.shape[1])
        if name.endswith("input_ids"):
            if isinstance(end, int):
                x = x.masked_fill(place == stop - 1, end)
            padded[name] = x.masked_fill(place >= stop, padding)
        else:
            padded[name] = x.masked_fill(place >= stop, 0)
    return padded


def _of_rows(logits: Tensor, length: int | None) -> list[Tensor]:
    """Return the logits of each row, of its tokens if there is a length, which is that of the first row."""
    return [row if length is None else row[: length - SHORTER * index] for index, row in enumerate(logits)]


def _is_close(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=APART, atol=APART)
